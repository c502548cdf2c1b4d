"""Frames of clips, decoded ahead of the encoder that takes them, by processes of their own. Imports no torch: those
processes start in half a second."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy

from planner.dataset import clips
from planner.dataset.clips import Pixels, UnusableError
from planner.parallel import cores
from planner.signals import end_with_parent
from planner.units import GIB

AHEAD_BYTES = GIB
"""Frames that one rank holds decoded, or is decoding, beyond those that the encoder works on. Host RAM has room for
them: the text encoders, which may wait there, are gone before the first clip is read."""

MOST_PROCESSES = 8
THREADS = 1
"""Of each process. More cost more in all: each decodes frames behind the last one that is wanted."""
FEWEST_ITEMS = 16
"""Samples for which another process is worth its start, which takes as long as decoding some of them."""


class FrameRange(NamedTuple):
    """Frames of one file, by rising numbers, and the size in pixels at which they are wanted."""

    path: Path
    indices: tuple[int, ...]
    height: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded frames: RGB, 8 bits each."""
        return 3 * len(self.indices) * self.height * self.width

    def frames(self, threads: int = 0) -> Pixels:
        """The frames (F, height, width, 3). Raises an UnusableError for a file that breaks. ``threads``: as in
        `planner.dataset.clips.frames`."""
        if not self.indices:
            return numpy.empty((0, self.height, self.width, 3), numpy.uint8)
        return clips.frames(self.path, self.indices, self.height, self.width, threads)


SampleFiles = Mapping[str, FrameRange]
"""What is read for one sample: its clip, and the files beside it, by role."""

Decoded = dict[str, Pixels] | UnusableError
"""The frames by role, or why there are none."""


def decode(files: SampleFiles, threads: int = 0) -> Decoded:
    """The frames of one sample. A fault is returned, so that its turn comes in order. ``threads``: as in
    `planner.dataset.clips.frames`."""
    try:
        return {role: wanted.frames(threads) for role, wanted in files.items()}
    except UnusableError as error:
        return error


def processes_for(samples: Sequence[SampleFiles], ranks: int = 1) -> int:
    """How many processes it is worth to decode samples in beside this one; 0 for few samples and little memory.

    ``ranks``: processes on this computer that do the same beside this one, and share its cores.
    """
    return min(cores() // ranks, MOST_PROCESSES, len(samples) // FEWEST_ITEMS, _room(samples))


def _room(samples: Iterable[SampleFiles]) -> int:
    """How many samples may be decoded and wait. A process has the pictures of a clip one by one, and then as the array
    that it sends."""
    largest = max((sum(wanted.nbytes for wanted in files.values()) for files in samples), default=0)
    return AHEAD_BYTES // max(1, 2 * largest)


@contextlib.contextmanager
def decoded(samples: Iterable[SampleFiles], processes: int) -> Iterator[Iterator[Decoded]]:
    """The frames of all samples, in order; ``processes`` decode the next ones while one is used, from the context's
    begin on, or this process one by one."""
    waiting = deque(samples)
    if not processes:
        yield map(decode, waiting)
        return
    room = _room(waiting)
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads and a CUDA context may hang
    with ProcessPoolExecutor(processes, context, _begin) as pool:
        ahead: deque[Future[Decoded]] = deque()

        def fill() -> None:
            while waiting and len(ahead) < min(2 * processes, room):
                ahead.append(pool.submit(decode, waiting.popleft(), THREADS))

        def in_order() -> Iterator[Decoded]:
            while ahead:
                yield ahead.popleft().result()
                fill()

        fill()
        try:
            yield in_order()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In a new process: Ctrl-C is the parent's to answer, and nothing stays when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
