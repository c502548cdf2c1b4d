"""What all worker processes share: the file that the parent reads, their end with it, and torch's allocator."""

from __future__ import annotations

import os
import queue
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.launch.launch import OUT_OF_MEMORY
from planner.signals import ORPHANED
from planner.worker_process import write_json


class ResultFile:
    """What this worker reports to its parent: facts by name, in a JSON file that is replaced whole at every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {"phases": {}, "missing": []}

    def tell(self, **facts: Any) -> None:
        """Adds facts by name and writes the file again. An ``outcome`` is final: later facts are only added."""
        self.facts.update(facts)
        write_json(self.path, self.facts)


def tell_out_of_memory(report: ResultFile, error: RuntimeError | MemoryError) -> int:
    """Tells that memory ran out, and whose; returns the exit code. Any other error is raised again."""
    from trainers.memory.out_of_memory import out_of_memory

    outcome = out_of_memory(error)
    if outcome is None:
        raise error
    report.tell(outcome=outcome, message=" ".join(str(error).split())[:1000])
    return OUT_OF_MEMORY


def set_allocator(expandable_segments: bool) -> None:
    """Gives torch the plan's allocator and no other setting. torch 2.9 renamed the variable and still reads the old."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ[name] = f"expandable_segments:{expandable_segments}"


def end_with_parent() -> None:
    """Ends this process when its parent dies, in whatever way: its standard input is a pipe that closes then. Without
    such a pipe it does nothing."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="vplan-parent", daemon=True).start()


def lines_from_parent() -> Iterator[bytes]:
    """The lines that the parent writes to standard input, as they come. This process ends when the parent closes the
    pipe or dies, even while it handles a line."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def watch() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="vplan-parent", daemon=True).start()
    while True:
        yield lines.get()
