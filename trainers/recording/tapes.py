"""Which tapes a model has, and how they are recorded: one process, many variants.

A *step* tape depends on what changes the stream of operators: method, precision, checkpointing, one sample or
several. An *optimizer* tape depends on the trained parameters and the optimizer alone. fp16 and bf16 take the same
memory, so both are recorded as bf16 and called half.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from planner.catalog import lookup
from planner.catalog.components import Component, recorded_lengths
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.spec.job import Job, Strategy
from planner.tape.format import ATOMS, HEAD, TAIL, Tape, derived
from planner.tape.parameter_table import FORMAT as PARAMETERS_FORMAT
from planner.tape.variants.inventory import Variant, step_variants
from planner.tape.variants.precision import Precision
from planner.tape.variants.variant import OptimizerVariant, SampleVariant, StepVariant
from trainers.families import family
from trainers.recording.block_places import find_runs
from trainers.recording.components import short_tape, vae_tape
from trainers.recording.compress import Header, compress
from trainers.recording.cuda_ops import MASK_ALIGNMENT
from trainers.recording.encoders import text_tape
from trainers.recording.recorder import RawRecording
from trainers.recording.recordings import Dispatch, record_optimizer, record_sample, record_step
from trainers.recording.trainer_code import check_out
from trainers.step import step

RECORDED_BLOCKS = HEAD + TAIL + 2
"""Per kind of block: both ends and two middles, which must be alike."""

PRIMES = {"B": 1009, "F": 359, "H": 367, "W": 373, "T": 1021, "R": 1031, "E": 2063}
"""Larger than any prime factor of a published architecture, so that a size shows its atoms. Small primes are not:
CogVideoX's 226 text tokens are 2 * 113, its table of 17,776 positions has a factor 101, and CLIP makes 257 tokens.
Rows and columns stay below 384, where SD3's table of positions ends."""

HEIGHTS: tuple[int, ...] = (PRIMES["H"], 317, 313, 311, 307)
WIDTHS: tuple[int, ...] = (373, 379, 383)
FRAMES: tuple[int, ...] = (359, 353, 349, 347, 337, 331, 691)
SHORT_HEIGHTS, SHORT_WIDTHS, SHORT_FRAMES = (71, 101, 103, 107), (73, 79, 83, 89, 97), (67, 61, 59)
"""For families that mask all tokens, as an expanded mask of the sizes above has more elements than torch can count; and
for tables of positions that end before them."""


class NoPrimeShape(VplanError):
    """No shape shows all lengths of a model that are sums."""


RARE_FRAMES, RARE_TIMES = (419,), 24
"""Where no shape shows all sums: more frames (of which 2F + 5, F + 2 and 4F + 9 show), and up to so many times a prime.
"""
MOST_SHAPES = 20_000
"""That are tried of each kind."""


