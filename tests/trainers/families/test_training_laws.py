"""Each training law against the published formula that it is named after."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
from diffusers.pipelines.flux.pipeline_flux import calculate_shift  # noqa: E402
from diffusers.training_utils import (  # noqa: E402
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.catalog.noise_density import share_below, shift_of  # noqa: E402
from planner.catalog.profiles import ModelProfile, Training  # noqa: E402
from planner.catalog.shapes import grid, job_for  # noqa: E402
from trainers import families  # noqa: E402
from trainers.families.common import noise_levels, random_draws  # noqa: E402
from trainers.families.common.squared_error import squared_error  # noqa: E402

CPU = torch.device("cpu")


def law(name: str = "flux.1-dev", **changes: Any) -> Training:
    return lookup.model(name).training.replace(**changes)


def under(name: str, **changes: Any) -> ModelProfile:
    profile = lookup.model(name)
    return profile.replace(training=profile.training.replace(**changes))


@pytest.mark.parametrize("scale", [-1.0, 0.5, 1.29, 1.75])
def test_mode_sampling_is_diffusers(scale: float) -> None:
    uniform = torch.rand(2000, generator=torch.Generator().manual_seed(3))
    published = compute_density_for_timestep_sampling(
        "mode", 2000, mode_scale=scale, generator=torch.Generator().manual_seed(3)
    )
    ours = noise_levels.levels(uniform.double(), law(timestep_sampling="mode", mode_scale=scale), 1024)
    # diffusers reads it as a place in a schedule that begins with noise
    torch.testing.assert_close(ours, 1 - published, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (0.5, 0.7), (-1.0, 2.0)])
def test_logit_normal_has_the_published_mean_and_deviation(mean: float, deviation: float) -> None:
    published = compute_density_for_timestep_sampling(
        "logit_normal", 200_000, logit_mean=mean, logit_std=deviation, generator=torch.Generator().manual_seed(1)
    )
    uniform = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    asked = law(timestep_sampling="logit_normal", logit_mean=mean, logit_std=deviation)
    ours = noise_levels.levels(uniform, asked, 1024)
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert float(ours.quantile(quantile)) == pytest.approx(float(published.quantile(quantile)), abs=5e-3)


def test_a_shift_by_resolution_is_the_schedulers_at_that_size() -> None:
    for tokens in (256, 1024, 4096, 16_384):
        mu = calculate_shift(tokens)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        scheduler.set_timesteps(sigmas=[0.25, 0.5, 0.75], mu=mu)
        asked = law(timestep_sampling="uniform", training_shift="resolution")
        ours = noise_levels.levels(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), asked, tokens)
        torch.testing.assert_close(ours, scheduler.sigmas[:3])
        assert shift_of(asked, tokens) == pytest.approx(math.exp(mu))
    assert shift_of(law("qwen-image", training_shift="resolution"), 8192) == pytest.approx(math.exp(0.9))


def test_tokens_are_those_of_the_model() -> None:
    for name, tokens in (("flux.1-dev", 32 * 32), ("sd3.5-medium", 32 * 32), ("wan2.1-t2v-1.3b", 3 * 32 * 32)):
        profile = lookup.model(name)
        job = job_for(profile, {"frames": 9 if profile.kind == "video" else 1, "height": 512, "width": 512})
        kind = families.family(profile)
        batch = kind.batch({**grid(profile, job), "B": 2}, "meta", torch.float32)
        assert kind.tokens_of(batch["latents"]) == tokens


@given(st.sampled_from(("uniform", "logit_normal", "mode")), st.floats(0.2, 12.0), st.floats(0.001, 0.999))
def test_the_share_below_a_level_is_the_uniform_number_that_draws_it(kind: str, shift: float, share: float) -> None:
    asked = law(timestep_sampling=kind, training_shift=shift, logit_mean=0.3, logit_std=0.8)
    level = noise_levels.levels(torch.tensor([share], dtype=torch.float64), asked, 1024).double().item()
    assert share_below(asked, level, shift) == pytest.approx(share, abs=1e-4)


# ---- weights


def diffsynth_weights(shift: float) -> tuple[Any, Any]:
    """diffsynth/diffusion/flow_match.py at fed7b18: a Wan schedule of 1000 steps, and the weight of each."""
    base = torch.linspace(1.0, 0.0, 1001, dtype=torch.float64)[:-1]
    sigmas = shift * base / (1 + (shift - 1) * base)
    heights = torch.exp(-2 * ((sigmas * 1000 - 500) / 1000) ** 2)
    heights = heights - heights.min()
    return sigmas, heights * (1000 / heights.sum())


@pytest.mark.parametrize(
    "name", ["wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b", "wan2.2-animate-14b", "wan2.1-vace-14b"]
)
def test_wan_trains_by_all_of_diffsynths_law(name: str) -> None:
    training = lookup.model(name).training
    sigmas, published = diffsynth_weights(shift=5.0)
    shares = torch.arange(1000, 0, -1, dtype=torch.float64) / 1000
    ours = noise_levels.levels(shares.clamp(max=1 - 1e-9), training, 1024)
    torch.testing.assert_close(ours.double(), sigmas, atol=1e-6, rtol=0.0)
    weights = noise_levels.weights(ours, training, 1024)
    torch.testing.assert_close(weights.double(), published, atol=1e-4, rtol=1e-4)
    assert float(weights.mean()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap", "none"])
def test_weights_of_sd3_are_diffusers(scheme: str) -> None:
    sigmas = torch.linspace(0.01, 1.0, 100)
    ours = noise_levels.weights(sigmas, law(loss_weighting=scheme), 1024)
    published = compute_loss_weighting_for_sd3(scheme, sigmas)
    torch.testing.assert_close(torch.ones(100) if ours is None else ours, published)


@pytest.mark.parametrize("objective", ["epsilon", "v"])
def test_min_snr_is_that_of_diffusers_script(objective: str) -> None:
    profile = under("sd1.5", loss_weighting="min_snr", snr_gamma=5.0, objective=objective)
    kind = families.family(profile)
    timesteps = torch.tensor([0, 10, 300, 700, 999])
    ratio = compute_snr(kind.scheduler, timesteps)
    lesser = torch.stack([ratio, 5.0 * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
    published = lesser / ratio if objective == "epsilon" else lesser / (ratio + 1)
    torch.testing.assert_close(noise_levels.min_snr(kind.scheduler, timesteps, profile.training), published)


def test_v_prediction_has_v_for_its_target() -> None:
    profile = under("sdxl", objective="v")
    kind = families.family(profile)
    job = job_for(profile, {"height": 256, "width": 256})
    batch = kind.batch({**grid(profile, job), "B": 2}, "cpu", torch.float32)
    with random_draws.from_seeds(torch.arange(2), CPU):
        inputs, target = kind.inputs_and_target(batch)
    ratio = kind.scheduler.alphas_cumprod[inputs["timestep"]].view(-1, 1, 1, 1)
    noise = (inputs["sample"] - ratio**0.5 * batch["latents"]) / (1 - ratio) ** 0.5
    torch.testing.assert_close(target, ratio**0.5 * noise - (1 - ratio) ** 0.5 * batch["latents"], atol=1e-3, rtol=1e-3)
    assert kind.sampler().settings["prediction_type"] == "v_prediction"


def test_weighted_errors_are_those_of_the_formula_with_their_gradients() -> None:
    torch.manual_seed(0)
    target, weights = torch.randn(3, 4, 5), torch.tensor([0.5, 2.0, 0.0])
    ours, plain = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in "12")
    loss = squared_error(ours, target, weights)
    expected = (((plain - target) ** 2).mean(dim=(1, 2)) * weights).mean()
    (loss * 3).backward()
    (expected * 3).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, plain.grad)


def test_a_loss_keeps_no_memory_of_the_errors_it_is_the_mean_of() -> None:
    """torch's own keeps that of as many numbers as the prediction has, as long as the loss is there."""
    prediction, target = torch.randn(2, 300, requires_grad=True), torch.randn(2, 300)
    assert torch.nn.functional.mse_loss(prediction, target).untyped_storage().nbytes() == 4 * 600
    loss = squared_error(prediction, target, None)
    loss.backward()
    assert loss.untyped_storage().nbytes() == 4
    torch.testing.assert_close(loss, (prediction - target).square().mean())
    torch.testing.assert_close(prediction.grad, (prediction - target).detach() / 300)


