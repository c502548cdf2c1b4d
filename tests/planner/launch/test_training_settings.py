"""Training settings: what a preset leaves open is filled in, what has no effect is refused, and a resume keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.errors import VplanError
from planner.launch.training_settings import changes, check_lora_init, complete, summary_lines, with_law, with_options
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, plan_from_toml, plan_to_toml
from planner.spec.training import TrainingSettings


def completed(model: str, strategy: Strategy | None = None, job: dict[str, Any] | None = None, **said: Any) -> Any:
    asked = Job(model=model, frames=1, height=512, width=512, **(job or {}))
    return complete(TrainingSettings(**said), lookup.model(model), asked, strategy or Strategy())


@pytest.mark.parametrize("model", lookup.model_names())
def test_every_presets_settings_are_complete_and_stay_so(model: str) -> None:
    job = {"method": lookup.model(model).training.method}
    first = completed(model, job=job)
    kept = {name: value for name, value in first.to_json().items() if value is not None}
    again = completed(model, job=job, **{**kept, "betas": first.betas})
    assert again == first
    assert with_law(lookup.model(model), first).training == lookup.model(model).training
    law, optimizer = summary_lines(first, lookup.model(model), Strategy())
    assert law.startswith("training: ") and law.endswith(f"(preset of {model})")
    assert "betas 0.9,0.999" in optimizer


def test_the_presets_of_wan_are_those_of_their_sources() -> None:
    assert completed("wan2.1-t2v-14b").timestep_sampling == "logit_normal"
    for model in ("wan2.2-ti2v-5b", "wan2.2-t2v-a14b", "wan2.2-animate-14b", "wan2.1-vace-1.3b"):
        settings = completed(model)
        law = (settings.timestep_sampling, settings.timestep_shift, settings.loss_weighting)
        assert law == ("uniform", 5.0, "bell")


def test_settings_take_the_place_of_the_preset_and_are_said() -> None:
    settings = completed("wan2.2-ti2v-5b", timestep_sampling="logit_normal", logit_mean=0.5, caption_dropout=0.1)
    profile = with_law(lookup.model("wan2.2-ti2v-5b"), settings)
    assert (profile.training.timestep_sampling, profile.training.logit_mean) == ("logit_normal", 0.5)
    assert profile.training.training_shift == 5.0
    law, optimizer = summary_lines(settings, lookup.model("wan2.2-ti2v-5b"), Strategy())
    assert "logit_normal noise levels (mean 0.5, deviation 1), shift 5, loss weights bell" in law
    assert "captions dropped from 10% of samples" in law
    assert "preset of wan2.2-ti2v-5b but for timestep_sampling)" in law
    assert "learning rate 0.0001 (constant)" in optimizer and "LoRA alpha 16, begins gaussian" in optimizer


def test_gamma_alone_means_min_snr() -> None:
    assert completed("sdxl", snr_gamma=5.0).loss_weighting == "min_snr"
    assert completed("sd1.5", prediction="v").prediction == "v"


@pytest.mark.parametrize(
    ("model", "said", "match"),
    [
        ("wan2.1-t2v-1.3b", {"snr_gamma": 5.0}, "is a flow model; use bell"),
        ("wan2.1-t2v-1.3b", {"prediction": "v"}, "always predicts flow"),
        ("cogvideox-2b", {"prediction": "epsilon"}, "always predicts v"),
        ("wan2.1-t2v-1.3b", {"guidance": 1.0}, "has no guidance input"),
        ("flux.2-klein-4b", {"guidance": 1.0}, "has no guidance input"),
        ("sdxl", {"timestep_shift": 3.0}, "all steps of its noise schedule alike; leave out --timestep-shift"),
        ("sdxl", {"timestep_sampling": "logit_normal"}, "all steps of its noise schedule alike"),
        ("sdxl", {"loss_weighting": "cosmap"}, "is for flow models"),
        ("sdxl", {"loss_weighting": "min_snr"}, "has no gamma; add --snr-gamma 5"),
        (
            "flux.1-dev",
            {"logit_mean": 1.0},
            "with uniform noise levels; add --timestep-sampling logit_normal",
        ),
        ("flux.1-dev", {"mode_scale": 1.0}, "add --timestep-sampling mode"),
        ("ltx-video-13b", {"timestep_shift": 3.0}, "its mean goes by tokens"),
        ("wan2.2-t2v-a14b", {"timestep_shift": "resolution"}, "two experts share"),
        ("wan2.2-t2v-a14b", {"timestep_sampling": "shifted_logit_normal"}, "two experts share"),
        ("latentsync-1.6-stage1", {"caption_dropout": 0.1}, "has no captions"),
        ("latentsync-1.6-stage1", {"prediction": "v"}, "always predicts epsilon"),
        ("flux.1-dev", {"ema_decay": 0.99}, "add --ema gpu"),
    ],
)
def test_what_has_no_effect_is_refused_by_name(model: str, said: dict[str, Any], match: str) -> None:
    with pytest.raises(VplanError, match=match):
        completed(model, **said)


@pytest.mark.parametrize(
    ("adapter", "said", "match"),
    [
        ("dora", {"lora_init": "file.safetensors"}, "magnitudes are not read from one; use gaussian or kaiming"),
        ("lokr", {"lora_init": "kaiming"}, "--lora-init has no effect on lokr"),
        ("lokr", {"lora_alpha": 8.0}, "--lora-alpha has no effect on lokr"),
    ],
)
def test_what_an_adapter_does_not_take_is_refused(adapter: str, said: dict[str, Any], match: str) -> None:
    profile = lookup.model("flux.1-dev")
    job = job_for(profile, {"adapter": adapter})
    with pytest.raises(VplanError, match=match):
        complete(TrainingSettings.read(said), profile, job, Strategy())
    settings = complete(TrainingSettings(), profile, job, Strategy())
    assert (settings.lora_alpha, settings.lora_init) == ((16.0, "gaussian") if adapter == "dora" else (None, None))


@pytest.mark.parametrize(
    ("strategy", "said", "match"),
    [
        ({"optimizer": "adafactor"}, {"betas": (0.9, 0.99)}, "adafactor does not have two betas"),
        ({"optimizer": "lion"}, {"epsilon": 1e-6}, "no effect with lion"),
        ({"optimizer": "prodigy"}, {"learning_rate": 1e-4}, "Prodigy finds the rate itself"),
        ({"optimizer_step": "backward"}, {"max_grad_norm": 0.5}, "no gradients to clip together"),
        ({}, {"lr_scheduler": "constant", "warmup_steps": 5}, "--warmup-steps has no effect with .*_with_warmup"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(strategy: dict[str, Any], said: dict[str, Any], match: str) -> None:
    with pytest.raises(VplanError, match=match):
        completed("flux.1-dev", Strategy(**strategy), **said)


def test_a_warm_up_needs_a_schedule_that_has_one() -> None:
    """diffusers' `constant` begins with the whole rate, whatever its warm-up steps."""
    settings = completed("flux.1-dev", warmup_steps=5)
    assert settings.lr_scheduler == "constant_with_warmup" and completed("flux.1-dev").lr_scheduler == "constant"
    assert (
        "(constant_with_warmup, 5 warm-up steps)" in summary_lines(settings, lookup.model("flux.1-dev"), Strategy())[1]
    )
    again = with_options(
        settings, {**dict.fromkeys(TrainingSettings.model_fields), "warmup_steps": 5}
    )  # the same command
    assert completed("flux.1-dev", **{**again.to_json(), "betas": again.betas}) == settings


