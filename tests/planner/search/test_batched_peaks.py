"""Allocated peaks of many shapes at once equal the replayed peak of each shape."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.estimate.stages import replay_stages
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.search.batched_peaks import peak_forms
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import resolve

MACHINE = Machine(gpu="rtx4090")


def laid_out(job: Job, strategy: Strategy) -> tuple[dict[str, int], object]:
    strategy = resolve(job, strategy, MACHINE)
    configuration = Configuration.of(job, strategy, MACHINE)
    known = load_facts(configuration)
    shape = grid(known.model, job)
    return shape, lay_out(configuration, known, shape)


@pytest.mark.parametrize(
    ("model", "method", "strategy"),
    [
        ("wan2.1-t2v-1.3b", "lora", Strategy(gradient_checkpointing="full")),
        ("wan2.1-t2v-1.3b", "lora", Strategy(gradient_checkpointing="full", swap_blocks=20)),
        ("cogvideox-2b", "full", Strategy(gradient_checkpointing="none", optimizer_step="fused")),
        ("ltx-video-2b", "full", Strategy(gradient_checkpointing="full", text_encoder="resident")),
    ],
)
@pytest.mark.parametrize("batch", [2, 3])
def test_forms_equal_the_replay(model: str, method: str, strategy: Strategy, batch: int) -> None:
    profile = lookup.model(model)
    start = job_for(profile, {"model": model, "method": method, "batch_size": batch})
    _, run = laid_out(start, strategy)
    forms = peak_forms(run)
    step = profile.shape.frame_step
    jobs = [start.replace(frames=frames) for frames in (start.frames, 4 * step + 1, 2 * step + 1)]
    grids = [grid(profile, job) for job in jobs]
    for job, peak in zip(jobs, forms.at(grids), strict=True):
        _, own = laid_out(job, strategy)
        assert peak == max(
            entry.replayed.allocated_peak_bytes for entry in replay_stages(own) if entry.phase != "encode"
        )


def test_a_clip_of_more_frames_never_needs_less() -> None:
    profile = lookup.model("wan2.1-t2v-1.3b")
    job = job_for(profile, {"model": profile.name})
    shape, run = laid_out(job, Strategy(gradient_checkpointing="full"))
    peaks = peak_forms(run).at([{**shape, "F": frames} for frames in range(2, 60)])
    assert (peaks[1:] >= peaks[:-1]).all()
