"""LatentSync's words, read at a229c39: the YAML of scripts/train_unet.py, and lines of code where it has no key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.dialects.base import flags
from planner.dialects.base.bindings import (
    Choice,
    Fields,
    Fixed,
    FunctionPair,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
    Value,
)
from planner.dialects.base.commands import refused_flags, script_head
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, our_defaults
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import launch_settings
from planner.dialects.base.script import Script
from planner.errors import VplanError
from planner.spec.plan import Plan

AT = "LatentSync a229c39 scripts/train_unet.py"
FOLDER = "configs/unet/"
CONFIG = "config:"
MODEL = "latentsync-1.6-stage1"
STAGE_2 = ("model.use_motion_module", "run.pixel_space_supervise")
"""What configs/unet/stage2.yaml has on, and stage 1's configs off."""


def read_script(script: Script) -> Invocation | None:
    """A command of its UNet's script, or that script's config alone."""
    programs = [program for program in script.programs if program.script.endswith("scripts/train_unet.py")]
    if programs:
        program = programs[-1]
        launch, notes = launch_settings(program, script, {})
        arguments = flags.script("latentsync", "scripts/train_unet.py").parse(program.arguments)
        path = str(arguments.values.get("--unet_config_path", f"{FOLDER}stage1.yaml"))
        document = script.document(path)
        found = _invocation(document, path, launch, (*script.notes, *notes), arguments.unknown)
        return replace(found, refused=refused_flags(arguments))
    document = script.config
    if document is not None and isinstance(document.get("data"), dict) and "syncnet_config_path" in document["data"]:
        return _invocation(document, f"{FOLDER}{script.name}", {}, script.notes, ())
    return None


def _invocation(
    document: dict[str, Any] | None, path: str, launch: Settings, notes: tuple[str, ...], unknown: tuple[str, ...]
) -> Invocation:
    """A config's keys; those of the shipped file of that name where it is not here."""
    shipped = flags.find("latentsync", FOLDER + path.rpartition("/")[2])
    entry_point = shipped or flags.script("latentsync", f"{FOLDER}stage1.yaml")
    if document is not None:
        parsed = entry_point.parse_config(document)
        keys, unknown, removed = parsed.values, (*unknown, *parsed.unknown), parsed.removed
    elif shipped is not None:
        keys, removed = {name: flag.default for name, flag in shipped.flags.items() if flag.default is not None}, {}
        notes = (*notes, f"{path} is not here: taken as the repository has it")
    else:
        raise VplanError(f"{path} is not here", "run vplan where the command would run, or name the config itself")
    settings = {"script": "scripts/train_unet.py", "path": path, **launch}
    settings |= {f"{CONFIG}{name}": value for name, value in keys.items()}
    return Invocation("latentsync", settings, unknown, tuple(Remark(name, why) for name, why in removed.items()), notes)


def _model(settings: Settings) -> Fields:
    signs = [name for name in STAGE_2 if settings.get(CONFIG + name)]
    if signs:
        what = "trains motion modules and attention, through the VAE"
        fault = f"LatentSync's stage 2 is not recorded: it {what} ({', '.join(signs)})"
        raise VplanError(fault, "stage 1 alone can be checked: configs/unet/stage1.yaml, stage1_512.yaml")
    return {"model": MODEL}


def _write_model(fields: Fields) -> Settings:
    if fields["model"] != MODEL:
        raise InexpressibleError(UnsupportedValue("model", fields["model"], MODEL, "it trains its own model"))
    return {}


def _size(settings: Settings) -> Fields:
    side = int(settings.get(f"{CONFIG}data.resolution", 256))
    return {"height": side, "width": side}


def _write_size(fields: Fields) -> Settings:
    if fields["height"] != fields["width"]:
        why = "data.resolution is the side of a square"
        raise InexpressibleError(UnsupportedValue("width", fields["width"], fields["height"], why))
    return {f"{CONFIG}data.resolution": fields["height"]}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if f"{CONFIG}run.guidance_scale" in settings:
        why = "it sets the UNet's batch while validation denoises; the decode, which is larger, stays as it is"
        yield Remark("run.guidance_scale", why)


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    name = str(settings.get("path", ""))
    if fields["height"] == 512:
        yield f"{name or 'this config'} trains 512 px; configs/unet/stage1.yaml is the same at 256"
    yield f"no flag switches validation off: it runs wherever a checkpoint is saved (ckpt.save_ckpt_steps), {AT}"
    yield "validation shares the trained modules: gradients and optimizer states stay on the GPU meanwhile"
    yield "wrapped in DDP on one GPU too, whose buckets are a second copy of the gradients"


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """The config and the command. Keys that no field of a plan carries are those of configs/unet/stage1.yaml."""
    import yaml

    tree: dict[str, Any] = {}
    shipped = flags.script("latentsync", f"{FOLDER}stage1.yaml").flags
    keys = {name: flag.default for name, flag in shipped.items() if flag.default is not None}
    keys |= {name.removeprefix(CONFIG): value for name, value in settings.items() if name.startswith(CONFIG)}
    for name, value in keys.items():
        *tables, last = name.split(".")
        inside = tree
        for table in tables:
            inside = inside.setdefault(table, {})
        inside[last] = value
    command = (
        f"torchrun --nnodes={plan.machine.nodes} --nproc_per_node={plan.machine.gpus} --master_port=25679 "
        "-m scripts.train_unet --unet_config_path stage1_vplan.yaml\n"
    )
    return {
        "stage1_vplan.yaml": yaml.safe_dump(tree, sort_keys=False),
        "train.sh": script_head(plan) + command,
    }


