"""Laws of allocated bytes over the space of strategies, sampled: on the hand-made run, and on Wan 1.3B's own tapes.

What is reserved has no such laws: a smaller request may split a larger block.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.catalog import lookup
from planner.catalog.shapes import grid as shape_of
from planner.catalog.shapes import job_for
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.layout.recorded_run import recorded_step
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.layout.unpriced import refuse_unpriced
from planner.search.screening import Screen, allocated_peak
from planner.search.space import most_swapped
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import resolve
from tests.planner.hand_made import EIGHT, FACTS, JOB, ONE, SHAPE, laid_out, peaks

FIELDS: dict[str, tuple[Any, ...]] = {
    "adapter_dtype": ("fp32", "bf16"),
    "master_weights": ("none", "fp32"),
    "gradient_checkpointing": ("full", "offload"),
    "optimizer": ("adamw", "adamw-8bit", "adamw-8bit-paged", "adafactor", "lion", "prodigy", "came", "muon"),
    "optimizer_step": ("foreach", "fused", "loop"),
    "gradient_accumulation": (1, 2, 3),
    "ema": ("none", "gpu", "cpu"),
    "sharding": ("none", "ddp", "zero-1", "zero-2", "zero-3", "fsdp"),
    "grad_buckets": ("copy", "view"),
    "offload_optimizer": ("none", "cpu", "nvme"),
    "offload_gradients": ("none", "cpu"),
    "offload_params": ("none", "cpu", "nvme"),
    "swap_blocks": (0, 1, 3),
    "text_encoder": ("cached", "resident"),
    "vae": ("cached", "resident"),
    "text_encoder_dtype": ("bf16", "nf4"),
}
"""Every field that moves memory, with the values that the hand-made run can show: its blocks are checkpointed."""

LIKELY_OFF = {"master_weights", "ema", "offload_optimizer", "offload_gradients", "offload_params", "swap_blocks"}
Chosen = tuple[Machine, dict[str, Any]]


def allowed(machine: Machine, strategy: dict[str, Any]) -> bool:
    try:
        configuration = Configuration.of(JOB, Strategy.read(strategy), machine)
        refuse_contradictions(configuration)
        refuse_unpriced(configuration)
    except VplanError:
        return False
    return True


@functools.cache
def space() -> tuple[Chosen, ...]:
    """A few hundred strategies that contradict nothing, drawn with a fixed seed; fields that exclude much are rarer."""
    draw = random.Random(1)
    found = []
    for _ in range(12000):
        strategy = {
            field: values[0] if field in LIKELY_OFF and draw.random() < 0.7 else draw.choice(values)
            for field, values in FIELDS.items()
        }
        machine = draw.choice([ONE, EIGHT, EIGHT])
        if allowed(machine, strategy):
            found.append((machine, strategy))
    return tuple(found)


ANY = st.deferred(lambda: st.sampled_from(space()))


def needs(run: Run) -> int:
    return max(peaks(run).values())


def named(run: Run, names: set[str]) -> int:
    """Bytes of all buffers that a strategy added under these names."""
    return sum(run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op in names)


def test_the_space_is_wide_and_has_every_value() -> None:
    assert len(space()) > 300
    for field, values in FIELDS.items():
        assert {strategy[field] for _, strategy in space()} == set(values), field


@given(ANY, SHAPE, st.sampled_from("BFHWR"), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_more_of_anything_never_needs_less(chosen: Chosen, grid: dict[str, int], atom: str, more: int) -> None:
    machine, strategy = chosen
    larger = {**grid, atom: grid[atom] + more}
    assert needs(laid_out(machine, grid, **strategy)) <= needs(laid_out(machine, larger, **strategy))


SWITCHES: dict[str, tuple[Any, Any, set[str]]] = {
    "gradient_checkpointing": ("full", "offload", set()),
    "swap_blocks": (0, 3, {"swap ring"}),
    "offload_optimizer": ("none", "cpu", {"gradient staging", "norm in fp64"}),
    "offload_gradients": ("none", "cpu", set()),
    "offload_params": ("none", "cpu", {"gathered weights", "all-gather", "small weights"}),
    "text_encoder": ("resident", "cached", set()),
    "vae": ("resident", "cached", set()),
    "ema": ("gpu", "cpu", set()),
    "optimizer_step": ("foreach", "fused", set()),
    "grad_buckets": ("copy", "view", set()),
    "optimizer": ("adamw-8bit", "adamw-8bit-paged", set()),
}
"""A switch that saves: from what, to what, and the buffers it brings itself."""


@given(ANY, SHAPE, st.sampled_from(sorted(SWITCHES)))
@settings(max_examples=300, deadline=None)
def test_what_saves_never_adds_beyond_its_own_buffers(chosen: Chosen, grid: dict[str, int], field: str) -> None:
    machine, strategy = chosen
    before, after, own = SWITCHES[field]
    plain, saving = {**strategy, field: before}, {**strategy, field: after}
    assume(allowed(machine, plain) and allowed(machine, saving))
    with_it = laid_out(machine, grid, **saving)
    shared = 2**19 * grid["F"] * grid["H"] * grid["W"] // 1024 if field == "gradient_checkpointing" else 0
    assert needs(with_it) <= needs(laid_out(machine, grid, **plain)) + named(with_it, own) + shared


def static(run: Run) -> int:
    """Weights, gradients and states alive when a step is over, and while gradients wait for it."""
    alive: dict[int, None] = {}
    kinds, most = ("weight", "gradient", "optimizer"), 0
    for _, stage in run.stages:
        for event in stage.ops:
            if event >= 0:
                alive[event] = None
            else:
                alive.pop(~event, None)
        most = max(most, sum(run.sizes[buffer] for buffer in alive if run.program.category[buffer] in kinds))
    return most


@given(ANY, SHAPE)
@settings(max_examples=150, deadline=None)
def test_splitting_more_never_adds_to_weights_gradients_and_states(chosen: Chosen, grid: dict[str, int]) -> None:
    _, strategy = chosen
    sharding = str(strategy["sharding"])
    assume(sharding not in ("none", "ddp"))
    stages = [sharding] if sharding == "fsdp" else [f"zero-{stage}" for stage in range(int(sharding[-1]), 4)]
    kept = [
        static(laid_out(EIGHT, grid, **{**strategy, "sharding": stage}))
        for stage in stages
        if allowed(EIGHT, {**strategy, "sharding": stage})
    ]
    small = named(laid_out(EIGHT, grid, **{**strategy, "sharding": stages[-1]}), {"small weights"})
    assert all(more <= less + small for less, more in itertools.pairwise(kept))
    sixteen = EIGHT.replace(gpus=16)
    assert static(laid_out(sixteen, grid, **strategy)) <= static(laid_out(EIGHT, grid, **strategy))


@given(ANY, st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_breakdown_sums_to_the_peak_and_the_phases_highest_is_it(
    chosen: Chosen, frames: int, rows: int, columns: int, batch: int
) -> None:
    machine, strategy = chosen
    job = JOB.replace(frames=4 * frames + 1, height=16 * rows, width=16 * columns, batch_size=batch)
    found = estimate(Configuration.of(job, Strategy.read(strategy), machine), FACTS)
    assert found.breakdown.total == found.peak.device_bytes
    assert all(part >= 0 for part in found.breakdown.__dict__.values())
    for counter in ("allocated_bytes", "reserved_bytes", "device_bytes"):
        assert getattr(found.peak, counter) == max(getattr(phase, counter) for phase in found.phases.values())
    assert found.peak.allocated_bytes == found.phases[found.peak.phase].allocated_bytes
    assert found.step_seconds <= (found.step_seconds_high or 0)


# ---- Wan 1.3B's own tapes

WAN = lookup.model("wan2.1-t2v-1.3b")
CARD = Machine(gpu="h100-80gb", host_ram=2**40)
SCREEN = Screen(functools.cache(load_facts))


def looked(job: Job, **strategy: Any) -> int:
    """Allocated peak of training alone: what is encoded before it needs more than a short clip does."""
    configuration = Configuration.of(job, Strategy.read(strategy), CARD)
    found = load_facts(configuration)
    return allocated_peak(SCREEN.run_cache.lay_out(configuration, found, shape_of(WAN, job), "vplan"))[0]


def wan(method: str, **shape: int) -> Job:
    return job_for(WAN, {"method": method, "frames": 17, "height": 480, "width": 832, **shape})


@pytest.mark.parametrize("method", ["lora", "full"])
def test_every_block_more_that_is_checkpointed_needs_no_more(method: str) -> None:
    """But for one block's input: the last block, which runs backward first, need not keep its own beside its step."""
    job = wan(method)
    partial = {"gradient_checkpointing": "partial"}
    found = [looked(job, **partial, checkpointed_blocks=blocks) for blocks in (1, 10, 20, 29, 30)]
    none, full = (looked(job, gradient_checkpointing=mode) for mode in ("none", "full"))
    one_input = 2 * 1536 * 5 * 30 * 52
    assert all(more <= less + one_input for less, more in itertools.pairwise([none, *found]))
    assert found[-1] == full


