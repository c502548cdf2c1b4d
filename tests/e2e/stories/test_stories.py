"""Five reports of runs that ran out of memory, as their authors typed them: where they end, and what is enough.

Bands are GiB allocated, worked by hand from parameter counts and from the live tensors of one block.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.commands import cli
from tests.e2e.stories.stories import (
    BOTH_CACHES,
    DIFFSYNTH,
    DIFFSYNTH_OLD,
    EASYANIMATE,
    FLUX,
    LATENTSYNC,
    PIPELINE,
    REPAIRED,
    ZERO_2,
    Answer,
    applied,
    check,
)

H100 = "h100-80gb"
QUICK = ("--no-fixes",)


RANK = ("no", "tight", "fits")


def write(folder: Path, script: str) -> Path:
    (folder / "train.sh").write_text(script)
    return folder / "train.sh"


def assert_changes_are_the_least(command: str, found: Answer, *options: str) -> None:
    """Every change printed fits when it is made, and none of its entries can be left out."""
    assert found.fixes
    for change in found.fixes:
        assert check(H100, applied(command, change), *QUICK, *options).verdict == "fits"
        for left_out in change:
            rest = [part for part in change if part != left_out]
            assert not rest or check(H100, applied(command, rest), *QUICK, *options).verdict != "fits"


# ---- DiffSynth-Studio


def test_diffsynth_81_frames_fit_as_its_script_is(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.toml")
    found = check(H100, DIFFSYNTH, "-o", plan)
    again = json.loads(CliRunner().invoke(cli, ["estimate", plan, "--json"]).stdout)
    assert (again["verdict"], again["peak"]) == (found.verdict, found.found["estimate"]["peak"])
    assert "the cache may grow to about" in found.notes
    assert (found.code, found.verdict, found.phase) == (0, "fits", "train")
    assert 42 <= found.allocated("load") <= 48 and 45 <= found.allocated("encode") <= 49
    assert 65 <= found.allocated("train") <= 70 and found.allocated("optimizer") < found.allocated("train")
    assert "denoise" not in found.found["estimate"]["phases"]
    assert "81 frames, the default" in found.notes
    assert "checkpointing is on without a flag" in found.notes
    assert "VAE (12.0 GiB) stay on the GPU" in found.notes
    assert found.fixes == [] and found.found["unknown"] == []


def test_diffsynth_129_frames_need_offloaded_checkpoints_or_the_split() -> None:
    command = f"{DIFFSYNTH} --num_frames 129"
    found = check(H100, command)
    assert (found.code, found.verdict, found.phase) == (3, "no", "train")
    assert 76 <= found.allocated("train") <= 81
    assert found.fixes[0] == ("--use_gradient_checkpointing_offload",)
    assert any("--task sft:train" in part and "--offload_models" in part for part in found.fixes[1])
    assert not any("--training_strategy" in part for change in found.fixes for part in change)
    assert "no batch-size flag" in found.notes
    offloaded = check(H100, applied(command, found.fixes[0]), *QUICK)
    assert offloaded.verdict == "fits" and 59 <= offloaded.allocated("train") <= 63
    assert offloaded.host - found.host == pytest.approx(21.6, abs=1)
    split = check(H100, applied(command, found.fixes[1]), *QUICK)
    assert split.verdict == "fits" and 66 <= split.allocated("train") <= 70


def test_diffsynth_s_script_of_early_2025_is_read_and_said_to_be_gone() -> None:
    found = check(H100, DIFFSYNTH_OLD, "--frames", "81")
    assert (found.code, found.verdict, found.phase) == (3, "no", "train")
    assert 290 <= found.allocated("train") <= 480
    assert "2025-06-13 (830b1b72)" in found.why("gone", "--training_strategy")
    assert "2025-06-13 (830b1b72)" in found.why("gone", "examples/wanvideo/train_wan_t2v.py")
    assert "shards nothing" in found.why("ineffective", "--training_strategy")
    assert found.fixes == [("--use_gradient_checkpointing",)]
    assert 57 <= check(H100, applied(DIFFSYNTH_OLD, found.fixes[0]), *QUICK, "--frames", "81").allocated("train") <= 62
    today = found.found["today"]
    assert "examples/wanvideo/model_training/train.py" in today and "--training_strategy" not in today


# ---- EasyAnimate


@pytest.fixture
def easyanimate(tmp_path: Path) -> Path:
    (tmp_path / "train.sh").write_text(EASYANIMATE)
    return tmp_path / "train.sh"


def test_easyanimate_runs_out_in_the_optimizer_step(easyanimate: Path, tmp_path: Path) -> None:
    """By 0.1 GiB in the first. Behind it the next clip would be encoded beside the gradients, which the script still
    holds in a list, and would not fit either."""
    found = check(H100, easyanimate)
    assert (found.verdict, found.phase) == ("no", "optimizer")
    assert found.found["estimate"]["machine"]["gpus"] == 4  # of CUDA_VISIBLE_DEVICES
    assert found.found["job"]["model"] == "easyanimate-v5.1-7b"  # of $MODEL_NAME
    assert 41 <= found.allocated("load") <= 44 and 76 <= found.allocated("first_step") <= 78
    assert 79 <= found.allocated("encode") <= 82 and 77 <= found.allocated("train") <= 84
    assert "batch 1" in found.why("ineffective", "--vae_mini_batch")
    assert "moves VAE and text encoder only" in found.notes and "no validation" in found.notes
    eight, zero = found.found["fixes"]
    assert (eight["change"], eight["lossy"]) == (["--use_8bit_adam"], True)
    assert "config/zero_stage2_config.json" in zero["change"][0] and not zero["lossy"]
    for fix in (eight, zero):
        changed = tmp_path / "changed.sh"
        changed.write_text(applied(EASYANIMATE, fix["change"]))
        assert check(H100, changed, *QUICK).verdict == "fits"


def test_easyanimate_under_zero_2_fits_on_four_cards_and_fills_two(tmp_path: Path) -> None:
    (tmp_path / "zero.sh").write_text(ZERO_2)
    four, two = (check(H100, tmp_path / "zero.sh", *flags) for flags in (QUICK, ("--gpus", "2", *QUICK)))
    assert four.verdict == "fits" and 40.5 <= four.allocated("train") < 45.5
    assert (two.code, two.verdict, two.phase) == (0, "tight", "optimizer")
    assert "PyTorch empties its cache" in two.notes


def test_easyanimate_of_half_the_length_is_no_worse_and_of_default_length_is_read(tmp_path: Path) -> None:
    whole = check(H100, write(tmp_path, EASYANIMATE), *QUICK)
    half = check(H100, write(tmp_path, EASYANIMATE.replace("n_frames=49", "n_frames=25")), *QUICK)
    assert RANK.index(half.verdict) >= RANK.index(whole.verdict)
    assert half.allocated("train") < whole.allocated("train")
    usual = check(H100, write(tmp_path, EASYANIMATE.replace("--video_sample_n_frames=49 ", "")), *QUICK)
    assert "17 frames, the default" in usual.notes


# ---- LatentSync


def test_latentsync_is_decided_in_validation_s_decode() -> None:
    found = check("rtx4090", LATENTSYNC)
    assert (found.code, found.verdict, found.phase) == (0, "tight", "decode")  # its authors say 23 GB
    assert "PyTorch empties its cache in decode" in found.notes
    changes = [change[0] for change in found.fixes]
    order = ("enable_slicing", "leave out the pipeline", "leave out unet = DDP", "AdamW8bit")
    places = [next(at for at, change in enumerate(changes) if word in change) for word in order]
    assert places == sorted(places)
    told = " ".join(changes)
    assert "guidance_scale" not in told and "accumulat" not in told and "inference model" not in told
    assert "no flag switches validation off" in found.notes


def test_latentsync_s_own_script_trains_512_pixels() -> None:
    found = check("24GB", LATENTSYNC.replace("stage1.yaml", "stage1_512.yaml"), *QUICK)
    assert (found.code, found.verdict, found.phase) == (3, "no", "train")
    assert "trains 512 px" in found.notes and "stage1.yaml" in found.notes


# ---- sd-scripts


def test_flux_with_prodigy_and_nothing_cached_ends_in_the_first_optimizer_step() -> None:
    found = check(H100, FLUX)
    assert (found.code, found.verdict, found.phase) == (3, "no", "optimizer")
    first = found.fixes[0]
    assert set(first) == {
        "--cache_text_encoder_outputs --cache_latents",
        "--optimizer_type adamw8bit --learning_rate 1e-5",
    }
    assert "training needs the same" in found.why("ineffective", "--highvram")
    assert_changes_are_the_least(FLUX, found)
    xformers = check(H100, REPAIRED + BOTH_CACHES + " --xformers", *QUICK)
    assert "no xformers path" in xformers.why("ineffective", "--xformers")
    assert xformers.verdict == "fits" and 67 <= xformers.allocated("train") <= 71
    assert 9 <= xformers.allocated("encode") <= 12
    assert check(H100, REPAIRED, *QUICK).verdict in ("tight", "no")


def test_flux_with_adamw_ends_in_the_optimizer_step_too() -> None:
    found = check(H100, FLUX.replace("Prodigy", "AdamW"), *QUICK)
    assert (found.verdict, found.phase) == ("no", "optimizer")
    assert 109 <= found.allocated("optimizer") <= 122


# ---- diffusers


def test_group_offload_is_read_from_python_and_bounded_by_the_decode(tmp_path: Path) -> None:
    denoise, decode, host = {}, {}, {}
    for kind in ("block", "leaf"):
        for stream in (False, True):
            text = PIPELINE.replace('"leaf_level", use_stream=True', f'"{kind}_level", use_stream={stream}')
            (tmp_path / "infer.py").write_text(text)
            found = check("24GB", tmp_path / "infer.py")
            assert found.verdict == "fits"
            denoise[kind, stream], host[kind, stream] = found.allocated("denoise"), found.host
            decode[kind, stream] = found.allocated("decode")
    assert 4.7 <= denoise["block", False] <= 5.8 and 5.5 <= denoise["block", True] <= 6.6
    assert 3.6 <= denoise["leaf", False] <= 4.6 and 3.7 <= denoise["leaf", True] <= 4.8
    assert max(decode.values()) - min(decode.values()) < 0.05 and 7.6 <= max(decode.values()) <= 13.5
    assert host["leaf", True] - host["leaf", False] == pytest.approx(45.8 - 30.5, abs=0.5)
    assert "never in a release" in found.notes and "#11097" in found.notes
    short = check("24GB", tmp_path / "infer.py", "--host-ram", "32GiB", *QUICK)
    assert (short.code, short.verdict, short.found["limit"]) == (3, "no", "host")
    (tmp_path / "infer.py").write_text(PIPELINE.replace("leaf_level", "block_level"))
    assert "#11981" in check("24GB", tmp_path / "infer.py").notes


# ---- other lengths, cards and counts


def test_verdicts_get_no_worse_with_more_memory_or_shorter_clips() -> None:
    by_card = [check(gpu, DIFFSYNTH, *QUICK) for gpu in ("48GB", H100, "h200")]
    by_length = [check(H100, f"{DIFFSYNTH} --num_frames {frames}", *QUICK) for frames in (161, 41)]
    for worse, better in (*itertools.pairwise(by_card), by_length):
        assert RANK.index(worse.verdict) <= RANK.index(better.verdict)
    assert by_card[0].verdict == "no" and by_card[-1].verdict == by_length[-1].verdict == "fits"
