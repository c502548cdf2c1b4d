"""Context parallelism, as diffusers does it (``ContextParallelConfig(ulysses_degree=N)``, arXiv 2309.14509).

N GPUs work on one sample, each on a part of its tokens; around an attention they exchange heads for tokens and back.
What each keeps of a token is divided by N, weights are not. What of a model is split, its ``_cp_plan`` says
(diffusers/models/transformers); the exchange is ``TemplatedUlyssesAttention`` (diffusers/models/attention_dispatch.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from planner.catalog.profiles import ModelProfile
from planner.catalog.traits import SplitPlan
from planner.errors import NotEstimatedError
from planner.layout.run import Run
from planner.tape.format import Growing, Monomial, Tape
from planner.tape.program import Stage

FORWARD = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
BACKWARD = tuple(f"{name}_backward" for name in FORWARD)


def context_parallel(run: Run) -> None:
    """Divides what belongs to tokens, and puts the exchange around each attention.

    Raises a NotEstimatedError where diffusers refuses: heads or tokens that do not divide, a model without a plan.
    """
    parts = run.strategy.context_parallel
    if parts == 1:
        return
    plan = split_plan(run.facts.model, run.grid, parts)
    _divide(run, plan, parts)
    run.work.exchanged_bytes = _exchange(run, run.step, plan)


def split_plan(model: ModelProfile, grid: Mapping[str, int], parts: int) -> SplitPlan:
    """How the model splits a clip of this ``grid`` into `parts`. Raises a NotEstimatedError when it cannot."""
    plan = model.traits.split
    if plan is None:
        why = model.traits.split_fault or "diffusers has no parallel plan for it"
        fault = f"context_parallel is not supported by {model.title}: {why}"
        raise NotEstimatedError(fault, "use --context-parallel 1, with --gradient-checkpointing offload")
    for what, count in _counts(model, plan, grid).items():
        if count % parts:
            fix = "another size" if model.kind == "image" else "another --frames, --height or --width"
            fix = fix if "clip" in what else "--text-tokens in multiples of it"
            divisors = [fewer for fewer in range(1, parts) if not count % fewer and not parts % fewer]
            fix = f"use --context-parallel {divisors[-1]}" + (f", or {fix}" if what != "attention heads" else "")
            fault = f"context_parallel {parts} does not divide the {count} {what} of {model.title}"
            raise NotEstimatedError(fault, fix)
    return plan


def divides(model: ModelProfile, grid: Mapping[str, int], parts: int) -> bool:
    """Whether a clip of this ``grid`` can be split into `parts` parts."""
    plan = model.traits.split
    return plan is not None and not any(count % parts for count in _counts(model, plan, grid).values())


def _counts(model: ModelProfile, plan: SplitPlan, grid: Mapping[str, int]) -> dict[str, int]:
    """What must divide by the number of parts."""
    tokens = grid["F"] * grid["H"] * grid["W"] + grid.get("E", 0)
    text = {"tokens of the text": grid["T"]} if plan.text else {}
    return {"attention heads": model.config["num_attention_heads"], "tokens of the clip": tokens, **text}


# ---- what belongs to tokens


def _divide(run: Run, plan: SplitPlan, parts: int) -> None:
    stretches = run.step.stretches
    blocks = [position for position, (moment, _) in enumerate(stretches) if moment.block >= 0]
    wide = 2 * run.facts.model.config["num_attention_heads"] * run.facts.model.config["attention_head_dim"]
    size_of, category = list(run.program.buffers), list(run.program.category)
    tokens_in = functools.cache(lambda size: _tokens(run, size, plan))
    done: set[int] = set()
    for position, (moment, events) in enumerate(stretches):
        for buffer in events:
            if buffer < 0 or buffer in done or category[buffer] == "batch":
                continue
            done.add(buffer)
            tokens = tokens_in(size_of[buffer])
            if not tokens:
                continue
            if moment.block < 0 and run.sizes[buffer] // tokens < _split_from(plan, position, blocks) * wide:
                continue
            run.resize(buffer, -(-run.sizes[buffer] // parts))


def _split_from(plan: SplitPlan, position: int, blocks: list[int]) -> int:
    """How wide a token must be, in widths of the model, for what is made outside the blocks to be split.

    Between forward and backward: what comes out is split as long as it is wide, and gathered once it is narrow. Before
    and behind, nothing where a plan begins at the blocks, but a modulation for each token (Wan 2.2 TI2V, six widths).
    """
    if blocks[0] < position < blocks[-1]:
        return 1
    return 0 if plan.from_the_start else 6


def _tokens(run: Run, index: int, plan: SplitPlan) -> int:
    """How many tokens of the whole batch a buffer of this size (by its index) has something of; 0 for none."""
    size = run.program.sizes[index]
    if isinstance(size, int):
        return 0
    tape, monomial = size
    atoms = _atoms(tape, monomial)
    grid = run.grid
    clip = grid["F"] * grid["H"] * grid["W"]
    if {"H", "W"} <= atoms:
        return grid["B"] * clip
    if sums := atoms & tape.sums.keys() - tape.of_batch:
        text = plan.text and any("T" in tape.sums[name][1] for name in sums)
        return grid["B"] * (clip + grid.get("E", 0) + (grid["T"] if text else 0))
    return grid["B"] * grid["T"] if plan.text and "T" in atoms else 0


def _atoms(tape: Tape, size: Monomial | Growing) -> set[str]:
    assert isinstance(size, Monomial), "only VAEs have sizes that grow from block to block"
    names = {name for name, power in zip(tape.atoms, size.exponents, strict=True) if power}
    if size.multiple:
        names |= {name for name, power in zip(tape.atoms, size.inner_exponents, strict=True) if power}
    return names


# ---- the exchange


def _exchange(run: Run, stage: Stage, plan: SplitPlan) -> int:
    """Puts the exchange's buffers around every attention whose heads are split; returns what each GPU exchanges.

    Forward: a packed and an arrived copy of queries, keys and values, which are alive themselves, then both of what
    comes out. Backward: both of its gradient, of which one stays while attention runs again, then of three gradients;
    beside these still what attention was given, unless a checkpoint recomputed it and handed it out for good.
    """
    sent, op = 0, list(run.program.op)
    for position, (moment, events) in enumerate(stage.stretches):
        if moment.block < 0:
            continue
        forward, backward = _calls(op, events, FORWARD), _calls(op, events, BACKWARD)
        if not plan.every_attention:
            forward, backward = forward[:1], backward[-1:]
        before: dict[int, list[int]] = {}
        behind: dict[int, list[int]] = {}
        for first, last in forward:
            nbytes = run.sizes[events[first]]
            inputs, arrived, out = (_buffer(run, count * nbytes) for count in (3, 3, 2))
            before[first] = [inputs, arrived, ~arrived]
            behind[last] = [out, ~out, ~inputs]
            sent += 4 * nbytes
        for first, last in backward:
            nbytes = run.sizes[events[first]]
            packed, arrived, gradients = (_buffer(run, count * nbytes) for count in (1, 1, 6 if forward else 9))
            before[first] = [packed, arrived, ~packed]
            while last + 1 < len(events) and events[last + 1] < 0:  # what attention was given goes before, not behind
                last += 1
            behind[last] = [gradients, ~gradients, ~arrived]
            sent += 4 * nbytes
        if before:
            woven = [[*before.get(index, ()), event, *behind.get(index, ())] for index, event in enumerate(events)]
            stage.stretches[position] = (moment, [event for part in woven for event in part])
    return sent


def _calls(op: Sequence[str], events: list[int], names: tuple[str, ...]) -> list[tuple[int, int]]:
    """(first, last) position of the events that make what one call of an operator gives back, and its workspaces."""
    spans: list[tuple[int, int]] = []
    for index, event in enumerate(events):
        if event < 0 or op[event] not in names:
            continue
        if spans and index == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], index)
        else:
            spans.append((index, index))
    return spans


def _buffer(run: Run, nbytes: int) -> int:
    return run.new(nbytes, "buckets", "all-to-all")
