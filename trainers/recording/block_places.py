"""Runs of identical blocks in a model, and the place of a block in its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

Place = tuple[int, int]
"""(run, index): the index-th block of a run of identical blocks."""


@dataclass
class LikeBlocks:
    """A maximal run of structurally equal blocks in one module list."""

    module_list: str
    start: int
    count: int


def find_runs(
    model: nn.Module, lists: list[str], checkpointed: int | None
) -> tuple[list[LikeBlocks], dict[str, Place]]:
    """Groups the blocks of the named module lists into runs of equal structure; maps each block's name to its place.

    ``checkpointed``: with partial checkpointing, the number of checkpointed blocks in execution order; a run ends
    there too.
    """
    runs: list[LikeBlocks] = []
    places: dict[str, Place] = {}
    checkpoints = 0
    for module_list in lists:
        last: Any = None
        for index, block in enumerate(model.get_submodule(module_list).children()):
            shapes = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()]
            signature = (type(block), shapes, checkpointed is not None and checkpoints < checkpointed)
            if signature != last:
                runs.append(LikeBlocks(module_list, index, 0))
            last = signature
            places[f"{module_list}.{index}"] = (len(runs) - 1, runs[-1].count)
            runs[-1].count += 1
            checkpoints += 1
    return runs, places


def place_of_name(name: str, places: dict[str, Place]) -> Place | None:
    """The place of the block a parameter belongs to, from its dotted name."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        place = places.get(".".join(parts[:end]))
        if place is not None:
            return place
    return None
