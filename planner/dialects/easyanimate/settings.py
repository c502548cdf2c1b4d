"""EasyAnimate's words, read at c2a70d1, and those of its successor VideoX-Fun, read at 804a425."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import (
    Binding,
    Choice,
    Fields,
    Fixed,
    FunctionPair,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
    Value,
    When,
)
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import (
    EXPANDABLE,
    GPUS,
    NODES,
    command_line,
    command_settings,
    engine,
    launch_settings,
    our_defaults,
    parse_program,
    require_model,
    script_head,
)
from planner.dialects.base.script import Script
from planner.spec.plan import Plan
from planner.spec.rules import DEEPSPEED

AT = "EasyAnimate c2a70d1 scripts/train.py"
LORA, FULL = "scripts/train_lora.py", "scripts/train.py"
TELLING = {"--video_sample_n_frames", "--video_sample_size", "--train_mode", "--token_sample_size", "--config_path"}
"""Flags that no other trainer's ``scripts/train.py`` has."""

SHIPPED: dict[str, Settings] = {
    "config/zero_stage2_config.json": {"launch:--zero_stage": 2},
    "config/zero_stage3_config.json": {"launch:--zero_stage": 3},
    "config/zero_stage3_config_cpu_offload.json": {
        "launch:--zero_stage": 3,
        "launch:--offload_optimizer_device": "cpu",
        "launch:--offload_param_device": "cpu",
    },
}
"""Stages in the configs that come with both (config/*.json)."""


def read_script(script: Script) -> Invocation | None:
    """The settings of a command of EasyAnimate's scripts; None for another trainer's script."""
    programs = [
        program
        for program in script.programs
        if program.script.rpartition("scripts/")[2] in ("train.py", "train_lora.py")
        and TELLING & {word.partition("=")[0] for word in program.arguments}
    ]
    if not programs:
        return None
    launch, notes = launch_settings(programs[-1], script, SHIPPED)
    return parse_program("easyanimate", programs[-1], launch, [*script.notes, *notes])


def read_videox_script(script: Script) -> Invocation | None:
    """The settings of a command of VideoX-Fun's scripts (scripts/<model>/); None for another trainer's script."""
    programs = [
        program
        for program in script.programs
        if program.script.rpartition("/")[2] in ("train.py", "train_lora.py")
        and program.script.rpartition("scripts/")[2].count("/") == 1
        and (entry_point := flags.find("videox-fun", program.script)) is not None
        and program.script.endswith(entry_point.path)
    ]
    if not programs:
        return None
    launch, notes = launch_settings(programs[-1], script, SHIPPED)
    return parse_program("videox-fun", programs[-1], launch, [*script.notes, *notes])


def _model(settings: Settings) -> Fields:
    name = require_model(settings, "--pretrained_model_name_or_path", "--config_path")
    return {"model": lookup.model(name).name}


def _write_model(fields: Fields) -> Settings:
    profile = lookup.model(fields["model"])
    repositories = [name for name in profile.aliases if "/" in name and not name.lower().endswith("-diffusers")]
    return {"--pretrained_model_name_or_path": repositories[0] if repositories else profile.name}


def _write_own_model(fields: Fields) -> Settings:
    if not lookup.model(fields["model"]).trained_with("easyanimate", "own-model"):
        why = "its scripts build EasyAnimate's own transformer"
        raise InexpressibleError(UnsupportedValue("model", fields["model"], "easyanimate-v5.1-7b", why))
    return _write_model(fields)


def _is_image(model: object) -> bool:
    return lookup.model(str(model)).kind == "image"


def _size(settings: Settings) -> Fields:
    """Buckets of many shapes hold as many pixels as a square of --video_sample_size, or of an image model's
    --image_sample_size."""
    image = _is_image(_model(settings)["model"])
    side = int(settings.get("--image_sample_size" if image else "--video_sample_size", 512))
    frames = 1 if image else int(settings.get("--video_sample_n_frames", 17))
    return {"height": side, "width": side, "frames": frames}


