"""FSDP by accelerate's launch: which modules are gathered together, and in which number format it trains.

Read in accelerate 16cb6eb (utils/fsdp_utils.py, utils/dataclasses.py FullyShardedDataParallelPlugin). What is not in a
unit of its own is in the root's, which is gathered whole for forward and backward; an estimate has one unit a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from planner.dialects.base.bindings import Fields, Settings
from planner.errors import VplanError, did_you_mean, quoted

POLICY, CLASSES = "launch:--fsdp_auto_wrap_policy", "launch:--fsdp_transformer_layer_cls_to_wrap"
VERSION, OFFLOAD = "launch:--fsdp_version", "launch:--fsdp_offload_params"
LOADING = "launch:--fsdp_cpu_ram_efficient_loading"
BY_CLASS, BY_SIZE, NONE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
NOT_PRICED = "the whole model is gathered at once, which is not priced"


class Units(NamedTuple):
    """How a script trains a model under FSDP."""

    blocks: tuple[str, ...]
    """the classes of the model's blocks"""
    named: bool
    """whether the model's class names them itself (``_no_split_modules``)"""
    adapters: bool
    """whether it trains adapters on a frozen model"""
    trained: str = "fp32"
    """the format of what is trained: accelerate casts it to fp32 (``fsdp2_prepare_model``), and a script may cast it
    back"""
    version: int = 2
    """of FSDP, in which the script trains"""


Support = Callable[[Settings], Units | str]
"""Settings -> how their script trains under FSDP, or why it does not."""


def fsdp_fields(launch: Settings, formats: Fields, support: Support | str) -> Fields:
    """The fields of FSDP by the launcher's settings; a VplanError for what is not priced. ``formats``: the number
    formats without an engine."""
    units = support if isinstance(support, str) else support(launch)
    if isinstance(units, str):
        raise VplanError(f"FSDP is not priced here: {units}", "leave --use_fsdp out")
    _check_version(launch, units)
    _check_policy(launch, units)
    if formats["autocast"] == "none":
        fault = "FSDP without mixed precision trains in the weights' own format, which is not priced"
        raise VplanError(fault, "pass --mixed_precision bf16")
    offload = "cpu" if str(launch.get(OFFLOAD, "")).lower() == "true" else "none"
    trained = "adapter_dtype" if units.adapters else "weights_dtype"
    return {
        **formats,
        "sharding": "fsdp",
        "autocast": "none",
        "offload_optimizer": offload,
        "offload_params": offload,
        trained: units.trained,
    }


def offload_settings(fields: Fields) -> Settings:
    """The launcher's flag that says where shares are."""
    return {OFFLOAD: "true"} if fields["offload_params"] == "cpu" else {}


def fsdp_settings(units: Units) -> Settings:
    """The launcher's flags for FSDP with one unit a block."""
    settings: Settings = {"launch:--use_fsdp": True, VERSION: units.version, POLICY: BY_CLASS}
    if not units.named:
        settings[CLASSES] = ",".join(units.blocks)
    # FSDP1 takes that for models of transformers alone; without it FSDP2 leaves what it replaces on the GPU.
    return settings | ({LOADING: "false"} if units.version == 1 else {})


def fsdp_notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What stays beside the shares."""
    whole = str(settings.get(LOADING, "true")).lower() == "false"
    if fields["sharding"] == "fsdp" and fields["method"] == "lora" and whole:
        what = "the script's own list of its adapters keeps them whole and in fp32 on every GPU, which is not estimated"
        yield f"{what}, and takes more than this: leave --fsdp_cpu_ram_efficient_loading out"


def _check_version(launch: Settings, units: Units) -> None:
    """FSDP1, accelerate's default, has one flat parameter a unit: it is in fp32 where anything in it trains
    (accelerator.py ``prepare_model``), and so is its gradient, of frozen weights too (torch,
    fully_sharded_data_parallel.py ``use_orig_params``)."""
    if units.adapters and str(launch.get(VERSION, 1)) != "2":
        fault = "FSDP 1 keeps the frozen weights under adapters, and gradients of them, in fp32, which is not priced"
        raise VplanError(fault, "pass --fsdp_version 2")


def _check_policy(launch: Settings, units: Units) -> None:
    """Raises a VplanError where blocks are not gathered one by one."""
    policy = str(launch.get(POLICY) or NONE).upper()
    asked = f"--fsdp_auto_wrap_policy {BY_CLASS}"
    classes = f"--fsdp_transformer_layer_cls_to_wrap {','.join(units.blocks)}"
    if policy == NONE:
        fault = f"FSDP without --fsdp_auto_wrap_policy wraps nothing: {NOT_PRICED}"
        raise VplanError(fault, f"pass {asked}" if units.named else f"pass {asked} {classes}")
    if policy == BY_SIZE:  # FSDP1's stops at lists
        if str(launch.get(VERSION, 1)) == "2":
            fault = f"{BY_SIZE} ends before the first step: FSDP 2 refuses lists of blocks, which are as large"
            raise VplanError(fault, f"pass {asked}" if units.named else f"pass {asked} {classes}")
        return
    if policy != BY_CLASS:
        fix = did_you_mean(policy, [BY_CLASS, BY_SIZE, NONE], f"pass {asked}")
        raise VplanError(f"--fsdp_auto_wrap_policy {quoted(policy)} is none of accelerate's", fix)
    given = [name for name in str(launch.get(CLASSES) or "").split(",") if name]
    if spaced := [name for name in given if name != name.strip()]:
        fault = f"--fsdp_transformer_layer_cls_to_wrap: accelerate finds no class {quoted(spaced[0])}, with the space"
        raise VplanError(fault, f"pass {classes}")
    if not given and not units.named:
        fault = f"{BY_CLASS} without classes wraps nothing, as the model's own code names none: {NOT_PRICED}"
        raise VplanError(fault, f"pass {classes}")
    if missing := [name for name in units.blocks if given and name not in given]:
        fault = f"--fsdp_transformer_layer_cls_to_wrap leaves {', '.join(missing)} out, which is then gathered at once"
        raise VplanError(f"{fault} and not priced", f"pass {classes}")
