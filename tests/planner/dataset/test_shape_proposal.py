"""Shapes proposed from clips: `--buckets auto`."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dataset.buckets import Clip, assign
from planner.dataset.shape_proposal import MOST, propose
from planner.dataset.sources import DataSource
from planner.errors import VplanError

WAN, SD = lookup.model("wan2.1-t2v-1.3b"), lookup.model("sd1.5")
FOLDER = DataSource(folder="clips")
AREA = 480 * 832


def clip(frames: int, height: int = 480, width: int = 832, fps: int = 16) -> tuple[Clip, DataSource]:
    return Clip(Path("a.mp4"), "a.mp4", "a cat", frames, Fraction(fps if frames > 1 else 0), height, width), FOLDER


def shapes(clips: list[tuple[Clip, DataSource]], pixels: int = AREA, longest: int = 81) -> list[tuple[int, int, int]]:
    return [(one.frames, one.height, one.width) for one in propose(clips, WAN, pixels, longest)]


def test_each_kind_of_clip_has_its_shape() -> None:
    clips = [clip(90)] * 6 + [clip(33)] * 4 + [clip(50, 832, 480)] * 3 + [clip(1)] * 8
    assert shapes(clips) == [(81, 480, 832), (49, 832, 480), (33, 480, 832), (1, 480, 832)]


def test_what_is_limited_is_the_frame_and_the_length() -> None:
    assert shapes([clip(200, 1080, 1440)], longest=41) == [(41, 544, 720)]  # 4:3 within the pixels of 480x832
    assert shapes([clip(200, 240, 416)]) == [(81, 240, 416)]  # never enlarged
    assert shapes([clip(100, fps=32)]) == [(49, 480, 832)]  # 50 frames at the model's 16 a second


def test_a_rare_kind_that_nothing_else_takes_still_has_a_shape() -> None:
    assert shapes([clip(81)] * 500 + [clip(9)]) == [(81, 480, 832), (9, 480, 832)]


def test_no_clip_that_the_model_takes_is_an_error() -> None:
    animate = lookup.model("wan2.2-animate-14b")
    with pytest.raises(VplanError, match="takes none of these clips"):
        propose([clip(1)], animate, AREA, animate.shape.max_frames)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(64, 2200), st.integers(64, 2200)), min_size=1, max_size=30))
def test_every_clip_is_trained_at_a_shape_that_the_model_takes(kinds: list[tuple[int, int, int]]) -> None:
    for model in (WAN, SD):
        clips = [clip(frames if model is WAN else 1, height, width) for frames, height, width in kinds]
        found = propose(clips, model, AREA, model.shape.max_frames)
        assert len(found) <= MOST
        job = job_for(model, {"buckets": found})  # raises where a shape is not taken
        samples, unfit, _ = assign([one for one, _ in clips], model, job, FOLDER)
        assert not unfit and len(samples) == len(clips)
