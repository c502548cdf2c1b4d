"""planner/layout/sharding/zero.py, planner/layout/sharding/fsdp.py and the moving average on the hand-made run: bytes
worked by hand, and what holds for any split. tests/contract compares with the engines themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.allocator.implementation import alive, held
from planner.catalog.shapes import grids
from planner.errors import VplanError
from planner.estimate.estimate import assess
from planner.estimate.host_ram import disk_bytes, host_ram, ram_bytes
from planner.estimate.stages import replay_stages
from planner.estimate.traffic import traffic
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.layout.run_records import ZeroSettings
from planner.layout.sharding import zero as zero_terms
from planner.layout.sharding.collectives import communicators
from planner.layout.sharding.fsdp import GATHERING, REDUCING, padded_share
from planner.layout.sharding.nvme import check_buffers, gradients_in_ram
from planner.layout.sharding.zero import (
    Shares,
    aligned_elements,
    bucket_as_backward_begins,
    elements_in_share,
    share_comes_back_in_fp32,
    sub_groups,
)
from planner.layout.sharding.zero_weights import UNSPLIT
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import resolve
from tests.planner.hand_made import (
    ADAPTER,
    BATCH,
    BLOCKS,
    CUBLAS,
    EIGHT,
    FACTS,
    GIB,
    GRID,
    JOB,
    LAST_FORWARD,
    LOADED,
    ONE,
    SHAPE,
    STEM,
    TABLE,
    WEIGHTS,
    X,
    after,
    laid_out,
    peaks,
    rounded,
)


def zero(sharding: str, **more: object) -> dict[str, object]:
    return {"sharding": sharding, **more}


TRAINED = BLOCKS * ADAPTER // 2
"""DeepSpeed's module is in 16 bits, so 64 KiB are 32 Ki parameters."""

SHARE = TRAINED // 8
BUCKET = rounded(2 * 500_000_000)
"""In 16 bits: `reduce_bucket_size` of deepspeed 0.19.8, runtime/zero/config.py."""
NORM = 8 * ADAPTER // 2
"""One adapter in fp64."""

BACKWARD = BATCH + TABLE + BLOCKS * X + 2 * X + ADAPTER
"""It begins with the latents, the table and every input alive; the last gradient joins what block 3 takes."""

WITH_BUCKET = BACKWARD - X
"""DeepSpeed's bucket comes with the first gradient, when the input of block 3 is gone."""


def test_zero_1_reduces_whole_gradients_behind_backward() -> None:
    found = peaks(laid_out(EIGHT, **zero("zero-1")))
    kept = LOADED + 12 * SHARE
    assert found["load"] == LOADED - CUBLAS + BLOCKS * ADAPTER  # the flat weights beside those they are made of
    assert found["step"] == kept + WITH_BUCKET + ADAPTER + BUCKET
    assert found["optimizer"] == kept + BATCH + ADAPTER + NORM  # all but its share of the gradients is gone by then


@pytest.mark.parametrize("accumulation", [1, 2])
def test_zero_1_reduces_in_the_last_backward_of_a_step(accumulation: int) -> None:
    run = laid_out(EIGHT, **zero("zero-1"), gradient_accumulation=accumulation)
    (bucket,) = _made(run, "reduce bucket")
    last = run.step if run.accumulate is None else run.accumulate
    assert (run.accumulate is None) == (accumulation == 1)
    assert [event for stage in run.stages for event in stage[1].ops].count(~bucket) == 2  # of the first step, and later
    assert last.ops[-1] == ~bucket


def test_deepspeed_took_its_bucket_as_backward_began() -> None:
    """Before 0.17.2."""
    run = laid_out(EIGHT, **zero("zero-2"))
    (bucket,) = _made(run, "reduce bucket")
    assert run.step.moment(run.step.ops.index(bucket)).passes == "backward"
    bucket_as_backward_begins(run)
    at = run.step.ops.index(bucket)
    assert run.step.moment(at - 1).passes == "forward"
    assert peaks(run)["step"] == LOADED + 12 * SHARE + BACKWARD + BUCKET


