"""A video whose frames last unequally long, as phones and screen recorders write them, is sampled by its time
stamps."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy
import pytest

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dataset import clips, scan
from planner.dataset.sources import DataSource

FAST_THEN_SLOW = [Fraction(number, 32) for number in range(32)] + [1 + Fraction(number, 4) for number in range(8)]
"""A second at 32 frames a second, then two at 4."""

EVEN = [Fraction(number, 32) for number in range(96)]


def write(path: Path, times: list[Fraction]) -> None:
    """A video whose frames are as bright as their time: black at 0 s, white at 3 s."""
    base = Fraction(1, 1000)
    with av.open(str(path), "w") as container:
        codec = "libvpx" if path.suffix == ".webm" else "mpeg4"
        stream = container.add_stream(codec, rate=32, width=64, height=48, pix_fmt="yuv420p")
        stream.codec_context.time_base = stream.time_base = base
        for seconds in times:
            frame = av.VideoFrame.from_ndarray(
                numpy.full((48, 64, 3), min(seconds * 85, 255), numpy.uint8), format="rgb24"
            )
            frame.pts, frame.time_base = int(seconds / base), base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    path.with_suffix(".txt").write_text("a grey wall")


def seconds_of(sample: scan.Sample) -> list[float]:
    pictures = clips.frames(sample.clip.path, sample.indices, 48, 64)
    brightness: list[float] = pictures.mean(axis=(1, 2, 3)).tolist()
    return [value / 85 for value in brightness]


def read(folder: Path, count: int, **settings: object) -> tuple[scan.Sample, tuple[str, ...]]:
    model = lookup.model("wan2.1-t2v-1.3b")
    plan = job_for(model, {"frames": count, "height": 48, "width": 64})
    found = scan.read([DataSource(folder=str(folder), **settings)], model, plan)
    return found.samples[0], found.notes


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.webm"])
def test_frames_are_those_on_screen_at_even_steps(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, FAST_THEN_SLOW)
    sample, notes = read(tmp_path, 21, fps=8)
    wanted = [max(at for at in FAST_THEN_SLOW if at <= Fraction(number, 8)) for number in range(21)]
    assert seconds_of(sample) == pytest.approx([float(at) for at in wanted], abs=0.06)
    assert len(set(sample.indices)) < len(sample.indices)  # a frame that stands for a quarter of a second comes twice
    assert any("by their time stamps: 1 clip" in note for note in notes)


def test_windows_follow_each_other_in_time(tmp_path: Path) -> None:
    write(tmp_path / "clip.mkv", FAST_THEN_SLOW)
    sample, _ = read(tmp_path, 9, fps=4, frames="even")
    assert seconds_of(sample) == pytest.approx([0.34 * number for number in range(9)], abs=0.25)


def test_every_frame_is_every_frame_whatever_its_length(tmp_path: Path) -> None:
    write(tmp_path / "clip.mkv", FAST_THEN_SLOW)
    sample, _ = read(tmp_path, 37, fps=0)
    assert sample.indices == tuple(range(37))


def test_windows_that_show_the_same_frames_are_one_sample(tmp_path: Path) -> None:
    write(tmp_path / "clip.mkv", [Fraction(0), Fraction(3), *(3 + Fraction(number, 32) for number in range(1, 30))])
    model = lookup.model("wan2.1-t2v-1.3b")
    plan = job_for(model, {"frames": 5, "height": 48, "width": 64})
    found = scan.read([DataSource(folder=str(tmp_path), frames="windows", fps=8)], model, plan)
    assert [(sample.indices, sample.repeats) for sample in found.samples[:1]] == [((0,) * 5, 4)]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv"])
def test_time_stamps_rounded_to_milliseconds_are_even(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, EVEN)
    sample, notes = read(tmp_path, 21, fps=8)
    assert sample.clip.times == ()
    assert sample.indices == tuple(range(0, 84, 4))
    assert not any("time stamps" in note for note in notes)


def test_a_rate_that_the_frames_do_not_have_is_not_believed(tmp_path: Path) -> None:
    """A Matroska file states 32 frames a second for frames that come 16 times."""
    write(tmp_path / "clip.mkv", EVEN[::2])
    sample, _ = read(tmp_path, 21, fps=8)
    assert float(sample.clip.fps) == pytest.approx(16, rel=0.001)
    assert sample.indices == tuple(range(0, 42, 2))
