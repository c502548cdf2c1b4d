"""Finds the recordings that answer a question: bundled tapes first, then the user's own.

`load_facts` is the entry point. A `Library` keeps what one search has read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import profiles
from planner.catalog import card_lookup, lookup, user_data
from planner.catalog.card_limits import refuse_on_card
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.components import COMPONENTS, recorded_length, samples_per_call
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import shapeless
from planner.errors import NoParametersError, NotEstimatedError, NotRecordedError
from planner.garbage_collection import recording_cache
from planner.layout import attention_kernel
from planner.layout.run import Facts, OwnRecording
from planner.spec.configuration import Configuration
from planner.spec.job import QUANTISED, SPLIT, Job, Strategy
from planner.tape.codec import read_tape
from planner.tape.format import NOTHING, Tape
from planner.tape.packs import is_stored, written_ns
from planner.tape.parameter_table import FILE as PARAMETERS_FILE
from planner.tape.parameter_table import ParameterTable, read_parameters
from planner.tape.variants.choice import optimizer_variant, sample_variant, step_variant
from planner.tape.variants.inventory import step_variants_in_own_code
from planner.tape.variants.recorded_methods import WIDE, on_recorded_layers
from planner.tape.variants.torch_and_card import TorchAndCard
from planner.tape.variants.trainer_models import OWN_CODE
from planner.tape.variants.variant import StepVariant


def tape(model: str, variant: str) -> Tape:
    """The tape of a model's variant. A user's model cannot have a bundled model's name, so the place is unambiguous."""
    return tapes(model, variant)[0]


def tapes(model: str, *variants: str) -> list[Tape]:
    """The tapes of some variants. Raises a NotRecordedError with the command that records all missing ones."""
    paths = [_stored(model, f"{variant}.json.gz") for variant in variants]
    missing = [variant for variant, path in zip(variants, paths, strict=True) if path is None]
    if missing:
        flags = " ".join(f"--variant {variant}" for variant in missing)
        fault = f"no tape {' or '.join(missing)} of {model}"
        raise NotRecordedError(fault, f"record it once (needs vplan[train]): vplan record {model} {flags}")
    return [_read(path, written_ns(path)) for path in paths if path is not None]


def _stored(*parts: str) -> Path | None:
    """The path of a recording: bundled, or else the user's own; None if there is none."""
    bundled: Path = profiles.TAPES.joinpath(*parts)
    if is_stored(bundled):
        return bundled
    own = user_data.tapes().joinpath(*parts)
    return own if own.is_file() else None


TAPES_KEPT = 128
"""More than a search of one model reads; with what is derived from it, a tape takes some 5 MB."""


@recording_cache(maxsize=TAPES_KEPT)
def _read(path: Path, written_ns: int) -> Tape:
    return read_tape(path)


def parameters(model: str) -> ParameterTable:
    """The parameter table of a model, by its name. Raises a NoParametersError when none was recorded."""
    if path := _stored(model, PARAMETERS_FILE):
        return _read_table(path, written_ns(path))
    raise NoParametersError(model)


@functools.cache
def _read_table(path: Path, written_ns: int) -> ParameterTable:
    return read_parameters(path)


NO_PARAMETERS = ParameterTable()


_OnCard = tuple[str, "RecordedJob", Strategy, TorchAndCard]


class Library:
    """The recordings that one search reads. Each is looked up once, however many strategies and cards need it.

    It does not notice tapes that are recorded while it is in use.
    """

    def __init__(self) -> None:
        self._tapes: dict[tuple[str, ...], list[Tape] | NotRecordedError] = {}
        self._components: dict[tuple[str, str], Tape | None] = {}
        self._parameters: dict[str, ParameterTable] = {}
        self.on_a_card: dict[_OnCard, Facts | NotEstimatedError] = {}
        """the facts for the card they were first asked for, or why there are none; by model, what of the job
        recordings differ by, strategy, and what of torch and the card they differ by"""
        self._jobs: dict[Job, RecordedJob] = {}

    def tapes(self, model: str, *variants: str) -> list[Tape]:
        """The tapes of some variants, or the error that names the missing ones, as `tapes` has them."""
        key = (model, *variants)
        if key not in self._tapes:
            try:
                self._tapes[key] = tapes(model, *variants)
            except NotRecordedError as error:
                self._tapes[key] = error
        recordings = self._tapes[key]
        if isinstance(recordings, NotRecordedError):
            raise recordings
        return recordings

    def component_tape(self, name: str, variant: str) -> Tape | None:
        """A tape of a text encoder or VAE, as `component_tape` has it."""
        key = name, variant
        if key not in self._components:
            self._components[key] = component_tape(name, variant)
        return self._components[key]

    def parameters(self, model: str) -> ParameterTable:
        """The parameter table of a model, as `parameters` has it."""
        if model not in self._parameters:
            self._parameters[model] = parameters(model)
        return self._parameters[model]

    def recorded_job(self, model: ModelProfile, job: Job) -> RecordedJob:
        """`RecordedJob.of` a job of the model, worked out once."""
        if job not in self._jobs:
            self._jobs[job] = RecordedJob.of(model, job)
        return self._jobs[job]