def test_full_training_has_no_alpha() -> None:
    assert completed("flux.1-dev", job={"method": "full"}).lora_alpha is None
    assert completed("flux.1-dev", job={"method": "full"}).learning_rate == 1e-5
    with pytest.raises(VplanError, match="--lora-alpha has no effect in full training"):
        completed("flux.1-dev", job={"method": "full"}, lora_alpha=8.0)


def test_a_plan_keeps_its_settings() -> None:
    job = Job(model="sdxl", frames=1, height=1024, width=1024)
    plan = Plan(job=job, strategy=Strategy(), machine=Machine(gpu="24GB"))
    assert "training" not in plan_to_toml(plan)
    settings = TrainingSettings(betas=(0.9, 0.95), snr_gamma=5.0, lora_alpha=8, timestep_shift=None)
    text = plan_to_toml(plan.replace(training=settings))
    assert "[training]" in text
    assert plan_from_toml(text).training == settings
    by_hand = plan_from_toml(plan_to_toml(plan) + '\n[training]\ntimestep_shift = "resolution"\nguidance = 1\n')
    assert (by_hand.training.timestep_shift, by_hand.training.guidance) == ("resolution", 1.0)
    with pytest.raises(VplanError, match="no field"):
        plan_from_toml(plan_to_toml(plan) + "\n[training]\nshift = 3.0\n")


def test_typed_options_lie_over_the_plans() -> None:
    options = dict.fromkeys(TrainingSettings.model_fields)
    kept = TrainingSettings(timestep_sampling="logit_normal", logit_mean=0.5, betas=(0.9, 0.9))
    assert with_options(kept, options) == kept
    new = with_options(kept, {**options, "timestep_sampling": "mode", "max_grad_norm": 0.0})
    assert (new.timestep_sampling, new.logit_mean, new.betas, new.max_grad_norm) == ("mode", None, (0.9, 0.9), 0.0)


def test_a_lora_file_is_looked_for_where_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a run goes on: its checkpoint has the adapters, and the file may be gone."""
    monkeypatch.chdir(tmp_path)
    options = dict.fromkeys(TrainingSettings.model_fields)
    settings = with_options(TrainingSettings(), {**options, "lora_init": "a.safetensors"})
    assert settings.lora_init == str(tmp_path / "a.safetensors") and with_options(settings, options) == settings
    with pytest.raises(VplanError, match="--lora-init: there is no"):
        check_lora_init(settings)
    (tmp_path / "a.safetensors").touch()
    check_lora_init(settings)
    check_lora_init(TrainingSettings(lora_init="kaiming"))


def test_a_resumed_run_may_change_its_rate_and_nothing_else() -> None:
    before = completed("flux.1-dev").to_json()
    assert changes(before, completed("flux.1-dev")) == []
    (said,) = changes(before, completed("flux.1-dev", learning_rate=5e-5))
    assert said == "learning_rate 0.0001 -> 5e-05"
    for name, value in (("timestep_shift", 3.0), ("lora_alpha", 8.0), ("betas", (0.9, 0.99)), ("caption_dropout", 0.5)):
        with pytest.raises(VplanError, match=f"was trained with {name} .*--{name.replace('_', '-')} .*--resume no"):
            changes(before, completed("flux.1-dev", **{name: value}))
    (unknown,) = changes(None, completed("flux.1-dev"))
    assert "does not say how it was trained" in unknown
