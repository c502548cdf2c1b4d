"""Samples of a run: made on time, on their own, and nothing of the training shows that they were."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
av = pytest.importorskip("av")

import diffusers  # noqa: E402
import numpy  # noqa: E402
from diffusers import AutoencoderKLWan  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.dataset import scan  # noqa: E402
from planner.dataset.sources import DataSource  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.launch import validation  # noqa: E402
from planner.launch.launch import Preparation, Validation  # noqa: E402
from planner.launch.supported import supported_plan  # noqa: E402
from planner.spec.job import Job, Machine, Strategy, ValidationShape  # noqa: E402
from planner.spec.plan import Plan  # noqa: E402
from tests.trainers import runs, tiny  # noqa: E402
from trainers.families import family  # noqa: E402
from trainers.parallel.ema import Average  # noqa: E402
from trainers.sampling import samples, validate  # noqa: E402

pytestmark = pytest.mark.usefixtures("frozen_heap")

NO_STEPS = dict.fromkeys(("validate_every", "validation_prompts", "validation_steps", "validation_guidance"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model with its VAE, and two encoded prompts."""
    root = tmp_path_factory.mktemp("samples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        made = runs.Place(root, "wan")
        profile = lookup.model(made.model)
        small = tiny.VAES[profile.vae.class_name]
        diffusers.AutoencoderKLWan(**{**profile.vae.config, **small}).save_pretrained(root / "model" / "vae")
        width = profile.config["text_dim"]
        for name in ("a", "b", "empty"):
            save_file({"prompt": torch.randn(512, width)}, root / f"{name}.safetensors")
        wishes = [
            samples.PreparedSample(name, str(root / f"{name}.safetensors"), str(root / "empty.safetensors"))._asdict()
            for name in ("a", "b")
        ]
        (root / "validation.json").write_text(json.dumps({"about": {}, "samples": wishes}))
        yield made


def sampled(place: runs.Place, output: Path, every: int = 2, **strategy: Any) -> dict[str, Any]:
    """Four steps with samples; what it told."""
    plan = place.plan({"validation_mode": "on", "vae_dtype": "fp32", **strategy})
    asked = Validation(prompts=str(place.root / "validation.json"), every=every, steps=2)
    return runs.train(place.request(output, plan, validation=asked))


def made(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "samples").iterdir())


def test_training_with_samples_is_training_without_them_bit_for_bit(place: runs.Place, tmp_path: Path) -> None:
    assert runs.train(place.request(tmp_path / "plain"))["outcome"] == "ok"
    assert sampled(place, tmp_path / "on")["outcome"] == "ok"
    assert sampled(place, tmp_path / "block", every=3, group_offload="block")["outcome"] == "ok"
    plain = runs.tensors(tmp_path / "plain" / "final")
    for name in ("on", "block"):
        assert runs.losses(tmp_path / name) == runs.losses(tmp_path / "plain")
        found = runs.tensors(tmp_path / name / "final")
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[key], plain[key]) for key in plain)
    assert made(tmp_path / "on") == [f"step-0000000{step}-{number}.mp4" for step in (2, 4) for number in (0, 1)]
    assert made(tmp_path / "block") == [f"step-0000000{step}-{number}.mp4" for step in (3, 4) for number in (0, 1)]
    told = [line for line in runs.lines(tmp_path / "on") if "samples" in line]
    assert [(line["step"], line["note"], len(line["samples"])) for line in told] == [(2, None, 2), (4, None, 2)]
    with av.open(str(tmp_path / "on" / "samples" / "step-00000004-1.mp4")) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert float(container.streams.video[0].average_rate) == 16
    assert numpy.stack(pictures).shape == (5, 32, 48, 3)
    made_again_when_taken_up(place, tmp_path / "on")


