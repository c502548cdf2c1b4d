"""The estimate of whole runs: phases, verdicts, buckets, accumulation, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import job_for
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.layout.margin import interval
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate
from planner.units import GIB, power_of_two

MODEL = "wan2.1-t2v-1.3b"
PROFILE = lookup.model(MODEL)
CHECKPOINTED = Strategy(gradient_checkpointing="full")


def job(**fields: Any) -> Job:
    return job_for(lookup.model(MODEL), {"model": MODEL, **fields})


def priced(asked: Job, gpu: str = "rtx4090", machine: dict[str, Any] | None = None, **strategy: Any) -> Estimate:
    known = Strategy.read({"gradient_checkpointing": "full", **strategy})
    where = Machine.read({"gpu": gpu, "host_ram": 64 * GIB, **(machine or {})})
    configuration = Configuration.of(asked, known, where)
    return estimate(configuration, load_facts(configuration))


def test_a_phase_holds_the_highest_of_each_counter() -> None:
    found = priced(job())
    assert list(found.phases) == ["encode", "load", "first_step", "train", "optimizer", "save"]
    for name in ("allocated_bytes", "reserved_bytes", "device_bytes"):
        assert getattr(found.peak, name) == max(getattr(phase, name) for phase in found.phases.values())
    # The first step's forward and backward need more tensors than its optimizer, whatever stays reserved behind them.
    assert found.phases["first_step"].allocated_bytes > 3 * found.phases["load"].allocated_bytes


@pytest.mark.parametrize("method", ["lora", "full"])
def test_accumulated_gradients_are_there_while_the_next_micro_batch_runs(method: str) -> None:
    once, twice = (
        priced(job(method=method), gpu="h100-80gb", gradient_accumulation=number).phases["train"] for number in (1, 2)
    )
    many = priced(job(method=method), gpu="h100-80gb", gradient_accumulation=8).phases["train"]
    assert twice.allocated_bytes > once.allocated_bytes
    assert many == twice


def test_a_set_of_buckets_needs_what_its_worst_needs_and_may_need_more() -> None:
    shapes = [{"frames": 81, "height": 480, "width": 832}, {"frames": 49, "height": 720, "width": 1280}]
    mixed = priced(job(buckets=shapes), expandable_segments=False)
    alone = [priced(job(**shape), expandable_segments=False) for shape in shapes]
    # A block of another shape may be handed out whole, up to 1 MiB more than was asked for.
    assert mixed.peak.allocated_bytes == pytest.approx(max(found.peak.allocated_bytes for found in alone), rel=1e-3)
    assert mixed.peak.reserved_bytes > max(found.peak.reserved_bytes for found in alone)


def test_a_modulation_per_token_stays_where_it_is_but_is_saved_with_every_checkpoint_by_others() -> None:
    """Wan 2.2 TI2V: tokens x 6 x 3,072 in bf16, given to all blocks; tokens x 3,072 handed on by each."""
    profile = lookup.model("wan2.2-ti2v-5b")
    asked = job_for(profile, {"frames": 121, "height": 704, "width": 1280})
    where = Machine.read({"gpu": "rtx4090", "host_ram": 256 * GIB})
    known = Strategy.read({"gradient_checkpointing": "offload"})
    configuration = Configuration.of(asked, known, where)
    ours, theirs = (
        estimate(configuration, load_facts(configuration), trainer).host.breakdown.activations
        for trainer in ("vplan", "diffusion-pipe")
    )
    tokens = 31 * 22 * 40
    assert ours == 29 * 2 * tokens * 3072
    handed_on, alike = power_of_two(2 * tokens * 3072), power_of_two(2 * tokens * 6 * 3072)
    assert theirs == 29 * handed_on + 30 * alike, "which torch pins"


def test_on_unified_memory_what_is_offloaded_comes_out_of_the_same_budget() -> None:
    found = priced(job(method="full"), gpu="gb10", offload_optimizer="cpu")
    device = interval(found.peak.device_bytes)[1]
    assert found.verdict == "fits" and found.host_ram_bytes > GIB
    # Leave so much that the device's share alone would fit with one GiB to spare.
    reserve = card_lookup.gpu("gb10").allocatable_bytes - device - GIB
    assert priced(job(method="full"), "gb10", {"reserve": reserve}, offload_optimizer="cpu").verdict != "fits"


def test_what_is_not_counted_is_said_and_never_called_fits() -> None:
    asked, where = job(), Machine.read({"gpu": "h100-80gb", "host_ram": 64 * GIB})
    configuration = Configuration.of(asked, CHECKPOINTED, where)
    known = load_facts(configuration)
    unknown = known._replace(around={key: tape for key, tape in known.around.items() if "Autoencoder" not in key})
    assert estimate(configuration, known).verdict == "fits"
    found = estimate(configuration, unknown)
    assert found.verdict == "tight"
    assert any("AutoencoderKLWan" in assumption for assumption in found.assumptions)


def test_what_samples_that_come_encoded_make_unneeded_takes_no_verdict_away() -> None:
    """`vplan train` takes some models' samples encoded only: a VAE without a recording does nothing in it."""
    coming_encoded = lookup.model("ltx-2.3")
    for profile, verdict in ((PROFILE, "tight"), (coming_encoded, "fits")):
        asked = job_for(profile, {"model": profile.name, "frames": 25, "height": 256, "width": 256})
        where = Machine(gpu="h200", host_ram=128 * GIB)
        configuration = Configuration.of(asked, CHECKPOINTED, where)
        known = load_facts(configuration)
        lacking = known._replace(around={key: tape for key, tape in known.around.items() if "encode" not in key})
        assert estimate(configuration, known).verdict == "fits"
        told = estimate(configuration, lacking)
        assert told.verdict == verdict
        assert any(f"{profile.vae.class_name} has no recording to encode" in note for note in told.assumptions)


