"""Qwen-Image-2.1: text and image in one sequence, and prompts behind the message of its system."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from planner.catalog import lookup  # noqa: E402
from planner.catalog.shapes import grid, job_for  # noqa: E402
from planner.tape.format import Monomial  # noqa: E402
from planner.tape.variants.precision import Precision  # noqa: E402
from planner.tape.variants.variant import StepVariant  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from trainers import families  # noqa: E402
from trainers.data import parts  # noqa: E402
from trainers.families.common.encoding import Encoder  # noqa: E402
from trainers.recording import tapes  # noqa: E402
from trainers.step import step  # noqa: E402

PROFILE = lookup.model("qwen-image-2.1")
VARIANT = StepVariant("full", Precision("half", "", autocast=False), "full", one_sample=False)


def test_a_place_of_the_sequence_stands_for_four_tokens_of_the_image() -> None:
    kind = families.family(PROFILE)
    cells = grid(PROFILE, job_for(PROFILE, {"height": 128, "width": 192, "batch_size": 2, "text_tokens": 7}))
    assert (cells["H"], cells["W"]) == (4, 6)
    inputs, target = kind.inputs_and_target(kind.batch(cells, "cpu", torch.float32))
    assert inputs["hidden_states"].shape == target.shape == (2, 8 * 12, 64)
    assert inputs["img_shapes"] == [[(1, 8, 12)]] * 2
    assert inputs["img_mask"].tolist() == [[False] * 7 + [True] * 24] * 2


def test_the_loss_is_over_the_image_which_stands_behind_the_text() -> None:
    target = torch.zeros(1, 8, 64)
    prediction = torch.cat([torch.full((1, 3, 64), 9.0), torch.ones(1, 8, 64)], dim=1)
    assert families.family(PROFILE).loss(prediction, target, {}).item() == 1.0


def test_a_row_more_than_samples_is_a_length_of_tapes_that_hold_for_any_batch() -> None:
    """Rows of the table of modulation. With one sample they are a number, and even sizes no multiples of that."""
    table = step.build_model(PROFILE, *VARIANT.records(PROFILE), tapes.shallow_config(PROFILE)).modulation[1]
    many, one = (tapes.step_tape(PROFILE, VARIANT._replace(one_sample=one)) for one in (False, True))
    row = Monomial(2 * table.out_features, tuple(int(atom == "M") for atom in many.atoms))
    assert row in many.sizes and many.of_batch == {"B", "M"}
    assert Monomial(2 * row.coefficient, (0,) * len(one.atoms)) in one.sizes and "M" not in one.atoms


SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"


def test_prompts_are_what_the_last_layer_makes_of_them_behind_the_system_s_message(tmp_path: Path) -> None:
    """Before the final norm, which transformers puts into the last of its hidden states."""
    profile = tiny.profile(PROFILE.name)
    folder = tiny.folder(tmp_path, profile)
    (turn,) = families.family(profile).text_turns()
    model = parts.load(folder, turn.part, turn.class_name, torch.float32)
    words = parts.load_helper(folder, turn.helper)
    made = turn.encode(Encoder(model, words, tokens=512), ["a red cat"])["prompt"]
    whole = words(f"{SYSTEM}<|im_start|>user\na red cat<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    states = []
    last = model.model.language_model.layers[-1]
    last.register_forward_hook(lambda module, given, output: states.append(output))
    model(**whole)
    expected = states[0][:, len(words(SYSTEM).input_ids) :]
    assert 3 < made.shape[1] < whole.input_ids.shape[1]
    torch.testing.assert_close(made, expected)


def test_a_prompt_longer_than_planned_is_cut(tmp_path: Path) -> None:
    profile = tiny.profile(PROFILE.name)
    folder = tiny.folder(tmp_path, profile)
    (turn,) = families.family(profile).text_turns()
    model = parts.load(folder, turn.part, turn.class_name, torch.float32)
    encoder = Encoder(model, parts.load_helper(folder, turn.helper), tokens=6)
    assert turn.encode(encoder, ["a red cat " * 9])["prompt"].shape[1] == 6
