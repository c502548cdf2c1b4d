"""Probe workers as forks of one process: what they measure, and that none outlives its limit, its server or its caller.

On the CPU, where the same worker steps a tiny model.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from planner.evidence.measurement import ProbeRow
from planner.probe.fork_server import ForkServer
from planner.probe.grid import TINY
from planner.probe.probe import RealRunner, probe
from planner.probe.worker_python import WorkerPython
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from tests.preloaded_python import new_processes

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="rehearsals run on Linux"),
    pytest.mark.usefixtures("preloaded_python"),
]


@pytest.fixture(scope="module")
def server(preloaded_python: None) -> Iterator[ForkServer]:
    with ForkServer(sys.executable) as running:
        yield running


def plan(**strategy: str) -> Plan:
    job = Job(model="wan2.1-t2v-1.3b", frames=5, height=32, width=32, lora_rank=4)
    return Plan(job=job, strategy=Strategy.read(strategy, "test"), machine=Machine(gpu="24GB"))


def row(python: WorkerPython, time_limit: float = 300.0, **strategy: str) -> ProbeRow:
    runner = RealRunner(device="cpu", config=TINY, python=python)
    return probe(plan(**strategy), runner, steps=1, time_limit=time_limit)


def children(server: ForkServer) -> list[psutil.Process]:
    assert server.pid is not None
    return psutil.Process(server.pid).children(recursive=True)


def test_a_fork_measures_what_a_process_of_its_own_does(server: ForkServer) -> None:
    forking = WorkerPython(server=server)
    first, second = row(forking, gradient_checkpointing="full"), row(forking, gradient_checkpointing="none")
    assert first.measured.outcome == second.measured.outcome == "ok"
    with new_processes():
        alone = row(WorkerPython(), gradient_checkpointing="full")
    assert first.details["losses"] == alone.details["losses"] and len(first.details["losses"]) == 4
    assert first.id == alone.id and first.details["phases"].keys() == alone.details["phases"].keys()
    assert not children(server)


def test_one_that_takes_too_long_is_ended_and_the_next_one_runs(server: ForkServer) -> None:
    forking = WorkerPython(server=server)
    assert row(forking, time_limit=0.05).measured.outcome == "timeout"
    assert row(forking).measured.outcome == "ok"


def test_a_server_that_was_killed_is_started_again(server: ForkServer) -> None:
    forking = WorkerPython(server=server)
    assert row(forking).measured.outcome == "ok"
    killed = server.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    psutil.Process(killed).wait(10) if psutil.pid_exists(killed) else None
    assert row(forking).measured.outcome == "ok"
    assert server.pid not in (None, killed)


def test_nothing_outlives_it() -> None:
    with ForkServer(sys.executable) as server:
        assert row(WorkerPython(server=server)).measured.outcome == "ok"
        pid = server.pid
        assert pid is not None and psutil.pid_exists(pid)
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) and server.pid is None
