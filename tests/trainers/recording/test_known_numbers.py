"""trainers/recording/known_numbers.py: lengths that follow from a mask's numbers are those of real tensors."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from tests.trainers import tiny  # noqa: E402
from trainers.families import family  # noqa: E402
from trainers.recording.recorder import Recorder  # noqa: E402


def laid_out() -> list[Any]:
    """What Qwen-Image-2.1 does with a mask: places repeated, counted, put in order and read."""
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool).new_ones(2, 2)], dim=1)
    repeats = torch.where(mask, 4, 1)[0]
    places = torch.repeat_interleave(mask[0], repeats)
    states = torch.zeros(2, 5, 6).repeat_interleave(repeats, dim=1)
    states[:, places] = torch.ones(2, 8, 6)
    numbers = torch.full_like(places, -1, dtype=torch.long)
    numbers[places.nonzero(as_tuple=True)[0]] = torch.tensor(list(range(8)))
    return [states.shape, states[:, places].shape, int((~places).sum()), numbers[:4].tolist(), numbers.tolist()]


def recorder() -> Recorder:
    made = Recorder()
    made.follow(family(tiny.profile("qwen-image-2.1")))
    return made


def test_lengths_are_those_of_real_tensors() -> None:
    expected = laid_out()
    assert expected[:3] == [(2, 11, 6), (2, 8, 6), 3]
    with FakeTensorMode(allow_non_fake_inputs=True), recorder():
        assert laid_out() == expected


def test_what_comes_of_random_numbers_or_of_real_ones_is_not_known() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), recorder():
        drawn = torch.randint(5, 100, (3,))
        seen = torch.ones(3) > 0
        assert isinstance(drawn, FakeTensor)
        assert int(drawn[0]) == 1  # what code is told that reads a number which nobody knows
        assert int(seen.sum()) == 1


def test_what_is_written_over_by_something_unknown_is_forgotten() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), recorder():
        known = torch.tensor([5, 6, 7])
        known = known + 0
        assert known.tolist() == [5, 6, 7]
        known.copy_(torch.randint(5, 100, (3,)))
        assert known.tolist() == [1, 1, 1]
