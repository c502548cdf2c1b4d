"""A Tape: the allocations of one real training step, with sizes symbolic in the shape, and its unfolding to full depth.

A tape file is what ``vplan record`` wrote (trainers/compress.py): templates of events per kind of block. ``Unfolding`` lays
pieces out one after another as a flat Program: numbered buffers, allocated and freed in the order the real step does it.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from planner.errors import VplanError

FORMAT = 1
ATOMS = ("B", "F", "H", "W", "T", "R")
"""Batch, latent frames, rows and columns of the patch grid, text tokens, LoRA rank."""

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


def _product(atoms: Sequence[int], exponents: Sequence[int]) -> int:
    return math.prod(atom**exponent for atom, exponent in zip(atoms, exponents, strict=True) if exponent)


@dataclass(frozen=True)
class Run:
    """Like blocks in a row: ``count`` of the full model, in module list ``module_list`` from block ``start``."""

    module_list: str
    start: int
    count: int


@dataclass(frozen=True)
class Tape:
    """A recorded step of one model under one method, precision, checkpointing and optimizer."""

    model: str
    variant: Mapping[str, Any]
    versions: Mapping[str, str]
    regime: Mapping[str, int]
    """Atoms it holds at one value only, e.g. {"B": 1} or {"T": 512}; every other atom is free from 2 up."""

    atoms: tuple[str, ...]
    sums: Mapping[str, tuple[int, tuple[str, ...]]]
    sizes: tuple[Monomial, ...]
    runs: tuple[Run, ...]
    names: tuple[str, ...]
    ops: tuple[str, ...]
    pieces: Mapping[str, list[dict[str, Any]]]

    def values(self, grid: Mapping[str, int]) -> list[int]:
        """The values of the tape's atoms at a shape; refuses a shape outside the regime."""
        for name, fixed in self.regime.items():
            if grid[name] != fixed:
                raise VplanError(f"the tape of {self.model} holds {name} = {fixed} only, not {grid[name]}", "record another")
        values = [grid[name] for name in ATOMS]
        for name in self.atoms[len(ATOMS) :]:
            constant, products = self.sums[name]
            values.append(constant + sum(math.prod(grid[atom] for atom in product) for product in products))
        return values


def read_tape(path: Path) -> Tape:
    """Reads a tape file; a damaged one is named and refused."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        return parse_tape(data)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, VplanError):
            raise
        raise VplanError(f"tape {path.name} is damaged ({type(error).__name__})", "reinstall vplan or record it again") from None


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
        sizes=tuple(
            Monomial(size[0], tuple(size[1]), *(size[2:4]), *map(tuple, size[4:])) for size in body["sizes"]
        ),
        runs=tuple(Run(run["list"], run["start"], run["count"]) for run in body["runs"]),
        names=tuple(body["names"]),
        ops=tuple(body["ops"]),
        pieces=body["pieces"],
    )


class Moment(NamedTuple):
    """Where in the step a stretch of events belongs."""

    piece: str
    passes: str
    run: int | None
    block: int


@dataclass
class Program:
    """A flat list of events over numbered buffers. ``ops[i] >= 0`` allocates that buffer, ``< 0`` frees ``~ops[i]``."""

    ops: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    """Per buffer: bytes."""

    category: list[int] = field(default_factory=list)
    """Per buffer: index into CATEGORIES."""

    op: list[str] = field(default_factory=list)
    """Per buffer: the operator that made it."""

    kernel: list[int] = field(default_factory=list)
    """Per buffer: 0, or the attention kernel without which it is not there (index into KERNELS)."""

    moments: list[tuple[int, Moment]] = field(default_factory=list)
    """(index of the first event, moment)"""

    named: dict[tuple[int, str], int] = field(default_factory=dict)
    """(category, full name) -> buffer, of what lives across pieces: weights, gradients, optimizer states, the batch."""


class Unfolding:
    """Lays pieces of tapes out at full depth, one after another, into one Program at one shape."""

    def __init__(self) -> None:
        self.program = Program()

    def add(self, tape: Tape, piece: str, grid: Mapping[str, int], counts: Sequence[int] | None = None) -> None:
        """Appends a piece (load, step, optimizer_first or optimizer). ``counts``: blocks per run, else the full model's."""
        values = tape.values(grid)
        sizes = [size.value(values) for size in tape.sizes]
        _Piece(self.program, tape, sizes, list(counts or [run.count for run in tape.runs])).play(piece)


class _Piece:
    """One piece being laid out."""

    def __init__(self, program: Program, tape: Tape, sizes: list[int], counts: list[int]) -> None:
        self.program = program
        self.tape = tape
        self.sizes = sizes
        self.counts = counts
        self.items: list[dict[str, Any]] = []
        self.made: list[dict[int, int]] = []
        """Per item: block -> number of its first buffer."""

    def play(self, piece: str) -> None:
        self.items = self.tape.pieces[piece]
        for item in self.items:
            bases: dict[int, int] = {}
            self.made.append(bases)
            for block, template in self._blocks(item):
                bases[block] = len(self.program.size)
                self.program.moments.append((len(self.program.ops), Moment(piece, item["pass"], item["run"], block)))
                self._events(template["events"], block)

    def _blocks(self, item: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        templates, run = item["templates"], item["run"]
        if run is None:
            return [(-1, templates[0])]
        count = self.counts[run]
        if not item.get("step"):
            return [(item["block"] % count, templates[0])]
        order = range(count) if item["step"] > 0 else range(count - 1, -1, -1)
        return [(block, templates[template_of(block, count, len(templates))]) for block in order]

    def _events(self, events: list[list[int]], block: int) -> None:
        """Events are [size, category, op, kernel, named, (mode, run, block, name)], [item, mode, block, position] for a
        free, or [-1, category, mode, run, block, name] for the free of what another piece made."""
        program, sizes, ops = self.program, self.sizes, self.tape.ops
        for event in events:
            if len(event) == 4:
                item, mode, target, position = event
                base = self.made[item][self._target(mode, target, self.items[item]["run"], block)]
                program.ops.append(~(base + position))
            elif len(event) == 6:
                program.ops.append(~program.named.pop((event[1], self._name(event[2:], block))))
            else:
                buffer = len(program.size)
                program.ops.append(buffer)
                program.size.append(sizes[event[0]])
                program.category.append(event[1])
                program.op.append(ops[event[2]])
                program.kernel.append(event[3])
                if event[4]:
                    program.named[event[1], self._name(event[5:], block)] = buffer

    def _name(self, owner: list[int], block: int) -> str:
        mode, number, target, name = owner
        if number < 0:
            return self.tape.names[name]
        run = self.tape.runs[number]
        return f"{run.module_list}.{run.start + self._target(mode, target, number, block)}.{self.tape.names[name]}"

    def _target(self, mode: int, target: int, run: int | None, block: int) -> int:
        """The block an address means. Mode 0: none; 1: relative to this block; 2: from the first; 3: from the last."""
        if mode == 0 or run is None:
            return -1
        return block + target if mode == 1 else target % self.counts[run]


def template_of(block: int, count: int, kept: int) -> int:
    """Which kept template a block of a sweep uses: the first two, a middle, or the last two."""
    if count == kept:
        return block
    assert kept == HEAD + 1 + TAIL and count >= HEAD + TAIL, (kept, count)
    if block < HEAD:
        return block
    return block - count + kept if block >= count - TAIL else HEAD
