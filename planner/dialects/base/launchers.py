"""Parts that several dialects share: accelerate's launch, torch's allocator, names of models, command lines."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from planner.catalog import lookup
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
from planner.dialects.base.deepspeed_file import of_deepspeed, unknown_keys
from planner.dialects.base.dialect import Invocation
from planner.dialects.base.fsdp_launch import (
    CLASSES,
    LOADING,
    OFFLOAD,
    POLICY,
    VERSION,
    Support,
    fsdp_fields,
    fsdp_settings,
    offload_settings,
)
from planner.dialects.base.script import PythonCommand, Script
from planner.errors import VplanError, did_you_mean, nearest, quoted
from planner.spec.job import SPLIT, Job, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import DEEPSPEED
from planner.untrusted import flat

ACCELERATE = "accelerate 16cb6eb"

GPUS = Value("gpus", "gpus", 1, int)
NODES = Value("nodes", "nodes", 1, int)
EXPANDABLE = Choice("expandable_segments", {False: {}, True: {"env:expandable_segments": True}})
"""torch.cuda: off unless PYTORCH_CUDA_ALLOC_CONF asks for it."""

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""What a plan with expandable segments has in its environment."""
NEW_ALLOC_CONF = "PYTORCH_ALLOC_CONF"
ALLOC_CONF = ("PYTORCH_CUDA_ALLOC_CONF", NEW_ALLOC_CONF)


def our_defaults(*fields: str, why: str = "") -> list[Fixed]:
    """Bindings for fields that a trainer has no setting for and leaves at our defaults."""
    bindings = []
    for field in fields:
        if field == "references":  # how many a model takes; the data has them
            bindings.append(Fixed(field, None, why))
            continue
        record = Job if field in Job.model_fields else Strategy
        bindings.append(Fixed(field, record.model_fields[field].get_default(), why))
    return bindings


# ---- models


@functools.cache
def _known_models() -> dict[str, str]:
    """Last part of every name and alias, in lower case -> our name; of other weights of a model's shape too."""
    models = [lookup.model(name) for name in lookup.model_names()]
    names = {alike: model.name for model in models for alike in model.traits.same_shape}
    for model in models:
        for alias in (model.name, *model.aliases):
            names.setdefault(alias.lower().rpartition("/")[2], model.name)
    for model in models:
        for alike in () if model.is_own else model.traits.distilled:
            names.setdefault(alike, model.name)
    return names


def find_model(*texts: object) -> str | None:
    """The model whose name or alias occurs in one of these paths, repository ids or file names; the longest match wins.
    None when there is none."""
    for text in texts:
        parts = re.split(r"[\\/:,;\"'\[\]\s*]+", str(text or "").lower())
        stems = [stem for part in parts for stem in (part, re.sub(r"\.(safetensors|ckpt|pth|pt|gguf)$", "", part))]
        matches = [stem for stem in stems if stem in _known_models()]
        if matches:
            return _known_models()[max(matches, key=len)]
    return None


FORMAT_WORDS = r"(?:-(?:bf16|fp16|fp32|fp8|e4m3fn|e5m2|scaled|mixed|fp8mixed|fp8scaled))+$"
"""What stands behind a model's name in the files of ComfyUI and others (qwen_image_edit_fp8_e4m3fn.safetensors)."""


def find_checkpoint(path: object) -> str | None:
    """The model whose name or alias a file has, whatever parts its words, and with a number format behind it."""
    stem = re.split(r"[\\/]", str(path or "").lower())[-1]
    words = re.sub(r"[-_. ]+", "-", re.sub(r"\.(safetensors|ckpt|pth|pt|gguf)$", "", stem))
    return _known_files().get(re.sub(FORMAT_WORDS, "", words))


@functools.cache
def _known_files() -> dict[str, str]:
    """`_known_models`, with one mark between words."""
    return {re.sub(r"[-_. ]+", "-", name): model for name, model in _known_models().items()}


