"""LatentSync from videos with sound to a trained UNet: what a sample holds, and that a run is taken up bit by bit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from diffusers import AutoencoderKL, UNet2DConditionModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import WhisperModel  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.dataset import clips, scan  # noqa: E402
from planner.dataset.sources import DataSource  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.launch import checkpoints  # noqa: E402
from planner.launch.launch import RunRequest  # noqa: E402
from planner.launch.supported import supported_plan  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402
from tests.trainers import runs, tiny  # noqa: E402
from trainers import families  # noqa: E402
from trainers.data import cache, loader  # noqa: E402
from trainers.data.entries import read_entries, write_entries  # noqa: E402
from trainers.data.sampler import BatchSampler  # noqa: E402
from trainers.families.common import random_draws  # noqa: E402

pytestmark = pytest.mark.usefixtures("frozen_heap")

FRAMES, SIDE, CLIP = 4, 64, 14
PLAIN = Strategy(**runs.PLAIN, vae_dtype="fp32", text_encoder_dtype="fp32")


class Place:
    """A tiny LatentSync as a folder, two clips of it, and what caching left of them."""

    def __init__(self, root: Path) -> None:
        self.root, model = root, root / "model"
        profile = tiny.profile("latentsync-1.6-stage1")
        tiny.folder(model, profile)
        torch.manual_seed(0)
        unet = UNet2DConditionModel.from_config(profile.config)
        with torch.no_grad():
            for parameter in unet.parameters():
                parameter.normal_(0.0, 0.1)
        unet.save_pretrained(model / "unet")
        self.model = runs.keep(model, "tiny-lips")
        self.profile = lookup.model(self.model)
        self.clips = tiny.write_clips(root / "clips", 2, frames=CLIP, fps=25)
        for text in self.clips.glob("*.txt"):
            text.unlink()
        shape = {"frames": FRAMES, "height": SIDE, "width": SIDE, "method": "full"}
        job = Job.read({"model": self.model, **shape})
        self.plan = supported_plan(Plan(job=job, strategy=PLAIN, machine=Machine(gpu="24GB")), trained=True)
        self.setting = cache.EncodingTask(self.profile, job, PLAIN, str(model), root / "cache")
        self.dataset = scan.read([DataSource(folder=str(self.clips))], self.profile, job)
        self.entries = root / "cache" / "entries.jsonl"
        write_entries(self.entries, cache.cached(self.dataset, self.setting))

    def request(self, output: Path, **said: Any) -> RunRequest:
        output.mkdir(parents=True, exist_ok=True)
        asked = {"plan": self.plan, "entries": str(self.entries), "weights": str(self.root / "model")}
        asked |= {"output": str(output), "run": checkpoints.run_id(output), "device": "cpu", "steps": 2}
        return runs.with_training(
            RunRequest(**{**asked, "checkpoint_every": 1, "keep_checkpoints": 2, **said}), learning_rate=1e-3
        )

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        kind = families.family(self.profile)
        sampler = BatchSampler(read_entries(self.entries), self.plan.job, 1, 1, 0)
        stacker = loader.Stacker(self.profile, self.plan.job, kind, torch.float32)
        one = loader.Loader(sampler, stacker, 0, torch.device("cpu"), 1)
        (found,) = one.batches(step)
        one.close()
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("lips")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        yield Place(root)


def test_a_clip_is_cut_into_windows_that_do_not_overlap(place: Place) -> None:
    windows = [sample.indices for sample in place.dataset.samples if sample.clip.name == "0.mp4"]
    assert windows == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert any("6 samples of 2 clips" in note for note in place.dataset.notes)
    assert not any("longer than their shape" in note for note in place.dataset.notes)


def test_a_sample_is_the_face_what_is_seen_of_it_and_the_sound_around_each_frame(place: Place) -> None:
    made = load_file(read_entries(place.entries)[1].path)
    vae = AutoencoderKL.from_pretrained(place.root / "model" / "vae")
    faces = torch.from_numpy(clips.frames(place.clips / "0.mp4", (4, 5, 6, 7), SIDE, SIDE)).permute(0, 3, 1, 2)
    seen = torch.ones(SIDE, SIDE)
    seen[SIDE // 2 :, SIDE // 8 : -SIDE // 8] = 0
    covered = (faces / 127.5 - 1) * seen
    assert torch.equal(made["condition"][:, 0], seen[::8, ::8].expand(FRAMES, -1, -1))
    audio = WhisperModel.from_pretrained(place.root / "model" / "audio_encoder").eval().encoder
    extractor = tiny_extractor(place)
    heard = clips.sound(place.clips / "0.mp4", 16_000)
    said = extractor(heard, sampling_rate=16_000, padding=False, return_tensors="np")
    columns = torch.from_numpy(said.input_features)
    with torch.no_grad():
        posterior = vae.encode(covered).latent_dist
        told = audio(torch.nn.functional.pad(columns, (0, 3000 - columns.shape[2])), output_hidden_states=True)
    drawn = (made["condition"][:, 1:] / vae.config.scaling_factor - posterior.mean) / posterior.std
    assert float(drawn.std()) == pytest.approx(1.0, abs=0.2)
    length = columns.shape[2] // 2
    assert length == pytest.approx(CLIP / 25 * 50, abs=6)  # AAC says a little more than it was told
    prompt = made["prompt"].view(FRAMES, 10, 5, -1)
    for frame, number in enumerate((4, 5, 6, 7)):
        for place_in, state in enumerate(range(2 * number - 4, 2 * number + 6)):
            at = min(max(state, 0), length - 1)
            for layer in range(4):
                torch.testing.assert_close(prompt[frame, place_in, layer], told.hidden_states[layer][0, at])
            last = audio.layer_norm(prompt[frame, place_in, 4])
            torch.testing.assert_close(last, told.last_hidden_state[0, at], atol=1e-5, rtol=1e-4)


def tiny_extractor(place: Place) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor.from_pretrained(place.root / "model" / "feature_extractor")


def test_the_reference_is_another_window_of_the_clip_and_not_always_the_same(place: Place) -> None:
    entries = read_entries(place.entries)
    latents = [load_file(entry.path)["latents"] for entry in entries]
    seen: dict[int, set[int]] = {}
    for step in range(24):
        batch = place.batch(step)
        own, other = (
            next(n for n, each in enumerate(latents) if torch.equal(each, tensor))
            for tensor in (batch["latents"], batch["condition"][:, 5:])
        )
        assert own != other and entries[own].clip == entries[other].clip
        seen.setdefault(own, set()).add(other)
    assert max(map(len, seen.values())) == 2


def test_frames_share_a_timestep_and_half_of_their_noise(place: Place) -> None:
    kind = families.family(place.profile)
    many = {name: tensor.repeat(64, 1, 1, 1) for name, tensor in place.batch(0).items() if tensor.ndim == 4}
    batch = {**many, random_draws.SEEDS: torch.arange(64), "prompt": place.batch(0)["prompt"].repeat(64, 1, 1)}
    with random_draws.from_seeds(batch[random_draws.SEEDS], torch.device("cpu")):
        inputs, noise = kind.inputs_and_target(batch)
    steps = inputs["timestep"].view(64, FRAMES)
    assert (steps == steps[:, :1]).all() and len(steps[:, 0].unique()) > 32
    by_frame = noise.view(64, FRAMES, -1)
    flat = by_frame.transpose(0, 1).reshape(FRAMES, -1)
    torch.testing.assert_close(torch.corrcoef(flat)[0, 1:], torch.full((FRAMES - 1,), 0.5), atol=0.03, rtol=0)
    assert float(noise.std()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(inputs["sample"][:, 4:], batch["condition"])


def test_a_run_is_taken_up_to_the_same_bits(place: Place, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert runs.train(place.request(whole))["outcome"] == "ok"
    assert runs.train(place.request(parts, steps=1))["outcome"] == "ok"
    at = str(parts / "checkpoints" / "step-00000001")
    assert runs.train(place.request(parts, resume=at))["outcome"] == "ok"
    losses = runs.losses(whole)
    assert runs.losses(parts) == losses and all(map(math.isfinite, losses))
    one, other = (runs.tensors(folder / "final") for folder in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
    again = UNet2DConditionModel.from_pretrained(whole / "final" / "unet")
    before = UNet2DConditionModel.from_pretrained(place.root / "model" / "unet")
    assert not torch.equal(again.conv_in.weight, before.conv_in.weight)


@pytest.mark.parametrize(
    ("more", "fault"),
    [({"tone": 0}, "no sound in it, which tiny-lips"), ({"frames": 7}, "less than two windows of 4")],
    ids=["silent", "short"],
)
def test_clips_that_say_nothing_are_named(place: Place, tmp_path: Path, more: dict[str, int], fault: str) -> None:
    folder = tiny.write_clips(tmp_path / "clips", 1, **{"frames": CLIP, "fps": 25, **more})
    with pytest.raises(VplanError, match=f"0.mp4: .*{fault}"):
        scan.read([DataSource(folder=str(folder))], place.profile, place.plan.job)


def test_frames_that_are_no_windows_are_refused(place: Place) -> None:
    with pytest.raises(VplanError, match="trains on all of a clip, window by window, not on random frames"):
        scan.read([DataSource(folder=str(place.clips), frames="random")], place.profile, place.plan.job)


def test_samples_are_refused_before_anything_is_encoded(place: Place) -> None:
    plan = place.plan.replace(strategy=PLAIN.replace(validation_mode="on"))
    with pytest.raises(VplanError, match="a sample of tiny-lips, whose pipeline is not from diffusers"):
        supported_plan(plan, trained=True)


@pytest.mark.parametrize("part", ["mask", "feature_extractor"])
def test_what_a_folder_lacks_is_named_with_where_it_is(place: Place, tmp_path: Path, part: str) -> None:
    model = shutil.copytree(place.root / "model", tmp_path / "model", ignore=shutil.ignore_patterns(part))
    with pytest.raises(VplanError, match=f"has no {part}/") as caught:
        cache.CacheBuild(cache.EncodingTask(place.profile, place.plan.job, PLAIN, str(model), tmp_path / "cache"))
    assert "put " in caught.value.fix
