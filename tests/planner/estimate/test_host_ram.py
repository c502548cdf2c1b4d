"""Host RAM phase by phase: every term worked by hand, what counts for every GPU and what once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid, job_for
from planner.estimate.estimate import estimate
from planner.estimate.host_ram import HostRam, host_ram
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.layout.sharding.host_memory import engine_host_bytes
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate
from planner.units import GIB
from tests.planner import hand_made

PROCESS_BYTES = 3 * GIB
"""Assumed of Python, torch and CUDA's libraries."""

SHARD_BYTES = 10_000_000_000
"""``max_shard_size`` of diffusers' ``save_pretrained``: "10GB"."""

WAN = lookup.model("wan2.1-t2v-1.3b")
LARGE = lookup.model("wan2.1-i2v-14b-480p")
SHORT = {"frames": 17, "height": 480, "width": 832}
SAMPLE = {"method": "sample", **SHORT}


def where(gpus: int = 1, gpu: str = "h200-141gb") -> Machine:
    return Machine.read({"gpu": gpu, "gpus": gpus, "host_ram": 4096 * GIB})


def laid_out(model: ModelProfile, asked: dict[str, Any], gpus: int = 1, trainer: str = "vplan", **strategy: Any) -> Run:
    job, machine = job_for(model, asked), where(gpus)
    configuration = Configuration.of(job, Strategy.read({"gradient_checkpointing": "full", **strategy}), machine)
    return lay_out(configuration, load_facts(configuration), grid(model, job), trainer)


def needs(
    model: ModelProfile, asked: dict[str, Any], gpus: int = 1, trainer: str = "vplan", **strategy: Any
) -> HostRam:
    return host_ram(laid_out(model, asked, gpus, trainer, **strategy), where(gpus))


def sampled(model: ModelProfile, **strategy: Any) -> HostRam:
    return needs(model, SAMPLE, gradient_checkpointing="none", **strategy)


def priced(job: Job, machine: Machine, **strategy: Any) -> Estimate:
    known = Strategy.read({"gradient_checkpointing": "full", **strategy})
    configuration = Configuration.of(job, known, machine)
    return estimate(configuration, load_facts(configuration))


def weights(run: Run) -> list[int]:
    return [run.sizes[buffer] for buffer in run.named("weight").values()]


def test_parts_sum_to_the_peak_and_the_estimate_names_it() -> None:
    found = priced(job_for(WAN, {**SHORT, "method": "full"}), where(), offload_optimizer="cpu", ema="cpu")
    assert found.host is not None
    assert found.host.breakdown.total == found.host_ram_bytes == max(found.host.phases.values())
    assert found.host.phases[found.host.phase] == found.host_ram_bytes
    assert list(found.host.phases) == ["load", "train", "save"]
    parts = found.host.breakdown
    assert found.host.phase == "save"
    assert parts.optimizer == 16 * WAN.parameters
    half = priced(job_for(WAN, {**SHORT, "method": "full"}), where(), offload_optimizer="cpu", weights_dtype="bf16")
    assert half.host is not None and half.host.breakdown.optimizer == pytest.approx(8 * WAN.parameters, rel=0.01)
    # The moving average; and of it, weights and states the copy that a checkpoint is written from.
    assert parts.ema == 4 * WAN.parameters
    assert parts.saving == (4 + 4 + 8) * WAN.parameters


def test_every_gpu_has_a_process_and_rank_0_saves() -> None:
    one, four = (needs(WAN, {**SHORT, "method": "full"}, gpus) for gpus in (1, 4))
    assert four.parts["process"] == 4 * one.parts["process"] == 4 * PROCESS_BYTES
    assert four.parts["saving"] == one.parts["saving"]
    assert four.phases["train"] - four.parts["saving"] == 4 * (one.phases["train"] - one.parts["saving"])


ALL = {**SHORT, "method": "full"}


