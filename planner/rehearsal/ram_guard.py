"""Ends what runs below this process before it takes the RAM that others need: weights on virtual cards take none, but
a rehearsed program may offload them."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

import psutil

from planner.errors import VplanError
from planner.rehearsal.process_tree import descendants, host_ram, host_ram_bound
from planner.units import format_gib

OWN_RAM_SHARE = 0.9
"""Of the RAM that is free on this machine: a run that takes more is ended."""
TICK_SECONDS = 0.25


def spare_ram() -> int:
    """Bytes that a run may take here."""
    return int(psutil.virtual_memory().available * OWN_RAM_SHARE)


class RamGuard:
    """A context in which the processes below this one may take `limit` bytes; past that all of them are killed, and
    leaving it raises a VplanError (exit code 4)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.exceeded_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="RAM guard", daemon=True)

    def __enter__(self) -> RamGuard:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self.exceeded_bytes and (error is None or isinstance(error, VplanError)):
            took, limit = format_gib(self.exceeded_bytes), format_gib(self.limit)
            fix = "close other programs, or rehearse it on a machine with more RAM"
            raise VplanError(f"stopped: it took {took} of RAM, and this machine has {limit} to spare", fix, 4) from None

    def _watch(self) -> None:
        while not self._done.wait(TICK_SECONDS):
            if host_ram_bound().held <= self.limit:
                continue
            took = host_ram().held
            if took > self.limit:
                self.exceeded_bytes = took
                for process in descendants():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
