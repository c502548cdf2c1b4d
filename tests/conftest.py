"""Nobody's own models but a test's: the data folder of whoever runs the suite is left alone. And one thread a process:
tests have tiny tensors, and every core has a worker."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded_python import forked_processes

os.environ["VPLAN_HOME"] = str(Path(__file__).parent / "nobody")
"""Never made: a test that keeps a model sets a folder of its own."""

os.environ["OMP_NUM_THREADS"] = "1"
"""Read by torch when it is imported; processes that tests start inherit it."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Where it is set, each of the thousand processes that tests start would compile our sources anew: 0.35 s of CPU."""

gc.set_threshold(200_000)
"""As `vplan.main` has it: a command makes many objects and hardly any garbage."""


@pytest.fixture(scope="module")
def preloaded_python() -> Iterator[None]:
    """Processes of vplan that a module's tests start are forks of one that has torch imported already."""
    with forked_processes():
        yield
