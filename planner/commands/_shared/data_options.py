"""Options for the training data and the length of the job, shared by the verbs that use them."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from planner.catalog import card_lookup, lookup
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import job_for, parse_resolution
from planner.commands import USAGE
from planner.commands._shared.request import SHAPE, TypedQuestion
from planner.commands._shared.verb import FiniteRange, Function
from planner.errors import VplanError, quoted
from planner.estimate.bucket_batches import EvenedPlan, with_batch_sizes
from planner.estimate.estimate import Layout, assess
from planner.estimate.whole_job import JobLength, ShapeCount, WholeJob, whole_job
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Facts
from planner.spec.job import Bucket, Job
from planner.spec.plan import Estimate
from planner.terminal import echo

if TYPE_CHECKING:
    from planner.dataset.buckets import Sample
    from planner.dataset.scan import Dataset
    from planner.dataset.sources import DataSource
    from planner.search.suggester import Suggester

Command = TypeVar("Command", bound=Callable[..., Any])

FRAME_SAMPLING = ("first", "even", "random", "windows")
"""Values of a source's `frames`, repeated here because importing its record would slow down verbs without --data."""

SETTINGS = ("trigger", "caption", "repeats", "frame_sampling", "fps", "flip")
"""Options that are fields of a source. Elsewhere `frames` is the plan's length, so this option has another name."""


