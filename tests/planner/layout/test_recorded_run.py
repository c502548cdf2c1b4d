"""What CUDA makes otherwise than a recording on a CPU says, put right as a step is laid out."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grids, job_for
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy


def laid_out(model: str, **strategy: object) -> Run:
    job = job_for(lookup.model(model), {"method": "full"})
    asked = Configuration.of(job, Strategy.read(strategy), Machine(gpu="h100"))
    facts = load_facts(asked)
    return lay_out(asked, facts, grids(facts.model, job)[0])


def statistics(run: Run) -> set[tuple[int, int]]:
    """(bytes of a layer norm's output, bytes of the mean of its rows)."""
    ops, sizes = list(run.program.op), run.sizes
    found = set()
    for out in range(len(ops) - 2):
        if ops[out : out + 3] == ["native_layer_norm"] * 3 and sizes[out] > sizes[out + 1] == sizes[out + 2]:
            found.add((sizes[out], sizes[out + 1]))
    return found


@pytest.mark.parametrize("autocast", ["none", "bf16"])
def test_layer_norms_keep_fp32_statistics(autocast: str) -> None:
    """CogVideoX 2B norms rows of 1920 numbers, and of 64 for queries and keys. Autocast norms in fp32."""
    run = laid_out("cogvideox-2b", weights_dtype="bf16", autocast=autocast)
    number = 2 if autocast == "none" else 4
    assert {out / number / (mean / 4) for out, mean in statistics(run)} == {1920, 64}


def test_what_was_cast_to_fp32_before_a_norm_stays_as_it_is() -> None:
    """Wan casts the input of its norms itself."""
    run = laid_out("wan2.1-t2v-1.3b", weights_dtype="bf16", autocast="none")
    assert {out / mean for out, mean in statistics(run)} == {1536}
