"""Gzipped JSON, the format of tapes and parameter tables: deterministic when written, bounded in size when read."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from planner.errors import VplanError
from planner.file_writing import write_file
from planner.tape.format import DAMAGED_FIX
from planner.untrusted import read_bytes

MAX_FILE_BYTES = 16 << 20
"""Bundled tapes have at most 100 kB; one of a user's model whose blocks all differ may have ten times as much."""

MAX_TEXT_BYTES = 256 << 20
"""Zeros compress a thousandfold, so a small file could unpack to any size."""


def pack(data: Any) -> bytes:
    """JSON data as gzip bytes, identical for identical data: keys are sorted, and the timestamp is 0."""
    return gzipped(as_text(data))


def gzipped(text: bytes, level: int = 9) -> bytes:
    """A JSON text as gzip bytes without a timestamp. ``level``: of zlib, 9 is the smallest."""
    return gzip.compress(text, level, mtime=0)


def as_text(data: Any) -> bytes:
    """Data as JSON without whitespace and with sorted keys."""
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode()


def unpack(path: Path) -> bytes:
    """The JSON text of a file. Raises an OSError, EOFError, ValueError or zlib.error if it is damaged or too large."""
    packed = read_bytes(path, MAX_FILE_BYTES)
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)  # with gzip's header and checksum
    text = stream.decompress(packed, MAX_TEXT_BYTES)
    if not stream.eof:
        raise EOFError("cut short, or too large when unpacked")
    if stream.unused_data:
        raise ValueError("something follows its end")
    return text


def write_packed(data: Any, path: Path) -> Path:
    """Writes JSON data to a compressed file, atomically (a partial file is renamed); returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, pack(data))
    return path


DAMAGES = (OSError, EOFError, zlib.error, ValueError, RecursionError)
"""Exceptions of unpacking and parsing a damaged file."""


def damaged_file(path: Path, error: Exception) -> VplanError:
    """The VplanError for a file that cannot be read as a tape; not raised here."""
    return VplanError(f"tape {path.name} is damaged ({type(error).__name__})", DAMAGED_FIX)