def test_deepspeed_brought_an_offloaded_share_back_in_fp32() -> None:
    """Not in 0.14.0 nor 0.17.0; seen in a rehearsal of 0.15.2 as one allocation of the whole share behind the step."""
    run = laid_out(EIGHT, **zero("zero-2", offload_optimizer="cpu"))
    share_comes_back_in_fp32(run)
    first, later = _made(run, "share in fp32")
    assert [run.sizes[copy] for copy in (first, later)] == [4 * SHARE] * 2
    assert (run.optimizer_first.ops[-2:], run.optimizer.ops[-2:]) == ([first, ~first], [later, ~later])
    held = laid_out(EIGHT, **zero("zero-2"))
    share_comes_back_in_fp32(held)
    assert peaks(held) == peaks(laid_out(EIGHT, **zero("zero-2")))


def test_zero_2_keeps_only_its_share_of_the_gradients() -> None:
    run = laid_out(EIGHT, **zero("zero-2"))
    found, kept = peaks(run), LOADED + 12 * SHARE
    assert found["step"] == kept + WITH_BUCKET + BUCKET
    assert found["optimizer"] == kept + BATCH + ADAPTER + NORM  # its share touches one adapter
    assert after(run) == kept


def test_zero_2_keeps_the_gradients_of_two_micro_batches() -> None:
    once, twice = (peaks(laid_out(EIGHT, **zero("zero-2", gradient_accumulation=steps)))["step"] for steps in (1, 2))
    assert twice == once + ADAPTER


def test_zero_steps_in_fp32_and_a_fused_step_needs_no_copy() -> None:
    whole = Machine(gpu="rtx4090", host_ram=64 * GIB)
    found = {how: peaks(laid_out(whole, **zero("zero-2", optimizer_step=how))) for how in ("foreach", "fused", "loop")}
    kept = LOADED + 12 * TRAINED + BATCH
    # Flattened and in fp32, beside the share they come from; then AdamW's copies beside the fp32 ones.
    assert found["fused"]["optimizer"] == kept + (2 + 2 + 4) * TRAINED
    assert found["foreach"]["optimizer"] == kept + (4 + 4) * TRAINED
    assert found["loop"]["optimizer"] == kept + (4 + 8) * TRAINED


def test_zero_with_the_optimizer_in_host_ram_keeps_neither_states_nor_gradients() -> None:
    run = laid_out(EIGHT, **zero("zero-2", offload_optimizer="cpu"))
    kept = LOADED + ADAPTER  # what passes gradients on holds the largest
    assert after(run) == kept
    assert peaks(run)["optimizer"] == kept + BATCH
    assert peaks(run)["step"] == kept + WITH_BUCKET + BUCKET


def test_deepspeed_has_a_communicator_beside_that_of_all_ranks() -> None:
    """Rehearsed on one, two and four virtual GPUs, at 600 MiB each."""
    assert [communicators(laid_out(machine, **zero("zero-1"))) for machine in (ONE, EIGHT)] == [1, 2]
    assert [communicators(laid_out(machine)) for machine in (ONE, EIGHT)] == [0, 1]


SMALL = BLOCKS * ADAPTER
"""Adapters of 32 Ki parameters stay on every rank (``param_persistence_threshold``), their shares beside them."""

LARGE = STEM + BLOCKS * WEIGHTS


def test_zero_3_splits_all_weights_and_keeps_its_buckets() -> None:
    run = laid_out(EIGHT, **zero("zero-3"))
    kept = CUBLAS + LARGE // 8 + SMALL // 8 + SMALL + 12 * SHARE + 2 * SHARE + BUCKET
    assert after(run) == kept
    # Everything is gathered, twice while it is copied out; the bucket is there already, so forward is the highest.
    assert peaks(run)["step"] == kept + LAST_FORWARD + 2 * LARGE


def test_zero_3_gathers_and_reduces_on_streams_of_their_own() -> None:
    """Rehearsed: full training of Wan 2.1 1.3B on four virtual H100 reserves 12.94 GiB, on one stream it would 10.2."""
    run = laid_out(EIGHT, **zero("zero-3"))
    names = {run.program.op[buffer]: stream for buffer, stream in run.side_streams.items()}
    gathering, reducing = zero_terms.GATHERING, zero_terms.REDUCING
    assert names == {"gathered weights": gathering, "all-gather": gathering, "reduced copy": reducing}
    job = Job(model="wan2.1-t2v-1.3b", method="full", frames=9, height=256, width=256)
    asked = Strategy.read({"sharding": "zero-3", "gradient_checkpointing": "full"})
    configuration = Configuration.of(job, asked, Machine(gpu="h100-80gb", gpus=4))
    found = assess(configuration, load_facts(configuration), cached=False).estimate
    assert found.phases["train"].reserved_bytes == pytest.approx(12.938 * GIB, rel=0.02)
    assert found.phases["train"].allocated_bytes == pytest.approx(9.021 * GIB, rel=0.035)


