"""Finds a model's lists of repeated blocks, and the config keys that set their lengths, by building it on the meta
device.

A key sets the length of a list if raising it by one makes the list longer by one. Names are not considered, except for
the stages of a UNet (`STAGE_KEYS`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from accelerate import init_empty_weights
from torch import nn

from planner.tape.format import HEAD, TAIL
from trainers.families.common.model_classes import build
from trainers.recording.block_places import find_runs
from trainers.recording.own import REFUSALS


class BlockList(NamedTuple):
    """A module list of blocks, and the config key that sets its length."""

    name: str
    depth_key: str
    """"" if no key does: then the list is recorded whole"""
    blocks: int
    last_apart: bool
    """whether the last block is built differently from the others"""


def built(model_class: Any, config: Mapping[str, Any]) -> nn.Module:
    """The model with its parameters on the meta device. Raises one of `REFUSALS` if it cannot be built."""
    from diffusers.models.modeling_utils import no_init_weights

    with no_init_weights(), init_empty_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(model_class, config)


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """(name, list) of the outermost module lists that hold parameters; a list of lists counts as the lists in it."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{above}.") for above in outer):
            if all(isinstance(child, nn.ModuleList) for child in module.children()):
                continue
            outer.append(name)
            if any(True for _ in module.parameters()):
                yield name, module


def list_names(model: nn.Module) -> list[str]:
    """The names of the outermost module lists of a model that hold parameters."""
    return [name for name, _ in _lists(model)]


def block_lists(model_class: Any, config: Mapping[str, Any], model: nn.Module) -> list[BlockList]:
    """The lists of blocks of a model, in no particular order: module lists whose length a config key sets, or with the
    name of a UNet's stages."""
    counts = {name: len(module) for name, module in _lists(model)}
    candidates = [key for key, value in config.items() if type(value) is int and value in counts.values()]
    keys = _counting_keys(model_class, config, candidates, counts)
    found = []
    for name, module in _lists(model):
        if name in keys:
            found.append(BlockList(name, keys[name], counts[name], _last_apart(module)))
        elif name in STAGE_KEYS:
            found.append(BlockList(name, _stage_key(config, counts[name], name), counts[name], False))
        elif name.rpartition(".")[0] in STAGE_KEYS:  # a stage that is a list itself
            found.append(BlockList(name, "", counts[name], False))
    return found


def _counting_keys(
    model_class: Any, config: Mapping[str, Any], candidates: list[str], counts: Mapping[str, int]
) -> dict[str, str]:
    """List -> the key that sets its length. All keys are raised at once, each by a different number; if the class
    cannot be built so, one by one."""
    raised = {key: position + 1 for position, key in enumerate(candidates)}
    keys = _grown(model_class, config, raised, counts)
    if keys is None:
        found = [_grown(model_class, config, {key: 1}, counts) or {} for key in candidates]
        keys = {name: key for one in reversed(found) for name, key in one.items()}
    return keys


def _grown(
    model_class: Any, config: Mapping[str, Any], raised: Mapping[str, int], counts: Mapping[str, int]
) -> dict[str, str] | None:
    """List -> the key that was raised by as much as the list grew; None if the model cannot be built so."""
    try:
        model = built(model_class, {**config, **{key: config[key] + more for key, more in raised.items()}})
    except REFUSALS:
        return None
    grown = {name: len(module) - counts.get(name, 0) for name, module in _lists(model)}
    by_number = {more: key for key, more in raised.items()}
    return {name: by_number[grown[name]] for name in counts if grown.get(name) in by_number}


def _last_apart(module: nn.ModuleList) -> bool:
    blocks = list(module.children())
    if len(blocks) < 2:
        return False
    signatures = [
        (type(block), [(name, tuple(tensor.shape)) for name, tensor in block.named_parameters()]) for block in blocks
    ]
    return signatures[-1] != signatures[-2] and all(one == signatures[0] for one in signatures[:-1])


STAGE_KEYS = {"down_blocks": "down_block_types", "up_blocks": "up_block_types"}
"""The stages of a UNet, and the list in its config that has an entry for each."""


def _stage_key(config: Mapping[str, Any], count: int, name: str) -> str:
    """The config key with an entry for each stage; "" if there is none of that length."""
    key = STAGE_KEYS[name]
    value = config.get(key)
    return key if isinstance(value, list | tuple) and len(value) == count else ""


def stand_for_all(shallow: nn.Module, whole: nn.Module, names: list[str]) -> bool:
    """Whether the blocks of a shallow model can stand for those of the whole one: the named lists have as many runs of
    identical blocks, each of full length or long enough to have a middle block."""
    few, every = ([run.count for run in find_runs(model, names, None)[0]] for model in (shallow, whole))
    enough = HEAD + 1 + TAIL
    return len(few) == len(every) and all(
        count == full or enough <= count <= full for count, full in zip(few, every, strict=True)
    )


def in_running_order(model: nn.Module, names: list[str], called: list[nn.Module]) -> list[str]:
    """The lists of blocks in the order in which their first blocks ran; lists whose first block did not run are left
    out."""
    first = {name: next(iter(model.get_submodule(name).children())) for name in names}
    order = {id(module): position for position, module in reversed(list(enumerate(called)))}
    ran = [name for name in names if id(first[name]) in order]
    return sorted(ran, key=lambda name: order[id(first[name])])
