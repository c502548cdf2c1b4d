"""Datasets of sd-scripts with sizes and batches of their own: each is a shape, changed where it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.script import from_file
from planner.foreign.case import Case, read_case
from planner.foreign.change_words import changed_words, move_words
from planner.foreign.pricing import Pricing
from planner.foreign.smallest_change import fix_of_changes, smaller_batches

COMMAND = (
    "accelerate launch {} --pretrained_model_name_or_path m.safetensors --dataset_config ds.toml "
    "--mixed_precision bf16 --gradient_checkpointing --sdpa --cache_latents --cache_text_encoder_outputs {}"
)
SDXL = COMMAND.format("sdxl_train_network.py", "--network_module networks.lora --network_train_unet_only {}")
FLUX = COMMAND.format("flux_train.py", "--clip_l c --t5xxl t --ae a --full_bf16 --optimizer_type adafactor {}")
TWO = """
[[datasets]]
resolution = 1024
batch_size = 4
[[datasets.subsets]]
image_dir = 'a'
num_repeats = 10
[[datasets]]
resolution = [768, 768]
batch_size = 8
[[datasets.subsets]]
image_dir = 'b'
"""


def case_of(folder: Path, command: str, data: str, words: str = "") -> Case:
    (folder / "train.sh").write_text(command.format(words))
    (folder / "ds.toml").write_text(data)
    return read_case(*dialects.read_script(from_file(folder / "train.sh")), {}, {"gpu": "rtx3060"})


def shapes(case: Case) -> list[tuple[int, int, int | None]]:
    return [(each.height, each.width, each.batch_size) for each in case.job.shapes]


@pytest.mark.parametrize("command", [SDXL, FLUX])
def test_a_batch_is_that_of_its_own_dataset(command: str, tmp_path: Path) -> None:
    case = case_of(tmp_path, command, TWO)
    assert shapes(case) == [(1024, 1024, 4), (768, 768, 8)]
    assert (case.job.height, case.job.batch_size) == (1024, 4)
    assert any("1024x1024 at batch 4, 768x768 at batch 8" in note for note in case.notes)


@pytest.mark.parametrize(
    ("data", "words", "expected"),
    [
        # A key that a dataset has not is that of [general], then the flag's; library/config_util.py.
        (
            "[general]\nbatch_size = 2\nresolution = 512\n" + TWO,
            "--train_batch_size 3",
            [(1024, 1024, 4), (768, 768, 8)],
        ),
        (
            "[general]\nbatch_size = 2\n[[datasets]]\nresolution = 512\n[[datasets]]\nbatch_size = 5\n",
            "--resolution 768,640",
            [(512, 512, 2), (640, 768, 5)],
        ),
        ("[[datasets]]\nresolution = [512, 640]\n", "--train_batch_size 3", [(640, 512, 3)]),
        ("[[datasets]]\nresolution = 512\n[[datasets]]\nresolution = 512\n", "--train_batch_size 3", [(512, 512, 3)]),
    ],
)
def test_what_a_dataset_does_not_say_is_said_of_all(
    data: str, words: str, expected: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    assert shapes(case_of(tmp_path, SDXL, data, words)) == expected


def test_two_shapes_need_what_the_larger_needs_and_not_both_at_their_worst(tmp_path: Path) -> None:
    """Each alone takes 9.8 and 9.8 GiB; 1024 pixels in batches of 8 would take 12.5."""
    case = case_of(tmp_path, SDXL, TWO, "--optimizer_type Prodigy --network_dim 32")
    alone = [case.changed({"buckets": (), **shape.__dict__}) for shape in case.job.shapes]
    peaks = [Pricing(each).outcome(each).estimate.phases["train"].allocated_bytes for each in alone]
    together = Pricing(case).outcome(case).estimate.phases["train"]
    assert together.allocated_bytes == pytest.approx(max(peaks), rel=0.02)
    mixed = case.changed({"buckets": (), "batch_size": 8})
    assert Pricing(mixed).outcome(mixed).estimate.phases["train"].allocated_bytes > 1.2 * max(peaks)


@pytest.mark.parametrize(
    ("data", "words", "expected"),
    [
        (TWO, "", ["datasets[0].batch_size = 2", "datasets[1].batch_size = 4"]),
        (
            TWO.replace("batch_size = 8", ""),
            "--train_batch_size 8",
            ["datasets[0].batch_size = 2", "--train_batch_size 4"],
        ),
        (
            "[general]\nbatch_size = 4\n[[datasets]]\nresolution = 512\n[[datasets]]\nresolution = 768\n",
            "",
            ["general.batch_size = 2"],
        ),
        (
            "[[datasets]]\nresolution = 512\nbatch_size = 4\n[[datasets]]\nresolution = 512\nbatch_size = 4\n",
            "",
            ["datasets[0].batch_size = 2", "datasets[1].batch_size = 2"],
        ),
    ],
)
def test_half_a_batch_is_told_of_each_dataset_where_it_is_said(
    data: str, words: str, expected: list[str], tmp_path: Path
) -> None:
    case = case_of(tmp_path, SDXL, data, words)
    halved = smaller_batches(case.dialect)[0]
    step = halved.steps(case.fields)[0]
    (told,) = move_words(case, case.changed(step), halved)
    assert told.replace("\n", " ").split(" --gradient_accumulation_steps")[0] == " ".join(expected)
    assert told.endswith("--gradient_accumulation_steps 2")


def test_only_a_lower_batch_than_all_have_in_common_changes_training(tmp_path: Path) -> None:
    """3 and 8 have no divisor in common, so no number of passes has the same samples."""
    case = case_of(tmp_path, SDXL, TWO.replace("batch_size = 4", "batch_size = 3"))
    several, capped = smaller_batches(case.dialect)
    assert several.steps(case.fields) == ()
    first = capped.steps(case.fields)[0]
    assert list(changed_words(case, case.changed(first).fields, frozenset(first))) == ["datasets[1].batch_size = 6"]
    pricing = Pricing(case)
    fix = fix_of_changes(case, pricing.outcome(case), [capped], first, pricing)
    assert fix is not None and fix.lossy


def test_a_step_inside_backward_has_fewer_samples_and_no_more_passes(tmp_path: Path) -> None:
    equal = TWO.replace("batch_size = 8", "batch_size = 4")
    case = case_of(tmp_path, FLUX, equal, "--fused_backward_pass --max_grad_norm 0")
    capped = smaller_batches(case.dialect)[1]
    first, *_, last = capped.steps(case.fields)
    assert (first, last) == ({"batch_size": 3}, {"batch_size": 1})
    words = list(changed_words(case, case.changed(first).fields, frozenset(first)))
    assert words == ["datasets[0].batch_size = 3", "datasets[1].batch_size = 3"]
    # Where steps accumulate, as many samples come in several passes.
    assert capped.steps(case_of(tmp_path, SDXL, equal).fields) == ()


def test_one_dataset_has_no_shapes_to_cap_and_a_file_of_two_is_not_written(tmp_path: Path) -> None:
    one = case_of(tmp_path, SDXL, "[[datasets]]\nresolution = 512\nbatch_size = 4\n")
    assert one.job.buckets == () and smaller_batches(one.dialect)[1].steps(one.fields) == ()
    two = case_of(tmp_path, SDXL, TWO)
    (binding,) = (each for each in two.dialect.bindings if "buckets" in each.fields)
    with pytest.raises(InexpressibleError, match="one dataset is written"):
        binding.to_settings(two.fields)