def test_zero_3_with_offloaded_weights_keeps_only_what_is_small() -> None:
    run = laid_out(EIGHT, **zero("zero-3", offload_optimizer="cpu", offload_params="cpu"))
    assert peaks(run)["load"] == after(run) - CUBLAS == SMALL + BUCKET


def test_on_a_drive_the_gpu_keeps_the_same_and_host_ram_its_buffers() -> None:
    cpu, nvme = (laid_out(EIGHT, **zero("zero-3", offload_optimizer=o, offload_params=o)) for o in ("cpu", "nvme"))
    assert peaks(cpu) == peaks(nvme) and after(cpu) == after(nvme)
    # A rank: 16-bit gradients, and in fp32 those too small for a drive, which are all; four fp32 buffers of its one
    # group; five buffers of 1e8 numbers, its trained weights.
    rank = 2 * SHARE + 4 * SHARE + 4 * 4 * SHARE + 2 * (5 * 10**8 + SHARE)
    held, plain = (host_ram(run, EIGHT).phases["train"] for run in (nvme, laid_out(EIGHT, **zero("zero-3"))))
    assert held - plain == 8 * rank
    everything = (LARGE + BLOCKS * ADAPTER) // 2
    assert disk_bytes(nvme) - disk_bytes(cpu) == 12 * TRAINED + 2 * everything
    assert traffic(cpu).disk_bytes == 0
    assert traffic(nvme).disk_bytes == 24 * TRAINED + 4 * everything + 2 * TRAINED


def test_gradients_go_to_a_drive_where_they_begin_at_512_bytes() -> None:
    """DeepSpeed leaves out what it cannot read to its place; what is not a multiple of that is split off."""
    large = 2**18
    assert gradients_in_ram([large, large]) == 0
    assert gradients_in_ram([large - 1]) == large - 1
    assert gradients_in_ram([8, large, large]) == 8 + 2 * large
    assert gradients_in_ram([large + 8, large]) == 8 + large
    assert gradients_in_ram([large, 8, large], sub_group=large + 8) == 8


def test_what_deepspeed_does_not_hide_waits() -> None:
    one, two, three = (traffic(laid_out(EIGHT, **zero(stage))) for stage in ("zero-1", "zero-2", "zero-3"))
    assert one.gpu_bytes == two.gpu_bytes == three.gpu_waiting_bytes == 0
    assert one.gpu_waiting_bytes == two.gpu_waiting_bytes == 3 * 2 * TRAINED * 7 // 8
    assert three.gpu_bytes > three.gpu_waiting_bytes
    away = traffic(laid_out(EIGHT, **zero("zero-2", offload_optimizer="cpu")))
    assert away.host_waiting_bytes == 2 * 2 * TRAINED // 8 and away.host_forward_bytes == 0
    both = traffic(laid_out(ONE, offload_optimizer="cpu", gradient_checkpointing="full", swap_blocks=2))
    assert both.host_forward_bytes == both.host_backward_bytes == 2 * WEIGHTS
    assert both.host_waiting_bytes == 2 * BLOCKS * ADAPTER


def test_a_share_larger_than_a_buffer_on_a_drive_is_refused() -> None:
    offloaded = laid_out(ONE, **zero("zero-3", offload_optimizer="cpu", offload_params="nvme"))
    offloaded.elements["stem.weight"] = 10**8 + 1
    with pytest.raises(VplanError, match=r"a shard has 100,000,001 elements"):
        check_buffers(offloaded)
    offloaded.elements["stem.weight"] = 10**8
    check_buffers(offloaded)


