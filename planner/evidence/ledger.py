"""The ledger: a file of all measurements, one JSON object per line, which is only appended to.

If a process dies or the disk fills up while a line is written, no earlier line is lost or changed, and the file remains
readable: a line that is no row is skipped and named in `notes`. Several processes may append at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.catalog import user_data
from planner.catalog.plan_id import row_id
from planner.errors import VplanError, quoted
from planner.evidence.measurement import ProbeRow, Setup
from planner.file_writing import lock_file
from planner.spec.plan import Plan
from planner.untrusted import json_object, read_lines, read_lines_backward

NAME = "ledger.jsonl"
"""File name in the user's data folder."""

OURS = "env"
"""A key that every line of ours has and no published one: the environment of the measurement."""

LOOKED_AT_BYTES = 32 << 20
"""How much of a ledger's end is searched for its newest rows: some 15,000 rows, which takes a third of a second."""

LOCKED_AT = 1 << 40
"""Offset of the byte that is locked on Windows, where nobody else may read a locked range: beyond any ledger's end."""


def default_path() -> Path:
    """The path of the user's own ledger. It need not exist yet."""
    return user_data.folder() / NAME


class Ledger:
    """An append-only file of measurements (JSON lines), which need not exist yet."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        """the lines that the last `rows` skipped, in words"""

    def append(self, row: ProbeRow) -> None:
        """Appends a row and syncs it to the disk. Raises a VplanError if that fails; then nothing of the row is left.

        An incomplete last line, left by a process that died, is kept and terminated.
        """
        line = json.dumps(row.to_json(), allow_nan=False).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
            try:
                with _locked(descriptor):
                    _add(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            fault = f"the measurement is not kept: cannot write {quoted(str(self.path))}: {error.strerror}"
            fix = f"free some space there, or set {user_data.VARIABLE} to a writable folder"
            raise VplanError(fault, fix) from None

    def rows(self, *having: str) -> list[ProbeRow]:
        """All rows, oldest first; empty without the file. Lines that are no rows are named in `notes`.

        ``having``: only lines that contain all of these as JSON strings, which is cheaper than parsing the others.
        """
        wanted = [json.dumps(text).encode() for text in having]
        self.notes, rows = [], []
        try:
            for number, line in enumerate(read_lines(self.path), start=1):
                if line.strip() and all(text in line for text in wanted) and (row := self._taken(line, number)):
                    rows.append(row)
        except FileNotFoundError:
            return []
        except OSError as error:
            fix = "check its permissions, or choose another file"
            raise VplanError(f"cannot read {quoted(str(self.path))}: {error.strerror}", fix) from None
        except ValueError as error:
            raise VplanError(f"cannot read {quoted(str(self.path))}: {error}", "choose another file") from None
        return rows

    def newest(self, *having: str, wanted: Callable[[Mapping[str, Any]], bool]) -> Iterator[ProbeRow]:
        """The rows in the last `LOOKED_AT_BYTES`, newest first, for whose JSON object ``wanted`` is true, which is
        fifty times cheaper than reading the row. ``having``: as in `rows`. Lines that are no rows are skipped."""
        needed = [json.dumps(text).encode() for text in having]
        try:
            for line in read_lines_backward(self.path, LOOKED_AT_BYTES):
                if all(text in line for text in needed) and (data := json_object(line)) and wanted(data):
                    with contextlib.suppress(VplanError):
                        yield _row_of(data)
        except FileNotFoundError:
            return
        except OSError as error:
            fix = "check its permissions, or choose another file"
            raise VplanError(f"cannot read {quoted(str(self.path))}: {error.strerror}", fix) from None

    def _taken(self, line: bytes, number: int) -> ProbeRow | None:
        """The row in a line; None if there is none, which is added to `notes`."""
        try:
            return _row(line)
        except VplanError as error:
            self.notes.append(f"{self.path.name}:{number} is skipped: {error.message}")
            return None

    def find(self, plan: Plan, environment: Setup | None = None, runner: str = "real") -> list[ProbeRow]:
        """The rows of exactly this plan (job, strategy, machine), oldest first. ``environment``: only those with this
        setup."""
        name = row_id(plan)
        return [
            row
            for row in self.rows()
            if row.id == name and row.runner == runner and environment in (None, Setup.of(row.env))
        ]


def _row(line: bytes) -> ProbeRow:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise VplanError("it is incomplete") from None
    if not isinstance(data, dict):
        raise VplanError("it is not a JSON object")
    return _row_of(data)


def _row_of(data: Mapping[str, Any]) -> ProbeRow:
    if data.get("schema", 1) != 1:
        raise VplanError(f"it has schema {quoted(data['schema'])}, and this vplan reads schema 1")
    return ProbeRow.read(data)


def _add(descriptor: int, line: bytes) -> None:
    """Writes a line at the end. If the disk takes only part of it, removes that part again and raises an OSError."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    if end:
        os.lseek(descriptor, end - 1, os.SEEK_SET)
        if os.read(descriptor, 1) != b"\n":
            line = b"\n" + line
    try:
        written = os.write(descriptor, line)
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)
        raise


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Holds the file's lock, which the system releases when the process dies."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, LOCKED_AT, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
        try:
            yield
        finally:
            os.lseek(descriptor, LOCKED_AT, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        lock_file(descriptor)  # if the file system has no locks, rows of two writers may be mixed; reading skips those
        yield  # closing the file releases it
