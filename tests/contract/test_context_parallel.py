"""Context parallelism: the estimate of a rank's memory matches what diffusers' context parallelism does to the same
model, both by our recorder with a fake process group, and by autograd on two real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.catalog import card_lookup, lookup
from planner.catalog.profiles import ModelProfile
from planner.layout.pipeline import lay_out
from planner.layout.run import Facts, Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.tape.format import NOTHING
from planner.tape.variants.choice import step_variant
from planner.tape.variants.inventory import step_variants
from tests.contract.ranks import Case, measure
from trainers.recording import tapes
from trainers.recording.block_places import find_runs
from trainers.recording.recorder import RawRecording
from trainers.recording.recordings import record_step
from trainers.step import step

TINY: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "wan2.1-t2v-1.3b": (
        {"num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024, "freq_dim": 16, "text_dim": 8},
        {"B": 1, "F": 5, "H": 8, "W": 8, "T": 512, "R": 4, "E": 0},
    ),
    "flux.1-dev": (
        {"num_attention_heads": 4, "attention_head_dim": 64, "joint_attention_dim": 8, "axes_dims_rope": [16, 24, 24]},
        {"B": 1, "F": 1, "H": 16, "W": 16, "T": 64, "R": 4, "E": 0},
    ),
    "qwen-image": (
        {"num_attention_heads": 4, "attention_head_dim": 64, "joint_attention_dim": 8, "axes_dims_rope": [16, 24, 24]},
        {"B": 1, "F": 1, "H": 16, "W": 16, "T": 64, "R": 4, "E": 0},
    ),
}
"""Narrow, but wide enough to compare what comes out; more tokens of the clip than of the text."""

HALF = {"weights_dtype": "bf16", "adapter_dtype": "bf16", "autocast": "none"}
WAN, FLUX, QWEN = TINY


def tiny(name: str) -> ModelProfile:
    profile = lookup.model(name)
    depth = {stack.depth_key: 3 if len(profile.stacks) == 1 else 2 for stack in profile.stacks}
    return profile.model_copy(update={"config": {**profile.config, **TINY[name][0], **depth}})


def job_of(profile: ModelProfile) -> Job:
    height, width = profile.shape.resolutions[0]
    return Job.read(
        {
            "model": profile.name,
            "frames": profile.shape.default_frames,
            "height": height,
            "width": width,
            "lora_rank": 4,
            "lora_targets": profile.lora.targets,
        }
    )


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tapes are of the recorded depth only."""

    def lengths(name: str) -> tuple[int, ...]:
        profile = tiny(name)
        job, strategy = next(step_variants(profile)).records(profile)
        model = step.build_model(profile, job.replace(method="full"), strategy)
        return tuple(run.count for run in find_runs(model, [stack.list for stack in profile.stacks], None)[0])

    monkeypatch.setattr(tapes, "full_run_lengths", lengths)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models are built as on one of two ranks, with a process group that does not communicate."""
    from diffusers import ContextParallelConfig

    build = step.build_model

    def build_split(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = build(*args, **kwargs)
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))  # type: ignore[operator]
        return model

    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(step, "build_model", build_split)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


CARD = "a100-80gb"
"""A card with flash attention, which the recorder assumes too; cuDNN's backward pads no rows."""


def estimated(name: str, mode: str) -> Run:
    """The run of one of two GPUs, from a recording of a whole sample at other shapes."""
    profile = tiny(name)
    job, machine = job_of(profile), Machine(gpu=CARD, gpus=2)
    strategy = Strategy.read({**HALF, "gradient_checkpointing": mode, "context_parallel": 2})
    variant = step_variant(profile, job, strategy, 1)
    tape = tapes.step_tape(profile, variant)
    facts = Facts(profile, card_lookup.gpu(CARD), tape, NOTHING)
    return lay_out(Configuration.of(job, strategy, machine), facts, dict(TINY[name][1]))


def recorded(name: str, mode: str) -> RawRecording:
    profile = tiny(name)
    strategy = Strategy.read({**HALF, "gradient_checkpointing": mode})
    return record_step(profile, job_of(profile), strategy, TINY[name][1], profile.config)


def trace_peaks(trace: RawRecording) -> tuple[int, int]:
    """(highest allocated bytes, bytes that forward leaves), without weights.

    A sent tensor and the one waited for are one buffer, but a recorder with fake tensors sees two.
    """
    held = most = kept = 0
    for event, passes in zip(trace.events, trace.passes, strict=True):
        alloc = trace.allocations[event if event >= 0 else ~event]
        if passes == "backward" and not kept:
            kept = held
        if alloc.category != "weight" and alloc.op != "_c10d_functional.all_to_all_single":
            held += alloc.nbytes if event >= 0 else -alloc.nbytes
            most = max(most, held)
    return most, kept


def run_peaks(run: Run) -> tuple[int, int]:
    """The same of a laid-out step."""
    held = most = kept = 0
    for moment, events in run.step.stretches:
        if moment.passes == "backward" and not kept:
            kept = held
        for event in events:
            buffer = event if event >= 0 else ~event
            if run.program.category[buffer] != "weight":
                held += run.sizes[buffer] if event >= 0 else -run.sizes[buffer]
                most = max(most, held)
    return most, kept


@pytest.mark.parametrize(("name", "mode"), [(WAN, "full"), (FLUX, "full"), (QWEN, "none")])
def test_a_rank_holds_what_diffusers_split_leaves_it(name: str, mode: str, request: pytest.FixtureRequest) -> None:
    peak, kept = run_peaks(estimated(name, mode))
    request.getfixturevalue("split")
    most, left = trace_peaks(recorded(name, mode))
    assert kept == pytest.approx(left, rel=0.01)
    assert peak == pytest.approx(most, rel=0.01)


def case(name: str, **strategy: Any) -> Case:
    profile = tiny(name)
    job = job_of(profile).model_dump(exclude={"model", "lora_targets"})
    config = {key: value for key, value in profile.config.items() if lookup.model(name).config[key] != value}
    return Case(name, config, job, strategy, {}, TINY[name][1])


def test_two_ranks_save_what_the_estimate_says() -> None:
    """But for the batch, which autograd saves as well and a step gives back to the loader."""
    run = estimated(QWEN, "none")
    alive: set[int] = set()
    backward = next(index for index, (moment, _) in enumerate(run.step.stretches) if moment.passes == "backward")
    for _, events in run.step.stretches[:backward]:
        alive.update(event for event in events if event >= 0)
        alive.difference_update(~event for event in events if event < 0)
    freed = {~event for _, events in run.step.stretches[backward:] for event in events if event < 0}
    saved = sum(run.sizes[buffer] for buffer in alive & freed if run.program.category[buffer] != "weight")
    ranks = measure(case(QWEN, **HALF))
    assert ranks[0] == ranks[1]
    assert saved == pytest.approx(ranks[0]["saved"], rel=0.02)


def test_no_backward_takes_what_autocast_makes_of_queries() -> None:
    assert measure(case(WAN, autocast="bf16")) == [{"refused": 1}] * 2
