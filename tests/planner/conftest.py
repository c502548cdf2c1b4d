"""Fixtures of several rooms: another computer around this process, and other programs in the place of workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vplan
from planner.evidence.from_ledger import installed_setup
from tests.planner.drivers import Computer

_OPENING = f"""\
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {vplan.HOME!r})
from planner.worker_process import write_json
folder = Path(sys.argv[-1])
def tell(**facts): write_json(folder / "result-00000.json", facts)
"""


@pytest.fixture
def computer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Computer]:
    """A computer to say what is in it. What this process knows of its own is forgotten before and after."""
    installed_setup.cache_clear()
    yield Computer(monkeypatch, tmp_path / "computer")
    installed_setup.cache_clear()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Sets the source that each worker process runs in the place of vplan's: a program that is started as Python is.

    It has the folder that it shares with its parent in `folder`, and writes facts there with `tell`.
    """
    python = sys.executable

    def set_source(source: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!{python}\n{_OPENING}{source}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return set_source