@pytest.mark.parametrize(("ema", "dtype"), [("gpu", "fp32"), ("cpu", "bf16")])
def test_samples_show_the_average_and_leave_it_and_the_weights_bit_for_bit(
    place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ema: str, dtype: str
) -> None:
    strategy = {"ema": ema, "adapter_dtype": dtype}
    assert runs.train(place.request(tmp_path / "plain", place.plan(strategy)))["outcome"] == "ok"
    sample, seen = validate.sample, []

    def look(model: torch.nn.Module, *rest: Any) -> numpy.ndarray:
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        seen.append({name: weight.detach().clone() for name, weight in trained.items()})
        return sample(model, *rest)

    monkeypatch.setattr(validate, "sample", look)
    assert sampled(place, tmp_path / "on", **strategy)["outcome"] == "ok"
    assert runs.losses(tmp_path / "on") == runs.losses(tmp_path / "plain")
    for step, shown in ((2, seen[0]), (4, seen[2])):
        at = [tmp_path / name / "checkpoints" / f"step-0000000{step}" for name in ("on", "plain")]
        for kind in ("average", "weights"):
            found, wanted = (runs.kept(folder, kind) for folder in at)
            assert wanted and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        average, weights = runs.kept(at[0], "average"), runs.kept(at[0])
        assert shown.keys() == average.keys()
        assert all(torch.equal(shown[name], tensor.to(shown[name].dtype)) for name, tensor in average.items())
        assert any(not torch.equal(shown[name], tensor) for name, tensor in weights.items())
    ours, theirs = (runs.tensors(tmp_path / name / "final") for name in ("on", "plain"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_a_sample_sent_away_and_back_are_their_own_again(dtype: torch.dtype) -> None:
    """Their storage is another behind that, and the sample failed."""
    weight = torch.nn.Parameter(torch.randn(64).to(dtype))
    average = Average({"a": weight}, "gpu")
    average.shadow["a"].mul_(1 / 3)
    own, shadow = weight.detach().clone(), average.shadow["a"].clone()
    with pytest.raises(MemoryError), average.in_model():
        assert torch.equal(weight, shadow.to(dtype))
        weight.data = weight.data.clone()
        raise MemoryError
    assert torch.equal(weight, own) and torch.equal(average.shadow["a"], shadow)


def made_again_when_taken_up(place: runs.Place, output: Path) -> None:
    """A kill came in the middle of the last samples; the second time nothing is missing."""
    last = output / "samples" / "step-00000004-1.mp4"
    last.unlink()
    plan = place.plan({"validation_mode": "on", "vae_dtype": "fp32"})
    asked = Validation(prompts=str(place.root / "validation.json"), every=2, steps=2)
    at = str(output / "checkpoints" / "step-00000004")
    times = []
    for _ in range(2):
        assert runs.train(place.request(output, plan, validation=asked, resume=at))["outcome"] == "ok"
        times.append(last.stat().st_mtime_ns)
    assert times[0] == times[1]


def test_a_sample_that_fails_is_told_and_training_goes_on(
    place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the middle of a round; then a VAE that is gone."""
    decode, calls = AutoencoderKLWan.decode, []

    def full(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return decode(*arguments, **more)

    monkeypatch.setattr(AutoencoderKLWan, "decode", full)
    assert sampled(place, tmp_path / "full")["outcome"] == "ok"
    assert runs.train(place.request(tmp_path / "plain"))["outcome"] == "ok"
    assert runs.losses(tmp_path / "full") == runs.losses(tmp_path / "plain")
    first, second = (line for line in runs.lines(tmp_path / "full") if "samples" in line)
    assert (first["note"], len(first["samples"])) == ("the GPU ran out of memory", 1)
    assert (second["note"], len(second["samples"])) == (None, 2)
    shutil.move(place.root / "model" / "vae", tmp_path / "vae")
    assert sampled(place, tmp_path / "gone", every=0)["outcome"] == "ok"
    shutil.move(tmp_path / "vae", place.root / "model" / "vae")
    (only,) = [line for line in runs.lines(tmp_path / "gone") if "samples" in line]
    assert only["note"] == "model has no vae/"
    assert len(runs.losses(tmp_path / "gone")) == 4


def test_what_cannot_be_sampled_while_training_is_refused_by_name() -> None:
    job = Job(model="wan2.1-t2v-1.3b", frames=81, height=480, width=832)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"sharding": "fsdp", "validation_mode": "offload"}, "with fsdp the engine holds the weights"),
        ({"weights_dtype": "int8", "group_offload": "leaf"}, "sending weights in int8 away"),
    ]
    for strategy, words in refused:
        gpus = 2 if "sharding" in strategy else 1
        said = Strategy.read({"validation_mode": "on", **strategy})
        plan = Plan(job=job, strategy=said, machine=Machine(gpu="80GB", gpus=gpus))
        with pytest.raises(VplanError, match=words):
            supported_plan(plan, trained=True)


def test_samples_that_do_not_fit_are_left_out_and_it_says_so() -> None:
    """On 24 GB the step fits with checkpointing; decoding 81 frames of 720p in fp32 does not."""
    large = {"frames": 81, "height": 720, "width": 1280}
    job = Job.read({"model": "wan2.1-t2v-1.3b", "frames": 17, "height": 480, "width": 832, "validation": large})
    strategy = Strategy.read(
        {"gradient_checkpointing": "full", "validation_mode": "on", "vae_dtype": "fp32", "group_offload": "block"}
    )
    plan = supported_plan(Plan(job=job, strategy=strategy, machine=Machine(gpu="8GB")), trained=True)
    found, note = validation.fitted(plan)
    assert note is not None
    assert note.startswith("no samples are made because they do not fit: decoding takes")
    assert (found.strategy.validation_mode, found.strategy.group_offload) == ("off", "none")
    small = plan.replace(machine=Machine(gpu="80GB"))
    assert validation.fitted(small) == (small, None)


def test_prompts_are_typed_or_read_and_nothing_else_is_taken_for_one(tmp_path: Path) -> None:
    plan = Plan(
        job=Job(model="wan2.1-t2v-1.3b", frames=17, height=480, width=832),
        strategy=Strategy(validation_mode="on"),
        machine=Machine(gpu="24GB"),
    )
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffa cat\n\n a dog \n", encoding="utf-8")
    said = {**NO_STEPS, "validation_prompt": ("a bird",), "validation_prompts": str(file)}
    assert validation.prompts(plan, said, "--validation-prompt") == ("a bird", "a cat", "a dog")
    assert validation.prompts(plan, {**NO_STEPS, "validation_prompt": ()}, None) == ()
    off = plan.replace(strategy=Strategy())
    with pytest.raises(VplanError, match="the plan makes no samples") as caught:
        validation.prompts(off, said, "--validation-prompt")
    assert "--validation-mode on" in caught.value.fix
    for content, words in ((b"\xff\xfe\x00", "not UTF-8"), (b"\n \n", "has no prompt"), (b"a\n" * 200, "200 valid")):
        file.write_bytes(content)
        with pytest.raises(VplanError, match=words):
            validation.prompts(plan, {**said, "validation_prompt": ()}, None)
    with pytest.raises(VplanError, match="cannot read"):
        validation.prompts(plan, {**said, "validation_prompts": str(tmp_path / "none")}, None)
    unguided = ValidationShape(frames=17, height=480, width=832, cfg=False)
    with pytest.raises(VplanError, match="samples without guidance"):
        plan = plan.replace(job=plan.job.replace(validation=unguided))
        validation.prompts(plan, {**said, "validation_guidance": 5.0}, None)


def test_image_to_video_begins_with_frames_of_the_data(tmp_path: Path) -> None:
    """And without prompts the first clip's caption is one; what is listed once is known to be."""
    from PIL import Image

    from tests.trainers.data.caching import dataset, run, setting

    profile = tiny.profile("wan2.1-i2v-14b-480p")
    folder = tiny.folder(tmp_path / "model", profile)
    clips = tiny.write_clips(tmp_path / "clips", 2)
    one = setting(folder, tmp_path / "cache", profile)
    run(clips, one)
    plan = Plan(job=one.job, strategy=one.strategy.replace(validation_mode="on"), machine=Machine(gpu="24GB"))
    wanted = Preparation(
        plan=plan, data=str(clips), sources=(DataSource(folder=str(clips)),),
        weights=str(folder), entries=str(tmp_path / "cache" / "entries.jsonl"),
        device="cpu", validation=str(tmp_path / "cache" / "validation.json"),
    )  # fmt: skip
    assert not validation.is_listed(wanted)
    samples.prepare(wanted, one, dataset(clips, one))
    assert validation.is_listed(wanted)
    (first,) = json.loads((tmp_path / "cache" / "validation.json").read_text())["samples"]
    assert first["name"] == "a a cat"
    with Image.open(first["image"]) as image:
        assert image.size == (64, 48)
    assert (
        samples.load_file(first["clip"])["image"].shape
        == family(profile).batch({"B": 1, "F": 3, "H": 3, "W": 4, "T": 512}, "meta", torch.float32)["image"].shape[1:]
    )
    three = wanted.replace(prompts=("a cat", "a dog", "red"))
    assert not validation.is_listed(three)
    samples.prepare(three, one, dataset(clips, one))
    told = json.loads((tmp_path / "cache" / "validation.json").read_text())["samples"]
    assert [sample["name"] for sample in told] == ["a cat", "a dog", "red"]
    assert told[0]["image"] == told[2]["image"] != told[1]["image"]
    Path(told[1]["image"]).unlink()
    assert not validation.is_listed(three)
    with pytest.raises(VplanError, match="begin with a frame of a clip"):
        samples.prepare(three, one, None)


def test_a_sample_that_a_video_steers_is_given_one_of_the_data(place: runs.Place, tmp_path: Path) -> None:
    from PIL import Image

    from tests.trainers.data.caching import dataset, run, setting

    profile = tiny.profile("wan2.1-vace-1.3b")
    folder = tiny.folder(tmp_path / "model", profile)
    clips = tiny.write_pairs(tmp_path / "clips", 1)
    one = setting(folder, tmp_path / "cache", profile)
    run(clips, one)
    plan = Plan(job=one.job, strategy=one.strategy.replace(validation_mode="on"), machine=Machine(gpu="24GB"))
    at = str(tmp_path / "cache" / "validation.json")
    said = {"data": str(clips), "weights": str(folder), "entries": "entries.jsonl", "device": "cpu", "validation": at}
    wanted = Preparation(plan=plan, **said)
    samples.prepare(wanted, one, dataset(clips, one))
    (wish,) = json.loads(Path(at).read_text())["samples"]
    with Image.open(wish["image"]) as image:
        assert image.size == (64, 9 * 48)
    asked = Validation(prompts=at)
    request = place.request(tmp_path / "out", plan.replace(job=one.job), validation=asked)
    given = samples.Samples(request, profile, torch.device("cpu"), 0)._frames_of(wish["image"])
    expected = scan.clips.frames(clips / "steers-0.mp4", range(9), 48, 64)
    numpy.testing.assert_array_equal(numpy.stack([numpy.asarray(frame) for frame in given]), expected)
    longer = one.job.replace(validation=ValidationShape(frames=13, height=48, width=64))
    with pytest.raises(VplanError, match="13 frames need a control video as long"):
        samples.prepare(wanted.replace(plan=plan.replace(job=longer)), replace(one, job=longer), dataset(clips, one))
