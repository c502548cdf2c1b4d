"""Packs of recordings: what is read from one is what went in, and a file beside it is taken first."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import VplanError
from planner.tape import packs
from planner.tape.codec import read_tape
from planner.tape.packed_json import as_text, pack, unpack, write_packed
from planner.tape.template_table import TemplateReader, TemplateWriter

VERSIONS = {"torch": "2.13.0"}
VARIANTS = ("step-lora-half-full-one", "step-lora-fp8-full-one", "optimizer-lora-adamw", "parameters")


def recording(
    variant: str, *numbers: int, versions: dict[str, str] | None = None, model: str = "tiny"
) -> dict[str, Any]:
    """A tape whose only template has one event and one entry of work with these numbers."""
    template = {"events": [list(numbers)], "work": [[0, 1, *numbers]]}
    section = {"pass": "forward", "run": None, "templates": [template]}
    tape = {"pieces": {"step": [section]}}
    return {"model": model, "variant": variant, "versions": versions or VERSIONS, "format": 2, "tape": tape}


def put(folder: Path, variant: str, *numbers: int) -> Path:
    return write_packed(recording(variant, *numbers, model=folder.name), folder / f"{variant}.json.gz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that was packed."""
    for number, variant in enumerate(VARIANTS):
        put(tmp_path / "tiny", variant, number)
    assert packs.pack_folders({tmp_path / "tiny": "small"}) == [tmp_path / "small.zip"]
    return tmp_path / "tiny"


numbers = st.lists(st.integers(-(2**61), 2**61 - 1) | st.integers(-3, 300), max_size=12)
names = st.sampled_from([f"{kind}-{word}.json.gz" for kind in ("step-lora", "sample-full", "a") for word in "abc"])
contents = st.dictionaries(st.tuples(st.sampled_from(["tiny", "large"]), names), numbers, min_size=1)


@settings(deadline=None, max_examples=50)
@given(contents, st.sampled_from([1, 60, 2**20]), st.sampled_from([1, 2, 256]))
def test_every_recording_comes_back_and_the_same_ones_are_the_same_bytes(
    contents: dict[tuple[str, str], list[int]], most: int, chunk: int
) -> None:
    def made() -> dict[tuple[str, str], dict[str, Any]]:
        stems = {key: key[1].removesuffix(".json.gz") for key in contents}
        return {key: recording(stems[key], *values, model=key[0]) for key, values in contents.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "GROUP_BYTES", most)
        patch.setattr("planner.tape.template_table.CHUNK", chunk)
        patch.setattr(packs, "PRESET", 0)  # for speed
        archive = packs.packed(made(), dict)
        again = packs.packed(dict(reversed(made().items())), dict)
    assert archive == again
    opened = packs.Pack(archive)
    found = {(folder, name): opened.data(folder, name) for folder in opened.folders for name in opened.names(folder)}
    assert found == made()
    assert {type(number) for data in found.values() for number in _event(data)} <= {int}


def _event(data: dict[str, Any]) -> list[int]:
    event: list[int] = data["tape"]["pieces"]["step"][0]["templates"][0]["events"][0]
    return event


def test_a_table_of_parameters_comes_back_as_it_was_without_a_variant(tmp_path: Path) -> None:
    table = {"format": 1, "model": "tiny", "rows": {"proj.weight": 8}, "fp32": []}
    path = write_packed(table, tmp_path / "tiny" / "parameters.gz")
    packs.pack_folders({path.parent: "tiny"})
    assert packs.read_recording(path) == table


def test_recordings_are_found_under_the_paths_they_had(folder: Path) -> None:
    assert not folder.exists()
    assert packs.stored(folder) == sorted(folder / f"{variant}.json.gz" for variant in VARIANTS)
    path = folder / f"{VARIANTS[1]}.json.gz"
    assert packs.is_stored(path) and not packs.is_stored(folder / "step-nothing.json.gz")
    assert packs.read_recording(path) == recording(VARIANTS[1], 1)
    with pytest.raises(FileNotFoundError):
        packs.read_recording(folder / "step-nothing.json.gz")
    assert not packs.is_stored(folder.with_name("nothing") / path.name)


def test_what_is_recorded_anew_answers_at_once_and_takes_its_place_in_the_pack(folder: Path) -> None:
    path = put(folder, VARIANTS[0], 77)
    assert packs.read_recording(path) == recording(VARIANTS[0], 77)
    assert len(packs.stored(folder)) == len(VARIANTS)
    packs.pack_folders({folder: "elsewhere"})  # where it is
    os.utime(folder.with_name("small.zip"), ns=(1, 1))  # a clock that two writes share would hide the second
    assert not folder.exists()
    assert [_event(packs.read_recording(each)) for each in packs.stored(folder)] == [[2], [3], [1], [77]]
    assert packs.pack_folders({folder: "small"}) == []


