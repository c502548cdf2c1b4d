"""Frames come in order and as one process reads them, faults in their places, and nothing stays of a killed parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import psutil
import pytest

import vplan
from planner.dataset.clips import UnusableError
from tests.trainers import tiny
from trainers.data import decoding
from trainers.data.decoding import FEWEST_ITEMS, FrameRange, SampleFiles, decode, decoded, processes_for

INDICES = (0, 2, 3)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[SampleFiles]:
    """Enough for two processes; one of them is broken."""
    folder = tmp_path_factory.mktemp("clips")
    ranges = []
    for number in range(2 * FEWEST_ITEMS):
        path = tiny.write_video(folder / f"{number}.mp4", frames=5, blue=7 * number)
        ranges.append(FrameRange(path, INDICES, 24, 32))
    ranges[3].path.write_bytes(b"no video")
    return [{"clip": wanted, "reference": wanted._replace(indices=(0,))} for wanted in ranges]


def test_other_processes_decode_what_this_one_would(
    samples: list[SampleFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    with decoded(samples, processes_for(samples)) as answers:
        all_ahead = list(answers)
        pids = {child.pid for child in psutil.Process().children()}
    for number, (files, ahead) in enumerate(zip(samples, all_ahead, strict=True)):
        here = decode(files)
        if number == 3:
            assert isinstance(here, UnusableError) and isinstance(ahead, UnusableError)
            assert str(ahead) == str(here)
            continue
        assert isinstance(here, dict) and isinstance(ahead, dict)
        assert {role: frames.shape for role, frames in ahead.items()} == {
            "clip": (3, 24, 32, 3),
            "reference": (1, 24, 32, 3),
        }
        for role, frames in ahead.items():
            numpy.testing.assert_array_equal(frames, here[role])
    assert len(pids) >= 2
    assert not any(psutil.pid_exists(pid) and "spawn" in " ".join(psutil.Process(pid).cmdline()) for pid in pids)


def test_few_samples_and_those_of_many_ranks_start_no_process(
    samples: list[SampleFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    assert processes_for(samples) == len(samples) // FEWEST_ITEMS == 2
    assert processes_for(samples, ranks=4) == 1
    assert processes_for(samples[: FEWEST_ITEMS - 1]) == processes_for(samples, ranks=5) == processes_for([]) == 0
    monkeypatch.setattr(decoding, "AHEAD_BYTES", samples[0]["clip"].nbytes)
    assert processes_for(samples) == 0
    monkeypatch.setattr(decoding, "ProcessPoolExecutor", None)  # calling it would fail
    with decoded(samples, 0) as answers:
        assert len(list(answers)) == len(samples)


SCRIPT = """
import sys, time
from pathlib import Path
from trainers.data import decoding
if __name__ == "__main__":
    path, count = Path(sys.argv[1]), 2 * decoding.FEWEST_ITEMS
    with decoding.decoded([{"clip": decoding.FrameRange(path, (0,), 24, 32)}] * count, 2) as answers:
        next(answers)
        print("ready", flush=True)
        time.sleep(600)
"""


def test_nothing_stays_of_a_killed_parent(samples: list[SampleFiles], tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(samples[0]["clip"].path)]
    environment = {**os.environ, "PYTHONPATH": vplan.HOME}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        parent.kill()
    end = time.monotonic() + 30
    while any(child.is_running() for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [child for child in children if child.is_running()]
