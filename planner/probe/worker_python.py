"""The Python that runs a probe's worker processes: its packages and its environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.hardware import doctor
from planner.launch import launch
from planner.probe.fork_server import ForkServer
from planner.worker_process import Ended, run_worker, vplan_command

REHEARSAL_FOLDER = "VPLAN_GPU_FOLDER"
"""Environment variable with the rehearsal's folder, set in every process that has a virtual GPU."""


@dataclass(frozen=True, kw_only=True)
class WorkerPython:
    """This Python, on this machine's GPU or CPU."""

    server: ForkServer | None = None
    """forks the workers that need no launcher; without it each of them imports torch itself"""

    @property
    def is_virtual(self) -> bool:
        """Whether its cards are virtual, as in a command that `vplan rehearse` runs; rows are then marked as such."""
        return REHEARSAL_FOLDER in os.environ

    @property
    def path(self) -> str:
        """The path of the interpreter."""
        return sys.executable

    def has(self, module: str) -> bool:
        """Whether a module of that name is importable."""
        return importlib.util.find_spec(module) is not None

    def version(self, package: str) -> str | None:
        """The installed version of a package, `2.13.0+cu130`; None where it is not installed."""
        return doctor.package_version(package)

    def environment(self, device: str) -> dict[str, str]:
        """Environment variables for its processes. ``device``: ``cuda`` or ``cpu``."""
        return launch.environment(device)

    def run(self, words: list[str], log: Path, time_limit: float, device: str, once_more: Callable[[], bool]) -> Ended:
        """Runs a worker's command line (`planner.launch.launch.command`) with this interpreter, or in a fork of the
        server; otherwise as `planner.worker_process.run_worker`."""
        variables = self.environment(device)
        if self.server is not None and words == vplan_command("worker", "probe", words[-1]):
            return self.server.run(words[-1], log, time_limit, variables, once_more)
        return run_worker([self.path, *words[1:]], log, time_limit, variables, once_more)

    @property
    def torch_release(self) -> str | None:
        """Its torch version as `2.13`; None without torch."""
        return doctor.torch_release()
