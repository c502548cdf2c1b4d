"""From a folder of short real videos to a LoRA file that a pipeline loads, in one process and in two."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("av")

import diffusers  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors import safe_open  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

import vplan  # noqa: E402
from planner.dataset import clips  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan, read_plan, write_plan  # noqa: E402
from tests.trainers import runs, tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("preloaded_python")

PATIENCE = 300


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("clips")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        profile = tiny.profile("wan2.1-t2v-1.3b")
        tiny.folder(root / "model", profile)
        model = diffusers.WanTransformer3DModel.from_config(profile.config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.1)
        model.save_pretrained(root / "model" / "transformer")
        runs.keep(root / "model", "tiny-clips")
        tiny.write_clips(root / "clips")
        for gpus in (1, 2):
            job = Job(model="tiny-clips", frames=9, height=48, width=64, lora_rank=4, batch_size=2 // gpus)
            strategy = {
                **runs.PLAIN,
                "sharding": "ddp" if gpus == 2 else "none",
                "vae_dtype": "fp32",
                "text_encoder_dtype": "fp32",
                "validation_mode": "on",
            }
            plan = Plan(job=job, strategy=Strategy.read(strategy), machine=Machine(gpu="24GB", gpus=gpus))
            write_plan(plan, root / f"{gpus}.toml")
        yield root


def test_clips_become_a_lora_file_with_one_rank_and_with_two(place: Path, tmp_path: Path) -> None:
    for gpus in (1, 2):
        said = ["--data", str(place / "clips"), "--output", str(tmp_path / str(gpus)), "--device", "cpu"]
        more = ["--steps", "4", "--checkpoint-every", "2", "--learning-rate", "0.01", "--json"]
        more += ["--validation-steps", "1", "--validation-prompt", "a red cat", "--log-with", "tensorboard"]
        done = subprocess.run(
            vplan.command("train", str(place / f"{gpus}.toml"), *said, *more),
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        answer = json.loads(done.stdout)
        assert answer["steps"] == 4
        assert [Path(sample).name for sample in answer["samples"]] == ["step-00000004-0.mp4"]
        for sample in answer["samples"]:
            assert clips.probe(Path(sample)) == (9, 16, 48, 64, ())
        (tracked,) = EventAccumulator(str(tmp_path / str(gpus) / "vplan")).Reload().Images("samples/1")
        with Image.open(io.BytesIO(tracked.encoded_image_string)) as video:
            assert (tracked.step, video.format, video.n_frames, video.size) == (4, "GIF", 9, (64, 48))
    assert runs.losses(tmp_path / "1") == pytest.approx(runs.losses(tmp_path / "2"), abs=1e-5)
    transformer = diffusers.WanTransformer3DModel.from_pretrained(place / "model" / "transformer")
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": None}
    pipe = diffusers.WanPipeline(transformer=transformer, **parts)
    pipe.load_lora_weights(tmp_path / "2" / "final")
    assert pipe.get_active_adapters()


def test_changed_data_and_another_plan_are_what_is_trained_on(place: Path, tmp_path: Path) -> None:
    """In the same --output. Before, it trained on the first run's samples and shape without a word."""
    data = shutil.copytree(place / "clips", tmp_path / "clips")
    plan = read_plan(place / "1.toml")
    strategy = plan.strategy.replace(validation_mode="off")
    for frames in (9, 5):
        job = plan.job.replace(frames=frames, batch_size=1)
        write_plan(plan.replace(job=job, strategy=strategy), tmp_path / f"{frames}.toml")

    def train(frames: int, *more: str) -> Any:
        said = ["--data", str(data), "--output", str(tmp_path / "run"), "--device", "cpu", "--json", *more]
        command = vplan.command("train", str(tmp_path / f"{frames}.toml"), *said)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
        entries = [json.loads(line) for line in (tmp_path / "run/cache/entries.jsonl").read_text().splitlines()]
        return done, entries

    first, before = train(9, "--steps", "1")
    assert first.returncode == 0, first.stderr
    assert not [note for note in json.loads(first.stdout)["notes"] if "changed" in note]
    (data / "0.txt").write_text("a red dog")
    tiny.write_video(data / "new.mp4", blue=200)
    (data / "new.txt").write_text("a blue dog")
    (data / "1.mp4").unlink()
    (data / "1.txt").unlink()
    stale, entries = train(9, "--steps", "2")  # the checkpoint is of other samples
    assert stale.returncode == 1 and "how it is encoded" in json.loads(stale.stdout)["error"]["message"]
    assert "2 samples new, 2 samples gone" in stale.stderr
    assert len(entries) == 3 and sum(entry in before for entry in entries) == 1
    other, entries = train(5, "--steps", "3", "--resume", "no")
    assert other.returncode == 0, other.stderr
    assert "3 samples new, 3 samples gone" in other.stderr
    assert {entry["bucket"]["frames"] for entry in entries} == {5}
    assert [line["shapes"] for line in runs.lines(tmp_path / "run")] == [{"5x48x64": 1}] * 3


