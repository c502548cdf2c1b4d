"""LTX-2 and what came after it: what each transformer is called with."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

import diffusers  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from trainers import families  # noqa: E402
from trainers.families.common import random_draws  # noqa: E402

GRID = {"B": 2, "F": 2, "H": 2, "W": 3, "T": 5, "E": 4}
SMALL = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "caption_channels": 12,
    "num_layers": 1,
}


@pytest.mark.parametrize(("name", "widths"), [("ltx-2", (12, 12)), ("ltx-2.3", (32, 16)), ("ltx-2.5", (32, 16))])
def test_text_is_as_wide_as_the_transformer_takes_it(name: str, widths: tuple[int, int]) -> None:
    profile = lookup.model(name)
    kind = families.family(profile.model_copy(update={"config": {**profile.config, **SMALL}}))
    batch = kind.batch(GRID, "cpu", torch.float32)
    assert (batch["prompt"].shape[-1], batch["audio_prompt"].shape[-1]) == widths
    model = diffusers.LTX2VideoTransformer3DModel(**kind.config)
    with random_draws.from_seeds(torch.arange(2), torch.device("cpu")):
        inputs, target = kind.inputs_and_target(batch)
    video, sound = kind.prediction(model(**inputs, return_dict=False))
    assert video.shape == target[0].shape and sound.shape == target[1].shape


@pytest.mark.parametrize("name", ["ltx-2.3", "ltx-2.5"])
def test_the_noise_level_modulates_the_text_as_the_pipeline_has_it(name: str) -> None:
    kind = families.family(lookup.model(name))
    with random_draws.from_seeds(torch.arange(2), torch.device("cpu")):
        inputs, _ = kind.inputs_and_target(kind.batch(GRID, "cpu", torch.float32))
    assert torch.equal(inputs["sigma"], inputs["timestep"]) and inputs["use_cross_timestep"] is True
    pipeline = inspect.getsource(diffusers.LTX2Pipeline.__call__)
    assert "sigma=timestep" in pipeline and "use_cross_timestep=use_cross_timestep" in pipeline
    assert inspect.signature(diffusers.LTX2Pipeline.__call__).parameters["use_cross_timestep"].default is True


def test_ltx_2_knows_no_such_modulation() -> None:
    kind = families.family(lookup.model("ltx-2"))
    with random_draws.from_seeds(torch.arange(2), torch.device("cpu")):
        inputs, _ = kind.inputs_and_target(kind.batch(GRID, "cpu", torch.float32))
    assert not inputs.keys() & {"sigma", "use_cross_timestep"}
