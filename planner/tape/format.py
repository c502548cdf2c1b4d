"""The tape: every allocation and free of one real training step, with sizes symbolic in the shape.

This is the one definition of what a tape holds; `planner.tape.codec` reads and writes it as a file, and
docs/tape-format.md explains both with an example. Recording (trainers/recording/compress.py) makes a `Tape`, and
`planner.tape.program` lays one out at full depth.

A tape has pieces (``load``, ``step``, ``optimizer_first``, ``optimizer``, ``denoise``, ``encode``, ``decode``). A piece
is a list of sections: one template of events outside the repeated blocks or at one of them, or a sweep over all blocks
of a run. Events refer to the tape's tables (sizes, operators, names) and to each other by index.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from planner.errors import NotRecordedError, VplanError

FORMAT = 2
"""Number of the file format; increased by changes that old readers would misread."""

READABLE = (1, FORMAT)
"""Formats that can be read. In format 1 a free has the number of its section, and positions count from the first."""

ATOMS = ("B", "F", "H", "W", "T", "R", "E")
"""Batch, frames, rows and columns of the patch grid, text tokens, LoRA rank, and extra tokens: reference images, audio.
A tape lists those its model has."""

CATEGORIES = ("weight", "gradient", "optimizer", "batch", "activation", "temporary", "workspace")
"""What an allocation holds; an event stores the index. Tensors of the first four have names that other pieces use."""

ATTENTION_KERNELS = ("any", "flash")
"""Attention kernel with which an allocation happens: any, or flash attention only (its workspaces)."""

KINDS = ("matmul", "attention", "convolution", "pointwise", "kernels")
"""What an entry of `OperatorWork` counts; for ``kernels``, ``flops`` is the number of kernel launches."""

HEAD, TAIL = 2, 2
"""Blocks kept from the start and the end of a sweep, whose events differ from those of the blocks in between."""

NO_BLOCK, RELATIVE, FROM_FIRST, FROM_LAST = range(4)
"""How an address names a block: not at all; relative to the current block; by index; by index minus the run's count.
The last two are for events outside the run that refer to a block, so that they hold at every depth."""


class Monomial(NamedTuple):
    """``coefficient * product(atom ** exponent)``, times a dimension rounded up to ``multiple`` when that is not 0.

    With a negative multiple the size is 0 if the dimension needs no rounding: a copy that is only made to round it up.
    With ``above`` the dimension is only rounded if the rest of the product is larger than that.
    """

    coefficient: int
    exponents: tuple[int, ...]
    multiple: int = 0
    inner: int = 0
    inner_exponents: tuple[int, ...] = ()
    above: int = 0

    def value(self, atoms: Sequence[int]) -> int:
        """The size in bytes for the given values of the tape's atoms (batch, frames, ...), in the tape's order."""
        product = self.coefficient * _product(atoms, self.exponents)
        if self.multiple:
            dimension, multiple = self.inner * _product(atoms, self.inner_exponents), abs(self.multiple)
            if product <= self.above:
                return product * dimension
            product *= -(-dimension // multiple) * multiple if self.multiple > 0 or dimension % multiple else 0
        return product


class Growing(NamedTuple):
    """A size that grows from block to block, ``base + slope * index``: a VAE that concatenates chunks one by one."""

    base: Monomial
    slope: Monomial

    def value(self, atoms: Sequence[int], index: int) -> int:
        """The size in bytes in block number `index`, for the given values of the tape's atoms."""
        return self.base.value(atoms) + index * self.slope.value(atoms)


def values_of(sizes: Iterable[Monomial], atoms: Sequence[int]) -> list[int]:
    """`Monomial.value` of each, faster: a tape has hundreds of sizes but only a few dozen products of atoms."""
    products: dict[tuple[int, ...], int] = {}
    values = []
    for size in sizes:
        if size.multiple:
            values.append(size.value(atoms))
            continue
        exponents = size.exponents
        if exponents not in products:
            products[exponents] = _product(atoms, exponents)
        values.append(size.coefficient * products[exponents])
    return values


def _product(atoms: Sequence[int], exponents: Sequence[int]) -> int:
    return math.prod(atom**exponent for atom, exponent in zip(atoms, exponents, strict=True) if exponent)


class Allocation(NamedTuple):
    """An operator allocates a tensor that only its own piece refers to."""

    size: int
    """index into the tape's ``sizes``"""
    category: int
    """index into `CATEGORIES`"""
    op: int
    """index into the tape's ``ops``"""
    kernel: int
    """index into `ATTENTION_KERNELS`"""
    owners: int = 0
    """0: it has no name"""


