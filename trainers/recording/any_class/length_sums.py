"""Finds lengths inside a model that are sums, such as image and text tokens joined, by recording at two shapes.

A size that is a product of the shape's sizes follows from one recording. Any other size differs from that product in a
second recording; then the sum is the one for which the size is the same multiple at both shapes. A size that no sum
explains is an error, because a tape with it would be wrong at every other shape.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.catalog.forward_call import ForwardCall, LengthSum
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.tape.format import RoundedUp, Sums, derived
from planner.tape.variants.precision import Precision
from planner.tape.variants.variant import StepVariant
from trainers.recording import tapes
from trainers.recording.factoriser import Factoriser
from trainers.recording.own import REFUSALS, refusal
from trainers.recording.recorder import RawAllocation, RawRecording
from trainers.recording.recordings import record_step

PRODUCTS = ("FHW", "HW", "T", "F", "H", "W", "E", "FH", "FW")
SECOND = {"B": 997, "F": 353, "H": 349, "W": 347, "T": 1019, "R": 1013, "E": 2053}
"""The second shape: other primes than the recording's; clip and text together are no multiple of 8 here either."""
SECOND_SHORT = {**SECOND, "F": 53, "H": 43, "W": 47, "T": 1033}
CONSTANTS = range(-64, 4097)
"""Possible constants of a sum: register tokens, class tokens, image tokens of an encoder."""
MOST_SUMS = 6
FEW = 12
"""Atoms up to this are not primes of the recording but fixed ones, such as a batch of two; they cannot be recognised in
a size."""
NEGLIGIBLE = 2**16
"""Sizes up to this many bytes need no explanation: at sides of hundreds of cells, a row of positions that is one longer
than its side (F + 1). A tape keeps such a size as recorded."""
NEGLIGIBLE_FILLING = 2**21
"""The same for models that pad a length to a multiple: the padding rows, and tables that have these twice, are at most
twice as long as a text of two thousand tokens."""
JOINED = {"S": LengthSum(constant=0, products=("FHW", "T"))}
"""The sum of clip and text tokens, which most classes join."""


def with_sums(profile: ModelProfile) -> ModelProfile:
    """The profile with the sums that explain all sizes of a step at two shapes, and with short sides if tables of
    positions need them. Raises a VplanError for a size that no sum explains, an AssertionError if blocks differ that
    are taken to be identical."""
    call = ForwardCall.read(profile.inputs)
    failure: Exception | None = None
    for short in (False, True):
        tried = _with(profile, call.replace(short_sides=short))
        try:
            try:
                return _with_sums(tried)
            except ShapeDependence:  # a mask over all tokens is copied unless their number is a multiple of 8
                return _with_sums(_with(profile, call.replace(short_sides=short, sums=JOINED)))
        except REFUSALS as error:
            lacks_shape = failure is not None and isinstance(error, tapes.NoPrimeShape)
            if isinstance(error, AssertionError | VplanError) and not lacks_shape:
                raise
            failure = failure or error
    assert failure is not None
    fault = f"a training step of {profile.diffusers_class} does not run at any shape"
    told = refusal(failure, fault, "name its inputs with --inputs")
    raise NoRun(told.message, told.fix)


def _with(profile: ModelProfile, call: ForwardCall) -> ModelProfile:
    return profile.replace(inputs=call.to_json())


def _with_sums(profile: ModelProfile) -> ModelProfile:
    variant = StepVariant("lora", Precision("half", "half", autocast=False), "none", one_sample=False)
    if profile.shape.batches:
        variant = variant._replace(samples=profile.shape.batches[-1])
    job, strategy = variant.records(profile)
    config = tapes.shallow_config(profile)

    @functools.cache  # sums affect at which shape to record, but not the recording
    def recorded(*grid: tuple[str, int]) -> RawRecording:
        return record_step(profile, job, strategy, dict(grid), config)

    for _ in range(MOST_SUMS):
        call = ForwardCall.read(profile.inputs)
        grid, sums, regime = tapes.prime_grid(profile, variant.samples)
        other = second_grid(grid, regime)
        first, second = recorded(*grid.items()), recorded(*other.items())
        known = {name: (entry.constant, entry.products) for name, entry in call.sums.items()}
        rounded = {name: (entry.product, entry.unit) for name, entry in call.rounded.items()}
        found = mismatches(first, second, grid, other, known, rounded)
        if not found:
            lengths = tapes.run_lengths(profile)
            tapes.tape_of(profile, variant.name, first, grid, sums, regime, lengths=lengths)
            for another in _others(profile, variant) if any(stack.alike for stack in profile.stacks) else ():
                recording = record_step(profile, *another.records(profile), grid, config)
                tapes.tape_of(profile, another.name, recording, grid, sums, regime, lengths=lengths)
            return profile
        more = new_sum(found, grid, other, known)
        if more == known:
            worst = max(found, key=lambda entry: entry.first)
            fault = f"{worst.op} in {profile.diffusers_class} makes {worst.first} bytes at one shape and {worst.second}"
            raise VplanError(f"{fault} at another: no sum of sizes explains both", "it needs a family of its own")
        entries = {name: LengthSum(constant=constant, products=products) for name, (constant, products) in more.items()}
        profile = _with(profile, call.replace(sums=entries))
    raise VplanError(f"{profile.diffusers_class} has more lengths that are sums than {MOST_SUMS}", "it needs a family")


