"""Packs of recordings: what is read from one is what went in, and a file beside it is taken first."""

from __future__ import annotations

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
from planner.tape.packed_json import pack, unpack, write_packed

VERSIONS = {"torch": "2.13.0"}
VARIANTS = ("step-lora-half-full-one", "step-lora-fp8-full-one", "optimizer-lora-adamw", "parameters")


def recording(variant: str, *numbers: int, versions: dict[str, str] | None = None) -> dict[str, Any]:
    return {"model": "tiny", "variant": variant, "versions": versions or VERSIONS, "format": 1, "tape": list(numbers)}


def put(folder: Path, variant: str, *numbers: int) -> Path:
    return write_packed(recording(variant, *numbers), folder / f"{variant}.json.gz")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that was packed."""
    for number, variant in enumerate(VARIANTS):
        put(tmp_path / "tiny", variant, number)
    assert packs.pack_folder(tmp_path / "tiny") == tmp_path / "tiny.zip"
    return tmp_path / "tiny"


texts = st.dictionaries(
    st.sampled_from([f"{kind}-{word}.json.gz" for kind in ("step-lora", "sample-full", "a") for word in "abcdef"]),
    st.lists(st.integers(0, 2**40), max_size=30),
    min_size=1,
)


@settings(deadline=None, max_examples=50)
@given(texts, st.sampled_from([1, 60, 2**20]))
def test_every_text_comes_back_and_the_same_texts_are_the_same_bytes(contents: dict[str, list[int]], most: int) -> None:
    def made() -> dict[str, dict[str, Any]]:
        return {name: recording(name.removesuffix(".json.gz"), *numbers) for name, numbers in contents.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "GROUP_BYTES", most)
        patch.setattr(packs, "PRESET", 0)  # for speed, as the next
        patch.setattr(packs, "DICTIONARY_BYTES", 2**16)
        archive = packs.packed({name: json.dumps(data).encode() for name, data in made().items()})
        again = packs.packed({name: json.dumps(data, indent=1).encode() for name, data in reversed(made().items())})
    assert archive == again
    opened = packs.Pack(archive)
    assert {name: json.loads(opened.text(name)) for name in opened.names} == made()


def test_a_table_of_parameters_comes_back_as_it_was_without_a_variant(tmp_path: Path) -> None:
    table = {"format": 1, "model": "tiny", "rows": {"proj.weight": 8}, "fp32": []}
    path = write_packed(table, tmp_path / "tiny" / "parameters.gz")
    packs.pack_folder(path.parent)
    assert json.loads(packs.read_text(path)) == table


def test_recordings_are_found_under_the_paths_they_had(folder: Path) -> None:
    assert not folder.exists()
    assert packs.stored(folder) == sorted(folder / f"{variant}.json.gz" for variant in VARIANTS)
    assert packs.stored_below(folder.parent) == packs.stored(folder)
    path = folder / f"{VARIANTS[1]}.json.gz"
    assert packs.is_stored(path) and not packs.is_stored(folder / "step-nothing.json.gz")
    assert json.loads(packs.read_text(path)) == recording(VARIANTS[1], 1)
    with pytest.raises(FileNotFoundError):
        packs.read_text(folder / "step-nothing.json.gz")


def test_what_is_recorded_anew_answers_at_once_and_takes_its_place_in_the_pack(folder: Path) -> None:
    path = put(folder, VARIANTS[0], 77)
    assert json.loads(packs.read_text(path))["tape"] == [77]
    assert len(packs.stored(folder)) == len(VARIANTS)
    packs.pack_folder(folder)
    os.utime(folder.with_name("tiny.zip"), ns=(1, 1))  # a clock that two writes share would hide the second
    assert not folder.exists()
    assert [json.loads(packs.read_text(each))["tape"] for each in packs.stored(folder)] == [[2], [3], [1], [77]]
    assert packs.pack_folder(folder) is None


def test_a_digest_is_of_the_recording_not_of_the_versions(tmp_path: Path, folder: Path) -> None:
    newer = recording(VARIANTS[0], 0, versions={"torch": "2.14.0"})
    path = write_packed(newer, tmp_path / "newer" / f"{VARIANTS[0]}.json.gz")
    assert packs.digest(path) == packs.digest(folder / path.name)
    assert packs.digest(path) != packs.digest(put(tmp_path / "other", VARIANTS[0], 5))


def test_a_damaged_pack_is_named_in_one_line(folder: Path) -> None:
    archive = folder.with_name("tiny.zip")
    whole = archive.read_bytes()
    path = folder / f"{VARIANTS[0]}.json.gz"
    for number, damaged in enumerate((b"", b"PK", whole[:-30], whole[: len(whole) // 2], pack({}))):
        archive.write_bytes(damaged)
        os.utime(archive, ns=(number, number))
        with pytest.raises(VplanError, match=r"tape tiny.zip is damaged") as caught:
            packs.is_stored(path)
        assert caught.value.fix
    middle = bytearray(whole)
    middle[200:220] = b"\0" * 20  # inside the first group
    archive.write_bytes(middle)
    os.utime(archive, ns=(99, 99))
    with pytest.raises(VplanError, match=r"optimizer-lora-adamw.json.gz is damaged"):
        read_tape(folder / "optimizer-lora-adamw.json.gz")


def test_files_keep_their_form(tmp_path: Path) -> None:
    """What a user records stays a file."""
    path = put(tmp_path / "mine", VARIANTS[0], 1)
    assert packs.read_text(path) == unpack(path)
