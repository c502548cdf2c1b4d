"""trainers/recording: a tape recorded once (recorder, compress, tapes), at odd sizes and with few blocks, is what a
recording at any other shape and depth gives, event by event; and the shipped tapes are what the code records now."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import profiles
from planner.allocator.caching import CachingAllocator
from planner.catalog import lookup
from planner.catalog.components import COMPONENTS, components
from planner.catalog.shapes import grid
from planner.spec.job import QUANTISED as QUANTISED_BASES
from planner.spec.job import Job, Strategy
from planner.tape.codec import parse_tape, read_tape, tape_json
from planner.tape.format import ATOMS, Monomial, Tape
from planner.tape.packs import is_stored, read_recording
from planner.tape.parameter_table import FILE as PARAMETERS
from planner.tape.parameter_table import read_parameters
from planner.tape.program import Program
from planner.tape.variants.inventory import default_variants, requested_variants, step_variants
from planner.tape.variants.variant import OptimizerVariant, SampleVariant, StepVariant
from tests.covering import in_turns
from tests.shipped_tapes import shipped_tapes
from trainers.families import family
from trainers.recording import tapes
from trainers.recording.comparison import NOT_COMPARED, first_difference
from trainers.recording.compress import Header, compress
from trainers.recording.recorder import RawRecording
from trainers.recording.recordings import record_optimizer, record_step

MODEL = "wan2.1-t2v-1.3b"
PROFILE = lookup.model(MODEL)
VARIANTS = {variant.name: variant for variant in default_variants(PROFILE)}
LORA_ONE, LORA_MANY, FULL_ONE, FULL_MANY = (
    "step-lora-half-fp32-autocast-full-one",
    "step-lora-half-half-none-many",
    "step-full-half-none-one",
    "step-full-fp32-autocast-full-many",
)
QUANTISED = (
    "step-lora-fp8-fp32-autocast-full-one",
    "step-lora-int8-fp32-autocast-none-many",
    "step-lora-nf4-fp32-autocast-full-one",
)
STEPS = (LORA_ONE, LORA_MANY, FULL_ONE, FULL_MANY, *QUANTISED)
OPTIMIZERS = (
    "optimizer-lora-fp32-adamw-foreach",
    "optimizer-full-half-adamw-8bit-foreach",
    "optimizer-lora-fp32-prodigy-foreach",
    "optimizer-lora-fp32-came-foreach",
    "optimizer-full-half-muon-foreach",
    "optimizer-full-half-adafactor-backward",
)


def record(name: str) -> dict[str, Any]:
    """The JSON of its file."""
    make = tapes.step_tape if name in STEPS else tapes.optimizer_tape
    return tape_json(make(PROFILE, VARIANTS[name]))


recorded = functools.cache(record)


def tape(name: str) -> Tape:
    return parse_tape(json.dumps(recorded(name)))


def ordinary(name: str) -> tuple[Job, Strategy, dict[str, int]]:
    """25 frames of 320x480, as people train; rank 24, so that no atom is where the tape had it."""
    job, strategy = VARIANTS[name].records(PROFILE)
    job = job.replace(frames=25, height=320, width=480, lora_rank=24, batch_size=3 if name.endswith("many") else 1)
    return job, strategy, grid(PROFILE, job)


def config(blocks: int) -> dict[str, Any]:
    return {**PROFILE.config, "num_layers": blocks}


def direct(name: str, blocks: int) -> RawRecording:
    job, strategy, shape = ordinary(name)
    make = record_step if name in STEPS else record_optimizer
    return make(PROFILE, job, strategy, shape, config(blocks))


def piece(trace: RawRecording, name: str) -> list[int]:
    """The events of a piece on the GPU."""
    names = [found for found, _ in trace.pieces]
    index = names.index(name)
    start, stop = trace.pieces[index][1], trace.pieces[index + 1][1]
    on_host = {number for number, alloc in enumerate(trace.allocations) if alloc.category == "host"}
    return [event for event in trace.events[start:stop] if (event if event >= 0 else ~event) not in on_host]


def made(events: list[int], sizes: list[int]) -> list[int]:
    return [sizes[event] for event in events if event >= 0]


def levels(events: list[int], sizes: list[int]) -> list[int]:
    """Bytes after each allocation, from the start of the events: where frees fall between allocations shows."""
    found, level = [], 0
    for event in events:
        level += sizes[event] if event >= 0 else -sizes[~event]
        if event >= 0:
            found.append(level)
    return [*found, level]


@pytest.mark.parametrize(("name", "blocks"), in_turns(STEPS, [9, tapes.RECORDED_BLOCKS]))
def test_a_step_tape_is_what_is_recorded_at_another_shape_and_depth(name: str, blocks: int) -> None:
    trace = direct(name, blocks)
    program = Program()
    stages = [program.unfold(tape(name), part, [blocks]) for part in ("load", "step")]
    sizes, direct_sizes = program.bytes_of(ordinary(name)[2]), [alloc.nbytes for alloc in trace.allocations]
    unfolded, real = (CachingAllocator(expandable_segments=False) for _ in range(2))
    for stage in stages:
        events = piece(trace, stage.name)
        assert made(stage.ops, sizes) == made(events, direct_sizes)
        assert levels(stage.ops, sizes) == levels(events, direct_sizes)
        one, other = unfolded.run(stage.ops, sizes), real.run(events, direct_sizes)
        assert one.allocated_peak_bytes == other.allocated_peak_bytes
        assert unfolded.allocated_bytes == real.allocated_bytes
        assert one.reserved_peak_bytes == pytest.approx(other.reserved_peak_bytes, rel=0.01)


INTERLEAVED = {
    "wan2.1-vace-1.3b": {"num_layers": 6, "vace_layers": [0, 2, 4]},
    "wan2.2-animate-14b": {"num_layers": 6, "inject_face_latents_blocks": 2},
}
"""Models in which something runs between some of the blocks, with fewer blocks than the published ones."""


@pytest.mark.parametrize(("name", "variant"), zip(INTERLEAVED, (LORA_ONE, "step-full-half-none-many"), strict=True))
def test_blocks_with_something_between_them_are_recorded_whole(name: str, variant: str) -> None:
    profile = lookup.model(name)
    config = {**profile.config, **INTERLEAVED[name]}
    chosen = next(found for found in default_variants(profile) if found.name == variant)
    job, strategy = chosen.records(profile)
    shape, sums, regime = tapes.prime_grid(profile, 1 if variant.endswith("one") else None)
    trace = record_step(profile, job, strategy, shape, config)
    atoms = {atom: 1 if atom in regime else shape[atom] for atom in ATOMS} | sums
    header = Header(name, variant, {}, regime, family(profile).sums)
    made_tape = compress(trace, header, atoms, [run.count for run in trace.runs])
    orders = [(section.order, section.templates) for section in made_tape.pieces["step"] if section.order]
    assert any(sorted(set(order)) == list(range(len(templates))) for order, templates in orders)
    job = job.replace(frames=25, height=320, width=480, lora_rank=24, batch_size=1 if variant.endswith("one") else 3)
    trace = record_step(profile, job, strategy, grid(profile, job), config)
    program = Program()
    stages = [program.unfold(made_tape, part) for part in ("load", "step")]
    sizes, direct_sizes = program.bytes_of(grid(profile, job)), [alloc.nbytes for alloc in trace.allocations]
    for stage in stages:
        events = piece(trace, stage.name)
        assert made(stage.ops, sizes) == made(events, direct_sizes)
        assert levels(stage.ops, sizes) == levels(events, direct_sizes)


@pytest.mark.parametrize("variant", ["step-lora-fp8-fp32-autocast-none-many", "step-lora-wide-half-half-full-one"])
def test_a_mixture_of_experts_is_what_is_recorded_at_another_shape_and_depth(variant: str) -> None:
    """Each of its blocks has a text of its own, which is there in a recording of fewer blocks too."""
    profile = lookup.model("hidream-i1")
    chosen = next(found for found in default_variants(profile) if found.name == variant)
    made_tape = tapes.step_tape(profile, chosen)
    job, strategy = chosen.records(profile)
    job = job.replace(height=512, width=512, lora_rank=24, batch_size=1 if variant.endswith("one") else 3)
    depth = {"num_layers": 7, "num_single_layers": 8}
    trace = record_step(profile, job, strategy, grid(profile, job), {**profile.config, **depth})
    program = Program()
    stages = [program.unfold(made_tape, part, list(depth.values())) for part in ("load", "step")]
    sizes, direct_sizes = program.bytes_of(grid(profile, job)), [alloc.nbytes for alloc in trace.allocations]
    for stage in stages:
        events = piece(trace, stage.name)
        assert made(stage.ops, sizes) == made(events, direct_sizes)
        assert levels(stage.ops, sizes) == levels(events, direct_sizes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_tape_is_what_is_recorded_at_another_depth(name: str) -> None:
    """But for the stack of all gradients' norms, one number per tensor, which stays that of the blocks recorded."""
    trace = direct(name, 9)
    program = Program()
    step = LORA_ONE if "lora" in name else FULL_ONE
    load, _ = (program.unfold(tape(step), part, [9]) for part in ("load", "step"))
    gradients = list(program.named["gradient"].values())
    stages = [program.unfold(tape(name), part, [9]) for part in ("optimizer_first", "optimizer")]
    sizes, direct_sizes = program.bytes_of(ordinary(name)[2]), [alloc.nbytes for alloc in trace.allocations]
    unfolded, real = (CachingAllocator(expandable_segments=False) for _ in range(2))
    unfolded.run(load.ops, sizes)
    real.run(piece(trace, "load"), direct_sizes)
    lent = iter(gradient_pieces(trace))
    for stage in stages:
        events = piece(trace, stage.name)
        unfolded.run(gradients, sizes)
        real.run(next(lent), direct_sizes)
        ours, theirs = made(stage.ops, sizes), made(events, direct_sizes)
        norms = {index for index, event in enumerate(e for e in events if e >= 0) if op_of(trace, event) == "stack"}
        assert len(norms) == (0 if name.endswith("backward") else 1)
        assert [size for i, size in enumerate(ours) if i not in norms] == [
            size for i, size in enumerate(theirs) if i not in norms
        ]
        one, other = unfolded.run(stage.ops, sizes), real.run(events, direct_sizes)
        assert one.allocated_peak_bytes == pytest.approx(other.allocated_peak_bytes, abs=4096)
        assert unfolded.allocated_bytes == real.allocated_bytes