@pytest.mark.parametrize(
    ("asked", "gpus", "strategy", "each"),
    [
        (ALL, 1, {}, 12),  # fp32 weights and AdamW's two states
        (ALL, 4, {"sharding": "ddp"}, 12),  # which rank 0 has for all
        (ALL, 1, {"ema": "gpu"}, 16),
        (ALL, 2, {"sharding": "fsdp"}, 12),
        (ALL, 2, {"sharding": "zero-3"}, 14),  # weights in 16 bits, fp32 masters and two states
    ],
)
def test_a_checkpoint_is_copied_and_stays_while_training_goes_on(
    asked: dict[str, Any], gpus: int, strategy: dict[str, Any], each: int
) -> None:
    found = needs(WAN, asked, gpus, **strategy)
    assert found.parts["saving"] == pytest.approx(each * WAN.parameters, rel=0.001)
    assert found.phases["save"] == found.phases["train"]


def test_adapters_that_are_split_are_gathered_beside() -> None:
    """For the LoRA files, on rank 0: fp32 weights, and two states."""
    run = laid_out(WAN, SHORT)
    adapter = sum(run.sizes[b] for b in run.named("gradient").values())
    assert needs(WAN, SHORT).parts["saving"] == 3 * adapter
    assert needs(WAN, SHORT, ema="gpu").parts["saving"] == (4 + 1) * adapter
    assert needs(WAN, SHORT, 2, sharding="fsdp").parts["saving"] == (3 + 1) * adapter


def test_a_copy_takes_at_most_half_of_what_is_free() -> None:
    """Else the step waits, and one file of 2 GiB is copied at a time."""
    run, copied = laid_out(WAN, ALL), 12 * WAN.parameters
    held = needs(WAN, ALL).phases["train"] - copied
    enough, short = (Machine.read({"gpu": "h200-141gb", "host_ram": held + 2 * copied - less}) for less in (0, 1))
    assert host_ram(run, enough).nbytes == held + copied
    assert host_ram(run, short).nbytes == host_ram(run, short).phases["save"] == held + 2 * GIB
    assert host_ram(run, short).phases["train"] == held


def test_zero_3_takes_what_is_trained_through_host_ram() -> None:
    """Each rank its own share, in 16 bits, when the weights are loaded; what stays in host RAM is not moved."""
    loading, offloaded = (
        needs(WAN, ALL, 2, sharding="zero-3", offload_params=where).phases["load"] for where in ("none", "cpu")
    )
    assert loading - 2 * PROCESS_BYTES == pytest.approx(2 * WAN.parameters, rel=0.001)
    run = laid_out(WAN, ALL, 2, sharding="zero-3", offload_params="cpu")
    assert offloaded == 2 * (PROCESS_BYTES + engine_host_bytes(run).weights + 2 * max(run.elements.values()))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_other_trainers_save_is_copied_first(method: str) -> None:
    asked = {**SHORT, "method": method}
    run = laid_out(WAN, asked)
    alone = needs(WAN, asked, 1, "diffusers")
    assert alone.phases["save"] - alone.phases["train"] == sum(run.sizes[b] for b in run.named("gradient").values())
    # Gathered on rank 0: every weight in 16 bits, frozen ones too.
    gathered = needs(WAN, asked, 2, "diffusers", sharding="zero-3")
    whole = 2 * sum(laid_out(WAN, asked, 2, sharding="zero-3").elements.values())
    assert gathered.phases["save"] - gathered.phases["train"] == whole
    assert whole == pytest.approx(2 * WAN.parameters, rel=0.02)


def test_others_save_a_large_model_file_by_file() -> None:
    found = needs(LARGE, {**SHORT, "method": "full"}, 1, "diffusers", weights_dtype="bf16")
    assert found.phases["save"] - found.phases["train"] == SHARD_BYTES < 2 * LARGE.parameters


def test_validation_on_a_moving_average_keeps_the_trained_weights_aside() -> None:
    asked = {**SHORT, "method": "full"}
    plain, averaged = (needs(WAN, asked, 1, "diffusers", validation_mode="on", ema=ema) for ema in ("none", "gpu"))
    for phase in ("denoise", "decode"):
        assert averaged.phases[phase] - plain.phases[phase] == pytest.approx(4 * WAN.parameters, rel=0.001)
    assert averaged.phases["train"] == plain.phases["train"]


