"""sd-scripts' U-Nets without --sdpa or --xformers, read at 48d368f: attention whose scores are made whole.

library/sdxl_original_unet.py and library/original_unet.py ``CrossAttention._attention``: a product with scores of every
head, query and key, their softmax in fp32, and the softmax cast to 16 bits for the product with the values. What is
alive when was seen of that code on a virtual GPU (torch 2.13), in bytes a score: 10 at most in a forward in bf16, 8 in
fp16 and fp32; 6, 6 and 4 kept for backward; there 16, 14 and 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from planner.catalog.components import samples_per_call
from planner.errors import NotEstimatedError
from planner.layout.attention_kernel import EFFICIENT, FLASH
from planner.layout.phases import validation_grid
from planner.layout.run import Run
from planner.tape.program import Stage, frees

KERNELS = (FLASH, EFFICIENT)
BACKWARD = tuple(f"{name}_backward" for name in KERNELS)
FP32, HALF = 4, 2


class Widths(NamedTuple):
    """Bytes of a score in what is made of it."""

    scores: int
    cast: int
    """its copy in fp32, which softmax of bf16 makes under autocast (ATen SoftMax.cpp ``softmax``: fp16 goes without)"""

    probabilities: int
    """the softmax's copy for the values' product; 0 where it is in fp32 itself"""


BY_PRECISION = {"bf16": Widths(HALF, FP32, HALF), "fp16": Widths(HALF, 0, HALF), "none": Widths(FP32, 0, 0)}
"""``autocast`` -> widths."""


class KeptScores(NamedTuple):
    """What one attention keeps until its backward."""

    scores: int
    """how many there are"""

    buffers: tuple[int, ...]
    """the softmax, and its copy in 16 bits"""


def whole_scores(run: Run) -> None:
    """Scores of all heads, made whole by each attention of training and of a sample's denoising in place of the
    recorded kernel; the VAE's is another's. Raises a NotEstimatedError of a model whose attentions are not of a U-Net's
    levels."""
    if run.strategy.attention != "math":
        return
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        _Scores(run, run.grid).put_into(stage)
    model, guided = run.facts.model, run.job.guided
    sample = {**validation_grid(run.job, model), "B": samples_per_call(model, guided)}
    for name, stage in run.phases.validation:
        if name == "denoise":
            _Scores(run, sample).put_into(stage)


def _self_scores(run: Run, grid: Mapping[str, int]) -> dict[int, int]:
    """Bytes of what a kernel saves of an attention's rows, an fp32 number of each head -> its scores if it attends to
    itself: of each level of the U-Net. ``grid``: of what is computed."""
    model = run.facts.model
    heads = model.config["attention_head_dim"]
    levels = len(model.config["block_out_channels"])
    _, rows, columns = model.shape.patch
    found = {}
    for level in range(levels):
        number = heads[level] if isinstance(heads, list | tuple) else heads
        positions = (grid["H"] * rows >> level) * (grid["W"] * columns >> level)
        found[FP32 * grid["B"] * number * positions] = grid["B"] * number * positions**2
    return found


class _Scores:
    """Puts the scores into a stage: transformers attend to themselves and to the text in turn."""

    def __init__(self, run: Run, grid: Mapping[str, int]) -> None:
        self.run, self.text_tokens, self.self_scores = run, grid["T"], _self_scores(run, grid)
        self.widths = BY_PRECISION[run.strategy.autocast]
        self.calls = 0
        self.waiting: dict[int, KeptScores] = {}
        """what a kernel saves of rows -> what its attention keeps, the latest last"""

        self.done: set[int] = set()
        """those whose backward began"""

    def put_into(self, stage: Stage) -> None:
        """Puts them into all stretches, in order."""
        stage.stretches = [(moment, self._events(events)) for moment, events in stage.stretches]
        if not self.calls:
            why = "without --sdpa or --xformers attention is computed whole, the scores of every head at once"
            what = "how much more that takes is not recorded of this model"
            raise NotEstimatedError(f"{why} (sd-scripts 48d368f): {what}", "add --sdpa, which needs less and is faster")

    def _events(self, events: list[int]) -> list[int]:
        made: list[int] = []
        for event in events:
            if event >= 0 and self.run.program.op[event] in KERNELS and self.run.sizes[event] in self.self_scores:
                made += self._forward(event)
            elif event >= 0 and self.run.program.op[event] in BACKWARD:
                made += self._backward()
            elif ~event in self.waiting:
                made += self._gone(~event)
            made.append(event)
        return made

    def _forward(self, rows: int) -> list[int]:
        nbytes = self.run.sizes[rows]
        scores = self.self_scores[nbytes] if self.calls % 2 == 0 else nbytes // FP32 * self.text_tokens
        self.calls += 1
        start, product = self._new(scores, self.widths.scores), self._new(scores, self.widths.scores)
        cast, softmax = self._new(scores, self.widths.cast), self._new(scores, FP32)
        probabilities = self._new(scores, self.widths.probabilities)
        self.waiting[rows] = KeptScores(scores, (*softmax, *probabilities))
        events = [*start, *product, *frees(start), *cast, *softmax, *frees(cast)]
        return [*events, *probabilities, *frees(product)]

    def _backward(self) -> list[int]:
        """Of the latest attention, unless it began already."""
        rows = next(reversed(self.waiting), None)
        if rows is None or rows in self.done:
            return []
        self.done.add(rows)
        scores, (softmax, *probabilities) = self.waiting[rows]
        half, bf16 = self.widths.probabilities, self.widths.cast
        gradient, whole = self._new(scores, half), self._new(scores, FP32)
        # ATen SoftMax.cu ``softmax_backward_cuda_out`` multiplies both before it reduces.
        product, result = self._new(scores, FP32), self._new(scores, HALF if half and not bf16 else FP32)
        last = self._new(scores, HALF if bf16 else 0)
        events = [*gradient, *frees(probabilities), *whole, *frees(gradient), *product, *result, *frees(product)]
        return [*events, *frees([softmax, *whole]), *last, *frees([*result, *last])]

    def _gone(self, rows: int) -> list[int]:
        """What is left where there is no backward."""
        kept = self.waiting.pop(rows)
        if rows in self.done:
            self.done.remove(rows)
            return []
        return frees(kept.buffers)

    def _new(self, scores: int, width: int) -> list[int]:
        return [self.run.new(scores * width, "activation", "attention scores")] if width else []
