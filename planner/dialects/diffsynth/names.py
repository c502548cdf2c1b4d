"""DiffSynth-Studio's names, read at fed7b18: folders, layers, files of models, optimizers, launch configs."""

from __future__ import annotations

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue

AT = "DiffSynth-Studio fed7b18"
SHIPPED: dict[str, Settings] = {
    "model_training/full/accelerate_config_14B.yaml": {
        "launch:--use_deepspeed": True,
        "launch:--zero_stage": 2,
        "launch:--offload_optimizer_device": "cpu",
        "launch:--offload_param_device": "cpu",
        "launch:--mixed_precision": "bf16",
        "launch:--num_processes": 8,
    },
    "model_training/full/accelerate_config.yaml": {
        "launch:--use_deepspeed": True,
        "launch:--zero_stage": 2,
        "launch:--mixed_precision": "bf16",
        "launch:--num_processes": 8,
    },
    "low_vram_training/deepspeed_zero3_cpuoffload.yaml": {
        "launch:--use_deepspeed": True,
        "launch:--zero_stage": 3,
        "launch:--offload_optimizer_device": "cpu",
        "launch:--offload_param_device": "cpu",
        "launch:--num_processes": 1,
    },
    "model_training/full/accelerate_config_zero3.yaml": {
        "launch:--use_deepspeed": True,
        "launch:--zero_stage": 3,
        "launch:--mixed_precision": "bf16",
        "launch:--num_processes": 8,
    },
    "model_training/full/accelerate_config_zero2offload.yaml": {
        "launch:--use_deepspeed": True,
        "launch:--zero_stage": 2,
        "launch:--offload_optimizer_device": "cpu",
        "launch:--mixed_precision": "bf16",
        "launch:--num_processes": 8,
    },
}
"""What its own accelerate configs say (examples/*/model_training/full)."""

FOLDERS = {
    "wan": "wanvideo",
    "flux": "flux",
    "flux2": "flux2",
    "qwen-image": "qwen_image",
    "z-image": "z_image",
    "ltx2": "ltx2",
    "krea2": "krea2",
}
"""Family -> folder of its example."""

_UMT5 = "models_t5_umt5-xxl-enc-bf16.pth"
_CLIP = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
_WEIGHTS = "diffusion_pytorch_model*.safetensors"
_T2V = (_WEIGHTS, _UMT5, "Wan2.1_VAE.pth")
REPOSITORIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "wan2.1-t2v-1.3b": ("Wan-AI/Wan2.1-T2V-1.3B", _T2V),
    "wan2.1-t2v-14b": ("Wan-AI/Wan2.1-T2V-14B", _T2V),
    "wan2.1-i2v-14b-480p": ("Wan-AI/Wan2.1-I2V-14B-480P", (*_T2V, _CLIP)),
    "wan2.1-i2v-14b-720p": ("Wan-AI/Wan2.1-I2V-14B-720P", (*_T2V, _CLIP)),
    "wan2.1-vace-1.3b": ("Wan-AI/Wan2.1-VACE-1.3B", _T2V),
    "wan2.1-vace-14b": ("Wan-AI/Wan2.1-VACE-14B", _T2V),
    "wan2.2-ti2v-5b": ("Wan-AI/Wan2.2-TI2V-5B", (_WEIGHTS, _UMT5, "Wan2.2_VAE.pth")),
    "wan2.2-i2v-a14b": ("Wan-AI/Wan2.2-I2V-A14B", _T2V),
    "wan2.2-t2v-a14b": ("Wan-AI/Wan2.2-T2V-A14B", _T2V),
}
"""Model -> repository and files, the transformer's first (examples/wanvideo/model_training/lora/*.sh)."""

BASE = "dit"
UNETS = ("stable_diffusion", "stable_diffusion_xl")
"""Folders of the examples whose base model is called `unet`."""

_VACE_PARTS = ("vace_blocks", "vace_patch_embedding")
TRAINABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "vace": {"wan2.1-vace-1.3b": _VACE_PARTS, "wan2.1-vace-14b": _VACE_PARTS},
    "animate_adapter": {
        "wan2.2-animate-14b": ("pose_patch_embedding", "motion_encoder", "face_encoder", "face_adapter")
    },
}
"""Part of a pipeline that --trainable_models names -> model that has it inside -> our names of its
weights (diffsynth/models/wan_video_vace.py, wan_video_animate_adapter.py:616)."""

