"""Frames of clips, decoded ahead of the encoder that takes them, by processes of their own. Imports no torch: those
processes start in half a second."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
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

    def frames(self) -> Pixels:
        """The frames (F, height, width, 3). Raises an UnusableError for a file that breaks."""
        if not self.indices:
            return numpy.empty((0, self.height, self.width, 3), numpy.uint8)
        return clips.frames(self.path, self.indices, self.height, self.width)


SampleFiles = Mapping[str, FrameRange]
"""What is read for one sample: its clip, and the files beside it, by role."""

Decoded = dict[str, Pixels] | UnusableError
"""The frames by role, or why there are none."""


def decode(files: SampleFiles) -> Decoded:
    """The frames of one sample. A fault is returned, so that its turn comes in order."""
    try:
        return {role: wanted.frames() for role, wanted in files.items()}
    except UnusableError as error:
        return error


def decoded(samples: Iterable[SampleFiles], ranks: int = 1) -> Iterator[Decoded]:
    """The frames of all samples, in order; the next ones are decoded while one is used.

    ``ranks``: processes on this computer that do the same beside this one, and share its cores.
    """
    waiting = deque(samples)
    largest = max((sum(wanted.nbytes for wanted in files.values()) for files in waiting), default=0)
    # A process has the pictures of a clip one by one, and then as the array that it sends.
    room = AHEAD_BYTES // max(1, 2 * largest)
    processes = min(cores() // ranks, MOST_PROCESSES, len(waiting) // FEWEST_ITEMS, room)
    if processes < 1:
        yield from map(decode, waiting)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads and a CUDA context may hang
    with ProcessPoolExecutor(processes, context, _begin) as pool:
        ahead: deque[Future[Decoded]] = deque()
        try:
            while waiting or ahead:
                while waiting and len(ahead) < min(2 * processes, room):
                    ahead.append(pool.submit(decode, waiting.popleft()))
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In a new process: Ctrl-C is the parent's to answer, and nothing stays when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
