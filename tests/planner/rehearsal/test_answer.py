"""What a run is said to have been, from what its processes wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("elftools")

from planner.catalog.card_lookup import gpu
from planner.errors import VplanError
from planner.rehearsal.answer import RehearsalAnswer, _last_words, answer_of
from planner.rehearsal.cards import MOST_CARDS, CardTable, Holder, card_environment, read_table
from planner.rehearsal.interpreter import Interpreter
from planner.rehearsal.observations import program_frame, read_observed
from planner.rehearsal.rehearsal import Ending, Rehearsal, RehearsalOutcome

GIB = 2**30
CONTEXT = 460 * 2**20
OWN = {"file": "/home/me/train.py", "line": 12, "function": "train", "source": "opt.step()"}
LIBRARY = {"file": "/venv/lib/python3.11/site-packages/torch/optim/adam.py", "line": 178, "function": "f", "source": ""}
OOM = {
    "device": 0,
    "requested_bytes": GIB,
    "allocated_bytes": 22 * GIB,
    "reserved_bytes": 22 * GIB,
    "phase": "optimizer",
    "step": 1,
    "moment": "forward of blocks.3",
    "frames": [OWN, LIBRARY],
}


def process(**changes: Any) -> dict[str, Any]:
    """A file as trainers/observer writes it."""
    peaks = {"allocated": 10 * GIB, "reserved": 12 * GIB}
    facts = {
        "pid": 7,
        "rank": None,
        "local_rank": None,
        "world_size": None,
        "torch": "2.13.0",
        "phase": "train",
        "phases": {"load": {"0": {"allocated": GIB, "reserved": 2 * GIB}}, "train": {"0": peaks}},
        "steps": 3,
        "retries": 0,
        "ooms": 0,
        "hollow_bytes": 0,
        "oom": None,
        "refused": None,
        "reads": {},
        "end": "steps",
        "program": ["train.py"],
    }
    return {**facts, **changes}


def answer(folder: Path, ending: Ending, device_bytes: int = 12 * GIB + CONTEXT, **changes: Any) -> RehearsalAnswer:
    facts = process(**changes)
    (folder / f"observed-{facts['pid']}.json").write_text(json.dumps(facts))
    rest = (0,) * (MOST_CARDS - 1)
    holder = Holder(facts["pid"], (device_bytes, *rest), (CONTEXT, *rest), *[0] * 7)
    table = CardTable((device_bytes, *rest), (holder,))
    code = {"done": 0, "failed": 1}.get(ending)
    outcome = RehearsalOutcome(
        ending, code, 5.0, read_observed(folder), table, log="Error: it broke\n\n", sandbox={"network": True}
    )
    rehearsal = Rehearsal(("python", "train.py"), gpu("24GB"), 1, 3, 60.0, None)
    return answer_of(rehearsal, outcome, Interpreter("python", {}, ()))


def test_fits(tmp_path: Path) -> None:
    found = answer(tmp_path, "steps")
    assert (found.verdict, found.limit, found.phase, found.steps) == ("fits", None, "train", 3)
    (rank,) = found.ranks
    assert (rank.allocated_bytes, rank.reserved_bytes, rank.outside_bytes) == (10 * GIB, 12 * GIB, CONTEXT)
    assert rank.phases["load"].device_bytes == 2 * GIB + CONTEXT
    assert found.to_json()["device_bytes"] == 12 * GIB + CONTEXT
    assert json.dumps(found.to_json())


def test_it_ends_at_a_line(tmp_path: Path) -> None:
    found = answer(tmp_path, "failed", oom=OOM, ooms=1, end="exit")
    assert (found.verdict, found.limit, found.phase, found.short_of_bytes) == ("no", "gpu", "optimizer", GIB)
    assert found.where is not None
    assert (found.where.file, found.where.line) == ("/home/me/train.py", 12)
    told = found.to_json()
    assert (told["step"], told["rank"], told["moment"]) == (1, 0, "forward of blocks.3")


def test_an_error_that_was_caught_is_none(tmp_path: Path) -> None:
    found = answer(tmp_path, "done", oom=OOM, ooms=2, end="exit")
    assert found.verdict == "fits"
    assert any("2 times and went on" in note for note in found.assumptions)


def test_tight_when_the_cache_was_emptied_or_too_little_is_left(tmp_path: Path) -> None:
    assert answer(tmp_path, "steps", retries=1).verdict == "tight"
    assert answer(tmp_path, "steps", device_bytes=gpu("24GB").allocatable_bytes - CONTEXT // 2).verdict == "tight"


def test_values_that_were_read_are_named(tmp_path: Path) -> None:
    found = answer(tmp_path, "steps", reads={"/home/me/train.py:5 item": 3})
    assert any("train.py:5 item" in note for note in found.assumptions)


def test_over_the_host_ram(tmp_path: Path) -> None:
    assert (answer(tmp_path, "host-ram").verdict, answer(tmp_path, "host-ram").limit) == ("no", "host")


@pytest.mark.parametrize(
    ("ending", "message"),
    [("failed", "exit code 1: Error: it broke"), ("time", "60 s with 3 of 3"), ("machine-ram", "RAM")],
)
def test_a_run_that_says_nothing(tmp_path: Path, ending: Ending, message: str) -> None:
    with pytest.raises(VplanError, match=message) as error:
        answer(tmp_path, ending)
    assert error.value.exit_code == 4


def test_what_cannot_be_rehearsed_is_named(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=r"torch.compile \(/home/me/train.py:12\)") as error:
        answer(tmp_path, "failed", refused={"what": "torch.compile", "fix": "run it without", "frames": [OWN, LIBRARY]})
    assert error.value.exit_code == 1


def test_nothing_was_written(tmp_path: Path) -> None:
    assert read_observed(tmp_path) == []
    assert read_table(tmp_path).holders == ()
    assert program_frame(()) is None


def test_a_card_as_processes_are_told_of_it() -> None:
    told = card_environment(gpu("rtx4090"), 2, 600)
    assert told["VPLAN_GPU_COUNT"] == "2"
    assert told["VPLAN_GPU_BYTES"] == str(gpu("rtx4090").allocatable_bytes)
    assert told["VPLAN_GPU_CAPABILITY"] == "89"
    assert told["VPLAN_GPU_PROCESSORS"] == "128"


def test_the_programs_own_words_are_told_and_not_its_launchers() -> None:
    own = "Traceback (most recent call last):\n  File 'train.py'\nModuleNotFoundError: No module named 'librosa'\n"
    accelerate = (
        'Traceback (most recent call last):\n  File "accelerate_cli.py", line 50, in main\n'
        "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.\n"
    )
    torchrun = (
        'Traceback (most recent call last):\n  File "run.py", line 9\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\ntrain.py FAILED\n====\n"
    )
    for log in (own, own + accelerate, own + torchrun):
        assert _last_words(log) == "ModuleNotFoundError: No module named 'librosa'"
    assert _last_words(accelerate).startswith("subprocess.CalledProcessError") and _last_words(" \n") == "no output"
