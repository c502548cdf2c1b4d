"""Files with one JSON object per line, which are only appended to, so that no finished line is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.errors import VplanError, quoted
from planner.untrusted import MAX_LINE_BYTES, json_object, read_lines


def rows_by_id(path: str | Path) -> dict[str, dict[str, Any]]:
    """The rows of a file by id; empty without the file. An incomplete last line, left by a process that died, is
    ignored. Raises a VplanError for any other damaged line."""
    path = Path(path)
    if not path.exists():
        return {}
    rows = {}
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        row = _parse(line)
        if row is not None:
            rows[str(row["id"])] = row
        elif not is_last(line):
            raise VplanError(f"{path.name}:{number} is damaged: not a row", "delete that line, or choose another file")
    return rows


def append_row(path: str | Path, row: Mapping[str, Any]) -> None:
    """Appends a row, see `append_lines`. Raises a VplanError if the file cannot be written."""
    try:
        append_lines(Path(path), [row])
    except OSError as error:
        raise VplanError(f"cannot write {quoted(str(path))}: {error.strerror}", "choose another file") from None


def append_lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Appends a line for each object and syncs the file to the disk. Raises an OSError if that fails.

    A last line without its end, left by a process that died, is ended if it is an object, and removed if it is not.
    """
    lines = b"".join(json.dumps(each, allow_nan=False).encode() + b"\n" for each in objects)
    if not lines:
        return
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LINE_BYTES))
        tail = file.read().rpartition(b"\n")[2]
        if tail and json_object(tail) is None:
            file.truncate(size - len(tail))
        elif tail:
            lines = b"\n" + lines
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def is_last(line: bytes) -> bool:
    """Whether a line of `read_lines` is the last one and incomplete, because its writer may have died."""
    return not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES


def lines_of(path: Path, fix: str = "choose another file") -> Iterator[bytes]:
    """`read_lines`, with a VplanError for a file that cannot be read."""
    try:
        yield from read_lines(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise VplanError(f"cannot read {quoted(str(path))}: {reason}", fix) from None


def _parse(line: bytes) -> dict[str, Any] | None:
    row = json_object(line)
    return row if row is not None and "id" in row else None
