"""A minute of trials; `python -m tests.trials --minutes 10 --seed N` runs others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="trials are forked and bounded")
def test_nothing_is_found_in_a_seed_s_first_trials() -> None:
    command = [sys.executable, "-m", "tests.trials", "--minutes", "1", "--seed", "2", "--trials", "41"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "0 findings" in done.stdout, done.stdout + done.stderr
