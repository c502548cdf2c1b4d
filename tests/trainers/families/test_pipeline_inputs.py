"""A model is given in training what its pipeline gives it: every argument of its call, whatever its encoders left."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.catalog.shapes import job_for  # noqa: E402
from planner.dataset import scan  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from tests.trainers.data.caching import run, setting  # noqa: E402
from tests.trainers.sampling.test_validate import CPU, FP32  # noqa: E402
from trainers import families  # noqa: E402
from trainers.families.common import random_draws  # noqa: E402
from trainers.families.common.base import Family  # noqa: E402
from trainers.sampling import pipelines, validate  # noqa: E402
from trainers.step import step  # noqa: E402

pytestmark = pytest.mark.usefixtures("frozen_heap")

SIBLINGS = ("cogvideox-5b", "cogvideox1.5-5b", "flux.2-klein-4b with a reference", "wan2.2-ti2v-5b with one frame")
"""Models whose inputs are made otherwise than those of the ones of their family in `tiny.MODELS`."""

NAMES = [name for name in tiny.MODELS if families.family(tiny.profile(name)).sampler() is not None]
WIDE, LOW = (64, 128), (32, 64)
"""No model's usual shape, so that what depends on the shape differs; and one within the table of CogVideoX 1.5."""

CHOSEN = {"guidance"}
"""Inputs whose value is the user's choice in each: compared by their form."""

UNSAID = {"control_hidden_states_scale": 1.0, "attention_mask": 1.0}
"""What a pipeline says in full and the model itself takes when nothing is said (WanVACETransformer3DModel.forward;
Chroma's mask that leaves nothing out)."""


class Called(Exception):
    """Raised by the first call of a model: with its arguments by name."""


class Recorder(torch.nn.Module):
    """Stands in for a model and keeps what it is called with."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.real = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("real"), name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(type(self.real).forward).bind(self.real, *arguments, **named)
        raise Called({name: value for name, value in bound.arguments.items() if name != "self"})


def without_noise(patch: pytest.MonkeyPatch) -> None:
    """Noise is zeros wherever it is drawn: what training and pipelines draw differently is not what is compared."""
    patch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    patch.setattr(random_draws, "normal_like", torch.zeros_like)

    def zeros(*size: Any, generator: Any = None, **more: Any) -> torch.Tensor:
        return torch.zeros(*size, **more)

    patch.setattr(torch, "randn", zeros)


class Sampled:
    """One clip as caching leaves it, and what the pipeline of its model begins with."""

    def __init__(self, name: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        name, _, variant = name.partition(" with ")
        self.profile = profile = tiny.profile(name)
        height, width = (
            (64, 64) if profile.shape.only_listed else LOW if profile.config.get("patch_size_t") == 2 else WIDE
        )
        frames = 1 if variant == "one frame" else min(profile.shape.max_frames, profile.shape.frame_step + 1)
        shape = {"frames": frames, "height": height, "width": width}
        given = {**shape, "lora_targets": list(profile.lora.targets[:2]), "validation": {**shape, "cfg": False}}
        given |= {"references": 1} if variant == "a reference" else {}
        self.job = job_for(profile, given)
        self.kind: Family = families.family(profile).for_job(self.job)
        self.sampler = pipelines.sampler_of(self.kind, profile)
        without_noise(patch)
        model = tiny.folder(folder / "model", profile)
        self.vae = getattr(diffusers, profile.vae.class_name).from_pretrained(model / "vae").eval()
        one = setting(model, folder / "cache", profile, job=self.job, strategy=FP32.replace(text_encoder_dtype="fp32"))
        steered = self.job.references or profile.shape.references or profile.inputs.get("control_channels")
        clips = folder / "clips"
        tiny.write_pairs(clips, 1) if steered else tiny.write_clips(clips, 1, height=height, width=width)
        (entry,) = run(clips, one)
        self.sample = load_file(entry.path) | load_file(entry.text)
        source = next(clips.glob("steers-*" if self.sampler.clip else "before-*" if steered else "0.mp4"))
        pictures = scan.clips.frames(source, range(frames if self.sampler.clip else 1), height, width)
        self.images = [Image.fromarray(frame) for frame in pictures]

    def of_pipeline(self) -> dict[str, Any]:
        """The arguments of the pipeline's first call of its model."""
        embeds = self.sample[self.sampler.embeds] if self.sampler.embeds else None
        inputs = pipelines.SampleInputs(
            prompt=self.sample, empty=self.sample, frames=self.images, embeds=embeds, vae=lambda: self.vae, steps=2
        )
        model = step.build_model(self.profile, self.job, FP32)
        with pytest.raises(Called) as called:
            validate.sample(Recorder(model), self.profile, self.job, FP32, CPU, inputs)
        return dict(called.value.args[0])

    def of_training(self, patch: pytest.MonkeyPatch, time: float) -> dict[str, Any]:
        """The arguments of training's call at the same time."""
        batch = self.kind.collate([{**self.sample, "latents": torch.zeros_like(self.sample["latents"])}])
        patch.setattr(self.kind, "levels", lambda tensor: torch.ones(tensor.shape[0]))
        patch.setattr(random_draws, "integers", lambda highest, count, device: torch.full((count,), int(time)))
        return self.kind.inputs_and_target(batch)[0]


