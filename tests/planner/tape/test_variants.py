"""Which recording answers for which batch."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.errors import NotRecordedError
from planner.spec.job import Strategy
from planner.tape.variants.choice import optimizer_variant, sample_variant, step_variant
from planner.tape.variants.inventory import default_variants, requested_variants, sample_variants, step_variants
from planner.tape.variants.precision import PLAIN_FP32
from planner.tape.variants.torch_and_card import TorchAndCard
from planner.tape.variants.variant import StepVariant


def variant(name: str, batch: int) -> StepVariant:
    profile = lookup.model(name)
    strategy = Strategy(weights_dtype="bf16")
    return step_variant(profile, job_for(profile, {"batch_size": batch}), strategy, batch)


@pytest.mark.parametrize("batch", [2, 3, 64])
def test_one_recording_holds_for_every_batch_above_one(batch: int) -> None:
    assert variant("wan2.1-t2v-1.3b", 1).name.endswith("-one")
    assert variant("wan2.1-t2v-1.3b", batch).name.endswith("-many")


@pytest.mark.parametrize("name", ["mochi-1", "hunyuan-video-1.5"])
def test_a_model_that_loops_over_its_samples_has_recordings_of_single_batches(name: str) -> None:
    profile = lookup.model(name)
    batches = profile.shape.batches
    names = [variant(name, batch).name for batch in batches]
    assert len(set(names)) == len(batches)
    assert set(names) <= {known.name for known in step_variants(profile)}
    with pytest.raises(NotRecordedError) as caught:
        variant(name, 3)
    assert "sample by sample" in caught.value.message
    assert "--batch-size 1 or 2" in caught.value.fix


@pytest.mark.parametrize(
    ("method", "fields", "fix"),
    [
        ("lora", {"weights_dtype": "fp32"}, "use --weights-dtype bf16"),
        (
            "lora",
            {"weights_dtype": "int8", "adapter_dtype": "bf16", "autocast": "none"},
            "use --adapter-dtype fp32 --autocast bf16",
        ),
        ("lora", {"weights_dtype": "nf4", "adapter_dtype": "bf16"}, "use --adapter-dtype fp32"),
        ("sample", {"weights_dtype": "nf4"}, "use --weights-dtype bf16"),
        ("full", {"weights_dtype": "fp32", "autocast": "none"}, "use --autocast bf16"),
    ],
)
def test_a_precision_without_a_recording_is_named_by_flags(method: str, fields: dict[str, str], fix: str) -> None:
    profile = lookup.model("wan2.1-t2v-1.3b")
    job, strategy = job_for(profile, {"method": method}), Strategy.read({"weights_dtype": "bf16", **fields})
    with pytest.raises(NotRecordedError) as caught:
        if method == "sample":
            sample_variant(profile, job, strategy, 1)
        else:
            step_variant(profile, job, strategy, 1)
    assert f"--{next(iter(fields)).replace('_', '-')}" in caught.value.message
    assert caught.value.fix == fix


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8", "nf4"])
def test_adapters_in_fp32_without_autocast_are_recorded_when_somebody_names_them(weights: str) -> None:
    profile = lookup.model("wan2.1-t2v-1.3b")
    strategy = Strategy.read({"weights_dtype": weights, "adapter_dtype": "fp32", "autocast": "none"})
    for choose in (step_variant, sample_variant):
        found = choose(profile, job_for(profile, {}), strategy, 1)
        assert found in list(requested_variants(profile)) and found not in list(default_variants(profile))
        assert found.records(profile)[1].autocast == "none"


def test_dropout_of_an_adapter_is_a_recording_of_its_own() -> None:
    profile = lookup.model("sd1.5")
    job = job_for(profile, {"lora_dropout": 0.3})
    half = Strategy(weights_dtype="bf16", adapter_dtype="bf16", autocast="bf16")
    found = step_variant(profile, job, half, 1)
    assert found in list(requested_variants(profile)) and found not in list(default_variants(profile))
    assert found.records(profile)[0].lora_dropout > 0
    assert not step_variant(profile, job.replace(method="full"), half, 1).dropout


@pytest.mark.parametrize("said", [{"adapter": "dora"}, {"adapter": "lokr"}, {"adapter": "lokr", "lokr_factor": 0}])
def test_other_adapters_are_recorded_when_somebody_names_one(said: dict[str, Any]) -> None:
    profile = lookup.model("wan2.1-t2v-1.3b")
    for targets in (None, profile.lora.wide):
        job, strategy = job_for(profile, {**said, "lora_targets": targets}), Strategy(gradient_checkpointing="full")
        variants = (
            step_variant(profile, job, strategy, 1),
            sample_variant(profile, job, strategy, 2),
            optimizer_variant(profile, job, strategy),
        )
        for found in variants:
            assert found in list(requested_variants(profile)) and found not in list(default_variants(profile))
            recorded, _ = found.records(profile)
            assert (recorded.adapter, recorded.lokr_factor) == (job.adapter, job.lokr_factor)
            assert recorded.lora_targets == (targets or profile.lora.targets)


@pytest.mark.parametrize(
    ("said", "strategy", "fault"),
    [
        ({"adapter": "dora", "lora_targets": ("to_q",)}, {}, "recorded on to_k and to_out.0 and to_q and to_v alone"),
        ({"adapter": "lokr", "lokr_factor": 7}, {}, "lokr_factor 7 is not recorded"),
        ({"adapter": "dora"}, {"weights_dtype": "nf4"}, "dora of wan2.1-t2v-1.3b is not recorded with"),
        ({"adapter": "lokr"}, {"weights_dtype": "int8"}, "lokr of wan2.1-t2v-1.3b is not recorded with"),
        ({"adapter": "dora"}, {"sharding": "fsdp"}, "dora under fsdp is not estimated"),
        ({"adapter": "lokr"}, {"context_parallel": 2}, "lokr under context_parallel is not estimated"),
        ({"adapter": "lokr"}, {"compile": "blocks"}, "lokr in compiled blocks is not estimated"),
    ],
)
def test_of_other_adapters_no_recording_is_asked_for_that_cannot_be(
    said: dict[str, Any], strategy: dict[str, Any], fault: str
) -> None:
    profile = lookup.model("wan2.1-t2v-1.3b")
    with pytest.raises(NotRecordedError, match=fault) as caught:
        step_variant(profile, job_for(profile, said), Strategy.read(strategy), 1)
    assert "vplan record" not in str(caught.value.fix)


def test_a_recording_is_of_the_batch_its_name_says() -> None:
    for name in lookup.model_names():
        profile = lookup.model(name)
        for known in step_variants(profile):
            assert known.samples is None or known.samples in profile.shape.batches
            assert not (known.one_sample and known.samples)


def test_a_model_that_attends_by_card_has_two_recordings_of_each_kind_in_16_bits() -> None:
    usual = lookup.model("wan2.1-t2v-1.3b")
    by_card = usual.replace(traits=usual.traits.replace(attends_by_card=True, trained_in_fp32=True))
    for recorded in (step_variants, sample_variants):
        names = [known.name for known in recorded(by_card)]
        of_cudnn = [known.name for known in recorded(by_card) if known.cudnn]
        in_fp32 = [known.name for known in recorded(by_card) if known.precision == PLAIN_FP32]
        assert len(names) == len(set(names)) == 2 * len(of_cudnn) + len(in_fp32)
        assert all("-cudnn" in name for name in of_cudnn) and not any("-cudnn" in name for name in in_fp32)
        assert not any(known.cudnn for known in recorded(usual))
    strategy, job = Strategy(weights_dtype="bf16"), job_for(usual, {})
    for choose in (step_variant, sample_variant):
        chosen = [choose(profile, job, strategy, 1, TorchAndCard(cudnn=True)) for profile in (by_card, usual)]
        assert [known.cudnn for known in chosen] == [True, False]
        assert chosen[0] in list(default_variants(by_card))


def test_samples_over_a_quantised_base_are_forwards_over_16_bits() -> None:
    profile = lookup.model("wan2.1-t2v-1.3b")
    job = job_for(profile, {})
    plain, quantised = (sample_variant(profile, job, Strategy(weights_dtype=dtype), 1) for dtype in ("bf16", "nf4"))
    assert plain == quantised
