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


def test_frames_are_cut_to_what_the_vae_takes(tmp_path: Path) -> None:
    """models/base.py ``align_frames``."""
    buckets = "resolutions = [256]\nframe_buckets = [{}]\n"
    assert [read(tmp_path, dataset=buckets.format(given)).job["frames"] for given in (24, 21, 2)] == [21, 21, 1]


def test_images_of_a_video_model_have_their_own_batch(tmp_path: Path) -> None:
    images = "image_micro_batch_size_per_gpu = 8"
    found = read(tmp_path, images, dataset="resolutions = [512]\nframe_buckets = [1, 33]")
    job = found.job
    assert job["batch_size"] == 1 and [shape.batch_size for shape in job["buckets"]] == [8, None]
    settings = settings_for(DIALECT, job | found.strategy | {"gpus": 1, "nodes": 1})
    assert settings["config:image_micro_batch_size_per_gpu"] == 8 and settings["config:micro_batch_size_per_gpu"] == 1
    assert read(tmp_path, images).job["batch_size"] == 8
    assert read(tmp_path, images, dataset="resolutions = [512]\nframe_buckets = [33]").job["batch_size"] == 1


def test_only_an_adapter_trains_with_swapped_blocks(tmp_path: Path) -> None:
    swap = "activation_checkpointing = true\nblocks_to_swap = 20"
    assert read(tmp_path, swap).strategy["swap_blocks"] == 20
    (tmp_path / "config.toml").write_text(CONFIG.format(swap, "").replace('[adapter]\ntype = "lora"\nrank = 32\n', ""))
    with pytest.raises(VplanError, match="refuses blocks_to_swap without an adapter") as raised:
        translate(*dialects.read_script(from_file(tmp_path / "config.toml")))
    assert raised.value.fix == "leave it out"


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


NAMES = """
dataset = "dataset.toml"
[model]
dtype = "bfloat16"
{}
[adapter]
type = "lora"
[optimizer]
type = "adamw_optimi"
"""
PLAIN = "resolutions = [512]\n[[directory]]\npath = 'a'\n"
PAIRS = PLAIN + "control_path = 'b'\n"


def named(folder: Path, model: str, dataset: str = "") -> Translation:
    """``dataset``: its file; none is written where it is empty."""
    (folder / "config.toml").write_text(NAMES.format(model))
    if dataset:
        (folder / "dataset.toml").write_text(dataset)
    return translate(*dialects.read_script(from_file(folder / "config.toml")))


@pytest.mark.parametrize(
    ("kind", "path", "model"),
    [
        ("qwen_image", "transformer_path = 'c/qwen_image_bf16.safetensors'", "qwen-image"),
        ("qwen_image", "transformer_path = 'c/qwen_image_edit_2509_fp8_e4m3fn.safetensors'", "qwen-image-edit"),
        ("flux2", "diffusion_model = 'c/flux-2-klein-base-4b.safetensors'", "flux.2-klein-4b"),
        ("flux2", "diffusion_model = 'c/flux-2-klein-base-9b.safetensors'", "flux.2-klein-9b"),
        ("flux2", "diffusion_model = 'c/flux2_dev_fp8mixed.safetensors'", "flux.2-dev"),
    ],
)
def test_a_file_names_its_model(kind: str, path: str, model: str, tmp_path: Path) -> None:
    assert named(tmp_path, f"type = '{kind}'\n{path}").job["model"] == model


@pytest.mark.parametrize("path", ["my.safetensors", "qwen_image_edit_2511_bf16.safetensors"])
def test_a_file_that_names_none_is_quoted(path: str, tmp_path: Path) -> None:
    """2511 takes what the trainer's own config of the model has not (zero_cond_t)."""
    with pytest.raises(VplanError, match=f"qwen_image model this is from transformer_path '{path}'"):
        named(tmp_path, f"type = 'qwen_image'\ntransformer_path = '{path}'")
    with pytest.raises(VplanError, match="from no ckpt_path, diffusers_path"):
        named(tmp_path, "type = 'flux2'")


@pytest.mark.parametrize(
    ("kind", "path", "plain", "edit"),
    [
        ("qwen_image", "diffusers_path = 'Qwen-Image'", "qwen-image", "qwen-image-edit"),
        ("qwen_image", "transformer_path = 'qwen_image_edit_bf16.safetensors'", "qwen-image", "qwen-image-edit"),
        ("flux", "diffusers_path = 'FLUX.1-dev'", "flux.1-dev", "flux.1-kontext-dev"),
        ("flux", "diffusers_path = 'FLUX.1-Kontext-dev'", "flux.1-dev", "flux.1-kontext-dev"),
    ],
)
def test_the_data_decides_whether_images_are_edited(
    kind: str, path: str, plain: str, edit: str, tmp_path: Path
) -> None:
    words = f"type = '{kind}'\n{path}"
    assert named(tmp_path, words, PLAIN).job["model"] == plain
    found = named(tmp_path, words, PAIRS)
    assert found.job["model"] == edit and any("one to edit beside it" in note for note in found.notes)


def test_images_to_edit_of_models_that_may_take_some(tmp_path: Path) -> None:
    words = "type = 'flux2'\ndiffusion_model = 'flux2-dev.safetensors'"
    assert named(tmp_path, words, PAIRS).job["references"] == 1
    assert named(tmp_path, words, PLAIN).job.get("references") in (None, 0)
    found = named(tmp_path, "type = 'sd3'\ndiffusers_path = 'stable-diffusion-3.5-medium'", PAIRS)
    assert any("control_path is not estimated" in note for note in found.notes)


def test_anima_has_its_conditioner_in_it(tmp_path: Path) -> None:
    words = "type = 'anima'\ntransformer_path = 'anima-preview.safetensors'\nllm_path = 'qwen_3_06b_base.safetensors'"
    found = named(tmp_path, words, PLAIN)
    assert found.job["model"] == "anima" and any("its own code of Anima" in note for note in found.notes)
    assert sum("conditioner is adapted too" in note for note in found.notes) == 1
    frozen = named(tmp_path, f"{words}\nllm_adapter_lr = 0", PLAIN)
    assert not any("conditioner is adapted" in note for note in frozen.notes)
