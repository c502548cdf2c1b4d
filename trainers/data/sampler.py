"""Decides which samples each rank trains on in each step, so that each comes as often as its repeats say.

A micro-batch is what one rank trains on at once: samples of one shape. A step takes the next micro-batches of all ranks
from an endless list, so their shapes may differ, on one rank and between ranks: the gradients that ranks exchange have
the same form for every shape. Ranks run the same shape side by side wherever a shape has enough samples.

The list follows three rules:

- Within a shape, after any number of draws, the number of times that a sample was drawn is within one of its share:
  ``draws * repeats / (the sum of all repeats)``.
- The shape that has been gone through least often comes next, and at most as many of its samples at once as need no
  repetition. So all shapes advance at the same pace, to within half of the draws that contain a shape's most repeated
  sample once; without repeats, after n epochs every sample was drawn n times, within one.
- A shape with fewer samples than a micro-batch has smaller micro-batches, whose loss weighs proportionally less. If no
  shape fills a micro-batch, samples are repeated until the shape that comes closest does.

The list depends on the seed, the samples, the batch sizes and the number of ranks that the run began with. A run that
resumes on other ranks, or with its micro-batches cut into smaller ones, keeps the list, as long as the global batch is
the same. Only the number of steps and those sizes have to be saved.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

import torch

from planner.errors import VplanError
from planner.spec.job import Bucket, Job
from trainers.data.entries import CachedSample
from trainers.families.common.random_draws import sample_seed

REMEMBERED = 4
"""Newest steps that are kept: the one that runs and those read ahead. Older ones are drawn again from the start."""


class MicroBatch(NamedTuple):
    """What one rank trains on at once."""

    bucket: Bucket
    samples: tuple[int, ...]
    """indices of entries"""
    first: int
    """position of the first one in the step's global batch; noise is seeded by it"""
    weight: float
    """factor of its mean loss: its share of a full micro-batch's samples, times the weight of its source; 0 for a
    repetition that only keeps a rank in step with the others"""


class Step(NamedTuple):
    """The micro-batches of one optimizer step: number ``m * ranks + r`` is micro-batch m of rank r."""

    micro_batches: tuple[MicroBatch, ...]
    epoch: int
    """whole passes over the data before it, repeats included"""

    @property
    def weight(self) -> float:
        """The mean weight of its micro-batches. The logged loss is the mean of the weighted losses, divided by it."""
        return math.fsum(micro.weight for micro in self.micro_batches) / len(self.micro_batches)

    @property
    def shapes(self) -> dict[str, int]:
        """Number of samples by shape, as frames x height x width."""
        counts: Counter[str] = Counter()
        for micro in self.micro_batches:
            counts[micro.bucket.words] += len(micro.samples)
        return dict(counts)

    @property
    def samples(self) -> tuple[int, ...]:
        """The indices of all entries that it trains on, in the order of the global batch."""
        return tuple(number for micro in self.micro_batches if micro.weight for number in micro.samples)