def is_nothing(value: Any) -> bool:
    return value is None or value is False or value == {}


def assert_alike(training: Any, pipeline: Any, where: str) -> None:
    """Two arguments say the same, whatever their dtype."""
    if isinstance(training, torch.Tensor):
        pipeline = torch.as_tensor(pipeline)
        if training.numel() == pipeline.numel() == 1:  # a timestep with or without the batch's axis
            training, pipeline = training.reshape(1), pipeline.reshape(1)
        tolerance = {"atol": 2e-4, "rtol": 2e-3}  # UniPC counts its timesteps in whole numbers
        torch.testing.assert_close(
            training.float(), pipeline.float(), **tolerance, msg=lambda text: f"{where} differs: {text}"
        )
    elif isinstance(training, dict):
        assert training.keys() == pipeline.keys(), where
        for key, value in training.items():
            assert_alike(value, pipeline[key], f"{where}[{key}]")
    elif isinstance(training, list | tuple):
        assert len(training) == len(pipeline), where
        for number, (one, other) in enumerate(zip(training, pipeline, strict=True)):
            assert_alike(one, other, f"{where}[{number}]")
    else:
        assert training == pytest.approx(pipeline), where


@pytest.mark.parametrize("name", [*NAMES, *SIBLINGS])
def test_training_gives_a_model_what_its_pipeline_gives_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = Sampled(name, tmp_path, monkeypatch)
    pipeline = sampled.of_pipeline()
    pipeline.pop("return_dict", None)  # the form of the answer
    time = next(pipeline[key] for key in ("timestep", "timesteps", "t") if key in pipeline)
    training = sampled.of_training(monkeypatch, float(torch.as_tensor(time).flatten()[-1]))
    for key in CHOSEN & training.keys():
        assert training.pop(key).shape == pipeline.pop(key).shape
    for key in UNSAID.keys() & pipeline.keys() - training.keys():
        assert (pipeline.pop(key) == UNSAID[key]).all()
    given = {key: value for key, value in pipeline.items() if not is_nothing(value)}
    assert {key for key, value in training.items() if not is_nothing(value)} == given.keys()
    for key, value in given.items():
        assert_alike(training[key], value, key)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_has_the_noise_levels_of_its_pipeline(name: str) -> None:
    kind = families.family(tiny.profile(name))
    called = getattr(diffusers, kind.sampler().pipeline, None)  # one of ours follows its model's own script
    if called is not None:
        usual = inspect.signature(called.__call__).parameters["num_inference_steps"].default
        assert lookup.model(name.partition(" ")[0]).traits.denoising_steps == usual
