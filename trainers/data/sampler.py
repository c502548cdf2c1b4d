"""Which samples every rank trains on in every step, as often as their repeats say.

A micro-batch is what one rank trains on at once: samples of one shape. A step takes the next micro-batches of all ranks
from a list without end, so their shapes may differ, on one rank and between ranks: the gradients that ranks exchange
have the same form whatever the shape is. Ranks run the same shape side by side wherever a shape has samples enough.

The list obeys three laws:

- Within a shape, after any number of draws, a sample was drawn its share of them within one: ``draws * repeats / (the
  sum of all repeats)``.
- A shape that has been gone through least often is drawn next, and never so much of it at once that one of its samples
  comes twice. So shapes are gone through at the same pace, within half a pass over the most repeated sample of each;
  with no repeats, after whole epochs every sample was drawn as often as there were epochs, within one.
- A shape with fewer samples than a micro-batch has smaller ones, whose loss weighs less by as much.

It depends on the seed, the samples, the batch sizes and the number of ranks that the run began with. A run that goes
on with other ranks, or with its micro-batches cut in parts, keeps that list, as long as the global batch is the same.
Nothing but the number of steps and those sizes has to be kept.
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
"""Steps that can be asked for again: the one that runs and those read ahead."""


class MicroBatch(NamedTuple):
    """What one rank trains on at once."""

    bucket: Bucket
    samples: tuple[int, ...]
    """numbers of entries"""
    first: int
    """place of the first one in the step's global batch, by which noise is seeded"""
    weight: float
    """factor of its mean loss: samples of a whole micro-batch, times the weight of its source; 0 for a repetition that
    only keeps a rank in step with the others"""


class Step(NamedTuple):
    """The micro-batches of one optimizer step: number ``m * ranks + r`` is micro-batch m of rank r."""

    micro_batches: tuple[MicroBatch, ...]
    epoch: int
    """whole passes over the data before it, repeats included"""

    @property
    def weight(self) -> float:
        """The mean weight of its micro-batches: what the mean of weighted losses is divided by to be logged."""
        return math.fsum(micro.weight for micro in self.micro_batches) / len(self.micro_batches)

    @property
    def shapes(self) -> dict[str, int]:
        """Samples by shape, as frames x height x width."""
        counts: Counter[str] = Counter()
        for micro in self.micro_batches:
            counts[micro.bucket.words] += len(micro.samples)
        return dict(counts)

    @property
    def samples(self) -> tuple[int, ...]:
        """The numbers of all entries that it trains on, in the order of the global batch."""
        return tuple(number for micro in self.micro_batches if micro.weight for number in micro.samples)


