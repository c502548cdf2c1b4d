"""Which sample comes when: how often, in which micro-batches, and the same on any number of ranks."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from planner.errors import VplanError  # noqa: E402
from planner.spec.job import Bucket, Job  # noqa: E402
from trainers.data.entries import CachedSample  # noqa: E402
from trainers.data.sampler import BatchSampler, even_order  # noqa: E402

JOB = Job(model="wan2.1-t2v-1.3b", frames=5, height=32, width=32)
STEPS = 60

shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=9), min_size=1, max_size=4)
"""For each shape the repeats of its samples."""
sizes, ranks = st.integers(1, 4), st.integers(1, 8)


def bucket(shape: int) -> Bucket:
    return Bucket(frames=1 + 4 * shape, height=32, width=32)


def job(shapes: int, batch_size: int = 1) -> Job:
    return JOB.replace(buckets=tuple(bucket(shape) for shape in range(shapes)), batch_size=batch_size)


def entries(*of_shapes: list[int]) -> list[CachedSample]:
    return [
        CachedSample(Path(f"{shape}-{number}"), Path("text"), bucket(shape), repeats=times)
        for shape, repeats in enumerate(of_shapes)
        for number, times in enumerate(repeats)
    ]


def sampler(
    of_shapes: list[list[int]], batch_size: int = 1, world: int = 1, accumulation: int = 1, seed: int = 0
) -> BatchSampler:
    return BatchSampler(entries(*of_shapes), job(len(of_shapes), batch_size), world, accumulation, seed)


@given(repeats=st.lists(st.integers(1, 9), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_every_beginning_of_an_order_holds_each_item_its_share_of_times_within_one(
    repeats: list[int], seed: int
) -> None:
    order, total = even_order(repeats, torch.Generator().manual_seed(seed)), sum(repeats)
    assert Counter(order) == Counter(dict(enumerate(repeats)))
    seen: Counter[int] = Counter()
    for draws, item in enumerate(order, start=1):
        seen[item] += 1
        assert all(abs(seen[each] - Fraction(draws * times, total)) < 1 for each, times in enumerate(repeats))


@settings(max_examples=100, deadline=None)
@given(of_shapes=shapes, batch_size=sizes, world=ranks, accumulation=st.integers(1, 3), seed=st.integers(0, 5))
def test_samples_come_as_often_as_their_repeats_say(
    of_shapes: list[list[int]], batch_size: int, world: int, accumulation: int, seed: int
) -> None:
    """Within a shape within one; the shapes at one pace, within half of what may come of each at once."""
    one = sampler(of_shapes, batch_size, world, accumulation, seed)
    firsts = [0]
    for repeats in of_shapes:
        firsts.append(firsts[-1] + len(repeats))
    totals = [sum(repeats) for repeats in of_shapes]
    # At once: as much as holds no sample twice; where that is less than a micro-batch in every shape, what fills it
    # in the fullest.
    distinct = [max(1, sum(repeats) // max(repeats)) for repeats in of_shapes]
    most = [Fraction(max(own, Fraction(own * batch_size, max(distinct)) + 1), total)
            for own, total in zip(distinct, totals, strict=True)]  # fmt: skip
    seen: Counter[int] = Counter()
    for number in range(STEPS):
        seen.update(one.step(number).samples)
        passes = []
        for shape, repeats in enumerate(of_shapes):
            drawn = [seen[firsts[shape] + place] for place in range(len(repeats))]
            passes.append(Fraction(sum(drawn), totals[shape]))
            share = [passes[-1] * times for times in repeats]
            assert all(abs(times - own) < 1 for times, own in zip(drawn, share, strict=True))
        middle = [(each - half / 2, each + half / 2) for each, half in zip(passes, most, strict=True)]
        assert max(low for low, _ in middle) <= min(high for _, high in middle)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=4), world=ranks, epochs=st.integers(1, 9))
def test_after_whole_epochs_every_sample_came_that_often_within_one(counts: list[int], world: int, epochs: int) -> None:
    one = sampler([[1] * count for count in counts], world=world)
    drawn = chain.from_iterable(one.step(number).samples for number in range(epochs * sum(counts)))
    seen = Counter(number for _, number in zip(range(epochs * sum(counts)), drawn, strict=False))
    assert {abs(seen[number] - epochs) for number in range(sum(counts))} <= {0, 1}


@pytest.mark.parametrize(("batch_size", "world", "accumulation"), [(1, 8, 4), (4, 8, 1), (1, 32, 1), (4, 1, 1)])
def test_a_lone_image_comes_once_an_epoch(batch_size: int, world: int, accumulation: int) -> None:
    """Among 63 clips, however many samples a step has."""
    one = sampler([[1] * 63, [1]], batch_size, world, accumulation)
    steps = takewhile(lambda step: step.epoch < 10, map(one.step, range(10**6)))
    seen = Counter(chain.from_iterable(step.samples for step in steps))
    assert seen[63] == 10 and {seen[number] for number in range(63)} <= {9, 10, 11}


@settings(max_examples=60, deadline=None)
@given(of_shapes=shapes, batch_size=sizes, world=ranks, accumulation=st.integers(1, 3))
def test_micro_batches_have_one_shape_and_weigh_what_they_hold(
    of_shapes: list[list[int]], batch_size: int, world: int, accumulation: int
) -> None:
    one = sampler(of_shapes, batch_size, world, accumulation)
    for number in range(10):
        step = one.step(number)
        assert len(step.micro_batches) == world * accumulation
        places = [micro.first + place for micro in step.micro_batches for place in range(len(micro.samples))]
        assert places == list(range(len(step.samples)))
        for micro in step.micro_batches:
            assert {one.entries[sample].bucket for sample in micro.samples} == {micro.bucket}
            assert 1 <= len(micro.samples) <= batch_size
            assert micro.weight == len(micro.samples) / batch_size
        assert sum(step.shapes.values()) == len(step.samples)


def test_ranks_run_a_common_shape_side_by_side() -> None:
    one = sampler([[1] * 80, [1] * 160], world=8)
    assert all(len(one.step(number).shapes) == 1 for number in range(60))


def test_a_dataset_smaller_than_a_micro_batch_fills_it() -> None:
    """As it would with more repeats; beside it a rarer shape comes at the same pace."""
    one = sampler([[1] * 3], batch_size=4)
    assert all(len(one.step(number).samples) == 4 and one.step(number).weight == 1 for number in range(9))
    both = sampler([[1] * 2, [1]], batch_size=4)
    seen = Counter(chain.from_iterable(both.step(number).samples for number in range(12)))
    assert set(seen.values()) == {12}


def test_the_weight_of_a_source_is_that_of_its_micro_batches() -> None:
    made = entries([1] * 6)
    weighted = [entry._replace(weight=0.25) if number > 3 else entry for number, entry in enumerate(made)]
    one = BatchSampler(weighted, job(1, batch_size=2), 1, 1, 0)
    for micro in chain.from_iterable(one.step(number).micro_batches for number in range(12)):
        assert {weighted[sample].weight for sample in micro.samples} == {micro.weight}


def test_the_order_is_of_the_seed_and_the_epoch() -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        one = sampler([[1] * 20, [1] * 20], seed=seed)
        return [one.step(epoch * 40 + number) for number in range(40)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_any_step_can_be_asked_for_again() -> None:
    one, other = sampler([[1, 2, 1], [3]], world=2), sampler([[1, 2, 1], [3]], world=2)
    steps = [one.step(number) for number in range(30)]
    assert [other.step(number) for number in (29, 3, 17, 17, 0)] == [steps[number] for number in (29, 3, 17, 17, 0)]


@pytest.mark.parametrize(("batch_size", "world"), [(2, 2), (1, 4), (4, 1)])
def test_the_global_batch_is_the_same_however_it_is_split(batch_size: int, world: int) -> None:
    """Where every shape has samples enough for all ranks."""
    whole, split = sampler([[1] * 10, [2] * 6], 4), sampler([[1] * 10, [2] * 6], batch_size, world)
    assert [whole.step(number).samples for number in range(19)] == [split.step(number).samples for number in range(19)]


@settings(max_examples=60, deadline=None)
@given(of_shapes=shapes, world=st.sampled_from([1, 2, 4]), parts=st.sampled_from([1, 2, 4]), steps=st.integers(0, 9))
def test_a_run_goes_on_with_other_ranks_and_smaller_micro_batches(
    of_shapes: list[list[int]], world: int, parts: int, steps: int
) -> None:
    """On half the computers, or after running out of memory: the same samples, noise and weights."""
    began = sampler(of_shapes, 4, 4, 1)
    position = began.position(steps)
    other = sampler(of_shapes, 4 // parts, world, 4 // world * parts)
    assert other.resume(position) == steps and other.position(steps) == position
    for number in range(steps, steps + 9):
        before, now = began.step(number), other.step(number)
        assert now.samples == before.samples
        assert now.weight == pytest.approx(before.weight)
        whole = [micro for micro in now.micro_batches if micro.weight]
        assert [micro.first for micro in whole] == [
            first
            for micro in before.micro_batches
            for first in range(micro.first, micro.first + len(micro.samples), 4 // parts)
        ]


def test_a_position_is_taken_up_by_the_same_order_only() -> None:
    one = sampler([[1] * 5, [1] * 3], world=2)
    position = one.position(7)
    assert sampler([[1] * 5, [1] * 3], world=2).resume(position) == 7
    for other in (
        sampler([[1] * 5, [1] * 4], world=2),
        sampler([[1] * 5, [1, 1, 2]], world=2),
        sampler([[1] * 5, [1] * 3], world=3),
        sampler([[1] * 5, [1] * 3], 2),  # one shape where there may have been two
        sampler([[1] * 5, [1] * 3], world=2, seed=1),
    ):
        with pytest.raises(VplanError, match="differs from the checkpoint's"):
            other.resume(position)
    with pytest.raises(VplanError, match=r"a step of 1 micro-batches .* of 2"):
        sampler([[1] * 5, [1] * 3], 2).resume(position)
    with pytest.raises(VplanError, match="differs from the checkpoint's"):
        one.resume({"steps": 7, "epoch": 0, "order": "of an earlier version"})


def test_a_shape_that_the_plan_does_not_have_is_never_drawn() -> None:
    """Entries of an earlier plan: what was planned says nothing of their memory."""
    with pytest.raises(VplanError, match="of 9x32x32, a shape that the plan does not have"):
        BatchSampler(entries([1], [1], [1]), job(2), 1, 1, 0)


def test_the_plan_says_the_batch_size_of_a_shape() -> None:
    made = [entry._replace(bucket=entry.bucket.replace(batch_size=7)) for entry in entries([1] * 6)]
    assert len(BatchSampler(made, job(1, batch_size=2), 1, 1, 0).step(0).samples) == 2


def test_no_sample_is_refused() -> None:
    with pytest.raises(VplanError, match="no samples to train on"):
        BatchSampler([], JOB, 1, 1, 0)