_IMAGE: Settings = {"--extra_inputs": "input_image"}
_VACE: Settings = {
    "--data_file_keys": "video,vace_video,vace_reference_image",
    "--extra_inputs": "vace_video,vace_reference_image",
}
INPUTS: dict[str, Settings] = {
    "wan2.1-i2v-14b-480p": _IMAGE,
    "wan2.1-i2v-14b-720p": _IMAGE,
    "wan2.2-i2v-a14b": _IMAGE,
    "wan2.2-ti2v-5b": _IMAGE,
    "wan2.1-vace-1.3b": _VACE,
    "wan2.1-vace-14b": _VACE,
}
"""Model -> what its samples have beside a clip and its prompt, without which the pipeline fails
(examples/wanvideo/model_training/lora/*.sh)."""

BESIDE = {
    "controlnet_": "a ControlNet runs beside the model",
    "blockwise_controlnet_": "a ControlNet runs beside the model",
    "context_image": "its tokens stand beside the image's",
    "in_context_videos": "their tokens stand beside the clip's",
    "layer_input_image": "layers of an image, each with tokens of its own",
    "flux_redux_image": "an image encoder runs before the model, and its tokens stand beside the prompt's",
    "eligen_entity_prompts": "a prompt and a mask for each entity",
    "insert_anything_": "a second image beside the first",
    "ipadapter_images": "an IP-Adapter runs beside the model",
    "infinityou_": "a ControlNet runs beside the model",
    "lora_encoder_inputs": "an encoder of LoRAs runs before the model",
    "value_controller_inputs": "an encoder of values runs before the model",
    "template_inputs": "a template model runs before the model",
    "vap_video": "a second transformer runs beside the model",
    "wantodance_": "encoders of music run before the model",
    "animate2_": "tokens of a reference video stand beside the clip's",
    "s2v_pose_video": "tokens of poses stand beside the clip's",
}
"""Starts of what --extra_inputs names that is not priced -> what it adds (diffsynth/pipelines/*.py; the commands of
examples/*/model_training)."""

REFERENCES = ("edit_image", "kontext_images", "step1x_reference_image", "nexus_gen_reference_image")
"""Of --extra_inputs: images whose tokens stand beside, which are priced for models that take some."""

BOUNDARIES = {
    ("wan2.2-i2v-a14b", "high"): (0.358, 0),
    ("wan2.2-i2v-a14b", "low"): (1, 0.358),
    ("wan2.2-t2v-a14b", "high"): (0.417, 0),
    ("wan2.2-t2v-a14b", "low"): (1, 0.417),
}
"""(model, expert) -> --max_timestep_boundary and --min_timestep_boundary of its timesteps, from the noisy end (the same
scripts)."""

EXPERTS = {"high": "high_noise_model/", "low": "low_noise_model/"}
"""Expert of a two-expert model -> folder of its weights."""

PATHS = ("--model_id_with_origin_paths", "--model_paths")
ENCODERS = ("t5", "clip", "text_encoder", "gemma", "qwen3-vl", "qwen2.5")

PREQUANTISED = {"ideogram-4-fp8": "fp8", "ideogram-4-nf4": "nf4"}
"""Repository -> format of the transformer and the text encoder in its files, which stay in it
(diffsynth/configs/model_configs.py ``load_prequantized``)."""

SPLIT_COST = (
    "two commands: first the same one with --task sft:data_process writes every sample's latents and prompts to "
    "--output_path, then this one reads them (--dataset_base_path); disk for the cache, not part of the step time"
)
OFFLOAD_NOTE = (
    "--enable_model_cpu_offload: frozen weights, encoders and VAE wait in host RAM; 2 to 10 times slower, which the "
    "seconds do not show"
)
OFFLOAD_COST = "slower: the copies are pageable and synchronous"


def folder_of(model: str) -> str | None:
    """The folder of DiffSynth's example that trains a model; None when it has none."""
    return FOLDERS.get(lookup.model(model).family.partition("-")[0])


def files_of(fields: Fields) -> list[str]:
    """The files of a model as `--model_id_with_origin_paths` lists them."""
    name = str(fields["model"])
    if name not in REPOSITORIES:
        why = f"its files' names are known for {', '.join(REPOSITORIES)}"
        raise InexpressibleError(UnsupportedValue("model", name, next(iter(REPOSITORIES)), why))
    repository, files = REPOSITORIES[name]
    experts = fields.get("experts")
    if lookup.model(name).experts > 1:
        if experts not in EXPERTS:
            why = "a command trains one expert (boundaries of its timesteps)"
            raise InexpressibleError(UnsupportedValue("experts", experts, "high", why))
        files = (EXPERTS[str(experts)] + files[0], *files[1:])
    return [f"{repository}:{file}" for file in files]
