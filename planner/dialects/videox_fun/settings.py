"""VideoX-Fun's words, read at 804a425: its scripts are EasyAnimate's, a folder of them for each model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import (
    Choice,
    Fields,
    FunctionPair,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
)
from planner.dialects.base.commands import parse_program, token_beside_wandb
from planner.dialects.base.dialect import MAY_NEED_LESS, Invocation, Move
from planner.dialects.base.engine_files.fsdp_launch import OFFLOAD, VERSION, Units, fsdp_notes
from planner.dialects.base.launchers import ON_HOST, by_fsdp, engine, launch_settings, several_gpus, stage_3_notes
from planner.dialects.base.layer_names import WAN_LAYERS, chosen_layers, in_wan
from planner.dialects.base.script import Script
from planner.dialects.easyanimate import settings as easyanimate
from planner.dialects.easyanimate import zero_launch
from planner.layout.adapters import is_named
from planner.spec.job import SPLIT
from planner.spec.plan import Plan
from planner.spec.rules import DEEPSPEED

AT = "VideoX-Fun 804a425"
ZERO_3 = (
    "--zero_stage 3 --zero3_save_16bit_model true --zero3_init_flag true "
    "--deepspeed_config_file config/zero_stage3_config"
)
"""As scripts/*/README_TRAIN.md start it."""


def read_script(script: Script) -> Invocation | None:
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
    launch, notes = launch_settings(programs[-1], script, easyanimate.SHIPPED)
    return parse_program("videox-fun", programs[-1], launch, [*script.notes, *notes])


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """name -> text of one shell script with the training command."""
    return easyanimate.shell_script(plan, settings, _extra(plan, str(settings["script"])))


def _extra(plan: Plan, script: str) -> dict[str, object]:
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


WAN_BLOCKS = ("WanAttentionBlock",)
BLOCKS = {
    "wan2.1": WAN_BLOCKS,
    "wan2.1_fun": WAN_BLOCKS,
    "wan2.2": WAN_BLOCKS,
    "wan2.2_fun": WAN_BLOCKS,
    "cogvideox_fun": ("CogVideoXBlock",),
    "flux": ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    "flux2": ("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    "qwenimage": ("QwenImageTransformerBlock",),
    "z_image": ("ZImageTransformerBlock",),
    "ltx2": ("LTX2VideoTransformerBlock",),
    "hunyuanvideo": ("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"),
}
"""Folder of scripts -> the classes of its model's blocks (videox_fun/models, scripts/*/README_TRAIN.md)."""

NAMED = ("hunyuanvideo",)
"""Folders whose model names them (`_no_split_modules`); in the others' classes that line is a comment."""


def _fsdp(settings: Settings) -> Units | str:
    """Full training steps over fp32 shares, and clips the gradients of the parameters that it listed before
    ``accelerator.prepare``: FSDP1 keeps those. Behind it LoRA scripts cast and move the model once more, adapters too
    (scripts/*/train_lora.py). Rehearsed with accelerate 1.15 on FLUX.1: FSDP2 ends there in full training, and a LoRA
    with shares in host RAM ends at its first step."""
    if settings.get("--use_ema"):
        return f"its scripts keep no average under it ({AT} scripts/wan2.1/train.py:964)"
    if str(settings.get(OFFLOAD, "")).lower() == "true":
        why = "its LoRA scripts move the shares back to the GPU, where FSDP refuses them, and FSDP 1's are not priced"
        return f"{why} ({AT} scripts/wan2.1/train_lora.py:1363): no --fsdp_offload_params"
    folder = str(settings["script"]).rpartition("scripts/")[2].partition("/")[0]
    lora = _method(settings)["method"] == "lora"
    if not lora and str(settings.get(VERSION, 1)) != "1":
        what = f"the script clips the gradients of parameters that FSDP 2 replaced ({AT} scripts/wan2.1/train.py:1805)"
        return f"{what}, so it trains in full with --fsdp_version 1 alone"
    if lora:
        return Units(BLOCKS[folder], folder in NAMED, adapters=True, trained="bf16")
    return Units(BLOCKS[folder], folder in NAMED, adapters=False, version=1)


ADAPTERS_UNDER_FSDP = {"weights_dtype": "bf16", "adapter_dtype": "bf16"}


def _fsdp_context(fields: Fields) -> Settings:
    return _write_method(fields) | ({"--use_ema": True} if fields["ema"] != "none" else {})


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


def _plain(settings: Settings) -> Fields:
    """The model is loaded in the dtype of mixed precision, in fp32 without any, and moved to it once more when its
    adapters are there (scripts/*/train_lora.py ``transformer3d.to(accelerator.device, dtype=weight_dtype)``)."""
    formats = easyanimate.plain(settings)
    dtype = formats["autocast"] if formats["autocast"] != "none" else "fp32"
    lora = str(settings.get("script", "")).endswith("train_lora.py")
    return {**formats, "weights_dtype": dtype, "adapter_dtype": dtype if lora else formats["adapter_dtype"]}


