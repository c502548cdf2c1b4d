"""planner/layout/single_gpu.py and the phases on the hand-made run: every strategy's bytes worked by hand, and what
must hold for any shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import grids
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.estimate.host_ram import disk_bytes, host_ram
from planner.layout.checkpoints.block_inputs import block_inputs
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from tests.planner.hand_made import (
    ADAPTER,
    BATCH,
    BLOCKS,
    CAST,
    CUBLAS,
    EIGHT,
    FACTS,
    GPU,
    JOB,
    KIB,
    LAST_FORWARD,
    LOADED,
    MODEL,
    ONE,
    SHAPE,
    STATES,
    TABLE,
    WEIGHTS,
    X,
    after,
    laid_out,
    peaks,
    rounded,
    trained,
)


def test_without_any_strategy() -> None:
    assert peaks(laid_out()) == {
        "load": LOADED - CUBLAS,
        "step": LOADED + STATES + LAST_FORWARD,
        "optimizer_first": LOADED + STATES + BATCH + 2 * BLOCKS * ADAPTER,
        "optimizer": LOADED + STATES + BATCH + 2 * BLOCKS * ADAPTER,
    }
    assert after(laid_out()) == LOADED + STATES


def test_residents_are_loaded_before_everything_and_stay() -> None:
    plain, run = peaks(laid_out()), laid_out(vae="resident", text_encoder="resident", text_encoder_dtype="bf16")
    vae = rounded(2 * MODEL.vae.parameters)
    encoders = sum(rounded(2 * encoder.parameters) for encoder in MODEL.text_encoders)
    assert peaks(run) == {stage: nbytes + vae + encoders for stage, nbytes in plain.items()}
    quantised = laid_out(text_encoder="resident", text_encoder_dtype="nf4")
    # half a byte each, and an fp32 scale for every 64
    quarter = sum(rounded(encoder.parameters * 9 // 16) for encoder in MODEL.text_encoders)
    assert peaks(quantised)["step"] == plain["step"] + quarter


@pytest.mark.parametrize(("swapped", "ring"), [(1, 1), (2, 2), (3, 2)])
def test_swap_keeps_the_first_blocks_and_a_ring_of_two(swapped: int, ring: int) -> None:
    run = laid_out(gradient_checkpointing="full", swap_blocks=swapped)
    saved = swapped * WEIGHTS - ring * WEIGHTS
    assert peaks(run) == {stage: nbytes - saved for stage, nbytes in peaks(laid_out()).items()}
    kept = [name for name, buffer in run.named("weight").items() if buffer in run.load.ops]
    assert kept == ["stem.weight", *_block_names(BLOCKS, swapped)]


def test_trained_weights_can_be_swapped_when_the_optimizer_steps_while_their_block_is_there() -> None:
    frozen = laid_out()
    strategy = frozen.strategy.replace(optimizer_step="backward")
    inside = replace(frozen, configuration=replace(frozen.configuration, strategy=strategy))
    for run, nbytes in ((frozen, WEIGHTS), (inside, WEIGHTS + ADAPTER)):
        assert len(run.swappable_weights) == BLOCKS
        assert {sum(run.sizes[b] for b in buffers) for buffers in run.swappable_weights.values()} == {nbytes}


def _block_names(blocks: int, swapped: int) -> list[str]:
    """In load order: adapters stay with every block."""
    found = []
    for block in range(blocks):
        frozen = [f"blocks.{block}.attn.weight"] if block < blocks - swapped else []
        found += [*frozen, f"blocks.{block}.attn.lora"]
    return found


def test_offloaded_checkpoints_leave_after_their_block_and_come_back_one_by_one() -> None:
    run = laid_out(gradient_checkpointing="offload")
    # Forward of the last block: the latents, the table, block 0's input (made outside the blocks, it stays), its own
    # input, every cast copy so far, its output and what it takes.
    forward = BATCH + TABLE + X + X + BLOCKS * CAST + X + 2 * X
    # Backward of a block: its input comes back; block 0's and the table were there all the time.
    backward = BATCH + TABLE + X + X + 2 * X + BLOCKS * ADAPTER
    assert peaks(run)["step"] == LOADED + STATES + max(forward, backward)
    assert after(run) == LOADED + STATES


def test_an_optimizer_in_host_ram_leaves_nothing_of_itself() -> None:
    run = laid_out(offload_optimizer="cpu")
    assert peaks(run) == {
        "load": LOADED - CUBLAS,
        "step": LOADED + LAST_FORWARD,
        "optimizer_first": LOADED + BATCH + BLOCKS * ADAPTER,
        "optimizer": LOADED + BATCH + BLOCKS * ADAPTER,
    }
    assert after(run) == LOADED


def test_offloaded_checkpoints_leave_once_where_a_backward_comes_in_parts() -> None:
    model, gpu = lookup.model("sd3.5-large"), card_lookup.gpu("h100-80gb")
    job = Job(model=model.name, method="full", frames=1, height=1024, width=1024)
    strategy = Strategy(weights_dtype="bf16", autocast="none", gradient_checkpointing="offload")
    machine = Machine(gpu=gpu.name, host_ram=64 * 2**30)
    configuration = Configuration.of(job, strategy, machine)
    known = load_facts(configuration, model, gpu)
    assert estimate(configuration, known).verdict == "tight"  # plays to its end: nothing is freed twice


def test_offloaded_gradients_leave_at_the_end_of_their_block() -> None:
    run = laid_out(offload_optimizer="cpu", offload_gradients="cpu")
    assert peaks(run)["optimizer"] == LOADED + BATCH
    assert after(run) == LOADED


def test_ddp_copies_every_gradient_into_buckets() -> None:
    plain, run = peaks(laid_out()), laid_out(EIGHT, grad_buckets="copy")
    assert peaks(run) == {stage: nbytes + BLOCKS * ADAPTER for stage, nbytes in plain.items()}


def test_ddp_gradients_as_views_of_the_buckets_are_there_once_and_always() -> None:
    buckets = BLOCKS * ADAPTER
    run = laid_out(EIGHT, grad_buckets="view")
    assert peaks(run) == {
        "load": LOADED - CUBLAS + buckets,
        "step": LOADED + buckets + STATES + LAST_FORWARD,
        "optimizer_first": LOADED + buckets + STATES + BATCH + BLOCKS * ADAPTER,
        "optimizer": LOADED + buckets + STATES + BATCH + BLOCKS * ADAPTER,
    }
    assert after(run) == LOADED + buckets + STATES


EVERY: list[tuple[Machine, dict[str, object]]] = [
    (ONE, {}),
    (ONE, {"vae": "resident", "text_encoder": "resident"}),
    (ONE, {"gradient_checkpointing": "full", "swap_blocks": 2}),
    (ONE, {"gradient_checkpointing": "offload"}),
    (ONE, {"gradient_checkpointing": "offload", "swap_blocks": 3}),
    (ONE, {"offload_optimizer": "cpu"}),
    (ONE, {"offload_optimizer": "cpu", "offload_gradients": "cpu"}),
    (EIGHT, {"grad_buckets": "copy"}),
    (ONE, {"adapter_dtype": "bf16", "master_weights": "fp32", "gradient_accumulation": 2}),
    (EIGHT, {"adapter_dtype": "bf16", "master_weights": "fp32", "grad_buckets": "view"}),
    (EIGHT, {"grad_buckets": "view"}),
    (EIGHT, {"grad_buckets": "view", "gradient_checkpointing": "offload", "swap_blocks": 1}),
    *[(machine, {"sharding": stage}) for machine in (ONE, EIGHT) for stage in ("zero-1", "zero-2", "zero-3", "fsdp")],
    (EIGHT, {"sharding": "zero-1", "gradient_accumulation": 2}),
    (EIGHT, {"sharding": "zero-2", "gradient_accumulation": 2}),
    (EIGHT, {"sharding": "fsdp", "gradient_accumulation": 2, "ema": "gpu"}),
    (EIGHT, {"sharding": "fsdp", "offload_optimizer": "cpu", "offload_params": "cpu"}),
    (EIGHT, {"sharding": "zero-2", "offload_optimizer": "cpu"}),
    (EIGHT, {"sharding": "zero-3", "offload_optimizer": "cpu", "offload_params": "cpu"}),
]
ANY = st.sampled_from(EVERY)


def _needs(machine: Machine, strategy: dict[str, object], grid: dict[str, int]) -> int:
    return max(peaks(laid_out(machine, grid, **strategy)).values())


@given(ANY, SHAPE, st.sampled_from("BFHWR"), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_more_of_anything_never_needs_less(
    chosen: tuple[Machine, dict[str, object]], grid: dict[str, int], atom: str, more: int
) -> None:
    machine, strategy = chosen
    assert _needs(machine, strategy, grid) <= _needs(machine, strategy, {**grid, atom: grid[atom] + more})


@given(SHAPE, st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_swap_adds_at_most_its_ring(grid: dict[str, int], swapped: int) -> None:
    plain = _needs(ONE, {"gradient_checkpointing": "full"}, grid)
    ring = min(2, swapped) * WEIGHTS
    assert _needs(ONE, {"gradient_checkpointing": "full", "swap_blocks": swapped}, grid) <= plain + ring


@given(SHAPE)
@settings(max_examples=50, deadline=None)
def test_offloaded_checkpoints_add_at_most_one_copy_of_what_all_blocks_share(grid: dict[str, int]) -> None:
    table = rounded(KIB // 2 * grid["F"] * grid["H"] * grid["W"])
    plain = _needs(ONE, {"gradient_checkpointing": "full"}, grid)
    assert _needs(ONE, {"gradient_checkpointing": "offload"}, grid) <= plain + table


@given(SHAPE, st.sampled_from(["vae", "text_encoder"]))
@settings(max_examples=50, deadline=None)
def test_caching_never_needs_more(grid: dict[str, int], part: str) -> None:
    assert _needs(ONE, {part: "cached"}, grid) <= _needs(ONE, {part: "resident"}, grid)


@given(ANY, st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_breakdown_sums_to_the_device_peak_and_phases_bound_it(
    chosen: tuple[Machine, dict[str, object]], frames: int, rows: int, columns: int, batch: int
) -> None:
    machine, strategy = chosen
    job = JOB.replace(frames=4 * frames + 1, height=16 * rows, width=16 * columns, batch_size=batch)
    found = estimate(Configuration.of(job, Strategy.read(strategy), machine), FACTS)
    assert found.breakdown.total == found.peak.device_bytes
    assert all(part >= 0 for part in found.breakdown.__dict__.values())
    assert found.peak.allocated_bytes <= found.peak.reserved_bytes < found.peak.device_bytes
    assert found.peak.device_bytes == max(phase.device_bytes for phase in found.phases.values())
    communicators = (machine.world > 1) + str(strategy.get("sharding")).startswith("zero")
    context = GPU.context_bytes + communicators * 600 * 2**20  # each (NVIDIA/nccl#964)
    assert found.peak.device_bytes - found.peak.reserved_bytes == context


@given(ANY, SHAPE, st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_second_step_begins_where_the_first_began(
    chosen: tuple[Machine, dict[str, object]], grid: dict[str, int], expandable: bool
) -> None:
    """Nothing leaks: after the second step the same buffers live as after the first."""
    machine, strategy = chosen
    assume(expandable or machine is ONE)
    run = laid_out(machine, grid, **{**strategy, "expandable_segments": expandable})
    played = trained(run)
    after_first = next(entry for entry in played if entry.stage is run.optimizer_first).allocated_after_bytes
    assert after_first == played[-1].allocated_after_bytes


def test_masters_are_loaded_and_take_the_gradients_place_at_the_step() -> None:
    plain, run = (laid_out(adapter_dtype="bf16", master_weights=how) for how in ("none", "fp32"))
    masters = 2 * BLOCKS * ADAPTER
    assert peaks(run)["load"] == LOADED - CUBLAS + masters
    assert peaks(run)["step"] == peaks(plain)["step"] + masters
    # Gradients twice as large, and the last 16-bit one beside the copies; then the states and what the step is lent.
    cast, stepped = 2 * BLOCKS * ADAPTER + ADAPTER, 2 * BLOCKS * ADAPTER + BLOCKS * ADAPTER
    assert peaks(run)["optimizer"] == LOADED + masters + STATES + BATCH + max(cast, stepped)
    assert after(run) == after(plain) + masters
    assert disk_bytes(run) == disk_bytes(plain) + masters


@pytest.mark.parametrize(("optimizer", "sharding", "less"), [("lion", "zero-2", 4), ("adafactor", "ddp", 8)])
def test_other_optimizers_in_host_ram_keep_fewer_states_there(optimizer: str, sharding: str, less: int) -> None:
    away = {"sharding": sharding, "offload_optimizer": "cpu"}
    adam, other = (laid_out(EIGHT, **away, optimizer=name) for name in ("adamw", optimizer))
    assert peaks(adam) == peaks(other)
    ranks = 1 if sharding == "zero-2" else 8
    needs = [host_ram(run, EIGHT).phases["train"] for run in (adam, other)]
    assert needs[0] - needs[1] == less * ranks * adam.trained_parameters


@pytest.mark.parametrize(
    ("optimizer", "sharding", "why"),
    [
        ("prodigy", "none", "one rate over all parameters"),
        ("adamw-8bit", "none", "bitsandbytes kernels"),
        ("lion", "none", "bitsandbytes kernels"),
        ("adafactor", "zero-2", "no CPU kernel"),
    ],
)
def test_optimizers_that_do_not_step_in_host_ram_say_why(optimizer: str, sharding: str, why: str) -> None:
    with pytest.raises(VplanError, match=why):
        laid_out(ONE if sharding == "none" else EIGHT, offload_optimizer="cpu", optimizer=optimizer, sharding=sharding)


@pytest.mark.parametrize("model", ["wan2.1-t2v-1.3b", "flux.2-klein-4b"])
def test_an_update_in_backward_waits_for_the_operator_that_made_its_gradient(model: str) -> None:
    """With a bias, a weight's gradient is its operator's last product, without one its first. On a virtual GPU both let
    go of what they saved and of their own gradient before the update begins."""
    strategy = Strategy(
        weights_dtype="bf16",
        autocast="none",
        gradient_checkpointing="full",
        optimizer="adafactor",
        optimizer_step="backward",
    )
    profile = lookup.model(model)
    job = Job(model=model, method="full", frames=profile.shape.min_frames, height=480, width=832)
    configuration = Configuration.of(job, strategy, ONE)
    facts = load_facts(configuration)
    run = lay_out(configuration, facts, grids(facts.model, job)[0])
    gradients = set(run.named("gradient").values())
    events = [event for _, stretch in run.step.stretches for event in stretch]
    made = [at for at, event in enumerate(events) if event in gradients and run.program.op[event] == "mm"]
    begins = {at: _cast(run, events, at) for at in made}
    assert sum(cast is not None for cast in begins.values()) > 100  # what diffusers keeps in fp32 is not cast
    for at, cast in begins.items():
        assert cast is None or any(event < 0 for event in events[at:cast])


def _cast(run: Run, events: list[int], at: int) -> int | None:
    """Where the update of a 16-bit gradient made at ``at`` begins: with its fp32 copy."""
    wanted = 2 * run.sizes[events[at]]
    for later in range(at, len(events)):
        event = events[later]
        if event >= 0 and run.program.op[event] == "_to_copy" and run.sizes[event] == wanted:
            return later
    return None


def test_prodigy_keeps_no_copy_of_what_begins_at_zero() -> None:
    configuration = Configuration.of(
        Job(model="wan2.1-t2v-1.3b", frames=9, height=480, width=832),
        Strategy(optimizer="prodigy", gradient_checkpointing="full"),
        Machine(gpu="h100-80gb"),
    )
    facts = load_facts(configuration)
    run = lay_out(configuration, facts, next(iter(grids(facts.model, configuration.job))))
    made = {event for event in run.optimizer_first.ops if event >= 0}
    kept = [name for name, buffer in run.named("optimizer").items() if name.endswith(":p0") and buffer in made]
    assert kept
    assert all("lora_A" in name for name in kept)


def test_an_input_that_came_back_goes_when_its_block_is_recomputed() -> None:
    """Wan casts a block's input first, so nothing of its backward holds it."""
    configuration = Configuration.of(
        Job(model="wan2.1-t2v-1.3b", frames=49, height=480, width=832),
        Strategy(gradient_checkpointing="offload"),
        Machine(gpu="h100-80gb"),
    )
    facts = load_facts(configuration)
    run = lay_out(configuration, facts, next(iter(grids(facts.model, configuration.job))))
    inputs, seen = block_inputs(run), set()
    for moment, events in run.step.stretches:
        block = moment.module_list, moment.block
        operators = [run.program.op[event] if event >= 0 else "" for event in events]
        if moment.passes != "backward" or block not in inputs or f"{ATTENTION}_backward" not in operators:
            continue
        ends = {events.index(~buffer) for buffer in inputs[block]}
        # The attention that is recomputed is before them, and its backward behind them.
        assert operators.index(ATTENTION) < min(ends)
        assert max(ends) < operators.index(f"{ATTENTION}_backward")
        seen.add(block)
    assert seen == inputs.keys()


ATTENTION = "_scaled_dot_product_flash_attention"