def _write_size(fields: Fields) -> Settings:
    image = _is_image(fields["model"])
    flag = "--image_sample_size" if image else "--video_sample_size"
    refused = []
    if fields["height"] != fields["width"]:
        why = f"{flag} is one number: samples of all shapes have about as many pixels as that square"
        refused.append(UnsupportedValue("width", fields["width"], fields["height"], why))
    if image and fields["frames"] != 1:
        refused.append(UnsupportedValue("frames", fields["frames"], 1, "the model makes images"))
    if refused:
        raise InexpressibleError(*refused)
    settings: Settings = {flag: fields["height"]} if fields["height"] != 512 else {}
    return settings | ({"--video_sample_n_frames": fields["frames"]} if not image and fields["frames"] != 17 else {})


def _plain(settings: Settings) -> Fields:
    """The transformer is loaded in bf16 and stays so, in full training too; adapters are made in fp32; accelerate's
    mixed precision adds autocast (`from_pretrained_2d`, `create_network`, `accelerator.prepare`)."""
    precision = str(settings.get("--mixed_precision", settings.get("launch:--mixed_precision", "no")))
    autocast = precision if precision in ("bf16", "fp16") else "none"
    return {"weights_dtype": "bf16", "adapter_dtype": "fp32", "autocast": autocast}


def _write_plain(fields: Fields) -> Settings:
    return {"--mixed_precision": fields["autocast"]} if fields["autocast"] != "none" else {}


def _validation(settings: Settings) -> Fields:
    return {"validation_mode": "on" if settings.get("--validation_prompts") else "off"}


def _write_validation(fields: Fields) -> Settings:
    if fields["validation_mode"] == "offload":
        why = "it moves the whole pipeline to the GPU (log_validation)"
        raise InexpressibleError(UnsupportedValue("validation_mode", "offload", "on", why))
    return {"--validation_prompts": ["a cat walks"]} if fields["validation_mode"] == "on" else {}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    own_model = lookup.model(fields["model"]).trained_with("easyanimate", "own-model")
    if "--vae_mini_batch" in settings and (fields["batch_size"] == 1 or own_model):
        alone = "with batch 1 there is nothing to split"
        many = "the VAE itself takes 4 frames at a time, whatever it says"
        why = f"it splits over the batch, not over frames: {alone if fields['batch_size'] == 1 else many}"
        yield Remark("--vae_mini_batch", why)
    if settings.get("--use_deepspeed") and not settings.get("launch:--use_deepspeed"):
        yield Remark(
            "--use_deepspeed", "the script's flag alone starts no engine: accelerate launch --use_deepspeed does"
        )
    if fields["sharding"].startswith("zero") and fields.get("gpus", 1) * fields.get("nodes", 1) == 1:
        yield Remark("--use_deepspeed", "on one GPU it shards nothing, and keeps fp32 masters beside")


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    if settings.get("--low_vram"):
        yield "--low_vram moves VAE and text encoder only; the transformer and the optimizer never move"
    if settings.get("--low_vram") and settings["script"] in (FULL, LORA):
        yield f"{AT}: everything is put on the GPU together at the start, before --low_vram moves anything"
    if "--video_sample_n_frames" not in settings and not _is_image(fields["model"]):
        yield "17 frames, the default of --video_sample_n_frames"
    if "--train_batch_size" not in settings:
        yield "16 samples per step and GPU, the default of --train_batch_size"
    if fields["validation_mode"] == "on":
        yield "an error in validation is printed and ignored: running out of memory there is silent"
    else:
        yield "no validation: --validation_prompts is not given"
    modules = settings.get("--trainable_modules")
    if fields["method"] == "full" and modules not in (None, ["."], "."):
        yield "--trainable_modules is estimated as training everything: it needs at most this"
    if fields["method"] == "lora":
        yield "adapters are estimated on the model's usual layers, whatever --target_name says"
    if settings.get("--enable_text_encoder_in_dataloader"):
        yield "--enable_text_encoder_in_dataloader is not estimated: the text encoder counts as on the GPU"


def _videox_extra(plan: Plan, script: str) -> dict[str, object]:
    """What a VideoX-Fun script needs to run: its Wan scripts read a model config, and are told whether clips come
    with their first image and which expert trains (scripts/wan2.1/train_lora.py:656, wan2.2/train_lora.py:716)."""
    config, model = WAN_CONFIGS.get(script.split("/")[1]), lookup.model(plan.job.model)
    if config is None:
        return {}
    sees = model.config["in_channels"] > model.vae.latent_channels
    one, mode = model.experts == 1, "i2v" if sees else "normal"
    if "{}" not in config:
        return {"--config_path": config, "--train_mode": mode}
    return {
        "--config_path": config.format("5b" if one else "i2v" if sees else "t2v"),
        "--train_mode": "ti2v" if one else mode,
        "--boundary_type": "full" if one else plan.job.experts or "low",
    }