def _layers(settings: Settings) -> Fields:
    """Adapters are on the layers whose full names end with one of --target_name with --use_peft_lora, and contain one
    without it: "k" is then in "blocks". Without names they are on every linear layer (videox_fun/utils/lora_utils.py
    ``create_modules``)."""
    profile = lookup.model(easyanimate.model_of(settings)["model"])
    if _method(settings)["method"] == "full":
        return {"lora_targets": None}
    names, skipped = (_words(settings, flag) for flag in ("--target_name", "--lora_skip_name"))

    def is_adapted(layer: str) -> bool:
        own = in_wan(layer) if _is_wan(settings) else layer
        if settings.get("--use_peft_lora"):
            return is_named(own, names)
        return (not names or any(name in own for name in names)) and not any(name in own for name in skipped)

    return {"lora_targets": chosen_layers(profile, is_adapted)}


def _write_layers(fields: Fields) -> Settings:
    if fields["method"] != "lora":
        return {}
    targets = fields["lora_targets"] or lookup.model(fields["model"]).lora.targets
    own = {layer: name for name, layer in WAN_LAYERS.items()} if _is_wan(_write_method(fields)) else {}
    return {"--use_peft_lora": True, "--target_name": ",".join(own.get(target, target) for target in targets)}


def _words(settings: Settings, flag: str) -> list[str]:
    return [name.strip() for name in str(settings.get(flag) or "").split(",") if name.strip()]


def _is_wan(settings: Settings) -> bool:
    """Whether the script trains Wan's own model; the others' layers are called as in diffusers (videox_fun/models)."""
    folder = str(settings["script"]).rpartition("scripts/")[2].partition("/")[0]
    return folder.partition("_")[0] in WAN_CONFIGS


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield from easyanimate.notes(settings, fields)
    yield from fsdp_notes(settings, fields)
    yield from stage_3_notes(settings, fields)
    if fields["sharding"] in SPLIT:
        yield f"a text encoder that is split over the GPUs as well (videox_fun/dist/fsdp.py){MAY_NEED_LESS}"
    if fields["validation_mode"] == "on" and lookup.model(fields["model"]).experts > 1:
        what = "validation loads the other expert beside the trained one, which is not estimated"
        yield f"{what}: it takes more than this (scripts/wan2.2/train_lora.py log_validation)"


IN_DATA_LOADER = "--enable_text_encoder_in_dataloader"


def _stops(settings: Settings) -> Iterator[Remark]:
    yield from token_beside_wandb(settings, f"{AT} scripts/wan2.1/train.py:750")
    if settings.get(IN_DATA_LOADER) and "scripts/hunyuanvideo/" in str(settings["script"]):
        why = f"refused by HunyuanVideo's scripts at the first batch ({AT} scripts/hunyuanvideo/train_lora.py:1689)"
        yield Remark(IN_DATA_LOADER, why)


DIALECT = replace(
    easyanimate.DIALECT,
    name="videox-fun",
    title="VideoX-Fun",
    source="https://github.com/aigc-apps/VideoX-Fun at 804a425",
    scripts=tuple(f"scripts/{folder}/train.py" for folder in FAMILIES),
    table=easyanimate.table(
        easyanimate.write_model,
        engine(
            _plain,
            easyanimate.write_plain,
            {"weights_dtype": "--mixed_precision", "adapter_dtype": "--mixed_precision"},
            _fsdp,
            with_deepspeed=zero_launch.deepspeed,
            context=_fsdp_context,
        ),
        FunctionPair(("method",), ("script",), _method, _write_method, {"method": "full, lora, by the script"}),
        FunctionPair(
            ("lora_targets",),
            ("--target_name", "--use_peft_lora", "--lora_skip_name"),
            _layers,
            _write_layers,
            {"lora_targets": "--target_name"},
        ),
        Choice("optimizer", {"adamw": {}, "adamw-8bit": {"--use_8bit_adam": True}, "came": {"--use_came": True}}),
    ),
    read_script=read_script,
    stops=_stops,
    notes=_notes,
    files=files,
    moves=(
        *easyanimate.MOVES,
        Move(
            {"sharding": "zero-3", **DEEPSPEED},
            "weights too are sharded across the GPUs and gathered for every block",
            words_for=partial(zero_launch.launched_by_deepspeed, f"{ZERO_3}.json"),
            when=several_gpus,
        ),
        by_fsdp(lambda fields: {"weights_dtype": "fp32"} if fields["method"] == "full" else ADAPTERS_UNDER_FSDP),
        Move(
            {"sharding": "zero-3", **ON_HOST, **DEEPSPEED},
            "weights are gathered for every block, and the optimizer steps in host RAM",
            words_for=partial(zero_launch.offloaded_by_deepspeed, f"{ZERO_3}.json", 3),
            when=lambda fields: fields["method"] == "full" and several_gpus(fields),
        ),
        Move(
            {"sharding": "zero-3", **ON_HOST, "offload_params": "cpu", **DEEPSPEED},
            "weights come from host RAM for every block, and the optimizer steps there",
            words_for=partial(zero_launch.launched_by_deepspeed, f"{ZERO_3}_cpu_offload.json"),
        ),
    ),
)