def test_eight_bit_states_over_a_flat_share() -> None:
    run = laid_out(EIGHT, **zero("zero-2", optimizer="adamw-8bit"))
    assert after(run) == LOADED + 4 * SHARE + 2 * rounded(SHARE + 4 * SHARE // 256)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 8))
def test_shares_of_a_flat_buffer(elements: list[int], world: int) -> None:
    share = aligned_elements(sum(elements), world) // world
    owners = [{position // share for position in range(sum(elements[:i]), sum(elements[: i + 1]))}
              for i in range(len(elements))]  # fmt: skip
    for rank in range(world):
        expected = sum(count for count, ranks in zip(elements, owners, strict=True) if rank in ranks)
        assert elements_in_share(elements, world, rank) == expected


def test_ranks_take_what_keeps_their_gradients_with_the_first_bucket_that_has_some() -> None:
    """Of four shares of 10, the second crosses two borders and holds the most; backward begins with the last."""
    elements = {"a": 9, "b": 9, "c": 9, "d": 5, "e": 8}
    shares = Shares([elements], 4)
    assert [elements_in_share(list(elements.values()), 4, rank) for rank in range(4)] == [18, 18, 14, 13]
    assert [shares.ranks([name]) for name in elements] == [{0}, {0, 1}, {1, 2}, {2, 3}, {3}]
    assert shares.ranks_apart(list(elements), 1000) == (0,)  # one bucket: all at once, and the first takes most
    assert shares.ranks_apart(list(elements), 18) == (0, 2)  # a and b; c and d; e
    assert shares.ranks_apart(list(elements)[::-1], 13) == (2, 1, 0)  # e and d; c; b; a


def test_of_many_ranks_that_differ_four_are_replayed() -> None:
    elements = {f"weight {number}": 10 for number in range(16)}
    assert Shares([elements], 16).ranks_apart(list(elements), 10) == (0, 5, 10, 15)


def test_a_bucket_is_copied_only_where_it_lies_in_several_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket for each adapter: four adapters on two ranks, and no border within one."""
    monkeypatch.setattr(zero_terms, "DEEPSPEED", ZeroSettings(reduce_bucket=ADAPTER // 2))
    assert "reduced copy" not in laid_out(Machine(gpu="a100-80gb", gpus=2), **zero("zero-1")).program.op
    assert "reduced copy" in laid_out(Machine(gpu="a100-80gb", gpus=3), **zero("zero-1")).program.op


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 100))
def test_sub_groups_hold_everything_once(partitions: list[int], size: int) -> None:
    groups = sub_groups(partitions, size)
    assert sum(groups) == sum(partitions)
    assert all(group >= size for group in groups[:-1])


# ---- FSDP2


def test_fsdp_gathers_one_block_and_fetches_the_next() -> None:
    run = laid_out(EIGHT, sharding="fsdp")
    shares = STEM + BLOCKS * (WEIGHTS + 2 * ADAPTER) // 8  # the adapters' in fp32, and so their states
    assert after(run) == CUBLAS + shares + 2 * BLOCKS * 2 * ADAPTER // 8
    block = WEIGHTS + ADAPTER  # in 16 bits
    # The last forward beside the block's weights and the buffer they came in; the stem, padded to a row per rank.
    assert peaks(run)["step"] == after(run) + LAST_FORWARD + 8 * STEM + 2 * block


def test_fsdp_loads_one_weight_at_a_time() -> None:
    """A model that does not fit on one GPU can still be loaded."""
    shares, whole = (laid_out(machine, sharding="fsdp") for machine in (EIGHT, ONE))
    sizes = [shares.sizes[buffer] for buffer in shares.parameters.values()]
    largest = max(whole.sizes[buffer] for buffer in whole.parameters.values())
    tables = sum(map(shares.sizes.__getitem__, alive(shares.load.ops, []))) - sum(sizes)
    assert sum(sizes) + tables < held(shares.load.ops, shares.sizes)[1] <= sum(sizes) + tables + largest


def test_fsdps_streams_take_no_memory_that_another_let_go() -> None:
    """Gathering and reducing have a stream each: the replay reserves more than it would with one for all."""
    run = laid_out(EIGHT, sharding="fsdp")
    names = {run.program.op[buffer]: stream for buffer, stream in run.side_streams.items()}
    assert names == {"all-gather": GATHERING, "cast shares": GATHERING, "reduced gradients": REDUCING}
    apart = max(entry.replayed.reserved_peak_bytes for entry in replay_stages(run, cached=False))
    together = max(
        entry.replayed.reserved_peak_bytes for entry in replay_stages(replace(run, side_streams={}), cached=False)
    )
    assert apart > together


def test_fsdp_reduces_a_block_when_the_next_has_run() -> None:
    run = laid_out(EIGHT, sharding="fsdp")
    names = [run.program.op[event if event >= 0 else ~event] for event in run.step.ops]
    assert names.count("reduce-scatter") == 2 * BLOCKS
    assert sum(run.sizes[event] for event in run.step.ops if event in _made(run, "reduced gradients")) == (
        4 * BLOCKS * (ADAPTER // 2) // 8
    )
    live = most = 0
    for event in run.step.ops:
        if event in _made(run, "reduce-scatter"):
            live += 1
            most = max(most, live)
        elif ~event in _made(run, "reduce-scatter"):
            live -= 1
    assert (most, live) == (1, 0)


def test_fsdp_reduces_a_unets_last_level_before_its_middle_runs_backward() -> None:
    """The middle belongs to no group but the rest's, and no hook tells a recording that it begins."""
    job = Job(model="sdxl", method="full", frames=1, height=1024, width=1024)
    machine = Machine(gpu="h100-80gb", gpus=2)
    asked = {"sharding": "fsdp", "gradient_checkpointing": "full", "autocast": "none"}
    configuration = Configuration.of(job, resolve(job, Strategy.read(asked), machine), machine)
    facts = load_facts(configuration)
    run = lay_out(configuration, facts, grids(facts.model, job)[0])
    gradients, ops, reducing = run.named("gradient"), run.step.ops, _made(run, "reduce-scatter")
    level = [ops.index(gradient) for name, gradient in gradients.items() if name.startswith("up_blocks.0.")]
    middle = [ops.index(gradient) for name, gradient in gradients.items() if name.startswith("mid_block.")]
    reduced = [at for at, event in enumerate(ops) if event in reducing]
    assert max(level) < min(middle)
    assert [at for at in reduced if max(level) < at < min(middle)]


def _made(run: Run, name: str) -> set[int]:
    return {buffer for buffer, op in enumerate(run.program.op) if op == name}


def test_fsdp_on_the_cpu_keeps_nothing_on_the_gpu() -> None:
    run = laid_out(EIGHT, sharding="fsdp", offload_params="cpu", offload_optimizer="cpu")
    assert after(run) == CUBLAS


def test_fsdp_on_the_cpu_fetches_one_share_after_another() -> None:
    """Each comes to the GPU whole when it is loaded, with its share beside it (all of the stem, a single row); in a
    step the shares come as they are stored, and those in fp32 are cast one by one."""
    run = laid_out(EIGHT, sharding="fsdp", offload_params="cpu", offload_optimizer="cpu")
    assert peaks(run)["load"] == 2 * STEM
    names = {run.program.op[buffer] for buffer in run.side_streams}
    assert names == {"all-gather", "share from host RAM", "cast share", "reduced gradients"}
    fetched = [run.sizes[event] for event in run.step.ops if event >= 0 and run.side_streams.get(event) == GATHERING]
    frozen, half = WEIGHTS // 8, ADAPTER // 8
    assert fetched[:2] == [STEM, 8 * STEM]
    assert fetched[2:6] == [frozen, 2 * half, half, 8 * (frozen + half)]


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 64))
def test_a_share_is_whole_rows_and_enough(rows: int, columns: int, world: int) -> None:
    share = padded_share(rows, rows * columns, world)
    assert share % columns == 0
    assert rows * columns <= share * world < rows * columns + columns * world