WAN_CONFIGS = {"wan2.1": "config/wan2.1/wan_civitai.yaml", "wan2.2": "config/wan2.2/wan_civitai_{}.yaml"}
"""Folder of scripts -> the config that they read; of 2.2 one for each kind of model."""


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """name -> text of one shell script with the training command."""
    launcher = ["accelerate", "launch", f"--num_processes {plan.machine.world}"]
    if plan.machine.nodes > 1:
        launcher.append(f"--num_machines {plan.machine.nodes}")
    extra: dict[str, object] = {
        "--train_data_dir": "data/my_set",
        "--train_data_meta": "data/my_set/metadata.json",
        "--output_dir": "output",
        "--learning_rate": "2e-05",
    }
    if settings["script"] in (FULL, LORA):
        extra["--train_mode"] = "inpaint"
    else:
        extra |= _videox_extra(plan, str(settings["script"]))
    if plan.job.method == "full":
        extra["--trainable_modules"] = "."
    if lookup.model(plan.job.model).trained_with("easyanimate", "own-model"):
        extra["--config_path"] = "config/easyanimate_video_v5.1_magvit_qwen.yaml"
    return {"train.sh": script_head(plan) + command_line(command_settings(settings), extra, launcher)}


def _table(write_model: Callable[[Fields], Settings], *bindings: Binding | When) -> tuple[Binding | When, ...]:
    return (
        FunctionPair(
            ("model",),
            ("--pretrained_model_name_or_path",),
            _model,
            write_model,
            {"model": "--pretrained_model_name_or_path"},
        ),
        *bindings,
        When("method", frozenset({"lora"}), Value("lora_rank", "--rank", 128)),
        FunctionPair(
            ("height", "width", "frames"),
            ("--video_sample_size", "--image_sample_size", "--video_sample_n_frames"),
            _size,
            _write_size,
            {"height": "square", "width": "square", "frames": "--video_sample_n_frames"},
        ),
        Value("batch_size", "--train_batch_size", 16),
        Choice("gradient_checkpointing", {"none": {}, "full": {"--gradient_checkpointing": True}}),
        Value("gradient_accumulation", "--gradient_accumulation_steps", 1),
        Choice("ema", {"none": {}, "gpu": {"--use_ema": True}}, "its copy is on the GPU"),
        Choice(
            ("text_encoder", "vae"),
            {("resident", "resident"): {}, ("swapped", "swapped"): {"--low_vram": True}},
            "text encoder and VAE stay on the GPU, or are swapped together by --low_vram; nothing is cached",
        ),
        FunctionPair(
            ("validation_mode",),
            ("--validation_prompts",),
            _validation,
            _write_validation,
            {"validation_mode": "off, on"},
        ),
        engine(
            _plain,
            _write_plain,
            {"weights_dtype": "bf16", "adapter_dtype": "fp32 (bf16 with an engine)"},
            with_deepspeed={"--use_deepspeed": True},
        ),
        Fixed("optimizer_step", "foreach", "default torch.optim.AdamW"),
        Fixed("grad_buckets", "copy", "accelerate's DDP without gradient_as_bucket_view"),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults(
            "experts", "trainable", "lora_targets", "lora_dropout", "buckets", "text_tokens", "references", "validation"
        ),
        *our_defaults(
            "compute_dtype", "checkpointed_blocks", "swap_blocks", "text_encoder_dtype", "vae_dtype", "vae_tiling"
        ),
        *our_defaults(
            "vae_slicing", "inactive_expert", "group_offload", "group_offload_stream", "attention", "compile"
        ),
        *our_defaults("context_parallel", "adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
    )


def _several_gpus(fields: Fields) -> bool:
    return int(fields["gpus"]) * int(fields["nodes"]) > 1


_ZERO = "accelerate launch --use_deepspeed --deepspeed_config_file config/zero_stage{stage}_config.json"
ZERO_2 = (
    "accelerate launch --use_deepspeed --deepspeed_config_file config/zero_stage2_config.json "
    "--deepspeed_multinode_launcher standard scripts/train.py ... --use_deepspeed"
)
ZERO_3 = (
    "accelerate launch --use_deepspeed --zero_stage 3 --zero3_init_flag true --deepspeed_config_file "
    "config/zero_stage3_config.json --deepspeed_multinode_launcher standard scripts/.../train.py ... --use_deepspeed"
)
MOVES = (
    Move({"expandable_segments": True}, "free"),
    Move({"gradient_checkpointing": "full"}, "one more forward pass"),
    Move({"text_encoder": "swapped", "vae": "swapped"}, "encoders move for every step"),
    Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
    Move(
        {"sharding": "zero-2", **DEEPSPEED},
        "gradients and states are sharded across the GPUs, with an fp32 master",
        words_for=lambda settings: [ZERO_2],
        when=_several_gpus,
    ),
)

DIALECT = Dialect(
    name="easyanimate",
    title="EasyAnimate",
    source="https://github.com/aigc-apps/EasyAnimate at c2a70d1",
    scripts=(FULL, LORA),
    table=_table(
        _write_own_model,
        Choice("method", {"full": {"script": FULL}, "lora": {"script": LORA}}, "these scripts train"),
        Choice("optimizer", {"adamw": {}, "adamw-8bit": {"--use_8bit_adam": True}, "came": {"--use_came": True}}),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    moves=MOVES,
    files=files,
)

FAMILIES = {
    "wan2.1": ("wan2.1-",),
    "wan2.2": ("wan2.2-",),
    "flux": ("flux.1-dev",),
    "flux2": ("flux.2-",),
    "qwenimage": ("qwen-image",),
    "z_image": ("z-image",),
    "ltx2": ("ltx-2",),
    "hunyuanvideo": ("hunyuan-video",),
}
"""Folder of scripts -> starts of the names of its models."""

OTHER_SCRIPTS = {
    "ltx-2.3": "scripts/ltx2.3 are not written",
    "ltx-2.5": "it has no scripts for it",
    "flux.2-klein-4b": "scripts/flux2 load Mistral 3, which Klein has not (train_lora.py:914)",
    "flux.2-klein-9b": "scripts/flux2 load Mistral 3, which Klein has not (train_lora.py:914)",
    "hunyuan-video-1.5": "scripts/hunyuanvideo build HunyuanVideo 1.0's transformer",
    "qwen-image-edit": "scripts/qwenimage/train_edit.py and train_edit_lora.py are not written",
    "wan2.1-vace-1.3b": "scripts/wan2.1_vace/train.py is not written",
    "wan2.1-vace-14b": "scripts/wan2.1_vace/train.py is not written",
    "wan2.2-animate-14b": "scripts/wan2.2/train_animate.py and train_animate_lora.py are not written",
}
"""Models of one of these names that those scripts do not train -> why."""


def _method(settings: Settings) -> Fields:
    return {"method": "lora" if str(settings["script"]).endswith("train_lora.py") else "full"}


def _write_method(fields: Fields) -> Settings:
    model = str(fields["model"])
    folder = next((name for name, starts in FAMILIES.items() if model.startswith(starts)), None)
    if folder is None or model in OTHER_SCRIPTS:
        why = OTHER_SCRIPTS.get(model) or f"its scripts are for {', '.join(FAMILIES)}"
        raise InexpressibleError(UnsupportedValue("model", model, "wan2.1-t2v-14b", why))
    if fields["method"] == "sample":
        raise InexpressibleError(UnsupportedValue("method", "sample", "lora", "these scripts train"))
    return {"script": f"scripts/{folder}/{'train_lora' if fields['method'] == 'lora' else 'train'}.py"}


VIDEOX_FUN = replace(
    DIALECT,
    name="videox-fun",
    title="VideoX-Fun",
    source="https://github.com/aigc-apps/VideoX-Fun at 804a425",
    scripts=tuple(f"scripts/{folder}/train.py" for folder in FAMILIES),
    table=_table(
        _write_model,
        FunctionPair(("method",), ("script",), _method, _write_method, {"method": "full, lora, by the script"}),
        Choice("optimizer", {"adamw": {}, "adamw-8bit": {"--use_8bit_adam": True}, "came": {"--use_came": True}}),
    ),
    read_script=read_videox_script,
    moves=(
        *MOVES,
        Move(
            {"sharding": "zero-3", **DEEPSPEED},
            "weights too are sharded across the GPUs and gathered for every block",
            words_for=lambda settings: [ZERO_3],
            when=_several_gpus,
        ),
    ),
)