def op_of(trace: RawRecording, number: int) -> str:
    return trace.allocations[number].op.removeprefix("aten.")


def gradient_pieces(trace: RawRecording) -> list[list[int]]:
    bounds = itertools.pairwise(trace.pieces)
    return [trace.events[start:stop] for (name, start), (_, stop) in bounds if name == "gradients"]


@pytest.mark.parametrize("name", [LORA_ONE, OPTIMIZERS[0]])
def test_two_recordings_are_identical(name: str) -> None:
    assert first_difference(recorded(name), record(name)) == ""


@pytest.mark.parametrize("name", [*STEPS, *OPTIMIZERS])
def test_a_shipped_tape_is_what_the_code_records_now(name: str) -> None:
    there = read_recording(profiles.TAPES / MODEL / f"{name}.json.gz")
    now = dict(recorded(name))
    for key in NOT_COMPARED:
        del there[key], now[key]
    assert first_difference(there, now) == "", f"vplan record {MODEL}"


def test_a_tape_with_a_mask_is_what_the_code_records_now() -> None:
    """Where text is masked, attention makes numbers of a boolean mask first."""
    name, profile = "step-lora-half-fp32-autocast-none-one", lookup.model("hunyuan-video-1.5")
    (variant,) = (variant for variant in step_variants(profile) if variant.name == name)
    there = read_recording(profiles.TAPES / profile.name / f"{name}.json.gz")
    now = tape_json(tapes.step_tape(profile, variant))
    for key in NOT_COMPARED:
        del there[key], now[key]
    assert first_difference(there, now) == ""