def test_what_makes_room_for_the_vae_waits_in_host_ram() -> None:
    on, away = (needs(WAN, SHORT, validation_mode=mode) for mode in ("on", "offload"))
    assert away.phases["decode"] - on.phases["decode"] == sum(weights(laid_out(WAN, SHORT)))
    assert away.phases["denoise"] == on.phases["denoise"]


def test_what_from_pretrained_casts_is_in_host_ram_whole_once_per_process() -> None:
    """FLUX.1's script loads files in bf16 without a type, so in fp32. SD 1.5's files have what it is loaded in, and
    FLUX.2's script loads them as they are: both stay mapped."""
    flux, largest = lookup.model("flux.1-dev"), 0.7 * GIB
    ours, theirs = (needs(flux, {}, 2, trainer) for trainer in ("vplan", "diffusers"))
    assert theirs.phases["load"] == 2 * (PROCESS_BYTES + 4 * flux.parameters)
    assert ours.phases["train"] - ours.parts["saving"] == theirs.phases["train"] and theirs.phase == "load"
    for name in ("sd1.5", "flux.2-dev", "cogvideox-5b"):
        assert needs(lookup.model(name), {}, 1, "diffusers").phases["load"] < PROCESS_BYTES + largest
    in_fp16 = {"weights_dtype": "fp16", "autocast": "fp16"}
    qwen = lookup.model("qwen-image")
    assert needs(qwen, {}, 1, "diffusers", **in_fp16).phases["load"] == PROCESS_BYTES + 2 * qwen.parameters
    # A quantised one goes to the GPU weight by weight.
    loads = [needs(WAN, SHORT, 1, trainer, weights_dtype="nf4").phases["load"] for trainer in ("diffusers", "vplan")]
    assert loads[0] == loads[1]


def test_easyanimate_and_videox_fun_make_models_in_fp32_on_the_cpu() -> None:
    """Rehearsed on EasyAnimate with 6 of its blocks: 4.35 GiB for 1.16 B parameters, its text encoder mapped (the
    least is what each process takes by itself). Wan's text encoder is read whole before; FLUX.1 stays mapped."""
    easy, swapped = lookup.model("easyanimate-v5.1-7b"), {"text_encoder": "swapped", "vae": "swapped"}
    found = needs(easy, {}, 1, "easyanimate", **swapped)
    assert found.phases["load"] == PROCESS_BYTES + 4 * easy.parameters and found.phase == "load"
    assert found.phases["train"] > PROCESS_BYTES + 2 * easy.text_encoders[0].parameters
    encoder = 2 * WAN.text_encoders[0].parameters
    for how in ("swapped", "resident"):
        wan = needs(WAN, SHORT, 1, "videox-fun", text_encoder=how, vae=how)
        assert wan.phases["load"] == pytest.approx(PROCESS_BYTES + 4 * WAN.parameters + encoder, rel=0.01)
    flux = needs(lookup.model("flux.1-dev"), {}, 1, "videox-fun", **swapped)
    assert flux.phases["load"] < PROCESS_BYTES + 0.7 * GIB


def test_encoders_of_sd_scripts_wait_for_training_beside_the_model_that_is_cast() -> None:
    """Behind its caches T5 is back in host RAM until training begins; over fp8 FLUX.1 was cast there before. One that
    stays on the GPU is cast from its file's fp16 to bf16 on the CPU, and mapped where fp16 is asked for."""
    flux, cached = lookup.model("flux.1-dev"), {"text_encoder": "cached"}
    encoders = 2 * sum(encoder.parameters for encoder in flux.text_encoders)
    resident = {"text_encoder": "resident"}
    half = {**resident, "weights_dtype": "fp16", "autocast": "fp16", "compute_dtype": "fp16"}
    plain, in_bf16, in_fp16 = (needs(flux, {}, 1, "sd-scripts", **each) for each in (cached, resident, half))
    for found in (plain, in_bf16):
        assert found.phases["load"] - in_fp16.phases["load"] == pytest.approx(encoders, rel=0.01)
        assert found.phases["train"] == in_fp16.phases["train"]
    cast = needs(flux, {}, 1, "sd-scripts", weights_dtype="fp8", autocast="bf16", **cached)
    assert cast.phases["encode"] == pytest.approx(PROCESS_BYTES + encoders + flux.parameters, rel=0.01)
    assert cast.phase == "encode"
    full = needs(flux, {"method": "full"}, 1, "sd-scripts", weights_dtype="bf16", autocast="bf16", **cached)
    assert "encode" not in full.phases  # it deletes them first