class NamedAllocation(NamedTuple):
    """An allocation that other pieces refer to by name: a weight, gradient, optimizer state, or part of the batch."""

    size: int
    category: int
    op: int
    kernel: int
    owners: int
    """1: the following fields identify its owner"""
    mode: int
    """how ``block`` names the block it belongs to, see `NO_BLOCK`"""
    run: int
    """index into the tape's ``runs``, -1 outside the blocks"""
    block: int
    name: int
    """index into the tape's ``names``: its name inside its block, or the full name outside the blocks"""


class Free(NamedTuple):
    """A free of what a section of the same piece allocated. It counts back from the event, so that sections that do the
    same have identical events."""

    back: int
    """number of sections before this one; 0 for this one"""
    mode: int
    """how ``block`` names the block at which that section allocated it"""
    block: int
    position: int
    """index among the allocations of that section's template; for an own allocation at this block (`is_own`), the
    number of allocations since"""

    @property
    def is_own(self) -> bool:
        """Whether it frees an allocation of the same template at the same block."""
        return self.back == 0 and (self.mode == NO_BLOCK or (self.mode == RELATIVE and self.block == 0))


class NamedFree(NamedTuple):
    """A free, by name, of what another piece allocated. The fields are those of `NamedAllocation`."""

    section: int
    """always -1: no section of this piece"""
    category: int
    mode: int
    run: int
    block: int
    name: int


Event = Allocation | NamedAllocation | Free | NamedFree

EVENT_TYPES: Mapping[int, type[Event]] = {
    len(kind._fields): kind for kind in (Free, Allocation, NamedFree, NamedAllocation)
}
"""Event types by their number of fields: 4, 5, 6 and 9."""

_FREE, _NAMED_FREE = len(Free._fields), len(NamedFree._fields)


def counted_back(arrays: Iterable[list[int]], section: int) -> list[list[int]]:
    """A template's events with its frees counted back, from events whose frees have the index of their section in its
    piece and a position from the first. ``section``: the index of the template's."""
    made = 0
    counted: list[list[int]] = []
    for array in arrays:
        if len(array) == _FREE:
            free = Free(section - array[0], *array[1:])
            array = list(free._replace(position=made - 1 - free.position) if free.is_own else free)
        elif len(array) != _NAMED_FREE:
            made += 1
        counted.append(array)
    return counted


class OperatorWork(NamedTuple):
    """FLOPs and bytes of a template's operators of one kind, as coefficients of one product of atoms."""

    kind: int
    """index into `KINDS`"""
    half: int
    """1 when the arithmetic is bf16 or fp16"""
    flops: int
    nbytes: int
    exponents: tuple[int, ...]
    """of the tape's atoms"""


class Template(NamedTuple):
    """The events of one block, or of one stretch outside the blocks, and the work of its operators.

    Events are kept as in the file, as arrays of fields whose length determines the type (`EVENT_TYPES`): a search reads
    30,000 of them, and only `planner.tape.templates` unpacks them all.
    """

    arrays: list[list[int]]
    work: list[OperatorWork]

    @classmethod
    def of(cls, events: Iterable[Event], work: list[OperatorWork]) -> Template:
        """A template of these events, which are stored as arrays, and this work."""
        return cls(list(map(list, events)), work)

    @property
    def events(self) -> list[Event]:
        """The events of the template, typed by the length of their arrays. Raises a KeyError for an array of another
        length."""
        return [EVENT_TYPES[len(array)](*array) for array in self.arrays]


class Section(NamedTuple):
    """A part of a piece: one template outside the blocks (``run`` None) or at one block, or a sweep over a run."""

    passes: str
    """load, forward, backward or optimizer; a block that backward recomputes counts as backward"""
    run: int | None
    """index into the tape's ``runs``"""
    templates: list[Template]
    step: int = 0
    """+1 or -1 for a sweep up or down the blocks of the run"""
    block: int = 0
    """for a single block: its index; a negative one counts from the run's end"""
    order: list[int] | None = None
    """for a sweep over blocks that differ, all of which are recorded: the template of each block"""


@dataclass(frozen=True)
class BlockRun:
    """Consecutive identical blocks: ``count`` of them in the full model, in ``module_list`` from block ``start``."""

    module_list: str
    start: int
    count: int
    recorded: int
    """number of blocks in the recorded model"""


Sums = Mapping[str, tuple[int, tuple[str, ...]]]
"""Name of a length -> (constant, products of atoms to add): {"S": (226, ("FHW",))} is 226 + F * H * W."""

RoundedUp = Mapping[str, tuple[str, int]]
"""Name of a length -> (product of atoms, divisor): {"P": ("HW", 32)} is H * W / 32, rounded up."""


