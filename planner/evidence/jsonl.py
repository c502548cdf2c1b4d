"""A file of measured rows: one JSON object a line, only ever appended to, so that nothing finished is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import VplanError, quoted


def rows_by_id(path: str | Path) -> dict[str, dict[str, Any]]:
    """The rows of a file by their id; none without the file. A last line that a dying process cut off is no row."""
    path = Path(path)
    if not path.exists():
        return {}
    rows = {}
    lines = _read(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse(line)
        if row is not None:
            rows[str(row["id"])] = row
        elif number < len(lines):
            raise VplanError(f"{path.name}:{number} is damaged: not a row", "delete that line, or choose another file")
    return rows


def append_row(path: str | Path, row: Mapping[str, Any]) -> None:
    """Appends one line and syncs it to the disk. A half-written line at the end, left by a process that died, is
    removed first."""
    path = Path(path)
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    try:
        with path.open("a+b") as file:
            file.seek(0)
            head, _, tail = file.read().rpartition(b"\n")
            if tail and _parse(tail) is None:
                file.truncate(len(head) + 1 if head else 0)
            elif tail:
                line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise VplanError(f"cannot write {quoted(str(path))}: {error.strerror}", "choose another file") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise VplanError(f"cannot read {quoted(str(path))}: {error.strerror}", "choose another file") from None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and "id" in row else None
