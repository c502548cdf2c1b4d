"""A forked process behaves as a new Python would, both to itself and to its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.preloaded_python import ForkingPopen, forked_processes, new_processes

SCRIPT = str(Path(__file__).with_name("process_facts.py"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks are Linux's"),
    pytest.mark.skipif(os.environ.get("VPLAN_NEW_PYTHONS") == "1", reason="nothing is forked"),
]


def seen(folder: Path, session: bool) -> tuple[Any, ...]:
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "ONE": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "a", "b c"], env=environment, cwd=folder, input="given", capture_output=True,
        text=True, check=False, start_new_session=session,
    )  # fmt: skip
    return json.loads(done.stdout), done.stderr, done.returncode


@pytest.mark.parametrize("session", [False, True])
def test_a_fork_sees_what_a_new_python_sees(tmp_path: Path, session: bool) -> None:
    with forked_processes():
        assert subprocess.Popen is ForkingPopen
        forked = seen(tmp_path, session)
        with new_processes():
            assert subprocess.Popen is not ForkingPopen
            assert forked == seen(tmp_path, session)
    assert forked[1:] == ("said\n", 7)


def test_signals_wait_in_a_fork_if_they_do_where_it_is_asked_for(tmp_path: Path) -> None:
    """Wherever the server was started: alone, this test starts it where one waits."""
    with forked_processes():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            blocked, _, _ = seen(tmp_path, session=False)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        free, _, _ = seen(tmp_path, session=False)
    assert signal.SIGUSR1 in blocked["waiting signals"] and signal.SIGUSR1 not in free["waiting signals"]


def test_a_fork_is_a_child_that_can_be_killed() -> None:
    with (
        forked_processes(),
        subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert psutil.Process(process.pid).ppid() == os.getpid()
        assert psutil.Process(process.pid).cmdline()[1:3] == ["-m", "tests.preloaded_python"]
        process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("variables", "is_fork"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "RANK": "1"}, True),
        ({"TORCH_LOGS": "dynamo"}, False),
    ],
)
def test_a_rank_is_a_fork_and_what_imports_otherwise_is_none(variables: dict[str, str], is_fork: bool) -> None:
    """torch's launcher gives each of its ranks variables that no import reads."""
    with (
        forked_processes(),
        subprocess.Popen([sys.executable, SCRIPT], stdin=subprocess.PIPE, env={**os.environ, **variables}) as process,
    ):
        assert ("tests.preloaded_python" in psutil.Process(process.pid).cmdline()) is is_fork
        process.kill()
