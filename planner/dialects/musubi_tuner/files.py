"""What musubi-tuner is started with: the dataset's file, and a script that caches latents and prompts, then trains."""

from __future__ import annotations

from collections.abc import Mapping

from planner.catalog import lookup
from planner.dialects.base import config_text
from planner.dialects.base.bindings import Settings
from planner.dialects.base.commands import command_line
from planner.dialects.base.dialect import Dialect
from planner.spec.plan import Plan

ENCODERS: dict[str, dict[str, object]] = {
    "wan": {"--t5": "models/t5.pth"},
    "hv": {"--text_encoder1": "models/text_encoder1", "--text_encoder2": "models/text_encoder2"},
    "flux_kontext": {"--text_encoder1": "models/text_encoder1", "--text_encoder2": "models/text_encoder2"},
    "hv_1_5": {"--text_encoder": "models/text_encoder", "--byt5": "models/byt5"},
}
"""Script family -> its flags for text encoders; `--text_encoder` of all others."""

OWN_VAE_DTYPE = frozenset({"qwen_image", "flux_kontext", "krea2"})
"""Script families whose caching of latents ends on `--vae_dtype`: the VAE has one format there
(qwen_image_cache_latents.py:150, flux_kontext_cache_latents.py:99, krea2_cache_latents.py:52)."""

CONTROLS: dict[str, object] = {"control_directory": "data/my_references"}
"""Where the conditioning images of an editing model are (docs/dataset_config.md), by the names of the targets."""

CLIP: dict[str, dict[str, object]] = {"i2v-14B": {"--clip": "models/clip.pth"}}
"""Task -> the encoder of its first image, without which training ends (docs/wan.md:119); Wan 2.2 has none."""

VAE: dict[str, object] = {"--vae": "models/vae.safetensors"}
EXTRA: dict[str, object] = {
    "--dataset_config": "dataset.toml",
    "--learning_rate": "2e-4",
    "--max_train_epochs": 16,
    "--save_every_n_epochs": 1,
    "--seed": 42,
    "--output_dir": "out",
    "--output_name": "lora",
}
"""What no field of a plan carries, as its documentation begins (docs/wan.md)."""

SAMPLING: dict[str, dict[str, object]] = {
    "wan": {"--timestep_sampling": "shift", "--discrete_flow_shift": 3.0},
    "hv": {"--timestep_sampling": "shift", "--discrete_flow_shift": 7.0},
    "hv_1_5": {"--timestep_sampling": "shift", "--weighting_scheme": "none", "--discrete_flow_shift": 2.0},
    "qwen_image": {"--timestep_sampling": "shift", "--weighting_scheme": "none", "--discrete_flow_shift": 2.2},
    "zimage": {"--timestep_sampling": "shift", "--weighting_scheme": "none", "--discrete_flow_shift": 2.0},
    "flux_kontext": {"--timestep_sampling": "flux_shift", "--weighting_scheme": "none"},
    "flux_2": {"--timestep_sampling": "flux2_shift", "--weighting_scheme": "none"},
}
"""Script family -> its noise levels, as its own page has them (docs/wan.md:177, hunyuan_video.md, hunyuan_video_1_5.md,
qwen_image.md, zimage.md, flux_kontext.md, flux_2.md); a family without: the script's defaults."""

OF_WAN_2_2: dict[str, dict[str, object]] = {
    "t2v-A14B": {"--discrete_flow_shift": 12.0},
    "i2v-A14B": {"--discrete_flow_shift": 5.0},
}
"""Task -> the shift of the official implementation (docs/wan.md:197)."""


def files(dialect: Dialect, plan: Plan, settings: Settings, carries: config_text.FieldsBySetting) -> dict[str, str]:
    """name -> text of dataset.toml, the prompts of samples where some are made, and train.sh, which is to be
    started."""
    texts = {"dataset.toml": _dataset(config_text.fields_by_setting(dialect, settings, carries), plan, settings)}
    if "--sample_prompts" in settings:
        shape = plan.job.validation or plan.job
        texts["prompts.txt"] = f"a prompt of yours --w {shape.width} --h {shape.height} --f {shape.frames} --s 20\n"
    texts["train.sh"] = _script(plan, settings)
    return texts


def _dataset(carried: Mapping[str, tuple[str, ...]], plan: Plan, settings: Settings) -> str:
    kind = lookup.model(plan.job.model).kind
    data = config_text.tree(settings, "dataset:")
    first = {f"{kind}_directory": "data/my_set", "cache_directory": "data/my_cache", **data.get("datasets", [{}])[0]}
    first |= {"frame_extraction": "head"} if kind == "video" else {}
    first |= CONTROLS if plan.job.references else {}
    general = {**data["general"], "caption_extension": ".txt", "enable_bucket": True}
    comments = config_text.comments(carried, "dataset:")
    head = "The dataset. The comment after each line names its plan field. Fill in the folders."
    return config_text.toml({"general": general, "datasets": [first]}, comments, head)


def _script(plan: Plan, settings: Settings) -> str:
    script = str(settings["script"])
    family = script.rpartition("/")[2].removesuffix("_train_network.py")
    caching = script.rpartition("/")[0] + "/" + ("" if family == "hv" else f"{family}_") + "cache_{}.py"
    encoders = ENCODERS.get(family, {"--text_encoder": "models/text_encoder.safetensors"})
    flags = {name: value for name, value in settings.items() if name.startswith("--")}
    fp8 = {name: value for name, value in flags.items() if name in ("--fp8_t5", "--fp8_llm", "--fp8_vl", *_FP8)}
    data: dict[str, object] = {"--dataset_config": "dataset.toml"}
    # What is cached is named after the model's version, and training looks for its own (dataset/architectures.py).
    version = {name: value for name, value in flags.items() if name == "--model_version"}
    latents: Settings = {"script": caching.format("latents"), **version}
    if family == "wan" and str(flags.get("--task")).startswith("i2v"):
        latents["--i2v"] = True
    if "--vae_dtype" in flags and family not in OWN_VAE_DTYPE:
        latents["--vae_dtype"] = flags["--vae_dtype"]
    if "--vae_sample_size" in flags:
        latents["--vae_sample_size"] = flags["--vae_sample_size"]
    prompts: Settings = {"script": caching.format("text_encoder_outputs"), **version, **fp8}
    launcher = ["accelerate", "launch", "--num_cpu_threads_per_process 1", f"--num_processes {plan.machine.world}"]
    launcher += ["--multi_gpu"] if plan.machine.world > 1 else []
    launcher += [f"--num_machines {plan.machine.nodes}"] if plan.machine.nodes > 1 else []
    launcher += [f"--mixed_precision {settings['--mixed_precision']}"]
    text = "#!/bin/bash\nset -e\n"
    if plan.strategy.expandable_segments:
        text += "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    seeing = CLIP.get(str(flags.get("--task")), {})
    text += command_line(latents, data | VAE | seeing, ["python"])
    text += command_line(prompts, data | encoders, ["python"])
    levels = SAMPLING.get(family, {}) | OF_WAN_2_2.get(str(flags.get("--task")), {})
    extra = EXTRA | levels | (VAE | encoders | seeing if "--sample_prompts" in flags else {})
    return text + command_line({"script": script, **flags}, extra, launcher)


_FP8 = ("--fp8_text_encoder",)
