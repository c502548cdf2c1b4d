"""Records the tapes of a model's variants.

A *step* tape depends on everything that changes the stream of operators: method, precision, checkpointing, one sample
or several. An *optimizer* tape depends only on the trained parameters and the optimizer. fp16 and bf16 take the same
memory, so both are recorded as bf16 and called half.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import nn

from planner.catalog import lookup
from planner.catalog.components import Component, recorded_lengths
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.spec.job import Job, Strategy
from planner.tape.format import ATOMS, HEAD, TAIL, Sums, Tape, derived
from planner.tape.parameter_table import FORMAT as PARAMETERS_FORMAT
from planner.tape.variants.inventory import Variant, step_variants
from planner.tape.variants.precision import Precision
from planner.tape.variants.variant import OptimizerVariant, SampleVariant, StepVariant
from trainers.families import family
from trainers.recording.block_places import find_runs
from trainers.recording.components import short_tape, vae_tape
from trainers.recording.compress import Header, compress
from trainers.recording.cuda_ops import BATCHES, MASK_ALIGNMENT
from trainers.recording.encoders import text_tape
from trainers.recording.recorder import RawRecording
from trainers.recording.recordings import Dispatch, record_optimizer, record_sample, record_step
from trainers.recording.trainer_code import check_out
from trainers.step import step
from trainers.step.optimizers import TRANSPOSING

RECORDED_BLOCKS = HEAD + TAIL + 2
"""Blocks to record of each kind: both ends and two middle blocks, which must be identical."""

PRIMES = {"B": BATCHES[0], "F": 359, "H": 367, "W": 373, "T": 1021, "R": 1031, "E": 2063}
"""The atoms to record at: primes larger than any prime factor of a published architecture, so that a size shows its
atoms. Smaller primes do occur: CogVideoX's 226 text tokens are 2 * 113, its table of 17,776 positions has the factor
101, and CLIP makes 257 tokens. Rows and columns stay below 384, where SD3's table of positions ends."""

HEIGHTS: tuple[int, ...] = (PRIMES["H"], 317, 313, 311, 307)
WIDTHS: tuple[int, ...] = (373, 379, 383)
FRAMES: tuple[int, ...] = (359, 353, 349, 347, 337, 331, 691)
SHORT_HEIGHTS, SHORT_WIDTHS, SHORT_FRAMES = (71, 101, 103, 107), (73, 79, 83, 89, 97), (67, 61, 59)
"""Smaller sides for families that mask all tokens, because an expanded mask at the sizes above has more elements than
torch can count, and for tables of positions that end before those sizes."""


class NoPrimeShape(VplanError):
    """There is no shape at which all of a model's lengths that are sums can be recognised."""


RARE_FRAMES, RARE_TIMES = (419,), 24
"""A second attempt if no shape shows all sums: more frames (at which 2F + 5, F + 2 and 4F + 9 show), and sums that are
up to this many times a prime."""
MOST_SHAPES = 20_000
"""Shapes that are tried in each attempt."""


class PrimeShape(NamedTuple):
    """A shape to record at, in latent units, at which every length shows in the sizes."""

    grid: dict[str, int]
    """atom -> its value"""
    sums: dict[str, int]
    """name of a length that is a sum of atoms -> its value there"""
    regime: dict[str, int]
    """atoms that the tape holds at alone, with their values"""


