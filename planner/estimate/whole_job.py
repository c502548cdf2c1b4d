"""Time, energy and cost of a whole job, from encoding the first clip to the last checkpoint.

Everything is a range from the usual case to the longest, as for a step (`planner.estimate.roofline`). Not included, as
docs/suggest.md says: starting processes, reading weights from a disk, and decoding video files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from planner.catalog.components import calls, samples_per_call
from planner.catalog.shapes import grid
from planner.errors import VplanError
from planner.estimate.estimate import Layout, run_seconds
from planner.estimate.roofline import DISK_BYTES_PER_SECOND, Span, forward_seconds, host_rate
from planner.estimate.work import attention_of, component_work, work_of
from planner.layout.encoders_vae.component_pass import ComponentPass, decoder, encoders
from planner.layout.phases import validation_grid, weights_on_gpu
from planner.layout.pipeline import lay_out
from planner.layout.run import Facts, Run, main_piece
from planner.spec.configuration import Configuration
from planner.spec.job import Bucket
from planner.spec.plan import Estimate

NOTHING = Span(0.0, 0.0)

HOUR, KWH = 3600.0, 3.6e6
"""An hour in seconds, a kilowatt hour in joules."""


class ShapeCount(NamedTuple):
    """The number of samples trained at one shape."""

    encoded: int
    """distinct samples, each encoded once before training"""
    draws: int
    """in one epoch, including repeats"""
    most: int = 1
    """the most repeats of any sample; repeats never share a micro-batch"""


class JobLength(NamedTuple):
    """The length of a job, and how often it validates and saves. Exactly one of ``steps`` and ``epochs`` is set."""

    steps: int | None = None
    epochs: float | None = None
    """passes over the data; needs ``data``"""
    data: Mapping[Bucket, ShapeCount] | None = None
    checkpoint_every: int = 50
    validate_every: int | None = None
    """steps; None: at the end only"""
    validation_steps: int | None = None
    """denoising steps of a sample; None: the pipeline's default"""


class JobPart(NamedTuple):
    """A part of a job: how often it is done, and its total seconds."""

    number: int
    seconds: Span

    def to_json(self) -> dict[str, float]:
        """As in `--json`."""
        return {"count": self.number, "seconds": self.seconds.low, "seconds_high": self.seconds.high}


class WholeJob(NamedTuple):
    """Time, energy and cost of a whole job."""

    steps: int
    epochs: float | None
    """None if the data is unknown"""
    parts: Mapping[str, JobPart]
    """encoding, training, samples, checkpoints; only training for other trainers"""
    gpus: int
    power_watts: float
    """of all GPUs, at their power limits"""
    price: float | None = None
    """of one GPU for an hour"""
    sample_seconds: Span | None = None
    """of encoding one sample on one GPU, if the number of samples is unknown"""

    @property
    def is_steps_alone(self) -> bool:
        """Whether only the steps are counted, as for other trainers."""
        return self.parts.keys() == {"training"}

    @property
    def hours(self) -> Span:
        """Hours of the whole job."""
        whole = NOTHING
        for part in self.parts.values():
            whole = whole.plus(part.seconds)
        return whole.times(1 / HOUR)

    @property
    def kwh(self) -> Span:
        """Energy of the GPUs, each at its power limit all the time."""
        return self.hours.times(self.power_watts * HOUR / KWH)

    @property
    def money(self) -> Span | None:
        """Cost in the currency of the price; None without a price."""
        return None if self.price is None else self.hours.times(self.gpus * self.price)

    def to_json(self) -> dict[str, Any]:
        """As in `--json`."""
        hours, kwh, money, sample = self.hours, self.kwh, self.money, self.sample_seconds
        return {
            "steps": self.steps,
            "epochs": self.epochs,
            "hours": hours.low,
            "hours_high": hours.high,
            "kwh": kwh.low,
            "kwh_high": kwh.high,
            "power_watts": self.power_watts,
            "price": self.price,
            "money": money.low if money else None,
            "money_high": money.high if money else None,
            "encoding_seconds_per_sample": sample.low if sample else None,
            "parts": {name: part.to_json() for name, part in self.parts.items()},
        }


