"""All templates of a pack, each stored once even if several recordings have it, as columns of numbers.

Recordings of one architecture mostly share their templates: only a twelfth are distinct. Their events are stored field
by field, which xz compresses to two thirds of the size of their JSON.

The table is a sequence of chunks, so that the first templates, which most questions need, can be unpacked alone. A
chunk is its length in bytes and its number of templates (4 bytes each; all numbers are little-endian), then the numbers
of events and of `work` entries per template, the events, and the entries. The latter two are rows of different lengths:
first come the lengths, then for each length, in ascending order, the fields one after the other. A column of numbers is
the width in bytes (1 to 8), then the lowest byte of every number, the next byte of every number, and so on. If any is
negative, 128 is added to the width, and the lowest bit of each number is its sign.

A template is read by slicing its chunk, without numpy, whose import takes longer than reading a tape.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

CHUNK = 256
"""Templates per chunk. With 64 the packed table is a tenth larger, with 1,024 a twentieth smaller."""

_HEADER = struct.Struct("<II")
KEYS = "events", "work"
"""Keys of a template; both are rows of numbers: at most 9 for an event, 4 and one per atom for a work entry."""

WITH_SIGN = 0x80
"""Flag in the first byte of a column: the lowest bit of each number is its sign."""


class TemplateWriter:
    """Numbers templates as they are added, and writes their table."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        """SHA-256 of a template's rows -> its number"""
        self._templates: list[Mapping[str, Any]] = []

    def number(self, template: Mapping[str, Any]) -> int:
        """The number of a template, new unless an equal one was added before. ``template``: as in a tape's JSON."""
        digest = hashlib.sha256(repr([template[key] for key in KEYS]).encode()).digest()
        if digest not in self._numbers:
            self._numbers[digest] = len(self._templates)
            self._templates.append(template)
        return self._numbers[digest]

    def table(self) -> bytes:
        """The table of all templates so far."""
        starts = range(0, len(self._templates), CHUNK)
        return b"".join(_chunk(self._templates[start : start + CHUNK]) for start in starts)


def _chunk(templates: Sequence[Mapping[str, Any]]) -> bytes:
    parts = [_column([len(template[key]) for template in templates]) for key in KEYS]
    for key in KEYS:
        rows = [row for template in templates for row in template[key]]
        parts.append(_column(list(map(len, rows))))
        for length in sorted({*map(len, rows)}):
            parts += map(_column, zip(*(row for row in rows if len(row) == length), strict=True))
    body = b"".join(parts)
    return _HEADER.pack(len(body), len(templates)) + body


