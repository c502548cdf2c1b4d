"""Samples are encoded once, shared, and never half there; what cannot be encoded is named."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from planner.dataset import scan
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from tests.trainers import tiny
from tests.trainers.data.caching import FP32, dataset, files, job, run, setting
from trainers.data import cache, layer_offload, parts
from trainers.data.store import NO_ROOM, Digests, Store
from trainers.families.common.base import Family
from trainers.families.common.encoding import Encoder

pytestmark = pytest.mark.usefixtures("frozen_heap")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan text-to-video pipeline."""
    return tiny.folder(tmp_path_factory.mktemp("wan"), tiny.profile("wan2.1-t2v-1.3b"))


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    return tiny.write_clips(tmp_path / "clips")


# ---- what is encoded


def test_two_shapes_and_an_image_in_one_dataset(model: Path, clips: Path, tmp_path: Path) -> None:
    tiny.write_image(clips / "picture.png")
    (clips / "picture.txt").write_text("a red dog")
    profile = tiny.profile("wan2.1-t2v-1.3b")
    buckets = [{"frames": 9, "height": 48, "width": 64}, {"frames": 1, "height": 64, "width": 64, "batch_size": 4}]
    one = setting(model, tmp_path / "cache", job=job(profile, buckets=buckets))
    entries = run(clips, one)
    assert [entry.bucket.frames for entry in entries] == [9, 9, 9, 1]
    assert entries[3].bucket.batch_size == 4
    assert load_file(entries[3].path)["latents"].shape == (16, 1, 8, 8)