def test_a_pack_takes_further_models_and_keeps_those_that_it_has(folder: Path) -> None:
    before = {path: packs.read_recording(path) for path in packs.stored(folder)}
    other = put(folder.with_name("large"), VARIANTS[0], 5, 6)
    assert packs.pack_folders({other.parent: "small"}) == [folder.with_name("small.zip")]
    os.utime(folder.with_name("small.zip"), ns=(1, 1))
    assert packs.read_recording(other) == recording(VARIANTS[0], 5, 6, model="large")
    assert {path: packs.read_recording(path) for path in packs.stored(folder)} == before
    assert [*packs.stored(other.parent), *packs.stored(folder)] == [other, *before]


def test_a_template_that_two_recordings_have_is_stored_once() -> None:
    events = [[number, 5, 0, 0, 0] for number in range(3000)]

    def packed(*of_each: list[list[int]]) -> int:
        made = {("tiny", f"step-{number}.json.gz"): recording(f"step-{number}") for number in range(len(of_each))}
        for data, its_events in zip(made.values(), of_each, strict=True):
            data["tape"]["pieces"]["step"][0]["templates"] = [{"events": its_events, "work": []}]
        return sum(len(text) for text in map(as_text, made.values())) - len(packs.packed(made, dict))

    assert packed(events, events) > 1.9 * packed(events)


def test_a_digest_is_of_the_recording_not_of_the_versions(tmp_path: Path, folder: Path) -> None:
    newer = recording(VARIANTS[0], 0, versions={"torch": "2.14.0"})
    path = write_packed(newer, tmp_path / "newer" / f"{VARIANTS[0]}.json.gz")
    assert packs.digest(path) == packs.digest(folder / path.name)
    assert packs.digest(path) != packs.digest(put(tmp_path / "other", VARIANTS[0], 5))


def test_what_is_read_without_templates_has_all_else(folder: Path) -> None:
    path = folder / f"{VARIANTS[1]}.json.gz"
    bare = packs.Pack.read(folder.with_name("small.zip")).body(folder.name, path.name, int)
    assert bare["format"] == packs.read_recording(path)["format"]
    assert bare["tape"]["pieces"]["step"][0] == {"pass": "forward", "run": None, "templates": [3]}


def test_a_damaged_pack_is_named_in_one_line(folder: Path) -> None:
    archive = folder.with_name("small.zip")
    whole = archive.read_bytes()
    path = folder / f"{VARIANTS[0]}.json.gz"
    for number, damaged in enumerate((b"", b"PK", whole[:-30], whole[: len(whole) // 2], pack({}))):
        archive.write_bytes(damaged)
        os.utime(archive, ns=(number, number))
        os.utime(archive.parent, ns=(number, number))
        with pytest.raises(VplanError, match=r"tape small.zip is damaged") as caught:
            packs.is_stored(path)
        assert caught.value.fix


@pytest.mark.parametrize("member", ["optimizer-lora.xz", "templates.xz"])
def test_a_damaged_member_is_named_with_the_recording(folder: Path, member: str) -> None:
    archive = folder.with_name("small.zip")
    content = bytearray(archive.read_bytes())
    start = content.index(member.encode()) + len(member)
    content[start : start + 40] = b"\0" * 40
    archive.write_bytes(content)
    os.utime(archive, ns=(99, 99))
    with pytest.raises(VplanError, match=r"optimizer-lora-adamw.json.gz is damaged"):
        read_tape(folder / "optimizer-lora-adamw.json.gz")


ROWS = [[[number, -number, 300 * number, 0], [7, number, 1, 2, 3]] for number in range(40)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4), st.integers(1, 2**12))
def test_a_damaged_table_is_refused_or_read_as_rows(changes: list[tuple[int, int]], length: int) -> None:
    writer = TemplateWriter()
    for rows in ROWS:
        writer.number({"events": rows, "work": rows})
    table = bytearray(writer.table())
    for place, byte in changes:
        table[place % len(table)] = byte
    reader = TemplateReader(lambda start, end: bytes(table[:length][start:end]))
    with contextlib.suppress(ValueError, LookupError):
        for number in range(len(ROWS)):
            rows = reader.template(number)["events"]
            assert all(type(field) is int for row in rows for field in row)


def test_files_keep_their_form(tmp_path: Path) -> None:
    """What a user records stays a file."""
    path = put(tmp_path / "mine", VARIANTS[0], 1)
    assert packs.read_recording(path) == json.loads(unpack(path))