def whole_job(
    estimate: Estimate, facts: Facts, length: JobLength, trainer: str = "vplan", layout: Layout = lay_out
) -> WholeJob:
    """The whole of a job whose step was estimated; for other trainers its steps only. ``facts``: those of the estimate;
    ``layout``: as for `estimate`. Raises a VplanError for a card without known seconds."""
    if not estimate.timed:
        fault = f"no seconds are known of {facts.gpu.title}, so no hours either"
        raise VplanError(fault, "leave out --steps, --epochs and --data")
    configuration, machine = estimate.configuration, estimate.machine
    job = configuration.job
    runs = {shape: layout(configuration, facts, grid(facts.model, job, shape), trainer) for shape in job.shapes}
    steps, epochs, shares = _step_count(configuration, length)
    per_step = _step(estimate, runs, shares)
    training, watts = JobPart(steps, per_step.times(steps)), machine.world * facts.gpu.power_watts
    if trainer != "vplan":  # encoding, sampling and saving of other trainers are not timed
        return WholeJob(steps, epochs, {"training": training}, machine.world, watts)
    per_sample = {shape: _encoding(run) for shape, run in runs.items()}
    encoded, count = NOTHING, 0
    for shape, found in (length.data or {}).items():
        count += found.encoded
        encoded = encoded.plus(per_sample[shape].times(math.ceil(found.encoded / machine.world)))
    rounds = 0 if configuration.strategy.validation_mode == "off" else _times(steps, length.validate_every or steps)
    made = _sample(next(iter(runs.values())), length) if rounds else NOTHING
    saves = _times(steps, length.checkpoint_every)
    usual = _checkpoint(estimate, facts, min(length.checkpoint_every, steps) * per_step.low)
    parts = {
        "encoding": JobPart(count, encoded),
        "training": training,
        "samples": JobPart(rounds, made.times(rounds)),
        "checkpoints": JobPart(saves, usual.times(saves)),
    }
    unknown = per_sample[max(runs, key=lambda shape: shape.pixels)] if length.data is None else None
    return WholeJob(steps, epochs, parts, machine.world, watts, sample_seconds=unknown)