def test_an_encoder_larger_than_the_card_brings_its_layers_one_by_one(
    model: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the same, and the layers of none are left where the encoder is."""
    whole = run(clips, setting(model, tmp_path / "whole"))
    left = []
    free = cache._free

    def look_and_free(encoder: Encoder) -> None:
        left.append({name for name, each in encoder.model.named_parameters() if each.device.type == "meta"})
        free(encoder)

    monkeypatch.setattr(cache, "_free", look_and_free)
    monkeypatch.setattr(layer_offload, "room_bytes", lambda device: 0)
    layered = run(clips, setting(model, tmp_path / "layered"))
    for one, other in zip(whole, layered, strict=True):
        torch.testing.assert_close(load_file(other.text), load_file(one.text), rtol=0, atol=0)
    waiting, of_vae = left
    assert waiting and not of_vae
    assert all(".block." in name for name in waiting)


# ---- keys


def test_what_is_cached_is_not_made_again(
    model: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = setting(model, tmp_path / "cache")
    first = run(clips, one)
    before = files(tmp_path / "cache")
    monkeypatch.setattr(parts, "load", None)  # calling it would fail
    assert run(clips, one) == first
    assert files(tmp_path / "cache") == before
    (clips / "0.mp4").rename(clips / "zero.mp4")  # content counts, not names
    (clips / "0.txt").rename(clips / "zero.txt")
    assert sorted(run(clips, one)) == sorted(first)


@pytest.mark.parametrize(
    "changed",
    ["file", "shape", "frames taken", "mirrored", "dtype", "stored", "tiling", "model", "tokenizer", "version"],
)
def test_everything_a_sample_depends_on_changes_its_name(
    model: Path, clips: Path, tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    one = setting(copy, tmp_path / "cache")
    before = cache.CacheBuild(one).clip_keys(dataset(clips, one)), cache.CacheBuild(one).text_key("a cat")
    other, reading = one, DataSource(folder=str(clips), fps=16.0)
    if changed == "file":
        (clips / "0.mp4").write_bytes((clips / "1.mp4").read_bytes())
    elif changed == "shape":
        other = setting(copy, tmp_path / "cache", job=job(one.profile, height=64))
    elif changed == "frames taken":
        reading = reading.replace(frames="even")
        tiny.write_video(clips / "0.mp4", frames=30)
        before = cache.CacheBuild(one).clip_keys(dataset(clips, one)), before[1]
    elif changed == "mirrored":
        reading = reading.replace(flip=True)
    elif changed in ("dtype", "stored", "tiling"):
        change = {
            "dtype": {"vae_dtype": "bf16", "text_encoder_dtype": "bf16"},
            "stored": {"autocast": "fp16"},
            "tiling": {"vae_tiling": True},
        }[changed]
        other = setting(copy, tmp_path / "cache", strategy=FP32.replace(**change))
    elif changed == "model":
        path = copy / "vae" / "diffusion_pytorch_model.safetensors"
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    elif changed == "tokenizer":
        path = copy / "tokenizer" / "tokenizer.json"
        path.write_text(path.read_text().replace("dog", "cow"))
    elif changed == "version":
        monkeypatch.setattr(Family, "encoding", 2)
    work = cache.CacheBuild(other)
    after = work.clip_keys(scan.read([reading], other.profile, other.job)), work.text_key("a cat")
    if changed == "mirrored":  # each sample is followed by its mirror image
        assert after[0][::2] == before[0] and not set(after[0][1::2]) & set(before[0])
        return
    assert (after[0][0] != before[0][0]) == (changed != "tokenizer")
    assert (after[1] != before[1]) == (changed in ("dtype", "stored", "tokenizer", "version"))


def test_siblings_with_the_same_encoders_take_other_things_of_a_clip(model: Path, clips: Path, tmp_path: Path) -> None:
    text, image = (setting(model, tmp_path / "cache", tiny.profile(f"wan2.2-{kind}-a14b")) for kind in ("t2v", "i2v"))
    made = [load_file(run(clips, one)[0].path).keys() for one in (text, image)]
    assert made == [{"latents"}, {"latents", "condition"}]


# ---- kills, ranks, full disks


def start(clips: Path, one: cache.EncodingTask, rank: int = 0, ranks: int = 1) -> tuple[BaseProcess, Connection]:
    """A process of its own that caches like `run` does, and what it tells: its entries."""
    meet = one.folder.with_name("meet")
    meet.mkdir(exist_ok=True)
    calls = itertools.count()

    def wait() -> None:
        call = next(calls)
        (meet / f"{call}-{rank}").touch()
        while len(list(meet.glob(f"{call}-*"))) < ranks:
            time.sleep(0.005)

    def work() -> None:
        theirs.send(run(clips, dataclasses.replace(one, rank=rank, ranks=ranks, wait=wait)))

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=work)  # torch has one thread here, and is loaded
    process.start()
    return process, ours


def named(folder: Path) -> list[Path]:
    """The files that have their name."""
    return sorted(folder.glob("*/*.safetensors"))


def whole(folder: Path) -> list[Path]:
    """The same; each must load."""
    for path in named(folder):
        load_file(path)
    return named(folder)


def test_killed_runs_lose_only_what_they_were_at(model: Path, tmp_path: Path) -> None:
    """Five kills in a row, then a run to the end. The first comes while captions are encoded, the last at clips."""
    clips = tiny.write_clips(tmp_path / "clips", 20)
    one = setting(model, tmp_path / "cache")
    finished: dict[Path, int] = {}
    for more in (1, 4, 5, 3, 4):
        process, _ = start(clips, one)
        while process.is_alive() and len(named(tmp_path / "cache")) < len(finished) + more:
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        found = {path: path.stat().st_mtime_ns for path in whole(tmp_path / "cache")}
        assert finished.items() <= found.items()
        assert len(found) >= len(finished) + more
        finished = found
    entries = run(clips, one)
    assert len(entries) == 20
    found = {path: path.stat().st_mtime_ns for path in whole(tmp_path / "cache")}
    assert finished.items() <= found.items()
    assert {path for entry in entries for path in (entry.path, entry.text)} < found.keys()


def test_two_ranks_share_the_work(model: Path, tmp_path: Path) -> None:
    clips = tiny.write_clips(tmp_path / "clips", 4)
    one = setting(model, tmp_path / "cache")
    ranks = [start(clips, one, rank, 2) for rank in range(2)]
    told = [connection.recv() for _, connection in ranks]
    for process, _ in ranks:
        process.join()
    assert told[0] == told[1]
    alone = run(clips, setting(model, tmp_path / "alone"))
    for entry, theirs in zip(alone, told[0], strict=True):
        assert (entry.path.name, entry.text.name) == (theirs.path.name, theirs.text.name)
        torch.testing.assert_close(load_file(theirs.path), load_file(entry.path), rtol=0, atol=0)


def test_half_a_file_is_not_taken(model: Path, clips: Path, tmp_path: Path) -> None:
    one = setting(model, tmp_path / "cache")
    entries = run(clips, one)
    path = entries[1].path
    content = path.read_bytes()
    path.write_bytes(content[:-10])  # a copy that was cut short
    stale = path.with_name("x.part")
    stale.touch()
    os.utime(stale, (0, 0))
    young = path.with_name("y.part")
    young.touch()
    assert run(clips, one) == entries
    assert path.read_bytes() == content
    assert not stale.exists()
    assert young.exists()


def test_a_full_disk_is_one_line_and_leaves_what_is_there(model: Path, clips: Path, tmp_path: Path) -> None:
    import resource

    one = setting(model, tmp_path / "cache")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    work = cache.CacheBuild(one)
    work.encode("captions", work.text_turns, {work.text_key("a cat"): "a cat"})
    before = files(tmp_path / "cache")
    dataset(clips, one)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(VplanError, match="the disk is full") as caught:
            run(clips, one)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value)
    assert "is kept" in caught.value.fix
    assert before.items() <= files(tmp_path / "cache").items()
    assert not list((tmp_path / "cache").glob("*/*.part"))
    whole(tmp_path / "cache")
    assert len(run(clips, one)) == 3


def test_a_disk_that_will_be_full_is_said_at_the_first_sample(model: Path, tmp_path: Path, small_disk: Path) -> None:
    clips = tiny.write_clips(tmp_path / "clips", 6)
    for number in range(6):
        (clips / f"{number}.txt").write_text(f"a cat {number}" + " cat" * number)
    with pytest.raises(VplanError, match=r"caching needs about .* more"):
        run(clips, setting(model, small_disk / "cache"))
    assert len(whole(small_disk / "cache")) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_clip_that_breaks_on_the_way(model: Path, clips: Path, tmp_path: Path) -> None:
    long = tiny.write_video(tmp_path / "long.mkv", frames=40, height=240, width=320).read_bytes()
    (clips / "3.mkv").write_bytes(long)
    (clips / "3.txt").write_text("a cat")
    one = setting(model, tmp_path / "cache")
    samples = scan.read([DataSource(folder=str(clips), frames="even")], one.profile, one.job)
    (clips / "3.mkv").write_bytes(long[: len(long) // 2])
    with pytest.raises(VplanError, match=r"1 of 4 samples cannot be used: 3.mkv: corrupt video"):
        cache.cached(samples, one)
    assert len(cache.cached(samples, one, skip_bad=True)) == 3
    assert len(cache.cached(samples, one, skip_bad=True)) == 3  # known, not tried again


# ---- models that are refused


def spoil(model: Path, how: str) -> None:
    vae, config = model / "vae", model / "vae" / "config.json"
    weights = vae / "diffusion_pytorch_model.safetensors"
    if how == "pickle":
        weights.rename(vae / "diffusion_pytorch_model.bin")
    elif how == "no weights":
        weights.unlink()
    elif how == "shard":
        weights.rename(vae / "diffusion_pytorch_model-00001-of-00002.safetensors")
        names = [f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
        (vae / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "shard elsewhere":
        weights.unlink()
        index = {"weight_map": {"a": "../../secret.safetensors"}}
        (vae / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "class":
        config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": "AutoencoderKL"}))
    elif how == "no part":
        vae.rename(model / "away")
    elif how == "no tokenizer":
        (model / "tokenizer").rename(model / "away")
    elif how == "other channels":
        from diffusers import AutoencoderKLWan

        values = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
        AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, **values).save_pretrained(vae)
    elif how == "overflow":
        save_file({name: tensor * float("inf") for name, tensor in load_file(weights).items()}, weights)


REFUSED = {
    "pickle": "vae/ of model has its weights only as pickles",
    "no weights": "vae/ of model has no weights",
    "shard": "diffusion_pytorch_model-00002-of-00002.safetensors of model is missing",
    "shard elsewhere": "names '../../secret.safetensors' as a shard",
    "cut": "is damaged: it has",
    "class": "vae/ of model is 'AutoencoderKL', but this model is trained with a AutoencoderKLWan",
    "no part": "model has no vae/",
    "no tokenizer": "model has no tokenizer/",
    "other channels": r"give latents of \[4, 3, 6, 8\], but wan2.1-t2v-1.3b takes \[16, 3, 6, 8\]",
    "overflow": "latents that are not finite",
}


@pytest.mark.parametrize("how", REFUSED)
def test_models_that_cannot_be_used(model: Path, tmp_path: Path, how: str) -> None:
    clips = tiny.write_clips(tmp_path / "clips", 1)
    copy = shutil.copytree(model, tmp_path / "model")
    spoil(copy, how)
    with pytest.raises(VplanError, match=REFUSED[how]) as caught:
        run(clips, setting(copy, tmp_path / "cache"))
    assert "\n" not in str(caught.value)
    assert caught.value.fix


def test_a_pipelines_index_says_what_is_made_of_a_part(model: Path, clips: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    config = copy / "text_encoder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["UMT5ForConditionalGeneration"]}))
    with pytest.raises(VplanError, match="text_encoder/ of model is 'UMT5ForConditionalGeneration'"):
        run(clips, setting(copy, tmp_path / "cache"))
    (copy / "model_index.json").write_text(json.dumps({"text_encoder": ["transformers", "UMT5EncoderModel"]}))
    assert len(run(clips, setting(copy, tmp_path / "cache"))) == 3


def test_names_that_are_no_models(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(VplanError, match="nobody/nothing is not in this machine's cache, and the Hub cannot be"):
        run(clips, setting(Path("nobody/nothing"), tmp_path / "cache"))
    (tmp_path / "wan.safetensors").touch()
    with pytest.raises(VplanError, match="is a file, not the folder of a model"):
        run(clips, setting(tmp_path / "wan.safetensors", tmp_path / "cache"))
    with pytest.raises(VplanError, match="neither a folder nor"):
        run(clips, setting(Path("a/b/c"), tmp_path / "cache"))


# ---- the store


def test_digests_are_remembered_and_broken_lines_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a")
    first = Digests(tmp_path, 0).of(file)
    with (tmp_path / "digests-0.jsonl").open("a") as memory:
        memory.write('\n{"file": "' + str(file))
    assert Digests(tmp_path, 1).of(file) == first
    assert not (tmp_path / "digests-1.jsonl").exists()  # rank 0 knew it
    file.write_bytes(b"bb")
    assert Digests(tmp_path, 0).of(file) != first
    assert len((tmp_path / "digests-0.jsonl").read_text().split("\n")) == 4


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(VplanError, match="cannot write to the cache"):
        Store(tmp_path / "file" / "cache")
    assert errno.ENOSPC in NO_ROOM
