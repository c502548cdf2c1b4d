"""What runs below is ended where it takes too much RAM."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("elftools")

from planner.errors import VplanError
from planner.rehearsal.process_tree import host_ram, host_ram_bound
from planner.rehearsal.ram_guard import RamGuard, spare_ram
from planner.units import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a rehearsal needs Linux")


def hold(mib: int, seconds: float) -> subprocess.CompletedProcess[bytes]:
    code = f"import time; held = b'x' * ({mib} << 20); time.sleep({seconds})"
    return subprocess.run([sys.executable, "-c", code], check=False)


def test_too_much_is_ended() -> None:
    with pytest.raises(VplanError, match="of RAM, and this machine has") as error, RamGuard(100 * MIB):
        assert hold(300, 60).returncode == -9
    assert error.value.exit_code == 4


def test_what_stays_below_runs_to_its_end() -> None:
    assert spare_ram() > 0
    there = host_ram_bound().held  # of servers that other tests started
    with RamGuard(there + 200 * MIB) as guard:
        assert hold(20, 0.6).returncode == 0
    assert guard.exceeded_bytes == 0


SHARED = """
import mmap, sys
shared, own = mmap.mmap(-1, 64 << 20), b"x" * (32 << 20)
shared.write(b"x" * len(shared))
print("there", flush=True)
sys.stdin.read()
"""


def test_what_is_told_cheaply_is_no_less_than_what_is_held() -> None:
    before = host_ram_bound().private, host_ram().private
    with subprocess.Popen([sys.executable, "-c", SHARED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        bound, held = host_ram_bound(), host_ram()
        process.communicate()
    assert bound.private - before[0] >= held.private - before[1] >= 32 * MIB
    assert bound.private <= bound.held - 64 * MIB and held.held <= bound.held
