"""From cached samples to batches: stacks the files of a micro-batch, and reads them ahead of the step."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.spec.job import Bucket, Job
from trainers.data.entries import CachedSample
from trainers.data.sampler import BatchSampler
from trainers.data.store import CHECKSUM, checksum
from trainers.families.common.base import Family
from trainers.families.common.random_draws import SEEDS, sample_seed
from trainers.step.step import WEIGHT, Batch

SMALL_BYTES = 1 << 18
"""Largest file that is read rather than mapped. Mapping a small file takes longer, three times as long for a few KiB,
and holds up the step's own Python meanwhile. Reading a large one would copy it twice."""


class Stacker:
    """Turns entries of one shape into a batch on the CPU, checked against what the family says a batch holds."""

    def __init__(
        self, profile: ModelProfile, job: Job, family: Family, dtype: torch.dtype, own_cache: Path | None = None
    ) -> None:
        """``own_cache``: folder whose missing files the next start makes again; a damaged one in it is moved aside."""
        self.profile, self.job, self.family, self.dtype, self.own_cache = profile, job, family, dtype, own_cache
        self._templates: dict[Bucket, Batch] = {}

    def batch(self, entries: Sequence[CachedSample], partners: Sequence[CachedSample | None] = ()) -> Batch:
        """The batch of some entries of one shape, collated by the family. ``partners``: for each entry another window
        of its clip, or None."""
        template = self.template(entries[0].bucket)
        samples = [self._sample(entry, template) for entry in entries]
        for number, partner in enumerate(partners):
            if partner is not None:
                samples[number] = self.family.with_window(samples[number], self._sample(partner, template))
        return self.family.collate(samples)

    def template(self, bucket: Bucket) -> Batch:
        """One sample as meta tensors: the shapes and dtypes that a cached sample must have (prompts may be shorter)."""
        if bucket not in self._templates:
            grid = {**lookup.sample_grid(self.profile, self.job, bucket), "B": 1}
            self._templates[bucket] = self.family.cached_tensors(self.family.batch(grid, "meta", self.dtype))
        return self._templates[bucket]

    def _sample(self, entry: CachedSample, template: Batch) -> Batch:
        tensors = {**self._read(entry.path), **self._read(entry.text)}
        fix = "remove the cache folder; it will be created again"
        if missing := template.keys() - tensors.keys():
            raise VplanError(f"{entry.path.name} and {entry.text.name} have no {', '.join(sorted(missing))}", fix)
        for name, expected in template.items():
            shape, ragged = tensors[name].shape, name in self.family.ragged
            fits = shape == expected.shape or (
                ragged
                and len(shape) == expected.ndim
                and all(a <= b for a, b in zip(shape, expected.shape, strict=True))
            )
            if not fits:
                where = entry.text if name in self._read(entry.text) else entry.path
                fault = f"{name} in {where.name} has the shape {tuple(shape)}, not {tuple(expected.shape)}"
                raise VplanError(fault, fix)
        return {name: tensors[name].to(expected.dtype) for name, expected in template.items()}

    def _read(self, path: Path) -> dict[str, Tensor]:
        try:
            return _whole(path)
        except (OSError, SafetensorError, KeyError, ValueError) as error:  # KeyError: a dtype unknown to safetensors
            if getattr(error, "errno", None) == errno.ENOMEM or "os error 12" in str(error):
                raise MemoryError(f"no memory to read {path.name}") from None
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is damaged"
            fix = "restore the file, or encode its data again: `vplan train --data` with the clips themselves"
            if self.own_cache and path.is_relative_to(self.own_cache):
                with contextlib.suppress(OSError):  # gone, or another rank was first
                    path.replace(path.with_suffix(".damaged"))
                fix = "run the same command again: it is encoded again, and training goes on from its last checkpoint"
            raise VplanError(f"cannot read {path}: {reason}", fix) from None


def _whole(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Raises a ValueError if they do not match its checksum, if it has one."""
    if path.stat().st_size <= SMALL_BYTES:
        raw = path.read_bytes()
        tensors = load(raw)
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        metadata = header.get("__metadata__") or {}
    else:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            metadata = file.metadata() or {}
    if metadata.get(CHECKSUM, None) not in (None, checksum(tensors)):
        raise ValueError(f"{path.name} is not what was written")
    return tensors


class Loader:
    """The micro-batches of one rank on its device; the next one is read while this one trains."""

    def __init__(
        self,
        sampler: BatchSampler,
        stacker: Stacker,
        rank: int,
        device: torch.device,
        last_step: int,
        caption_dropout: float = 0.0,
    ) -> None:
        """``caption_dropout``: the share of samples that get the empty caption. Raises a VplanError if it is not 0 and
        the list of samples does not name that caption."""
        self.sampler, self.stacker, self.rank, self.device, self.last_step = sampler, stacker, rank, device, last_step
        self.caption_dropout = caption_dropout
        if caption_dropout and any(entry.empty is None for entry in sampler.entries):
            fault = "--caption-dropout, but the list of cached samples names no empty caption"
            raise VplanError(fault, "pass the clips themselves as --data, or leave it out")
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
            on_host = {name: batch.pop(name) for name in (SEEDS, WEIGHT)}
            yield {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()} | on_host

    def shape(self, step: int, micro: int) -> Bucket:
        """The shape of a micro-batch."""
        return self.sampler.micro_batch(step, micro, self.rank).bucket

    def close(self) -> None:
        """Stops the loading thread; batches that were requested are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _load(self, step: int, micro: int) -> Batch:
        one = self.sampler.micro_batch(step, micro, self.rank)
        seeds = [sample_seed(self.sampler.seed, step, one.first + place) for place in range(len(one.samples))]
        entries = [
            self._with_caption(self.sampler.entries[number], seed)
            for number, seed in zip(one.samples, seeds, strict=True)
        ]
        partners = [self.sampler.partner(entry, seed) for entry, seed in zip(entries, seeds, strict=True)]
        batch = self.stacker.batch(entries, partners)
        # Only from pinned memory is the copy to the GPU (`non_blocking` above) asynchronous.
        if self.device.type == "cuda":
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return {**batch, SEEDS: torch.tensor(seeds, dtype=torch.int64), WEIGHT: torch.tensor(one.weight)}

    def _with_caption(self, entry: CachedSample, seed: int) -> CachedSample:
        """The sample, with probability `caption_dropout` with the empty caption instead of its own. The choice is drawn
        from the sample's seed, so it is the same on any rank and after a resume."""
        if sample_seed(seed, "caption") / 2**63 >= self.caption_dropout:
            return entry
        assert entry.empty is not None
        return entry._replace(text=entry.empty)
