"""From cached samples to batches: which sample comes when, on which rank, and the files stacked into one batch.

The global batch of a step depends on the seed and the step alone, never on how many ranks share it, so a run can be
split, killed and taken up again without a sample being seen twice or left out. Nothing is kept between steps: the
position is the number of steps that are done.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.spec.job import Bucket, Job
from planner.units import plural
from trainers.families.common.base import Family
from trainers.families.common.random_draws import SEEDS, sample_seed
from trainers.step.step import Batch

SMALL_BYTES = 1 << 18
"""Up to so much a file is read: mapping it takes longer, three times as long for a few KiB, and holds up the step's
own Python meanwhile. Beyond, what is read is copied twice."""

CACHED_ORDERS = 2
"""Epochs whose order is remembered: the one that runs and the next."""


class CachedSample(NamedTuple):
    """One sample as caching left it: two safetensors files that together hold `Family.batch` without its first axis."""

    path: Path
    """latents and what else the clip gives"""
    text: Path
    """prompt embeddings"""
    bucket: Bucket
    clip: int | None = None
    """number of the clip that it is a window of, where a model takes another one beside it"""


def with_partner(entries: Iterable[CachedSample]) -> list[CachedSample]:
    """The entries that have another window of the same clip and shape among them."""
    listed = list(entries)
    count = Counter((entry.clip, entry.bucket) for entry in listed)
    return [entry for entry in listed if count[entry.clip, entry.bucket] > 1]


def write_entries(path: Path, entries: Iterable[CachedSample]) -> None:
    """Lists samples in a file of JSON lines, atomically; the paths of files below its folder are relative to it."""
    root = path.parent.absolute()

    def portable(file: Path) -> str:
        absolute = file.absolute()
        return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(absolute)

    lines = [
        {"path": portable(entry.path), "text": portable(entry.text), "bucket": entry.bucket.to_json()}
        | ({} if entry.clip is None else {"clip": entry.clip})
        for entry in entries
    ]
    partial = path.with_name(f"{path.name}.part")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    partial.replace(path)


def read_entries(path: Path) -> list[CachedSample]:
    """The samples that `write_entries` listed in a file. Raises a VplanError when it cannot be read."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        root = path.parent
        buckets = [Bucket.read(line["bucket"], path.name) for line in lines]
        return [
            CachedSample(root / line["path"], root / line["text"], bucket, line.get("clip"))
            for line, bucket in zip(lines, buckets, strict=True)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, VplanError):
            raise
        raise VplanError(f"{path} is not a list of cached samples", "remove it; it will be created again") from None


def changes(before: Iterable[CachedSample], now: Iterable[CachedSample]) -> tuple[str, ...]:
    """How many samples a list has that the one before had not, and the other way round, in words; () where they are
    the same."""
    old, new = Counter(_identity(entry) for entry in before), Counter(_identity(entry) for entry in now)
    added, gone = (new - old).total(), (old - new).total()
    words = [f"{plural(added, 'sample')} new"] if added else []
    words += [f"{plural(gone, 'sample')} gone, and not trained on"] if gone else []
    return (f"data or plan changed since the last start: {', '.join(words)}",) if words else ()


def _identity(entry: CachedSample) -> tuple[Path, Path, int, int, int]:
    """What a sample is, whatever batch it comes in."""
    bucket = entry.bucket
    return entry.path.absolute(), entry.text.absolute(), bucket.frames, bucket.height, bucket.width


class Step(NamedTuple):
    """The samples of one optimizer step, all of one shape, in the order of the global batch."""

    bucket: Bucket
    batch_size: int
    """on one rank, in one micro-batch"""
    samples: tuple[int, ...]
    """numbers of entries: micro-batch by micro-batch, rank by rank"""


