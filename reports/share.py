"""The parts of a page that take long, on two cores where there are two."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from planner.errors import VplanError
from planner.parallel import cores
from planner.search import ladder
from reports import page
from reports.data import Builder, PartDone, Parts, in_turn

T = TypeVar("T")


def shared(builder: Builder, done: PartDone) -> Parts:
    """As `reports.data.in_turn`, the same to the byte: the step is told beside the looks, and the map and other cards'
    longest clips beside those of the plan's own host RAM."""
    # A fork knows all that was looked at before. It is safe where no other thread could hold a lock.
    if cores() < 2 or sys.platform != "linux" or threading.active_count() > 1:
        return in_turn(builder, done)
    steps = Aside(lambda: (builder.steps(), builder.compared()))
    looks = done(builder.looks())
    rungs = ladder.ladder(builder.search, builder.plan.job, looks)
    others = Aside(lambda: builder.longest((), own=False))
    table = Aside(lambda: builder.map(rungs))
    own = done(builder.longest(rungs, own=True))
    page.prepare()
    (phases, timeline), compared = done(steps.result())
    further = done(others.result())
    return Parts(looks, phases, timeline, done(table.result()), (*own, *further), compared)


class Aside(Generic[T]):
    """Work done in a fork of this process. A VplanError is raised where its result is asked for."""

    def __init__(self, work: Callable[[], T]) -> None:
        forking = multiprocessing.get_context("fork")
        self._found, sender = forking.Pipe(duplex=False)
        self._process = forking.Process(target=_send, args=(work, sender), daemon=True)
        self._process.start()
        sender.close()

    def result(self) -> T:
        """What came of it."""
        try:
            found, error = self._found.recv()
        except EOFError:
            self._process.join()
            fault = f"a process that worked on the report ended with exit code {self._process.exitcode}"
            raise VplanError(fault, "what went wrong stands above; -9 is a lack of host RAM", 4) from None
        self._process.join()
        if error is not None:
            raise error
        result: T = found
        return result


def _send(work: Callable[[], T], sender: Connection) -> None:
    try:
        sender.send((work(), None))
    except VplanError as error:
        sender.send((None, error))
    except KeyboardInterrupt:  # the one who asked tells
        os._exit(130)