def test_convolutions_that_a_vae_splits_are_asked_about_at_the_most() -> None:
    mochi = lookup.model("mochi-1")
    asked = lookup.job_for(mochi, {"frames": 163})
    for gib, verdict in ((79, "fits"), (60, "tight")):
        where = Machine(gpu=card_lookup.gpu(f"{gib}GiB").name, host_ram=64 * GIB)
        found = estimate(
            Configuration.of(asked, CHECKPOINTED, where), load_facts(Configuration.of(asked, CHECKPOINTED, where))
        )
        assert found.peak.device_bytes < found.phases["encode"].device_bytes + 20 * GIB < found.high_bytes
        assert found.verdict == verdict
        assert any("AutoencoderKLMochi splits convolutions" in note for note in found.assumptions)
    tiled = CHECKPOINTED.replace(vae_tiling=True)
    configuration = Configuration.of(asked, tiled, where)
    assert not any("splits" in note for note in estimate(configuration, load_facts(configuration)).assumptions)


def test_a_text_encoder_larger_than_the_card_encodes_layer_by_layer() -> None:
    large, small = priced(job(), gpu="24GB"), priced(job(), gpu="8GB")
    assert large.phases["encode"].allocated_bytes > 2 * PROFILE.text_encoders[0].parameters
    assert small.phases["encode"].device_bytes < small.budget_bytes
    assert any("layer by layer" in assumption for assumption in small.assumptions)
    assert not any("layer by layer" in assumption for assumption in large.assumptions)


def test_a_text_encoder_that_another_command_runs_needs_no_room_in_this_one() -> None:
    """musubi-tuner's caching script moves it to the GPU whole."""
    configuration = Configuration.of(job(), CHECKPOINTED, Machine(gpu=card_lookup.gpu("8GB").name, host_ram=64 * GIB))
    found = estimate(configuration, load_facts(configuration), "musubi-tuner")
    assert found.phases["encode"].device_bytes < found.budget_bytes  # the VAE's, which is cached apart as well
    assert any("the command that caches prompts" in assumption for assumption in found.assumptions)
    assert not any("layer by layer" in assumption for assumption in found.assumptions)


