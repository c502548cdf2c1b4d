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
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from diffusers import Flux2KleinPipeline, FluxPipeline
from safetensors.torch import load_file, save_file

from planner import catalog
from planner.errors import VplanError
from planner.facts import ModelProfile
from planner.job import Job, Strategy
from planner.shapes import grid, job_for
from tests.trainers import tiny
from trainers import cache, data, families, parts, shrink
from trainers.families.base import Family
from trainers.store import NO_ROOM, Digests, Store

FP32 = Strategy(vae_dtype="fp32", text_encoder_dtype="fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan text-to-video pipeline."""
    return tiny.folder(tmp_path_factory.mktemp("wan"), tiny.profile("wan2.1-t2v-1.3b"))


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    return tiny.write_clips(tmp_path / "clips")


def setting(model: Path, folder: Path, profile: ModelProfile | None = None, **more: object) -> cache.Setting:
    profile = profile or tiny.profile("wan2.1-t2v-1.3b")
    plan = more.pop("job", None) or job(profile)
    return cache.Setting(profile, plan, more.pop("strategy", FP32), str(model), folder, **more)


def job(profile: ModelProfile, **more: object) -> Job:
    return job_for(profile, {"frames": 9, "height": 48, "width": 64, **more})


def dataset(clips: Path, one: cache.Setting) -> data.Dataset:
    return data.read(clips, one.profile, one.job, data.Reading(fps=16))


def run(clips: Path, one: cache.Setting, **more: object) -> list[cache.Entry]:
    return cache.cached(dataset(clips, one), one, show=False, **more)


def files(folder: Path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*/*")}


def shapes_of(batch: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()}


# ---- what is encoded


MODE = ("wan", "z-image", "flux2")
"""Families whose latents are the mode of the posterior, not drawn from it."""


def unpacked(latents: torch.Tensor) -> torch.Tensor:
    """Packed latents of a 64x64 image as the VAE takes them."""
    return FluxPipeline._unpack_latents(latents.reshape(1, 16, -1), 64, 64, 8)


def by_channel(latents: torch.Tensor, config: object, scale: float = 1.0) -> torch.Tensor:
    mean, deviation = (torch.tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return latents[None] * deviation / scale + mean


UNDONE = {
    "wan2.1-t2v-1.3b": lambda latents, vae: by_channel(latents, vae.config),
    "cogvideox-2b": lambda latents, vae: latents.transpose(0, 1)[None] / vae.config.scaling_factor,
    "ltx-video-2b": lambda latents, vae: (
        latents[None] * vae.latents_std.view(1, -1, 1, 1, 1) + vae.latents_mean.view(1, -1, 1, 1, 1)
    ),
    "hunyuan-video": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "mochi-1": lambda latents, vae: by_channel(latents, vae.config, vae.config.scaling_factor),
    "easyanimate-v5.1-7b": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "flux.1-dev": lambda latents, vae: unpacked(latents) / vae.config.scaling_factor + vae.config.shift_factor,
    "sd3.5-medium": lambda latents, vae: latents[None] / vae.config.scaling_factor + vae.config.shift_factor,
    "sdxl": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "z-image": lambda latents, vae: latents[None, :, 0] / vae.config.scaling_factor + vae.config.shift_factor,
    "flux.2-klein-4b": lambda latents, vae: Flux2KleinPipeline._unpatchify_latents(
        latents.T.reshape(1, -1, 4, 4) * torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
        + vae.bn.running_mean.view(1, -1, 1, 1)
    ),
    "hunyuan-video-1.5": lambda latents, vae: latents[None] / vae.config.scaling_factor,
    "qwen-image": lambda latents, vae: by_channel(unpacked(latents)[0][:, None], vae.config),
}
"""How each family's pipeline turns latents back into what its VAE decodes (diffusers 0.42, pipelines/)."""


@pytest.mark.parametrize(("name", "precision"), [(tiny.MODELS[0], "bf16"), *((name, "none") for name in tiny.MODELS)])
def test_entries_make_the_batches_that_were_recorded(tmp_path: Path, name: str, precision: str) -> None:
    """In keys, shapes and dtypes; and their latents are those that the family's pipeline would decode to the clip."""
    profile = tiny.profile(name)
    frames = min(profile.shape.max_frames, profile.shape.frame_step + 1)
    plan = job_for(profile, {"frames": frames, "height": 64, "width": 64, "batch_size": 2})
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    strategy = FP32.replace(autocast=precision, weights_dtype="bf16" if precision == "bf16" else "fp32")
    model = tiny.folder(tmp_path / "model", profile)
    one = setting(model, tmp_path / "cache", profile, job=plan, strategy=strategy)
    entries = run(tiny.write_clips(tmp_path / "clips", 2), one)
    family = families.family(profile)
    batch = family.collate([load_file(entry.path) | load_file(entry.text) for entry in entries])
    if family.ragged:
        plan = plan.replace(text_tokens=batch["prompt"].shape[1])
    assert shapes_of(batch) == shapes_of(family.batch(grid(profile, plan), "cpu", dtype))
    assert not torch.equal(batch["latents"][0], batch["latents"][1])
    family.inputs_and_target(batch)
    assert load_file(cache.empty_caption(one)).keys() == load_file(entries[0].text).keys()
    if name in UNDONE and precision == "none":
        vae, expected = posterior_of(model, profile, tmp_path / "clips" / "0.mp4", frames, entries[0])
        torch.testing.assert_close(UNDONE[name](batch["latents"][0], vae), expected)


def posterior_of(
    model: Path, profile: ModelProfile, clip: Path, frames: int, entry: cache.Entry
) -> tuple[torch.nn.Module, torch.Tensor]:
    """The VAE, and what it makes of a clip, drawn as the entry was."""
    import diffusers

    vae = getattr(diffusers, profile.vae.class_name).from_pretrained(model / "vae")
    pixels = torch.from_numpy(data.clips.frames(clip, range(frames), 64, 64)).permute(3, 0, 1, 2)[None] / 127.5 - 1
    posterior = vae.encode(pixels if profile.vae.takes_clips else pixels[:, :, 0]).latent_dist
    generator = torch.Generator().manual_seed(int(entry.path.stem[:15], 16))
    return vae, posterior.mode() if profile.family in MODE else posterior.sample(generator)


def test_the_condition_of_image_to_video_is_the_pipelines(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline

    profile = tiny.profile("wan2.2-i2v-a14b")
    folder = tiny.folder(tmp_path / "model", profile)
    strategy = FP32.replace(autocast="none", weights_dtype="fp32")
    one = setting(folder, tmp_path / "cache", profile, strategy=strategy)
    clips = tiny.write_clips(tmp_path / "clips", 1)
    made = load_file(run(clips, one)[0].path)["condition"]
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    pipeline = WanImageToVideoPipeline(None, None, vae, None)
    frame = torch.from_numpy(data.clips.frames(clips / "0.mp4", (0,), 48, 64)).permute(0, 3, 1, 2) / 127.5 - 1
    _, condition = pipeline.prepare_latents(frame, 1, 16, 48, 64, 9, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(made, condition[0])


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
    "changed", ["file", "shape", "frames taken", "dtype", "stored", "tiling", "model", "tokenizer", "version"]
)
def test_everything_a_sample_depends_on_changes_its_name(
    model: Path, clips: Path, tmp_path: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    one = setting(copy, tmp_path / "cache")
    before = cache.Work(one).clip_keys(dataset(clips, one)), cache.Work(one).text_key("a cat")
    other, reading = one, data.Reading(fps=16)
    if changed == "file":
        (clips / "0.mp4").write_bytes((clips / "1.mp4").read_bytes())
    elif changed == "shape":
        other = setting(copy, tmp_path / "cache", job=job(one.profile, height=64))
    elif changed == "frames taken":
        reading = data.Reading(sampling="even")
        tiny.write_video(clips / "0.mp4", frames=30)
        before = cache.Work(one).clip_keys(dataset(clips, one)), before[1]
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
    work = cache.Work(other)
    after = work.clip_keys(data.read(clips, other.profile, other.job, reading)), work.text_key("a cat")
    assert (after[0][0] != before[0][0]) == (changed != "tokenizer")
    assert (after[1] != before[1]) == (changed in ("dtype", "stored", "tokenizer", "version"))


# ---- kills, ranks, full disks


def start(clips: Path, one: cache.Setting, rank: int = 0, ranks: int = 1) -> tuple[BaseProcess, Connection]:
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
    work = cache.Work(one)
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
    assert "stays" in caught.value.fix
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
    samples = data.read(clips, one.profile, one.job, data.Reading(sampling="even"))
    (clips / "3.mkv").write_bytes(long[: len(long) // 2])
    with pytest.raises(VplanError, match=r"1 of 4 samples cannot be used: 3.mkv: corrupt video"):
        cache.cached(samples, one, show=False)
    assert len(cache.cached(samples, one, skip_bad=True, show=False)) == 3
    assert len(cache.cached(samples, one, skip_bad=True, show=False)) == 3  # known, not tried again


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
    "pickle": "vae/ of model has its weights as pickles only",
    "no weights": "vae/ of model has no weights",
    "shard": "diffusion_pytorch_model-00002-of-00002.safetensors of model is missing",
    "shard elsewhere": "names '../../secret.safetensors' as a shard",
    "cut": "vae/ of model cannot be loaded",
    "class": "vae/ of model is 'AutoencoderKL', and this model is trained with a AutoencoderKLWan",
    "no part": "model has no vae/",
    "no tokenizer": "model has no tokenizer/",
    "other channels": r"give latents of \[4, 3, 6, 8\], and wan2.1-t2v-1.3b takes \[16, 3, 6, 8\]",
    "overflow": "latents that are no numbers",
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
    with pytest.raises(VplanError, match="cannot get nobody/nothing"):
        run(clips, setting(Path("nobody/nothing"), tmp_path / "cache"))
    with pytest.raises(VplanError, match="neither a folder nor"):
        run(clips, setting(Path("a/b/c"), tmp_path / "cache"))


REFUSED_FAMILIES = (
    "wan2.1-vace-1.3b",
    "wan2.2-animate-14b",
    "flux.1-kontext-dev",
    "flux.2-dev",
    "qwen-image-edit",
    "krea-2",
    "ltx-2",
    "latentsync-1.6-stage1",
)


@pytest.mark.parametrize("name", REFUSED_FAMILIES)
def test_what_cannot_be_encoded_is_refused_by_name(model: Path, tmp_path: Path, name: str) -> None:
    profile = catalog.model(name)
    with pytest.raises(VplanError, match=f"{name}.* cannot be encoded yet"):
        cache.Work(setting(model, tmp_path / "cache", profile, job=job_for(profile, {})))


@pytest.mark.parametrize("name", catalog.model_names())
def test_every_bundled_model_is_encoded_or_refused(name: str) -> None:
    family = families.family(catalog.model(name))
    assert bool(family.clip_turns() and family.text_turns()) != (name in REFUSED_FAMILIES or "vace" in name)


def test_references_are_refused(model: Path, clips: Path, tmp_path: Path) -> None:
    profile = tiny.profile("flux.2-klein-4b")
    plan = job_for(profile, {"references": 1})
    with pytest.raises(VplanError, match="reference images"):
        cache.Work(setting(model, tmp_path / "cache", profile, job=plan))


# ---- packed encoders


@pytest.mark.parametrize(("how", "bits", "error"), [("fp8", 8.5, 0.1), ("int8", 8.5, 0.03), ("nf4", 4.5, 0.3)])
def test_packed_encoders_are_small_and_say_nearly_the_same(how: str, bits: float, error: float) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
    encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(feed_forward_proj="gated-gelu", **sizes))
    encoder = encoder.bfloat16().requires_grad_(False).eval()
    ids = torch.randint(0, 256, (1, 12))
    expected = encoder(ids).last_hidden_state.float()
    packed = shrink.shrink(encoder, how, torch.device("cpu"))
    made = packed(ids).last_hidden_state.float()
    assert made.shape == expected.shape
    assert 0 < (made - expected).norm() / expected.norm() < error
    held = [buffer for module in packed.modules() if isinstance(module, shrink.Packed) for buffer in module.buffers()]
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 256 * 64
    assert sum(buffer.nbytes for buffer in held) * 8 / weights <= bits
    assert not [p for name, p in packed.named_parameters() if p.numel() >= shrink.SMALLEST]


def test_encoders_are_gone_before_the_next_one(
    model: Path, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    made: list[weakref.ref[torch.nn.Module]] = []
    load = parts.load

    def watched(*arguments: object) -> torch.nn.Module:
        alive.append(sum(one() is not None for one in made))
        found = load(*arguments)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(parts, "load", watched)
    run(clips, setting(model, tmp_path / "cache"))
    assert alive == [0, 0]
    assert not any(one() for one in made)


def test_captions_by_a_packed_encoder(model: Path, clips: Path, tmp_path: Path) -> None:
    made = run(clips, setting(model, tmp_path / "cache", strategy=FP32.replace(text_encoder_dtype="int8")))
    assert made[0].text != run(clips, setting(model, tmp_path / "cache"))[0].text
    with pytest.raises(VplanError, match="text_encoder_dtype int4 cannot be built"):
        run(clips, setting(model, tmp_path / "cache", strategy=FP32.replace(text_encoder_dtype="int4")))


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
