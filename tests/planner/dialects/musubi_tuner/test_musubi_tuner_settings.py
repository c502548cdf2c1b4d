"""planner/dialects/musubi_tuner: which settings beside the priced ones are refused, said or read."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.dialects.musubi_tuner import settings
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.change_words import changed_words
from planner.foreign.smallest_change import smaller_batches

COMMAND = (
    "accelerate launch src/musubi_tuner/{}_train_network.py --dit a.safetensors --dataset_config data.toml --sdpa "
    "--mixed_precision bf16 "
)
KLEIN = COMMAND.format("flux_2") + "--model_version klein-base-4b "
EDIT = COMMAND.format("qwen_image") + "--model_version edit "
DATA = "[general]\nresolution = [1024, 1024]\n[[datasets]]\nimage_directory = 'a'\n"


def translated(folder: Path, words: str, data: str = DATA) -> Translation:
    (folder / "train.sh").write_text(words)
    (folder / "data.toml").write_text(data)
    return translate(*dialects.read_script(from_file(folder / "train.sh")))


@pytest.mark.parametrize(
    ("words", "data", "references"),
    [
        (KLEIN, DATA, None),
        (KLEIN, f"{DATA}control_directory = 'b'\n", 1),
        (EDIT, f"{DATA}control_directory = 'b'\n", None),
    ],
)
def test_control_images_of_flux_2_are_read(words: str, data: str, references: int | None, tmp_path: Path) -> None:
    assert translated(tmp_path, words, data).job["references"] == references


@pytest.mark.parametrize(
    ("words", "data", "why"),
    [
        (KLEIN + "--network_module lycoris.kohya", DATA, "'lycoris.kohya' is not priced"),
        (KLEIN + "--dim_from_weights", DATA, "not priced without --network_dim"),
        (EDIT + "--num_layers 40", DATA, "another number of blocks"),
        (EDIT, f"{DATA}control_resolution = [512, 512]\n", "control_resolution is not priced"),
        (COMMAND.format("zimage") + "--use_32bit_attention", DATA, "attention in fp32"),
        (COMMAND.format("hv") + "--dit_dtype float32", DATA, "weights in fp32"),
        (COMMAND.format("wan"), DATA, "no --task: which model this script trains is not said"),
        (COMMAND.format("wan") + "--task ii2v-A14B", DATA, "--task 'ii2v-A14B' is none that is estimated"),
        (COMMAND.format("wan") + "--task t2v-14B", f"{DATA}fp_1f_clean_indices = [0]\n", "beside clean ones"),
    ],
)
def test_what_is_not_priced_is_refused_by_name(words: str, data: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=why):
        translated(tmp_path, words, data)


def test_values_that_do_nothing_are_not_refused(tmp_path: Path) -> None:
    words = COMMAND.format("hv") + "--dit_dtype bfloat16 --network_module networks.lora --compile_mode default"
    assert not any("is not estimated" in note for note in translated(tmp_path, words).notes)
    same_size = f"{DATA}control_directory = 'b'\ncontrol_resolution = 1024\n"
    assert translated(tmp_path, EDIT + "--num_layers 60", same_size).job["model"] == "qwen-image-edit"


def test_what_is_not_estimated_is_said(tmp_path: Path) -> None:
    words = (
        KLEIN
        + "--split_attn --sage_attn --compile --compile_mode max-autotune --network_args include_patterns=['.*mod.*'] "
    )
    notes = translated(tmp_path, words + "--block_swap_h2d_only --block_swap_ring_size 4").notes
    for text in (
        "--split_attn is not estimated",
        "it has no backward",
        "CUDA graphs keep memory of their own",
        "include_patterns gives more layers an adapter",
        "a ring of 4 blocks",
    ):
        assert any(text in note for note in notes)


def test_a_flag_that_ends_its_own_script_is_said_and_not_written(tmp_path: Path) -> None:
    """flux_kontext_train_network.py:61 and flux_kontext_cache_text_encoder_outputs.py:86 at 30c658c."""
    kontext = translated(tmp_path, COMMAND.format("flux_kontext") + "--fp8_t5")
    assert any("no torch.float8e4m3fn" in note for note in kontext.notes)
    asked = {"model": "flux.1-kontext-dev", "text_encoder_dtype": "fp8"}
    with pytest.raises(InexpressibleError, match="bf16, or fp8 by a flag"):
        settings._write_encoder(asked)
    assert settings._write_encoder({**asked, "model": "wan2.1-t2v-14b"}) == {"--fp8_t5": True}


@pytest.mark.parametrize(
    ("words", "version"),
    [
        ("--fp8_base", "cast-whole"),
        ("--fp8_base --fp8_scaled", ""),
        ("--fp8_base --blocks_to_swap 20 --gradient_checkpointing", "cast-whole"),
        ("--fp8_base --dit wan2.1_t2v_14B_fp8_e4m3fn.safetensors", ""),
        ("", ""),
    ],
)
def test_a_file_that_is_cast_to_8_bits_is_read_whole(words: str, version: str, tmp_path: Path) -> None:
    command = COMMAND.format("wan").replace("--dit a.safetensors", "" if "--dit " in words else "--dit a.safetensors")
    told = translated(tmp_path, f"{command} --task t2v-14B --network_module networks.lora_wan {words}")
    assert told.version == version
    assert any("a 16-bit file and its fp8 copy at once" in note for note in told.notes) == bool(version)


CLIPS = "[[datasets]]\nvideo_directory = 'a'\nresolution = [{}]\ntarget_frames = [{}]\n"


@pytest.mark.parametrize(
    ("resolution", "size"),
    [
        # Its own BucketSelector(resolution, architecture="wan") at 30c658c: the buckets with the most pixels, and of
        # these the one most like the resolution.
        ("480, 270", (352, 368)),
        ("854, 480", (512, 800)),
        ("848, 480", (480, 848)),
        ("1000, 1000", (1008, 992)),
    ],
)
def test_clips_have_the_largest_bucket_of_a_resolution(resolution: str, size: tuple[int, int], tmp_path: Path) -> None:
    wan = COMMAND.format("wan") + "--task t2v-14B "
    found = translated(tmp_path, wan, CLIPS.format(resolution, "80"))
    assert (found.job["height"], found.job["width"]) == size
    assert found.job["frames"] == 77  # (80 - 1) // 4 * 4 + 1
    assert any("stands for buckets" in note for note in found.notes) == (resolution != "848, 480")


def test_images_have_buckets_only_where_they_are_asked_for(tmp_path: Path) -> None:
    data = DATA.replace("[1024, 1024]", "1000")
    found = translated(tmp_path, KLEIN, data.replace("resolution", "enable_bucket = true\nresolution"))
    assert (found.job["height"], found.job["width"]) == (1008, 992)
    with pytest.raises(VplanError, match="enable_bucket is off"):
        translated(tmp_path, KLEIN, data)


def test_each_dataset_has_its_own_batch(tmp_path: Path) -> None:
    data = "[general]\nbatch_size = 2\nresolution = 512\n[[datasets]]\nimage_directory = 'a'\nbatch_size = 4\n"
    found = translated(tmp_path, KLEIN, f"{data}[[datasets]]\nimage_directory = 'b'\nresolution = 1024\n")
    assert [(each.height, each.batch_size) for each in found.job["buckets"]] == [(512, 4), (1024, 2)]
    assert (found.job["height"], found.job["batch_size"]) == (1024, 2)


def test_a_smaller_batch_or_size_is_told_of_each_dataset(tmp_path: Path) -> None:
    data = "[general]\nbatch_size = 2\n[[datasets]]\nimage_directory = 'a'\nbatch_size = 4\nresolution = 512\n"
    data += "[[datasets]]\nimage_directory = 'b'\nresolution = 1024\n"
    translated(tmp_path, KLEIN, data)
    case = read_case(*dialects.read_script(from_file(tmp_path / "train.sh")), {}, {"gpu": "80GB"})
    half = smaller_batches(case.dialect)[0].steps(case.fields)[0]
    words = ["datasets[0].batch_size = 2", "general.batch_size = 1"]
    assert list(changed_words(case, case.changed(half).fields, frozenset({"batch_size"}))) == words
    # Clips that would be left out, or cut, are said in words.
    with pytest.raises(InexpressibleError):
        list(changed_words(case, case.changed({"buckets": ()}).fields, frozenset({"height"})))


def test_a_file_that_no_loader_of_it_reads_does_not_start(tmp_path: Path) -> None:
    words = COMMAND.format("wan").replace("a.safetensors", "Wan2.2-T2V-A14B-HighNoise-Q8_0.gguf") + "--task t2v-14B"
    assert [remark.flag for remark in translated(tmp_path, words).refused] == ["--dit"]
    assert not translated(tmp_path, COMMAND.format("wan") + "--task t2v-14B").refused
