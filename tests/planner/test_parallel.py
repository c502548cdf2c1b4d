"""Asking the same of many names: in order, over processes, and a fault of one name where it belongs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from planner.errors import VplanError
from planner.parallel import spread
from reports.share import Aside


def shouter(suffix: str) -> Callable[[str], tuple[str, int]]:
    def ask(name: str) -> tuple[str, int]:
        if name == "bad":
            raise VplanError("bad is bad", "use good", 3)
        return name.upper() + suffix, os.getpid()

    return ask


@pytest.mark.skipif(sys.platform != "linux", reason="a page's parts are forked on Linux only")
def test_a_part_worked_out_aside_is_what_it_is_here_or_a_fault_with_a_name() -> None:
    def wrong() -> int:
        raise VplanError("bad is bad", "use good", 3)

    known = [1, 2]
    fine, bad, killed = Aside(lambda: (known, os.getpid())), Aside(wrong), Aside(lambda: os.kill(os.getpid(), 9))
    found, pid = fine.result()
    assert found == known and pid != os.getpid()
    with pytest.raises(VplanError, match="bad is bad; use good"):
        bad.result()
    with pytest.raises(VplanError, match="ended with exit code -9"):
        killed.result()


NAMES = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("cores", [1, 3])
def test_answers_come_in_order(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    answers = list(spread(shouter, ("!",), NAMES, "letters"))
    assert [word for word, _ in answers] == ["A!", "B!", "C!", "D!", "E!"]
    assert (os.getpid() in {pid for _, pid in answers}) == (cores == 1)


INTERRUPTED = """
import os, signal, sys, time
from planner import parallel as module
os.sched_getaffinity = lambda _: range(3)
def busy():
    return lambda name: time.sleep(60) if name == "a" else os.getpid()
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell starts with &
answers = [module.spread(busy, (), ["a", "b", "c"], "names")]
signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    list(answers[0])
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="process groups")
def test_ctrl_c_is_answered_by_the_first_process_alone() -> None:
    """Idle workers wait in a lock of multiprocessing's, and would print where."""
    words = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, start_new_session=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


WORKING = """
import os, signal, sys, time
from planner import parallel as module
os.sched_getaffinity = lambda _: range(3)
def busy():
    return work
def work(name):
    os.write(1, b"%d\\n" % os.getpid())  # as one: they all write to one pipe
    if name == "idle":
        return
    end = time.time() + 60
    while time.time() < end:  # in Python, as a search is
        pass
# They are ignored in what a shell starts with &, and behind nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
try:
    list(module.spread(busy, (), ["idle", "a", "b"], "names"))
except KeyboardInterrupt as stop:
    sys.exit(getattr(stop, "exit_code", 130))
"""
SECONDS = 30
"""Half of what their work takes; on a busy machine a signal alone may take two."""


@pytest.mark.skipif(sys.platform != "linux", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_workers_end_with_their_parent_on_every_signal(number: signal.Signals, code: int) -> None:
    """Idle ones, which wait for work, and those in the middle of it. The signal reaches the parent alone."""
    parent = subprocess.Popen([sys.executable, "-c", WORKING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout and parent.stderr
    workers = [psutil.Process(pid) for pid in {int(parent.stdout.readline()) for _ in range(3)}]
    begun = time.monotonic()
    parent.send_signal(number)
    try:
        assert parent.wait(30) == code
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
        assert time.monotonic() - begun < SECONDS
        assert parent.stderr.read() == b""
    finally:
        for process in (parent, *workers):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize("cores", [1, 2])
def test_an_error_is_raised_in_its_turn_as_it_was(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    answers = spread(shouter, ("",), ["a", "bad", "c"], "letters")
    assert next(answers)[0] == "A"
    with pytest.raises(VplanError) as caught:
        next(answers)
    assert (caught.value.message, caught.value.fix, caught.value.exit_code) == ("bad is bad", "use good", 3)
