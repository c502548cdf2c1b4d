"""A mixture's experts that run without gradients where the recorded ones keep what backward needs of them."""

from __future__ import annotations

from collections.abc import Iterator

from planner.layout.run import Run
from planner.tape.program import Moment, Stage

MULTIPLE = 256
"""Of which an expert's width is one (diffusers transformer_hidream_image.py, HiDreamImageFeedForwardSwiGLU)."""

TEXTS = 3
"""In one sequence with the image: T5's, that of Llama's last layer and that of the block's own layer."""

MADE = ("gate", "activated gate", "value", "product")
"""What an expert makes of its own width, in this order: its last layer takes the product."""


def experts_without_gradients(run: Run) -> None:
    """diffusers' script of HiDream loads the model with ``force_inference_output=True``, and then its experts run under
    ``no_grad`` in training too (transformer_hidream_image.py ``moe_infer``): what is as wide as they are is gone when
    it was used, and backward makes none of it. What is as wide as the model stays priced as recorded."""
    if run.job.method != "lora" or not run.facts.model.trained_with("diffusers", "experts-without-gradients"):
        return
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        _without_gradients(run, stage)


def _without_gradients(run: Run, stage: Stage) -> None:
    sizes = _sizes(run)
    gone: set[int] = set()
    stretches: list[tuple[Moment, list[int]]] = []
    for moment, events in stage.stretches:
        wide = [event for event in events if event >= 0 and run.sizes[event] in sizes] if moment.block >= 0 else []
        gates = [at for at, event in enumerate(wide) if run.program.op[event] == "silu"]
        forward = wide[: gates[-1] + 3] if gates else []  # behind an activated gate come value and product
        after: dict[int, list[int]] = {}
        for gate, activated, value, product in zip(*[iter(forward)] * len(MADE), strict=True):
            after[activated], after[product] = [~gate], [~activated, ~value]
            gone |= {gate, activated, value}
        backward = set(wide[len(forward) :])
        gone |= backward
        stretches.append((moment, list(_events(events, after, gone, backward))))
    stage.stretches = stretches


def _events(events: list[int], after: dict[int, list[int]], gone: set[int], dropped: set[int]) -> Iterator[int]:
    """The events of a stretch with new frees behind some allocations. What is ``gone`` is freed nowhere else, and what
    is ``dropped`` is not made."""
    for event in events:
        if (event < 0 and ~event in gone) or event in dropped:
            continue
        yield event
        yield from after.get(event, ())


def _sizes(run: Run) -> set[int]:
    """Bytes of what one expert makes for every token, in 16 and in 32 bits: of the image, and of image and text."""
    config, grid = run.facts.model.config, run.grid
    width = config["num_attention_heads"] * config["attention_head_dim"]
    inner = -(-(2 * 4 * width // 3) // MULTIPLE) * MULTIPLE
    image = grid["F"] * grid["H"] * grid["W"]
    rows = (image, image + TEXTS * grid["T"])
    return {nbytes * grid["B"] * count * inner for nbytes in (2, 4) for count in rows}
