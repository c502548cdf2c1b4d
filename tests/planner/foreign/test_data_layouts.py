"""The data set that a command names and that is not there: in the layout of its reader, and nowhere else."""

from __future__ import annotations

import csv
import os
import sys
import tomllib
from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.foreign.data_layouts import data_of
from planner.rehearsal.hollow.hollow_data import CAPTION, HollowData
from planner.rehearsal.hollow.hollow_files import hollow_files
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, write_plan

DIFFSYNTH = (
    "accelerate launch examples/wanvideo/model_training/train.py --dataset_base_path data/clips "
    "--dataset_metadata_path data/clips/metadata.csv --height 64 --width 96 --num_frames 5 --lora_base_model dit "
    "--model_id_with_origin_paths Wan-AI/Wan2.1-I2V-14B-480P:diffusion_pytorch_model*.safetensors"
)
FLUX = (
    "accelerate launch examples/dreambooth/train_dreambooth_lora_flux.py --pretrained_model_name_or_path "
    "black-forest-labs/FLUX.1-dev --instance_prompt dog --output_dir out --resolution 64 --mixed_precision bf16 "
    "--train_batch_size 3"
)
MUSUBI = (
    "accelerate launch --mixed_precision bf16 src/musubi_tuner/wan_train_network.py --task t2v-1.3B "
    "--dit dit.safetensors --dataset_config set.toml --sdpa --mixed_precision bf16 "
    "--network_module networks.lora_wan --network_dim 32"
)
SD_SCRIPTS = (
    "accelerate launch flux_train_network.py --pretrained_model_name_or_path models/flux1-dev.safetensors "
    "--ae ae.safetensors --clip_l clip_l.safetensors --t5xxl t5xxl.safetensors "
    "--network_module networks.lora_flux --mixed_precision bf16 --cache_latents --cache_text_encoder_outputs"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path


def of(command: str) -> HollowData:
    return data_of(tuple(command.split()), 1)


def test_diffsynths_table_of_clips_is_written_and_taken_away(here: Path) -> None:
    av = pytest.importorskip("av")
    data = of(f"{DIFFSYNTH} --extra_inputs input_image")
    assert str(data) == "2 grey samples of 5x64x96"
    (here / "data").mkdir()
    with hollow_files((), sys.executable, here / "run", os.environ, data):
        rows = list(csv.DictReader((here / "data/clips/metadata.csv").open()))
        assert [row["prompt"] for row in rows] == [CAPTION] * 2
        for row in rows:
            with av.open(str(here / "data/clips" / row["video"])) as clip:
                frames = [frame.to_ndarray(format="rgb24").shape for frame in clip.decode(video=0)]
            assert frames == [(64, 96, 3)] * 5
    assert list((here / "data").iterdir()) == []


def test_what_cannot_be_estimated_has_data_too() -> None:
    """Of fp32 LoRAs of FLUX.1 nothing is recorded; every rank of four takes three pictures."""
    fp32 = FLUX.replace("--mixed_precision bf16", "--mixed_precision no")
    assert len(data_of(tuple(f"{fp32} --instance_data_dir dog".split()), 4).media) == 12


def test_nothing_is_written_beside_what_is_there(here: Path) -> None:
    (here / "data/clips").mkdir(parents=True)
    with pytest.raises(VplanError, match="is there"):
        of(DIFFSYNTH)
    assert list((here / "data/clips").iterdir()) == []


def test_a_folder_of_pictures_has_nothing_but_pictures() -> None:
    """`DreamBoothDataset` opens every file of its folder as one; a step takes three."""
    data = of(f"{FLUX} --instance_data_dir dog")
    assert [(medium.path.name, *medium[1:]) for medium in data.media] == [
        (f"sample{number}.png", 1, 64, 64) for number in range(3)
    ]
    assert not data.texts
    assert str(data) == "3 grey samples of 64x64"


def test_musubi_tuners_clips_and_caches(here: Path) -> None:
    """Of each length that is trained one cache of latents, named as its reader takes names apart."""
    from safetensors import safe_open

    table = '[[datasets]]\nvideo_directory = "clips"\ncache_directory = "cache"\ntarget_frames = [1, 5]\n'
    (here / "set.toml").write_text(f'[general]\nresolution = [96, 64]\ncaption_extension = ".cap"\n{table}')
    data = of(MUSUBI)
    assert [(medium.frames, medium.height, medium.width) for medium in data.media] == [(5, 64, 96)] * 2
    with hollow_files((), sys.executable, here / "run", os.environ, data):
        assert (here / "clips/sample0.cap").read_text() == CAPTION
        names = sorted(path.name for path in (here / "cache").iterdir())
        assert names[:3] == [
            "sample0_00000-001_0096x0064_wan.safetensors",
            "sample0_00000-005_0096x0064_wan.safetensors",
            "sample0_wan_te.safetensors",
        ]
        with safe_open(here / "cache" / names[1], "pt") as file:
            assert file.get_slice("latents_2x8x12_bfloat16").get_shape() == [16, 2, 8, 12]
        with safe_open(here / "cache" / names[2], "pt") as file:
            assert file.get_slice("varlen_t5_bfloat16").get_shape() == [512, 4096]
    assert sorted(path.name for path in here.iterdir()) == ["run", "set.toml"]
    clips = data_of(("python", "src/musubi_tuner/wan_cache_latents.py", "--dataset_config", "set.toml"), 1)
    assert clips.media == data.media
    assert not clips.tensors


def test_a_file_of_a_data_set_is_made_at_the_estimates_shape() -> None:
    """Where it is not there either: 81 frames of Wan at 480x832, and one picture of FLUX.1 at its usual size."""
    data = of(MUSUBI)
    (text,) = (text for path, text in data.texts.items() if path.suffix == ".toml")
    (table,) = tomllib.loads(text)["datasets"]
    assert (table["target_frames"], tomllib.loads(text)["general"]["resolution"]) == ([81], [832, 480])
    pictures = of(f"{SD_SCRIPTS} --dataset_config set.toml")
    (text,) = (text for path, text in pictures.texts.items() if path.suffix == ".toml")
    assert tomllib.loads(text)["general"]["resolution"] == [1024, 1024]


def test_sd_scripts_folder_says_how_often(here: Path) -> None:
    data = of(f"{SD_SCRIPTS} --train_data_dir pictures --resolution 96,64 --caption_extension .txt")
    assert {medium.path.parent.relative_to(here).as_posix() for medium in data.media} == {f"pictures/1_{CAPTION}"}
    assert {medium[2:] for medium in data.media} == {(64, 96)}
    assert {path.suffix for path in data.texts} == {".txt"}


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("python my_loop.py --data x", "does not belong to a supported trainer"),
        (f"{FLUX} --dataset_name someone/set", "--dataset_name 'someone/set' names no folder"),
        (FLUX, "names no data set"),
        (f"{DIFFSYNTH} --extra_inputs vace_video", "vace_video reads is not known"),
        (MUSUBI.replace("wan_train", "hv_train").replace("--task t2v-1.3B ", ""), "rehearse its two caching commands"),
    ],
)
def test_an_unknown_layout_is_refused_in_one_line(command: str, fault: str) -> None:
    with pytest.raises(VplanError, match=fault) as caught:
        of(command)
    assert "\n" not in caught.value.message


def test_our_own_training() -> None:
    job = Job(model="wan2.1-t2v-1.3b", method="lora", frames=9, height=480, width=832)
    machine = Machine(gpu="rtx4090", gpus=1)
    write_plan(Plan.under(Configuration.of(job, Strategy(), machine)), "plan.toml")
    data = of("vplan train plan.toml --data clips --output run")
    assert {medium[1:] for medium in data.media} == {(9, 480, 832)}
    assert {path.suffix for path in data.texts} == {".txt"}
