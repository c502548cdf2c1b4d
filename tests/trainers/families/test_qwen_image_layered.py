"""Qwen-Image-Layered is called as its pipeline calls it: the whole image, four layers, and the image to take apart."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from planner.catalog import lookup  # noqa: E402
from planner.catalog.shapes import grid, job_for  # noqa: E402
from trainers import families  # noqa: E402

PROFILE = lookup.model("qwen-image-layered")


def test_five_noisy_images_stand_before_the_one_to_take_apart() -> None:
    kind = families.family(PROFILE)
    cells = grid(PROFILE, job_for(PROFILE, {"height": 64, "width": 96, "batch_size": 2, "text_tokens": 7}))
    assert (cells["H"], cells["W"], cells["E"]) == (4, 6, 24)
    batch = kind.batch(cells, "cpu", torch.float32)
    inputs, target = kind.inputs_and_target(batch)
    assert inputs["hidden_states"].shape == (2, 6 * 24, 64)
    assert target.shape == (2, 5 * 24, 64)
    assert torch.equal(inputs["hidden_states"][:, 5 * 24 :], batch["reference"])
    assert inputs["img_shapes"] == [[(1, 4, 6)] * 5 + [(1, 1, 24)]] * 2
    assert inputs["additional_t_cond"].tolist() == [0, 0]


def test_the_loss_is_over_what_is_made() -> None:
    kind = families.family(PROFILE)
    target = torch.zeros(1, 10, 64)
    prediction = torch.cat([torch.ones(1, 10, 64), torch.full((1, 2, 64), 9.0)], dim=1)
    assert kind.loss(prediction, target, {}).item() == 1.0
