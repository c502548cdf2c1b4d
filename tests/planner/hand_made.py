"""A hand-made run whose bytes can be worked by hand.

It is a LoRA of four checkpointed blocks. One sample of 1 KiB * F * H * W bytes is X: the input of block 0, and
what every block makes. A block also keeps a cast copy of its weights until forward ends (as autocast does), and takes
2 X while it runs, forward and backward. All blocks take one table of positions of X / 2.
"""

from __future__ import annotations

from hypothesis import strategies as st

from planner.catalog import card_lookup, lookup
from planner.estimate.stages import ReplayedStage, replay_stages
from planner.layout.pipeline import lay_out
from planner.layout.run import Facts, Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.tape.format import (
    FROM_LAST,
    NO_BLOCK,
    RELATIVE,
    Allocation,
    BlockRun,
    Event,
    Free,
    Monomial,
    NamedAllocation,
    NamedFree,
    Section,
    Tape,
    Template,
    counted_back,
)
from planner.tape.parameter_table import ParameterTable

KIB, MIB, GIB = 2**10, 2**20, 2**30
BLOCKS = 4
WEIGHTS, ADAPTER, CAST = 3 * MIB, 64 * KIB, MIB
STEM = 2 * MIB
CUBLAS = 2 * (4096 * 2 + 16 * 8) * KIB
MODEL = lookup.model("wan2.1-t2v-1.3b")
GPU = card_lookup.gpu("rtx4090")
JOB = Job(model=MODEL.name, frames=81, height=480, width=832)
ONE = Machine(gpu="rtx4090", host_ram=64 * GIB)
EIGHT = Machine(gpu="rtx4090", gpus=8, host_ram=512 * GIB)
GRID = {"B": 1, "F": 8, "H": 16, "W": 64, "T": 512, "R": 16, "E": 0}
X = 8 * MIB