def _flag(name: str, field: str, on: Any, off: Any) -> Value:
    """A boolean key."""

    def write(value: Any) -> bool:
        if value not in (on, off):
            raise InexpressibleError(UnsupportedValue(field, value, on, f"{name} is true ({on}) or false ({off})"))
        return bool(value == on)

    return Value(field, CONFIG + name, on, lambda value: on if value else off, write)


SLICE = "edit:vae.enable_slicing()  # scripts/train_unet.py, where the VAE is made"
SKIP = "edit:# scripts/train_unet.py: leave out the pipeline(...) call behind the checkpoint's save"
ZERO = "optimizer.zero_grad()  # scripts/train_unet.py, before the pipeline(...) call"
NO_ENGINE = "edit:# scripts/train_unet.py: on one GPU leave out unet = DDP(unet, ...)"
FUSED = "edit:torch.optim.AdamW(trainable_params, lr=config.optimizer.lr, fused=True)"
EIGHT = "edit:bitsandbytes.optim.AdamW8bit(trainable_params, lr=config.optimizer.lr)"


def _one_gpu(fields: Fields) -> bool:
    return int(fields["gpus"]) * int(fields["nodes"]) == 1


DIALECT = Dialect(
    name="latentsync",
    title="LatentSync",
    source="https://github.com/bytedance/LatentSync at a229c39",
    scripts=("scripts/train_unet.py",),
    assigns=": ",
    table=(
        FunctionPair(("model",), (), _model, _write_model, {"model": MODEL}),
        Fixed("method", "full", "it trains the UNet whole"),
        Value("frames", f"{CONFIG}data.num_frames", 16),
        FunctionPair(
            ("height", "width"),
            (f"{CONFIG}data.resolution",),
            _size,
            _write_size,
            {"height": "data.resolution", "width": "data.resolution"},
        ),
        Value("batch_size", f"{CONFIG}data.batch_size", 1),
        _flag("run.enable_gradient_checkpointing", "gradient_checkpointing", "full", "none"),
        _flag("run.mixed_precision_training", "autocast", "fp16", "none"),
        Choice("optimizer", {"adamw": {}, "adamw-8bit": {EIGHT: True}}, "torch.optim.AdamW is written into the script"),
        Choice("optimizer_step", {"foreach": {}, "fused": {FUSED: True}}, "default torch.optim.AdamW"),
        Choice("sharding", {"ddp": {}, "none": {NO_ENGINE: True}}, "it wraps the model in DDP itself"),
        Choice("vae_slicing", {False: {}, True: {SLICE: True}}),
        Choice("validation_mode", {"on": {}, "off": {SKIP: True}}, "validation is one branch with saving"),
        Fixed("weights_dtype", "fp32", f"the UNet is loaded in fp32 ({AT})"),
        Fixed("vae_dtype", "fp16", f"sd-vae-ft-mse is loaded in fp16 ({AT})"),
        Fixed("text_encoder", "resident", "Whisper tiny stays on the GPU"),
        Fixed("vae", "resident", "the VAE encodes every batch"),
        Fixed("gradient_accumulation", 1, "its loop steps after every batch"),
        Fixed("grad_buckets", "copy", "DDP without gradient_as_bucket_view"),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("trainable", "lora_rank", "lora_targets", "lora_dropout", "buckets", "text_tokens", "references"),
        *our_defaults(
            "experts", "validation", "compute_dtype", "master_weights", "adapter_dtype", "checkpointed_blocks", "ema"
        ),
        *our_defaults("offload_optimizer", "offload_gradients", "offload_params", "swap_blocks", "text_encoder_dtype"),
        *our_defaults("vae_tiling", "inactive_expert", "group_offload", "group_offload_stream", "attention", "compile"),
        *our_defaults("context_parallel", "adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    moves=(
        Move({"vae_slicing": True}, "the frames are decoded one at a time"),
        Move({"validation_mode": "off"}, "no sample beside the checkpoint"),
        Move({"version": "zeroed"}, "the gradients are gone before validation", words_for=lambda settings: [ZERO]),
        Move({"sharding": "none"}, "no second copy of the gradients", when=_one_gpu),
        Move({"optimizer_step": "fused"}, "no copy of the weights at the step"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"expandable_segments": True}, "free"),
        Move(
            {"height": 256, "width": 256},
            "another job: 256 px instead of 512",
            words_for=lambda settings: ["--unet_config_path configs/unet/stage1.yaml"],
            when=lambda fields: fields["height"] == 512,
        ),
    ),
    files=files,
)