def test_preflight_holds_the_clips_against_the_plan(place: Path, tmp_path: Path) -> None:
    """As another trainer's script asks it: one call, which answers or raises."""
    answer = vplan.preflight(place / "1.toml", data=place / "clips", output=tmp_path, device="cpu")
    assert answer["verdict"] == "go"
    assert answer["data"]["samples"] == len(list((place / "clips").glob("*.mp4")))
    assert answer["data"]["cache_bytes"] > 0
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").write_bytes(b"no video")
    (tmp_path / "clips" / "a.txt").write_text("a thing")
    with pytest.raises(vplan.VplanError, match=r"1 of 1 samples cannot be used: a\.mp4: corrupt video") as refused:
        vplan.preflight(place / "1.toml", data=tmp_path / "clips", device="cpu")
    assert refused.value.exit_code == 1


def train(plan: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    said = ["--device", "cpu", "--checkpoint-every", "50", "--learning-rate", "0.01", "--json"]
    return subprocess.run(
        vplan.command("train", str(plan), *arguments, *said),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def test_a_dataset_file_of_clips_and_one_picture(place: Path, tmp_path: Path) -> None:
    """The picture comes as often as its repeats say, at one frame, mirrored too; a broken file is named, or skipped."""
    (tmp_path / "pictures").mkdir()
    tiny.write_image(tmp_path / "pictures" / "me.png")
    (tmp_path / "dataset.toml").write_text(
        f"""
        [[source]]
        folder = '{place / "clips"}'

        [[source]]
        folder = "pictures"
        trigger = "ohwx man"
        caption = "a photo"
        repeats = 2
        flip = true
        """
    )
    plan = read_plan(place / "1.toml")
    shapes = [{"frames": 9, "height": 48, "width": 64}, {"frames": 1, "height": 48, "width": 64}]
    job = plan.job.replace(batch_size=1, buckets=shapes)
    write_plan(plan.replace(job=job, strategy=plan.strategy.replace(validation_mode="off")), tmp_path / "plan.toml")
    said = ["--data", str(tmp_path / "dataset.toml"), "--output", str(tmp_path / "run"), "--steps", "14"]
    refused = train(place / "1.toml", *said)
    assert refused.returncode == 1
    assert "--buckets 9x48x64,1x48x64" in json.loads(refused.stdout)["error"]["fix"]
    (tmp_path / "pictures" / "broken.png").write_bytes(b"nothing")
    (tmp_path / "run" / "plan.toml").unlink()
    refused = train(tmp_path / "plan.toml", *said)
    assert "pictures/broken.png: not an image, or broken" in json.loads(refused.stdout)["error"]["message"]
    done = train(tmp_path / "plan.toml", *said, "--skip-bad")
    assert done.returncode == 0, done.stderr + done.stdout
    notes = json.loads(done.stdout)["notes"]
    assert "skipped: pictures/broken.png: not an image, or broken" in notes
    assert "pictures/ 2 samples of 1 clip: mirrored" in notes
    steps = [line["shapes"] for line in runs.lines(tmp_path / "run") if "loss" in line]
    assert steps.count({"1x48x64": 1}) == 8 and steps.count({"9x48x64": 1}) == 6  # 2 epochs of 2 x 2 and of 3
    other = train(tmp_path / "plan.toml", *said, "--flip")
    assert other.returncode == 1 and "--flip is for a folder" in json.loads(other.stdout)["error"]["message"]


def test_one_picture_trains_a_lora_of_a_video_model(place: Path, tmp_path: Path) -> None:
    (tmp_path / "me").mkdir()
    tiny.write_image(tmp_path / "me" / "me.png")
    plan = read_plan(place / "1.toml")
    job, strategy = plan.job.replace(batch_size=1, frames=1), plan.strategy.replace(validation_mode="off")
    write_plan(plan.replace(job=job, strategy=strategy), tmp_path / "plan.toml")
    said = ["--data", str(tmp_path / "me"), "--output", str(tmp_path / "run"), "--steps", "30", "--caption", "ohwx man"]
    done = train(tmp_path / "plan.toml", *said)
    assert done.returncode == 0, done.stderr + done.stdout
    found = runs.losses(tmp_path / "run")
    assert sum(found[-10:]) < sum(found[:10])
    assert (tmp_path / "run" / "final" / "pytorch_lora_weights.safetensors").is_file()


def test_settings_are_shown_kept_and_held_to(place: Path, tmp_path: Path) -> None:
    """Several at once, from clips to files, with a resume that changes some."""

    def train(steps: int, *said: str) -> subprocess.CompletedProcess[str]:
        words = ["--data", str(place / "clips"), "--output", str(tmp_path), "--device", "cpu", "--json"]
        words += ["--checkpoint-every", "2", "--validation-mode", "off", "--steps", str(steps), *said]
        command = vplan.command("train", str(place / "1.toml"), *words)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)

    knobs = ["--timestep-sampling", "mode", "--timestep-shift", "3", "--loss-weighting", "bell"]
    knobs += ["--caption-dropout", "0.5"]
    knobs += ["--lora-alpha", "8", "--lora-init", "kaiming", "--betas", "0.9,0.95", "--max-grad-norm", "0.5"]
    first = train(2, *knobs)
    assert first.returncode == 0, first.stderr
    shown = "mode noise levels (scale 1.29), shift 3, loss weights bell, captions dropped from 50%"
    said = " ".join(first.stderr.split())  # wrapped to the terminal's width
    assert f"training: {shown}" in said
    assert "betas 0.9,0.95, clipped at 0.5, LoRA alpha 8, begins kaiming" in said
    kept = read_plan(tmp_path / "plan.toml").training
    assert (kept.timestep_sampling, kept.timestep_shift, kept.lora_alpha, kept.betas) == ("mode", 3.0, 8.0, (0.9, 0.95))
    with safe_open(tmp_path / "final" / "comfyui_lora.safetensors", framework="pt") as file:
        assert file.metadata()["ss_network_alpha"] == "8"
        assert json.loads(file.metadata()["vplan_training_law"])["loss_weighting"] == "bell"
        assert {float(file.get_tensor(key)) for key in file.keys() if key.endswith(".alpha")} == {8.0}  # noqa: SIM118
    other = train(4)
    assert other.returncode == 1
    assert "was trained with timestep_sampling mode, mode_scale 1.29, timestep_shift 3" in other.stdout
    assert "pass --timestep-sampling mode --mode-scale 1.29 --timestep-shift 3" in other.stdout
    last = train(4, *knobs, "--learning-rate", "0.001")
    assert last.returncode == 0, last.stderr
    assert "learning_rate 0.0001 -> 0.001" in " ".join(last.stderr.split())
    answer = json.loads(last.stdout)
    assert (answer["resumed_from"], answer["training"]["loss_weighting"]) == (2, "bell")
    refused = train(4, "--snr-gamma", "5")
    assert refused.returncode == 1 and "is a flow model" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("file", "spoil", "words"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", lambda content: content[:-100], "is damaged: it has"),
        ("vae/diffusion_pytorch_model.safetensors", lambda content: content[:1000], "is damaged"),
        ("text_encoder/model.safetensors", lambda _: b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
        ("transformer/config.json", lambda content: content.replace(b'"num_layers": ', b'"num_layers": 1'), "layers"),
    ],
)
def test_weights_that_are_not_whole_are_found_before_anything_is_encoded(
    place: Path, tmp_path: Path, file: str, spoil: Callable[[bytes], bytes], words: str
) -> None:
    """Before, a download of the transformer that had broken off was found once all clips were encoded."""
    weights = shutil.copytree(place / "model", tmp_path / "model")
    (weights / file).write_bytes(spoil((weights / file).read_bytes()))
    said = ["--data", str(place / "clips"), "--output", str(tmp_path / "run"), "--steps", "1"]
    refused = train(place / "1.toml", *said, "--weights", str(weights))
    error = json.loads(refused.stdout)["error"]
    assert refused.returncode == 1 and words in error["message"] and file.partition("/")[0] in error["message"]
    assert not (tmp_path / "run" / "cache").exists() and not (tmp_path / "run" / "prepare").exists()
