"""The workspace of sums that make gradients, worked out of a tape's events."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.layout.gradient_sums import SUM_WORKSPACE
from planner.layout.inputs import load_facts
from planner.layout.optimizer.reduction_workspace import column_mean_bytes
from planner.layout.pipeline import lay_out
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy

Z_IMAGE = lookup.model("z-image")
H100 = lookup.gpu("h100-80gb")
TOKENS = 64 * 64 + 512


def laid_out(method: str = "full", **strategy: Any) -> Run:
    shape = {"frames": 1, "height": 1024, "width": 1024}
    job = job_for(Z_IMAGE, {"method": method, **shape})
    known = Strategy.read({"gradient_checkpointing": "full", **strategy})
    configuration = Configuration.of(job, known, Machine(gpu="h100-80gb", gpus=2 if known.sharding != "none" else 1))
    return lay_out(configuration, load_facts(configuration), grid(Z_IMAGE, job))


def workspaces(run: Run) -> list[int]:
    """Bytes of the workspaces in the last layer's backward, in order."""
    made = [
        event
        for moment, events in run.step.stretches
        if (moment.module_list, moment.block, moment.passes) == ("layers", 29, "backward")
        for event in events
        if event >= 0 and run.program.op[event] == SUM_WORKSPACE
    ]
    return [run.sizes[buffer] for buffer in made]


def test_sums_over_tokens_take_what_a_virtual_gpu_allocated() -> None:
    """In the last layer of Z-Image at 1024x1024 (rehearsed with torch 2.13): of four norms' weights and four
    modulations, 3840 numbers each over all tokens, and two norms of queries and keys, 128 over tokens and heads."""
    whole = column_mean_bytes(TOKENS, 3840, H100)
    heads = column_mean_bytes(TOKENS * 30, 128, H100)
    assert (whole, heads) == (139_591_680, 138_412_032)
    assert sorted(workspaces(laid_out(weights_dtype="fp32", autocast="bf16"))) == [heads] * 2 + [whole] * 8


def test_what_a_lora_does_not_train_is_not_summed() -> None:
    assert workspaces(laid_out("lora")) == []


@pytest.mark.parametrize("stage", ["zero-1", "zero-2"])
def test_a_workspace_does_not_split_what_a_layer_hands_to_the_engine(stage: str) -> None:
    """The reduction follows the whole operator: a workspace, then the bucket, never the other way round."""
    run = laid_out(sharding=stage)
    events = run.step.ops
    for at, event in enumerate(events):
        if event >= 0 and run.program.op[event] == SUM_WORKSPACE:
            assert events[at + 1] == ~event
            assert run.program.op[events[at - 1]] == "sum"
