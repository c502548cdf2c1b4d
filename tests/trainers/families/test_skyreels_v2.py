"""SkyReels V2's models for diffusion forcing: every latent frame has a noise level, and so a timestep, of its own."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.catalog import lookup  # noqa: E402
from planner.catalog.shapes import job_for  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.spec.job import Strategy  # noqa: E402
from planner.tape.variants.choice import sample_variant, step_variant  # noqa: E402
from planner.tape.variants.inventory import sample_variants, step_variants  # noqa: E402
from trainers import families  # noqa: E402
from trainers.families.common import random_draws  # noqa: E402

GRID = {"B": 2, "F": 5, "H": 2, "W": 3, "T": 4}


def called(name: str, seeds: list[int]) -> tuple[dict[str, Any], Any, Any]:
    """(what the class is called with, the target, the clip)."""
    kind = families.family(lookup.model(name))
    torch.manual_seed(0)
    batch = kind.batch({**GRID, "B": len(seeds)}, "cpu", torch.float32)
    with random_draws.from_seeds(torch.tensor(seeds), torch.device("cpu")):
        inputs, target = kind.inputs_and_target(batch)
    return inputs, target, batch["latents"]


def test_every_frame_has_a_noise_level_of_its_own() -> None:
    inputs, target, clip = called("skyreels-v2-df-14b", [1, 2])
    levels = inputs["timestep"] / 1000
    assert levels.shape == (2, 5) and len(levels.unique()) == 10
    assert levels.min() > 0 and levels.max() < 1
    assert inputs["enable_diffusion_forcing"] is True
    for frame in range(5):
        level = levels[:, frame].view(2, 1, 1, 1)
        torch.testing.assert_close(
            inputs["hidden_states"][:, :, frame], clip[:, :, frame] + level * target[:, :, frame]
        )


def test_a_sample_s_levels_are_those_of_its_seed_in_whatever_batch() -> None:
    one, other = (called("skyreels-v2-df-14b", seeds)[0]["timestep"] for seeds in ([1, 2], [2, 3]))
    assert torch.equal(one[1], other[0])


def test_clips_of_24_frames_a_second_are_said_to_be_such() -> None:
    """As the class counts them; that of 14B takes it and has no embedding of it, as the pipeline gives it too."""
    assert called("skyreels-v2-df-14b", [1, 2])[0]["fps"] == [1, 1]
    assert called("skyreels-v2-df-1.3b", [1])[0]["fps"] == [1]


def test_all_frames_have_one_level_without_diffusion_forcing() -> None:
    inputs, _, _ = called("skyreels-v2-t2v-14b", [1, 2])
    assert inputs["timestep"].shape == (2,)
    assert not {"enable_diffusion_forcing", "fps"} & inputs.keys()


def test_the_model_that_runs_with_one_sample_alone_is_planned_for_no_more() -> None:
    """diffusers adds (B, F, 6, C) and (B * F, 6, C) there, which one sample alone can."""
    profile = lookup.model("skyreels-v2-df-1.3b")
    named = {variant.name for variant in (*step_variants(profile), *sample_variants(profile))}
    assert named and not any("many" in name for name in named)
    job, strategy = job_for(profile, {"batch_size": 2}), Strategy()
    for choose in (step_variant, sample_variant):
        with pytest.raises(VplanError, match=r"takes one sample at a time of SkyReels V2 DF 1\.3B, not 2") as caught:
            choose(profile, job, strategy, 2)
        assert "use --batch-size 1, with --gradient-accumulation for more" in caught.value.fix