class RecordedJob(NamedTuple):
    """The parts of a job that decide which recordings answer for it. Most shapes of a job share them."""

    job: Job
    """at the smallest shape there is"""
    batch: int
    """the largest of its shapes"""
    vae_lengths: tuple[str, ...]
    """by which the recordings of its VAE differ, as `recorded_length` names them"""

    @classmethod
    def of(cls, model: ModelProfile, job: Job) -> RecordedJob:
        """Of a job of the model."""
        frames = [shape.frames for shape in job.shapes] + ([job.validation.frames] if job.validation else [])
        lengths = {recorded_length(model.vae, model.vae.coded(count)) for count in frames}
        batch = max(shape.batch_size or job.batch_size for shape in job.shapes)
        return cls(shapeless(job), batch, tuple(sorted(lengths)))


def load_facts(
    configuration: Configuration,
    model: ModelProfile | None = None,
    gpu: GpuProfile | None = None,
    library: Library | None = None,
) -> Facts:
    """The facts (tapes, model, card, measurements) that an estimate of this job, strategy and machine needs.

    ``model`` and ``gpu`` save looking them up by name; ``library`` keeps recordings that were read before. Raises a
    NotRecordedError if a tape is missing, and a NotEstimatedError for what the card runs differently from what was
    recorded.
    """
    library = library or Library()
    job, strategy, machine = configuration.job, configuration.strategy, configuration.machine
    model = model or lookup.model(job.model)
    card = gpu or card_lookup.parse_gpus(machine.gpu)[1]
    refuse_on_card(configuration, card, model)
    cudnn = model.traits.attends_by_card and attention_kernel.takes_grouped_masks(strategy, machine, card)
    recorded = library.recorded_job(model, job)
    runs_on = TorchAndCard(machine.torch, cudnn, card.backend == "mps")
    key = model.name, recorded, strategy, runs_on
    if key not in library.on_a_card:
        try:
            library.on_a_card[key] = _recorded(recorded, strategy, model, card, library, runs_on)
        except NotEstimatedError as error:  # a search asks at every shape again
            library.on_a_card[key] = error
    facts = library.on_a_card[key]
    if isinstance(facts, NotEstimatedError):
        raise facts
    return facts._replace(model=model, gpu=card)


def _recorded(
    recorded: RecordedJob,
    strategy: Strategy,
    model: ModelProfile,
    card: GpuProfile,
    library: Library,
    runs_on: TorchAndCard,
) -> Facts:
    """The recordings, which are the same on all cards with the same ``runs_on``."""
    job, batch, lengths = recorded
    side_by_side = samples_per_call(model, job.guided)
    if job.method == "sample":
        sampled = sample_variant(model, job, strategy, batch * side_by_side, runs_on)
        (call,) = library.tapes(job.model, sampled.name)
        return Facts(model, card, call, NOTHING, around=encoder_tapes(model, job, strategy, lengths, library))
    validates = strategy.validation_mode != "off"
    variant = step_variant(model, job, strategy, batch, runs_on)
    partial = strategy.gradient_checkpointing == "partial"
    wanted = {"step": variant.name, "optimizer": optimizer_variant(model, job, strategy).name}
    if validates:
        wanted["sample"] = sample_variant(model, job, strategy, side_by_side, runs_on).name
    if partial:
        wanted["checkpointed"] = variant._replace(checkpointing="full").name
    recordings = dict(zip(wanted, library.tapes(job.model, *wanted.values()), strict=True))
    return Facts(
        model,
        card,
        recordings["step"],
        recordings["optimizer"],
        library.parameters(job.model) if counts_elements(strategy) else NO_PARAMETERS,
        encoder_tapes(model, job, strategy, lengths, library),
        recordings.get("sample"),
        recordings.get("checkpointed"),
        own_code=_own_code(model, job, strategy, variant),
    )


