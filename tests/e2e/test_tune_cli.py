"""`vplan tune` as people and programs use it, on a simulated machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vplan
from planner.commands import cli
from planner.hardware import doctor
from planner.spec.plan import read_plan
from tests.cuda_wheel import needs_cuda_wheel

pytest.importorskip("optuna")

ONE = ("cogvideox-2b", "--gpu", "9GiB", "--host-ram", "32GiB", "--batch-size", "2")
SHORT = ("--frames", "9", "--height", "240", "--width", "352")
SIMULATE = ("--runner", "simulate", "--seed", "4")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def tune(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of a command in this process."""
    assert cli.main(["tune", *words], standalone_mode=False) == code
    said = capsys.readouterr()
    return said.out, said.err


def test_the_whole_experience(capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path) -> None:
    path = tmp_path / "plan.toml"
    page, talk = tune(capsys, *ONE, *SHORT, *SIMULATE, "-o", str(path))
    for words in (
        "CogVideoX 2B",
        "simulated, so not proved on any card: used",
        "of 9.00 (estimated",
        "3 probes: no other plan",
        "runners-up",
    ):
        assert words in page
    assert "[1] " in talk and "oom in" in talk and "Traceback" not in talk and "\x1b" not in talk
    plan = read_plan(path)
    assert plan.estimate is not None and plan.estimate.basis == "measured" and plan.estimate.verdict == "fits"
    (proof,) = plan.evidence
    assert proof.measured.outcome == "ok" and plan.estimate.high_bytes == proof.measured.device_bytes
    # Said again, nothing is measured again; as JSON it is the object of docs/json.md.
    answer, _ = tune(capsys, *ONE, *SHORT, *SIMULATE, "--json")
    found: dict[str, Any] = json.loads(answer)
    assert {"plan", "probes", "alternatives"} <= found.keys()
    assert found["plan"]["strategy"] == plan.strategy.to_json() and found["plan"]["evidence"][0]["id"] == proof.id
    assert [row["measured"]["outcome"] for row in found["probes"]] == ["oom", "ok", "ok"]
    assert all(other["basis"] in ("measured", "nearby") for other in found["alternatives"])
    assert len((home / "simulated.jsonl").read_text().splitlines()) == 3
    assert not (home / "ledger.jsonl").exists()  # what is simulated is no evidence


def test_what_cannot_fit_is_not_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    words = ("--gpu", "3GiB", "--host-ram", "8GiB", "--gradient-checkpointing", "none")
    answer, _ = tune(capsys, "cogvideox-2b", *words, *SHORT, *SIMULATE, "--json", "-o", str(path), code=3)
    found = json.loads(answer)
    assert found["probes"] == [] and found["plan"]["verdict"] == "no" and not path.exists()


@pytest.mark.skipif(bool(doctor.gpus()[1]), reason="there is a GPU")
def test_without_a_gpu_it_says_what_works() -> None:
    done = subprocess.run(vplan.command("tune", *ONE), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    error, fix = done.stderr.splitlines()
    assert error.startswith("error: ") and "needs an NVIDIA GPU" in error
    assert fix.startswith("fix: ") and "--runner simulate" in fix and "vplan suggest" in fix


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--storage", "sqlite:////no/such/folder/study.db"), "does not respond"),
        (("--storage", "/proc/nowhere/study.journal"), "cannot use the storage"),
        (("--prefer", "batch"), "would change options you set: batch_size"),
    ],
)
def test_what_is_wrong_is_one_line(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer, _ = tune(capsys, *ONE, *SHORT, *SIMULATE, *words, "--json", code=1)
    error = json.loads(answer)["error"]
    assert said in error["message"] and error["fix"] and "\n" not in error["message"]


def test_a_study_of_another_question_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = (*SIMULATE, *SHORT, "--storage", str(tmp_path / "study.journal"), "--study", "mine", "--max-probes", "1")
    tune(capsys, "cogvideox-2b", "--gpu", "80GB", *words)
    _, talk = tune(capsys, "cogvideox-2b", "--gpu", "48GB", *words, code=1)
    assert "is of another question: other machine" in talk and "--study" in talk


def test_without_optuna_the_fix_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    _, talk = tune(capsys, *ONE, *SHORT, *SIMULATE, code=1)
    assert "needs optuna" in talk and "vplan[train]" in talk


# ---- on virtual cards


@needs_cuda_wheel
def test_a_plan_is_proved_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, home: Path) -> None:
    path = tmp_path / "plan.toml"
    words = (*ONE, *SHORT, "--gradient-checkpointing", "full", "--runner", "rehearse", "-o", str(path))
    page, talk = tune(capsys, *words)
    page = " ".join(page.split())  # however it wraps
    assert "proved in rehearsal: used" in page and "per step (estimated)" in page
    assert "rehearsed 4." in talk and "measured" not in talk
    plan = read_plan(path)
    assert plan.estimate is not None and (plan.estimate.basis, plan.estimate.verdict) == ("rehearsed", "fits")
    (proof,) = plan.evidence
    assert proof.env.is_virtual and proof.measured.step_seconds is None
    assert plan.estimate.high_bytes == proof.measured.device_bytes
    assert 0.98 < proof.measured.device_bytes / plan.estimate.peak.device_bytes < 1.02
    (line,) = (home / "rehearsed.jsonl").read_text().splitlines()
    assert json.loads(line)["runner"] == "rehearse"
    assert not (home / "ledger.jsonl").exists()
    # Another study takes the row from there; estimates learn nothing from it.
    again, _ = tune(capsys, *words[:-2], "--study", "again", "--json")
    found = json.loads(again)
    assert (found["probes"], found["plan"]["basis"]) == ([], "rehearsed")
    assert cli.main(["estimate", str(path), "--json"], standalone_mode=False) == 0
    assert json.loads(capsys.readouterr().out)["basis"] == "recorded"


def test_python_is_for_rehearsals(capsys: pytest.CaptureFixture[str]) -> None:
    _, talk = tune(capsys, *ONE, *SIMULATE, "--python", sys.executable, code=2)
    assert "--python is for rehearsals" in talk