def _others(profile: ModelProfile, variant: StepVariant) -> Iterator[StepVariant]:
    """The other combinations of LoRA or full training with and without checkpointing: blocks that are identical in one
    may differ in another, where the gradients of tensors that all blocks are given add up."""
    modes = ("none", "full") if profile.traits.checkpoints else ("none",)
    for method, mode in itertools.product(("lora", "full"), modes):
        precision = Precision("half", "half" if method == "lora" else "", autocast=False)
        other = variant._replace(method=method, precision=precision, checkpointing=mode)
        if other != variant:
            yield other


class NoRun(VplanError):
    """The step raises at every shape, with this number of blocks."""


class ShapeDependence(VplanError):
    """The operators of a step, not only their sizes, differ between two shapes."""


class Mismatch(NamedTuple):
    """A size whose product in the first recording does not give its value in the second."""

    op: str
    first: int
    second: int


def second_grid(grid: Mapping[str, int], regime: Mapping[str, int]) -> dict[str, int]:
    """A shape of other primes than the recording's, with the same fixed atoms, and short sides if it has short ones."""
    other = SECOND_SHORT if grid["H"] < 128 else SECOND
    return {**other, **regime, **{atom: 1 for atom in "FHW" if grid[atom] == 1}}


def mismatches(
    first: RawRecording,
    second: RawRecording,
    grid: Mapping[str, int],
    other: Mapping[str, int],
    sums: Sums,
    rounded: RoundedUp,
) -> list[Mismatch]:
    """The sizes of the recording at ``grid`` whose product does not give their value at ``other``. Raises a
    ShapeDependence if the operators depend on the shape."""
    left, right = first.allocations, second.allocations
    if [entry.op for entry in left] != [entry.op for entry in right]:
        position = next(
            (index for index, (one, two) in enumerate(zip(left, right, strict=False)) if one.op != two.op),
            min(len(left), len(right)),
        )
        op = left[position].op if position < len(left) else right[position].op
        fault = f"which operators run depends on the shape of a clip (first at allocation {position}, {op})"
        raise ShapeDependence(fault, "it cannot be recorded for all shapes; a family of its own can")
    # With a batch of two as an atom, it would get the factor two of a length that is twice a prime.
    atoms = {atom: size if size > FEW else 1 for atom, size in grid.items()} | derived(grid, rounded, sums)
    values = {**other, **derived(other, rounded, sums)}
    factoriser = Factoriser(atoms)
    negligible = NEGLIGIBLE_FILLING if rounded else NEGLIGIBLE
    return [
        Mismatch(one.op, one.nbytes, two.nbytes)
        for one, two in zip(left, right, strict=True)
        if one.rounded is None
        and max(one.nbytes, two.nbytes) > negligible
        and not _agrees(factoriser, one, two, values)
    ]


def _agrees(factoriser: Factoriser, one: RawAllocation, two: RawAllocation, values: Mapping[str, int]) -> bool:
    coefficient, exponents = factoriser.factor(one.nbytes)
    product = math.prod(values[atom] ** power for atom, power in zip(factoriser.atoms, exponents, strict=True))
    return bool(coefficient * product == two.nbytes)


def new_sum(unexplained: Iterable[Mismatch], grid: Mapping[str, int], other: Mapping[str, int], known: Sums) -> Sums:
    """The known sums and one more that explains a mismatch; the same sums if there is none.

    A size is ``c * (constant + sum of products)`` at both shapes, so ``c`` is the quotient of the differences between
    the shapes, and the constant is the remainder.
    """
    atoms = [atom for atom in "BFHWTE" if min(grid[atom], other[atom]) > FEW]
    rests = {_rests(entry.first, grid, entry.second, other, atoms) for entry in unexplained}
    fits = []
    for (left, right), products in itertools.product(rests, _combinations(grid)):
        one, two = (sum(math.prod(shape[atom] for atom in product) for product in products) for shape in (grid, other))
        if one == two or (left - right) % (one - two):
            continue
        coefficient = (left - right) // (one - two)
        if coefficient < 1 or left % coefficient or right % coefficient:
            continue
        constant = left // coefficient - one
        if constant in CONSTANTS and constant == right // coefficient - two and (constant or len(products) > 1):
            fits.append((abs(constant), len(products), products, constant))
    if not fits:
        return known
    _, _, products, constant = min(fits)
    return {**known, f"S{len(known) or ''}": (constant, products)}


def _rests(
    first: int, grid: Mapping[str, int], second: int, other: Mapping[str, int], atoms: Sequence[str]
) -> tuple[int, int]:
    """Two numbers without the atoms that are factors of both, removed equally often from both: at one of the shapes a
    sum may by chance be a multiple of an atom."""
    for atom in atoms:
        while first and second and first % grid[atom] == 0 and second % other[atom] == 0:
            first, second = first // grid[atom], second // other[atom]
    return first, second


def _combinations(grid: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Combinations of up to four products to sum, as for a clip, two texts and an image; without atoms that are 1."""
    products = [product for product in PRODUCTS if all(grid[atom] > 1 for atom in product)]
    for count in (1, 2, 3, 4):
        yield from itertools.combinations_with_replacement(products, count)
