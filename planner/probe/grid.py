"""The small grid of plans that `vplan calibrate` probes: short and long clips, with and without checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from planner.catalog import lookup
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.hardware import doctor
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan

DEFAULT_MODEL = "wan2.1-t2v-1.3b"
"""A small model that every version has."""

TINY = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "text_dim": 16,
    "freq_dim": 16,
}
"""Config values that shrink the default model so that it runs on a CPU in seconds."""

LENGTHS = (1, 17, 49)
"""Frames, rounded to what the model allows."""


def plans(name: str, card: GpuProfile | None) -> Iterator[Plan]:
    """The grid of a model on a card, without plans that do not fit by estimate or that cannot be estimated.

    Without a card, a single plan of a tiny size.
    """
    model = lookup.model(name)
    if card is None:
        job = Job(model=name, frames=5, height=32, width=32, lora_rank=4)
        yield Plan(job=job, strategy=Strategy(gradient_checkpointing="full"), machine=Machine(gpu="24GB"))
        return
    ram, torch = psutil.virtual_memory().total, doctor.torch_release()
    machine = Machine(gpu=card.name, host_ram=ram, unified=card.unified, torch=torch)
    height, width = model.shape.resolutions[0]
    for frames in dict.fromkeys(_allowed(model, count) for count in LENGTHS):
        for checkpointing in ("full", "none"):
            job = Job(model=name, frames=frames, height=height, width=width)
            configuration = Configuration.of(job, Strategy(gradient_checkpointing=checkpointing), machine)
            if _may_run(configuration, card):
                yield Plan.under(configuration)


def _allowed(model: ModelProfile, frames: int) -> int:
    """The longest clip of at most so many frames that the model takes, or its shortest if that is longer."""
    if model.kind != "video":
        return 1
    rules = model.shape
    return rules.cut(max(rules.min_frames, rules.frame_rest, min(frames, rules.max_frames)))


def _may_run(configuration: Configuration, card: GpuProfile) -> bool:
    """Whether training fits by estimate. Encoding does not count: nothing is encoded here."""
    try:
        answer = estimate(configuration, load_facts(configuration, gpu=card))
    except VplanError:
        return False
    peaks = [peak.device_bytes for phase, peak in answer.phases.items() if phase != "encode"]
    return max(peaks) <= answer.budget_bytes
