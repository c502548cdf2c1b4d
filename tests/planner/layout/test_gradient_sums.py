"""The workspace of sums that make gradients, worked out of a tape's events."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import grid, job_for
from planner.layout.gradient_sums import SUM_WORKSPACE
from planner.layout.optimizer.reduction_workspace import column_mean_bytes
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy

Z_IMAGE = lookup.model("z-image")
H100 = card_lookup.gpu("h100-80gb")
TOKENS = 64 * 64 + 512


def laid_out(method: str = "full", **strategy: Any) -> Run:
    shape = {"frames": 1, "height": 1024, "width": 1024}
    job = job_for(Z_IMAGE, {"method": method, **shape})
    known = Strategy.read({"gradient_checkpointing": "full", **strategy})
    configuration = Configuration.of(job, known, Machine(gpu="h100-80gb", gpus=2 if known.sharding != "none" else 1))
    return lay_out(configuration, load_facts(configuration), grid(Z_IMAGE, job))


def workspaces(run: Run, module_list: str = "layers", block: int = 29) -> list[int]:
    """Bytes of the workspaces in a layer's backward, in order; by default Z-Image's last."""
    made = [
        event
        for moment, events in run.step.stretches
        if (moment.module_list, moment.block, moment.passes) == (module_list, block, "backward")
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


def test_a_matrix_above_2_gib_is_summed_in_halves() -> None:
    """8,192 columns of 262,144 rows in 16 bits, as in Stable Cascade's prior: twice 512 MiB, one after the other, on a
    virtual H200 (torch 2.13)."""
    h200 = card_lookup.gpu("h200-141gb")
    assert column_mean_bytes(2**18, 8192, h200, 2) == column_mean_bytes(2**17, 8192, h200, 2) == 512 << 20
    assert column_mean_bytes(2**18, 8192, h200, 4) == column_mean_bytes(2**16, 8192, h200, 4)


def test_sums_over_a_part_of_the_tokens_are_as_long_as_that_part() -> None:
    """A block of CogVideoX-5B at 9 frames of 480x720, text and clip joined in attention and feed-forward (rehearsed
    with torch 2.13): gate, shift and scale of 4,050 tokens of the clip, twice, of which the gates' sums are of 16 bits;
    five biases of 3,072 numbers and one of 12,288 over all 4,276; none over the 226 of the text alone."""
    model = lookup.model("cogvideox-5b-i2v")
    job = job_for(model, {"method": "full", "frames": 9, "height": 480, "width": 720})
    strategy = Strategy(weights_dtype="fp32", autocast="bf16", gradient_checkpointing="full")
    configuration = Configuration.of(job, strategy, Machine(gpu="h100-80gb"))
    run = lay_out(configuration, load_facts(configuration), grid(model, job))
    clip, both, wide = (column_mean_bytes(*shape, H100) for shape in ((4050, 3072), (4276, 3072), (4276, 12288)))
    assert (clip, both, wide) == (96 << 20, 105_381_888, 132 << 20)
    assert sorted(workspaces(run, "transformer_blocks", 20)) == [clip] * 6 + [both] * 5 + [wide]


def test_a_lora_of_the_modulation_sums_over_the_clip_in_its_own_format() -> None:
    """EasyAnimate's adapters are in its modulation, whose gates, shifts and scales take a gradient of 16 bits from the
    3,072 tokens of the clip; none of the 256 of the text takes a workspace (rehearsed with torch 2.13)."""
    model = lookup.model("easyanimate-v5.1-7b")
    job = job_for(model, {"method": "lora", "frames": 9, "height": 512, "width": 512})
    strategy = Strategy(gradient_checkpointing="full", autocast="bf16")
    configuration = Configuration.of(job, strategy, Machine(gpu="h100-80gb"))
    run = lay_out(configuration, load_facts(configuration), grid(model, job))
    assert workspaces(run, "transformer_blocks", 20) == [column_mean_bytes(3072, 3072, H100)] * 6


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


def test_what_is_made_behind_them_has_one_number_in_all_buckets() -> None:
    """Larger buckets have workspaces that smaller ones lack: an average of the weights must not lie where another
    bucket has one."""
    averages = set()
    for side in (512, 1024):
        job = job_for(Z_IMAGE, {"method": "full", "frames": 1, "height": side, "width": side})
        strategy = Strategy(gradient_checkpointing="full", ema="gpu")
        configuration = Configuration.of(job, strategy, Machine(gpu="h100-80gb"))
        run = lay_out(configuration, load_facts(configuration), grid(Z_IMAGE, job))
        kept = [events for moment, events in run.load.stretches if moment.passes == "ema"]
        averages.add(tuple(itertools.chain.from_iterable(kept)))
    assert len(averages) == 1 and averages != {()}
