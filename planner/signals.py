"""Signals that end a command, and processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import threading

ORPHANED = 130
"""Exit code of a process whose parent died; nobody reads it."""


NAMES = ("SIGTERM", "SIGHUP")
"""Of signals that unwind a command. Windows has no SIGHUP."""


class Termination(KeyboardInterrupt):
    """SIGTERM, or SIGHUP when the terminal is closed. It unwinds a command as Ctrl-C does, so that its workers are
    ended and its temporary folders go: those of a probe can hold a checkpoint of 15 GB."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.exit_code = 128 + number


def unwind_on_signals() -> None:
    """Turns SIGTERM and SIGHUP into a `Termination`, unless somebody handles them already (nohup ignores the second).
    Only the main thread may do so."""

    def terminate(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # schedulers send it more than once; the first one unwinds
        raise Termination(number)

    if threading.current_thread() is not threading.main_thread():
        return
    for name in NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminate)


def end_with_parent() -> None:
    """In a process of `multiprocessing`: ends it when the one that started it dies, in whatever way. What a fork knows
    of unwinding is the other's to do."""
    for number in (getattr(signal, name, None) for name in NAMES):
        if number is not None and callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    import multiprocessing.connection

    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="vplan-parent", daemon=True).start()
