"""accelerate's launch: the settings that its flags and files make, and the engine and number formats that they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath

from planner.dialects.base.bindings import Fields, FunctionPair, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.dialect import Move
from planner.dialects.base.engine_files.deepspeed_file import of_deepspeed, unknown_keys
from planner.dialects.base.engine_files.fsdp_launch import (
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
from planner.dialects.base.script import NODES as NODE_FLAGS
from planner.dialects.base.script import PythonCommand, Script
from planner.errors import VplanError, quoted
from planner.spec.job import SPLIT
from planner.spec.rules import DEEPSPEED
from planner.untrusted import flat

ACCELERATE = "accelerate 16cb6eb"

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""What a plan with expandable segments has in its environment."""
NEW_ALLOC_CONF = "PYTORCH_ALLOC_CONF"
ALLOC_CONF = ("PYTORCH_CUDA_ALLOC_CONF", NEW_ALLOC_CONF)


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
    for flag, why in program.uncounted.items():
        launch.pop(f"launch:{flag}", None)
        notes.append(f"{flag} {why}: as many as {'--nodes' if flag in NODE_FLAGS else '--gpu or --gpus'} says")
    for name, count in (("gpus", program.gpus), ("nodes", program.nodes)):
        if count is not None:
            launch[name] = count
    if "gpus" not in launch and launch.get("launch:--num_processes"):
        launch["gpus"] = max(1, int(launch["launch:--num_processes"]) // int(launch.get("nodes", 1)))
    if program.visible and (program.launcher in ("accelerate", "deepspeed") or program.uncounted):
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

ON_HOST = {"offload_optimizer": "cpu", "offload_gradients": "cpu"}
"""An optimizer that steps in host RAM takes the gradients along."""

SAVED_WHOLE: Settings = {"launch:--zero3_save_16bit_model": "true"}
"""Without it accelerate's ``get_state_dict`` raises a ValueError under stage 3, when a script saves for the first time
(rehearsed with accelerate 1.15 and deepspeed 0.19.8)."""

_LAUNCH = (
    *("launch:--use_deepspeed", "launch:--zero_stage", "launch:--use_fsdp", "launch:--mixed_precision"),
    *("launch:--offload_optimizer_device", "launch:--offload_param_device"),
    *("launch:--deepspeed_config_file", *SAVED_WHOLE, "--use_deepspeed"),
    *(OFFLOAD, VERSION, POLICY, CLASSES, LOADING),
)


def engine(
    plain: Callable[[Settings], Fields],
    write_plain: Callable[[Fields], Settings],
    words: Mapping[str, str],
    fsdp: Support | str,
    with_deepspeed: Callable[[Fields], Settings] = lambda fields: {},
    context: Callable[[Fields], Settings] = lambda fields: {},
) -> FunctionPair:
    """What accelerate's launch decides: DDP, DeepSpeed's ZeRO or FSDP, and the number formats that go with them.

    `plain` gives weights_dtype, adapter_dtype and autocast without an engine; `write_plain` writes them, or raises.
    `fsdp` says how a script trains under FSDP, or why none does. `with_deepspeed` gives what a script needs beside it,
    of its own flags and the launcher's, or raises an InexpressibleError for a stage that it cannot train or save with;
    `context` gives the settings of other bindings that `plain` and `fsdp` read. DeepSpeed in bf16 keeps an fp32 master
    and no autocast (accelerate sets `bf16.enabled`; planner.spec.rules DEEPSPEED).
    """

    def to_fields(launch: Settings) -> Fields:
        return _engine_fields(launch, plain(launch), fsdp)

    def to_settings(fields: Fields) -> Settings:
        sharding, expected = str(fields["sharding"]), "ddp" if several_gpus(fields) else "none"
        if sharding not in SPLIT:
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
            settings = _deepspeed_settings(fields, with_deepspeed(fields))
        world = {name: fields[name] for name in ("gpus", "nodes") if name in fields}
        try:
            result = to_fields(settings | world | context(fields))
        except VplanError as refused:  # this launcher cannot do it
            raise InexpressibleError(UnsupportedValue("sharding", sharding, expected, refused.message)) from None
        wrong = [name for name in ENGINE if result[name] != fields[name]]
        if wrong:
            how = f"accelerate with {sharding}" if sharding in SPLIT else "without an engine this trainer"
            why = f"{how} does it so ({ACCELERATE})"
            raise InexpressibleError(*(UnsupportedValue(name, fields[name], result[name], why) for name in wrong))
        return settings

    listed = dict.fromkeys(ENGINE, "accelerate launch") | dict(words)
    if isinstance(fsdp, str):
        listed["sharding"] = "accelerate launch, without FSDP"
    return FunctionPair(ENGINE, _LAUNCH, to_fields, to_settings, listed)


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
    return no_engine | formats | {"sharding": "ddp" if several_gpus(launch) else "none"}


def stage_3_notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What ends a run under stage 3 when a script saves by accelerate's ``get_state_dict``."""
    asked = settings.get("launch:--zero3_save_16bit_model", False)
    in_file = settings.get("deepspeed:zero_optimization.stage3_gather_16bit_weights_on_model_save", False)
    if fields["sharding"] == "zero-3" and "true" not in (str(asked).lower(), str(in_file).lower()):
        yield "its first save ends it under ZeRO-3: accelerate launch --zero3_save_16bit_model true gathers the weights"


def by_fsdp(trained: Callable[[Fields], Fields]) -> Move:
    """FSDP, where a binding writes it. ``trained``: the number formats that a script has under it."""
    no_engine = {"autocast": "none", "master_weights": "none", "offload_optimizer": "none", "offload_params": "none"}
    return Move(
        {"sharding": "fsdp"},
        "weights are sharded across the GPUs and gathered for every block",
        by_fields=lambda fields: ({"sharding": "fsdp", **no_engine, **trained(fields)},),
        when=several_gpus,
    )


def half_precision(settings: Settings) -> str:
    """The mixed precision, of the script or of ``accelerate launch``: bf16, fp16, or fp32 for none."""
    precision = str(settings.get("--mixed_precision", settings.get("launch:--mixed_precision", "no")))
    return precision if precision in ("bf16", "fp16") else "fp32"


def several_gpus(fields: Fields) -> bool:
    """Whether there is more than one GPU to share among."""
    return int(fields.get("gpus", 1)) * int(fields.get("nodes", 1)) > 1


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
