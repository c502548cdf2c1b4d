"""The list of cached samples that training reads: written when data is encoded, one JSON line per sample."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from planner.errors import VplanError
from planner.spec.job import Bucket
from planner.units import plural


class CachedSample(NamedTuple):
    """One sample as caching left it: two safetensors files that together hold `Family.batch` without its first axis."""

    path: Path
    """latents and what else the clip gives"""
    text: Path
    """prompt embeddings"""
    bucket: Bucket
    clip: int | None = None
    """number of the clip that it is a window of, where a model takes another one beside it"""
    repeats: int = 1
    """times that it comes in one epoch"""
    weight: float = 1.0
    """of its loss"""
    empty: Path | None = None
    """embeddings of the empty caption, which dropped captions are replaced by; None where samples have no captions"""


def with_partner(entries: Iterable[CachedSample]) -> list[CachedSample]:
    """The entries that have another window of the same clip and shape among them."""
    listed = list(entries)
    count = Counter((entry.clip, entry.bucket) for entry in listed)
    return [entry for entry in listed if count[entry.clip, entry.bucket] > 1]


def write_entries(path: Path, entries: Iterable[CachedSample]) -> None:
    """Lists samples in a file of JSON lines, atomically; the paths of files below its folder are relative to it."""
    root = path.parent.absolute()

    def portable(file: Path) -> str:
        absolute = file.absolute()
        return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(absolute)

    lines = [
        {"path": portable(entry.path), "text": portable(entry.text), "bucket": entry.bucket.to_json()}
        | ({} if entry.clip is None else {"clip": entry.clip})
        | ({} if entry.repeats == 1 else {"repeats": entry.repeats})
        | ({} if entry.weight == 1 else {"weight": entry.weight})
        | ({} if entry.empty is None else {"empty": portable(entry.empty)})
        for entry in entries
    ]
    partial = path.with_name(f"{path.name}.part")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.replace(path)


def read_entries(path: Path) -> list[CachedSample]:
    """The samples that `write_entries` listed in a file. Raises a VplanError when it cannot be read."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        root = path.parent
        buckets = [Bucket.read(line["bucket"], path.name) for line in lines]
        return [
            CachedSample(
                root / line["path"],
                root / line["text"],
                bucket,
                line.get("clip"),
                int(line.get("repeats", 1)),
                float(line.get("weight", 1.0)),
                root / line["empty"] if "empty" in line else None,
            )
            for line, bucket in zip(lines, buckets, strict=True)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, VplanError):
            raise
        raise VplanError(f"{path} is not a list of cached samples", "remove it; it will be created again") from None


def changes(before: Iterable[CachedSample], now: Iterable[CachedSample]) -> tuple[str, ...]:
    """How many samples a list has that the one before had not, and the other way round, in words; () where they are
    the same."""
    old, new = Counter(_identity(entry) for entry in before), Counter(_identity(entry) for entry in now)
    added, gone = (new - old).total(), (old - new).total()
    words = [f"{plural(added, 'sample')} new"] if added else []
    words += [f"{plural(gone, 'sample')} gone, and not trained on"] if gone else []
    return (f"data or plan changed since the last start: {', '.join(words)}",) if words else ()


def _identity(entry: CachedSample) -> tuple[Path, Path, int, int, int]:
    """What a sample is, whatever batch it comes in."""
    bucket = entry.bucket
    return entry.path.absolute(), entry.text.absolute(), bucket.frames, bucket.height, bucket.width