def _column(numbers: Sequence[int]) -> bytes:
    sign = WITH_SIGN if min(numbers, default=0) < 0 else 0
    if sign:
        numbers = [number << 1 if number >= 0 else ~number << 1 | 1 for number in numbers]
    width = max(1, -(-max(numbers, default=0).bit_length() // 8))
    whole = struct.pack(f"<{len(numbers)}Q", *numbers)
    return bytes([sign | width]) + b"".join(whole[plane::8] for plane in range(width))


class TemplateReader:
    """Reads templates by number, on demand. Raises a ValueError or LookupError if the table is damaged."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        """``read``: returns the bytes of the table from a start to an end; fewer if it ends before."""
        self._read = read
        self._chunks: list[_Chunk] = []
        self._end = self._count = 0
        """bytes and templates of the chunks read so far"""
        self._templates: dict[int, dict[str, Any]] = {}

    def template(self, number: int) -> dict[str, Any]:
        """A template as in a tape's JSON; the same object each time, which callers must not modify."""
        if number not in self._templates:
            if number < 0:
                raise LookupError(number)
            while number >= self._count:
                self._read_chunk()
            chunk = next(chunk for chunk in reversed(self._chunks) if chunk.first <= number)
            self._templates[number] = chunk.template(number - chunk.first)
        return self._templates[number]

    def _read_chunk(self) -> None:
        length, count = _HEADER.unpack(self._bytes(_HEADER.size))
        self._chunks.append(_Chunk(self._count, count, self._bytes(length)))
        self._count += count

    def _bytes(self, length: int) -> bytes:
        content = self._read(self._end, self._end + length)
        if len(content) != length:
            raise ValueError("the table of templates ends too soon")
        self._end += length
        return content


class _Chunk:
    """One chunk of templates, which are unpacked one at a time because a question needs few of them."""

    def __init__(self, first: int, count: int, content: bytes) -> None:
        self.first = first
        """number of its first template"""
        self._content = content
        self._count = count

    @functools.cached_property
    def _rows(self) -> dict[str, _Rows]:
        columns = _Columns(self._content)
        ends = {key: list(itertools.accumulate(columns.next(self._count).numbers(0, self._count))) for key in KEYS}
        return {key: _Rows(columns, ends[key]) for key in KEYS}

    def template(self, index: int) -> dict[str, Any]:
        return {key: rows.group(index) for key, rows in self._rows.items()}


class _Columns:
    """Iterates over the columns of a chunk."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._at = 0

    def next(self, count: int) -> _Column:
        first, start = self._content[self._at], self._at + 1
        width = first & ~WITH_SIGN
        self._at = start + width * count
        if not 1 <= width <= 8 or count < 0 or self._at > len(self._content):
            raise ValueError("a column is not whole")
        planes = [self._content[start + plane * count :][:count] for plane in range(width)]
        return _Column(planes, bool(first & WITH_SIGN))


class _Column(NamedTuple):
    """Numbers, byte by byte: the lowest of all, the next of all, and so on."""

    planes: list[memoryview]
    has_sign: bool

    def numbers(self, start: int, end: int) -> Sequence[int]:
        """Those from one place to another."""
        found: Sequence[int] = self.planes[0][start:end].tobytes()
        if len(self.planes) > 1:
            whole = bytearray(8 * (end - start))
            for plane, numbers in enumerate(self.planes):
                whole[plane::8] = numbers[start:end]
            found = struct.unpack(f"<{end - start}Q", whole)
        return [number >> 1 ^ -(number & 1) for number in found] if self.has_sign else found


class _Rows:
    """Rows of unlike length, some of them to each template."""

    def __init__(self, columns: _Columns, ends: list[int]) -> None:
        """``ends``: the row behind the last one of each template."""
        self._ends = ends
        count = ends[-1] if ends else 0
        lengths = columns.next(count)
        if lengths.has_sign or len(lengths.planes) != 1:
            raise ValueError("rows have no lengths")
        self._lengths = lengths.planes[0].tobytes()
        """the number of fields of each row"""
        self._fields = {
            length: [columns.next(self._lengths.count(length)) for _ in range(length)]
            for length in _different(self._lengths)
        }

    def group(self, index: int) -> list[list[int]]:
        """The rows of a template."""
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        lengths = self._lengths[start:end]
        alike = {length: self._alike(length, start, lengths.count(length)) for length in {*lengths}}
        return [next(alike[length]) for length in lengths]

    def _alike(self, length: int, start: int, count: int) -> Iterator[list[int]]:
        """So many rows of one length, of those from a row on."""
        before = self._lengths.count(length, 0, start)
        columns = [column.numbers(before, before + count) for column in self._fields[length]]
        return map(list, zip(*columns, strict=True)) if columns else ([] for _ in range(count))


def _different(content: bytes) -> list[int]:
    """The bytes that there are, each once and in order; a set of them all takes a hundred times as long."""
    found = []
    while content:
        found.append(content[0])
        content = content.translate(None, content[:1])
    return sorted(found)


def with_templates(data: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy of a recording's JSON with other templates, each as ``change`` makes it; the same where it is no tape."""
    body = data.get("tape")
    if not isinstance(body, dict) or "pieces" not in body:
        return dict(data)
    pieces = {
        name: [{**section, "templates": [change(template) for template in section["templates"]]} for section in piece]
        for name, piece in body["pieces"].items()
    }
    return {**data, "tape": {**body, "pieces": pieces}}
