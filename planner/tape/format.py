"""A Tape: the allocations of one real training step, with sizes symbolic in the shape.

A tape file is what ``vplan record`` wrote (trainers/recording/compress.py): templates of events per kind of block,
which `planner.tape.program` lays out at full depth.
"""

from __future__ import annotations

import functools
import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from planner.errors import NotRecordedError, VplanError

FORMAT = 1
ATOMS = ("B", "F", "H", "W", "T", "R", "E")
"""Batch, frames, rows and columns of the patch grid, text tokens, LoRA rank, and extra tokens: reference images, audio.
A tape lists those its model has."""

CATEGORIES = ("weight", "gradient", "optimizer", "batch", "activation", "temporary", "workspace")
KINDS = ("matmul", "attention", "convolution", "pointwise", "kernels")
KERNELS = ("any", "flash")
HEAD, TAIL = 2, 2


class Monomial(NamedTuple):
    """``coefficient * product(atom ** exponent)``, times a dimension rounded up to ``multiple`` when that is not 0."""

    coefficient: int
    exponents: tuple[int, ...]
    multiple: int = 0
    inner: int = 0
    inner_exponents: tuple[int, ...] = ()

    def value(self, atoms: Sequence[int]) -> int:
        """The size in bytes at the given values of the tape's atoms."""
        product = self.coefficient * _product(atoms, self.exponents)
        if self.multiple:
            dimension = self.inner * _product(atoms, self.inner_exponents)
            product *= -(-dimension // self.multiple) * self.multiple
        return product


class Growing(NamedTuple):
    """A size that grows from block to block: ``base + slope * index``. Chunks of a VAE that are joined one by one."""

    base: Monomial
    slope: Monomial

    def value(self, atoms: Sequence[int], index: int) -> int:
        """The size in bytes in the index-th block."""
        return self.base.value(atoms) + index * self.slope.value(atoms)


def _product(atoms: Sequence[int], exponents: Sequence[int]) -> int:
    return math.prod(atom**exponent for atom, exponent in zip(atoms, exponents, strict=True) if exponent)


@dataclass(frozen=True)
class BlockRun:
    """Like blocks in a row: ``count`` of the full model, in module list ``module_list`` from block ``start``."""

    module_list: str
    start: int
    count: int
    recorded: int
    """blocks that were there when it was recorded"""


@dataclass(frozen=True, eq=False)
class Tape:
    """A recorded step of one model under one method, precision, checkpointing and optimizer."""

    model: str
    variant: str
    versions: Mapping[str, str]
    regime: Mapping[str, int]
    """Atoms it holds at one value only, e.g. {"B": 1} or {"T": 512}; every other atom is free."""

    atoms: tuple[str, ...]
    sums: Mapping[str, tuple[int, tuple[str, ...]]]
    sizes: tuple[Monomial | Growing, ...]
    runs: tuple[BlockRun, ...]
    names: tuple[str, ...]
    ops: tuple[str, ...]
    pieces: Mapping[str, list[dict[str, Any]]]
    tile: tuple[int, ...] = ()
    """of a VAE: rows and columns of a tile, and of the stride between tiles, pixels"""
    rounded: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    patterns: dict[tuple[int, bool], Any] = field(default_factory=dict, repr=False)
    """(id of a template, whether it is of something beside the model) -> the template taken apart, see
    `planner.tape.templates`."""
    alike: dict[tuple[int, bool], list[tuple[list[list[int]], Any]]] = field(default_factory=dict, repr=False)
    """(how many events, whether it is of something beside the model) -> templates taken apart, by their events"""
    shares: dict[str, float] = field(default_factory=dict, repr=False)
    """`recorded_share` of the parameters it was asked for: a search asks for the same ones a hundred times."""

    @functools.cached_property
    def growing(self) -> frozenset[int]:
        """Which of the sizes grow from block to block."""
        return frozenset(index for index, size in enumerate(self.sizes) if isinstance(size, Growing))

    def values(self, grid: Mapping[str, int]) -> list[int]:
        """The values of the tape's atoms at a shape; refuses a shape outside the regime."""
        for name, fixed in self.regime.items():
            if grid[name] != fixed:
                if name == "B":  # its code loops over the samples, so that the events grow with the batch
                    fault = f"{self.model} works through a batch sample by sample, and batch {grid[name]}"
                    fix = f"use --batch-size 1 or {fixed}, with --gradient-accumulation"
                    raise NotRecordedError(f"{fault} is not recorded", fix)
                if name == "T":
                    fault = f"{self.model} is recorded with prompts of {fixed} tokens, not of {grid[name]}"
                    raise NotRecordedError(fault, f"use --text-tokens {fixed}, or leave it out")
                fault = f"the tape of {self.model} holds {name} = {fixed} only, not {grid[name]}"
                raise NotRecordedError(fault, "record another")
        known = {**grid, **derived(grid, self.rounded, self.sums)}
        return [known[name] for name in self.atoms]

    def recorded_share(self, name: str) -> float:
        """Recorded blocks per block of the full model, for the run a parameter's block is in; 1 outside the blocks."""
        if name not in self.shares:
            self.shares[name] = self._recorded_share(name)
        return self.shares[name]

    def _recorded_share(self, name: str) -> float:
        block = self.block_of(name)
        if block is None:
            return 1.0
        for run in self.runs:
            if run.module_list == block[0] and run.start <= block[1] < run.start + run.count:
                return run.recorded / run.count
        raise AssertionError(f"{name} is in no run")

    def block_of(self, name: str) -> tuple[str, int] | None:
        """(module list, index) of the block a parameter's full name lies in; None outside the blocks."""
        for run in self.runs:
            if name.startswith(f"{run.module_list}."):
                return run.module_list, int(name[len(run.module_list) + 1 :].split(".", 1)[0])
        return None


NOTHING = Tape("", "nothing", {}, {}, (), {}, (), (), (), (), {"optimizer_first": [], "optimizer": []})
"""The optimizer's tape of a job that only samples."""


def derived(
    grid: Mapping[str, int],
    rounded: Mapping[str, tuple[str, int]],
    sums: Mapping[str, tuple[int, tuple[str, ...]]],
) -> dict[str, int]:
    """Lengths that follow from a shape: products counted in several, rounded up, then sums of products of all those."""
    found = {name: -(-math.prod(grid[atom] for atom in product) // unit) for name, (product, unit) in rounded.items()}
    known = {**grid, **found}
    for name, (constant, products) in sums.items():
        found[name] = constant + sum(math.prod(known[atom] for atom in product) for product in products)
    return found


def read_tape(path: Path) -> Tape:
    """Reads a tape file; a damaged one is named and refused."""
    try:
        data = from_json(gzip.decompress(path.read_bytes()))
        return parse_tape(data)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, VplanError):
            raise
        fault = f"tape {path.name} is damaged ({type(error).__name__})"
        raise VplanError(fault, "reinstall vplan or record it again") from None


def parse_tape(data: Mapping[str, Any]) -> Tape:
    """The Tape of parsed JSON."""
    if data["format"] != FORMAT:
        raise VplanError(f"tape of format {data['format']}, this vplan reads {FORMAT}", "record it again")
    body = data["tape"]
    return Tape(
        model=data["model"],
        variant=data["variant"],
        versions=data["versions"],
        regime=data["regime"],
        atoms=tuple(body["atoms"]),
        sums={name: (constant, tuple(products)) for name, (constant, products) in data["sums"].items()},
        sizes=tuple(map(_size, body["sizes"])),
        runs=tuple(BlockRun(run["list"], run["start"], run["count"], run["recorded"]) for run in body["runs"]),
        names=tuple(body["names"]),
        ops=tuple(body["ops"]),
        pieces=body["pieces"],
        tile=tuple(data.get("tile", ())),
        rounded={name: (product, unit) for name, (product, unit) in data.get("rounded", {}).items()},
    )


def _size(size: list[Any]) -> Monomial | Growing:
    if size[0] == "grow":
        return Growing(*(Monomial(coefficient, tuple(exponents)) for coefficient, exponents in size[1:]))
    return Monomial(size[0], tuple(size[1]), *(size[2:4]), *map(tuple, size[4:]))
