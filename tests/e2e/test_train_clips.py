"""From a folder of short real videos to a LoRA file that a pipeline loads, in one process and in two."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("av")

import diffusers  # noqa: E402

import vplan  # noqa: E402
from planner.dataset import clips  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan, read_plan, write_plan  # noqa: E402
from tests.trainers import runs, tiny  # noqa: E402

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
        more += ["--validation-steps", "1", "--validation-prompt", "a red cat"]
        done = subprocess.run(
            vplan.command("train", str(place / f"{gpus}.toml"), *said, *more),
            capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        answer = json.loads(done.stdout)
        assert answer["steps"] == 4
        assert [Path(sample).name for sample in answer["samples"]] == ["step-00000004-0.mp4"]
        for sample in answer["samples"]:
            assert clips.probe(Path(sample)) == (9, 16, 48, 64)
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
    assert [(line["frames"], line["height"], line["width"]) for line in runs.lines(tmp_path / "run")] == [
        (5, 48, 64)
    ] * 3


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
