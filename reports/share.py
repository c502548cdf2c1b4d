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
from planner.signals import end_with_parent, unwind_on_signals
from reports import page
from reports.data import Builder, PartDone, Parts, in_turn

T = TypeVar("T")


def shared(builder: Builder, progress: PartDone) -> Parts:
    """`reports.data.in_turn` on two cores, the same to the byte: the map and other cards' longest clips beside those of
    the plan's own host RAM. A further fork would work out anew what these share."""
    # A fork knows all that was looked at before. It is safe where no other thread could hold a lock.
    if cores() < 2 or sys.platform != "linux" or threading.active_count() > 1:
        return in_turn(builder, progress)
    quick = progress(builder.quick_estimates())
    rungs = ladder.ladder(builder.search, builder.plan.job, quick)
    aside = Aside(lambda: (builder.map(rungs), builder.card_reaches(same_ram=False)))
    cards = progress(builder.card_reaches(same_ram=True))
    told, compared = progress((builder.steps(), builder.compared()))
    page.prepare()
    mapped, further = aside.result()
    return Parts(quick, told, progress(mapped), (*cards, *progress(further)), compared)


class Aside(Generic[T]):
    """Work done in a fork of this process. A VplanError is raised where its result is asked for."""

    def __init__(self, work: Callable[[], T]) -> None:
        unwind_on_signals()
        forking = multiprocessing.get_context("fork")
        self._receiver, sender = forking.Pipe(duplex=False)
        self._process = forking.Process(target=_send, args=(work, sender), daemon=True)
        self._process.start()
        sender.close()

    def result(self) -> T:
        """Waits for the process and returns its result. Raises the error that it raised, or a VplanError when it
        died."""
        try:
            outcome, error = self._receiver.recv()
        except EOFError:
            self._process.join()
            fault = f"a process that worked on the report ended with exit code {self._process.exitcode}"
            raise VplanError(fault, "what went wrong stands above; -9 is a lack of host RAM", 4) from None
        self._process.join()
        if error is not None:
            raise error
        result: T = outcome
        return result


def _send(work: Callable[[], T], sender: Connection) -> None:
    end_with_parent()
    try:
        sender.send((work(), None))
    except VplanError as error:
        sender.send((None, error))
    except KeyboardInterrupt:  # the one who asked tells
        os._exit(130)