@pytest.mark.parametrize("name", ["wan2.2-ti2v-5b", "z-image", "flux.1-kontext-dev", "ltx-2", "cogvideox-2b", "sd1.5"])
def test_every_family_weighs_its_samples(name: str) -> None:
    """The loss of two samples is the mean of theirs alone, each times its own weight."""
    discrete = lookup.model(name).training.objective != "flow"
    scheme = {"loss_weighting": "min_snr", "snr_gamma": 1.0} if discrete else {"loss_weighting": "cosmap"}
    weighted, plain = (families.family(under(name, **law)) for law in (scheme, {"loss_weighting": "none"}))
    profile = weighted.profile
    size = {"height": 256, "width": 256} if name != "cogvideox-2b" else {}
    job = job_for(profile, {"frames": 9 if profile.kind == "video" else 1, **size})
    batch = weighted.batch({**grid(profile, job), "B": 2}, "cpu", torch.float32)
    losses = {}
    for kind in (weighted, plain):
        with random_draws.from_seeds(torch.arange(2), CPU):
            inputs, target = kind.inputs_and_target(batch)
        prediction = kind.prediction(answer(name, target))
        losses[kind] = kind.loss(prediction, target, inputs)
    assert weighted.loss_weights is not None and plain.loss_weights is None
    assert float(losses[weighted]) == pytest.approx(float(losses[plain] * weighted.loss_weights.mean()), rel=0.02)