def prime_grid(profile: ModelProfile, batch: int | None, short: bool = False) -> PrimeShape:
    """The shape to record a model at. ``batch``: None for a tape of any batch; ``short``: use few tokens, for attention
    that makes whole tensors of scores.

    The free atoms are primes at which every sum (such as F*H*W + T) is a large prime or a small multiple of one, so
    that sums can be recognised in sizes too; if there is no such shape, up to `RARE_TIMES` a prime. Lengths that are
    rounded up may be any prime, because tables of positions keep texts short. Sums of the batch are left out where it
    is fixed: as small as they are then, they would be recognised where they are not. Raises a VplanError if a table of
    positions ends before the shortest of these lengths, a NoPrimeShape if no shape shows all sums.
    """
    kind = family(profile)
    regime = {**kind.fixed, **({"B": batch} if batch else {})}
    known = _free_sums(kind.sums, regime)
    heights, widths, lengths = HEIGHTS, WIDTHS, FRAMES
    if short or kind.masks_all_tokens or kind.short_sides or kind.longest_side:
        heights, widths, lengths = SHORT_HEIGHTS, SHORT_WIDTHS, SHORT_FRAMES
    texts = [PRIMES["T"], *filter(_is_prime, range(PRIMES["R"] + 1, 2 * PRIMES["R"]))]
    extras = list(filter(_is_prime, range(PRIMES["E"], 2 * PRIMES["E"]))) if kind.extra_tokens else [PRIMES["E"]]
    used = "".join(product for product, _ in kind.rounded.values())
    used += "".join(product for _, products in known.values() for product in products)
    choices = [
        values if letter in used else values[:1]  # other atoms do not affect the sums
        for letter, values in (
            *(("H", heights), ("E", extras), ("T", texts), ("F", lengths), ("W", widths)),
            ("B", BATCHES),
        )
    ]
    usual = itertools.product((12,), *choices)
    rare = itertools.product((RARE_TIMES,), *choices[:3], (*choices[3], *RARE_FRAMES), *choices[4:])
    tried = (itertools.islice(shapes, MOST_SHAPES) for shapes in (usual, rare))
    for most, height, extra, text, frames, width, samples in itertools.chain.from_iterable(tried):
        grid = {"B": samples, "F": frames, "H": height, "W": width, "T": text, "R": PRIMES["R"], "E": extra, **regime}
        sums = derived(grid, kind.rounded, known)
        aligned = kind.copies_masks and any(value % MASK_ALIGNMENT == 0 for value in sums.values())
        shown = all(
            _shows(value, most, grid.values()) or (name in kind.rounded and _is_prime(value))
            for name, value in sums.items()
        )
        if shown and not aligned and grid["B"] != grid["T"]:
            _check_positions(profile, kind.longest_side, max(grid["F"], grid["H"], grid["W"]))
            return PrimeShape(grid, sums, regime)
    fault = f"{profile.name} has too many lengths that are sums: no shape shows them all"
    raise NoPrimeShape(fault, "a larger cell may have fewer: write patch = [1, 16, 16] for --inputs")


def _free_sums(sums: Sums, regime: Mapping[str, int]) -> Sums:
    """The sums without those of a batch that a tape fixes."""
    fixed = "B" in regime
    return {name: entry for name, entry in sums.items() if not (fixed and any("B" in product for product in entry[1]))}


def _check_positions(profile: ModelProfile, longest: int | None, needed: int) -> None:
    if longest is not None and longest < needed:
        fault = f"the table of positions of {profile.name} ends at {longest}, and recording needs {needed}"
        raise VplanError(fault, f"record a copy of its config with a longer one: that of {profile.lent_by} will do")


def _shows(value: int, most: int, sizes: Collection[int]) -> bool:
    """Whether a sum can be recognised in a size: it is at most ``most`` times a prime that is larger than those in the
    models' own numbers and is not one of the shape's ``sizes``."""
    return any(
        value % few == 0 and value // few > 128 and value // few not in sizes and _is_prime(value // few)
        for few in range(1, most + 1)
    )


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def shallow_config(profile: ModelProfile, blocks: int = RECORDED_BLOCKS) -> dict[str, Any]:
    """The published config with only ``blocks`` blocks in each stack, or fewer if the model has fewer; a UNet, whose
    levels all differ, keeps its depth.

    It never has more blocks than the model: a tape of more blocks than are laid out cannot be read.
    """
    config = dict(profile.config)
    dual = config.get("dual_attention_layers")
    if dual:  # SD3.5 medium: blocks with a second attention, then plain ones, then a last one without text output
        assert list(dual) == list(range(len(dual)))
        two, plain = min(blocks, len(dual)), min(blocks, config["num_layers"] - len(dual) - 1)
        return {**config, "dual_attention_layers": list(range(two)), "num_layers": two + plain + 1}
    shared = config["num_layers"] - config["mmdit_layers"] if "mmdit_layers" in config else 0
    if shared:  # EasyAnimate 7B: blocks with weights of their own for text, then blocks that share them
        own = min(blocks, config["mmdit_layers"])
        return {**config, "mmdit_layers": own, "num_layers": own + min(blocks, shared)}
    for stack in profile.stacks:
        if stack.alike and isinstance(config.get(stack.depth_key), int):
            config[stack.depth_key] = min(blocks + profile.traits.last_block_apart, config[stack.depth_key])
    return config