def prime_grid(
    profile: ModelProfile, batch: int | None, short: bool = False
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """(shape to record at, values of the sums there, atoms the tape holds fixed). ``batch`` None: any; ``short``: with
    few tokens, where scores of all heads, queries and keys are made whole.

    The rest are primes at which every sum (as F*H*W + T) is a large prime, or a few times one, so that sums show in
    sizes too; where there is no such shape, up to `RARE_TIMES` one. What is counted in several and rounded up is a
    prime of any size: tables of positions keep texts short. Raises a VplanError where a table of positions ends before
    the shortest of these lengths, a NoPrimeShape where no shape shows all sums.
    """
    kind = family(profile)
    regime = {**kind.fixed, **({"B": batch} if batch else {})}
    heights, widths, lengths = HEIGHTS, WIDTHS, FRAMES
    if short or kind.masks_all_tokens or kind.short_sides or kind.longest_side:
        heights, widths, lengths = SHORT_HEIGHTS, SHORT_WIDTHS, SHORT_FRAMES
    texts = [PRIMES["T"], *filter(_is_prime, range(PRIMES["R"] + 1, 2 * PRIMES["R"]))]
    extras = list(filter(_is_prime, range(PRIMES["E"], 2 * PRIMES["E"]))) if kind.extra_tokens else [PRIMES["E"]]
    used = "".join(product for product, _ in kind.rounded.values())
    used += "".join(product for _, products in kind.sums.values() for product in products)
    choices = [
        values if letter in used else values[:1]  # what no sum has changes nothing
        for letter, values in (("H", heights), ("E", extras), ("T", texts), ("F", lengths), ("W", widths))
    ]
    usual = itertools.product((12,), *choices)
    rare = itertools.product((RARE_TIMES,), *choices[:3], (*choices[3], *RARE_FRAMES), choices[4])
    tried = (itertools.islice(shapes, MOST_SHAPES) for shapes in (usual, rare))
    for most, height, extra, text, frames, width in itertools.chain.from_iterable(tried):
        grid = {**PRIMES, "E": extra, "T": text, "F": frames, "H": height, "W": width, **regime}
        sums = derived(grid, kind.rounded, kind.sums)
        aligned = kind.copies_masks and any(value % MASK_ALIGNMENT == 0 for value in sums.values())
        shown = all(
            _shows(value, most, grid.values()) or (name in kind.rounded and _is_prime(value))
            for name, value in sums.items()
        )
        if shown and not aligned:
            _check_positions(profile, kind.longest_side, max(grid["F"], grid["H"], grid["W"]))
            return grid, sums, regime
    fault = f"{profile.name} has too many lengths that are sums: no shape shows them all"
    raise NoPrimeShape(fault, "a larger cell may have fewer: write patch = [1, 16, 16] for --inputs")


def _check_positions(profile: ModelProfile, longest: int | None, needed: int) -> None:
    if longest is not None and longest < needed:
        fault = f"the table of positions of {profile.name} ends at {longest}, and recording needs {needed}"
        raise VplanError(fault, f"record a copy of its config with a longer one: that of {profile.lent_by} will do")


def _shows(value: int, most: int, sizes: Collection[int]) -> bool:
    """Whether a sum can be told from all else in a size: up to ``most`` times a prime above those of the models, which
    is none of the shape's ``sizes`` itself."""
    return any(
        value % few == 0 and value // few > 128 and value // few not in sizes and _is_prime(value // few)
        for few in range(1, most + 1)
    )


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def shallow_config(profile: ModelProfile, blocks: int = RECORDED_BLOCKS) -> dict[str, Any]:
    """The published config with few ``blocks`` in each stack; a UNet, whose levels all differ, keeps its depth.

    Never with more than the model has: a tape of more blocks than are laid out cannot be read.
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
    """Blocks in each run of like blocks of a bundled model's published architecture, counted on the meta device."""
    return run_lengths(lookup.model(name))


def run_lengths(profile: ModelProfile) -> tuple[int, ...]:
    """The same of any profile, also one that is kept nowhere yet."""
    job, strategy = next(step_variants(profile)).records(profile)
    model = step.build_model(profile, job.replace(method="full"), strategy)
    return tuple(run.count for run in find_runs(model, [stack.list for stack in profile.stacks], None)[0])


def step_tape(profile: ModelProfile, variant: StepVariant) -> Tape:
    """Records a training step under one variant, as a tape; a VplanError for one of a trainer's own code where that is
    not there."""
    job, strategy = variant.records(profile)
    # Whole scores of so large a batch as stands for any have more bytes than torch can count.
    short = variant.mps and not variant.one_sample
    grid, sums, regime = prime_grid(profile, 1 if variant.one_sample else variant.samples, short)
    trainer, _, trainer_version = variant.code.partition("@")
    code = check_out(trainer) if trainer else None
    whole = variant.method == "full" and profile.traits.layer_beside_each_block
    config = dict(profile.config) if whole else shallow_config(profile)
    recording = record_step(profile, job, strategy, grid, config, Dispatch.of(variant), code, trainer_version)
    origin = {} if code is None else {f"https://github.com/{code.REPOSITORY}": code.COMMIT}
    return tape_of(profile, variant.name, recording, grid, sums, regime, origin)


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
    grid, sums, _ = prime_grid(profile, PRIMES["B"])  # a prime also of what is recorded at few batches
    recording = record_optimizer(profile, job, strategy, grid, shallow_config(profile))
    return tape_of(profile, variant.name, recording, grid, sums, {})


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
    """The tape of a recording made at ``grid``. ``lengths``: of the full model's runs; else the kept profile's."""
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
        kind.sums,
        kind.rounded,
    )
    return compress(recording, header, atoms, list(full_run_lengths(profile.name) if lengths is None else lengths))


def leave_out_aligned_copies(recording: RawRecording) -> None:
    """Gives the copies of masks with padded rows no size where rows need no padding (`cuda_ops.attention`).

    Attention saves the mask itself then. One that is copied once takes the place of its copy, and is left out instead;
    one that all blocks copy is there anyway.
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
    """Records a variant of any kind, as a tape."""
    if isinstance(variant, StepVariant):
        return step_tape(profile, variant)
    return sample_tape(profile, variant) if isinstance(variant, SampleVariant) else optimizer_tape(profile, variant)


def parameter_table(profile: ModelProfile, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """The parameters file's JSON (`planner.tape.parameter_table`), read off the bare model on the meta device."""
    job, strategy = _records_of_bare_model(profile)
    parameters = dict(step.build_model(profile, job, strategy, config).named_parameters())
    return {
        "format": PARAMETERS_FORMAT,
        "model": profile.name,
        "rows": {name: parameter.shape[0] if parameter.ndim else 1 for name, parameter in parameters.items()},
        "fp32": [name for name, parameter in parameters.items() if parameter.dtype == torch.float32],
    }


def _records_of_bare_model(profile: ModelProfile) -> tuple[Job, Strategy]:
    """Full training in 16 bits: no adapters, and what is kept in fp32 stands out."""
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