@dataclass(frozen=True, eq=False)
class Tape:
    """A recorded step of one model under one method, precision, checkpointing and optimizer."""

    model: str
    variant: str
    versions: Mapping[str, str]
    """of torch, diffusers and peft (or transformers) at recording"""
    regime: Mapping[str, int]
    """Atoms for which it holds at one value only, e.g. {"B": 1} or {"T": 512}; every other atom is free."""

    atoms: tuple[str, ...]
    """the atoms to which exponents belong, in order: those of `ATOMS` that its model has, and names of ``sums`` and
    ``rounded``"""
    sums: Sums
    sizes: tuple[Monomial | Growing, ...]
    runs: tuple[BlockRun, ...]
    names: tuple[str, ...]
    ops: tuple[str, ...]
    """operators that allocate, without "aten." """
    pieces: Mapping[str, list[Section]]
    tile: tuple[int, ...] | None = None
    """for a VAE or text encoder only; for a VAE, rows and columns of a tile and of the stride between tiles, pixels"""
    rounded: RoundedUp = field(default_factory=dict)
    operators: tuple[str, ...] = ()
    """every operator that ran, whether it allocates or not"""
    columns: dict[tuple[int, bool], Any] = field(default_factory=dict, init=False, repr=False)
    """(id of a template's arrays, whether it is of a VAE or text encoder) -> its columns, see
    `planner.tape.templates`."""
    alike: dict[str, list[tuple[list[list[int]], Any]]] = field(default_factory=dict, init=False, repr=False)
    """Fingerprint of a template (first and last event, their number) -> arrays and columns of templates with it."""
    sound: set[str] = field(default_factory=set, init=False, repr=False)
    """pieces whose frees were checked to refer to existing allocations"""
    shares: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    """cache of `recorded_share` by parameters: a search asks for the same ones a hundred times."""

    @functools.cached_property
    def growing(self) -> frozenset[int]:
        """The indices of those sizes that grow from block to block."""
        return frozenset(index for index, size in enumerate(self.sizes) if isinstance(size, Growing))

    @functools.cached_property
    def of_batch(self) -> frozenset[str]:
        """The atoms that count samples and nothing else: the batch, and sums of it."""
        sums = (name for name, (_, products) in self.sums.items() if set(products) == {"B"})
        return frozenset({"B", *sums})

    def values(self, grid: Mapping[str, int]) -> list[int]:
        """The values of the tape's atoms at a shape; a NotRecordedError for a shape outside the regime."""
        for name, fixed in self.regime.items():
            if grid[name] != fixed:
                raise self._outside_regime(name, fixed, grid[name])
        lengths = {**grid, **derived(grid, self.rounded, self.sums)}
        return [lengths[name] for name in self.atoms]

    def _outside_regime(self, name: str, fixed: int, value: int) -> NotRecordedError:
        if name == "B":  # its code loops over the samples, so that the events grow with the batch
            fault = f"{self.model} processes a batch sample by sample, and batch {value} is not recorded"
            if self.variant.startswith("sample"):  # guidance may be half of them
                return NotRecordedError(fault, "use --batch-size 1")
            return NotRecordedError(fault, f"use --batch-size 1 or {fixed}, with --gradient-accumulation")
        if name == "T":
            fault = f"{self.model} is recorded with prompts of {fixed} tokens, not {value}"
            return NotRecordedError(fault, f"use --text-tokens {fixed}, or leave it out")
        return NotRecordedError(f"the tape of {self.model} holds {name} = {fixed} only, not {value}", "record another")

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
        """(module list, index) of the block that a parameter's full name belongs to; None for one outside the
        blocks."""
        for run in self.runs:
            if name.startswith(f"{run.module_list}."):
                return run.module_list, int(name[len(run.module_list) + 1 :].split(".", 1)[0])
        return None

    def damaged(self, reason: str) -> VplanError:
        """The VplanError for a tape whose events refer to something that it does not hold; not raised here."""
        return VplanError(f"tape {self.variant} of {self.model} is damaged ({reason})", DAMAGED_FIX)


DAMAGED_FIX = "reinstall vplan or record it again"

NOTHING = Tape("", "nothing", {}, {}, (), {}, (), (), (), (), {"optimizer_first": [], "optimizer": []})
"""The optimizer's tape of a job that only samples."""


def derived(grid: Mapping[str, int], rounded: RoundedUp, sums: Sums) -> dict[str, int]:
    """Lengths that follow from a shape: products counted in several, rounded up, then sums of products of all those."""
    lengths = {name: -(-math.prod(grid[atom] for atom in product) // unit) for name, (product, unit) in rounded.items()}
    factors = {**grid, **lengths}
    for name, (constant, products) in sums.items():
        lengths[name] = constant + sum(math.prod(factors[atom] for atom in product) for product in products)
    return lengths
