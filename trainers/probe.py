"""The probe's worker process: one rank's few real steps of a plan, told to the parent in a result file.

Torch is imported by ``trainers.measure``, and that only once the allocator's settings are in the environment.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

from planner.errors import VplanError
from planner.plan import Plan
from planner.probe import REQUEST, SCRATCH, result_file
from planner.process import read_json, write_json

ORPHANED = 130
"""Exit code when the parent died; nobody reads it."""
REFUSED, OUT_OF_MEMORY = 1, 75
"""Exit codes by which a launcher ends the other ranks. What happened is in the result file."""


class Report:
    """What is known so far, as the parent will read it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: dict[str, Any] = {"phases": {}, "missing": []}

    def tell(self, **facts: Any) -> None:
        """Adds facts and writes the file anew. An ``outcome`` is the last word; whatever follows only adds to it."""
        self.told.update(facts)
        write_json(self.path, self.told)


def main(arguments: list[str]) -> int:
    """Runs one rank of the request in the folder named by the only argument."""
    folder = Path(arguments[0])
    end_with_parent()
    request = read_json(folder / REQUEST)
    report = Report(folder / result_file(int(os.environ.get("RANK", "0"))))
    report.tell(pid=os.getpid())
    plan = Plan.read(request.pop("plan"), "probe")
    set_allocator(plan.strategy.expandable_segments)
    from trainers.measure import measure
    from trainers.probed import Wanted

    try:
        measure(Wanted.of(plan, scratch=folder / SCRATCH, **request), report)
    except VplanError as error:
        report.tell(refused={"message": error.message, "fix": error.fix})
        return REFUSED
    return OUT_OF_MEMORY if "oom" in report.told["outcome"] else 0


def set_allocator(expandable_segments: bool) -> None:
    """Gives torch the plan's allocator and no other setting. torch 2.9 renamed the variable and still reads the old."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ[name] = f"expandable_segments:{expandable_segments}"


def end_with_parent() -> None:
    """Ends this process when its parent dies, however it dies: standard input is a pipe that closes then. Whoever
    starts it by hand gives it none."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="vplan-parent", daemon=True).start()
