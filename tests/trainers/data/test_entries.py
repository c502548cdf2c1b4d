"""The list of cached samples: written, read, moved, and compared with the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from planner.errors import VplanError
from planner.spec.job import Bucket
from trainers.data.entries import CachedSample, changes, read_entries, write_entries


def entries(*counts: int) -> list[CachedSample]:
    """So many samples of each of several shapes."""
    return [
        CachedSample(Path(f"{shape}-{number}"), Path("text"), Bucket(frames=1 + 4 * shape, height=32, width=32))
        for shape, count in enumerate(counts)
        for number in range(count)
    ]


def test_what_is_new_and_what_is_gone_is_counted() -> None:
    before = entries(3, 1)
    assert changes(before, before[::-1]) == ()
    other_batch = [entry._replace(bucket=entry.bucket.replace(batch_size=2)) for entry in before]
    assert changes(before, other_batch) == ()
    (words,) = changes(before, entries(1, 2))
    assert words.endswith(": 1 sample new, 2 samples gone, and not trained on")
    caption = [entry._replace(text=Path("another")) for entry in before]
    assert "4 samples new, 4 samples gone" in changes(before, caption)[0]


def test_lists_of_entries_may_be_moved_with_their_folder(tmp_path: Path) -> None:
    made = [CachedSample(tmp_path / "a" / "x", Path("/elsewhere/y"), Bucket(frames=1, height=32, width=32))]
    (tmp_path / "a").mkdir()
    made.append(made[0]._replace(repeats=3, weight=0.5, empty=tmp_path / "a" / "empty"))
    write_entries(tmp_path / "a" / "entries.jsonl", made)
    assert read_entries(tmp_path / "a" / "entries.jsonl") == made
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_entries(tmp_path / "b" / "entries.jsonl")[0].path == tmp_path / "b" / "x"
    assert read_entries(tmp_path / "b" / "entries.jsonl")[1].empty == tmp_path / "b" / "empty"
    (tmp_path / "b" / "entries.jsonl").write_text("[]\n")
    with pytest.raises(VplanError, match="not a list of cached samples"):
        read_entries(tmp_path / "b" / "entries.jsonl")
