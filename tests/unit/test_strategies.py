"""planner/strategies.py and planner/zero.py on a hand-made run: every strategy's bytes worked by hand, and what must
hold for any shape.

The run is a LoRA of four checkpointed blocks. One sample of 1 KiB * F * H * W bytes is X: the input of block 0, and
what every block makes. A block also keeps a cast copy of its weights until forward ends (as autocast does), and takes
2 X while it runs, forward and backward. All blocks take one table of positions of X / 2.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import catalog
from planner.estimate import NCCL_BYTES, Played, estimate, play
from planner.fsdp import share_of
from planner.host import ram_bytes
from planner.job import Job, Machine, Strategy
from planner.layout import lay_out
from planner.parameters import Parameters
from planner.rules import resolve
from planner.run import Facts, Run
from planner.tape import FORMAT, Tape, parse_tape
from planner.zero import DEEPSPEED, aligned, in_share, most_in_one_share, sub_groups

KIB, MIB, GIB = 2**10, 2**20, 2**30
BLOCKS = 4
WEIGHTS, ADAPTER, CAST = 3 * MIB, 64 * KIB, MIB
STEM = 2 * MIB
CUBLAS = 2 * (4096 * 2 + 16 * 8) * KIB
MODEL = catalog.model("wan2.1-t2v-1.3b")
GPU = catalog.gpu("rtx4090")
JOB = Job(model=MODEL.name, frames=81, height=480, width=832)
ONE = Machine(gpu="rtx4090", host_ram=64 * GIB)
EIGHT = Machine(gpu="rtx4090", gpus=8, host_ram=512 * GIB)
GRID = {"B": 1, "F": 8, "H": 16, "W": 64, "T": 512, "R": 16, "E": 0}
X = 8 * MIB

_SIZES = {
    "stem": [STEM, [0] * 6],
    "weights": [WEIGHTS, [0] * 6],
    "adapter": [ADAPTER // 16, [0, 0, 0, 0, 0, 1]],
    "cast": [CAST, [0] * 6],
    "x": [KIB, [1, 1, 1, 1, 0, 0]],
    "2x": [2 * KIB, [1, 1, 1, 1, 0, 0]],
    "table": [KIB // 2, [0, 1, 1, 1, 0, 0]],
}
_NAMES = ["stem.weight", "attn.weight", "attn.lora", "attn.lora:exp_avg", "latents", "attn.lora:exp_avg_sq"]
_WEIGHT, _GRADIENT, _STATE, _BATCH, _ACTIVATION, _TEMPORARY = range(6)
_OUTSIDE, _HERE = (0, -1, -1), (1, 0, 0)


def _alloc(size: str, category: int, owner: tuple[int, ...] = (), name: int = 0) -> list[int]:
    named = [*owner, name] if owner else []
    return [list(_SIZES).index(size), category, 0, 0, len(named) // 4, *named]


def _one(*events: list[int], passes: str = "forward") -> dict[str, Any]:
    return {"run": None, "block": 0, "pass": passes, "templates": [{"events": list(events), "work": []}]}


def _sweep(*events: list[int], passes: str = "forward", step: int = 1, first: Any = None) -> dict[str, Any]:
    """A template per block; ``first`` replaces the events of block 0."""
    templates = [{"events": list(events), "work": []} for _ in range(BLOCKS)]
    if first is not None:
        templates[0] = {"events": list(first), "work": []}
    return {"run": 0, "step": step, "pass": passes, "templates": templates}


def _tape(pieces: dict[str, Any]) -> Tape:
    return parse_tape(
        {
            "format": FORMAT,
            "model": MODEL.name,
            "variant": "hand-made",
            "versions": {},
            "regime": {},
            "sums": {},
            "tape": {
                "atoms": ["B", "F", "H", "W", "T", "R"],
                "runs": [{"list": "blocks", "start": 0, "recorded": BLOCKS, "count": BLOCKS}],
                "names": _NAMES,
                "ops": ["op"],
                "sizes": list(_SIZES.values()),
                "pieces": pieces,
            },
        }
    )


def _step_tape() -> Tape:
    load = [
        _one(_alloc("stem", _WEIGHT, _OUTSIDE, 0), passes="load"),
        _sweep(_alloc("weights", _WEIGHT, _HERE, 1), _alloc("adapter", _WEIGHT, _HERE, 2), passes="load"),
    ]
    batch, table, first_input = (
        _alloc("x", _BATCH, _OUTSIDE, 4),
        _alloc("table", _ACTIVATION),
        _alloc("x", _ACTIVATION),
    )
    # Item 1, forward of a block: 0 the cast weights, 1 what it takes, 2 its output.
    forward = _sweep(_alloc("cast", _TEMPORARY), _alloc("2x", _TEMPORARY), _alloc("x", _ACTIVATION), [1, 1, 0, 1])
    uncast = _sweep([1, 1, 0, 0])
    out = [1, 3, -1, 2]
    # Item 4, backward of a block: 0 what it takes, 1 the gradient; then its input goes, block 0's with the table.
    grads = [_alloc("2x", _TEMPORARY), _alloc("adapter", _GRADIENT, _HERE, 2), [4, 1, 0, 0]]
    backward = _sweep(
        *grads, [1, 1, -1, 2], passes="backward", step=-1, first=[*grads, [0, 0, 0, 2], [0, 0, 0, 1]]
    )
    step = [_one(batch, table, first_input), forward, uncast, _one(out, passes="backward"), backward]
    return _tape({"load": load, "step": step})


def _optimizer_tape() -> Tape:
    states = [_alloc("adapter", _STATE, _HERE, 3), _alloc("adapter", _STATE, _HERE, 5)]
    lent = [_alloc("adapter", _TEMPORARY)]
    freed = [-1, _GRADIENT, *_HERE, 2]

    def piece(made: list[list[int]], lent_at: int) -> list[dict[str, Any]]:
        return [_sweep(*made, passes="optimizer"), _sweep([0, 1, 0, lent_at], freed, passes="optimizer")]

    return _tape({"optimizer_first": piece([*states, *lent], 2), "optimizer": piece(lent, 0)})


ROWS = {"stem.weight": 1, **{f"blocks.{i}.attn.{kind}": 64 for i in range(BLOCKS) for kind in ("weight", "lora")}}
"""The stem is a table of one row, which FSDP2 cannot split."""

FACTS = Facts(MODEL, GPU, _step_tape(), _optimizer_tape(), Parameters(ROWS))


SHAPE = st.fixed_dictionaries(
    {"B": st.integers(1, 4), "F": st.integers(1, 40), "H": st.integers(1, 40), "W": st.integers(1, 40)}
).map(lambda shape: {**shape, "T": 512, "R": 16})


def laid_out(machine: Machine = ONE, grid: dict[str, int] = GRID, **strategy: object) -> Run:
    return lay_out(JOB, resolve(JOB, Strategy.read(strategy), machine), machine, FACTS, grid)


def peaks(run: Run) -> dict[str, int]:
    """Allocated peak per stage of training; the later of two rounds counts."""
    return {entry.stage.name: entry.replayed.allocated_peak_bytes for entry in trained(run)}


def trained(run: Run) -> list[Played]:
    return [entry for entry in play(run) if entry.phase in ("load", "first_step", "train", "optimizer")]


def after(run: Run) -> int:
    return play(run)[-1].allocated_after_bytes


LOADED = STEM + BLOCKS * (WEIGHTS + ADAPTER) + CUBLAS
STATES = 2 * BLOCKS * ADAPTER
BATCH, TABLE = X, X // 2
LAST_FORWARD = BATCH + TABLE + X + BLOCKS * CAST + BLOCKS * X + 2 * X
"""The latents, the table, the first input; every block's cast weights and output; what the last block takes."""


