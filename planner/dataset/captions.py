"""Reads the captions of a folder: from a table, from a `.txt` beside each file, or one for all files."""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TextIO

from planner.dataset.clips import UnusableError
from planner.dataset.folder import Folder, is_media, printable
from planner.dataset.sources import DataSource
from planner.errors import VplanError

METADATA = ("metadata.jsonl", "metadata.csv")
REFERENCE, CONTROL = "reference_file_name", "control_file_name"
"""Columns with the image that a sample is an edit of, and with its control video (Hugging Face's folders read columns
with such names as files)."""

MAX_CAPTION = 10_000
"""Characters. Encoders read a few hundred words; a longer file is not a caption."""


MAX_LINE = 1 << 20
"""Characters of a line in a table. A file with longer lines is not a table, and a line might not fit into RAM."""

ONE_FOR_ALL = "give all files one caption (--caption TEXT, or caption in a dataset.toml)"


class Fault(NamedTuple):
    """A file (or a row of the metadata) that cannot be used for training, and why."""

    name: str
    reason: str
    fix: str = ""
    """what would help, besides correcting or removing the file"""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Captions(NamedTuple):
    """The captions and companion files that a folder gives its files."""

    texts: dict[str, str]
    """by file name"""
    companions: dict[str, dict[str, str]]
    """other files that a row names, by file name and column"""
    faults: list[Fault]
    """files without a caption, and unusable rows"""
    unused: Sequence[str] = ()
    """`.txt` files without a clip of the same name"""


def read_captions(folder: Folder, names: Sequence[str], source: DataSource, tell: Callable[[int], None]) -> Captions:
    """The captions of the given files, with the source's trigger. ``tell`` is called with the number of files that have
    been read, if captions are in files of their own. Raises a VplanError for a table that is missing or unreadable."""
    table = _table(folder, source)
    if table is not None:
        found = _from_table(folder, table, source)
        named = {*found.texts, *(fault.name for fault in found.faults)}
        named.update(name for names in found.companions.values() for name in names.values())
        without = [name for name in names if name not in named and printable(name) not in named]
        reason = f"caption missing: no row in {table}"
        found.faults.extend(Fault(printable(name), reason) for name in without)
    elif source.caption is not None:
        found = Captions(dict.fromkeys(names, source.caption), {}, [])
    else:
        found = _from_texts(folder, names, tell)
    if source.trigger is not None:
        for name, text in found.texts.items():
            found.texts[name] = f"{source.trigger}, {text}"
    return found


def _table(folder: Folder, source: DataSource) -> str | None:
    """The name of the table that holds the captions; None if they are not in a table."""
    if source.captions not in ("auto", "txt"):
        if source.caption is not None:
            raise VplanError("a source has both caption and captions", "keep one of them")
        return source.captions
    if source.captions == "txt" or source.caption is not None:
        return None
    tables = [name for name in METADATA if (folder.root / name).is_file()]
    if len(tables) > 1:
        fault = f"{folder.root} has both {' and '.join(METADATA)}"
        raise VplanError(fault, "keep the one that holds the captions, or name it: captions in a dataset.toml")
    return tables[0] if tables else None


def _from_texts(folder: Folder, names: Sequence[str], tell: Callable[[int], None]) -> Captions:
    """Reads captions from the `.txt` files beside the clips."""
    found = Captions({}, {}, [])
    other_place = _other_place(folder)
    for number, name in enumerate(names):
        tell(number)
        caption_file = f"{os.path.splitext(name)[0]}.txt"
        try:
            folder.inside(name)
            if not os.path.lexists(f"{folder.root}/{caption_file}"):
                fault = Fault(printable(name), "caption missing: no .txt of its name", other_place or ONE_FOR_ALL)
                found.faults.append(fault)
                continue
            found.texts[name] = _text_of(folder.inside(caption_file))
        except UnusableError as error:
            found.faults.append(Fault(printable(name), str(error)))
    stems = {os.path.splitext(name)[0] for name in (*names, *folder.unread)}
    return found._replace(unused=[text for text in folder.texts if text.removesuffix(".txt") not in stems])


def _other_place(folder: Folder) -> str:
    """How to make the captions read that the folder's only table may hold, under a name that is not looked for; else
    empty."""
    tables = sorted(name for name in os.listdir(folder.root) if name.lower().endswith((".csv", ".jsonl", ".json")))
    if len(tables) != 1:
        return ""
    name = printable(tables[0])
    if name.endswith(".json"):
        return f"if {name} has the captions, write them as metadata.jsonl: a line each, with file_name and text"
    return f'if {name} has the captions, name it metadata{Path(name).suffix}, or captions = "{name}" in a dataset.toml'


