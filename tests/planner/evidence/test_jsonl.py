"""Files of JSON lines: what was appended stays, and what a killed process left behind does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.evidence.jsonl import append_lines, append_row, rows_by_id


def test_rows_are_appended_and_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert rows_by_id(path) == {}
    for name in ("a", "b"):
        append_row(path, {"id": name})
    assert list(rows_by_id(path)) == ["a", "b"]


@pytest.mark.parametrize(("tail", "kept"), [(b'{"id": "b", "mea', ["a", "c"]), (b'{"id": "b"}', ["a", "b", "c"])])
def test_a_torn_last_line_is_no_row(tmp_path: Path, tail: bytes, kept: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": "a"}\n' + tail)
    assert list(rows_by_id(path)) == kept[:-1]
    append_row(path, {"id": "c"})
    assert list(rows_by_id(path)) == kept
    assert path.read_bytes().startswith(b'{"id": "a"}\n')


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\nnonsense\n{"id": "b"}\n')
    with pytest.raises(VplanError, match=r"rows\.jsonl:2 is damaged"):
        rows_by_id(path)
    with pytest.raises(VplanError, match="cannot write"):
        append_row(tmp_path, {"id": "a"})


def test_a_line_that_was_cut_off_is_removed_and_a_whole_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_lines(path, [{"a": 1}])
    path.open("a").write('{"b"')
    append_lines(path, [{"c": 3}, {"d": 4}])
    assert path.read_text() == '{"a": 1}\n{"c": 3}\n{"d": 4}\n'
    path.open("a").write('{"e": 5}')
    append_lines(path, [])
    append_lines(path, [{"f": 6}])
    assert path.read_text().splitlines()[-2:] == ['{"e": 5}', '{"f": 6}']