class BatchSampler:
    """Which entries every step trains on: shuffled anew each epoch, one shape a step.

    What a shape's entries lack of a whole global batch is filled up with its own first ones of that epoch (torch's
    DistributedSampler does so): no entry is left out, however few there are of its shape.
    """

    def __init__(self, entries: Sequence[CachedSample], job: Job, world: int, accumulation: int, seed: int) -> None:
        if not entries:
            raise VplanError("there are no samples to train on", "put clips and their captions in --data")
        self.entries = tuple(entries)
        self.world, self.accumulation, self.seed = world, accumulation, seed
        self._shapes: dict[Bucket, list[int]] = {}
        for number, entry in enumerate(self.entries):
            self._shapes.setdefault(entry.bucket, []).append(number)
        self._windows: dict[tuple[int, Bucket], list[CachedSample]] = {}
        for entry in self.entries:
            if entry.clip is not None:
                self._windows.setdefault((entry.clip, entry.bucket), []).append(entry)
        self._batch_sizes = {bucket: _batch_size(bucket, job) for bucket in self._shapes}
        self.steps_per_epoch = sum(
            -(-len(entries_of_shape) // self._global(bucket)) for bucket, entries_of_shape in self._shapes.items()
        )
        self._order = lru_cache(CACHED_ORDERS)(self._shuffled)

    def _global(self, bucket: Bucket) -> int:
        return self._batch_sizes[bucket] * self.world * self.accumulation

    def step(self, number: int) -> Step:
        """The batch of a training step, counted from 0 over all epochs."""
        epoch, index = divmod(number, self.steps_per_epoch)
        return self._order(epoch)[index]

    def partner(self, entry: CachedSample, seed: int) -> CachedSample | None:
        """The window that goes with one of the same clip, by the seed of the sample; None where clips are whole."""
        if entry.clip is None:
            return None
        # Any window but the entry itself: the offset lies between 1 and the number of windows less one.
        windows = self._windows[entry.clip, entry.bucket]
        return windows[(windows.index(entry) + 1 + sample_seed(seed, "other") % (len(windows) - 1)) % len(windows)]

    def _shuffled(self, epoch: int) -> list[Step]:
        generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch))
        steps = []
        for bucket, of_shape in self._shapes.items():
            size = self._global(bucket)
            order = [of_shape[place] for place in torch.randperm(len(of_shape), generator=generator).tolist()]
            filled = -(-len(order) // size) * size
            order = (order * -(-filled // len(order)))[:filled]
            batch_size = self._batch_sizes[bucket]
            steps += [Step(bucket, batch_size, tuple(order[at : at + size])) for at in range(0, filled, size)]
        return [steps[place] for place in torch.randperm(len(steps), generator=generator).tolist()]

    def position(self, steps: int) -> dict[str, int | str]:
        """The sampler's position after `steps` steps, for a checkpoint, with a digest of the order by which a resumed
        run is checked."""
        file_names = [[entry.path.name, entry.text.name] for entry in self.entries]
        sizes = [self._global(bucket) for bucket in self._shapes]
        digest = hashlib.sha256(json.dumps([file_names, sizes, self.seed]).encode()).hexdigest()
        return {"steps": steps, "epoch": steps // self.steps_per_epoch, "order": digest[:32]}

    def resume(self, position: dict[str, int | str]) -> int:
        """The steps that were done when a position was kept; a VplanError when the order is another one now."""
        steps = int(position["steps"])
        if self.position(steps) != position:
            fault = "the data, how it is encoded, the global batch or the seed differs from the checkpoint's"
            raise VplanError(fault, "go back to the same --data, plan and --seed, or start over with --resume no")
        return steps


def _batch_size(bucket: Bucket, job: Job) -> int:
    """As the job says of that shape, whatever batches caching was for. Raises a VplanError for a shape that the job
    does not have: what was planned says nothing of its memory."""
    for shape in job.shapes:
        if (shape.frames, shape.height, shape.width) == (bucket.frames, bucket.height, bucket.width):
            assert shape.batch_size is not None
            return shape.batch_size
    fault = f"cached samples of {bucket.frames}x{bucket.height}x{bucket.width}, a shape that the plan does not have"
    raise VplanError(fault, "plan with that shape as one of its buckets, or pass the clips themselves: --data DIR")


class Stacker:
    """Turns entries of one shape into a batch on the CPU, checked against what the family says a batch holds."""

    def __init__(self, profile: ModelProfile, job: Job, kind: Family, dtype: torch.dtype) -> None:
        self.profile, self.job, self.kind, self.dtype = profile, job, kind, dtype
        self._templates: dict[Bucket, Batch] = {}

    def batch(self, entries: Sequence[CachedSample], partners: Sequence[CachedSample | None] = ()) -> Batch:
        """The batch of some entries of one shape, put together as the family does it. ``partners``: for each entry
        another window of its clip, or None."""
        template = self.template(entries[0].bucket)
        samples = [self._sample(entry, template) for entry in entries]
        for number, partner in enumerate(partners):
            if partner is not None:
                samples[number] = self.kind.with_window(samples[number], self._sample(partner, template))
        return self.kind.collate(samples)

    def template(self, bucket: Bucket) -> Batch:
        """One sample as meta tensors: the shapes and dtypes that a cached sample must have (prompts may be shorter)."""
        if bucket not in self._templates:
            grid = {**lookup.grid(self.profile, self.job, bucket), "B": 1}
            self._templates[bucket] = self.kind.cached_tensors(self.kind.batch(grid, "meta", self.dtype))
        return self._templates[bucket]

    def _sample(self, entry: CachedSample, template: Batch) -> Batch:
        tensors = {**_read(entry.path), **_read(entry.text)}
        fix = "remove the cache folder; it will be created again"
        if missing := template.keys() - tensors.keys():
            raise VplanError(f"{entry.path.name} and {entry.text.name} have no {', '.join(sorted(missing))}", fix)
        for name, expected in template.items():
            shape, ragged = tensors[name].shape, name in self.kind.ragged
            fits = shape == expected.shape or (
                ragged
                and len(shape) == expected.ndim
                and all(a <= b for a, b in zip(shape, expected.shape, strict=True))
            )
            if not fits:
                where = entry.text if name in _read(entry.text) else entry.path
                fault = f"{name} in {where.name} has the shape {tuple(shape)}, not {tuple(expected.shape)}"
                raise VplanError(fault, fix)
        return {name: tensors[name].to(expected.dtype) for name, expected in template.items()}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load(path.read_bytes()) if path.stat().st_size <= SMALL_BYTES else load_file(path)
    except (OSError, SafetensorError, KeyError) as error:  # safetensors' own table may lack a file's format
        if getattr(error, "errno", None) == errno.ENOMEM or "os error 12" in str(error):
            raise MemoryError(f"no memory to read {path.name}") from None
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged"
        raise VplanError(f"cannot read {path}: {reason}", "remove it; it will be created again") from None


class Loader:
    """The micro-batches of one rank on its device; the next one is read while this one trains."""

    def __init__(
        self, sampler: BatchSampler, stacker: Stacker, rank: int, device: torch.device, last_step: int
    ) -> None:
        self.sampler, self.stacker, self.rank, self.device, self.last_step = sampler, stacker, rank, device, last_step
        self._thread = ThreadPoolExecutor(1, "vplan-loader")
        self._ahead: dict[tuple[int, int], Future[Batch]] = {}

    def batches(self, step: int) -> Iterator[Batch]:
        """The micro-batches of a step, counted from 0, each with the seeds of its samples."""
        for micro in range(self.sampler.accumulation):
            ready = self._ahead.pop((step, micro), None) or self._thread.submit(self._load, step, micro)
            following = (step, micro + 1) if micro + 1 < self.sampler.accumulation else (step + 1, 0)
            if following[0] < self.last_step:
                self._ahead[following] = self._thread.submit(self._load, *following)
            batch = ready.result()
            moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items() if name != SEEDS}
            yield {**moved, SEEDS: batch[SEEDS]}

    def close(self) -> None:
        """Stops the loading thread; batches that were requested are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _load(self, step: int, micro: int) -> Batch:
        plan = self.sampler.step(step)
        first = (micro * self.sampler.world + self.rank) * plan.batch_size
        places = range(first, first + plan.batch_size)
        seeds = [sample_seed(self.sampler.seed, step, place) for place in places]
        entries = [self.sampler.entries[plan.samples[place]] for place in places]
        partners = [self.sampler.partner(entry, seed) for entry, seed in zip(entries, seeds, strict=True)]
        batch = self.stacker.batch(entries, partners)
        # Only from pinned memory is the copy to the GPU (`non_blocking` above) asynchronous.
        if self.device.type == "cuda":
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return {**batch, SEEDS: torch.tensor(seeds, dtype=torch.int64)}
