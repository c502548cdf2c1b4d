"""Samples in the middle of training: the family's own pipeline makes them, and the model is none the worse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402
import numpy  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.catalog.shapes import job_for  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.spec.job import Strategy  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from trainers import families  # noqa: E402
from trainers.data import parts  # noqa: E402
from trainers.families.common.encoding import pipeline  # noqa: E402
from trainers.families.common.sampling import flow_shift, shifted  # noqa: E402
from trainers.sampling import pipelines, validate  # noqa: E402
from trainers.step import placement, step  # noqa: E402
from trainers.step.random_weights import randomise  # noqa: E402

pytestmark = pytest.mark.usefixtures("frozen_heap")

CPU = torch.device("cpu")
FP32 = Strategy(vae_dtype="fp32", weights_dtype="fp32", autocast="none", validation_mode="on")


class Made:
    """A tiny model that trains, and the phases of a sample it made."""

    def __init__(self, name: str, strategy: Strategy = FP32, **said: object) -> None:
        self.profile = tiny.profile(name)
        frames = min(self.profile.shape.max_frames, self.profile.shape.frame_step + 1)
        shape = {"frames": frames, "height": 32, "width": 64, "lora_targets": list(self.profile.lora.targets[:2])}
        if self.profile.shape.only_listed or self.profile.family in ("cogvideox", "sd3", "unet"):
            shape |= {"height": 64, "width": 64}
        self.job = job_for(self.profile, {**shape, **said})
        self.strategy, self.seen = strategy, list[str]()
        torch.manual_seed(0)
        self.model = step.build_model(self.profile, self.job, strategy)
        placement.materialise(self.model, "cpu", randomise)

    def vae(self) -> torch.nn.Module:
        small = dict(tiny.VAES[self.profile.vae.class_name])
        if self.profile.vae.config.get("decoder_base_dim"):
            small["decoder_base_dim"] = 3
        torch.manual_seed(1)
        return getattr(diffusers, self.profile.vae.class_name)(**{**self.profile.vae.config, **small}).eval()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.seen.append(name)
        yield

    def sample(self, strategy: Strategy | None = None, **said: object) -> numpy.ndarray:
        asked = pipelines.SampleInputs(**{"vae": self.vae, "steps": 2, **said})
        torch.manual_seed(2)
        return validate.sample(
            self.model, self.profile, self.job, strategy or self.strategy, CPU, asked, phase=self.phase
        )


NAMES = (
    "wan2.1-i2v-14b-480p",
    "wan2.2-ti2v-5b",
    "cogvideox-5b-i2v",
    "sdxl",
    "skyreels-v2-i2v-1.3b",
)
"""The others are sampled in test_objectives."""


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_random_parts_has_the_jobs_shape(name: str) -> None:
    bf16 = FP32.replace(weights_dtype="bf16", autocast="bf16")
    made = Made(name, bf16)
    found = made.sample()
    assert found.shape == (made.job.frames, made.job.height, made.job.width, 3)
    assert numpy.isfinite(found).all()
    assert found.min() >= 0
    assert found.max() <= 1
    assert made.seen == ["denoise", "decode"]


REFUSED = {
    "wan2.2-animate-14b": "what a folder of clips does not have",
    "ideogram-4": "a second model for guidance",
    "anima": "a modular pipeline",
    "flux.3": "a modular pipeline",
    "kandinsky-5.0-i2v-lite": "the first frame without noise",
    "kandinsky-5.0-t2v-pro": "sparse attention",
    "framepack": "its sections one after another",
    "minimax-h3": "a modular pipeline",
    "longcat-image": "a prompt in words",
    "skyreels-v2-df-14b": "a pipeline that does not write over",
    "skyreels-v2-df-1.3b": "a pipeline that does not write over",
    "cosmos-predict2-2b-v2w": "NVIDIA's guardrail",
    "cosmos-predict2.5-2b": "NVIDIA's guardrail",
}


def test_every_family_that_trains_samples_or_is_refused_by_name() -> None:
    for name in lookup.model_names():
        profile = lookup.model(name)
        kind = families.family(profile)
        if not (kind.clip_turns() and kind.text_turns()) or name in REFUSED:
            continue
        sampler = pipelines.sampler_of(kind, profile)
        assert hasattr(diffusers, sampler.pipeline)
        config = pipelines.scheduler(profile, sampler, pipelines.shape_of(job_for(profile, {})), None).config
        assert config.get("flow_shift", config.get("shift")) is not None or profile.training.objective != "flow"
    for name, needs in REFUSED.items():
        profile = lookup.model(name)
        with pytest.raises(VplanError, match=f"{name} need {needs}"):
            pipelines.sampler_of(families.family(profile), profile)


def test_shifts_are_the_published_ones_for_the_size() -> None:
    expected = {
        ("wan2.1-t2v-14b", 480, 832): 3.0,
        ("wan2.1-t2v-14b", 720, 1280): 5.0,
        ("wan2.1-i2v-14b-720p", 720, 1280): 5.0,
        ("wan2.1-i2v-14b-480p", 480, 832): 3.0,
        ("wan2.2-t2v-a14b", 480, 832): 12.0,
        ("wan2.2-t2v-a14b", 720, 1280): 12.0,
        ("wan2.2-i2v-a14b", 480, 832): 5.0,
        ("wan2.2-ti2v-5b", 704, 1280): 5.0,
        ("hunyuan-video-1.5", 480, 848): 5.0,
        ("hunyuan-video-1.5", 720, 1280): 9.0,
    }
    assert {case: flow_shift(lookup.model(case[0]), *case[1:]) for case in expected} == expected
    assert shifted({}, {"flow_shift": None}, 5.0) == {"flow_shift": 5.0}
    assert shifted({"use_dynamic_shifting": True}, {"shift": None}, 5.0) == {"use_dynamic_shifting": True}
    assert shifted({"a": 1}, {"a": None}, 5.0) == {"a": 1}


def test_a_sample_is_the_one_that_the_whole_pipeline_makes(tmp_path: Path) -> None:
    """With its encoders, from the words; and so it is with group offload and away while the VAE decodes."""
    made = Made("wan2.1-t2v-1.3b")
    folder = tiny.folder(tmp_path / "model", made.profile)
    encoder = parts.load(folder, "text_encoder", "UMT5EncoderModel", torch.float32)
    told = {"text_encoder": encoder, "tokenizer": parts.load_helper(folder, "tokenizer")}
    settings = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    scheduler = diffusers.UniPCMultistepScheduler(**settings)
    made.model.eval()
    whole = pipeline("WanPipeline", transformer=made.model, vae=made.vae(), scheduler=scheduler, **told)
    shape = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 2}
    generator = torch.Generator().manual_seed(5)
    expected = whole("a red cat", negative_prompt="", generator=generator, guidance_scale=4.0, **shape).frames[0]
    cached = {}
    for caption in ("a red cat", ""):
        prompt, _ = whole.encode_prompt(caption, do_classifier_free_guidance=False, max_sequence_length=512)
        cached[caption] = {"prompt": prompt[0]}
    made.model.train()
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    offloads = [{}, {"group_offload": "block"}, {"group_offload": "leaf"}, {"validation_mode": "offload"}]
    for change in offloads:
        said = {"prompt": cached["a red cat"], "empty": cached[""], "guidance": 4.0, "seed": 5}
        config = {
            "_class_name": "UniPCMultistepScheduler",
            "flow_shift": 1.0,
            **{k: settings[k] for k in list(settings)[:2]},
        }
        found = made.sample(FP32.replace(**change), scheduler=config, **said)
        numpy.testing.assert_array_equal(found, expected)
        assert all(module.training for module in made.model.modules())
        after = made.model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_failed_sample_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made("wan2.1-t2v-1.3b")

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(made, "vae", lambda: _with_decode(Made.vae(made), full))
    for change in ({}, {"group_offload": "leaf"}):
        with pytest.raises(torch.OutOfMemoryError):
            made.sample(FP32.replace(**change))
        assert all(module.training for module in made.model.modules())
        assert not any(
            hasattr(module, "_diffusers_hook") and module._diffusers_hook.hooks for module in made.model.modules()
        )


def _with_decode(vae: torch.nn.Module, method: object) -> torch.nn.Module:
    vae.decode = method
    return vae


def test_tensors_go_where_the_pipeline_works_those_in_lists_too() -> None:
    class Pipeline:
        _execution_device = torch.device("meta")

        def __call__(self, prompt_embeds: object, mask: object, steps: int) -> None:
            """Takes as much as this."""

    tensor = torch.ones(2)
    found = pipelines.accepted(Pipeline(), {"prompt_embeds": [tensor], "mask": tensor, "steps": 2, "fps": 24})
    assert found["prompt_embeds"][0].is_meta and found["mask"].is_meta and found["steps"] == 2
    assert "fps" not in found


def test_a_scheduler_that_is_none_is_refused() -> None:
    profile = tiny.profile("wan2.1-t2v-1.3b")
    sampler = pipelines.sampler_of(families.family(profile), profile)
    shape = pipelines.shape_of(job_for(profile, {}))
    for name in ("WanPipeline", "nothing", ["x"]):
        with pytest.raises(VplanError, match="which diffusers does not have"):
            pipelines.scheduler(profile, sampler, shape, {"_class_name": name})