def test_fsdp_adds_micro_batches_to_the_first() -> None:
    once, twice = (laid_out(EIGHT, sharding="fsdp", gradient_accumulation=steps) for steps in (1, 2))
    assert after(once) == after(twice)
    reduced = 4 * BLOCKS * (ADAPTER // 2) // 8
    assert peaks(twice)["step"] == peaks(once)["step"] + reduced


def test_copies_of_a_sharded_model_take_what_one_takes_on_their_gpus() -> None:
    two = laid_out(EIGHT, sharding="fsdp", fsdp_replicas=2)
    one = laid_out(EIGHT.replace(gpus=4), sharding="fsdp")
    assert after(two) == after(one) and peaks(two) == peaks(one)
    assert communicators(two) == communicators(one) + 2
    assert traffic(two) == traffic(one)._replace(replica_bytes=4 * TRAINED // 4)  # half of its fp32 shares out, and in
    assert disk_bytes(two) == disk_bytes(one)
    often = [laid_out(EIGHT, sharding="fsdp", fsdp_replicas=2, gradient_accumulation=steps) for steps in (1, 4)]
    assert len({traffic(run).replica_bytes for run in often}) == 1  # behind the last micro-batch alone
    assert after(often[0]) == after(often[1])


# ---- a moving average


@pytest.mark.parametrize(
    ("machine", "sharding", "copies"), [(ONE, "none", 1), (EIGHT, "zero-2", 1), (EIGHT, "fsdp", 8)]
)
def test_a_moving_average_is_an_fp32_copy(machine: Machine, sharding: str, copies: int) -> None:
    with_it, without = (laid_out(machine, sharding=sharding, ema=where) for where in ("gpu", "cpu"))
    trained = without.trained_parameters
    assert after(with_it) == after(without) + 4 * trained // copies
    assert ram_bytes(without, machine) == ram_bytes(with_it, machine) + machine.gpus * 4 * trained // copies


# ---- what holds for any split


@given(
    st.sampled_from(["zero-1", "zero-2", "zero-3", "fsdp"]), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4])
)
@settings(max_examples=30, deadline=None)
def test_splitting_over_more_never_adds_to_what_stays(sharding: str, gpus: int, times: int) -> None:
    """Weights, gradients and states once a step is over."""
    few, more = (
        laid_out(Machine(gpu="rtx4090", gpus=count, host_ram=GIB), sharding=sharding) for count in (gpus, gpus * times)
    )
    assert _static(more) <= _static(few)


