"""Images whose pixels have more than 8 bits."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from PIL import Image

from planner.dataset import clips
from planner.dataset.clips import UnusableError


def test_grey_of_16_bits_keeps_its_tones(tmp_path: Path) -> None:
    """Pillow's own conversion to RGB makes all of it white but the darkest 256th."""
    tones = numpy.tile(numpy.arange(64, dtype=numpy.uint16) * 257 * 4, (48, 1))
    for name in ("a.png", "a.tiff"):
        Image.fromarray(tones).save(tmp_path / name)
        made = clips.frames(tmp_path / name, (0,), 48, 64)
        assert made[0, 0, :, 1].tolist() == list(range(0, 256, 4))


@pytest.mark.parametrize("kind", ["int32", "float32"])
def test_pixels_of_32_bits_are_refused_before_anything_is_loaded(kind: str, tmp_path: Path) -> None:
    """A float between 0 and 1 was trained on as black."""
    Image.fromarray(numpy.ones((48, 64), kind)).save(tmp_path / "a.tiff")
    with pytest.raises(UnusableError, match="32 bits"):
        clips.probe(tmp_path / "a.tiff")
    with pytest.raises(UnusableError, match="32 bits"):
        clips.frames(tmp_path / "a.tiff", (0,), 48, 64)