def require_model(settings: Settings, *names: str, known: Sequence[str] = ()) -> str:
    """The model that the settings `names` give, or `model` where it is set. Raises a VplanError when none of them names
    a known one. ``known``: all that the trainer is priced with, where they are few."""
    if "model" in settings:  # said to us, because the command does not tell
        return str(settings["model"])
    model = find_model(*(settings.get(name) for name in names))
    if model is None:
        typed = {name: name.removeprefix("config:") for name in names}
        values = ", ".join(f"{typed[name]} {quoted(settings[name])}" for name in names if settings.get(name))
        fault = f"cannot tell the model from {values or ' or '.join(typed.values())}"
        if known:
            raise VplanError(fault, f"add --model {' or --model '.join(known)}: no other is priced with this trainer")
        stem = str(next((settings[name] for name in names if settings.get(name)), "")).partition(":")[0]
        close = nearest(stem.rpartition("/")[2], lookup.model_names())
        like = f", as {' or '.join(close)} if it has that shape" if close else " (`vplan models` lists them)"
        raise VplanError(fault, f"add --model NAME{like}")
    return model


# ---- accelerate


def launch_settings(
    program: PythonCommand, script: Script, shipped: Mapping[str, Settings]
) -> tuple[Settings, list[str]]:
    """(settings, notes) of a launcher: its flags together with what its config files say, under the same names
    (`launch:--zero_stage`).

    `shipped`: the launch settings of config files that come with the trainer, by the end of their paths.
    """
    notes: list[str] = []
    launch = {f"launch:{name}": value for name, value in program.launch.items()}
    for flag, reader in (("--config_file", _of_yaml), ("--deepspeed_config_file", of_deepspeed)):
        path = str(launch.get(f"launch:{flag}", ""))
        if not path:
            continue
        document = script.document(path)
        from_shipped = next((settings for tail, settings in shipped.items() if _ends(path, tail)), None)
        if document is not None:
            keys = flat(document, path)
            from_file = reader(keys)
            if reader is of_deepspeed and (unknown := unknown_keys(keys)):
                notes.append(f"{path}: {', '.join(unknown[:4])} is no key that DeepSpeed is known to have")
        elif from_shipped is not None:
            from_file = from_shipped
        else:
            from_file = {}
            notes.append(f"{script.missing(path)}: launched as the command line says, else with accelerate's defaults")
        # Flags of the command win over the file's, as in accelerate's launch.
        launch = from_file | launch
    for name, count in (("gpus", program.gpus), ("nodes", program.nodes)):
        if count is not None:
            launch[name] = count
    if "gpus" not in launch and launch.get("launch:--num_processes"):
        launch["gpus"] = max(1, int(launch["launch:--num_processes"]) // int(launch.get("nodes", 1)))
    if program.visible and program.launcher in ("accelerate", "deepspeed"):
        launch["visible"] = program.visible
    asking = [name for name in ALLOC_CONF if "expandable_segments:true" in program.environment.get(name, "").lower()]
    if asking:
        launch["env:expandable_segments"] = True
    if asking == [NEW_ALLOC_CONF]:
        launch[f"env:{NEW_ALLOC_CONF}"] = True
    return launch, notes


def _ends(path: str, tail: str) -> bool:
    parts, ending = PurePosixPath(path).parts, PurePosixPath(tail).parts
    return parts[-len(ending) :] == ending or parts[-1:] == ending[-1:]


def _of_yaml(document: Settings) -> Settings:
    """accelerate's own config file: its keys are its flags' names, in tables by engine."""
    settings: Settings = {}
    for key, value in document.items():
        name = key.rpartition(".")[2]
        settings[f"launch:--{name}"] = value
    kind = str(document.get("distributed_type", "")).upper()
    settings |= {"launch:--use_deepspeed": True} if kind == "DEEPSPEED" else {}
    settings |= {"launch:--use_fsdp": True} if kind == "FSDP" else {}
    settings |= {"launch:--use_megatron_lm": True} if kind == "MEGATRON_LM" else {}
    return {name: value for name, value in settings.items() if value is not None}


ENGINE = (
    *("sharding", "weights_dtype", "adapter_dtype", "autocast", "master_weights"),
    *("offload_optimizer", "offload_gradients", "offload_params"),
)
"""Fields that the launcher decides together."""

_LAUNCH = (
    *("launch:--use_deepspeed", "launch:--zero_stage", "launch:--use_fsdp", "launch:--mixed_precision"),
    *("launch:--offload_optimizer_device", "launch:--offload_param_device"),
    *(OFFLOAD, VERSION, POLICY, CLASSES, LOADING),
)


def engine(
    plain: Callable[[Settings], Fields],
    write_plain: Callable[[Fields], Settings],
    words: Mapping[str, str],
    fsdp: Support | str,
    with_deepspeed: Settings | None = None,
    context: Callable[[Fields], Settings] = lambda fields: {},
) -> FunctionPair:
    """What accelerate's launch decides: DDP, DeepSpeed's ZeRO or FSDP, and the number formats that go with them.

    `plain` gives weights_dtype, adapter_dtype and autocast without an engine; `write_plain` writes them, or raises.
    `fsdp` says how a script trains under FSDP, or why none does. `with_deepspeed` are the script's own flags beside it;
    `context` gives the settings of other bindings that `plain` and `fsdp` read. DeepSpeed in bf16 keeps an fp32 master
    and no autocast (accelerate sets `bf16.enabled`; planner.spec.rules DEEPSPEED).
    """

    def to_fields(launch: Settings) -> Fields:
        return _engine_fields(launch, plain(launch), fsdp)

    def to_settings(fields: Fields) -> Settings:
        sharding = str(fields["sharding"])
        several_gpus = fields.get("gpus", 1) * fields.get("nodes", 1) > 1
        if sharding not in SPLIT:
            expected = "ddp" if several_gpus else "none"
            if sharding != expected:
                why = "accelerate wraps the model in DDP on several GPUs, and only there"
                raise InexpressibleError(UnsupportedValue("sharding", sharding, expected, why))
            settings = write_plain(fields)
        elif sharding == "fsdp":
            offload = offload_settings(fields)
            units = fsdp if isinstance(fsdp, str) else fsdp(context(fields) | offload)
            if isinstance(units, str):
                raise InexpressibleError(UnsupportedValue("sharding", "fsdp", "zero-3", units))
            settings = write_plain(fields | {"autocast": "bf16"}) | fsdp_settings(units) | offload
        else:
            settings = _deepspeed_settings(fields, with_deepspeed or {})
        world = {name: fields[name] for name in ("gpus", "nodes") if name in fields}
        result = to_fields(settings | world | context(fields))
        wrong = [name for name in ENGINE if result[name] != fields[name]]
        if wrong:
            how = f"accelerate with {sharding}" if sharding in SPLIT else "without an engine this trainer"
            why = f"{how} does it so ({ACCELERATE})"
            raise InexpressibleError(*(UnsupportedValue(name, fields[name], result[name], why) for name in wrong))
        return settings

    listed = dict.fromkeys(ENGINE, "accelerate launch") | dict(words)
    if isinstance(fsdp, str):
        listed["sharding"] = "accelerate launch, without FSDP"
    return FunctionPair(ENGINE, (*_LAUNCH, *(with_deepspeed or ())), to_fields, to_settings, listed)


def _engine_fields(launch: Settings, formats: Fields, fsdp: Support | str) -> Fields:
    """The fields of `ENGINE` by the launcher's settings. ``formats``: the number formats without an engine."""
    no_engine = {"master_weights": "none", "offload_optimizer": "none", "offload_params": "none"}
    no_engine |= {"offload_gradients": "none"}
    if launch.get("launch:--use_deepspeed"):
        _refuse_fp32(launch, formats)
        stage = int(launch.get("launch:--zero_stage", 2))  # accelerate utils/dataclasses.py DeepSpeedPlugin
        where = {
            field: _device(launch.get(f"launch:--offload_{name}_device"))
            for field, name in (("offload_optimizer", "optimizer"), ("offload_params", "param"))
        }
        if stage < 3:
            where["offload_params"] = "none"  # only stage 3 splits them
        # DeepSpeed's CPU optimizer steps where its gradients are: offloaded states take the gradients along.
        trained = {"offload_gradients": where["offload_optimizer"]} if where["offload_optimizer"] != "none" else {}
        return no_engine | DEEPSPEED | where | trained | {"sharding": f"zero-{stage}" if stage else "ddp"}
    if launch.get("launch:--use_fsdp"):
        return no_engine | fsdp_fields(launch, formats, fsdp)
    several_gpus = int(launch.get("gpus", 1)) * int(launch.get("nodes", 1)) > 1
    return no_engine | formats | {"sharding": "ddp" if several_gpus else "none"}


def _refuse_fp32(launch: Settings, formats: Fields) -> None:
    """DeepSpeed trains in fp32 where neither mixed precision nor its own file says 16 bits (accelerate
    utils/dataclasses.py ``set_mixed_precision``; deepspeed runtime/engine.py ``_configure_distributed_model``)."""
    of_file = launch.get("launch:--deepspeed_config_file")  # read into keys, or not here and unknown
    if formats["autocast"] == "none" and formats["weights_dtype"] == "fp32" and not of_file:
        fault = "DeepSpeed without mixed precision trains in fp32, which is not priced"
        raise VplanError(fault, "pass --mixed_precision bf16")


def _deepspeed_settings(fields: Fields, own: Settings) -> Settings:
    """The launcher's flags for a ZeRO stage and where it offloads to, with the script's own flags for DeepSpeed."""
    settings: Settings = {"launch:--use_deepspeed": True, "launch:--zero_stage": int(fields["sharding"][-1])}
    settings |= {"launch:--mixed_precision": "bf16", **own}
    for field, name in (("offload_optimizer", "optimizer"), ("offload_params", "param")):
        if fields[field] != "none":
            settings[f"launch:--offload_{name}_device"] = fields[field]
    return settings


def _device(value: object) -> str:
    text = str(value or "none").lower()
    if text not in ("none", "cpu", "nvme"):
        raise VplanError(f"offloading to {quoted(text)} is not known", "use none, cpu or nvme")
    return text


# ---- reading and writing commands


def parse_program(trainer: str, program: PythonCommand, launch: Settings, notes: Sequence[str] = ()) -> Invocation:
    """The invocation of a trainer's script: its flags, parsed by the trainer's own list of them, together with the
    launcher's settings. Raises a VplanError where the script would refuse them."""
    script = flags.script(trainer, program.script)
    parsed = script.parse(program.arguments)
    removed = tuple(Remark(name, why) for name, why in parsed.removed.items())
    if script.removed:
        removed = (Remark(script.path, script.removed), *removed)
    settings = {"script": script.path, **launch, **parsed.values}
    return Invocation(trainer, settings, parsed.unknown, removed, tuple(notes), refused_flags(parsed))


def refused_flags(parsed: flags.Parsed) -> tuple[Remark, ...]:
    """What ends the run before it starts, of a command line that was parsed."""
    return tuple(Remark(name, why) for name, why in parsed.refused.items())


def command_line(settings: Settings, extra: Mapping[str, object], launcher: Iterable[str]) -> str:
    """One launchable command: the launcher, its flags, the script, its flags and `extra` that no Plan field carries."""
    flags_of = {name: value for name, value in settings.items() if name.startswith("--")}
    words = [*launcher]
    for name, value in settings.items():
        if name.startswith("launch:"):
            words.append(_flag(name.removeprefix("launch:"), value))
    lines = [" ".join([*words, str(settings["script"])])]
    lines += [_flag(name, value) for name, value in {**flags_of, **extra}.items()]
    return " \\\n  ".join(lines) + "\n"


def command_settings(settings: Settings) -> Settings:
    """The settings that appear in a command line: without the counts of GPUs and nodes, and without what the
    environment sets."""
    return {name: value for name, value in settings.items() if ":" not in name or name.startswith("launch:")}


def script_head(plan: Plan) -> str:
    """The first lines of a shell script, with PyTorch's allocator settings where the plan needs them."""
    allocator = f"export {ALLOCATOR}\n" if plan.strategy.expandable_segments else ""
    return f"#!/bin/bash\nset -e\n{allocator}"


def _flag(name: str, value: object) -> str:
    if value is True:
        return name
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([name, *(shlex.quote(str(item)) for item in values)])


def one_of(table: Mapping[str, Any], setting: str) -> Callable[[Any], Any]:
    """A reader for a setting whose values are words, in any case. It raises a VplanError that names the nearest
    word."""
    lower = {key.lower(): value for key, value in table.items()}

    def read(value: Any) -> Any:
        text = str(value).lower()
        if text not in lower:
            fix = did_you_mean(text, lower, "we know " + ", ".join(table))
            raise VplanError(f"{setting} {quoted(value)} is not known", fix)
        return lower[text]

    return read


def word_for(table: Mapping[str, Any], field: str, instead: Any, why: str = "it has no setting for that") -> Any:
    """A writer that gives the first word of the table for a value. It raises an InexpressibleError, with `instead`, for
    a value that is not in it."""
    words: dict[Any, str] = {}
    for word, value in table.items():
        words.setdefault(value, word)

    def write(value: Any) -> str:
        if value not in words:
            raise InexpressibleError(UnsupportedValue(field, value, instead, why))
        return words[value]

    return write
