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
from planner.job import Job, Machine, Strategy
from planner.layout import lay_out
from planner.rules import resolve
from planner.run import Facts, Run
from planner.tape import FORMAT, Tape, parse_tape
from planner.zero import BUCKET_ELEMENTS

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


FACTS = Facts(MODEL, GPU, _step_tape(), _optimizer_tape())


def laid_out(machine: Machine = ONE, grid: dict[str, int] = GRID, **strategy: object) -> Run:
    return lay_out(JOB, resolve(JOB, Strategy.read(strategy), machine), machine, FACTS, grid)


def peaks(run: Run) -> dict[str, int]:
    """Allocated peak per stage; the later of two rounds counts."""
    return {entry.stage.name: entry.replayed.allocated_peak_bytes for entry in play(run)}


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
    quarter = sum(_rounded(encoder.parameters // 2) for encoder in MODEL.text_encoders)
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
REDUCE_BUCKET = 2 * BUCKET_ELEMENTS // 512 * 512 + (512 if 2 * BUCKET_ELEMENTS % 512 else 0)


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2"])
def test_zero_keeps_a_share_of_master_and_states_and_one_whole_bucket(sharding: str) -> None:
    run = laid_out(EIGHT, **zero(sharding))
    kept = LOADED + 12 * SHARE
    # Backward begins with the latents, the table and every input alive; the last gradient joins what block 3 takes.
    backward = BATCH + TABLE + BLOCKS * X + 2 * X + ADAPTER + REDUCE_BUCKET + 2 * SHARE
    found = peaks(run)
    assert found["load"] == kept
    assert found["step"] == kept + backward
    assert found["optimizer"] == kept + BATCH + 2 * SHARE + 4 * SHARE + 4 * SHARE
    assert after(run) == kept


def test_zero_with_a_fused_step_needs_no_temporary() -> None:
    foreach, fused = (laid_out(EIGHT, **zero("zero-2", optimizer_step=how)) for how in ("foreach", "fused"))
    assert peaks(foreach)["optimizer"] - peaks(fused)["optimizer"] == 4 * SHARE


def test_zero_with_the_optimizer_in_host_ram_keeps_neither_states_nor_gradients() -> None:
    run = laid_out(EIGHT, **zero("zero-2", offload_optimizer="cpu"))
    assert after(run) == LOADED
    assert peaks(run)["optimizer"] == LOADED + BATCH
    assert peaks(run)["step"] == LOADED + BATCH + TABLE + BLOCKS * X + 2 * X + ADAPTER + REDUCE_BUCKET


LARGE = STEM + BLOCKS * WEIGHTS
"""Adapters of 32 Ki parameters persist on every rank (``param_persistence_threshold``)."""


def test_zero_3_keeps_a_share_of_the_large_weights_and_gathers_them_for_a_step() -> None:
    run = laid_out(EIGHT, **zero("zero-3"))
    kept = LOADED - LARGE + LARGE // 8 + 12 * SHARE
    assert peaks(run)["load"] == kept
    assert after(run) == kept
    assert peaks(run)["step"] == peaks(laid_out(EIGHT, **zero("zero-2")))["step"] + LARGE // 8


def test_zero_3_with_offloaded_weights_keeps_only_what_persists() -> None:
    run = laid_out(EIGHT, **zero("zero-3", offload_optimizer="cpu", offload_params="cpu"))
    assert peaks(run)["load"] == after(run) == LOADED - LARGE


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2", "zero-3"])
def test_zero_on_more_gpus_never_needs_more(sharding: str) -> None:
    found = [
        max(peaks(laid_out(Machine(gpu="rtx4090", gpus=gpus, host_ram=GIB), **zero(sharding))).values())
        for gpus in (1, 2, 3, 8, 64)
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
    *[(machine, {"sharding": stage}) for machine in (ONE, EIGHT) for stage in ("zero-1", "zero-2", "zero-3")],
    (EIGHT, {"sharding": "zero-2", "offload_optimizer": "cpu"}),
    (EIGHT, {"sharding": "zero-3", "offload_optimizer": "cpu", "offload_params": "cpu"}),
]
ANY = st.sampled_from(EVERY)
SHAPE = st.fixed_dictionaries(
    {"B": st.integers(1, 4), "F": st.integers(1, 40), "H": st.integers(1, 40), "W": st.integers(1, 40)}
).map(lambda shape: {**shape, "T": 512, "R": 16})


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
    played: list[Played] = play(laid_out(machine, grid, **{**strategy, "expandable_segments": expandable}))
    after_first, after_second = played[2].allocated_after_bytes, played[4].allocated_after_bytes
    assert after_first == after_second