_SIZES = {
    "stem": Monomial(STEM, (0,) * 6),
    "weights": Monomial(WEIGHTS, (0,) * 6),
    "adapter": Monomial(ADAPTER // 16, (0, 0, 0, 0, 0, 1)),
    "cast": Monomial(CAST, (0,) * 6),
    "x": Monomial(KIB, (1, 1, 1, 1, 0, 0)),
    "2x": Monomial(2 * KIB, (1, 1, 1, 1, 0, 0)),
    "table": Monomial(KIB // 2, (0, 1, 1, 1, 0, 0)),
}
_NAMES = ("stem.weight", "attn.weight", "attn.lora", "attn.lora:exp_avg", "latents", "attn.lora:exp_avg_sq")
_WEIGHT, _GRADIENT, _STATE, _BATCH, _ACTIVATION, _TEMPORARY = range(6)
_OUTSIDE, _HERE = (NO_BLOCK, -1, -1), (RELATIVE, 0, 0)


def _alloc(size: str, category: int, owner: tuple[int, int, int] | None = None, name: int = 0) -> Event:
    index = list(_SIZES).index(size)
    return NamedAllocation(index, category, 0, 0, 1, *owner, name) if owner else Allocation(index, category, 0, 0)


def _here(section: int, position: int) -> Free:
    """The free of what this very block allocated in another section."""
    return Free(section, RELATIVE, 0, position)


def _one(*events: Event, passes: str = "forward") -> Section:
    return Section(passes, None, [Template.of(events, [])])


def _sweep(*events: Event, passes: str = "forward", step: int = 1, first: list[Event] | None = None) -> Section:
    """A template per block; ``first`` replaces the events of block 0."""
    templates = [Template.of(events, []) for _ in range(BLOCKS)]
    if first is not None:
        templates[0] = Template.of(first, [])
    return Section(passes, 0, templates, step)


def _tape(pieces: dict[str, list[Section]]) -> Tape:
    return Tape(
        MODEL.name,
        "hand-made",
        versions={},
        regime={},
        atoms=("B", "F", "H", "W", "T", "R"),
        sums={},
        sizes=tuple(_SIZES.values()),
        runs=(BlockRun("blocks", 0, BLOCKS, BLOCKS),),
        names=_NAMES,
        ops=("op",),
        pieces={name: list(map(_counted, sections, range(len(sections)))) for name, sections in pieces.items()},
    )


def _counted(section: Section, at: int) -> Section:
    """The frees above have their section's index."""
    counted = [template._replace(arrays=counted_back(template.arrays, at)) for template in section.templates]
    return section._replace(templates=counted)


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
    # Section 1, forward of a block: 0 the cast weights, 1 what it takes, 2 its output.
    forward = _sweep(_alloc("cast", _TEMPORARY), _alloc("2x", _TEMPORARY), _alloc("x", _ACTIVATION), _here(1, 1))
    uncast = _sweep(_here(1, 0))
    out = Free(1, FROM_LAST, -1, 2)
    # Section 4, backward of a block: 0 what it takes, 1 the gradient; then its input goes, block 0's with the table.
    grads = [_alloc("2x", _TEMPORARY), _alloc("adapter", _GRADIENT, _HERE, 2), _here(4, 0)]
    first = [*grads, Free(0, NO_BLOCK, 0, 2), Free(0, NO_BLOCK, 0, 1)]
    backward = _sweep(*grads, Free(1, RELATIVE, -1, 2), passes="backward", step=-1, first=first)
    step = [_one(batch, table, first_input), forward, uncast, _one(out, passes="backward"), backward]
    return _tape({"load": load, "step": step})


def _optimizer_tape() -> Tape:
    states = [_alloc("adapter", _STATE, _HERE, 3), _alloc("adapter", _STATE, _HERE, 5)]
    lent = [_alloc("adapter", _TEMPORARY)]
    freed = NamedFree(-1, _GRADIENT, *_HERE, 2)

    def piece(made: list[Event], lent_at: int) -> list[Section]:
        return [_sweep(*made, passes="optimizer"), _sweep(_here(0, lent_at), freed, passes="optimizer")]

    return _tape({"optimizer_first": piece([*states, *lent], 2), "optimizer": piece(lent, 0)})


ROWS = {"stem.weight": 1, **{f"blocks.{i}.attn.{kind}": 64 for i in range(BLOCKS) for kind in ("weight", "lora")}}
"""The stem is a table of one row, which FSDP2 cannot split."""

FACTS = Facts(MODEL, GPU, _step_tape(), _optimizer_tape(), parameters=ParameterTable(ROWS))


SHAPE = st.fixed_dictionaries(
    {"B": st.integers(1, 4), "F": st.integers(1, 40), "H": st.integers(1, 40), "W": st.integers(1, 40)}
).map(lambda shape: {**shape, "T": 512, "R": 16})


def laid_out(machine: Machine = ONE, grid: dict[str, int] = GRID, facts: Facts = FACTS, **strategy: object) -> Run:
    return lay_out(Configuration.of(JOB, Strategy.read(strategy), machine), facts, grid)


def peaks(run: Run) -> dict[str, int]:
    """Allocated peak per stage of training; the later of two rounds counts."""
    return {entry.stage.name: entry.replayed.allocated_peak_bytes for entry in trained(run)}


def trained(run: Run) -> list[ReplayedStage]:
    return [entry for entry in replay_stages(run) if entry.phase in ("load", "first_step", "train", "optimizer")]


def after(run: Run) -> int:
    return replay_stages(run)[-1].allocated_after_bytes


LOADED = STEM + BLOCKS * (WEIGHTS + ADAPTER) + CUBLAS
STATES = 2 * BLOCKS * ADAPTER
BATCH, TABLE = X, X // 2
LAST_FORWARD = BATCH + TABLE + X + BLOCKS * CAST + BLOCKS * X + 2 * X
"""The latents, the table, the first input; every block's cast weights and output; what the last block takes."""


def rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512
