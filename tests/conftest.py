"""Settings of the whole suite: tests use no data folder of the user's, and each process runs one thread, because the
tensors of tests are tiny and every core has a worker."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from planner.allocator import caching
from planner.allocator.implementation import CachingAllocator
from planner.garbage_collection import forget_recordings
from planner.units import GIB
from tests.preloaded_python import forked_processes

os.environ["VPLAN_HOME"] = str(Path(__file__).parent / "nobody")
"""Never created: a test that stores a model sets a folder of its own."""

os.environ["OMP_NUM_THREADS"] = "1"
"""Read by torch on import; inherited by processes that tests start."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""With it, each of the thousand processes that tests start would compile our sources again: 0.35 s of CPU."""

sys.dont_write_bytecode = False
"""Likewise for this process: without its cache, pytest rewrites the assertions of all test files in each worker."""

gc.set_threshold(200_000)
"""As in `vplan.main`: a command makes many objects and hardly any garbage."""


def pytest_report_header() -> str:
    """Which allocator replays tapes. With the one in Python tests of answers take three times as long; it is used in a
    tree that is not installed (``pip install --no-deps -e .`` compiles the other)."""
    if CachingAllocator is caching.CachingAllocator:
        return "allocator: in Python (slow); pip install --no-deps -e . compiles it"
    return "allocator: compiled"


MOST_KEPT = 3 * GIB
"""Bytes of a worker's memory beyond which it forgets its recordings. A worker that is asked about all models reaches 12
GiB, and two of these are too many for a machine of 24."""


@pytest.fixture(scope="module", autouse=True)
def recordings_forgotten() -> Iterator[None]:
    """Clears caches of recordings between modules if they are large: they serve later questions about the same model,
    but must not grow over the whole suite."""
    yield
    if psutil.Process().memory_info().rss > MOST_KEPT:
        forget_recordings()


@pytest.fixture(scope="module")
def preloaded_python() -> Iterator[None]:
    """Within a module, vplan processes are forked from one that has imported torch."""
    with forked_processes():
        yield


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Within a module, the garbage collector ignores the objects made before it. After the whole suite a process has
    0.8 million of them, and code that frees GPU memory scans them all: 1 to 2 s each time. Not for all modules, see
    `planner.garbage_collection.without_garbage_collection`."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()