class _Shape:
    """The samples of one shape and weight, and how they are drawn."""

    def __init__(self, bucket: Bucket, weight: float, members: Sequence[int], repeats: Sequence[int]) -> None:
        self.bucket, self.weight, self.members, self.repeats = bucket, weight, members, repeats
        self.draws = sum(repeats)
        """draws in one epoch"""
        self.distinct = max(1, self.draws // max(repeats))
        """draws in a row in which no sample needs to come twice"""

    def endless(self, seed: int) -> Iterator[int]:
        """Its draws over all epochs, reshuffled for each epoch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from (self.members[place] for place in even_order(self.repeats, generator))


def even_order(repeats: Sequence[int], generator: torch.Generator) -> list[int]:
    """Item numbers in a random order, each as often as its repeats say. In every prefix, the count of each item is
    within one of its share.

    Of n places, the j-th of an item's r turns takes one between floor(j n / r) and ceil((j + 1) n / r). Giving each
    place to the turn with the earliest end always succeeds (Baruah et al., "Proportionate progress", Algorithmica 15,
    1996: the windows of one fully used processor).
    """
    total = sum(repeats)
    ties = torch.randperm(total, generator=generator).tolist()
    turns = sorted(
        (turn * total // times, -(-(turn + 1) * total // times), item)
        for item, times in enumerate(repeats)
        for turn in range(times)
    )
    order: list[int] = []
    ready: list[tuple[int, int, int]] = []
    following = 0
    for place in range(total):
        while following < total and turns[following][0] <= place:
            _, end, item = turns[following]
            heapq.heappush(ready, (end, ties[following], item))
            following += 1
        order.append(heapq.heappop(ready)[2])
    return order


class BatchSampler:
    """Which entries each step trains on, by the rules in the module's docstring.

    ``ranks``: the number of ranks that have samples of their own. Raises a VplanError if there are no entries, or if
    one has a shape that the job does not have.
    """

    def __init__(self, entries: Sequence[CachedSample], job: Job, ranks: int, accumulation: int, seed: int) -> None:
        if not entries:
            raise VplanError("there are no samples to train on", "put clips and their captions in --data")
        self.entries = tuple(entries)
        self.ranks, self.accumulation, self.seed = ranks, accumulation, seed
        self._shapes = _shapes(self.entries)
        self._sizes = [_batch_size(shape.bucket, job) for shape in self._shapes]
        self._windows: dict[tuple[int, Bucket], list[CachedSample]] = {}
        for entry in self.entries:
            if entry.clip is not None:
                self._windows.setdefault((entry.clip, entry.bucket), []).append(entry)
        self._lock = threading.Lock()  # the loader's thread calls it too
        self._draw_as(ranks, accumulation)

    def _draw_as(self, ranks: int, accumulation: int) -> None:
        """Restarts the draws at the first step. ``ranks``, ``accumulation``: those that the run began with."""
        self._began_with = ranks, accumulation
        self._steps, self._next = self._all_steps(), 0
        self._recent: OrderedDict[int, Step] = OrderedDict()

    def step(self, number: int) -> Step:
        """A training step, counted from 0 over all epochs."""
        with self._lock:
            if number not in self._recent and number < self._next:
                self._draw_as(*self._began_with)
            while self._next <= number:
                self._recent[self._next] = next(self._steps)
                self._next += 1
                if len(self._recent) > REMEMBERED:
                    self._recent.popitem(last=False)
            return self._recent[number]

    def micro_batch(self, step: int, micro: int, rank: int) -> MicroBatch:
        """What a rank trains on in one micro-batch of a step, all counted from 0."""
        return self.step(step).micro_batches[micro * self.ranks + rank]

    def _all_steps(self) -> Iterator[Step]:
        """Every step from the first on."""
        began_ranks, began_accumulation = self._began_with
        parts = self.ranks * self.accumulation // (began_ranks * began_accumulation)
        per_epoch, drawn = sum(shape.draws for shape in self._shapes), 0
        units = self._units()
        while True:
            micro_batches: list[MicroBatch] = []
            before = drawn
            for number, samples in islice(units, began_ranks * began_accumulation):
                shape, size = self._shapes[number], self._sizes[number]
                # A run that resumes with smaller micro-batches cuts up those that it began with.
                for offset in range(0, parts * size, size):
                    part, first = samples[offset : offset + size], drawn - before + offset
                    weight = shape.weight * len(part) / size
                    if not part:
                        part, first = samples[:1], drawn - before
                    micro_batches.append(MicroBatch(shape.bucket, part, first, weight))
                drawn += len(samples)
            yield Step(tuple(micro_batches), before // per_epoch)

    def _units(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(number of the shape, entries) of each micro-batch of the run as it began, row by row of all its ranks."""
        ranks, accumulation = self._began_with
        sizes = [size * self.ranks * self.accumulation // (ranks * accumulation) for size in self._sizes]
        fullest = max(Fraction(shape.distinct, size) for shape, size in zip(self._shapes, sizes, strict=True))
        draws = [shape.endless(sample_seed(self.seed, number)) for number, shape in enumerate(self._shapes)]
        # If no shape fills a micro-batch, the fullest one is repeated until it does, and the others as often.
        units = [
            min(size, math.ceil(shape.distinct / min(Fraction(1), fullest)))
            for shape, size in zip(self._shapes, sizes, strict=True)
        ]
        at_once = [min(ranks, max(1, shape.distinct // unit)) for shape, unit in zip(self._shapes, units, strict=True)]
        drawn = [0] * len(self._shapes)
        ties = torch.randperm(len(self._shapes), generator=torch.Generator().manual_seed(self.seed)).tolist()

        def lag(number: int) -> tuple[float, int]:
            # Counts half of what it would take next: a lone sample then comes in the middle of each epoch, not first.
            middle = drawn[number] + at_once[number] * units[number] / 2
            return middle / self._shapes[number].draws, ties[number]

        while True:
            free = ranks
            while free:
                number = min(range(len(self._shapes)), key=lag)
                for _ in range(min(free, at_once[number])):
                    yield number, tuple(islice(draws[number], units[number]))
                    drawn[number] += units[number]
                    free -= 1

    def partner(self, entry: CachedSample, seed: int) -> CachedSample | None:
        """Another window of the same clip and shape, chosen by the sample's seed; None if samples are not windows."""
        if entry.clip is None:
            return None
        # Any window but the entry itself: the offset lies between 1 and the number of windows less one.
        windows = self._windows[entry.clip, entry.bucket]
        return windows[(windows.index(entry) + 1 + sample_seed(seed, "other") % (len(windows) - 1)) % len(windows)]

    def position(self, steps: int) -> dict[str, int | str]:
        """The sampler's position after `steps` steps, for a checkpoint. It has a digest of what decides the order, to
        check a resumed run."""
        samples = [[entry.path.name, entry.text.name, entry.repeats, entry.weight] for entry in self.entries]
        ranks, accumulation = self._began_with
        sizes = [size * self.ranks * self.accumulation for size in self._sizes]
        digest = hashlib.sha256(json.dumps([samples, sizes, self.seed]).encode()).hexdigest()
        return {"steps": steps, "ranks": ranks, "accumulation": accumulation, "order": digest[:32]}

    def resume(self, position: Mapping[str, int | str]) -> int:
        """Continues in the order of a saved position and returns its number of steps. Raises a VplanError if that is
        impossible: the data, the global batch or the seed differs, or micro-batches would have to be joined."""
        steps, began = int(position["steps"]), (int(position.get("ranks", 0)), int(position.get("accumulation", 0)))
        groups, now = began[0] * began[1], self.ranks * self.accumulation
        if groups and now % groups:
            fault = f"a step of {now} micro-batches (GPUs x accumulation) differs from the checkpoint's of {groups}"
            fix = f"train with a multiple of {groups} and the same global batch, or start over with --resume no"
            raise VplanError(fault, fix)
        if groups:
            with self._lock:
                self._draw_as(*began)
        if self.position(steps) != position:
            fault = "the data, how it is encoded, the global batch or the seed differs from the checkpoint's"
            raise VplanError(fault, "go back to the same --data, plan and --seed, or start over with --resume no")
        return steps


def _shapes(entries: Sequence[CachedSample]) -> list[_Shape]:
    """The entries grouped by shape and weight: all samples of a micro-batch have the same."""
    members: dict[tuple[Bucket, float], list[int]] = {}
    for number, entry in enumerate(entries):
        members.setdefault((entry.bucket, entry.weight), []).append(number)
    return [
        _Shape(bucket, weight, numbers, [entries[number].repeats for number in numbers])
        for (bucket, weight), numbers in members.items()
    ]


def _batch_size(bucket: Bucket, job: Job) -> int:
    """The job's batch size for a shape, whatever batch size it was cached for. Raises a VplanError for a shape that the
    job does not have: its memory was not planned for."""
    for shape in job.shapes:
        if (shape.frames, shape.height, shape.width) == (bucket.frames, bucket.height, bucket.width):
            assert shape.batch_size is not None
            return shape.batch_size
    fault = f"cached samples of {bucket.words}, a shape that the plan does not have"
    raise VplanError(fault, "plan with that shape as one of its buckets, or pass the clips themselves: --data DIR")
