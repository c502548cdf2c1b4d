"""What a strategy needs at the least, read off its tape without laying it out: enough to rule most strategies out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from planner.beside import STORED
from planner.job import SPLIT, Job, Strategy
from planner.program import kept_template
from planner.tape import CATEGORIES, Growing, Tape

WEIGHT = CATEGORIES.index("weight")


def parameter_bytes(job: Job, strategy: Strategy, parameters: int) -> tuple[int, int]:
    """(weights and states, gradients) of a model of so many parameters, where they lie on the GPU whole; else 0."""
    if job.method == "sample" or strategy.sharding in SPLIT:
        return 0, 0
    weights = int(STORED[strategy.weights(job.method)] * parameters)
    held = 0 if strategy.swap_blocks or strategy.offload_params != "none" else weights
    gradients = 0
    if job.method == "full" and not job.trainable:
        if strategy.offload_gradients == "none" and strategy.optimizer_step != "backward":
            gradients = weights
        if strategy.offload_optimizer == "none":
            held += {"adamw": 2 * weights, "adamw-8bit": 2 * parameters}.get(strategy.optimizer, 0)
    return held, gradients


def keeps_activations(job: Job, strategy: Strategy) -> bool:
    """Whether `activation_bytes` holds: every block keeps all that its backward asks for, whole, on the GPU."""
    return (
        job.method != "sample"
        and not job.trainable
        and strategy.gradient_checkpointing == "none"
        and strategy.sharding not in SPLIT
        and strategy.context_parallel == 1
        and strategy.compile == "none"
    )


def activation_bytes(tape: Tape, grid: Mapping[str, int]) -> int:
    """What a forward leaves of what its blocks made, at full depth; without the workspaces that depend on attention's
    kernel, and without weights that are made anew in a step."""
    left: Counter[int] = Counter()
    items: list[tuple[Item, list[list[int]]]] = [(item, _sizes(item)) for item in tape.pieces["step"]]
    for item, made in items:
        if item["pass"] != "forward":
            continue
        for used, times, block in _uses(item, tape):
            if item["run"] is not None:
                for number in made[used]:
                    left[number] += times
            for event in item["templates"][used]["events"]:
                if len(event) == 4:
                    left[_freed(event, block, items, tape)] -= times
    del left[NOT_COUNTED]
    values = tape.values(grid)
    total = 0
    for number, times in left.items():
        size = tape.sizes[number]
        assert not isinstance(size, Growing), "only the chunks of a VAE grow"
        total += times * size.value(values)
    return total


NOT_COUNTED = -1

Item = Mapping[str, Any]


def _sizes(item: Item) -> list[list[int]]:
    """Per template: what each of its allocations takes, by number of the tape's size."""
    found = []
    for template in item["templates"]:
        made = [event for event in template["events"] if len(event) not in (4, 6)]
        found.append([NOT_COUNTED if event[3] or (event[4] and event[1] == WEIGHT) else event[0] for event in made])
    return found


def _uses(item: Item, tape: Tape) -> list[tuple[int, int, int]]:
    """(template, how many blocks use it, the last of them)."""
    if item["run"] is None or not item.get("step"):
        return [(0, 1, item.get("block", -1))]
    count = tape.runs[item["run"]].count
    used = [kept_template(item, block, count) for block in range(count)]
    return [(template, used.count(template), count - 1 - used[::-1].index(template)) for template in set(used)]


def _freed(event: list[int], block: int, items: list[tuple[Item, list[list[int]]]], tape: Tape) -> int:
    """The size of what an event frees, where a forward's block made it."""
    number, mode, target, position = event
    item, sizes = items[number]
    if item["pass"] != "forward" or item["run"] is None:
        return NOT_COUNTED
    count = tape.runs[item["run"]].count
    made_in = block + target if mode == 1 else target % count
    return sizes[kept_template(item, made_in, count) if item.get("step") else 0][position]
