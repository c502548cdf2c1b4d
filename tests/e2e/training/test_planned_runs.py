"""`vplan train` up to the plan that it keeps: as a batch script, so that nothing is encoded or trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result

from planner.spec.plan import read_plan
from tests.command_line import typed
from tests.e2e.test_whole_jobs import write_video

MODEL = "wan2.1-t2v-1.3b"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("clips", "weights"):
        (tmp_path / name).mkdir()
    return tmp_path


def train(place: Path, what: str, *more: str, code: int = 0, run: str = "run") -> Result:
    words = ("--weights", str(place / "weights"), "--data", str(place / "clips"), "--output", str(place / run))
    return typed("train", what, *words, "--slurm", str(place / "job.sh"), *more, code=code)


def mode(place: Path, run: str = "run") -> str:
    return str(read_plan(place / run / "plan.toml").strategy.validation_mode)


@pytest.mark.parametrize(
    "samples", [("--validate-every", "10"), ("--validation-prompt", "a cat"), ("--validation-steps", "20")]
)
def test_samples_that_are_asked_for_are_planned_for(place: Path, samples: tuple[str, str]) -> None:
    train(place, MODEL, "--gpu", "24GB", *samples)
    assert mode(place) == "on"
    again = train(place, MODEL, "--gpu", "24GB", *samples)
    assert "continuing with" in again.stderr and mode(place) == "on"


def test_samples_that_the_vae_cannot_decode_whole_are_decoded_in_tiles(place: Path) -> None:
    """Whole, the model would have to wait in host RAM, and the plan were tight."""
    train(place, MODEL, "--gpu", "6GB", "--validate-every", "10")
    strategy = read_plan(place / "run" / "plan.toml").strategy
    assert (strategy.validation_mode, strategy.vae_tiling) == ("on", True)
    refused = train(place, "wan2.1-t2v-14b", "--gpu", "6GB", "--validate-every", "10", code=3, run="none")
    assert "or leave out --validate-every" in refused.stderr and not (place / "none" / "plan.toml").exists()


def test_without_samples_there_are_none_and_a_kept_plan_says_what_to_do(place: Path) -> None:
    train(place, MODEL, "--gpu", "24GB")
    assert mode(place) == "off"
    refused = train(place, MODEL, "--gpu", "24GB", "--validate-every", "10", code=1).stderr
    assert "plan.toml makes no samples (validation_mode off)" in refused
    assert "fix: leave --validate-every out, or choose another --output" in refused


def test_what_is_refused_leaves_no_plan_behind_and_its_fix_holds(place: Path) -> None:
    """Before, the refused plan was kept, and the fix was then refused for it."""
    off = ("--gpu", "24GB", "--validation-mode", "off")
    assert "the plan makes no samples" in train(place, MODEL, *off, "--validate-every", "10", code=1).stderr
    assert not (place / "run" / "plan.toml").exists()
    train(place, MODEL, *off, run="other")
    given = str(place / "other" / "plan.toml")
    refused = train(place, given, "--validate-every", "10", code=1).stderr
    assert "fix: add --validation-mode on" in refused and not (place / "run" / "plan.toml").exists()
    train(place, given, "--validate-every", "10", "--validation-mode", "on")
    assert mode(place) == "on"


def shapes(place: Path, run: str = "run") -> list[tuple[int, int, int, int | None]]:
    buckets = read_plan(place / run / "plan.toml").job.buckets
    return [(one.frames, one.height, one.width, one.batch_size) for one in buckets]


def test_shapes_are_proposed_from_the_data_and_kept(place: Path) -> None:
    for number in range(4):
        write_video(place / "clips" / f"{number}.mp4", 17, 240, 416)
    auto = ("--gpu", "24GB", "--buckets", "auto")
    shown = train(place, MODEL, *auto).stdout
    (wanted,) = shapes(place)
    assert wanted[:3] == (17, 240, 416) and "shape of the data" in shown
    suggested = str(place / "plan.toml")
    typed("suggest", MODEL, *auto, "--data", str(place / "clips"), "-o", suggested)
    assert list(read_plan(suggested).job.buckets) == list(read_plan(place / "run" / "plan.toml").job.buckets)

    train(place, MODEL, "--gpu", "24GB", run="usual")
    train(place, str(place / "usual" / "plan.toml"), "--buckets", "auto", "--frames", "9", run="given")
    assert [shape[:3] for shape in shapes(place, "given")] == [(9, 240, 416)]

    write_video(place / "clips" / "tall.mp4", 33, 416, 240)  # which a plan that is kept is not made for
    assert "continuing with" in train(place, MODEL, *auto).stderr and shapes(place) == [wanted]
    (place / "clips" / "tall.txt").unlink()
    assert "fix: " in train(place, MODEL, *auto, run="new", code=1).stderr
    train(place, MODEL, *auto, "--skip-bad", run="new")
    assert shapes(place, "new") == [wanted]


def test_shapes_of_encoded_samples_are_not_proposed(place: Path) -> None:
    (place / "clips" / "entries.jsonl").write_text("")
    refused = train(place, MODEL, "--gpu", "24GB", "--buckets", "auto", code=1).stderr
    assert "holds encoded samples" in refused and "fix: write their shapes" in refused