def _own_code(
    model: ModelProfile, job: Job, strategy: Strategy, variant: StepVariant
) -> dict[str, Callable[[], OwnRecording]]:
    """Trainer -> what reads the recordings of its own model, for the trainers that have any.

    diffusers' model answers where the trainer's own was not recorded: for example, of DiffSynth-Studio's Wan 2.1 T2V
    14B and 2.2 T2V only LoRA without autocast was. It also answers for partial checkpointing, which needs two
    recordings of one model, and for adapters on layers that the user chose, whose names are diffusers'. An estimate for
    one trainer reads no other's.
    """
    if strategy.gradient_checkpointing == "partial" or not on_recorded_layers(model, job, strategy):
        return {}
    recorded = set(step_variants_in_own_code(model))
    in_code = {trainer: variant._replace(code=trainer) for trainer in OWN_CODE}
    half = variant.precision._replace(weights="half")
    for trainer, code in OWN_CODE.items():
        if variant.precision.weights in code.unpacked:
            in_code[trainer] = in_code[trainer]._replace(precision=half)
    found: dict[str, Callable[[], OwnRecording]] = {}
    for trainer, own in in_code.items():
        if own in recorded and _stored(model.name, f"{own.name}.json.gz"):
            optimizer = _own_optimizer(model, job, strategy, own)
            needs_gradient = bool(optimizer) and OWN_CODE[trainer].with_gradient
            if not needs_gradient or _stored(model.name, f"{optimizer}.json.gz"):
                found[trainer] = functools.cache(functools.partial(_own_recording, model.name, own.name, optimizer))
    return found


def _own_recording(model: str, step: str, optimizer: str) -> OwnRecording:
    return OwnRecording(tape(model, step), tape(model, optimizer) if optimizer else None)


def _own_optimizer(model: ModelProfile, job: Job, strategy: Strategy, own: StepVariant) -> str:
    """The recording of the optimizer's step for a trainer whose own model gives a gradient to some adapters only; empty
    for all others, which share the recording of diffusers' model. The adapters without a gradient are left out for the
    optimizers that the trainer has."""
    code, usual = OWN_CODE[own.code], optimizer_variant(model, job, strategy)
    if code.with_gradient:
        return usual._replace(code=own.code).name
    if code.on_all_linear and own.precision.weights in QUANTISED and own.method != WIDE:
        return usual._replace(method=WIDE).name
    return ""


def counts_elements(strategy: Strategy) -> bool:
    """Whether a strategy needs numbers of elements, not only bytes: it splits parameters, or copies them in another
    format."""
    return strategy.sharding in SPLIT or strategy.master_weights == "fp32"


def encoder_tapes(
    model: ModelProfile, job: Job, strategy: Strategy, vae_lengths: Iterable[str], library: Library
) -> dict[str, Tape]:
    """The tapes of the text encoders and the VAE that a job needs, if they are recorded. ``vae_lengths``: as in
    `RecordedJob`."""
    wanted = {}
    text = "fp32" if strategy.text_encoder_dtype == "fp32" else "half"
    for encoder in model.text_encoders:
        name = encoder.folder
        wanted[f"{name}/encode"] = name, f"encode-{text}"
    name = model.vae.folder
    pieces = ["encode"] if strategy.validation_mode == "off" else ["encode", "decode"]
    if job.method == "sample":
        pieces = ["decode"]
    for piece, end in itertools.product(pieces, vae_lengths):
        dtype = "fp32" if strategy.vae_dtype == "fp32" else "half"
        wanted[f"{name}/{piece}{end}"] = name, f"{piece}-{dtype}{end}"
    recordings = ((key, library.component_tape(folder, variant)) for key, (folder, variant) in wanted.items())
    return {key: recording for key, recording in recordings if recording}


def component_tape(name: str, variant: str) -> Tape | None:
    """A tape of a text encoder or VAE, bundled or of the user's own; None when there is none."""
    path = _stored(COMPONENTS, name, f"{variant}.json.gz")
    return _read(path, written_ns(path)) if path else None