class _Shape:
    """The samples of one shape and weight, and how they are drawn."""

    def __init__(self, bucket: Bucket, weight: float, members: Sequence[int], repeats: Sequence[int]) -> None:
        self.bucket, self.weight, self.members, self.repeats = bucket, weight, members, repeats
        self.draws = sum(repeats)
        """in one epoch"""
        self.distinct = max(1, self.draws // max(repeats))
        """draws in a row in which no sample need come twice"""

    def endless(self, seed: int) -> Iterator[int]:
        """Its draws over all epochs, each shuffled anew."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from (self.members[place] for place in even_order(self.repeats, generator))


def even_order(repeats: Sequence[int], generator: torch.Generator) -> list[int]:
    """Numbers of items in a random order, each as often as its repeats say; in any beginning of it an item stands its
    share of times within one.

    The j-th of an item's r turns among n has its place between floor(j n / r) and ceil((j + 1) n / r). To give each
    place to the turn with the earliest end always succeeds (Baruah et al., "Proportionate progress", Algorithmica 15,
    1996: the windows of one processor that is fully used).
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
    """Which entries every step trains on, as the module says.

    ``ranks``: those that have samples of their own. Raises a VplanError for no entries, and for a shape that the job
    does not have.
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
        self._lock = threading.Lock()  # the loader's thread asks too
        self._draw_as(ranks, accumulation)

    def _draw_as(self, ranks: int, accumulation: int) -> None:
        """Draws from the first step on for so many ranks and micro-batches a step: those that the run began with."""
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
                # A run that goes on with smaller micro-batches cuts the ones that it began with.
                for offset in range(0, parts * size, size):
                    part, first = samples[offset : offset + size], drawn - before + offset
                    weight = shape.weight * len(part) / size
                    if not part:
                        part, first = samples[:1], drawn - before
                    micro_batches.append(MicroBatch(shape.bucket, part, first, weight))
                drawn += len(samples)
            yield Step(tuple(micro_batches), before // per_epoch)

    def _units(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(number of the shape, entries) of the micro-batches that the run began with, row by row of all its ranks."""
        ranks, accumulation = self._began_with
        sizes = [size * self.ranks * self.accumulation // (ranks * accumulation) for size in self._sizes]
        fullest = max(Fraction(shape.distinct, size) for shape, size in zip(self._shapes, sizes, strict=True))
        draws = [shape.endless(sample_seed(self.seed, number)) for number, shape in enumerate(self._shapes)]
        # Where no shape fills a micro-batch, the fullest one is repeated until it does, and the others as often.
        units = [
            min(size, math.ceil(shape.distinct / min(Fraction(1), fullest)))
            for shape, size in zip(self._shapes, sizes, strict=True)
        ]
        at_once = [min(ranks, max(1, shape.distinct // unit)) for shape, unit in zip(self._shapes, units, strict=True)]
        drawn = [0] * len(self._shapes)
        ties = torch.randperm(len(self._shapes), generator=torch.Generator().manual_seed(self.seed)).tolist()

        def lag(number: int) -> tuple[float, int]:
            # Half of what it takes at once ahead: a lone sample comes in the middle of each epoch, not before all.
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
        """The window that goes with one of the same clip, by the seed of the sample; None where clips are whole."""
        if entry.clip is None:
            return None
        # Any window but the entry itself: the offset lies between 1 and the number of windows less one.
        windows = self._windows[entry.clip, entry.bucket]
        return windows[(windows.index(entry) + 1 + sample_seed(seed, "other") % (len(windows) - 1)) % len(windows)]

    def position(self, steps: int) -> dict[str, int | str]:
        """The sampler's position after `steps` steps, for a checkpoint, with a digest of the order by which a resumed
        run is checked."""
        samples = [[entry.path.name, entry.text.name, entry.repeats, entry.weight] for entry in self.entries]
        ranks, accumulation = self._began_with
        sizes = [size * self.ranks * self.accumulation for size in self._sizes]
        digest = hashlib.sha256(json.dumps([samples, sizes, self.seed]).encode()).hexdigest()
        return {"steps": steps, "ranks": ranks, "accumulation": accumulation, "order": digest[:32]}

    def resume(self, position: Mapping[str, int | str]) -> int:
        """The steps that were done when a position was kept; goes on in its order. A VplanError when that is not
        possible: the data, the global batch or the seed is another one now."""
        steps, began = int(position["steps"]), (int(position.get("ranks", 0)), int(position.get("accumulation", 0)))
        groups = began[0] * began[1]
        if groups and self.ranks * self.accumulation % groups == 0:
            with self._lock:
                self._draw_as(*began)
        if self.position(steps) != position:
            fault = "the data, how it is encoded, the global batch or the seed differs from the checkpoint's"
            raise VplanError(fault, "go back to the same --data, plan and --seed, or start over with --resume no")
        return steps


def _shapes(entries: Sequence[CachedSample]) -> list[_Shape]:
    """The entries by shape and by weight: a micro-batch has one of each."""
    members: dict[tuple[Bucket, float], list[int]] = {}
    for number, entry in enumerate(entries):
        members.setdefault((entry.bucket, entry.weight), []).append(number)
    return [
        _Shape(bucket, weight, numbers, [entries[number].repeats for number in numbers])
        for (bucket, weight), numbers in members.items()
    ]


def _batch_size(bucket: Bucket, job: Job) -> int:
    """As the job says of that shape, whatever batches caching was for. Raises a VplanError for a shape that the job
    does not have: what was planned says nothing of its memory."""
    for shape in job.shapes:
        if (shape.frames, shape.height, shape.width) == (bucket.frames, bucket.height, bucket.width):
            assert shape.batch_size is not None
            return shape.batch_size
    fault = f"cached samples of {bucket.words}, a shape that the plan does not have"
    raise VplanError(fault, "plan with that shape as one of its buckets, or pass the clips themselves: --data DIR")