def _times(steps: int, every: int) -> int:
    """How often something happens that is done ``every`` so many steps and at the end."""
    return -(-steps // every)


class _StepCount(NamedTuple):
    """How long a job trains; shares and epochs are None if the data is unknown."""

    steps: int
    epochs: float | None
    shares: dict[Bucket, float] | None
    """of the micro-batches, by shape"""


def _step_count(configuration: Configuration, length: JobLength) -> _StepCount:
    """The optimizer steps of a job and what they are of, as `trainers.data.sampler` draws its samples."""
    strategy = configuration.strategy
    ranks = configuration.machine.world // strategy.context_parallel
    if length.data is None:
        assert length.steps is not None
        return _StepCount(length.steps, None, None)
    counts = {shape: found.draws / _micro_batch(shape, found) for shape, found in length.data.items()}
    steps_per_epoch = sum(counts.values()) / (ranks * strategy.gradient_accumulation)
    if length.steps is not None:
        steps, epochs = length.steps, length.steps / steps_per_epoch
    else:
        assert length.epochs is not None
        steps, epochs = max(1, math.ceil(length.epochs * steps_per_epoch)), length.epochs
    return _StepCount(steps, epochs, {shape: count / sum(counts.values()) for shape, count in counts.items()})


def _micro_batch(shape: Bucket, count: ShapeCount) -> int:
    """Samples in a micro-batch. No sample appears twice in one, so it is smaller for a shape with fewer samples."""
    return min(shape.batch_size or 1, max(1, count.draws // count.most))


def _step(estimate: Estimate, runs: Mapping[Bucket, Run], shares: Mapping[Bucket, float] | None) -> Span:
    """Mean seconds of a step over the shapes; if their shares are unknown, from the fastest shape's to the slowest's.
    The estimate is of the slowest shape and may include a measurement, so the others are scaled by the same ratio."""
    assert estimate.step_seconds_high is not None
    told = Span(estimate.step_seconds, estimate.step_seconds_high)
    if len(runs) == 1:
        return told
    seconds = {shape: run_seconds(run) for shape, run in runs.items()}
    slowest = Span(max(low for low, _ in seconds.values()), max(high for _, high in seconds.values()))
    low, high = told.low / slowest.low, told.high / slowest.high
    if shares is None:
        return Span(low * min(usual for usual, _ in seconds.values()), told.high)
    mean = NOTHING
    for shape, share in shares.items():
        mean = mean.plus(Span(low * seconds[shape][0], high * seconds[shape][1]).times(share))
    return mean


# ---- everything except the steps


def _pass_seconds(run: Run, passes: Sequence[ComponentPass]) -> Span:
    """Total seconds of passes of encoders or decoders."""
    whole = NOTHING
    for entry in passes:
        work = component_work(entry)
        whole = whole.plus(forward_seconds(run.configuration, work, run.facts.gpu, attention_of(run)))
    return whole


def _encoding(run: Run) -> Span:
    """Seconds of encoding one sample before training. For a model conditioned on frames these are encoded too: a single
    frame (CogVideoX) or a whole clip (Wan), hence the range."""
    cached = encoders(run, "cached", 1)
    once = _pass_seconds(run, cached)
    model = run.facts.model
    if model.config.get("in_channels", 0) > model.vae.latent_channels:
        again = _pass_seconds(run, [entry for entry in cached if entry.piece == "encode" and _is_vae(run, entry)])
        return Span(once.low, once.high + again.high)
    return once


def _is_vae(run: Run, entry: ComponentPass) -> bool:
    return entry.name == run.facts.model.vae.folder


def _sample(run: Run, length: JobLength) -> Span:
    """Seconds of one validation sample: the model's calls at every noise level, then the VAE. Weights may move to host
    RAM and back to make room for the VAE; with group offload they are fetched for each call."""
    facts, job, strategy, model = run.facts, run.job, run.strategy, run.facts.model
    assert facts.sample is not None
    shape = {**validation_grid(job, model), "B": samples_per_call(model, job.guided)}
    work = work_of(facts.sample, main_piece(facts.sample), shape)
    weights = run.total_bytes(weights_on_gpu(run))
    grouped = strategy.group_offload != "none"
    call = forward_seconds(run.configuration, work, facts.gpu, attention_of(run), weights if grouped else 0)
    levels = length.validation_steps or model.traits.denoising_steps
    decoding = _pass_seconds(run, [decoder(run, validation_grid(job, model), 1)])
    moved = 2 * weights if strategy.validation_mode == "offload" and not grouped else 0
    moved += sum(entry.weight_bytes for entry in encoders(run, "cached", 1) if _is_vae(run, entry))  # for its turn
    waits = moved / host_rate(facts.gpu, run.machine)
    whole = call.times(levels * calls(model, job.guided)).plus(decoding)
    return whole.plus(Span(waits, waits))


def _checkpoint(estimate: Estimate, facts: Facts, between: float) -> Span:
    """Seconds that training waits for one checkpoint: for the copy to host RAM, and for the previous one if writing it
    takes longer than the ``between`` seconds between two. The upper bound waits for all of the writing."""
    copied = estimate.disk_bytes / host_rate(facts.gpu, estimate.machine)
    written = estimate.disk_bytes / DISK_BYTES_PER_SECOND
    return Span(copied + max(0.0, written - between), copied + written)
