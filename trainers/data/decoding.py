"""Decodes the frames of clips in separate processes, ahead of the encoder. It does not import torch, so that those
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
"""Bytes of frames that one rank may have decoded or be decoding, besides those that the encoder is working on. Host RAM
has room for them: the text encoders, which may be kept there, are gone before the first clip is read."""

MOST_PROCESSES = 8
THREADS = 1
"""Decoding threads of each process. With more, the total work grows: each decodes frames past the last one needed."""
FEWEST_ITEMS = 16
"""Samples that make another process worthwhile: starting it takes as long as decoding a few of them."""


class FrameRange(NamedTuple):
    """Frames of one file, by ascending numbers, and the size in pixels that they are fitted to."""

    path: Path
    indices: tuple[int, ...]
    height: int
    width: int

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded frames: RGB, 8 bits each."""
        return 3 * len(self.indices) * self.height * self.width

    def frames(self, threads: int = 0) -> Pixels:
        """The frames (F, height, width, 3). Raises an UnusableError for a broken file. ``threads``: as in
        `planner.dataset.clips.frames`."""
        if not self.indices:
            return numpy.empty((0, self.height, self.width, 3), numpy.uint8)
        return clips.frames(self.path, self.indices, self.height, self.width, threads)


SampleFiles = Mapping[str, FrameRange]
"""The frames to read for one sample, by role: of its clip and of the files beside it."""

Decoded = dict[str, Pixels] | UnusableError
"""The decoded frames by role, or why there are none."""


def decode(files: SampleFiles, threads: int = 0) -> Decoded:
    """The frames of one sample. An UnusableError is returned, not raised, so that it is handled in the sample's turn.
    ``threads``: as in `planner.dataset.clips.frames`."""
    try:
        return {role: wanted.frames(threads) for role, wanted in files.items()}
    except UnusableError as error:
        return error


def processes_for(samples: Sequence[SampleFiles], ranks: int = 1) -> int:
    """How many processes are worth starting to decode samples; 0 if the samples are few or too large.

    ``ranks``: processes on this computer that do the same and share its cores, this one included.
    """
    return min(cores() // ranks, MOST_PROCESSES, len(samples) // FEWEST_ITEMS, _room(samples))


def _room(samples: Iterable[SampleFiles]) -> int:
    """How many samples may be decoding or waiting. Each counts twice: a process holds a clip's pictures one by one, and
    then also as the array that it sends."""
    largest = max((sum(wanted.nbytes for wanted in files.values()) for files in samples), default=0)
    return AHEAD_BYTES // max(1, 2 * largest)


@contextlib.contextmanager
def decoded(samples: Iterable[SampleFiles], processes: int) -> Iterator[Iterator[Decoded]]:
    """Yields the frames of all samples, in order. ``processes`` decode ahead, starting when the context is entered;
    with 0, this process decodes each sample when it is asked for."""
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
    """Runs in each new process: leaves Ctrl-C to the parent, and ends the process if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