@pytest.mark.parametrize("blocks", [5, 29])
@pytest.mark.parametrize(
    ("field", "value"), [("frames", 33), ("height", 512), ("width", 864), ("batch_size", 2), ("lora_rank", 64)]
)
def test_more_never_needs_less_where_some_blocks_are_checkpointed(blocks: int, field: str, value: int) -> None:
    strategy = {"gradient_checkpointing": "partial", "checkpointed_blocks": blocks}
    assert looked(wan("lora"), **strategy) < looked(wan("lora", **{field: value}), **strategy)


def test_blocks_that_are_swapped_are_those_that_are_checkpointed() -> None:
    strategy = {"gradient_checkpointing": "partial", "checkpointed_blocks": 20}
    plain, swapped = (looked(wan("lora"), **strategy, swap_blocks=blocks) for blocks in (0, 20))
    weights = 2 * WAN.parameters // WAN.blocks
    assert plain - swapped == pytest.approx(18 * weights, rel=0.1)


def test_a_gradient_is_no_other_tensor_where_some_blocks_are_checkpointed() -> None:
    """Mochi's last block but one has a weight whose gradient is as large as what its last block hands on."""
    model = lookup.model("mochi-1")
    job, machine = job_for(model, {"method": "full", "frames": 25}), Machine(gpu="b200")
    strategy = resolve(job, Strategy(gradient_checkpointing="partial", checkpointed_blocks=42), machine)
    run = recorded_step(Configuration(job, strategy, machine), load_facts(Configuration.of(job, strategy, machine)))
    assert not {~event for event in run.step.ops if event < 0} & set(run.named("gradient").values())