def test_without_any_strategy() -> None:
    assert peaks(laid_out()) == {
        "load": LOADED,
        "step": LOADED + STATES + LAST_FORWARD,
        "optimizer_first": LOADED + STATES + BATCH + 2 * BLOCKS * ADAPTER,
        "optimizer": LOADED + STATES + BATCH + 2 * BLOCKS * ADAPTER,
    }
    assert after(laid_out()) == LOADED + STATES


def test_residents_are_loaded_before_everything_and_stay() -> None:
    plain, run = peaks(laid_out()), laid_out(vae="resident", text_encoder="resident", text_encoder_dtype="bf16")
    vae = _rounded(2 * MODEL.vae.parameters)
    encoders = sum(_rounded(2 * encoder.parameters) for encoder in MODEL.text_encoders)
    assert peaks(run) == {stage: nbytes + vae + encoders for stage, nbytes in plain.items()}
    quantised = laid_out(text_encoder="resident", text_encoder_dtype="nf4")
    # half a byte each, and an fp32 scale for every 64
    quarter = sum(_rounded(encoder.parameters * 9 // 16) for encoder in MODEL.text_encoders)
    assert peaks(quantised)["step"] == plain["step"] + quarter


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


@pytest.mark.parametrize(("swapped", "ring"), [(1, 1), (2, 2), (3, 2)])
def test_swap_keeps_the_first_blocks_and_a_ring_of_two(swapped: int, ring: int) -> None:
    run = laid_out(gradient_checkpointing="full", swap_blocks=swapped)
    saved = swapped * WEIGHTS - ring * WEIGHTS
    assert peaks(run) == {stage: nbytes - saved for stage, nbytes in peaks(laid_out()).items()}
    kept = [name for name, buffer in run.named("weight").items() if buffer in run.load.ops]
    assert kept == ["stem.weight", *_block_names(BLOCKS, swapped)]


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
        "load": LOADED,
        "step": LOADED + LAST_FORWARD,
        "optimizer_first": LOADED + BATCH + BLOCKS * ADAPTER,
        "optimizer": LOADED + BATCH + BLOCKS * ADAPTER,
    }
    assert after(run) == LOADED


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
        "load": LOADED + buckets,
        "step": LOADED + buckets + STATES + LAST_FORWARD,
        "optimizer_first": LOADED + buckets + STATES + BATCH + BLOCKS * ADAPTER,
        "optimizer": LOADED + buckets + STATES + BATCH + BLOCKS * ADAPTER,
    }
    assert after(run) == LOADED + buckets + STATES