def test_ai_toolkit_moves_all_but_the_vae_to_host_ram_while_it_caches_latents() -> None:
    flux = lookup.model("flux.1-dev")
    encoders = 2 * sum(encoder.parameters for encoder in flux.text_encoders)
    resident = {"text_encoder": "resident"}
    cached, each_time = (needs(flux, {}, 1, "ai-toolkit", vae=vae, **resident) for vae in ("cached", "resident"))
    assert cached.phases["encode"] == pytest.approx(PROCESS_BYTES + 2 * flux.parameters + encoders, rel=0.01)
    assert "encode" not in each_time.phases
    # Its files are in bf16 and mapped; Wan's are in fp32, and all of it is cast.
    assert cached.phases["load"] < PROCESS_BYTES + 0.2 * GIB
    assert needs(WAN, SHORT, 1, "ai-toolkit").phases["load"] == PROCESS_BYTES + 2 * WAN.parameters


def test_musubi_tuner_reads_a_model_whole_where_blocks_are_swapped() -> None:
    """Wan 1.3B took 2.5 GiB more in rehearsals, with 5 blocks swapped and with 25; none where nothing is. A file
    in 16 bits that is cast whole (``--fp8_base`` alone) stays beside its cast."""
    few, many, none = (needs(WAN, SHORT, 1, "musubi-tuner", swap_blocks=blocks) for blocks in (5, 25, 0))
    assert few.phases["load"] == many.phases["load"] == PROCESS_BYTES + 2 * WAN.parameters
    assert none.phases["load"] < PROCESS_BYTES + 0.1 * GIB
    fp8 = {"weights_dtype": "fp8", "autocast": "bf16", "swap_blocks": 5}
    loads = [needs(WAN, SHORT, 1, f"musubi-tuner{version}", **fp8).phases["load"] for version in ("", "@cast-whole")]
    assert loads == [PROCESS_BYTES + WAN.parameters, PROCESS_BYTES + 3 * WAN.parameters]


def test_an_encoder_larger_than_the_card_waits_in_host_ram() -> None:
    job = job_for(WAN, SHORT)
    small, large = (priced(job, Machine.read({"gpu": gpu, "host_ram": 64 * GIB})) for gpu in ("8GB", "24GB"))
    assert small.host is not None and large.host is not None
    assert small.host.phases["encode"] == PROCESS_BYTES + 2 * WAN.text_encoders[0].parameters
    assert "encode" not in large.host.phases


def test_a_swapped_encoder_waits_between_its_turns() -> None:
    cached, swapped = (needs(WAN, SHORT, text_encoder=kind) for kind in ("cached", "swapped"))
    assert swapped.phases["train"] - cached.phases["train"] == 2 * WAN.text_encoders[0].parameters


def test_the_loader_has_its_workers_batches() -> None:
    run = laid_out(WAN, {**SHORT, "batch_size": 2})
    latents = 4 * 16 * 5 * 60 * 104  # fp32, 5 latent frames of 60x104
    assert host_ram(run, where()).parts["data"] == 2 * latents
    run.host.loader_workers = 4
    assert host_ram(run, where()).parts["data"] == 2 * latents * (2 * 4 + 1)
    clip = 5 * 3 * 17 * 480 * 832  # uint8 and fp32
    resident = laid_out(WAN, SHORT, vae="resident")
    assert host_ram(resident, where()).parts["data"] == clip


def test_swapped_blocks_take_what_they_are() -> None:
    run = laid_out(WAN, SHORT)
    last = [run.sizes[buffer] for name, buffer in run.named("weight").items() if name.startswith("blocks.29.")
            and "lora" not in name]  # fmt: skip
    one = needs(WAN, SHORT, swap_blocks=1)
    assert one.phases["train"] - needs(WAN, SHORT).phases["train"] == sum(last)


# ---- sampling


