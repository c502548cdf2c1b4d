"""Starts probe workers as forks of a process that has already imported torch (`trainers/probe_server.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from planner.errors import VplanError
from planner.signals import unwind_on_signals
from planner.worker_process import DOOR, Ended, end_tree

START_SECONDS = 300.0
"""Time limit for the server to import everything, also on a busy machine."""


class ForkServer:
    """One Python process whose forks are probe workers. A context manager: the server and its forks end with it.

    It is started for the first worker, and again if it was killed.
    """

    def __init__(self, python: str) -> None:
        """``python``: path of the interpreter."""
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it is not started."""
        return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the server; a later worker starts a new one."""
        process, folder = self._process, self._folder
        self._process = self._folder = None
        if process is not None:
            assert process.stdout is not None
            end_tree(process)
            process.stdout.close()
        if folder is not None:
            folder.cleanup()

    def run(
        self,
        folder: str,
        log: Path,
        time_limit: float,
        environment: Mapping[str, str],
        once_more: Callable[[], bool] = lambda: False,
    ) -> Ended:
        """Run a probe worker on the request in a folder, as `planner.worker_process.run_worker` runs a command.

        ``environment`` is for this worker; the server itself has that of its first worker.
        """
        process = self._running(environment)
        request = {"folder": folder, "log": str(log), "environment": dict(environment)}
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        pid = self._answer(process, START_SECONDS).get("pid")
        if pid is None:
            raise VplanError(f"the server of probe workers does not start: {self._last_words()}", "see its log", 4)
        done = False
        try:
            ended = self._wait(process, time_limit)
            if ended is None and once_more():
                ended = self._wait(process, time_limit)
            done = ended is not None
            return ended or Ended(None)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if not done:  # the server will still report its end, where the next worker's answer is expected
                self.close()

    def _wait(self, process: subprocess.Popen[bytes], time_limit: float) -> Ended | None:
        """How the worker ended; None if it reached the time limit."""
        answer = self._answer(process, time_limit)
        if process.poll() is not None and not answer:
            return Ended(process.returncode)
        return Ended(answer["returncode"]) if answer else None

    def _running(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        unwind_on_signals()
        self._folder = tempfile.TemporaryDirectory(prefix="vplan-", ignore_cleanup_errors=True)
        # A folder of virtual cards for the server itself, which must not use it: forks would share it. And torch
        # refuses CUDA in a fork if its parent even counted the cards, unless it did so through NVML.
        own = {"VPLAN_GPU_FOLDER": self._folder.name, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [self._python, str(DOOR), "worker", "probe_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
                env={**environment, **own},
            )
        return self._process

    @property
    def _log(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "server.txt"

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no output")[:500]

    def _answer(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        """The next line from the server; empty if none comes in time, or the server has ended."""
        assert process.stdout is not None
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([process.stdout], [], [], min(left, 1.0))[0]:
                line = process.stdout.readline()
                if not line:
                    process.wait()
                    return {}
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {}