def zero(sharding: str, **more: object) -> dict[str, object]:
    return {"sharding": sharding, **more}


TRAINED = BLOCKS * ADAPTER // 2
"""DeepSpeed's module is in 16 bits, so 64 KiB are 32 Ki parameters."""

SHARE = TRAINED // 8
BUCKET = _rounded(2 * DEEPSPEED.reduce_bucket)
NORM = 8 * ADAPTER // 2
"""One adapter in fp64."""

BACKWARD = BATCH + TABLE + BLOCKS * X + 2 * X + ADAPTER
"""It begins with the latents, the table and every input alive; the last gradient joins what block 3 takes."""


def test_zero_1_reduces_whole_gradients_behind_backward() -> None:
    found = peaks(laid_out(EIGHT, **zero("zero-1")))
    kept = LOADED + 12 * SHARE
    assert found["load"] == LOADED + BLOCKS * ADAPTER  # the flat weights beside those they are made of
    assert found["step"] == kept + BACKWARD + BUCKET
    assert found["optimizer"] == kept + BATCH + BUCKET + BLOCKS * ADAPTER


def test_zero_2_keeps_only_its_share_of_the_gradients() -> None:
    run = laid_out(EIGHT, **zero("zero-2"))
    found, kept = peaks(run), LOADED + 12 * SHARE
    assert found["step"] == kept + BACKWARD + BUCKET
    assert found["optimizer"] == kept + BATCH + ADAPTER + NORM  # its share touches one adapter
    assert after(run) == kept


def test_zero_2_keeps_the_gradients_of_two_micro_batches() -> None:
    once, twice = (
        peaks(laid_out(EIGHT, **zero("zero-2", gradient_accumulation=steps)))["step"] for steps in (1, 2)
    )
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
    assert peaks(run)["step"] == kept + BACKWARD + BUCKET