def data_options(*, required: bool, what: str | None = None) -> Callable[[Command], Command]:
    """Adds --data and the settings of a folder to a command. ``what``: help text of --data, to replace the default."""
    folder = "Folder of clips or images with their captions, or a dataset.toml."
    usual = folder if required else f"Also check this data against the plan's shapes: {folder[0].lower()}{folder[1:]}"
    options = [
        click.option(
            "--data",
            required=required,
            metavar="DIR|FILE",
            help=what or usual,
        ),
        click.option("--trigger", metavar="TEXT", help="Put in front of every caption."),
        click.option("--caption", metavar="TEXT", help="One caption for all files."),
        click.option(
            "--repeats", type=click.IntRange(1, 10**5), metavar="N", help="Times each sample comes in one epoch."
        ),
        click.option(
            "--frame-sampling",
            type=click.Choice(FRAME_SAMPLING),
            help="Which frames of a video are used: its first ones, spread evenly, from random places (as many as "
            "--repeats says), or all in consecutive clips.  [default: first]",
        ),
        click.option(
            "--fps",
            type=click.FloatRange(0, 1000),
            metavar="X",
            help="Frames per second to sample at; 0: every frame.  [default: the model's rate]",
        ),
        click.option("--flip", is_flag=True, help="Also train each sample mirrored."),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def typed_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The typed settings of a folder, by field of `DataSource`."""
    typed = {name: options[name] for name in SETTINGS if options[name] not in (None, False)}
    return {"frames" if name == "frame_sampling" else name: value for name, value in typed.items()}


# ---- whole jobs

_SKIPPED = "vplan.skipped"
"""Key in click's context: the skipped clips that this command has reported."""

OPTIONS = ("steps", "epochs", "price", "checkpoint_every", "validate_every", "validation_steps")
LENGTHS = "--steps or --epochs"

Counts = Mapping[Bucket, ShapeCount]


def whole_job_options(function: Function) -> Function:
    """Adds the options for the job's length, its data and the price of an hour; the command gets them by name, and
    turns them into an `AskedLength`."""
    several = click.IntRange(1, 10**5)
    options = [
        click.option("--steps", type=click.IntRange(1, 10**7), metavar="N", help="Price so many optimizer steps."),
        click.option("--epochs", type=FiniteRange(0, 10**5, min_open=True), metavar="X", help="Passes over --data."),
        click.option(
            "--price", multiple=True, metavar="X|CARD=X", help="Price of a GPU for an hour; of one card by its name."
        ),
        click.option("--checkpoint-every", type=several, metavar="N", help="Steps between checkpoints.  [default: 50]"),
        click.option(
            "--validate-every", type=several, metavar="N", help="Steps between samples.  [default: at the end]"
        ),
        click.option("--validation-steps", type=click.IntRange(1, 1000), metavar="N", help="Denoising steps a sample."),
        click.option("--skip-bad", is_flag=True, help="Leave unusable clips of --data out instead of refusing them."),
    ]
    for option in reversed(options):
        function = option(function)
    return data_options(required=False, what="Count the samples of a folder of clips, or of a dataset.toml.")(function)


class AskedLength(NamedTuple):
    """The typed length. The data is read once for each set of shapes."""

    length: JobLength
    prices: Mapping[str, float]
    """by card as typed; the empty name stands for every other card"""
    folders: tuple[DataSource, ...] = ()
    counted: Mapping[tuple[Bucket, ...], Counts] = {}
    """cache: shapes -> what the data has at them"""
    skip_bad: bool = False

    def counting(self, model: ModelProfile, job: Job) -> AskedLength:
        """This length with the data read for a job's shapes."""
        if not self.folders or job.shapes in self.counted:
            return self
        return self._replace(counted={**self.counted, job.shapes: count(self.folders, model, job, self.skip_bad)})

    def of(self, plan: Estimate, facts: Facts, trainer: str = "vplan", layout: Layout = lay_out) -> WholeJob:
        """The whole job of a plan."""
        if plan.job.method == "sample":
            raise VplanError(
                f"{LENGTHS}: a job that only samples has no steps", "leave it out, or train: --method lora"
            )
        data = self.counting(facts.model, plan.job).counted.get(plan.job.shapes)
        found = whole_job(plan, facts, self.length._replace(data=data), trainer, layout)
        return found._replace(price=self.prices.get(plan.machine.gpu, self.prices.get("")))


def asked_length(options: Mapping[str, Any], gpus: Sequence[str] = (), *, proposes: bool = False) -> AskedLength | None:
    """The length in a command's options; None if none was given. ``gpus``: the cards that a price may name;
    ``proposes``: the data is used to propose shapes instead. Raises a VplanError for options that need a length, and
    for contradicting ones."""
    if options["steps"] is None and options["epochs"] is None:
        typed = [name for name in OPTIONS if options[name] not in (None, ()) and not name.startswith("validat")]
        if typed:
            flag = typed[0].replace("_", "-")
            raise VplanError(f"--{flag} is about a whole job", f"say how long it is: {LENGTHS}", USAGE)
        for flag in ("data", "skip_bad") if not proposes else ():
            if options[flag]:
                fault = f"--{flag.replace('_', '-')} has no effect here"
                raise VplanError(fault, f"say how long the job is: {LENGTHS}", USAGE)
        return None
    if options["steps"] is not None and options["epochs"] is not None:
        raise VplanError("both --steps and --epochs say how long it is", "leave one of them out", USAGE)
    if options["epochs"] is not None and options["data"] is None:
        raise VplanError("--epochs needs the data", "pass --data DIR, or --steps N", USAGE)
    length = JobLength(
        steps=options["steps"],
        epochs=options["epochs"],
        checkpoint_every=options["checkpoint_every"] or JobLength().checkpoint_every,
        validate_every=options["validate_every"],
        validation_steps=options["validation_steps"],
    )
    folders = _folders(options) if options["data"] is not None else ()
    return AskedLength(length, _prices(options["price"], gpus), folders, skip_bad=options["skip_bad"])


def asked_steps(steps: int | None, prices: Sequence[str]) -> AskedLength | None:
    """The length of a job for which only steps are counted; None without them."""
    if steps is not None:
        return AskedLength(JobLength(steps=steps), _prices(prices, ()))
    if prices:
        raise VplanError("--price is about a whole job", "say how long it is: --steps", USAGE)
    return None


def refuse_of_ours(options: Mapping[str, Any], trainer: str, proposes: bool) -> None:
    """Raises a VplanError for options about a whole job that only vplan's own trainer supports, or for proposed shapes.
    Steps and prices work with any trainer."""
    typed = [name for name in ("data", *OPTIONS) if name not in ("steps", "price") and options[name] not in (None, ())]
    if typed or proposes:
        flag = "--buckets auto" if proposes else f"--{typed[0].replace('_', '-')}"
        raise VplanError(f"{flag} is about vplan's own trainer, and not {trainer}", "leave it out, or --for", USAGE)


def whole_job_of(length: AskedLength | None, plan: Estimate, trainer: str) -> WholeJob | None:
    """The whole job of an estimate in a trainer, if a length is given and the plan runs."""
    if length is None or plan.verdict == "no":
        return None
    job, (_, card) = plan.job, card_lookup.parse_gpus(plan.machine.gpu)
    return length.of(plan, load_facts(plan.configuration, lookup.model(job.model), card), trainer)


def _prices(texts: Sequence[str], gpus: Sequence[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for text in texts:
        card, equals, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0 <= price < math.inf or (equals and not card):
            raise VplanError(f"--price {quoted(text)} is not a price", "write one as 2.5, or 24GB=0.4")
        if card and card not in gpus:
            raise VplanError(f"--price {quoted(text)} is of no card in this answer", f"use {', '.join(gpus)}")
        if card in prices:
            raise VplanError(f"two prices {'of ' + card if card else 'for every card'}", "leave one of them out", USAGE)
        prices[card] = price
    return prices


def _folders(options: Mapping[str, Any]) -> tuple[DataSource, ...]:
    from planner.dataset.sources import sources

    return sources(Path(options["data"]).expanduser(), typed_settings(options))


def _check_packages() -> None:
    for package in ("av", "PIL", "numpy"):
        if importlib.util.find_spec(package) is None:
            raise VplanError(f"reading clips needs {package}", "install it: pip install 'vplan[train]'")


def with_proposed_shapes(
    asked: TypedQuestion, options: Mapping[str, Any]
) -> tuple[TypedQuestion, Mapping[Bucket, int]]:
    """The question with the shapes of the data if they were requested, and the most samples of each in a micro-batch.
    The shapes have at most the pixels of the typed resolution and the frames of `--frames`, by default the model's
    own."""
    if not asked.wants_shapes or options["data"] is None:
        return asked, {}
    if asked.model is None:
        raise VplanError("--buckets auto needs a single model", "pass --model", USAGE)
    model = lookup.model(asked.model)
    _check_packages()
    from planner.dataset.scan import in_buckets, usable
    from planner.dataset.shape_proposal import propose

    height, width = model.shape.resolutions[0]
    height, width = asked.job.get("height", height), asked.job.get("width", width)
    if asked.resolution:
        height, width = parse_resolution(model, asked.resolution)
    frames = asked.job.get("frames")
    longest = frames if isinstance(frames, int) else model.shape.max_frames
    unshaped = {name: value for name, value in asked.job.items() if name not in SHAPE | {"buckets"}}
    scans = usable(_folders(options), model, job_for(model, unshaped))
    clips = [(clip, source) for source, found in scans for clip in found.clips]
    # Without any usable file there are no shapes; what is wrong with the files is reported below.
    shapes = propose(clips, model, height * width, longest) if clips else ()
    job = job_for(model, {**unshaped, "buckets": shapes} if shapes else unshaped)
    drawn = _counted(_told(in_buckets(scans, model, job, skip_bad=options["skip_bad"])))
    distinct = {shape.replace(batch_size=None): max(1, one.draws // one.most) for shape, one in drawn.items()}
    used = tuple(shape for shape in shapes if shape in distinct)
    return asked.with_shapes(used), distinct


def evened_plan(suggester: Suggester, plan: Estimate, most: Mapping[Bucket, int]) -> EvenedPlan:
    """The plan with a batch size for each of its shapes. ``most``: most samples in a micro-batch of a shape."""

    def price(job: Job) -> Estimate:
        candidate = replace(plan.configuration, job=job)
        facts, lay_out = suggester.screen.facts(candidate), suggester.screen.run_cache.lay_out
        return assess(candidate, facts, suggester.trainer, lay_out, flushes=False).estimate

    return with_batch_sizes(plan, price, most)


def count(folders: Sequence[DataSource], model: ModelProfile, job: Job, skip_bad: bool = False) -> Counts:
    """The number of samples by the shape they are trained at. Raises a VplanError for unusable files, unless they are
    skipped."""
    _check_packages()
    from planner.dataset.scan import read

    return _counted(_told(read(folders, model, job, skip_bad=skip_bad)))


def _told(dataset: Dataset) -> Iterable[Sample]:
    """The samples; skipped ones are reported on stderr once per command, although it may read its data several
    times."""
    context = click.get_current_context(silent=True)
    told = context.meta.setdefault(_SKIPPED, set()) if context else set()
    for fault in dataset.skipped:
        if fault not in told:
            told.add(fault)
            echo(f"skipped: {fault}", err=True)
    return dataset.samples


def _counted(samples: Iterable[Sample]) -> Counts:
    encoded: Counter[Bucket] = Counter()
    draws: Counter[Bucket] = Counter()
    most: dict[Bucket, int] = {}
    for sample in samples:
        encoded[sample.bucket] += 1
        draws[sample.bucket] += sample.repeats
        most[sample.bucket] = max(sample.repeats, most.get(sample.bucket, 1))
    return {shape: ShapeCount(encoded[shape], draws[shape], most[shape]) for shape in encoded}
