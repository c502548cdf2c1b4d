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
    """One cached sample: two safetensors files that together hold `Family.batch` without the batch axis."""

    path: Path
    """latents, and whatever else is encoded from the clip"""
    text: Path
    """prompt embeddings"""
    bucket: Bucket
    clip: int | None = None
    """number of the clip that it is a window of, for models that take a second window of the same clip"""
    repeats: int = 1
    """how often it is drawn in one epoch"""
    weight: float = 1.0
    """factor of its loss"""
    empty: Path | None = None
    """embeddings of the empty caption, which replaces dropped captions; None if samples have no captions"""


def with_partner(entries: Iterable[CachedSample]) -> list[CachedSample]:
    """Those entries for which another window of the same clip and shape is listed."""
    listed = list(entries)
    count = Counter((entry.clip, entry.bucket) for entry in listed)
    return [entry for entry in listed if count[entry.clip, entry.bucket] > 1]


def write_entries(path: Path, entries: Iterable[CachedSample]) -> None:
    """Writes samples to a file of JSON lines, atomically. Paths below the file's folder are written relative to it."""
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
    """The samples that `write_entries` wrote to a file. Raises a VplanError if it cannot be read."""
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
    """A note on how many samples are new, and how many are gone, since the previous list; () if the samples are the
    same."""
    old, new = Counter(_identity(entry) for entry in before), Counter(_identity(entry) for entry in now)
    added, gone = (new - old).total(), (old - new).total()
    words = [f"{plural(added, 'sample')} new"] if added else []
    words += [f"{plural(gone, 'sample')} gone, and not trained on"] if gone else []
    return (f"data or plan changed since the last start: {', '.join(words)}",) if words else ()


def _identity(entry: CachedSample) -> tuple[Path, Path, int, int, int]:
    """What identifies a sample: its files and shape, whatever its batch size."""
    bucket = entry.bucket
    return entry.path.absolute(), entry.text.absolute(), bucket.frames, bucket.height, bucket.width
