"""A folder of clips becomes samples of a plan, or one error that names what is wrong with it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as some

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dataset import buckets, captions, clips, scan
from planner.dataset.clips import UnusableError
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from planner.spec.job import Bucket, Job
from tests.trainers import tiny

WAN = lookup.model("wan2.1-t2v-1.3b")


def job(frames: int = 9, height: int = 48, width: int = 64, **more: object) -> Job:
    return job_for(WAN, {"frames": frames, "height": height, "width": width, **more})


def shapes(*sizes: tuple[int, int, int]) -> dict[str, object]:
    return {"buckets": [{"frames": f, "height": h, "width": w} for f, h, w in sizes]}


def clip(frames: int = 100, height: int = 480, width: int = 832, fps: int = 16, name: str = "a.mp4") -> scan.Clip:
    return scan.Clip(Path(name), name, "a cat", frames, Fraction(fps), height, width)


def one(given_clip: scan.Clip, plan: Job, **reading: object) -> scan.Sample:
    samples, unfit, _ = buckets.assign([given_clip], WAN, plan, DataSource(folder="clips", **reading))
    assert not unfit, unfit
    return samples[0]


def fault(given_clip: scan.Clip, plan: Job, **reading: object) -> str:
    samples, unfit, _ = buckets.assign([given_clip], WAN, plan, DataSource(folder="clips", **reading))
    assert not samples
    return unfit[0][1]


def read(folder: Path, plan: Job | None = None, *, skip_bad: bool = False, **settings: object) -> scan.Dataset:
    return scan.read([DataSource(folder=str(folder), **settings)], WAN, plan or job(), skip_bad=skip_bad)


def refusal(folder: Path, plan: Job | None = None, **settings: object) -> str:
    with pytest.raises(VplanError) as caught:
        read(folder, plan, **settings)
    assert "\n" not in str(caught.value)
    assert caught.value.fix
    return caught.value.message


# ---- reading folders


def test_captions_beside_the_clips(tmp_path: Path) -> None:
    tiny.write_clips(tmp_path)
    tiny.write_clips(tmp_path / "more", 1)
    (tmp_path / "readme.md").write_text("not a clip")
    found = read(tmp_path)
    assert [sample.clip.name for sample in found.samples] == ["0.mp4", "1.mp4", "2.mp4", "more/0.mp4"]
    assert found.samples[1].clip.caption == "a cat cat"
    assert {sample.bucket.frames for sample in found.samples} == {9}
    assert found.skipped == ()


@pytest.mark.parametrize("table", captions.METADATA)
def test_captions_in_a_table(tmp_path: Path, table: str) -> None:
    for name in ("a.mp4", "b.mp4"):
        tiny.write_video(tmp_path / name)
    texts = {"a.mp4": 'a "red" cat, sitting', "./b.mp4": "ein Hund läuft"}
    if table.endswith("jsonl"):
        rows = [json.dumps({"file_name": name, "text": text, "other": 1}) for name, text in texts.items()]
        (tmp_path / table).write_text("\ufeff" + "\n\n".join(rows), encoding="utf-8")
    else:
        rows = [f'{name},"{text.replace(chr(34), chr(34) * 2)}"' for name, text in texts.items()]
        (tmp_path / table).write_text("file_name,text\n" + "\n".join(rows), encoding="utf-8")
    found = scan.scan(DataSource(folder=str(tmp_path)))
    assert [(c.name, c.caption) for c in found.clips] == [
        ("a.mp4", 'a "red" cat, sitting'),
        ("b.mp4", "ein Hund läuft"),
    ]
    assert not found.faults


def test_every_fault_is_named_and_the_rest_is_used_when_asked(tmp_path: Path) -> None:
    good = tiny.write_video(tmp_path / "good.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(good[: len(good) // 2])
    (tmp_path / "words.mp4").write_text("no video")
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "no caption.mp4").write_bytes(good)
    (tmp_path / "blank.mp4").write_bytes(good)
    (tmp_path / "latin.mp4").write_bytes(good)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    (tmp_path / "line\nbreak.mp4").write_bytes(good)
    os.symlink("/etc/hostname", tmp_path / "outside.mp4")
    os.symlink("nowhere", tmp_path / "dangling.mp4")
    tiny.write_video(tmp_path / "short.mp4", frames=3)
    for name in ("good", "cut", "words", "empty", "broken", "line\nbreak", "outside", "dangling", "short"):
        (tmp_path / f"{name}.txt").write_text("a cat")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "novel.mp4").write_bytes(good)
    (tmp_path / "novel.txt").write_text("é" * 300_000)
    os.symlink("/etc/hostname", tmp_path / "bare.mp4")  # no caption either: the name is the fault
    assert "13 of 14" in refusal(tmp_path)
    assert refusal(tmp_path).count(": ") >= scan.MAX_NAMED
    found = read(tmp_path, skip_bad=True)
    assert [sample.clip.name for sample in found.samples] == ["good.mp4"]
    reasons = {fault.name: fault.reason for fault in found.skipped}
    assert reasons["no caption.mp4"] == "caption missing: no .txt of its name"
    assert reasons["blank.mp4"].startswith("caption missing")
    assert "UTF-8" in reasons["latin.mp4"]
    assert "longer than" in reasons["novel.mp4"]
    assert "points outside" in reasons["bare.mp4"]
    assert reasons["short.mp4"].startswith("too short: 3 frames")
    assert "points outside" in reasons["outside.mp4"]
    assert "cannot be read" in reasons["dangling.mp4"]
    assert "line breaks" in reasons["'line\\nbreak.mp4'"]
    assert [reasons[f"{name}.mp4"].partition(" (")[0] for name in ("cut", "words", "empty")] == ["corrupt video"] * 3
    assert "image" in reasons["broken.png"]
    assert "\n" not in "".join(map(str, found.skipped))


def test_faults_of_a_table(tmp_path: Path) -> None:
    tiny.write_clips(tmp_path / "data", 4)
    os.rename(tmp_path / "data" / "3.mp4", tmp_path / "outside.mp4")
    os.symlink(tmp_path / "outside.mp4", tmp_path / "data" / "3.mp4")
    rows: list[object] = [
        {"file_name": "0.mp4", "text": "a cat"},
        {"file_name": "1.mp4", "text": "a cat"},
        {"file_name": "./1.mp4", "text": "a dog"},
        {"file_name": "../outside.mp4", "text": "a cat"},
        {"file_name": str(tmp_path / "data" / "0.mp4"), "text": "a cat"},
        {"file_name": "C:\\0.mp4", "text": "a cat"},
        {"file_name": "gone.mp4", "text": "a cat"},
        {"file_name": "0.txt", "text": "a cat"},
        {"file_name": "3.mp4", "text": "a cat"},
        {"text": "a cat"},
        [1],
        {"file_name": "data\n.mp4", "text": "a cat"},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "data" / "metadata.jsonl").write_text("\n".join([*lines, "{broken"]))
    reasons = {f.name: f.reason for f in scan.scan(DataSource(folder=str(tmp_path / "data"))).faults}
    assert "several rows" in reasons["1.mp4"]
    assert "points outside" in reasons["../outside.mp4"]
    assert "points outside" in reasons["3.mp4"]
    assert sum("absolute" in reason for reason in reasons.values()) == 2
    assert "absolute" in reasons["C:\\0.mp4"]
    assert "cannot be read" in reasons["gone.mp4"]
    assert "not named like" in reasons["0.txt"]
    assert "no row in metadata.jsonl" in reasons["2.mp4"]
    assert reasons["metadata.jsonl line 10"] == "no file_name in the row"
    assert reasons["metadata.jsonl line 11"] == reasons["metadata.jsonl line 13"] == "not a JSON object"
    assert [found.name for found in scan.scan(DataSource(folder=str(tmp_path / "data"))).clips] == ["0.mp4"]


def test_a_dataset_in_a_hugging_face_cache_is_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "datasets--me--cats" / "blobs", tmp_path / "datasets--me--cats" / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    tiny.write_clips(snapshot, 2)
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert len(read(snapshot).samples) == 2


def test_a_link_to_another_folder_is_named_and_one_within_is_not(tmp_path: Path) -> None:
    """What it leads to was left out of the training without a word."""
    tiny.write_clips(tmp_path / "elsewhere", 1)
    tiny.write_clips(tmp_path / "data" / "own", 2)
    os.symlink("own", tmp_path / "data" / "same")
    assert len(read(tmp_path / "data").samples) == 2
    os.symlink(tmp_path / "elsewhere", tmp_path / "data" / "more")
    with pytest.raises(VplanError, match=r"1 of 3 .* more/: a link to another folder, which is not followed") as caught:
        read(tmp_path / "data")
    assert "[[source]]" in caught.value.fix
    assert len(read(tmp_path / "data", skip_bad=True).samples) == 2


def test_captions_without_a_clip_are_noted(tmp_path: Path) -> None:
    """A misspelt name was left out without a word."""
    tiny.write_clips(tmp_path, 2)
    assert "without" not in " ".join(read(tmp_path).notes)
    (tmp_path / "photo.txt").write_text("a cat")
    assert "without a video or image of their name: 1 caption (photo.txt)" in read(tmp_path).notes
    assert "photo" not in " ".join(read(tmp_path, caption="a cat").notes)


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert "no videos or images" in refusal(tmp_path)
    assert "cannot read" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "cannot read" in refusal(tmp_path / "file")
    tiny.write_video(tmp_path / "a.mp4")
    (tmp_path / "metadata.csv").write_text("name,text\na.mp4,a cat\n")
    assert "no column file_name" in refusal(tmp_path)
    (tmp_path / "metadata.jsonl").touch()
    assert "both" in refusal(tmp_path)
    (tmp_path / "metadata.csv").unlink()
    assert "caption missing" in refusal(tmp_path)
    (tmp_path / "metadata.jsonl").write_bytes(b"\xff")
    with pytest.raises(VplanError, match="UTF-8"):
        scan.scan(DataSource(folder=str(tmp_path)))


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="whoever may read what is Unix's")
def test_a_file_that_may_not_be_read() -> None:
    folder = Path(tempfile.mkdtemp())  # not pytest's own, which nobody else may enter
    try:
        folder.chmod(0o755)
        for name in ("closed", "open"):
            tiny.write_video(folder / f"{name}.mp4")
            (folder / f"{name}.txt").write_text("a cat")
        (folder / "closed.mp4").chmod(0)
        scan.scan(DataSource(folder=str(folder)))  # all modules are loaded before
        if os.geteuid() == 0:  # whom nothing is closed to
            os.setresuid(65534, 65534, 0)
        try:
            found = scan.scan(DataSource(folder=str(folder)))
        finally:
            if os.getresuid()[2] == 0:
                os.setresuid(0, 0, 0)
        (fault,) = found.faults
        assert fault.name == "closed.mp4" and "Permission denied" in fault.reason
        assert [clip.name for clip in found.clips] == ["open.mp4"]
    finally:
        shutil.rmtree(folder)


def test_a_video_without_frames(tmp_path: Path) -> None:
    import av

    with av.open(str(tmp_path / "zero.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    with pytest.raises(UnusableError, match=r"zero frames|corrupt"):
        clips.probe(tmp_path / "zero.mp4")


# ---- frames


def test_frames_are_those_asked_for(tmp_path: Path) -> None:
    tiny.write_video(tmp_path / "a.mp4", frames=16)
    made = clips.frames(tmp_path / "a.mp4", (0, 5, 15), 48, 64)
    red = made[..., 0].mean(axis=(1, 2))
    assert made.shape == (3, 48, 64, 3)
    assert red == pytest.approx([0, 85, 255], abs=6)


def test_matroska_does_not_say_how_many_frames_it_has(tmp_path: Path) -> None:
    tiny.write_video(tmp_path / "a.mkv", frames=7)
    assert clips.probe(tmp_path / "a.mkv") == clips.Media(7, Fraction(16), 48, 64)


def test_a_video_that_ends_early(tmp_path: Path) -> None:
    tiny.write_video(tmp_path / "a.mp4", frames=5)
    with pytest.raises(UnusableError, match="ends before frame 7"):
        clips.frames(tmp_path / "a.mp4", (0, 7), 48, 64)


def test_an_image_on_its_side(tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.fromarray(numpy.zeros((20, 40, 3), numpy.uint8))
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(tmp_path / "a.jpg", exif=exif)
    assert clips.probe(tmp_path / "a.jpg") == clips.Media(1, Fraction(0), 40, 20)
    assert clips.frames(tmp_path / "a.jpg", (0,), 32, 16).shape == (1, 32, 16, 3)


def test_pictures_are_cropped_at_their_middle(tmp_path: Path) -> None:
    tiny.write_image(tmp_path / "a.png", 64, 128)  # columns count from 0 to 127
    made = clips.frames(tmp_path / "a.png", (0,), 64, 64)
    assert made[0, 0, 0, 0] == 32
    assert made[0, 0, -1, 0] == 95
    assert clips.frames(tmp_path / "a.png", (0,), 32, 64)[0, :, 0, 0].max() <= 1  # halved: columns 0 and 1 in one


# ---- buckets


def test_a_clip_goes_to_the_shape_that_keeps_most_of_it() -> None:
    plan = job(81, 480, 832, **shapes((81, 480, 832), (81, 832, 480), (33, 480, 832), (17, 624, 624)))
    assert one(clip(100), plan).bucket.frames == 81
    assert one(clip(100, 832, 480), plan).bucket.height == 832
    assert one(clip(50), plan).bucket == Bucket(frames=33, height=480, width=832, batch_size=1)
    assert one(clip(20, 700, 700), plan).bucket.height == 624
    assert fault(clip(16), plan).startswith("too short: 16 frames at the model's rate, and the plan's shortest")


def test_of_equal_shapes_the_one_that_enlarges_least() -> None:
    plan = job(17, 480, 832, **shapes((17, 960, 1664), (17, 480, 832)))
    assert one(clip(17, 480, 832), plan).bucket.height == 480
    assert one(clip(17, 1920, 3328), plan).bucket.height == 960


def test_frames_at_the_models_rate() -> None:
    assert one(clip(100, fps=16), job()).indices == tuple(range(9))
    assert one(clip(100, fps=24), job()).indices == (0, 2, 3, 5, 6, 8, 9, 11, 12)
    assert one(clip(100, fps=8), job()).indices == tuple(range(9))  # none is repeated
    assert one(clip(100, fps=0), job()).indices == tuple(range(9))
    assert one(clip(100, fps=16), job(), fps=4.0).indices == tuple(range(0, 36, 4))
    assert one(clip(101, fps=16), job(), frames="even").indices == (0, 13, 25, 38, 50, 63, 75, 88, 100)
    assert fault(clip(12, fps=24), job()).startswith("too short: 8 frames")
    assert one(clip(13, fps=24), job()).indices[-1] == 12


@given(
    frames=some.integers(1, 400),
    fps=some.fractions(1, 120, max_denominator=1001),
    wanted=some.sampled_from([1, 5, 9, 81]),
    sampling=some.sampled_from(["first", "even"]),
)
def test_frames_rise_and_lie_in_the_clip(frames: int, fps: Fraction, wanted: int, sampling: str) -> None:
    plan = job(wanted)
    samples, unfit, _ = buckets.assign(
        [clip(frames)._replace(fps=fps)], WAN, plan, DataSource(folder="clips", frames=sampling)
    )
    if unfit:
        usable = frames if sampling == "even" else int((frames - 1) / max(1, fps / 16)) + 1
        assert usable < wanted
        return
    indices = samples[0].indices
    assert len(indices) == wanted
    assert indices[0] == 0
    assert indices[-1] < frames
    assert all(a < b for a, b in itertools.pairwise(indices))


def test_an_image_model_takes_the_first_frame() -> None:
    flux = lookup.model("flux.1-dev")
    plan = job_for(flux, {"height": 512, "width": 512})
    samples, unfit, _ = buckets.assign([clip(30, 600, 600)], flux, plan, DataSource(folder="clips"))
    assert not unfit
    assert samples[0].indices == (0,)


@pytest.mark.parametrize("name", lookup.model_names())
def test_every_video_model_has_a_rate(name: str) -> None:
    profile = lookup.model(name)
    assert (buckets.model_fps(profile) is None) == (profile.kind == "image")


def test_notes_say_what_is_not_used() -> None:
    many = [clip(100, 480, 832), clip(90, 832, 480), clip(90, 100, 170), clip(50, 480, 832, fps=8)]
    _, _, notes = buckets.assign(many, WAN, job(17, 480, 832), DataSource(folder="clips"))
    text = " ".join(notes)
    assert "4 of 17x480x832" in text
    assert "cut to the length of their shape: 4 clips, 79% of all frames unused" in text
    assert "cropped by more than a tenth of the picture: 1 file" in text
    assert "upscaled" in text
    assert "under 16 frames a second, so faster in training: 1 clip" in text
    assert not re.search(r"\b1 (clips|files|samples)\b", text)


def test_reading_twice_is_the_same(tmp_path: Path) -> None:
    tiny.write_clips(tmp_path, 5)
    assert read(tmp_path) == read(tmp_path)
