"""Training a part of the weights: those whose names match a pattern have gradients and states, the others have none.

A transformation of the recording in which all are trained. What the recording keeps to make the frozen weights'
gradients stays in, so activations are an upper bound: with checkpointing that is what one block keeps.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from planner.errors import VplanError
from planner.layout.run import Run
from planner.tape.program import Stage


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter's full name contains one of the patterns as whole name parts: "attn1", "blocks.0",
    "*norm*"."""
    return any(fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*") for pattern in patterns)


def freeze_unmatched(run: Run) -> None:
    """Freezes the weights that match no pattern: drops their gradients, optimizer states and what the step allocates
    for them."""
    patterns = run.job.trainable
    if not patterns:
        return
    gradients = run.named("gradient")
    frozen = {name: buffer for name, buffer in gradients.items() if not matches(name, patterns)}
    if len(frozen) == len(gradients):
        example = max(gradients, key=len)
        raise VplanError(f"no weight matches trainable {', '.join(patterns)}", f"weight names look like {example}")
    run.drop(run.step, frozen.values())
    states = {name: buffer for name, buffer in run.named("optimizer").items() if name.rpartition(":")[0] in frozen}
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, [*frozen.values(), *states.values(), *_foreach_copies(run, stage, frozen)])
    for category, names in (("gradient", frozen), ("optimizer", states)):
        for name in names:
            del run.program.named[category][name]


def _foreach_copies(run: Run, stage: Stage, frozen: dict[str, int]) -> set[int]:
    """What a foreach operator makes for each frozen weight: one tensor as large as it, in the stretch of its block."""
    named = {buffer for buffers in run.program.named.values() for buffer in buffers.values()}
    masters = run.strategy.master_weights == "fp32"
    expected: dict[tuple[str, int], list[int]] = {}
    for name, buffer in frozen.items():
        block = run.facts.optimizer.block_of(name) or ("", -1)
        wide = masters and run.sizes[buffer] == 2 * run.elements[name]
        expected.setdefault(block, []).append(run.sizes[buffer] * (2 if wide else 1))
    copies: set[int] = set()
    for moment, events in stage.stretches:
        made: dict[tuple[str, int], list[int]] = {}
        for event in events:
            if event >= 0 and event not in named and run.program.op[event].startswith("_foreach"):
                made.setdefault((run.program.op[event], run.sizes[event]), []).append(event)
        for nbytes in expected.get((moment.module_list, moment.block), ()):
            for (_, size), buffers in made.items():
                if size == nbytes and buffers:
                    copies.add(buffers.pop())
    return copies