def test_group_offload_as_the_reference_worked_it_out() -> None:
    """Wan I2V 14B: the model pageable 30.5 GiB; with a stream 45.8 GiB pinned, and 14.0 for UMT5."""
    plain, stream = (sampled(LARGE, group_offload="leaf", group_offload_stream=stream) for stream in (False, True))
    assert plain.phases["denoise"] - PROCESS_BYTES == pytest.approx(30.5 * GIB, rel=0.005)
    assert stream.phases["denoise"] - PROCESS_BYTES == pytest.approx(45.8 * GIB, rel=0.005)
    assert stream.phases["encode"] - PROCESS_BYTES == pytest.approx(14.0 * GIB, rel=0.005)
    block = sampled(LARGE, group_offload="block", group_offload_stream=True)
    # By block what is in no list is not pinned, and so no layer of UMT5; every pinned copy is made before the first
    # pageable one goes. By leaf they go one after another.
    assert block.phases["denoise"] < stream.phases["denoise"] < block.phases["denoise"] + GIB
    assert block.phases["encode"] - PROCESS_BYTES == pytest.approx(2 * LARGE.text_encoders[0].parameters, rel=0.005)
    assert block.phases["load"] - PROCESS_BYTES == pytest.approx((30.5 + 45.2) * GIB, rel=0.005)
    assert stream.phases["load"] == stream.phases["denoise"]


def test_a_pipeline_in_turns_is_whole_in_host_ram() -> None:
    turns, resident = (sampled(WAN, text_encoder=kind, vae=kind) for kind in ("swapped", "resident"))
    encoder, vae = 2 * WAN.text_encoders[0].parameters, 2 * WAN.vae.parameters
    model = sum(weights(laid_out(WAN, SAMPLE, gradient_checkpointing="none")))
    assert turns.phases["encode"] == PROCESS_BYTES + encoder + vae + model
    assert turns.phases["denoise"] == PROCESS_BYTES + encoder + vae
    assert turns.phases["decode"] == PROCESS_BYTES + encoder + vae + model
    assert resident.phases["denoise"] == PROCESS_BYTES


def test_a_machine_without_the_ram_is_told_when_it_is_short() -> None:
    job = job_for(LARGE, SAMPLE)
    found = priced(
        job, Machine.read({"gpu": "24GB", "host_ram": 32 * GIB}), gradient_checkpointing="none", group_offload="block"
    )
    assert (found.verdict, found.limit) == ("no", "host")
    enough = Machine.read({"gpu": "24GB", "host_ram": found.host_ram_bytes})
    again = priced(job, enough, gradient_checkpointing="none", group_offload="block")
    assert again.verdict == "fits"


# ---- what holds for any shape

HOLDS: list[dict[str, Any]] = [
    {},
    {"gradient_checkpointing": "offload"},
    {"gradient_checkpointing": "full", "swap_blocks": 2},
    {"offload_optimizer": "cpu"},
    {"text_encoder": "swapped", "vae": "swapped"},
    {"ema": "cpu"},
]
"""Each but the first keeps something in host RAM that the first does not."""


def by_hand(held: dict[str, Any], shape: dict[str, int], machine: Machine = hand_made.ONE) -> HostRam:
    return host_ram(hand_made.laid_out(machine, shape, **held), machine)


@given(st.sampled_from(HOLDS), hand_made.SHAPE, st.sampled_from("BFHWR"), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_more_of_anything_never_needs_less(held: dict[str, Any], shape: dict[str, int], atom: str, more: int) -> None:
    found, larger = by_hand(held, shape), by_hand(held, {**shape, atom: shape[atom] + more})
    assert found.nbytes <= larger.nbytes
    assert all(nbytes <= larger.phases[phase] for phase, nbytes in found.phases.items())
    assert sum(found.parts.values()) == found.nbytes == max(found.phases.values())


@given(st.sampled_from(HOLDS), hand_made.SHAPE)
@settings(max_examples=50, deadline=None)
def test_what_is_held_adds_and_every_gpu_adds(held: dict[str, Any], shape: dict[str, int]) -> None:
    assert by_hand({}, shape).nbytes <= by_hand(held, shape).nbytes
    assert by_hand(held, shape).nbytes < by_hand(held, shape, hand_made.EIGHT).nbytes
