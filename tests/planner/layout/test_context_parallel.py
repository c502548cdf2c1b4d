"""Samples split over GPUs: what is divided, what is exchanged, what it goes with, and what is refused by name.

That the bytes are those of diffusers' own split, `tests/contract/test_context_parallel.py` shows.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.estimate.traffic import traffic
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate
from planner.spec.rules import resolve

WAN, FLUX = "wan2.1-t2v-1.3b", "flux.1-dev"
CLIP = {"frames": 17, "height": 480, "width": 832}


def cards(count: int) -> Machine:
    return Machine(gpu="h100-80gb", gpus=count, host_ram=2**40)


def records(name: str, parts: int, gpus: int, said: dict[str, Any], **fields: Any) -> tuple[Job, Strategy, Machine]:
    job, machine = job_for(lookup.model(name), said), cards(gpus)
    typed = Strategy.read({"context_parallel": parts, "gradient_checkpointing": "full", **fields})
    strategy = resolve(job, typed, machine)
    refuse_contradictions(Configuration.of(job, strategy, machine))
    return job, strategy, machine


def laid_out(name: str, parts: int, gpus: int = 0, said: dict[str, Any] | None = None, **fields: Any) -> Run:
    job, strategy, machine = records(name, parts, gpus or parts, CLIP if said is None else said, **fields)
    model = lookup.model(name)
    configuration = Configuration.of(job, strategy, machine)
    return lay_out(configuration, load_facts(configuration), grid(model, job))


def priced(name: str, parts: int, gpus: int = 0, said: dict[str, Any] | None = None, **fields: Any) -> Estimate:
    job, strategy, machine = records(name, parts, gpus or parts, said or CLIP, **fields)
    configuration = Configuration.of(job, strategy, machine)
    return estimate(configuration, load_facts(configuration))


HALF = {"adapter_dtype": "bf16", "autocast": "none", "master_weights": "fp32"}
"""What context parallelism trains in, for one GPU."""


@pytest.mark.parametrize("mode", ["none", "full", "offload"])
def test_every_doubling_leaves_each_gpu_less(mode: str) -> None:
    found = [priced(WAN, parts, gradient_checkpointing=mode, **HALF) for parts in (1, 2, 4)]
    peaks = [entry.phases["train"].allocated_bytes for entry in found]
    assert peaks == sorted(peaks, reverse=True)
    loaded = {entry.phases["load"].allocated_bytes for entry in found}
    assert len(loaded) == 1  # weights are whole on every GPU
    for more, less in itertools.pairwise(peak - min(loaded) for peak in peaks):
        assert more / 2 < less < 0.8 * more  # so are the text, and what is made outside the blocks


def test_more_frames_never_need_less() -> None:
    sizes = [priced(WAN, 2, said={**CLIP, "frames": frames}).peak.allocated_bytes for frames in (5, 13, 17, 33, 81)]
    assert sizes == sorted(sizes)


def test_the_exchange_is_around_attention_over_the_clip() -> None:
    run = laid_out(WAN, 2)
    tokens = 5 * 30 * 52
    one = 2 * 1536 * tokens // 2
    made = [run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op == "all-to-all"]
    blocks = lookup.model(WAN).blocks
    # Forward, recompute and backward of 30 blocks, and of each only the first attention: three buffers a time.
    assert len(made) == 3 * 3 * blocks and max(made) == 6 * one
    assert run.work.exchanged_bytes == 3 * 4 * blocks * one
    assert len([op for op in laid_out(FLUX, 2, said={}).program.op if op == "all-to-all"]) == 3 * 3 * 57


def test_half_of_what_is_exchanged_goes_to_the_other_gpu_while_attention_waits() -> None:
    run, alone = laid_out(WAN, 2), laid_out(WAN, 1, 2, **HALF)
    assert traffic(run).gpu_waiting_bytes == run.work.exchanged_bytes // 2
    assert traffic(alone).gpu_waiting_bytes == 0
    twice = laid_out(WAN, 2, gradient_accumulation=2)
    assert traffic(twice).gpu_waiting_bytes == run.work.exchanged_bytes


def test_two_gpus_on_one_sample_are_faster_than_one_but_not_twice() -> None:
    one, two = (priced(WAN, parts, said={**CLIP, "frames": 81}, **HALF).step_seconds for parts in (1, 2))
    assert one / 2 < two < one


def test_the_group_that_exchanges_has_a_communicator() -> None:
    contexts = [priced(WAN, parts, gpus, **HALF).breakdown.context for parts, gpus in ((1, 1), (1, 2), (2, 2))]
    assert contexts[1] - contexts[0] == contexts[2] - contexts[1] == 600 * 2**20  # a communicator (NVIDIA/nccl#964)


def test_samples_are_made_by_several_gpus_together() -> None:
    said = {**CLIP, "frames": 81, "method": "sample"}
    one, two = (priced(WAN, parts, said=said, gradient_checkpointing="none") for parts in (1, 2))
    assert two.phases["denoise"].allocated_bytes < one.phases["denoise"].allocated_bytes
    assert two.phases["decode"].allocated_bytes == one.phases["decode"].allocated_bytes
    assert one.step_seconds / 2 < two.step_seconds < one.step_seconds


@pytest.mark.parametrize(("parts", "gpus", "sharding"), [(2, 2, "none"), (2, 4, "ddp"), (4, 8, "ddp")])
def test_gpus_that_share_no_sample_train_side_by_side(parts: int, gpus: int, sharding: str) -> None:
    _, strategy, _ = records(WAN, parts, gpus, CLIP)
    assert strategy.sharding == sharding
    assert (strategy.autocast, strategy.adapter_dtype, strategy.master_weights) == ("none", "bf16", "fp32")


def test_shares_of_fsdp_are_of_all_gpus() -> None:
    shares = [priced(WAN, parts, 4, sharding="fsdp").breakdown.weights for parts in (1, 2, 4)]
    assert len(set(shares)) == 1


@pytest.mark.parametrize(
    ("name", "parts", "gpus", "said", "fields", "fault", "fix"),
    [
        ("cogvideox-2b", 2, 2, {}, {}, "diffusers has no parallel plan", "--context-parallel 1"),
        ("ltx-2", 2, 2, {}, {}, "its text mask is per head", "--context-parallel 1"),
        ("ltx-video-2b", 2, 2, {}, {}, "its text mask is per head", "--context-parallel 1"),
        (WAN, 5, 5, CLIP, {}, "does not divide the 12 attention heads", "--context-parallel 1"),
        (WAN, 4, 4, {"frames": 5, "height": 464, "width": 848}, {}, "tokens of the clip", "--height"),
        (FLUX, 2, 2, {"text_tokens": 511}, {}, "does not divide the 511 tokens of the text", "--text-tokens"),
        (WAN, 2, 3, CLIP, {}, "does not divide 3 GPU", "--gpus 4"),
        (WAN, 2, 2, CLIP, {"sharding": "zero-3"}, "DeepSpeed splits sequences in its own way", "--sharding fsdp"),
        (WAN, 2, 2, CLIP, {"autocast": "bf16"}, "queries are fp32 but", "--autocast none"),
        (WAN, 2, 2, CLIP, {"validation_mode": "on"}, "validation under context_parallel", "--validation-mode off"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    name: str, parts: int, gpus: int, said: dict[str, Any], fields: dict[str, Any], fault: str, fix: str
) -> None:
    with pytest.raises(VplanError, match=fault) as refusal:
        laid_out(name, parts, gpus, said, **fields)
    assert fix in refusal.value.fix