def test_what_encodes_in_every_step_is_there_beside_the_states() -> None:
    kinds = ("cached", "resident", "swapped")
    cached, resident, swapped = (priced(job(), gpu="80GB", text_encoder=kind, vae=kind) for kind in kinds)
    weights = 2 * PROFILE.text_encoders[0].parameters + 2 * PROFILE.vae.parameters
    assert resident.phases["load"].allocated_bytes >= cached.phases["load"].allocated_bytes + weights
    assert swapped.phases["load"].allocated_bytes == cached.phases["load"].allocated_bytes
    assert swapped.phases["encode"].allocated_bytes > cached.phases["encode"].allocated_bytes


def test_t5_in_fp16_keeps_its_widest_weights_in_fp32() -> None:
    model = lookup.model("cogvideox-2b")
    job = job_for(model, {"model": model.name, "frames": 49, "height": 480, "width": 720})
    where = Machine(gpu="a100-80gb", host_ram=128 * GIB)
    peaks = {}
    for dtype in ("bf16", "fp16"):
        configuration = Configuration.of(job, Strategy(text_encoder_dtype=dtype, vae_tiling=True), where)
        peaks[dtype] = estimate(configuration, load_facts(configuration)).phases["encode"].allocated_bytes
    assert peaks["fp16"] - peaks["bf16"] == 24 * 4096 * 10240 * 2


def test_validation_denoises_and_decodes_beside_the_states() -> None:
    shape = {"frames": 17, "height": 480, "width": 832}
    off, on = priced(job()), priced(job(validation=shape), validation_mode="on")
    assert "decode" not in off.phases
    assert list(on.phases)[-3:] == ["denoise", "decode", "save"]
    tiled = priced(job(validation=shape), validation_mode="on", vae_tiling=True)
    assert tiled.phases["decode"].allocated_bytes < on.phases["decode"].allocated_bytes
    away = priced(job(validation=shape), validation_mode="offload")
    assert away.phases["decode"].allocated_bytes < on.phases["decode"].allocated_bytes
    assert away.phases["denoise"] == on.phases["denoise"]


@pytest.mark.parametrize(
    "strategy",
    [{"attention": "math"}, {"compile": "cudagraphs"}],
)
def test_what_has_no_memory_terms_is_refused_by_name(strategy: dict[str, Any]) -> None:
    with pytest.raises(VplanError, match=next(iter(strategy))):
        priced(job(), adapter_dtype="bf16", **strategy)


def test_a_lora_on_more_layers_takes_more() -> None:
    some, usual, wide = (
        priced(job(lora_targets=targets)).phases["train"].allocated_bytes
        for targets in (["to_q"], None, ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"])
    )
    assert some < usual < wide
    with pytest.raises(VplanError, match=r"no layer of wan2.1-t2v-1.3b is called to_x"):
        priced(job(lora_targets=["to_x"]))


def test_the_breakdown_of_several_buckets_has_the_weights_that_the_first_loaded() -> None:
    shapes = [{"frames": 17, "height": 480, "width": 832}, {"frames": 33, "height": 480, "width": 832}]
    strategy = {"text_encoder_dtype": "nf4", "expandable_segments": False}
    mixed = priced(job(buckets=shapes), **strategy)
    alone = priced(job(frames=33), **strategy)
    assert mixed.peak.phase == alone.peak.phase == "train"
    assert mixed.breakdown.weights == alone.breakdown.weights > 0


def test_what_a_compiler_decides_is_said_and_widens_the_interval() -> None:
    plain, compiled = priced(job()), priced(job(), compile="blocks")
    assert compiled.peak == plain.peak
    assert compiled.low_bytes < plain.low_bytes < plain.high_bytes < compiled.high_bytes
    assert any("torch.compile" in words for words in compiled.assumptions)
    assert not any("torch.compile" in words for words in plain.assumptions)
    assert compiled.step_seconds < plain.step_seconds
