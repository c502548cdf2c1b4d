"""The same question asked of many models or cards, over all cores, with a bar on stderr while someone looks at it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

from planner.signals import end_with_parent, unwind_on_signals
from planner.terminal import console

T = TypeVar("T")

Ask = Callable[[str], T]
"""Answers for one name."""

_ask: Ask[object] | None = None
"""In a worker: made once, so that what its questions share is read once."""


def spread(make: Callable[..., Ask[T]], arguments: tuple[object, ...], names: Sequence[str], what: str) -> Iterator[T]:
    """``make(*arguments)(name)`` for every name, in order. The function and its arguments travel to other processes.

    An exception of one name is raised when its turn comes.
    """
    workers = min(len(names), cores())
    if workers == 1:
        yield from map(make(*arguments), with_progress(names, what))
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import active_children, get_context

    # A fork starts at once and has read what we have; it is safe where no other thread could hold a lock.
    alone = sys.platform == "linux" and threading.active_count() == 1
    context = get_context("fork" if alone else "spawn")
    unwind_on_signals()
    others = set(active_children())
    with ProcessPoolExecutor(workers, context, _begin, (make, arguments)) as pool:
        answers = [pool.submit(_answer, name) for name in names]
        try:
            for _, answer in zip(with_progress(names, what), answers, strict=True):
                yield cast(T, answer.result())
        except BaseException:  # nobody wants what they are still at: the pool would wait for it
            for worker in set(active_children()) - others:
                worker.kill()
            raise
        # The pool waits at its end, or its thread would write to a closed pipe at the exit.


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _begin(make: Callable[..., Ask[object]], arguments: tuple[object, ...]) -> None:
    global _ask
    # Ctrl-C reaches all that the terminal runs, and what to say of it is the first process's.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    _ask = make(*arguments)


def _answer(name: str) -> object:
    assert _ask is not None
    return _ask(name)


def with_progress(names: Sequence[str], what: str) -> Iterator[str]:
    """The names one by one, with a bar on stderr while someone looks at it."""
    from rich.progress import track

    errors = console(stderr=True)
    if not errors.is_terminal:
        yield from names
        return
    yield from track(names, description=what, console=errors, transient=True)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[T], T]]:
    """A function that hands back what it is given and moves a bar on stderr on, while someone looks at it.

    Drawn by this thread alone, so that work can be forked meanwhile.
    """
    errors = console(stderr=True)
    if not errors.is_terminal:
        yield lambda part: part
        return
    from rich.progress import Progress

    with Progress(console=errors, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)

        def done(part: T) -> T:
            bar.advance(task)
            bar.refresh()
            return part

        bar.refresh()
        yield done