@functools.cache
def full_run_lengths(name: str) -> tuple[int, ...]:
    """The lengths of the runs of identical blocks in a bundled model's published architecture, counted on the meta
    device."""
    return run_lengths(lookup.model(name))


def run_lengths(profile: ModelProfile) -> tuple[int, ...]:
    """The lengths of the runs of identical blocks of any profile, including one that is not stored yet."""
    job, strategy = next(step_variants(profile)).records(profile)
    model = step.build_model(profile, job.replace(method="full"), strategy)
    return tuple(run.count for run in find_runs(model, [stack.list for stack in profile.stacks], None)[0])


def step_tape(profile: ModelProfile, variant: StepVariant) -> Tape:
    """Records a training step under one variant, as a tape. Raises a VplanError if the variant is of another trainer's
    code and that is not checked out."""
    job, strategy = variant.records(profile)
    # Whole tensors of scores at the batch that stands for any batch have more bytes than torch can count.
    short = variant.mps and not variant.one_sample
    grid, sums, regime = prime_grid(profile, 1 if variant.one_sample else variant.samples, short)
    trainer, _, trainer_version = variant.code.partition("@")
    code = check_out(trainer) if trainer else None
    config = dict(profile.config) if recorded_whole(profile, variant) else shallow_config(profile)
    recording = record_step(profile, job, strategy, grid, config, Dispatch.of(variant), code, trainer_version)
    origin = {} if code is None else {f"https://github.com/{code.REPOSITORY}": code.COMMIT}
    return tape_of(profile, variant.name, recording, grid, sums, regime, origin)


def recorded_whole(profile: ModelProfile, variant: Variant) -> bool:
    """Whether a tape is recorded at full depth and holds at no other: a layer beside each block gets a gradient, and is
    no part of the block."""
    return isinstance(variant, StepVariant) and variant.method == "full" and profile.traits.layer_beside_each_block


def sample_tape(profile: ModelProfile, variant: SampleVariant) -> Tape:
    """Records a denoising step under one variant, as a tape."""
    job, strategy = variant.records(profile)
    batches = profile.shape.batches
    grid, sums, regime = prime_grid(profile, 1 if variant.one_sample else 2 if batches else None)
    recording = record_sample(profile, job, strategy, grid, shallow_config(profile), Dispatch.of(variant))
    return tape_of(profile, variant.name, recording, grid, sums, regime)


def optimizer_tape(profile: ModelProfile, variant: OptimizerVariant) -> Tape:
    """Records an optimizer's step under one variant, as a tape."""
    job, strategy = variant.records(profile)
    grid, sums, _ = prime_grid(profile, PRIMES["B"])  # also for models whose steps are recorded at fixed batches
    config = shallow_config(profile)
    if strategy.optimizer in TRANSPOSING:
        model = step.build_model(profile, job.replace(lora_rank=grid["R"]), strategy, config)
        grid["R"] = rank_below_layers(model, {length for atom, length in (grid | sums).items() if atom != "R"})
    recording = record_optimizer(profile, job, strategy, grid, config)
    return tape_of(profile, variant.name, recording, grid, sums, {})