SMALL = BLOCKS * ADAPTER
"""Adapters of 32 Ki parameters stay on every rank (``param_persistence_threshold``), their shares beside them."""

LARGE = STEM + BLOCKS * WEIGHTS


def test_zero_3_splits_all_weights_and_keeps_its_buckets() -> None:
    run = laid_out(EIGHT, **zero("zero-3"))
    kept = CUBLAS + LARGE // 8 + SMALL // 8 + SMALL + 12 * SHARE + 2 * SHARE + BUCKET
    assert after(run) == kept
    # Everything is gathered, twice while it is copied out; the bucket is there already, so forward is the highest.
    assert peaks(run)["step"] == kept + LAST_FORWARD + 2 * LARGE


def test_zero_3_with_offloaded_weights_keeps_only_what_is_small() -> None:
    run = laid_out(EIGHT, **zero("zero-3", offload_optimizer="cpu", offload_params="cpu"))
    assert peaks(run)["load"] == after(run) == CUBLAS + SMALL + BUCKET


def test_eight_bit_states_over_a_flat_share() -> None:
    run = laid_out(EIGHT, **zero("zero-2", optimizer="adamw-8bit"))
    assert after(run) == LOADED + 4 * SHARE + 2 * _rounded(SHARE + 4 * SHARE // 256)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 8))
def test_shares_of_a_flat_buffer(elements: list[int], world: int) -> None:
    share = aligned(sum(elements), world) // world
    owners = [{position // share for position in range(sum(elements[:i]), sum(elements[: i + 1]))}
              for i in range(len(elements))]  # fmt: skip
    for rank in range(world):
        expected = sum(count for count, ranks in zip(elements, owners, strict=True) if rank in ranks)
        assert in_share(elements, world, rank) == expected
    assert most_in_one_share(elements, world) >= -(-sum(elements) // world) - 2 * world


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


def _made(run: Run, name: str) -> set[int]:
    return {buffer for buffer, op in enumerate(run.program.op) if op == name}


def test_fsdp_on_the_cpu_keeps_nothing_on_the_gpu() -> None:
    run = laid_out(EIGHT, sharding="fsdp", offload_params="cpu", offload_optimizer="cpu")
    assert after(run) == CUBLAS


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 64))
def test_a_share_is_whole_rows_and_enough(rows: int, columns: int, world: int) -> None:
    share = share_of(rows, rows * columns, world)
    assert share % columns == 0
    assert rows * columns <= share * world < rows * columns + columns * world


def test_fsdp_adds_micro_batches_to_the_first() -> None:
    once, twice = (laid_out(EIGHT, sharding="fsdp", gradient_accumulation=steps) for steps in (1, 2))
    assert after(once) == after(twice)
    reduced = 4 * BLOCKS * (ADAPTER // 2) // 8
    assert peaks(twice)["step"] == peaks(once)["step"] + reduced


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


EVERY: list[tuple[Machine, dict[str, object]]] = [
    (ONE, {}),
    (ONE, {"vae": "resident", "text_encoder": "resident"}),
    (ONE, {"gradient_checkpointing": "full", "swap_blocks": 2}),
    (ONE, {"gradient_checkpointing": "offload"}),
    (ONE, {"gradient_checkpointing": "offload", "swap_blocks": 3}),
    (ONE, {"offload_optimizer": "cpu"}),
    (ONE, {"offload_optimizer": "cpu", "offload_gradients": "cpu"}),
    (EIGHT, {"grad_buckets": "copy"}),
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
    table = _rounded(KIB // 2 * grid["F"] * grid["H"] * grid["W"])
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
    found = estimate(job, Strategy.read(strategy), machine, FACTS)
    assert found.breakdown.total == found.peak.device_bytes
    assert all(part >= 0 for part in found.breakdown.__dict__.values())
    assert found.peak.allocated_bytes <= found.peak.reserved_bytes < found.peak.device_bytes
    assert found.peak.device_bytes == max(phase.device_bytes for phase in found.phases.values())
    context = GPU.context_bytes + (NCCL_BYTES if machine.world > 1 else 0)
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
