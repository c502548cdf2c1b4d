"""A Mac, through the real command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from planner.commands import cli


def said(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, list(words), env={"COLUMNS": "100"})
    assert done.exit_code == code, done.output
    return done.output


def answer(*words: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words, "--json", code=code))
    return found


def test_a_plan_is_suggested_and_no_seconds_are_told() -> None:
    asked = ("suggest", "wan2.1-t2v-1.3b", "--gpu", "M4 Max 64GB", "--frames", "1")
    found = answer(*asked)
    plan = found["plan"]
    assert plan["verdict"] == "fits" and plan["machine"]["gpu"] == "m4max-64gb"
    assert plan["strategy"]["optimizer_step"] == "loop" and plan["strategy"]["swap_blocks"] == 0
    assert plan["step_seconds"] is None and {switch["step_seconds"] for switch in found["switches"]} <= {None}
    page = said(*asked)
    assert "on Apple M4 Max with 64 GB" in page and "no seconds" in page and " s (estimated)" not in page


def test_a_clip_whose_scores_no_buffer_holds_fails_and_a_shorter_one_is_named() -> None:
    page = " ".join(said("suggest", "wan2.1-t2v-1.3b", "--gpu", "m4max-64gb", code=3).split())
    assert "fails: one tensor has 48.0 GiB" in page
    shorter = answer("suggest", "wan2.1-t2v-1.3b", "--gpu", "m4max-64gb", code=3)["relax"]
    frames = next(int(wish["to"]) for wish in shorter if wish["field"] == "frames")
    assert (
        answer("suggest", "wan2.1-t2v-1.3b", "--gpu", "m4max-64gb", "--frames", str(frames))["plan"]["verdict"]
        == "fits"
    )


def test_swapping_is_said_plainly() -> None:
    words = ("--frames", "21", "--gradient-checkpointing", "full")
    page = " ".join(said("estimate", "wan2.1-t2v-1.3b", "--gpu", "m4-24gb", *words, code=3).split())
    assert "swaps: macOS recommends 16.0 GiB for the GPU; PyTorch does not fail below 27.2 GiB" in page


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        (("suggest", "wan2.1-t2v-1.3b", "--gpu", "m4max"), 1, "does not say how much memory"),
        (("suggest", "sdxl", "--gpu", "m4max-64gb"), 1, "U-Net's convolutions is not known"),
        (("suggest", "flux.1-dev", "--gpu", "m4max-64gb", "--for", "simpletuner"), 1, "simpletuner does on Apple"),
        (("suggest", "flux.1-dev", "--gpu", "m4max-64gb", "-o", "plan.toml"), 2, "own trainer needs CUDA"),
        (("suggest", "flux.1-dev", "--gpu", "m4max-64gb", "--steps", "9"), 1, "no hours either"),
        (("suggest", "flux.1-dev", "--gpu", "m4max-64gb", "--steps", "9", "--max-hours", "2"), 2, "no seconds are"),
        (("estimate", "flux.1-dev", "--gpu", "m4max-64gb", "--report", "page.html"), 2, "own trainer needs CUDA"),
        (("estimate", "flux.1-dev", "--gpu", "m4max-64gb", "--gradient-checkpointing", "offload"), 1, "a Mac has one"),
        (("check", "--gpu", "m4max-64gb", "--", "python", "train_dreambooth_lora_flux.py",
          "--pretrained_model_name_or_path", "black-forest-labs/FLUX.1-dev", "--mixed_precision", "bf16"), 1,
         "does on Apple M4 Max"),
    ],
)  # fmt: skip
def test_what_is_not_known_there_is_refused_by_name(words: tuple[str, ...], code: int, fault: str) -> None:
    done = CliRunner().invoke(cli, list(words))
    assert (done.exit_code, fault in " ".join(done.output.split())) == (code, True), done.output


def test_a_mac_is_shown_with_what_it_gives() -> None:
    page = said("gpus", "m3ultra-512gb")
    assert "Apple M3 Ultra with 512 GB" in page and "384.00 GiB" in page and "TFLOPS" not in page