def expected() -> set[Path]:
    """The file of every variant of every model, also of those made on request, its table of parameters, and its VAE's
    and text encoders' tapes."""
    found = {profiles.TAPES / model / PARAMETERS for model in profiles.model_names()}
    for model in profiles.model_names():
        profile = lookup.model(model)
        variants = (*default_variants(profile), *requested_variants(profile))
        found |= {profiles.TAPES / model / f"{variant.name}.json.gz" for variant in variants}
        found |= {profiles.TAPES / COMPONENTS / name / f"{part}.json.gz" for name, part in components(profile)}
    return found


def core() -> set[Path]:
    """What every model must have: any storage but a quantised base, AdamW in 32 and 8 bits; of wide LoRA on a UNet,
    none of whose blocks are alike, only what is shipped."""
    core = {profiles.TAPES / model / PARAMETERS for model in profiles.model_names()}
    for model in profiles.model_names():
        for variant in default_variants(lookup.model(model)):
            step = variant if isinstance(variant, StepVariant) else None
            rare = step is not None and step.precision.weights in QUANTISED_BASES
            other = isinstance(variant, OptimizerVariant) and (
                variant.optimizer not in ("adamw", "adamw-8bit") or variant.how == "backward"
            )
            wide = "lora-wide" in variant.name and lookup.model(model).family == "unet"
            if not rare and not other and not wide and not isinstance(variant, SampleVariant):
                core.add(profiles.TAPES / model / f"{variant.name}.json.gz")
    return core


