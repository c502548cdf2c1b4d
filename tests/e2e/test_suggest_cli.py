"""`vplan suggest` as people and programs use it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import vplan
from planner.catalog import card_lookup, lookup
from planner.spec.plan import read_plan

SHORT = ("--frames", "9", "--height", "240", "--width", "352")
ONE = ("--model", "cogvideox-2b", "--gpu", "24GB")


def run(*words: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        vplan.command("suggest", *words), env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def answer(*words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json", code=code).stdout)
    return found


def test_one_model_on_one_card() -> None:
    found = answer(*ONE, *SHORT)
    assert {"plan", "alternatives", "switches", "considered", "seconds"} <= found.keys()
    assert found["plan"]["verdict"] == "fits"
    assert found["plan"]["high_bytes"] <= found["plan"]["budget_bytes"]
    assert sum(found["plan"]["breakdown"].values()) == found["plan"]["peak"]["device_bytes"]
    assert found["considered"] > 3


@pytest.mark.parametrize("columns", [80, 120])
def test_the_answer_holds_its_width_and_has_no_colour_in_a_pipe(columns: int) -> None:
    page = run(*ONE, COLUMNS=str(columns)).stdout
    assert max(map(len, page.splitlines())) <= columns
    assert "\x1b" not in page
    for word in ("CogVideoX 2B", " of 23.50 GiB (", "fits", "peak:", "effect of each option"):
        assert word in page


def test_the_plan_is_written_and_estimate_agrees_with_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    found = answer(*ONE, *SHORT, "-o", str(path))
    plan = read_plan(path)
    assert plan.estimate is not None and plan.estimate.peak.device_bytes == found["plan"]["peak"]["device_bytes"]
    done = subprocess.run(vplan.command("estimate", str(path), "--json"), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["peak"] == found["plan"]["peak"]


def test_nothing_fits() -> None:
    words = ("cogvideox-2b", "--gpu", "12GB", "--gradient-checkpointing", "none")
    found = answer(*words, code=3)
    assert found["plan"]["verdict"] == "no"
    assert all(wish.keys() >= {"field", "from", "to"} for wish in found["relax"])
    assert "change one of" in run(*words, code=3).stdout


def test_without_a_model_every_video_model_has_a_line() -> None:
    found = answer("--gpu", "24GB", "--frames", "9", "--resolution", "256x384")
    known = [name for name in lookup.model_names() if lookup.model(name).kind == "video"]
    assert [row["model"] for row in found["models"]] == known
    assert all(row["plan"] is not None or row["reason"] for row in found["models"])


def test_without_a_card_every_class_has_a_line() -> None:
    found = answer("--model", "cogvideox-2b", *SHORT, "--gradient-checkpointing", "full")
    assert [row["gpu"] for row in found["classes"]] == [group.name for group in card_lookup.gpu_classes()]


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        ((), 2, "no --model and no --gpu"),
        ((*ONE, "--frames", "80"), 1, "80 is not 4n+1"),
        (("--gpu", "24GB", "--frames", "80"), 1, "80 is not"),
        ((*ONE, "--frames", "9", "--prefer", "frames"), 1, "would change options you set"),
        ((*ONE, "--prefer", "beauty"), 1, "beauty"),
        (("--gpu", "24GB", "-o", "plan.toml"), 2, "-o needs a single plan"),
        ((*ONE, "-o", "myplan"), 1, "'myplan' is not a .toml file"),  # `vplan train myplan` would look for a model
    ],
)
def test_bad_input_is_named_with_its_fix(words: tuple[str, ...], code: int, fault: str) -> None:
    done = run(*words, code=code)
    assert fault in done.stderr and "fix: " in done.stderr
    assert done.stdout == ""
