"""Terms of the layout as numbers that stand on their own: worked from the model's and the clip's sizes, without a
constant of the code."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.estimate.estimate import estimate
from planner.estimate.work import step_work
from planner.layout.experts import expert_assumption
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Estimate

MACHINE = Machine(gpu="b200", host_ram=2**42)
MODELS = {"wan2.1-t2v-1.3b": 1_418_996_800, "cogvideox-2b": 1_693_783_872, "sd3.5-medium": 2_243_171_520}
"""Their parameters."""
CLIP = {"frames": 49, "height": 512, "width": 768}


def laid_out(name: str, job: dict[str, Any], trainer: str = "vplan", **fields: Any) -> Run:
    model = lookup.model(name)
    whole = job_for(model, {"model": name, **job})
    configuration = Configuration.of(whole, Strategy.read(fields), MACHINE)
    known = load_facts(configuration)
    return lay_out(configuration, known, grid(model, whole), trainer)


def priced(name: str, job: dict[str, Any], trainer: str = "vplan", **fields: Any) -> Estimate:
    whole = job_for(lookup.model(name), {"model": name, **job})
    configuration = Configuration.of(whole, Strategy.read({"gradient_checkpointing": "full", **fields}), MACHINE)
    return estimate(configuration, load_facts(configuration), trainer)


def denoise_bytes(name: str, guided: bool) -> int:
    validation = {**CLIP, "cfg": guided}
    return priced(name, {**CLIP, "validation": validation}, validation_mode="on").phases["denoise"].allocated_bytes


def test_ltx_denoises_the_prompt_and_the_empty_prompt_as_one_batch() -> None:
    """Its pipeline concatenates both (diffusers pipelines/ltx/pipeline_ltx.py): guidance adds a sample's activations.

    The clip is 7 x 16 x 24 = 2688 tokens of 2048 numbers. Where the last block turns its queries, a sample has 8 of
    such tensors in fp32 and 3 in 16 bits; the prompt of 128 tokens adds less than 4 MiB.
    """
    sample = 2688 * 2048 * (8 * 4 + 3 * 2)
    more = denoise_bytes("ltx-video-2b", guided=True) - denoise_bytes("ltx-video-2b", guided=False)
    assert sample == 209_190_912
    assert sample < more < sample + 4 * 2**20


def test_wan_is_called_twice_so_guidance_adds_nothing() -> None:
    clip = {"frames": 17, "height": 480, "width": 832}
    guided, plain = (
        priced("wan2.1-t2v-1.3b", {**clip, "validation": {**clip, "cfg": cfg}}, validation_mode="on").phases["denoise"]
        for cfg in (True, False)
    )
    assert guided.allocated_bytes == plain.allocated_bytes


def test_a_script_holds_the_batch_that_a_resident_vae_encodes_in_fp32() -> None:
    """Three colours of 4 bytes for every pixel of the clip, of this batch and of the next."""
    clip = {"frames": 81, "height": 480, "width": 832, "batch_size": 2}
    run = laid_out("wan2.1-t2v-1.3b", clip, "diffusers", vae="resident")
    ops = run.program.op
    assert [run.sizes[buffer] for buffer in range(len(ops)) if ops[buffer].startswith("pixels")] == [
        2 * 81 * 480 * 832 * 3 * 4,
        2 * 81 * 480 * 832 * 3 * 4,
    ]


def test_both_experts_that_are_trained_whole_are_loaded_whole_and_have_no_adapter() -> None:
    """14,288,491,584 parameters in fp32, and the cosines and sines of 1024 positions x 128 numbers."""
    one, both = (
        priced("wan2.2-t2v-a14b", {"method": "full", "frames": 17, "experts": experts}) for experts in ("high", "both")
    )
    expert = 4 * 14_288_491_584 + 2 * 1024 * 128 * 4
    blocks_of_512 = -(-expert // 512)
    assert both.phases["load"].allocated_bytes - one.phases["load"].allocated_bytes == 512 * blocks_of_512


def test_simpletuners_step_reads_and_writes_220_bytes_a_number() -> None:
    """Its AdamW over 16-bit adapters: four roundings (three of 46 bytes, 48 for the one that divides), two decays, a
    root, a copy and a difference. Adapters of rank 16 are two of 1536 x 16 numbers around 8 square layers in 30 blocks.
    """
    adapters = 30 * 8 * 2 * 1536 * 16
    fields = {"adapter_dtype": "bf16", "autocast": "none"}
    ours, theirs = (
        step_work(laid_out("wan2.1-t2v-1.3b", {"frames": 17, "lora_rank": 16}, trainer, **fields)).optimizer
        for trainer in ("vplan", "simpletuner")
    )
    without = 18 * 2  # what torch's AdamW over lists moves of 16-bit numbers, which is not run
    assert theirs["pointwise", 0].nbytes - ours["pointwise", 0].nbytes == (220 - without) * adapters


@pytest.mark.parametrize(("name", "parameters"), MODELS.items())
def test_a_step_over_a_whole_model_moves_every_parameter(name: str, parameters: int) -> None:
    """Recordings hold a few of the blocks, and count three fp32 numbers for each parameter that they step. 20 more are
    moved by operators that return nothing: 18 by AdamW over lists, 2 by what clips."""
    work = step_work(laid_out(name, {"method": "full"}, weights_dtype="fp32")).optimizer
    assert work["pointwise", 0].nbytes == pytest.approx((3 + 20) * 4 * parameters, rel=1e-4)


@pytest.mark.parametrize("adapter_dtype", ["fp32", "bf16"])
def test_a_moving_average_takes_two_fp32_copies_of_the_largest_adapter_to_update(adapter_dtype: str) -> None:
    """The difference and its product with the decay, in fp32 whatever trains: 1920 x 16 numbers of 4 bytes."""
    run = laid_out("cogvideox-2b", {"lora_rank": 16}, ema="gpu", adapter_dtype=adapter_dtype)
    ops = run.program.op
    update = [run.sizes[buffer] for buffer in range(len(ops)) if ops[buffer] == "ema update"]
    assert update == [1920 * 16 * 4] * 4  # in the first step and in a later one


@pytest.mark.parametrize("mode", ["on", "offload"])
def test_what_a_script_encodes_for_validation_is_gone_once_it_is_over(mode: str) -> None:
    clip = {"frames": 17, "height": 480, "width": 832}
    off, on = (
        priced("wan2.1-t2v-1.3b", {**clip, **more}, "diffusers", validation_mode=which).phases["save"]
        for more, which in (({}, "off"), ({"validation": clip}, mode))
    )
    assert on.allocated_bytes == off.allocated_bytes


def test_the_other_expert_is_another_run_in_training_and_loaded_in_turn_in_a_sample() -> None:
    model = lookup.model("wan2.2-t2v-a14b")
    for method, word in (("lora", "one run each"), ("full", "one run each"), ("sample", "at a time")):
        said = expert_assumption(model, job_for(model, {"model": model.name, "method": method, "frames": 17}))
        assert said and word in said