@given(ANY, st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_no_look_is_below_its_floors(chosen: Chosen, frames: int, rows: int, columns: int, batch: int) -> None:
    machine, said = chosen
    job = JOB.replace(frames=4 * frames + 1, height=16 * rows, width=16 * columns, batch_size=batch)
    screen, configuration = Screen(lambda _: FACTS), Configuration.of(job, Strategy.read(said), machine)
    found = screen.quick_estimate(configuration)
    assert screen.floor_bytes(configuration) <= found.device_bytes
    ram = screen.host_ram_bytes(configuration)
    assert screen.floor_ram_bytes(configuration) <= ram == found.host_ram_bytes


@pytest.mark.parametrize("name", lookup.model_names())
def test_floors_of_every_recording_are_most_of_a_look(name: str) -> None:
    """Of those that a job on one card can ask for, and never more. Each at the model's usual shape or at the smallest,
    and with swapped blocks or without, in turns that differ from model to model."""
    screen, machine, model = Screen(load_facts), Machine(gpu="b200"), lookup.model(name)
    usual, least = {}, {"frames": 1, "height": 256, "width": 256, "lora_rank": 1}
    asked = ("lora", "full"), ("bf16", "fp32", "fp8", "int8", "nf4"), ("none", "bf16"), ("none", "full", "offload")
    device: dict[bool, list[float]] = {False: [], True: []}
    ram: list[float] = []
    first, counts = lookup.model_names().index(name), itertools.cycle((1, model.blocks // 2, model.blocks - 1))
    ways = list(itertools.product((usual, least), (False, True)))
    turns = [
        (shape, recording, next(counts) if with_swap else 0)
        for turn, recording in enumerate(itertools.product(*asked), first)
        for shape, with_swap in [ways[turn % len(ways)]]
    ]
    for shape, (method, weights, autocast, mode), swapped in turns:
        fields = {"gradient_checkpointing": mode, "weights_dtype": weights, "autocast": autocast}
        try:
            job = job_for(model, {"method": method, **shape})
            if swapped and not most_swapped(job, Strategy.read(fields), model, ()):
                continue
            configuration = Configuration.of(job, Strategy.read({**fields, "swap_blocks": swapped}), machine)
            found = screen.quick_estimate(configuration)
        except VplanError:  # forbidden, not recorded, or a size that the model does not take
            continue
        floor = screen.floor_bytes(configuration) - load_facts(configuration).gpu.context_bytes
        device[bool(swapped)].append(floor / screen.allocated_bytes(configuration))
        assert screen.floor_ram_bytes(configuration) <= screen.host_ram_bytes(configuration) == found.host_ram_bytes
        if swapped:
            ram.append(screen.floor_ram_bytes(configuration) / found.host_ram_bytes)
    assert device[False], "nothing is recorded"
    assert all(0.7 < share <= 1 for share in device[True])
    assert all(0.75 < share <= 1 for share in device[False])
    assert all(share > 0.7 for share in ram)  # the copy that a checkpoint is written from is not counted