def answer(name: str, target: Any) -> Any:
    """What a model might return: the target, one too much."""
    if name == "z-image":
        return (list(-(target + 1)),)
    if name == "ltx-2":
        return tuple(part + 1 for part in target)
    if name == "wan2.2-ti2v-5b":
        return (torch.cat([target[:, :, :1], target], dim=2) + 1,)
    if name == "cogvideox-2b":
        return (torch.zeros_like(target),)
    return (target + 1,)


def test_a_recorded_step_weighs_nothing() -> None:
    kind = families.family(lookup.model("wan2.2-ti2v-5b"))
    latents = torch.zeros(2, 48, 3, 4, 4)
    with random_draws.from_seeds(torch.arange(2), CPU):
        kind.flow_matching(latents)
    assert kind.loss_weights is not None and kind.loss_weights.shape == (2,)
    kind.flow_matching(latents)
    assert kind.loss_weights is None


@pytest.mark.parametrize("frames", [1, 3])
def test_a_lone_frame_is_learnt_and_a_first_one_is_not(frames: int) -> None:
    """TI2V: of a clip the first latent frame is given; an image has nothing else."""
    kind = families.family(lookup.model("wan2.2-ti2v-5b"))
    grid = {"B": 2, "F": frames, "H": 2, "W": 2, "T": 512}
    inputs, target = kind.inputs_and_target(kind.batch(grid, CPU, torch.float32))
    assert target.shape[2] == max(1, frames - 1)
    prediction = torch.zeros(2, 48, frames, 4, 4, requires_grad=True)
    kind.loss(prediction, target, inputs).backward()
    assert prediction.grad is not None
    assert prediction.grad.abs().sum(dim=(0, 1, 3, 4)).gt(0).tolist() == [frames == 1, True, True][:frames]
    assert (inputs["timestep"] == 0).sum().item() == (0 if frames == 1 else 2 * 4)