@given(st.sampled_from([2, 3, 8]), SHAPE)
@settings(max_examples=30, deadline=None)
def test_fsdp_never_adds_to_weights_gradients_and_states(gpus: int, grid: dict[str, int]) -> None:
    machine = Machine(gpu="rtx4090", gpus=gpus, host_ram=GIB)
    assert _static(laid_out(machine, grid, sharding="fsdp")) <= _static(laid_out(ONE, grid))


def _static(run: Run) -> int:
    """Weights, gradients and states alive when a step is over."""
    alive: dict[int, None] = {}
    for _, stage in run.stages:
        for event in stage.ops:
            if event >= 0:
                alive[event] = None
            else:
                alive.pop(~event, None)
    kinds = ("weight", "gradient", "optimizer")
    return sum(run.sizes[buffer] for buffer in alive if run.program.category[buffer] in kinds)


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2", "zero-3"])
def test_zero_on_more_gpus_never_needs_more(sharding: str) -> None:
    """Beyond one: alone, stage 3 has nothing to gather."""
    found = [
        max(peaks(laid_out(Machine(gpu="rtx4090", gpus=gpus, host_ram=GIB), **zero(sharding))).values())
        for gpus in (2, 3, 8, 64)
    ]
    assert found == sorted(found, reverse=True)


def _whole_at_once(run: Run) -> int:
    """The most bytes of weights that wait to be split, at any time while loading."""
    waiting, most = set[int](), 0
    for event in run.load.ops:
        waiting = waiting - {~event} if event < 0 else waiting | ({event} & _made(run, UNSPLIT))
        most = max(most, run.total_bytes(waiting))
    return most


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_zero_3_splits_each_weight_as_our_trainer_loads_it(offload: str) -> None:
    """Others have the whole model on the GPU first."""
    strategy = Strategy.read(zero("zero-3", offload_params=offload))
    ours, theirs = (
        lay_out(Configuration.of(JOB, strategy, EIGHT), FACTS, GRID, trainer) for trainer in ("vplan", "diffusers")
    )
    assert _whole_at_once(ours) == max(STEM, WEIGHTS)
    assert _whole_at_once(theirs) == LARGE + SMALL
    assert after(ours) == after(theirs)


REHEARSED = {"vplan": 1_036_512_256 + 26_499_200, "diffusers": 2_872_813_056}
"""What `vplan probe --runner rehearse` allocated in load with deepspeed 0.19.8 and torch 2.13: as our trainer splits
weights while it loads them, with the small ones that come in its first step; and as it loaded all of them first."""


@pytest.mark.parametrize("trainer", REHEARSED)
def test_zero_3_loads_as_rehearsed(trainer: str) -> None:
    asked = {"sharding": "zero-3", "offload_params": "cpu", "gradient_checkpointing": "full"}
    job = Job(model="wan2.1-t2v-1.3b", frames=5, height=256, width=256)
    configuration = Configuration.of(job, Strategy.read(asked), Machine(gpu="24GB", gpus=2))
    found = assess(configuration, load_facts(configuration), trainer).estimate
    assert found.phases["load"].allocated_bytes == pytest.approx(REHEARSED[trainer], rel=0.005)
    larger = replace(configuration, job=job.replace(model="wan2.1-t2v-14b"))
    of_14b = assess(larger, load_facts(larger), trainer).estimate
    assert (of_14b.verdict, of_14b.peak.phase) == (("fits", "encode") if trainer == "vplan" else ("no", "load"))
