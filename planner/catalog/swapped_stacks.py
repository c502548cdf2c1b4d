"""How other trainers count the blocks they swap: how many of which stack, and how many they let go.

Their setting is ``blocks_to_swap``. Of a model of one stack it is a number of blocks. Of one with double and single
blocks it is split between the two, and those that leave are the last of each stack, not the last of the model.
`swap_blocks` of a strategy is the number of blocks that leave in all. Sources: `profiles/block_swap.toml`.
"""

from __future__ import annotations

import functools
import tomllib
from typing import Literal

import profiles
from planner.catalog.profiles import ModelProfile
from planner.schema import Record


class Counting(Record):
    """How a trainer counts a model's blocks."""

    stay: int
    """blocks of each stack that its assertion keeps on the GPU"""

    split: Literal["", "halves", "ratio"] = ""
    """between double and single blocks: two single ones for a double one, or as many of each as the model has"""

    more: int = 0
    """single blocks that leave beside those"""


FETCHED_AGAIN = frozenset({"simpletuner@ramtorch"})
"""Trainers, by version, whose swapped weights come once more for backward, layer by layer, so that they swap without
checkpoints too (simpletuner/helpers/ramtorch/modules/linear.py ``BouncingLinearFn``)."""


def fetches_again(trainer: str) -> bool:
    """Whether a trainer, written ``trainer@version``, brings swapped weights once more for backward."""
    return trainer in FETCHED_AGAIN


Split = tuple[int, ...]
"""Blocks that leave, by stack of the profile."""


@functools.cache
def _table() -> dict[str, dict[str, Counting]]:
    """Trainer -> diffusers' class of a model -> how it counts."""
    tables = tomllib.loads(profiles.BLOCK_SWAP.read_text(encoding="utf-8"))
    where = f"profile {profiles.BLOCK_SWAP.name} is damaged"
    return {
        trainer: {model: Counting.read(row, where=where) for model, row in rows.items()}
        for trainer, rows in tables.items()
    }


def _counting(trainer: str, model: ModelProfile) -> Counting | None:
    return _table().get(trainer.partition("@")[0], {}).get(model.diffusers_class)


def splits(trainer: str, model: ModelProfile) -> dict[int, Split]:
    """``blocks_to_swap`` -> the blocks of each stack that leave, for every value that the trainer takes; empty where it
    swaps no blocks of this model."""
    counting, depths = _counting(trainer, model), [model.depth(stack) for stack in model.stacks]
    if counting is None:
        return {}
    if not counting.split:
        main = max(range(len(depths)), key=depths.__getitem__)
        most = depths[main] - counting.stay
        return {blocks: tuple(blocks * (at == main) for at in range(len(depths))) for blocks in range(1, most + 1)}
    split = _by_ratio if counting.split == "ratio" else _by_halves
    found = {blocks: split(blocks, depths, counting) for blocks in range(1, sum(depths))}
    most_of = [depth - counting.stay for depth in depths]
    return {blocks: each for blocks, each in found.items() if all(map(int.__le__, each, most_of))}


def _by_halves(blocks: int, depths: list[int], counting: Counting) -> Split:
    """Half of them double blocks, and for each of the others two single ones, which are half as large."""
    double = blocks // 2
    return double, 2 * (blocks - double) + counting.more


def _by_ratio(blocks: int, depths: list[int], counting: Counting) -> Split:
    """As many of each as the model has, moved to the stack that has room (musubi-tuner flux_2/flux2_models.py:500)."""
    doubles, singles = depths
    ratio = singles / doubles
    double = round(blocks / (1 + ratio / 2))
    single = round(double * ratio)
    if 2 * doubles < singles:
        while double >= 1 and double > doubles - counting.stay:
            double, single = double - 1, single + 2
    else:
        while single >= 2 and single > singles - counting.stay:
            double, single = double + 1, single - 2
    if not double and not single:
        double, single = (0, 1) if singles >= doubles else (1, 0)
    return double, single


def split_of(trainer: str, model: ModelProfile, swapped: int) -> Split | None:
    """The blocks of each stack that leave where ``swapped`` leave in all: by the trainer's setting for as many, or the
    next more. None where blocks are counted as ours are, from the model's end."""
    counting = _counting(trainer, model)
    if counting is None or not counting.split:
        return None
    return _nearest(splits(trainer, model), swapped)[1]


def setting_of(trainer: str, model: ModelProfile, swapped: int) -> tuple[int, int]:
    """(``blocks_to_swap``, blocks that leave with it) for a number of blocks, or the next more that there is a setting
    for, or the most. The trainer swaps blocks of this model (`splits`)."""
    blocks, split = _nearest(splits(trainer, model), swapped)
    return blocks, sum(split)


def _nearest(known: dict[int, Split], swapped: int) -> tuple[int, Split]:
    enough = [entry for entry in known.items() if sum(entry[1]) >= swapped]
    if enough:
        return min(enough, key=lambda entry: sum(entry[1]))
    return max(known.items(), key=lambda entry: sum(entry[1]))
