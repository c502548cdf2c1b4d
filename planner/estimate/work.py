"""The work of a training step: FLOPs and bytes of its operators, summed over the recordings at a shape.

These are exact sums over the recorded operators; `planner.estimate.roofline` turns them into seconds on a card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from planner.garbage_collection import recording_cache
from planner.layout import attention_kernel
from planner.layout.encoders_vae.component_pass import ComponentPass, encoders
from planner.layout.run import Run, main_piece
from planner.spec.job import Strategy
from planner.tape.format import KINDS, Tape
from planner.tape.program import Block
from planner.tape.templates import kept_template

KERNELS = "kernels"  # the kind whose `flops` counts kernel launches


class Work(NamedTuple):
    """What operators compute (FLOP) and move (bytes). For the kind `kernels`, `flops` is the number of launches."""

    flops: int
    nbytes: int

    def __sub__(self, other: Work) -> Work:
        return Work(self.flops - other.flops, self.nbytes - other.nbytes)


Kind = tuple[str, int]
"""(one of tape.KINDS, 1 when its arithmetic is bf16 or fp16)"""
SizeTerm = tuple[str, int, tuple[int, ...]]
"""A term of symbolic work: (kind, 1 when in 16 bits, exponents of the tape's atoms that its coefficients multiply)."""


Choice = Callable[[Block | None], bool]
"""Whether a block (module list, index) counts; None: whether operators outside the blocks do."""


class Attention(NamedTuple):
    """A model's attention as a machine runs it."""

    head_size: int = 128
    kernel: str = "flash"
    """as `planner.layout.attention_kernel.kernel` names it"""
    plain: str = "flash"
    """the kernel that would run without masks, which is the one `vplan calibrate` measures"""
    masked: bool = False
    """whether all of it is masked"""
    over_pairs: bool = False
    """whether the mask is a matrix over all pairs of tokens, which every head reads"""


class StepWork(NamedTuple):
    """The work of one training step on one GPU, by kind of operator."""

    passes: Mapping[Kind, Work]
    """forward and backward of one micro-batch"""
    optimizer: Mapping[Kind, Work] = {}
    """one optimizer step over all trained parameters"""
    forward: Mapping[Kind, Work] = {}
    """the part of ``passes`` that is forward; empty: not distinguished"""
    attention: Attention = Attention()
    recomputed: int = 0
    """kernel launches of ``passes`` that backward makes to recompute forward"""
    encoding: Mapping[Kind, Work] = {}
    """of one micro-batch's prompts and clips, unless they are encoded before training"""
    captured: bool = False
    """whether the trainer captures the whole step as one CUDA graph (not a compiler)"""


Passes = tuple[dict[Kind, Work], dict[Kind, Work]]
"""(work of one forward and backward, the part of it that is forward)"""


def step_work(run: Run, passes: Passes | None = None) -> StepWork:
    """The work of one step. ``passes``: `passes_work` of the run, if already computed."""
    both, forward = _as_trained(run, *(passes or passes_work(run)))
    one_by_one = run.strategy.optimizer != "adamw" or run.strategy.optimizer_step not in ("foreach", "fused")
    optimizer = optimizer_work_of(run.facts.optimizer, "optimizer", run.grid, run.optimizer_scale, one_by_one)
    nbytes = run.work.optimizer_bytes + _in_place_bytes(run)
    own = {(KERNELS, 0): Work(run.work.optimizer_launches, 0), ("pointwise", 0): Work(0, nbytes)}
    encoding = encoding_work(run)
    recomputed, stepping = recomputed_launches(run), add_work(optimizer, own)
    return StepWork(both, stepping, forward, attention_of(run), recomputed, encoding, run.work.captured)


FOREACH_ADAMW, FUSED_ADAMW, ADAMW_8BIT, CLIPPING = 18, 7, 4, 2
"""How often in-place operators, whose bytes no tape counts, read or write a trained parameter, its gradient or a
moment: foreach AdamW (torch/optim/adamw.py ``_multi_tensor_adamw``: two ``_foreach_mul_`` of 2, lerp_ and addcmul_ of
3, div_ and add_ of 2, addcdiv_ of 4; the square root is recorded), fused AdamW (4 reads and 3 writes), bitsandbytes'
AdamW (3, and 4 bytes of its moments), and the multiplication that clips gradients."""


def _in_place_bytes(run: Run) -> int:
    """Bytes that in-place operators of an optimizer step read and write. torch's AdamW stores moments in the format of
    their parameters. A trainer with its own AdamW (`optimizer_launches`) does not run torch's."""
    strategy = run.strategy
    if strategy.optimizer_step == "backward":
        return 0
    times = CLIPPING
    if strategy.optimizer == "adamw" and not run.work.optimizer_launches:
        times += {"foreach": FOREACH_ADAMW, "fused": FUSED_ADAMW}.get(strategy.optimizer_step, 0)
    elif strategy.optimizer in ("adamw-8bit", "adamw-8bit-paged"):
        times += ADAMW_8BIT
    return times * sum(run.sizes[buffer] for buffer in run.named("gradient").values())


def _as_trained(run: Run, both: dict[Kind, Work], forward: dict[Kind, Work]) -> Passes:
    """The passes, with the difference in bytes between a trainer's own blocks and the recorded ones."""
    own = run.work
    if not own.forward_bytes and not own.backward_bytes:
        return both, forward
    share, mask = _recomputed_share(run), own.mask_bytes
    once = _pointwise(own.forward_launches, own.forward_bytes) | _attention_bytes(mask)
    again = _pointwise(own.forward_launches, own.forward_bytes, share) | _attention_bytes(round(share * mask))
    backward = _pointwise(own.backward_launches, own.backward_bytes) | _attention_bytes(mask)
    return add_work(add_work(both, once), add_work(again, backward)), add_work(forward, once)


def _attention_bytes(nbytes: int) -> dict[Kind, Work]:
    """``nbytes`` of additional reads by attention in 16 bits, as work."""
    return {("attention", 1): Work(0, nbytes)} if nbytes else {}


def _pointwise(launches: int, nbytes: int, share: float = 1.0) -> dict[Kind, Work]:
    """The work of a share of ``launches`` pointwise operators that together move ``nbytes``."""
    return {("pointwise", 0): Work(0, round(share * nbytes)), (KERNELS, 0): Work(round(share * launches), 0)}


def encoding_work(run: Run) -> dict[Kind, Work]:
    """The work per micro-batch of the text encoders and the VAE whose outputs are not cached."""
    total: dict[Kind, Work] = {}
    if not run.samples_only:
        for place in ("resident", "swapped"):
            for component in encoders(run, place, run.grid["B"]):
                total = add_work(total, component_work(component))
    return total


def component_work(component: ComponentPass) -> dict[Kind, Work]:
    """The work of one pass of a text encoder or the VAE over all its tiles; empty if it is not recorded."""
    if component.tape is None:
        return {}
    terms = _component_terms(component.tape, component.piece, component.counts)
    areas = [rows * columns for rows, columns in component.tiles]
    times = component.part.batch * component.passes * sum(areas) / max(areas)
    found = evaluate_work(terms, component.tape.values(component.part.grid))
    return {kind: Work(round(times * amount.flops), round(times * amount.nbytes)) for kind, amount in found.items()}


@recording_cache(maxsize=64)
def _component_terms(tape: Tape, piece: str, counts: tuple[int, ...] | None) -> dict[SizeTerm, Work]:
    return symbolic_work(tape, piece, counts)


def recomputed_launches(run: Run) -> int:
    """Kernel launches by which one backward recomputes the checkpointed blocks."""
    strategy, facts = run.strategy, run.facts
    if run.samples_only or strategy.gradient_checkpointing == "none":
        return 0
    tape = facts.checkpointed or facts.step
    found = evaluate_work(_forward_of_blocks(tape, main_piece(tape)), tape.values(run.grid))
    launches = sum(amount.flops for (kind, _), amount in found.items() if kind == KERNELS)
    return round(_recomputed_share(run) * (launches + run.work.forward_launches))


def _recomputed_share(run: Run) -> float:
    """The share of blocks that one backward recomputes, 0 to 1."""
    if run.strategy.gradient_checkpointing == "none":
        return 0.0
    return len(run.checkpointed) / run.facts.model.blocks if run.checkpointed else 1.0


@recording_cache(maxsize=256)
def _forward_of_blocks(tape: Tape, piece: str) -> dict[SizeTerm, Work]:
    return symbolic_work(tape, piece, only=lambda block: block is not None, passes="forward")


def attention_of(run: Run) -> Attention:
    """The attention of a run."""
    machine, gpu = run.machine, run.facts.gpu
    operators = run.facts.step.ops
    masked = run.work.attention_masked
    kernel = run.work.attention_kernel or attention_kernel.kernel(run.strategy, machine, gpu, operators, masked=masked)
    plain = attention_kernel.plain_kernel(machine, gpu)
    recorded = attention_kernel.FLASH not in operators
    over_pairs = run.work.mask_bytes > 0 or (recorded and _masks_pairs(run.facts.step))
    return Attention(run.facts.model.head_size, kernel, plain, masked or recorded, over_pairs)


@recording_cache(maxsize=64)
def _masks_pairs(tape: Tape) -> bool:
    """Whether a model with masked attention builds a mask over all pairs of tokens: then a pointwise operator is as
    large as the pairs of its largest attention. A mask of one row is broadcast, and no operator is that large."""
    terms = _terms_of_blocks(tape, "", None, True)
    pairs = {exponents: amount.flops for (kind, _, exponents), amount in terms.items() if kind == "attention"}
    largest = max((exponents for exponents in pairs if max(exponents) > 1), key=pairs.__getitem__, default=None)
    return any(kind == "pointwise" and exponents == largest for kind, _, exponents in terms)


def passes_work(run: Run) -> Passes:
    """The work of one forward and backward. With partial checkpointing, the checkpointed blocks come from the recording
    with checkpointing."""
    return _passes_work(run, ""), _passes_work(run, "forward")


def _passes_work(run: Run, passes: str) -> dict[Kind, Work]:
    facts, blocks = run.facts, run.checkpointed
    if not blocks:
        return _work_of_blocks(facts.step, run.grid, passes)
    assert facts.checkpointed is not None
    others = _work_of_blocks(facts.step, run.grid, passes, blocks, False)
    return add_work(others, _work_of_blocks(facts.checkpointed, run.grid, passes, blocks, True))


def _work_of_blocks(
    tape: Tape, grid: Mapping[str, int], passes: str, blocks: frozenset[Block] | None = None, chosen: bool = True
) -> dict[Kind, Work]:
    """The work of a step in ``blocks``, or outside of them if not ``chosen``; None: of the whole step."""
    return evaluate_work(_terms_of_blocks(tape, passes, blocks, chosen), tape.values(grid))


@recording_cache(maxsize=256)
def _terms_of_blocks(tape: Tape, passes: str, blocks: frozenset[Block] | None, chosen: bool) -> dict[SizeTerm, Work]:
    only = None if blocks is None else lambda block: (block in blocks) is chosen
    return symbolic_work(tape, main_piece(tape), only=only, passes=passes)


def symbolic_work(
    tape: Tape, piece: str, counts: Sequence[int] | None = None, only: Choice | None = None, passes: str = ""
) -> dict[SizeTerm, Work]:
    """Coefficients of a piece's work at full depth, for every shape: the part to compute once.

    `counts`: blocks per run, by default the full model's. A template counts once per block that uses it and that
    `only` accepts. `passes`: the one pass to count; empty: all.
    """
    counts = counts or [run.count for run in tape.runs]
    sums: dict[SizeTerm, list[int]] = {}
    for section in tape.pieces[piece]:
        if passes not in ("", section.passes):
            continue
        run = None if section.run is None else tape.runs[section.run]
        uses = [0] * len(section.templates)
        depth = 1 if section.run is None or not section.step else counts[section.run]
        for block in range(depth):
            index = block if section.step else section.block
            if only is None or only((run.module_list, run.start + index % run.count) if run else None):
                uses[kept_template(section, block, depth) if section.step else 0] += 1
        for template, times in zip(section.templates, uses, strict=True):
            for kind, half, flops, nbytes, exponents in template.work:
                cell = sums.setdefault((KINDS[kind], half, exponents), [0, 0])
                cell[0] += times * flops
                cell[1] += times * nbytes
    return {term: Work(*cell) for term, cell in sums.items()}


def evaluate_work(terms: Mapping[SizeTerm, Work], atoms: Sequence[int]) -> dict[Kind, Work]:
    """Symbolic work, summed by kind, at the given values of the tape's atoms."""
    total: dict[Kind, Work] = {}
    for (kind, half, exponents), (flops, nbytes) in terms.items():
        factor = math.prod(atom**power for atom, power in zip(atoms, exponents, strict=True) if power)
        before = total.get((kind, half), Work(0, 0))
        total[kind, half] = Work(before.flops + flops * factor, before.nbytes + nbytes * factor)
    return total


def work_of(
    tape: Tape,
    piece: str,
    grid: Mapping[str, int],
    counts: Sequence[int] | None = None,
    only: Choice | None = None,
    passes: str = "",
) -> dict[Kind, Work]:
    """The work of one piece of a tape at one shape, over the full depth. `grid` as of `planner.catalog.shapes.grid`."""
    return evaluate_work(symbolic_work(tape, piece, counts, only, passes), tape.values(grid))


def add_work(one: Mapping[Kind, Work], other: Mapping[Kind, Work]) -> dict[Kind, Work]:
    """The sum of two amounts of work, kind by kind."""
    total = dict(one)
    for kind, amount in other.items():
        before = total.get(kind, Work(0, 0))
        total[kind] = Work(before.flops + amount.flops, before.nbytes + amount.nbytes)
    return total


def optimizer_work_of(
    tape: Tape, piece: str, grid: Mapping[str, int], scale: float, one_by_one: bool
) -> dict[Kind, Work]:
    """The work of an optimizer step. Its operators run over all parameters at once or for each one (`one_by_one`), so
    the work grows with their bytes, not by block.

    `scale`: bytes of trained parameters of the full model per byte recorded.
    """
    recorded = evaluate_work(_recorded_work(tape, piece), tape.values(grid))
    grows = {kind: scale if one_by_one or kind[0] != KERNELS else 1.0 for kind in recorded}
    return {
        kind: Work(round(amount.flops * grows[kind]), round(amount.nbytes * grows[kind]))
        for kind, amount in recorded.items()
    }


@recording_cache(maxsize=256)
def _recorded_work(tape: Tape, piece: str) -> dict[SizeTerm, Work]:
    """The work of the recorded blocks; cached, because a search asks for it repeatedly."""
    return symbolic_work(tape, piece, [run.recorded for run in tape.runs])


def total_flops(work: StepWork, strategy: Strategy) -> int:
    """Floating-point operations of one step, including recomputation."""
    parts = (work.passes, work.optimizer, work.encoding)
    passes, optimizer, encoding = (
        sum(item.flops for (kind, _), item in part.items() if kind != KERNELS) for part in parts
    )
    return (passes + encoding) * strategy.gradient_accumulation + optimizer
