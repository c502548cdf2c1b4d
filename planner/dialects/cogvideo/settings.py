"""CogVideo's words, read at 7a1af71: `finetune/train.py` of its repository, which is read and not written."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import Fields, Fixed, FunctionPair, Settings, Value
from planner.dialects.base.commands import refused_flags
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, one_of, our_defaults, require_model
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import ON_HOST, engine, launch_settings, several_gpus
from planner.dialects.base.layer_names import chosen_layers
from planner.dialects.base.script import PythonCommand, Script
from planner.errors import VplanError, quoted
from planner.layout.adapters import is_named
from planner.layout.recordings import parameters
from planner.spec.rules import DEEPSPEED

AT = "CogVideo 7a1af71 finetune/trainer.py"
SCRIPT, ARGUMENTS = "finetune/train.py", "finetune/schemas/args.py"
METHODS = {"lora": "lora", "sft": "full"}
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw"}
ALWAYS = ("--gradient_checkpointing", "--enable_slicing", "--enable_tiling")
"""Declared with ``type=bool``: every word is true for them, "false" too."""


def read_script(script: Script) -> Invocation | None:
    """A command of `train.py` with CogVideo's own words; None for another trainer's `train.py`."""
    for program in reversed(script.programs):
        if program.script.rpartition("/")[2] == "train.py" and {"--training_type", "--train_resolution"} <= {
            word.partition("=")[0] for word in program.arguments
        }:
            launch, notes = launch_settings(program, script, {})
            parsed = flags.script("cogvideo", ARGUMENTS).parse(program.arguments)
            settings = {"script": SCRIPT, **launch, **parsed.values}
            taken = (*script.notes, *notes, *_taken(program))
            return Invocation("cogvideo", settings, parsed.unknown, notes=taken, refused=refused_flags(parsed))
    return None


def _taken(program: PythonCommand) -> Iterator[str]:
    for flag, value in itertools.pairwise(program.arguments):
        if flag in ALWAYS and value.lower() in ("false", "no", "0"):
            yield f"{flag} {value} is taken for true: its parser takes every word so (type=bool)"


def _method(settings: Settings) -> str:
    return str(one_of(METHODS, "--training_type")(settings.get("--training_type", "lora")))


def _job(settings: Settings) -> Fields:
    model = lookup.model(require_model(settings, "--model_path", "--model_name")).name
    method = _method(settings)
    fields: Fields = {"model": model, "method": method, "lora_rank": 16}
    if method == "lora":
        fields["lora_rank"] = int(settings.get("--rank", 128))
    return fields


def _targets(settings: Settings) -> Fields:
    """--target_modules as peft takes them (``LoraConfig(target_modules=self.args.target_modules)``)."""
    names = settings.get("--target_modules")
    if not names or _method(settings) != "lora":
        return {"lora_targets": None}
    profile = lookup.model(require_model(settings, "--model_path", "--model_name"))
    if not any(is_named(row.removesuffix(".weight"), names) for row in parameters(profile.name).rows):
        fault = f"--target_modules {quoted(' '.join(names))} names no layer of {profile.name}"
        raise VplanError(fault, f"write the ends of diffusers' names, as {profile.lora.targets[0]}")
    return {"lora_targets": chosen_layers(profile, lambda layer: is_named(layer, names))}


def _write_targets(fields: Fields) -> Settings:
    lora = fields["method"] == "lora" and fields["lora_targets"] is not None
    return {"--target_modules": list(fields["lora_targets"])} if lora else {}


def _size(settings: Settings) -> Fields:
    text = str(settings.get("--train_resolution", ""))
    sizes = re.fullmatch(r"(\d{1,4})x(\d{1,5})x(\d{1,5})", text.strip().lower())
    if sizes is None:
        raise VplanError(f"--train_resolution {quoted(text)} is no size", "it is frames x height x width: 49x480x720")
    return dict(zip(("frames", "height", "width"), map(int, sizes.groups()), strict=True))


def _formats(settings: Settings) -> Fields:
    """A LoRA's base is priced in the mixed precision's format, and by the terms as it is, in fp32; adapters and trained
    weights are fp32 (``cast_training_params``)."""
    precision = str(settings.get("--mixed_precision", "no"))
    half = precision if precision in ("bf16", "fp16") else "fp32"
    return {
        "weights_dtype": half if _method(settings) == "lora" else "fp32",
        "adapter_dtype": "fp32",
        "autocast": half if half != "fp32" else "none",
    }


def _validation(settings: Settings) -> Fields:
    """Off unless asked for; its models go to the GPU one after the other, but with DeepSpeed all are there."""
    if str(settings.get("--do_validation", "false")).lower() != "true":
        return {"validation_mode": "off"}
    return {"validation_mode": "on" if settings.get("launch:--use_deepspeed") else "offload"}


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield f"latents and prompts are computed before training ({AT})"
    if fields["method"] == "lora" and fields["sharding"] in ("none", "ddp"):
        yield f"the transformer is loaded without a type and stays in fp32 under the adapters ({AT})"


DIALECT = Dialect(
    name="cogvideo",
    title="CogVideo's finetune scripts",
    source="https://github.com/zai-org/CogVideo at 7a1af71",
    scripts=(SCRIPT,),
    steps=("--train_steps",),
    table=(
        FunctionPair(
            ("model", "method", "lora_rank"),
            ("--model_path", "--model_name", "--training_type", "--rank"),
            _job,
            lambda fields: {},
            {"model": "--model_path", "method": "--training_type", "lora_rank": "--rank"},
        ),
        FunctionPair(
            ("frames", "height", "width"),
            ("--train_resolution",),
            _size,
            lambda fields: {"--train_resolution": "{frames}x{height}x{width}".format(**fields)},
            dict.fromkeys(("frames", "height", "width"), "--train_resolution"),
        ),
        FunctionPair(
            ("lora_targets",),
            ("--target_modules",),
            _targets,
            _write_targets,
            {"lora_targets": "--target_modules, by name"},
        ),
        Value("batch_size", "--batch_size", 1, int),
        Value("gradient_accumulation", "--gradient_accumulation_steps", 1, int),
        Value("optimizer", "--optimizer", "adamw", one_of(OPTIMIZERS, "--optimizer")),
        FunctionPair(
            ("validation_mode",),
            ("--do_validation",),
            _validation,
            lambda fields: {"--do_validation": "false" if fields["validation_mode"] == "off" else "true"},
            {"validation_mode": "off; offload, with DeepSpeed on"},
        ),
        engine(
            _formats,
            lambda fields: {"--mixed_precision": fields["autocast"]} if fields["autocast"] != "none" else {},
            {"weights_dtype": "--mixed_precision", "adapter_dtype": "fp32"},
            f"its checkpoints are written by one GPU unless DeepSpeed trains ({AT}:801)",
            # Its own flag, which is "no" by default, is what accelerate is given.
            with_deepspeed=lambda fields: {"--mixed_precision": "bf16"},
            context=lambda fields: {"--training_type": "lora" if fields["method"] == "lora" else "sft"},
        ),
        Fixed("gradient_checkpointing", "full", "its parser takes every word for true"),
        Fixed("vae_slicing", True, "its parser takes every word for true"),
        Fixed("vae_tiling", True, "its parser takes every word for true"),
        Fixed("text_encoder", "cached", f"prompts are computed before training ({AT})"),
        Fixed("vae", "cached", f"latents are computed before training ({AT})"),
        Fixed("optimizer_step", "foreach", "default torch.optim.AdamW"),
        Fixed("grad_buckets", "copy", "accelerate's DDP without gradient_as_bucket_view"),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("experts", "trainable", "lora_dropout", "buckets", "text_tokens", "references"),
        *our_defaults("validation", "text_encoder_dtype", "vae_dtype"),
    ),
    read_script=read_script,
    notes=_notes,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move(
            {"sharding": "zero-2", **DEEPSPEED},
            "gradients and states are sharded across the GPUs, with an fp32 master",
            when=several_gpus,
        ),
        # As configs/zero2_offload.yaml, for one GPU too. By finetune/README.md zero3_offload.yaml takes 28 GB where 13
        # are priced, so it is not named.
        Move(
            {"sharding": "zero-2", **ON_HOST, **DEEPSPEED},
            "the optimizer steps in host RAM",
            when=lambda fields: fields["method"] == "full",
        ),
        Move({"validation_mode": "off"}, "no sample"),
    ),
)
