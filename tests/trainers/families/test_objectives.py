"""What a model is trained to predict is what its pipeline takes it to predict: sign, time and scale of the latents."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
import numpy  # noqa: E402
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.catalog.shapes import grid  # noqa: E402
from planner.dataset import scan  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.launch.supported import supported_plan  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from tests.trainers.sampling.test_validate import CPU, FP32, Made  # noqa: E402
from trainers import families  # noqa: E402
from trainers.families.common import noise_levels, random_draws  # noqa: E402
from trainers.families.common.encoding import Encoder  # noqa: E402
from trainers.sampling import pipelines, validate  # noqa: E402

pytestmark = pytest.mark.usefixtures("frozen_heap")

ALIKE = ("wan2.1-t2v-1.3b", "wan2.2-i2v-a14b", "flux.1-dev", "flux.2-dev")
"""As a sibling that has more to it."""

FLOW = [
    name
    for name in tiny.MODELS
    if lookup.model(name).training.objective == "flow"
    and not lookup.model(name).inputs.get("first_frame_given")
    and families.family(tiny.profile(name)).sampler() is not None
    and name not in ALIKE
]


class Oracle(torch.nn.Module):
    """Stands in for a model and predicts, of whatever noisy clip it is shown, exactly what training asks for."""

    def __init__(self, made: Made, latents: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.real, self.levels = made.model, list[float]()
        kind = families.family(made.profile)
        batch = {**kind.batch({**grid(made.profile, made.job), "B": 1}, "cpu", torch.float32), "latents": latents}
        ends = []
        with monkeypatch.context() as patch:
            patch.setattr(random_draws, "normal_like", lambda tensor: torch.full_like(tensor, 3.0))
            for level in (0.0, 1.0):
                patch.setattr(kind, "levels", lambda tensor, level=level: torch.full((tensor.shape[0],), level))
                ends.append(kind.inputs_and_target(dict(batch)))
        (inputs, target), (others, _) = ends
        self.key = next(name for name in ("hidden_states", "x") if name in inputs)
        self.time = next(name for name in ("timestep", "timesteps", "t") if name in inputs)
        self.begin, self.end = (float(each[self.time].flatten()[0]) for each in (inputs, others))
        by_cell = getattr(kind, "by_cell", None)  # of a model that returns cells in training, and images to a pipeline
        self.target_shape = inputs[self.key].shape if by_cell else target.shape
        self.clean = self.noisy_part(inputs[self.key])
        wanted = 3.0 - self.clean
        assert torch.allclose(self.noisy_part(others[self.key]), torch.full_like(self.clean, 3.0))
        said = by_cell(wanted) if by_cell else wanted
        found = [sign for sign in (1, -1) if float(kind.loss(self.said(sign * said), target, inputs)) < 1e-9]
        assert len(found) == 1, "neither noise - clip nor clip - noise is the target"
        self.sign = found[0]
        self.noise: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("real"), name)

    def noisy_part(self, given: Any) -> torch.Tensor:
        whole = torch.stack(given) if isinstance(given, list) else given
        return whole[tuple(slice(0, length) for length in self.target_shape)]

    def said(self, prediction: torch.Tensor) -> Any:
        return list(prediction.unbind()) if self.key == "x" else prediction

    def forward(self, *arguments: Any, **named: Any) -> Any:
        named |= dict(zip((self.key, self.time), arguments, strict=False))
        noisy = self.noisy_part(named[self.key]).float().clone()  # some pipelines take their steps in place
        level = (float(torch.as_tensor(named[self.time]).flatten()[0]) - self.begin) / (self.end - self.begin)
        self.levels.append(level)
        if self.noise is None:
            assert level == pytest.approx(1.0, abs=2e-3)  # UniPC counts its timesteps in whole numbers
            self.noise = noisy
        else:
            rounded = 2e-3 * max(1.0, float((self.noise - self.clean).abs().max()))
            torch.testing.assert_close(noisy, (1 - level) * self.clean + level * self.noise, atol=rounded, rtol=2e-3)
        told = self.said(self.sign * (self.noise - self.clean))
        return SimpleNamespace(sample=told) if named.get("return_dict") else (told,)


@pytest.mark.parametrize("name", FLOW)
def test_a_model_that_predicts_what_training_asks_for_samples_the_clip_it_was_trained_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a clip through the encoder, the noise, the target, the pipeline's steps and back into the decoder."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    made = Made(name, validation={"frames": 1, "height": 64, "width": 64, "cfg": False}, height=64, width=64)
    frames = made.job.frames
    made.job = made.job.replace(validation=made.job.validation.replace(frames=frames))
    kind, vae = families.family(made.profile), made.vae()
    path = tiny.write_video(tmp_path / "clip.mp4", frames, 64, 64)
    clip = torch.from_numpy(scan.clips.frames(path, range(frames), 64, 64))
    (turn,) = [turn for turn in kind.clip_turns() if turn.part == "vae"]
    encoder = Encoder(vae, generator=torch.Generator().manual_seed(0), size=(64, 64), control=clip)
    with torch.no_grad():
        latents = turn.encode(encoder, clip)["latents"][None]
        pixels = tiny.opaque(clip.permute(3, 0, 1, 2)[None] / 127.5 - 1, made.profile)
        encoded = vae.encode(pixels if made.profile.vae.takes_clips else pixels[:, :, 0])
        expected = vae.decode(encoded.latent if "latent" in encoded else encoded.latent_dist.mode())
    made.model = Oracle(made, latents, monkeypatch)
    asked = pipelines.SampleInputs(vae=lambda: vae, steps=3)
    found = validate.sample(made.model, made.profile, made.job, FP32, CPU, asked)
    assert len(made.model.levels) == 3
    picture = expected.sample[:, :3].reshape(3, -1, 64, 64).permute(1, 2, 3, 0)[:frames].clamp(-1, 1) / 2 + 0.5
    numpy.testing.assert_allclose(found, picture.numpy(), atol=0.01)


# ---- which noise levels


def drawn(name: str, count: int = 1001, tokens: int = 1024, expert: str | None = None) -> torch.Tensor:
    training = lookup.model(name).training
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return noise_levels.levels(uniform, training, tokens, noise_levels.limits(training, expert))


def test_densities_are_the_published_ones() -> None:
    normal = torch.special.ndtri((torch.arange(1001, dtype=torch.float64) + 0.5) / 1001)
    torch.testing.assert_close(drawn("wan2.1-t2v-14b"), torch.sigmoid(normal).float())
    torch.testing.assert_close(drawn("flux.1-dev"), ((torch.arange(1001) + 0.5) / 1001))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    published = scheduler.sigmas[:-1].flip(0)
    torch.testing.assert_close(drawn("z-image", 999), published, atol=5e-3, rtol=0.0)
    logits = torch.logit(drawn("sd3.5-medium").double())  # a shift moves a logit-normal's mean by its logarithm
    torch.testing.assert_close(logits, normal + numpy.log(3.0), atol=1e-4, rtol=0.0)
    for tokens, mean in ((1024, 0.95), (2560, 1.5), (4096, 2.05), (90_000, 2.05)):
        found = torch.logit(drawn("ltx-video-13b", tokens=tokens).double())
        torch.testing.assert_close(found, normal + mean, atol=1e-4, rtol=0.0)
    stretched = drawn("ltx-2", 100_000, tokens=2560)
    assert float(stretched.min()) >= noise_levels.EPSILON / 2
    assert float(stretched.max()) == 1.0
    low, high = (1 / (1 + numpy.exp(-(1.5 + z))) for z in (-2.5758, 3.0902))
    middle = (1 / (1 + numpy.exp(-1.5)) - low) / (high - low)  # of nine tenths; the other tenth is uniform
    assert float((stretched < middle).double().mean()) == pytest.approx(0.45 + 0.1 * middle, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "boundary", "share"), [("wan2.2-t2v-a14b", 0.875, 0.417), ("wan2.2-i2v-a14b", 0.9, 0.358)]
)
def test_each_expert_trains_on_its_own_side_with_the_shape_of_the_whole(
    name: str, boundary: float, share: float
) -> None:
    whole, high, low = (drawn(name, 100_000, expert=expert) for expert in (None, "high", "low"))
    assert float(high.min()) >= boundary - 1e-6
    assert float(low.max()) <= boundary + 1e-6
    assert float((whole > boundary).double().mean()) == pytest.approx(share, abs=1e-3)
    for part, found in ((whole[whole > boundary], high), (whole[whole <= boundary], low)):
        for quantile in (0.1, 0.5, 0.9):
            assert float(found.quantile(quantile)) == pytest.approx(float(part.quantile(quantile)), abs=1e-3)


def test_samples_draw_from_their_models_density_and_records_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = lookup.model("wan2.2-t2v-a14b")
    job = Job(model=profile.name, frames=5, height=64, width=64, experts="high")
    kind = families.family(profile).for_job(job)
    latents = torch.zeros(64, 16, 2, 8, 8)
    with random_draws.from_seeds(torch.arange(64), CPU):
        _, sigmas, _ = kind.flow_matching(latents)
    assert float(sigmas.min()) >= 0.875 - 1e-6
    assert len(set(sigmas.tolist())) == 64
    _, sigmas, _ = kind.flow_matching(latents)
    assert float(sigmas.min()) < 0.875


def test_one_of_two_experts_is_named_or_both_are() -> None:
    def plan(**said: Any) -> Plan:
        job = Job(model="wan2.2-t2v-a14b", frames=17, height=480, width=832, **said)
        return supported_plan(Plan(job=job, strategy=Strategy(), machine=Machine(gpu="80GB")), trained=True)

    for which in ("high", "low", "both"):
        assert plan(experts=which).job.experts == which
    with pytest.raises(VplanError, match="one of two experts that is not named"):
        plan()