def rank_below_layers(model: nn.Module, others: Collection[int]) -> int:
    """The rank to record an optimizer at that transposes tall matrices: that of `PRIMES`, which ``model`` has, or where
    an adapted layer is as narrow, the largest prime below the narrowest.

    So each matrix of an adapter has its longer side along the layer, as at the ranks people use, and what the optimizer
    makes of it has the rank's square. Layers no wider than a job's default rank do not count: ranks in use are above.
    The prime divides no length of the model, nor any of the ``others`` recorded, so that sizes show it.
    """
    usual, default = PRIMES["R"], Job.model_fields["lora_rank"].default
    trained = [parameter.shape for parameter in step.trainable_parameters(model).values()]
    layers = [math.prod(shape) // usual for shape in trained if len(shape) == 2 and usual in shape]
    narrowest = min((layer for layer in layers if layer > default), default=usual + 1)
    lengths = {side for parameter in model.parameters() for side in parameter.shape if side != usual}
    lengths |= {*others, len(trained)}
    primes = filter(_is_prime, range(min(usual, narrowest - 1), 1, -1))
    return next((prime for prime in primes if all(length % prime for length in lengths)), usual)


def tape_of(
    profile: ModelProfile,
    name: str,
    recording: RawRecording,
    grid: dict[str, int],
    sums: dict[str, int],
    regime: dict[str, int],
    origin: Mapping[str, str] = {},
    lengths: Sequence[int] | None = None,
) -> Tape:
    """The tape of a recording made at ``grid``. ``lengths``: those of the full model's runs; None: of the bundled
    profile."""
    kind = family(profile)
    names = [atom for atom in ATOMS if atom != "E" or kind.extra_tokens]
    atoms = {atom: 1 if atom in regime else grid[atom] for atom in names} | sums
    if kind.copies_masks:
        leave_out_aligned_copies(recording)
    header = Header(
        profile.name,
        name,
        {**{library: version(library).split("+")[0] for library in ("torch", "diffusers", "peft")}, **origin},
        regime,
        {name: entry for name, entry in kind.sums.items() if name in sums},
        kind.rounded,
    )
    return compress(recording, header, atoms, list(full_run_lengths(profile.name) if lengths is None else lengths))


def leave_out_aligned_copies(recording: RawRecording) -> None:
    """Marks mask copies with padded rows, or the masks themselves, as absent where rows need no padding
    (`cuda_ops.CudaAttention`).

    Attention saves the mask itself then. If a mask is copied only once, the entry of the copy stands for the mask, and
    the mask's own entry is dropped instead; if all blocks copy it, the copies are dropped.
    """
    allocations = recording.allocations
    copies = [entry for entry in allocations if entry.rounded is not None and entry.copied is not None]
    times = Counter(entry.copied for entry in copies)
    for copy in copies:
        assert copy.rounded is not None and copy.copied is not None
        exact, multiple, up = copy.rounded
        mask = allocations[copy.copied]
        if times[copy.copied] == 1 and mask.category != "batch" and mask.nbytes % exact == 0:
            mask.rounded = exact, -multiple, exact
        else:
            copy.rounded = exact, -multiple, up


def record(profile: ModelProfile, variant: Variant) -> Tape:
    """Records a step, sampling or optimizer variant, as a tape."""
    if isinstance(variant, StepVariant):
        return step_tape(profile, variant)
    return sample_tape(profile, variant) if isinstance(variant, SampleVariant) else optimizer_tape(profile, variant)


def parameter_table(profile: ModelProfile) -> dict[str, Any]:
    """The JSON of the parameters file (`planner.tape.parameter_table`), from the model without adapter on the meta
    device."""
    job, strategy = _records_of_bare_model(profile)
    parameters = dict(step.build_model(profile, job, strategy).named_parameters())
    return {
        "format": PARAMETERS_FORMAT,
        "model": profile.name,
        "rows": {name: parameter.shape[0] if parameter.ndim else 1 for name, parameter in parameters.items()},
        "fp32": [name for name, parameter in parameters.items() if parameter.dtype == torch.float32],
    }


def _records_of_bare_model(profile: ModelProfile) -> tuple[Job, Strategy]:
    """Full training in 16 bits: there is no adapter, and parameters kept in fp32 can be recognised."""
    return StepVariant("full", Precision("half", "", autocast=False), "none", one_sample=True).records(profile)


def component_tape(profile: ModelProfile, component: Component) -> Tape:
    """Records one tape of a model's text encoder or VAE."""
    part, dtype, *short = component.variant.split("-", 2)
    for encoder in profile.text_encoders:
        if encoder.folder == component.name:
            return text_tape(encoder, dtype)
    if short:
        return short_tape(profile.vae, part, dtype, recorded_lengths(profile)[f"-{short[0]}"])
    return vae_tape(profile.vae, part, dtype)
