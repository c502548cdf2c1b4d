"""What is said of folders as phones, spreadsheets and other trainers leave them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dataset import scan
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from tests.trainers import tiny

WAN = lookup.model("wan2.1-t2v-1.3b")


def read(folder: Path) -> scan.Dataset:
    job = job_for(WAN, {"frames": 9, "height": 48, "width": 64})
    return scan.read([DataSource(folder=str(folder))], WAN, job)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_table_of_a_spreadsheet_may_have_another_separator(tmp_path: Path, mark: str) -> None:
    tiny.write_video(tmp_path / "a.mp4")
    (tmp_path / "metadata.csv").write_text(f'file_name{mark}text\r\na.mp4{mark}"a cat, sitting{mark} red"\r\n')
    (clip,) = scan.scan(DataSource(folder=str(tmp_path))).clips
    assert clip.caption == f"a cat, sitting{mark} red"


def test_faults_of_a_kind_are_named_together(tmp_path: Path) -> None:
    tiny.write_clips(tmp_path, 6)
    for name in "01234":
        (tmp_path / f"{name}.txt").unlink()
    (tmp_path / "5.mp4").write_text("no video")
    kinds = "0.mp4, 1.mp4, 2.mp4 and 2 more: caption missing: no .txt of its name; 5.mp4: corrupt video"
    with pytest.raises(VplanError, match=re.escape(kinds)):
        read(tmp_path)


@pytest.mark.parametrize(("name", "fix"), [("list.csv", "name it metadata.csv"), ("list.json", "as metadata.jsonl")])
def test_a_table_of_another_name_is_pointed_at(tmp_path: Path, name: str, fix: str) -> None:
    tiny.write_video(tmp_path / "a.mp4")
    (tmp_path / name).write_text("file_name,text\na.mp4,a cat\n")
    with pytest.raises(VplanError) as caught:
        read(tmp_path)
    assert f"if {name} has the captions" in caught.value.fix and fix in caught.value.fix


def test_what_a_phone_writes_and_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "IMG_1.HEIC").touch()
    (tmp_path / "notes.docx").touch()
    with pytest.raises(VplanError, match=r"only IMG_1\.HEIC and its like"):
        read(tmp_path)
    (tmp_path / "IMG_1.txt").write_text("a cat")
    tiny.write_clips(tmp_path, 1)
    (note,) = [note for note in read(tmp_path).notes if "IMG_1" in note]
    assert note == "left out, as their type is not read: 1 file (IMG_1.HEIC); convert them to mp4 or jpg"
