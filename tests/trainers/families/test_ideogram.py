"""What Ideogram 4 is trained on is laid out as its pipeline lays it out."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from diffusers import Ideogram4Pipeline  # noqa: E402
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _resolution_aware_mu  # noqa: E402

from tests.trainers import tiny  # noqa: E402
from trainers import families  # noqa: E402
from trainers.families.common import random_draws  # noqa: E402

TEXT, ROWS, COLUMNS = 5, 2, 3
LENGTHS = [5, 2]


def test_positions_segments_and_roles_are_the_pipelines() -> None:
    kind = families.family(tiny.profile("ideogram-4"))
    batch = kind.batch({"B": 2, "F": 1, "H": ROWS, "W": COLUMNS, "T": TEXT}, "cpu", torch.float32)
    whole, _, _ = Ideogram4Pipeline._prepare_ids([TEXT], ROWS, COLUMNS, TEXT, torch.device("cpu"))
    mask = torch.tensor([[int(place >= TEXT - length) for place in range(TEXT)] for length in LENGTHS])
    batch |= {"prompt_mask": mask, "places": whole[:, TEXT:].expand(2, -1, -1)}
    inputs, target = kind.inputs_and_target(batch)
    expected = Ideogram4Pipeline._prepare_ids(LENGTHS, ROWS, COLUMNS, TEXT, torch.device("cpu"))
    for name, tensor in zip(("position_ids", "segment_ids", "indicator"), expected, strict=True):
        assert torch.equal(inputs[name], tensor), name
    assert inputs["hidden_states"].shape[1] == inputs["encoder_hidden_states"].shape[1] == TEXT + ROWS * COLUMNS
    assert not inputs["hidden_states"][:, :TEXT].any() and not inputs["encoder_hidden_states"][:, TEXT:].any()
    assert target.shape == batch["latents"].shape


@pytest.mark.parametrize("side", [512, 1024, 2048])
def test_larger_images_are_trained_at_higher_noise_as_the_schedule_has_it(side: int) -> None:
    kind = families.family(tiny.profile("ideogram-4"))
    latents = torch.zeros(2001, (side // 16) ** 2, 1).expand(-1, -1, 1)
    with random_draws.from_seeds(torch.arange(2001), torch.device("cpu")):
        drawn = kind.levels(latents)
    logits = torch.logit(drawn.double())
    assert float(logits.median()) == pytest.approx(_resolution_aware_mu(side, side, 0.0), abs=0.15)
    assert float(logits.std()) == pytest.approx(1.5, abs=0.1)
