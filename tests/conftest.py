"""Nobody's own models but a test's: the data folder of whoever runs the suite is left alone. And one thread a process:
tests have tiny tensors, and every core has a worker."""

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
"""Never made: a test that keeps a model sets a folder of its own."""

os.environ["OMP_NUM_THREADS"] = "1"
"""Read by torch when it is imported; processes that tests start inherit it."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Where it is set, each of the thousand processes that tests start would compile our sources anew: 0.35 s of CPU."""

sys.dont_write_bytecode = False
"""Here likewise: pytest rewrites the assertions of all test files anew where it may not keep them, in each worker."""

gc.set_threshold(200_000)
"""As `vplan.main` has it: a command makes many objects and hardly any garbage."""


def pytest_report_header() -> str:
    """Which allocator replays tapes: tests of answers take three times as long with the one in Python, which is there
    in a tree that was not installed (``pip install --no-deps -e .`` compiles it)."""
    if CachingAllocator is caching.CachingAllocator:
        return "allocator: in Python (slow); pip install --no-deps -e . compiles it"
    return "allocator: compiled"


MOST_KEPT = 3 * GIB
"""Bytes of a worker, which is asked about all models, before it forgets their recordings; two of 12 GiB are too many
for a machine of 24."""


@pytest.fixture(scope="module", autouse=True)
def recordings_forgotten() -> Iterator[None]:
    """What is made of recordings is kept for the next question about the same model, and not for the whole suite."""
    yield
    if psutil.Process().memory_info().rss > MOST_KEPT:
        forget_recordings()


@pytest.fixture(scope="module")
def preloaded_python() -> Iterator[None]:
    """Processes of vplan that a module's tests start are forks of one that has torch imported already."""
    with forked_processes():
        yield


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """What a module's tests look for when they collect garbage is what they made themselves. A process that collected
    the whole suite has 0.8 million objects, and code that frees a GPU's memory looks through all of them: 1 to 2 s each
    time. Not for all modules: see `planner.garbage_collection.without_garbage_collection`."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()
