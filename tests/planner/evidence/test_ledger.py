"""The ledger keeps what it has: torn lines, kills in the middle, two writers at once, no room left."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import vplan
from planner import untrusted
from planner.catalog.plan_id import row_id
from planner.errors import VplanError
from planner.evidence import ledger as keeping
from planner.evidence.ledger import Ledger, default_path
from planner.evidence.measurement import ProbeRow, Setup
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Environment, Measured, Plan


def plan(**fields: Any) -> Plan:
    job = Job.read({"model": "wan2.1-t2v-1.3b", "frames": 5, "height": 64, "width": 64, **fields})
    return Plan(job=job, strategy=Strategy(), machine=Machine(gpu="24GB"))


def row(of: Plan | None = None, *, driver: str = "580.1", **fields: Any) -> ProbeRow:
    of = of or plan()
    env = Environment(
        gpu="NVIDIA GeForce RTX 4090", driver=driver, torch="2.13.0", diffusers="0.42.1", attention_kernel="flash",
        command="vplan probe plan.toml", time="2026-11-21T12:00:00+00:00",
    )  # fmt: skip
    said = {"measured": Measured(outcome="ok"), "env": env, **fields}
    return ProbeRow(id=row_id(of), job=of.job, strategy=of.strategy, machine=of.machine, **said)


def test_rows_are_found_by_plan_environment_and_runner(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "deep" / "ledger.jsonl")
    assert ledger.rows() == []
    rows = [row(), row(plan(frames=9)), row(driver="590.0"), row(runner="simulate")]
    for entry in rows:
        ledger.append(entry)
    assert ledger.rows() == rows
    assert ledger.find(plan(model="Wan-AI/Wan2.1-T2V-1.3B-Diffusers")) == [rows[0], rows[2]]  # by any of its names
    assert ledger.find(plan(), Setup.of(rows[2].env)) == [rows[2]]
    assert ledger.find(plan(), runner="simulate") == [rows[3]]
    assert json.loads(ledger.path.read_text().splitlines()[0])["schema"] == 1


@pytest.mark.parametrize("tail", [b'{"id": "b", "mea', b"\xff\xfe\x00", b'{"id": "b"}', b"[" * 100_000, b"[1]"])
def test_what_is_no_row_stays_and_is_passed_over(tmp_path: Path, tail: bytes) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(row())
    before = ledger.path.read_bytes() + tail
    ledger.path.write_bytes(before)
    ledger.append(row(plan(frames=9)))
    assert ledger.path.read_bytes().startswith(before + b"\n")
    assert [entry.job.frames for entry in ledger.rows()] == [5, 9]
    assert len(ledger.notes) == 1
    assert ledger.notes[0].startswith("ledger.jsonl:2 is skipped: ")


def test_a_newer_row_is_passed_over_by_its_schema(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.write_text(json.dumps({**row().to_json(), "schema": 2, "news": 1}) + "\n")
    assert ledger.rows() == []
    assert "schema 2" in ledger.notes[0]


def test_no_room_left_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes 100 bytes of the line, as `write` tells when it fills up in the middle."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(row())
    before, write = ledger.path.read_bytes(), os.write
    monkeypatch.setattr(keeping.os, "write", lambda descriptor, line: write(descriptor, line[:100]))
    with pytest.raises(VplanError, match=r"not kept: cannot write .*No space left") as refusal:
        ledger.append(row())
    assert "VPLAN_HOME" in refusal.value.fix
    assert ledger.path.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="its locks are others")
def test_a_row_waits_for_the_lock(tmp_path: Path) -> None:
    """Of whoever has it, and it has the lock itself while it writes."""
    import fcntl

    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(row())
    before = ledger.path.read_bytes()
    held: list[bool] = []

    def write(descriptor: int, line: bytes) -> int:
        with ledger.path.open("rb") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(False)
            except BlockingIOError:
                held.append(True)
        return os.write(descriptor, line)

    with ledger.path.open("rb") as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping, "os", _Watched(write=write))
        fcntl.flock(other, fcntl.LOCK_EX)
        writer = threading.Thread(target=ledger.append, args=(row(),))
        writer.start()
        writer.join(0.3)
        assert writer.is_alive() and ledger.path.read_bytes() == before
        fcntl.flock(other, fcntl.LOCK_UN)
        writer.join(60)
    assert held == [True] and len(ledger.rows()) == 2


def test_a_row_is_on_the_disk_when_it_is_said_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last thing that is done to the file is to see all of it to the disk."""
    ledger, synced = Ledger(tmp_path / "ledger.jsonl"), []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (sync(descriptor), synced.append(os.fstat(descriptor).st_size)))
    for _ in range(2):
        ledger.append(row())
        assert synced[-1:] == [ledger.path.stat().st_size]


