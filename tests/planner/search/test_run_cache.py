"""A run laid out for its peaks alone has the peaks of one laid out in full."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.estimate import host_ram
from planner.layout.recordings import load_facts
from planner.search.run_cache import RunCache
from planner.search.screening import allocated_peak
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy

CHECKPOINTED = {"gradient_checkpointing": "full"}
ASKED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("wan2.1-t2v-1.3b", "vplan", {}, {**CHECKPOINTED, "validation_mode": "on"}),
    ("wan2.1-t2v-1.3b", "vplan", {"frames": 33}, {"validation_mode": "offload", "vae": "resident"}),
    ("wan2.1-t2v-1.3b", "vplan", {"method": "sample"}, {"vae": "swapped"}),
    ("wan2.1-t2v-1.3b", "vplan", {"method": "sample"}, {"vae_tiling": True, "group_offload": "block"}),
    ("ltx-video-2b", "vplan", {}, {"validation_mode": "on", "group_offload": "leaf"}),
    ("cogvideox-2b", "vplan", {}, {**CHECKPOINTED, "validation_mode": "on"}),  # it has a table of positions
    ("sdxl", "sd-scripts@unet", {}, {**CHECKPOINTED, "attention": "math", "validation_mode": "on"}),
    ("flux.1-dev", "diffusers", {}, {**CHECKPOINTED, "validation_mode": "on"}),
    ("flux.1-dev", "diffusers", {}, {**CHECKPOINTED, "validation_mode": "offload", "vae_tiling": True}),
]


@pytest.mark.parametrize(("name", "trainer", "job", "strategy"), ASKED)
def test_peaks_are_those_of_the_whole_run(
    name: str, trainer: str, job: dict[str, Any], strategy: dict[str, Any]
) -> None:
    model, cache, machine = lookup.model(name), RunCache(), Machine(gpu="rtx4090")
    configuration = Configuration.of(lookup.job_for(model, job), Strategy.read(strategy), machine)
    facts, where = load_facts(configuration), grid(model, configuration.job)
    whole = cache.lay_out(configuration, facts, where, trainer)
    peaks = cache.lay_out_for_peaks(configuration, facts, where, trainer)
    assert whole.phases.validation
    assert allocated_peak(peaks, cache.sizes(configuration, facts, where)) == allocated_peak(whole)
    assert peaks.device.split_bytes == whole.device.split_bytes
    assert host_ram.ram_bytes(peaks, machine) == host_ram.ram_bytes(whole, machine)


def test_a_sample_laid_out_for_its_peaks_has_few_buffers() -> None:
    model, cache = lookup.model("wan2.1-t2v-1.3b"), RunCache()
    configuration = Configuration.of(
        lookup.job_for(model, {}), Strategy.read({"validation_mode": "on"}), Machine(gpu="h200")
    )
    facts, where = load_facts(configuration), grid(model, configuration.job)
    recorded = len(cache.untransformed(configuration, facts, where).sizes)
    whole = cache.lay_out(configuration, facts, where, "vplan")
    peaks = cache.lay_out_for_peaks(configuration, facts, where, "vplan")
    assert len(peaks.sizes) - recorded < (len(whole.sizes) - recorded) / 50
