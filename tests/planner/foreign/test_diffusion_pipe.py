"""diffusion-pipe's shapes and encoders: directories' own sizes, a batch for images, prompts encoded in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, settings_for, translate
from planner.dialects.base.script import from_file
from planner.dialects.diffusion_pipe.settings import DIALECT
from planner.errors import VplanError

CONFIG = """
dataset = "dataset.toml"
pipeline_stages = 1
micro_batch_size_per_gpu = 1
{0}
[model]
type = "wan"
ckpt_path = "Wan2.1-T2V-14B"
dtype = "bfloat16"
{1}
[adapter]
type = "lora"
rank = 32
[optimizer]
type = "adamw_optimi"
"""


def read(folder: Path, top: str = "", model: str = "", dataset: str = "resolutions = [512]") -> Translation:
    (folder / "config.toml").write_text(CONFIG.format(top, model))
    (folder / "dataset.toml").write_text(dataset)
    return translate(*dialects.read_script(from_file(folder / "config.toml")))


def test_a_directory_has_sizes_of_its_own(tmp_path: Path) -> None:
    one = '[[directory]]\npath = "a"\n'
    text = f"resolutions = [256]\nframe_buckets = [33]\n{one}{one}resolutions = [[640, 480]]\nframe_buckets = [1, 81]\n"
    job = read(tmp_path, dataset=text).job
    assert [(shape.width, shape.height, shape.frames) for shape in job["buckets"]] == [
        (256, 256, 33),
        (640, 480, 1),
        (640, 480, 81),
    ]
    assert (job["frames"], job["height"], job["width"]) == (81, 480, 640)
    (only,) = {read(tmp_path, dataset=f"resolutions = [256]\n{one}size_buckets = [[832, 480, 33]]\n").job["width"]}
    assert only == 832


def test_images_of_a_video_model_have_their_own_batch(tmp_path: Path) -> None:
    images = "image_micro_batch_size_per_gpu = 8"
    found = read(tmp_path, images, dataset="resolutions = [512]\nframe_buckets = [1, 33]")
    job = found.job
    assert job["batch_size"] == 1 and [shape.batch_size for shape in job["buckets"]] == [8, None]
    settings = settings_for(DIALECT, job | found.strategy | {"gpus": 1, "nodes": 1})
    assert settings["config:image_micro_batch_size_per_gpu"] == 8 and settings["config:micro_batch_size_per_gpu"] == 1
    assert read(tmp_path, images).job["batch_size"] == 8
    assert read(tmp_path, images, dataset="resolutions = [512]\nframe_buckets = [33]").job["batch_size"] == 1


def test_wan_may_encode_in_the_loop(tmp_path: Path) -> None:
    assert read(tmp_path).strategy["text_encoder"] == "cached"
    found = read(tmp_path, model="cache_text_embeddings = false")
    assert found.strategy["text_encoder"] == "resident"
    settings = settings_for(DIALECT, found.job | found.strategy | {"gpus": 1, "nodes": 1})
    assert settings["config:model.cache_text_embeddings"] is False


@pytest.mark.parametrize("evaluated", ["eval_datasets = ['b.toml']", "eval_datasets = [{name = 'a', config = 'b'}]"])
def test_an_evaluation_with_all_blocks_on_the_gpu_is_refused(evaluated: str, tmp_path: Path) -> None:
    swaps = "blocks_to_swap = 20\ndisable_block_swap_for_eval = true\n"
    with pytest.raises(VplanError, match="disable_block_swap_for_eval"):
        read(tmp_path, swaps + evaluated)
    assert read(tmp_path, swaps).strategy["swap_blocks"]


NAMED = "eval_datasets = [{name = 'held out', config = 'eval.toml'}]"


@pytest.mark.parametrize("listed", [NAMED, "eval_datasets = ['eval.toml']"])
def test_evaluation_at_a_larger_size_is_said(listed: str, tmp_path: Path) -> None:
    (tmp_path / "eval.toml").write_text("resolutions = [1024]\nframe_buckets = [1, 129]\n")
    (tmp_path / "config.toml").write_text(CONFIG.format(listed, ""))
    (tmp_path / "dataset.toml").write_text("resolutions = [512]\nframe_buckets = [33]")
    dialect, given = dialects.read_script(from_file(tmp_path / "config.toml"))
    assert given.unknown == ()
    (note,) = [note for note in translate(dialect, given).notes if note.startswith("eval_datasets")]
    assert "129 frames of 1024x1024, batch 1" in note and "not estimated, and may take more" in note


@pytest.mark.parametrize(("batch", "more"), [("", False), ("eval_micro_batch_size_per_gpu = 2", True)])
def test_evaluation_of_no_more_than_trains_takes_no_more(batch: str, more: bool, tmp_path: Path) -> None:
    (tmp_path / "eval.toml").write_text("resolutions = [512]")
    notes = read(tmp_path, f"{NAMED}\n{batch}").notes
    (note,) = [note for note in notes if note.startswith("eval_datasets:")]
    assert ("may take more" in note) == more


def test_an_evaluation_set_that_is_not_here_is_said(tmp_path: Path) -> None:
    (note,) = [note for note in read(tmp_path, NAMED).notes if note.startswith("eval_datasets")]
    assert "eval.toml is not here" in note and "may take more" in note


LOKR = CONFIG.replace('type = "lora"\nrank = 32', 'type = "lokr"\nrank = 1e6\ndecompose_factor = 8')


def lokr(folder: Path, model: str = "", adapter: str = "") -> Translation:
    (folder / "config.toml").write_text(LOKR.format("", model).replace("decompose_factor = 8", f"{adapter}\n"))
    (folder / "dataset.toml").write_text("resolutions = [512]")
    return translate(*dialects.read_script(from_file(folder / "config.toml")))


def test_pefts_lokr_is_the_lora_with_as_many_numbers(tmp_path: Path) -> None:
    side, inner, factor = 5120, 13824, 8  # of Wan 2.1 14B: eight square layers of a block, and two between these sides
    numbers = 10 * factor**2 + 8 * (side // factor) ** 2 + 2 * (side // factor) * (inner // factor)
    found = lokr(tmp_path, adapter="decompose_factor = 8")
    assert found.job["lora_rank"] == round(numbers / (8 * 2 * side + 2 * (side + inner)))
    assert (found.version, found.job["lora_dropout"]) == ("lokr", 0.0)
    assert any("plus the full weight deltas that it builds" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model", "adapter", "version"),
    [
        ("", 'dtype = "float32"', "lokr-fp32"),
        ('transformer_dtype = "float8"', "", "half-adapters-lokr"),
        ('transformer_dtype = "float8"', 'dtype = "float32"', "lokr-fp32"),
    ],
)
def test_its_changes_are_in_the_adapters_format(model: str, adapter: str, version: str, tmp_path: Path) -> None:
    assert lokr(tmp_path, model, adapter).version == version


def test_a_lokr_that_is_not_priced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="rank_dropout is not priced"):
        lokr(tmp_path, adapter="rank_dropout = 0.1")
    with pytest.raises(VplanError, match="over nf4 is not priced"):
        lokr(tmp_path, 'transformer_dtype = "nf4"')