class _Watched:
    """The os module with a function of one's own."""

    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def test_a_ledger_on_a_drive_without_locks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS without its lock daemon, Lustre as it is mounted by default: a measurement is worth more than the lock."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(row())
    assert len(ledger.rows()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").symlink_to("/dev/full")
    with pytest.raises(VplanError, match="not kept"):
        Ledger(tmp_path / "ledger.jsonl").append(row())
    with pytest.raises(VplanError, match="cannot read"):
        Ledger(tmp_path).rows()


def test_the_user_s_ledger_is_in_the_user_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path))
    assert default_path() == tmp_path / "ledger.jsonl"


WRITER = """
import sys; sys.path.insert(0, {home!r})
from planner.evidence.ledger import Ledger
from planner.evidence.measurement import ProbeRow
row = ProbeRow.read({row!r})
for number in range(10**6):
    Ledger({path!r}).append(row.replace(details={{"writer": sys.argv[1], "number": number, "long": "x" * 20_000}}))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_two_writers_killed_in_the_middle_lose_nothing(tmp_path: Path) -> None:
    """Three times, two processes append until they are killed; what was once read is there ever after, in order."""
    ledger, seen = Ledger(tmp_path / "ledger.jsonl"), b""
    source = WRITER.format(home=vplan.HOME, row=row().to_json(), path=str(ledger.path))
    draw = random.Random(5)
    for turn in range(3):
        writers = [subprocess.Popen([sys.executable, "-c", source, f"{turn}{name}"]) for name in "ab"]
        size = ledger.path.stat().st_size if ledger.path.exists() else 0
        while not ledger.path.exists() or ledger.path.stat().st_size < size + 2_000_000:
            assert all(writer.poll() is None for writer in writers)
            time.sleep(0.01)
        time.sleep(draw.random() / 10)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        written = ledger.path.read_bytes()
        assert written.startswith(seen)
        seen = written
    numbers: dict[str, list[int]] = {}
    for entry in ledger.rows():
        numbers.setdefault(entry.details["writer"], []).append(entry.details["number"])
    assert len(ledger.notes) <= 6  # one torn line a kill at most
    assert all(found == list(range(len(found))) for found in numbers.values())
    assert sum(map(len, numbers.values())) > 100


def test_lines_come_backward_and_whole_however_they_lie_in_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    lines = [b"x" * length for length in (0, 1, 6, 7, 8, 30, 2, 0, 5)]
    path.write_bytes(b"\n".join(lines))
    for block in (1, 7, 1000):
        monkeypatch.setattr(untrusted, "MAX_LINE_BYTES", block)
        assert list(untrusted.read_lines_backward(path, 1000)) == lines[::-1]
        assert list(untrusted.read_lines_backward(path, 12)) == lines[:5:-1]  # none that is cut
    assert list(untrusted.read_lines_backward(Path("/dev/zero"), 1000)) in ([], [b""])


MANY = """
import json, resource, sys, time
from planner.catalog import card_lookup, lookup
from planner.evidence.from_ledger import NEWEST, _newest
gpu = card_lookup.gpu("rtx4090")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.process_time()
found = _newest("wan2.1-t2v-1.3b", gpu)
seconds = time.process_time() - began
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"all": len(found) == NEWEST, "seconds": seconds, "mib": grown / 1024}))
"""


def test_a_ledger_of_many_rows_costs_an_estimate_no_more_than_its_newest(tmp_path: Path) -> None:
    """13,000 rows of another card and of simulations, and of the card itself the first ones and, near the end, one."""
    own = row().to_json() | {"machine": {"gpu": "rtx4090"}}
    other = own | {"machine": {"gpu": "h100"}}
    simulated = row(runner="simulate").to_json()
    lines = [json.dumps(each).encode() + b"\n" for each in (own, other, simulated)]
    with (tmp_path / "ledger.jsonl").open("wb") as file:
        for _ in range(200):
            file.write(lines[0])
        for _ in range(6_000):
            file.write(lines[1] + lines[2])
        file.write(lines[0])
        for _ in range(1_000):
            file.write(lines[1])
        file.write(lines[1][:50])
    environment = {**os.environ, "VPLAN_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, env=environment, check=True)
    told = json.loads(done.stdout)
    assert told["all"]
    assert told["seconds"] < 3 and told["mib"] < 100  # reading every row took a second for each 1,250 of them