def _text_of(file: Path) -> str:
    """The caption in a `.txt` file. Raises an UnusableError if there is none."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(4 * MAX_CAPTION + 1)
        return _caption(raw.decode("utf-8-sig") if len(raw) <= 4 * MAX_CAPTION else "." * (MAX_CAPTION + 1))
    except UnicodeDecodeError:
        raise UnusableError("its caption is not UTF-8 text") from None
    except OSError as error:
        raise UnusableError(f"its caption cannot be read ({error.strerror})") from None


def _from_table(folder: Folder, table: str, source: DataSource) -> Captions:
    """Reads captions and companion files from the rows of a table."""
    found = Captions({}, {}, [])
    twice: set[str] = set()
    for line, row in _rows(_table_file(folder, table), source.caption_column):
        where = f"{table} line {line}"
        if not isinstance(row, dict):
            found.faults.append(Fault(where, "not a JSON object"))
            continue
        name, text = row.get("file_name"), row.get(source.caption_column)
        if not isinstance(name, str) or not name:
            found.faults.append(Fault(where, "no file_name in the row"))
            continue
        name = PurePosixPath(name).as_posix()  # without ./ and //
        if name in found.texts or name in twice:
            twice.add(name)
            continue
        try:
            folder.inside(name)
            if not is_media(name):
                raise UnusableError("not named like a video or image")
            if text is not None and not isinstance(text, str):
                raise UnusableError("its text is not text")
            found.texts[name] = _caption(text or "")
        except UnusableError as error:
            found.faults.append(Fault(printable(name), f"{error} ({where})"))
            continue
        columns = {column: row.get(column) for column in (REFERENCE, CONTROL)}
        beside = {column: PurePosixPath(str(file)).as_posix() for column, file in columns.items() if file}
        if beside:
            found.companions[name] = beside
    for name in sorted(twice):
        found.texts.pop(name, None)
        found.faults.append(Fault(printable(name), f"several rows in {table}"))
    return found


def _table_file(folder: Folder, table: str) -> Path:
    try:
        return folder.inside(table)
    except UnusableError as error:
        raise VplanError(f"{table}: {error}", "put the file itself in the folder") from None


def _rows(table: Path, column: str) -> Iterator[tuple[int, object]]:
    """Yields (line number, row) of a table without reading it whole; the row is None if it is not JSON."""
    try:
        with table.open(encoding="utf-8-sig", newline="" if table.suffix == ".csv" else "\n") as lines:
            if table.suffix == ".csv":
                rows = _short_lines(lines, table.name)
                first = next(rows, "")
                # Where the comma is the decimal mark, spreadsheets write semicolons.
                mark = next((mark for mark in ";\t" if "file_name" in first.split(mark)), ",")
                reader = csv.DictReader(itertools.chain([first], rows), delimiter=mark)
                missing = {"file_name", column} - set(reader.fieldnames or ())
                if missing:
                    fix = (
                        f"write file_name,{column} in its first line, or name another caption_column in a dataset.toml"
                    )
                    raise VplanError(f"{table.name} has no column {min(missing)}", fix)
                yield from ((reader.line_num, row) for row in reader)
                return
            for number, line in enumerate(_short_lines(lines, table.name), 1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except (ValueError, RecursionError):
                        yield number, None
    except OSError as error:
        raise VplanError(f"cannot read {table.name}: {error.strerror}", "check that it is readable") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise VplanError(f"{table.name} is not a table of captions: {error}", "write it in UTF-8") from None


def _short_lines(lines: TextIO, name: str) -> Iterator[str]:
    """Yields the lines of a table. Raises a VplanError for one longer than `MAX_LINE`."""
    number = 0
    while line := lines.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise VplanError(f"{name} line {number} is longer than {MAX_LINE:,} characters", "write one row per line")
        yield line


def _caption(text: str) -> str:
    """A caption without surrounding whitespace. Raises an UnusableError if it is empty, too long or not text."""
    if not text.strip():
        raise UnusableError("caption missing: its text is empty")
    if len(text) > MAX_CAPTION:
        raise UnusableError(f"its caption is longer than {MAX_CAPTION} characters")
    if "\0" in text:
        raise UnusableError("its caption is not text")
    return text.strip()
