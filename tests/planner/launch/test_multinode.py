"""Computers that agree through a folder: what the first says reaches all; one that fails or falls silent ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vplan
from planner.errors import VplanError
from planner.launch import launch, multinode
from planner.launch.launch import Nodes, Outcome, RunRequest
from planner.launch.multinode import ElsewhereError, Peers
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.worker_process import write_json

PLAN = Plan(
    job=Job(model="wan2.1-t2v-1.3b", frames=5, height=64, width=64),
    strategy=Strategy(sharding="ddp"),
    machine=Machine(gpu="24GB", nodes=2),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT_SECONDS", 0.02), ("LOOK_SECONDS", 0.01), ("SILENT_SECONDS", 3.0)):
        monkeypatch.setattr(multinode, name, seconds)


def request(output: Path, **said: Any) -> RunRequest:
    asked = {"plan": PLAN, "entries": "e", "weights": "w", "output": str(output), "run": "r", "steps": 1}
    return RunRequest(**{**asked, "checkpoint_every": 1, "keep_checkpoints": 1, "device": "cpu", **said})


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Peers, Peers]]:
    with Peers(tmp_path, 0, 2) as first, Peers(tmp_path, 1, 2) as second:
        yield first, second


def later(function: Callable[[], Any]) -> Callable[[], Any]:
    """Runs it in a thread; the call that is returned waits for what it returns."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(60)
        return found[0]

    return wait


def test_what_the_first_says_reaches_the_others(pair: tuple[Peers, Peers], tmp_path: Path) -> None:
    first, second = pair
    heard = later(lambda: second.request(0))
    first.publish(0, request(tmp_path, steps=7))
    assert heard().steps == 7
    told = later(lambda: first.joint_outcome(0, Outcome("ok")))
    assert second.joint_outcome(0, Outcome("ok")).name == told().name == "ok"


def test_the_cause_is_told_on_all(pair: tuple[Peers, Peers]) -> None:
    """One ran out of memory; the other's ranks only saw that it was gone."""
    first, second = pair
    told = later(lambda: first.joint_outcome(0, Outcome("crash", "connection reset", exit_code=4)))
    shape = {"frames": 5, "height": 64, "width": 64}
    assert second.joint_outcome(0, Outcome("oom", "no memory", exit_code=3, shape=shape)).name == "oom"
    assert told() == Outcome("oom", "no memory", exit_code=3, shape=shape)
    told = later(lambda: first.joint_outcome(1, Outcome("crash", "reset")))
    assert second.joint_outcome(1, Outcome("crash", "KeyError: x")).message == "node 0: reset; node 1: KeyError: x"
    assert told().message == "node 0: reset; node 1: KeyError: x"


def test_a_failure_elsewhere_ends_the_ranks_here(
    pair: tuple[Peers, Peers], tmp_path: Path, worker: Callable[[str], None]
) -> None:
    """Ranks that would wait for ever are ended, and what one of them had told before counts."""
    first, second = pair
    worker("time.sleep(600)")
    began = later(lambda: first.run(0, request(tmp_path), Nodes(0), lambda: None))
    told = later(lambda: second.joint_outcome(0, Outcome("nan", "step 3", exit_code=4)))
    assert began() == told() == Outcome("nan", "step 3", exit_code=4)

    def out_of_memory() -> None:
        write_json(tmp_path / "run" / "result-00000.json", {"rank": 0, "outcome": "oom", "message": "here"})

    began = later(lambda: first.run(1, request(tmp_path), Nodes(0), out_of_memory))
    told = later(lambda: second.joint_outcome(1, Outcome("crash", "reset", exit_code=4)))
    assert began().message == told().message == "here"


def test_one_that_falls_silent_ends_the_rest(tmp_path: Path) -> None:
    with Peers(tmp_path, 0, 2) as first:
        with Peers(tmp_path, 1, 2):
            end = time.monotonic() + 60
            while first._pulses[1].look() > 0.01 or not first._pulses[1].beats:
                assert time.monotonic() < end
            first.watch(0)  # it lives
        with pytest.raises(ElsewhereError, match="node 1 stopped responding"):
            while time.monotonic() < end:
                first.watch(0)
        assert first.joint_outcome(0, Outcome("crash", "reset")).name == "gone"


def test_the_others_hear_why_the_first_has_ended(tmp_path: Path) -> None:
    second = None
    with pytest.raises(VplanError), Peers(tmp_path, 0, 2):
        second = Peers(tmp_path, 1, 2).__enter__()
        raise VplanError("the disk is full")
    assert second is not None
    assert second.request(0) is None
    assert second.end_message() == "the disk is full"
    second.__exit__(None, None, None)


def test_what_an_earlier_call_left_is_no_news(tmp_path: Path) -> None:
    """A second computer that is started before the first waits for it; the folder of before is not taken."""
    with Peers(tmp_path, 0, 2) as first:
        first.publish(0, request(tmp_path, steps=1))
    joined = later(lambda: Peers(tmp_path, 1, 2).__enter__())
    time.sleep(0.1)
    with Peers(tmp_path, 0, 2) as first:
        second = joined()
        assert second.folder == first.folder
        first.publish(0, request(tmp_path, steps=2))
        heard = second.request(0)
        assert heard is not None and heard.steps == 2
        second.__exit__(None, None, None)


def test_the_launchers_words_name_the_others() -> None:
    words = launch.command(PLAN, Path("/run"), Nodes(1, "10.0.0.1", 29_777))
    said = " ".join(words)
    assert "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29777" in said
    assert words[-4:] == [*vplan.command("worker", "train", "/run")[1:]]


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch.importlib.util.find_spec
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == "comet_ml" else found(name))
    launch.check_installed(PLAN, None)
    with pytest.raises(VplanError, match="--log-with comet_ml needs comet-ml") as refused:
        launch.check_installed(PLAN, "comet_ml")
    assert refused.value.fix == "install it: pip install comet-ml"
