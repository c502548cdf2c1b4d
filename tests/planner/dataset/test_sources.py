"""What `--data` names: a folder with typed settings, or a dataset.toml; and what samples come of it."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dataset import buckets, captions, scan
from planner.dataset.sources import DataSource, sources
from planner.errors import VplanError
from planner.spec.job import Job
from tests.trainers import tiny

WAN = lookup.model("wan2.1-t2v-1.3b")
DOCS = Path(__file__).parents[3] / "docs" / "training.md"


def job(*shapes: tuple[int, int, int]) -> Job:
    return job_for(WAN, {"buckets": [{"frames": f, "height": h, "width": w} for f, h, w in shapes or [(9, 48, 64)]]})


def clip(frames: int = 100, fps: int = 16) -> scan.Clip:
    return scan.Clip(Path("a.mp4"), "a.mp4", "a cat", frames, Fraction(fps), 48, 64)


def samples(given_clip: scan.Clip, plan: Job | None = None, **settings: object) -> tuple[scan.Sample, ...]:
    found, unfit, _ = buckets.assign([given_clip], WAN, plan or job(), DataSource(folder="clips", **settings))
    assert not unfit, unfit
    return found


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, **options: object) -> VplanError:
    with pytest.raises(VplanError) as caught:
        sources(path, options)
    assert "\n" not in str(caught.value) and caught.value.fix
    return caught.value


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(\[\[source\]\].*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    for folder in ("clips", "photos", "people"):
        (tmp_path / folder).mkdir()
    found = sources(write(tmp_path / "dataset.toml", example), {})
    assert [Path(source.folder) for source in found] == [tmp_path / name for name in ("clips", "photos", "people")]
    used = {name for source in found for name in source.model_fields_set}
    documented = set(re.findall(r"^\| `(\w+)` \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    assert used <= set(DataSource.model_fields) <= documented


def test_a_folder_takes_the_settings_that_were_typed(tmp_path: Path) -> None:
    (source,) = sources(tmp_path, {"trigger": "ohwx", "flip": True})
    assert source == DataSource(folder=str(tmp_path), trigger="ohwx", flip=True)


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("", "source is missing", "add source"),
        ("source = []", "source", ""),
        ("[[source]]", "folder is missing", "add folder"),
        ("[[source]]\nfolder = 'here'\nnum_repeats = 2", "no field 'num_repeats'", "repeats"),
        ("[[source]]\nfolder = 'here'\nframes = 'head'", "frames 'head' is not known", "first, even, random, windows"),
        ("[[source]]\nfolder = 'here'\nrepeats = 0", "repeats 0 is too small", "at least"),
        ("[[source]]\nfolder = 'here'\nrepeats = true", "repeats True is wrong", ""),
        ("[[source]]\nfolder = 'here'\nweight = -1.0", "weight -1.0 is wrong", ""),
        ("[[source]]\nfolder = 'here'\nresolutions = ['480p']", "'480p' is not a size", "480x832"),
        ("[[source]]\nfolder = 'here'\ncaptions = '../a.csv'", "'../a.csv' is not known", ".csv or .jsonl"),
        ("[[source]]\nfolder = 'here'\ntrigger = \"a\\nb\"", "not a caption", "one line"),
        ("[[source]]\nfolder = 'elsewhere'", "there is no folder", "relative to the file"),
        ("[[source]]\nfolder = '~nobody-of-this-name/a'", "there is no folder", "relative to the file"),
        ("[general]\nflip = true\n[[source]]\nfolder = 'here'", "no field 'general'", "source"),
        ("[[source]", "is not TOML", "correct line 1"),
        ("[[source]]\nfolder = [", "is not TOML", "the file is cut off"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str, fix: str) -> None:
    (tmp_path / "here").mkdir()
    error = refusal(write(tmp_path / "dataset.toml", text))
    assert message in error.message and fix in error.fix


def test_other_paths_and_settings_beside_a_file_are_refused(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "nothing").message
    assert refusal(write(tmp_path / "data.csv", "")).message.endswith("' is a file")
    file = write(tmp_path / "dataset.toml", "[[source]]\nfolder = '.'")
    assert "--flip is for a folder" in refusal(file, flip=True).message
    assert "--frame-sampling is for a folder" in refusal(file, frames="even").message
    assert "does not exist" in refusal(tmp_path / "other.toml").message


def test_first_even_random_and_all_of_a_clip() -> None:
    assert [sample.indices for sample in samples(clip())] == [tuple(range(9))]
    assert [sample.indices[-1] for sample in samples(clip(), frames="even")] == [99]
    windows = samples(clip(40), frames="windows", repeats=2)
    assert [sample.indices[0] for sample in windows] == [0, 9, 18, 27] and {sample.repeats for sample in windows} == {2}
    drawn = samples(clip(1000), frames="random", repeats=8)
    assert len({sample.indices for sample in drawn}) == 8 and drawn == samples(clip(1000), frames="random", repeats=8)
    few = samples(clip(10), frames="random", repeats=8)  # of two places
    assert len(few) == 2 and sum(sample.repeats for sample in few) == 8
    assert [sample.indices for sample in samples(clip(fps=32), fps=0.0)] == [tuple(range(9))]
    assert [sample.indices for sample in samples(clip(fps=32))] == [tuple(range(0, 18, 2))]


@given(
    frames=some.integers(1, 300),
    fps=some.integers(1, 120),
    of=some.sampled_from([1, 5, 9, 81]),
    how=some.sampled_from(["first", "even", "random", "windows"]),
    repeats=some.integers(1, 5),
)
def test_every_sample_lies_in_its_clip(frames: int, fps: int, of: int, how: str, repeats: int) -> None:
    source = DataSource(folder="clips", frames=how, repeats=repeats)
    found, unfit, _ = buckets.assign([clip(frames, fps)], WAN, job((of, 48, 64)), source)
    assert bool(found) != bool(unfit)
    for sample in found:
        assert len(sample.indices) == of == len(set(sample.indices))
        assert list(sample.indices) == sorted(sample.indices) and 0 <= sample.indices[0] <= sample.indices[-1] < frames
    if found:
        windows = len(found) if how == "windows" else 1
        assert sum(sample.repeats for sample in found) == repeats * windows


def test_a_mirrored_copy_and_a_sample_at_each_resolution() -> None:
    assert [sample.flip for sample in samples(clip(), flip=True)] == [False, True]
    plan = job((9, 48, 64), (9, 96, 128), (1, 96, 128))
    both = samples(clip(), plan, resolutions=("48x64", "96x128"), weight=0.5)
    assert [(one.bucket.frames, one.bucket.height, one.weight) for one in both] == [(9, 48, 0.5), (9, 96, 0.5)]
    with pytest.raises(VplanError, match="resolution 64x64 is not among the plan's shapes") as caught:
        samples(clip(), plan, resolutions=("64x64",))
    assert "--buckets 9x48x64,9x96x128,1x96x128,9x64x64" in caught.value.fix


def test_an_image_beside_videos_needs_a_shape_of_one_frame(tmp_path: Path) -> None:
    tiny.write_clips(tmp_path, 2)
    tiny.write_image(tmp_path / "photo.png")
    (tmp_path / "photo.txt").write_text("a photo")
    source = [DataSource(folder=str(tmp_path))]
    with pytest.raises(VplanError, match=r"photo\.png: an image, and the plan's shortest shape has 9") as caught:
        scan.read(source, WAN, job())
    assert "plan with shapes as short, as --buckets 9x48x64,1x48x64, or correct" in caught.value.fix
    found = scan.read(source, WAN, job((9, 48, 64), (1, 48, 64)))
    assert Counter(sample.bucket.frames for sample in found.samples) == {9: 2, 1: 1}


def test_every_refusal_names_the_shapes_or_the_option_that_would_take_the_files(tmp_path: Path) -> None:
    """One for images and one for videos, as long as the shortest of them; none that the model cannot take."""
    for number, frames in enumerate((12, 18, 7)):
        tiny.write_video(tmp_path / f"{number}.mp4", frames)
        (tmp_path / f"{number}.txt").write_text("a clip")
    source = [DataSource(folder=str(tmp_path))]
    with pytest.raises(VplanError, match="3 of 3 samples") as caught:
        scan.read(source, WAN, job((81, 48, 64)))
    assert caught.value.fix == "plan with shapes as short, as --buckets 81x48x64,5x48x64, or correct or remove them"
    assert len(scan.read(source, WAN, job((81, 48, 64), (5, 48, 64))).samples) == 3
    tiny.write_image(tmp_path / "photo.png")
    with pytest.raises(VplanError, match="no \\.txt of its name") as caught:
        scan.read(source, WAN, job((81, 48, 64)))
    assert "--caption TEXT" in caught.value.fix
    captioned = [source[0].replace(caption="a photo")]
    with pytest.raises(VplanError) as caught:
        scan.read(captioned, WAN, job((81, 48, 64)))
    assert "--buckets 81x48x64,5x48x64,1x48x64" in caught.value.fix
    long = WAN.replace(shape=WAN.shape.replace(min_frames=9))
    with pytest.raises(VplanError) as caught:
        scan.read([captioned[0]], long, job((81, 48, 64)))
    assert "--buckets 81x48x64,9x48x64," in caught.value.fix and "1x48x64," not in caught.value.fix.replace(
        "81x48x64,", ""
    )


def test_captions_of_a_column_of_a_table_for_all_and_with_a_trigger(tmp_path: Path) -> None:
    tiny.write_clips(tmp_path, 2)
    rows = [{"file_name": f"{number}.mp4", "text": "no", "long": f"clip {number}"} for number in range(2)]
    with (tmp_path / "mine.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    write(tmp_path / "mine.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def captions(**settings: object) -> list[str]:
        found = scan.read([DataSource(folder=str(tmp_path), **settings)], WAN, job())
        return [sample.clip.caption for sample in found.samples]

    for table in ("mine.csv", "mine.jsonl"):
        assert captions(captions=table, caption_column="long") == ["clip 0", "clip 1"]
    assert captions(caption="a man", trigger="ohwx") == ["ohwx, a man"] * 2
    assert all(text.startswith("ohwx, ") for text in captions(trigger="ohwx"))
    for settings, message in (
        ({"captions": "mine.csv", "caption_column": "short"}, "no column short"),
        ({"captions": "absent.csv"}, "absent.csv: cannot be read"),
        ({"captions": "mine.csv", "caption": "a man"}, "both caption and captions"),
    ):
        with pytest.raises(VplanError, match=message):
            captions(**settings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "file_name,text\n" + 'a.png,"' + "long " * 100),
        ("a.jsonl", "[" * 500),
        ("a.jsonl", "\n" * 9 + "x" * 500),
    ],
)
def test_a_table_without_lines_is_not_read_into_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setattr(captions, "MAX_LINE", 100)
    write(tmp_path / name, text)
    with pytest.raises(VplanError, match=r"a\.\w+ line \d+ is longer than 100 characters"):
        scan.scan(DataSource(folder=str(tmp_path), captions=name))


def test_several_folders_are_one_dataset(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny.write_clips(tmp_path / name, 2)
    both = [DataSource(folder=str(tmp_path / "one"), repeats=3), DataSource(folder=str(tmp_path / "two"), weight=0.5)]
    found = scan.read(both, WAN, job())
    assert [sample.clip.name for sample in found.samples] == ["one/0.mp4", "one/1.mp4", "two/0.mp4", "two/1.mp4"]
    assert [(sample.repeats, sample.weight) for sample in found.samples] == [(3, 1.0)] * 2 + [(1, 0.5)] * 2
    (tmp_path / "two" / "0.txt").unlink()
    with pytest.raises(VplanError, match=r"1 of 4 samples cannot be used: two/0\.mp4: caption missing"):
        scan.read(both, WAN, job())


def test_a_scan_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files that were looked at, also those that cannot be used."""
    tiny.write_clips(tmp_path, 3)
    (tmp_path / "0.mp4").write_bytes(b"no video")
    monkeypatch.setattr(scan, "TELL_SECONDS", -1.0)
    monkeypatch.setattr(scan, "AT_ONCE", 1)
    seen: list[dict[str, object]] = []
    scan.scan(DataSource(folder=str(tmp_path)), tell=lambda **facts: seen.append(facts))
    assert [facts["done"] for facts in seen] == [0, 1, 2, 0, 1, 2]
    assert {facts["all"] for facts in seen} == {3}