def test_the_table_of_parameters_holds_what_the_tapes_load() -> None:
    """Every weight of the bare model that is no table, in any format it is trained in."""
    table = read_parameters(profiles.TAPES / MODEL / PARAMETERS)
    now = tapes.parameter_table(PROFILE)
    assert (dict(table.rows), sorted(table.fp32)) == (now["rows"], sorted(now["fp32"]))
    for name in (LORA_ONE, FULL_ONE):
        program, loaded = Program(), tape(name)
        program.unfold(loaded, "load")
        sizes = program.bytes_of({**ordinary(name)[2], "B": 1})
        weights = {full: sizes[buffer] for full, buffer in program.named["weight"].items()}
        found = {full for full in weights if table.is_parameter(full)}
        assert weights.keys() - found == {"rope.freqs_cos", "rope.freqs_sin"}
        own = [full for full in found if ".lora_" not in full]
        assert sum(table.elements(full, weights[full]) for full in own) == PROFILE.parameters
        assert all(table.elements(full, weights[full]) % table.rows_of(full, 24) == 0 for full in own)


def test_every_model_ships_what_plans_are_made_of() -> None:
    assert not {path for path in core() if not is_stored(path)}


def test_no_tape_is_shipped_that_nothing_records() -> None:
    assert not set(shipped_tapes()) - expected()


def test_sizes_read_at_primes_show_every_atom() -> None:
    """What grows with the clip must not be taken for a constant: such a size would be hundreds of MiB at the primes."""
    ones = [path for path in shipped_tapes() if path.match("step-*-one.json.gz")]
    assert ones
    for path in ones:  # where the batch shows in no size
        found = read_tape(path)
        weights = max(monomial.coefficient for monomial in weight_sizes(found))
        constants = [size.coefficient for size in found.sizes if not any(size.exponents) and not size.multiple]
        fp32_copies = 2 * weights * (2 if "half" in path.name else 1)
        assert max(constants, default=0) <= fp32_copies, f"{path.parent.name}/{path.name}"


def weight_sizes(found: Tape) -> list[Monomial]:
    templates = [template for section in found.pieces["load"] for template in section.templates]
    return [found.sizes[event[0]] for template in templates for event in template.events]
