"""One command of another trainer on one machine, in our vocabulary: read, completed and checked."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.catalog import card_lookup, lookup
from planner.catalog.card_limits import NEW_ALLOC_CONF_FROM
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import check_blocks, job_for
from planner.catalog.swapped_stacks import fetches_again
from planner.dialects.base.bindings import Fields, InexpressibleError, Remark, Settings
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Translation, translate
from planner.dialects.base.launchers import ALLOCATOR, NEW_ALLOC_CONF
from planner.dialects.base.own_models import SHORT_PROMPT
from planner.errors import NotRecordedError, VplanError
from planner.layout.recordings import load_facts
from planner.layout.unpriced import refuse_trainers_of_cuda, refuse_uncast_inputs
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import QUANTISED, Bucket, Job, Machine, Strategy
from planner.spec.rules import ResolvedStrategy

NOT_ESTIMATED, _, NEEDS_LESS = MAY_NEED_LESS.partition(",")
"""What stands behind an option's name, and at the end of its note: why may stand between
(`planner.dialects.base.flag_effects`)."""


WIDER_ADAPTERS = {"adapter_dtype": "fp32", "autocast": "bf16"}
"""Over a quantised base: they need at least as much as adapters in 16 bits."""


@dataclass(frozen=True)
class Case:
    """A foreign trainer's command on a machine, translated into job, strategy and machine."""

    dialect: Dialect
    invocation: Invocation
    translation: Translation
    job: Job
    strategy: Strategy
    machine: Machine
    model: ModelProfile
    gpu: GpuProfile
    notes: tuple[str, ...]
    version: str = ""
    """of the trainer's memory terms, where its code was edited or a setting decides"""

    @property
    def trainer(self) -> str:
        """The name of the trainer's memory terms, with the version where one is set: "diffsynth@2025"."""
        return f"{self.dialect.name}@{self.version}" if self.version else self.dialect.name

    @property
    def refused(self) -> tuple[Remark, ...]:
        """The settings for which the run ends before its first step."""
        return (*self.invocation.refused, *self.translation.refused)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """The command's options that are not estimated and may reduce memory below the estimate."""
        return tuple(note.partition(NOT_ESTIMATED)[0] for note in self.notes if note.endswith(NEEDS_LESS))

    @property
    def fields(self) -> Fields:
        """The fields that the dialect's table binds, by name: those of job and strategy, `gpus`, `nodes` and
        `version`."""
        machine = {"gpus": self.machine.gpus, "nodes": self.machine.nodes}
        return {**self.job.__dict__, **self.strategy.__dict__, **machine, "version": self.version}

    @property
    def configuration(self) -> Configuration:
        """Job, strategy and machine, resolved anew at each call, because a change may leave fields of the strategy
        open."""
        return Configuration.of(self.job, self.strategy, self.machine)

    def changed(self, changes: Mapping[str, Any]) -> Case:
        """A copy of the case with some fields of job or strategy changed. Without samples the sample's shape is removed
        too: a trainer that makes none has no settings for it."""
        if changes.get("validation_mode") == "off":
            changes = {"validation": None, **changes}
        job = self.job.replace(**{name: value for name, value in changes.items() if name in Job.model_fields})
        inside = {name: value for name, value in changes.items() if name in Strategy.model_fields}
        version = str(changes.get("version", self.version))
        return replace(self, job=job, strategy=self.strategy.replace(**inside), version=version)


def read_case(
    dialect: Dialect, invocation: Invocation, overrides: Mapping[str, Any], machine: Mapping[str, Any]
) -> Case:
    """The case of a command. `overrides`: what was told beside it (model, frames, height, width, text_tokens).
    `machine`: the fields of Machine that were typed, including the card."""
    settings = dict(invocation.settings)
    settings |= {name: value for name, value in overrides.items() if value is not None}
    notes: list[str] = []
    count, card = card_lookup.parse_gpus(str(machine["gpu"]))
    machine_fields = {name: value for name, value in machine.items() if value is not None}
    settings["gpus"] = machine_fields["gpus"] = _gpus(settings, machine_fields, count, notes)
    settings["nodes"] = machine_fields["nodes"] = int(machine_fields.get("nodes") or settings.get("nodes") or 1)
    invocation = replace(invocation, settings=settings)
    reading = translate(dialect, invocation)
    profile = lookup.model(reading.job["model"])
    job = _job(profile, reading.job, overrides, notes)
    where = _machine(card, machine_fields, dialect.name, notes)
    reading = _on(where, reading, bool(settings.get(f"env:{NEW_ALLOC_CONF}")))
    configuration = Configuration.of(job, Strategy.read(reading.strategy), where)
    _refuse_contradictions(dialect, reading.version, profile, configuration)
    configuration = _with_recorded_dropout(dialect, configuration, notes)
    try:
        refuse_uncast_inputs(configuration, dialect.name)
        strategy = _recorded(configuration, notes)
    except NotRecordedError as error:
        raise _with_mixed_precision(dialect, configuration, error) from None
    if not strategy.expandable_segments:
        why = NOT_IN_A_CONFIG if invocation.config_alone else NOT_SET
        notes.append(f"default CUDA allocator ({ON_WINDOWS if where.os == 'windows' else why})")
    if job.text_tokens is None and profile.trained_with(dialect.name.partition("@")[0], "prompts-unpadded"):
        priced = f"priced at {profile.shape.text_tokens} tokens, the low end at {SHORT_PROMPT}"
        notes.append(f"prompts are as long as the longest of a batch: {priced} (--text-tokens)")
    words = (*reading.notes, *notes)
    return Case(dialect, invocation, reading, configuration.job, strategy, where, profile, card, words, reading.version)


def _job(model: ModelProfile, read: Fields, overrides: Mapping[str, Any], notes: list[str]) -> Job:
    """The job that the settings describe; ``overrides`` replace its fields, and the model's defaults fill the rest."""
    fields = {name: value for name, value in read.items() if value is not None}
    told = {name: value for name, value in overrides.items() if value is not None and name != "model"}
    tokens = told.pop("text_tokens", fields.get("text_tokens"))
    fields = {**_with_shape(fields, told), "text_tokens": tokens}
    job = job_for(model, fields)
    if "height" not in fields and not job.buckets:
        notes.append(f"{job.height}x{job.width} pixels (height x width, the model's default)")
    if max(shape.frames for shape in job.shapes) > model.shape.max_frames:
        notes.append(f"{job.frames} frames is longer than the model was trained on ({model.shape.max_frames})")
    return job


def _machine(card: GpuProfile, fields: Mapping[str, Any], trainer: str, notes: list[str]) -> Machine:
    """The machine with a card and the other typed fields. Raises a NotEstimatedError if the trainer is not known to run
    on such a card."""
    refuse_trainers_of_cuda(card, trainer)
    machine = Machine.read({**fields, "gpu": card.name, "unified": fields.get("unified", card.unified)})
    if machine.host_ram is None:
        notes.append("host RAM not checked; pass --host-ram 64GiB")
    return machine


def _refuse_contradictions(dialect: Dialect, version: str, model: ModelProfile, configuration: Configuration) -> None:
    """Raises a VplanError if the command contradicts itself, with a fix in the trainer's own flags if it has some."""
    try:
        check_blocks(model, configuration.strategy)
        refuse_contradictions(configuration, fetched_again=fetches_again(f"{dialect.name}@{version}"))
    except VplanError as error:
        world = {"gpus": configuration.machine.gpus, "nodes": configuration.machine.nodes}
        fields = {**configuration.job.__dict__, **configuration.strategy.__dict__, **world}
        fix = _its_words(dialect, fields, error.fix) or f"in vplan's terms: {error.fix}"
        raise VplanError(f"the command contradicts itself: {error.message}", fix) from None


def _with_recorded_dropout(dialect: Dialect, configuration: Configuration, notes: list[str]) -> Configuration:
    """The configuration; without dropout if the estimate leaves its masks out."""
    job = configuration.job
    if not _is_without_masks(dialect, configuration):
        return configuration
    small = "is behind an adapter's first matrix: its masks, of rank numbers a token, are not counted"
    why = "is not recorded: estimated without its masks" if dialect.drops_inputs else small
    notes.append(f"LoRA dropout {job.lora_dropout} {why}")
    return replace(configuration, job=job.replace(lora_dropout=0.0))


def _with_shape(fields: Fields, shape: Fields) -> Fields:
    """A job's fields with the overridden shape, which replaces that of every bucket."""
    fields = {**fields, **shape}
    if not shape or not fields.get("buckets"):
        return fields
    buckets = tuple(dict.fromkeys(Bucket.read({**each.__dict__, **shape}) for each in fields["buckets"]))
    if len(buckets) > 1:
        return {**fields, "buckets": buckets}
    own = {name: value for name, value in buckets[0].__dict__.items() if value is not None}
    return {**fields, **own, "buckets": ()}


def _on(machine: Machine, reading: Translation, by_new_name: bool) -> Translation:
    """The translation on the machine's system and torch: without expandable segments on Windows
    (c10/cuda/CUDAAllocatorConfig.h ``expandable_segments``), or if torch does not know the variable."""
    if not reading.strategy.get("expandable_segments"):
        return reading
    if machine.os == "windows":
        remark = Remark(ALLOCATOR, f"{ON_WINDOWS}: it warns and goes on without")
    elif by_new_name and machine.torch and tuple(map(int, machine.torch.split(".")[:2])) < NEW_ALLOC_CONF_FROM:
        remark = Remark(NEW_ALLOC_CONF, "torch before 2.10 takes them from PYTORCH_CUDA_ALLOC_CONF alone")
    else:
        return reading
    strategy = {**reading.strategy, "expandable_segments": False}
    return replace(reading, strategy=strategy, ineffective=(*reading.ineffective, remark))


NOT_SET = "PYTORCH_CUDA_ALLOC_CONF not set"
ON_WINDOWS = "torch has no expandable segments on Windows"
NOT_IN_A_CONFIG = "a config alone does not say PYTORCH_CUDA_ALLOC_CONF: if the script that starts it does, check that"


def _is_without_masks(dialect: Dialect, configuration: Configuration) -> bool:
    """Whether the estimate leaves dropout out: LoRA's if it acts behind the first matrix or is not recorded. DoRA's is
    never left out, because with it a layer computes its own product once more."""
    if not configuration.job.lora_dropout or configuration.job.adapter != "lora":
        return False
    return not dialect.drops_inputs or not _is_recorded(configuration)


_ASKED = re.compile(r"(leave out |without )?--(no-)?([a-z][a-z-]*)(?: ([a-z0-9-]+))?")


def _its_words(dialect: Dialect, fields: Fields, fix: str) -> str:
    """The part of a fix, given in our flags, that the trainer has settings for, in those; empty if it has none."""
    ways = (_in_flags(dialect, fields, change) for change in _changes(fix))
    return ", or ".join(dict.fromkeys(words for words in ways if words))


def _changes(fix: str) -> Iterator[Fields]:
    """The fields that a fix names, each with the value it asks for."""
    default = Strategy()
    for left_out, no, flag, value in _ASKED.findall(fix):
        field = flag.replace("-", "_")
        if field not in Strategy.model_fields:
            continue
        if left_out:
            yield {field: getattr(default, field)}
        elif isinstance(getattr(default, field), bool):
            yield {field: not no}
        elif value:
            with contextlib.suppress(VplanError):  # what follows the flag is a word of the sentence
                yield {field: getattr(Strategy.read({field: int(value) if value.isdigit() else value}), field)}


def _in_flags(dialect: Dialect, fields: Fields, change: Fields) -> str:
    """How a user of the trainer makes this change, alone or as part of a larger change that the trainer makes of it:
    the settings to add, or else those to leave out."""
    moves = (move.changes for move in dialect.moves if change.items() <= move.changes.items() and move.when(fields))
    return next(filter(None, (_settings_of(dialect, fields, changes) for changes in (change, *moves))), "")


def _settings_of(dialect: Dialect, fields: Fields, change: Mapping[str, Any]) -> str:
    added, gone = [], []
    for binding in (each for each in dialect.bindings if change.keys() & set(each.fields)):
        old: Settings = {}
        with contextlib.suppress(InexpressibleError):  # it came about by itself
            old = binding.to_settings(fields)
        try:
            new = binding.to_settings({**fields, **change})
        except InexpressibleError:
            return ""
        added += [_setting(dialect, name, value) for name, value in new.items() if old.get(name) != value]
        gone += [name.rpartition(":")[2] for name in old if name not in new]
    return f"add {' '.join(added)}" if added else f"leave out {' '.join(gone)}" if gone else ""


def _setting(dialect: Dialect, name: str, value: object) -> str:
    """A setting as it is typed: a flag, a flag of the launcher, or a line of a file."""
    where, _, key = name.rpartition(":")
    if where and where != "launch":
        return f"{key}{dialect.assigns}{json.dumps(value, ensure_ascii=False)}"
    values = [] if value is True else value if isinstance(value, list | tuple) else [value]
    return " ".join([key, *map(str, values)])


def _with_mixed_precision(dialect: Dialect, configuration: Configuration, error: NotRecordedError) -> NotRecordedError:
    """The error in the trainer's own flags, if nothing is recorded without mixed precision but something is with it."""
    job, strategy = configuration.job, configuration.strategy
    has_flag = any("--mixed_precision" in name for binding in dialect.bindings for name in binding.settings)
    if not has_flag or strategy.autocast != "none":
        return error
    mixed = strategy.replace(weights_dtype="bf16", autocast="bf16")
    try:
        load_facts(replace(configuration, job=_at_a_recorded_batch(job), strategy=mixed))
    except NotRecordedError:
        return error
    fault = f"{job.method} of {job.model} without mixed precision is not recorded"
    return NotRecordedError(fault, "add --mixed_precision bf16, unless accelerate's config already sets it")


def _recorded(configuration: Configuration, notes: list[str]) -> ResolvedStrategy:
    """The strategy; or, if its quantised base was not recorded, one that needs at least as much: with fp32 adapters, or
    in bf16."""
    strategy, recorded = configuration.strategy, _at_a_recorded_batch(configuration.job)
    for changes, what in (({}, ""), (WIDER_ADAPTERS, "fp32 adapters"), ({"weights_dtype": "bf16"}, "the base in bf16")):
        variant = strategy.replace(**changes)
        try:
            load_facts(Configuration(recorded, variant, configuration.machine))
        except NotRecordedError:
            if strategy.weights_dtype not in QUANTISED:
                raise
            continue
        if what:
            notes.append(f"{strategy.weights_dtype} as in this trainer is not recorded: estimated with {what}")
        return variant
    raise AssertionError("bf16 is recorded for every model")


def as_read(case: Case) -> Case:
    """A case as `read_case` estimates a command that says the same: with a quantised base that is not recorded, without
    dropout's masks, and if that is not either, with fp32 adapters. Unchanged if nothing is recorded."""
    if case.strategy.weights_dtype not in QUANTISED or _is_recorded(case.configuration):
        return case
    bare = case
    if case.job.lora_dropout and case.job.adapter == "lora":
        bare = replace(case, job=case.job.replace(lora_dropout=0.0))
    wider = replace(bare, strategy=bare.strategy.replace(**WIDER_ADAPTERS))
    return next((each for each in (bare, wider) if _is_recorded(each.configuration)), case)


def _is_recorded(configuration: Configuration) -> bool:
    try:
        load_facts(replace(configuration, job=_at_a_recorded_batch(configuration.job)))
    except NotRecordedError:
        return False
    return True


def _at_a_recorded_batch(job: Job) -> Job:
    """The job; or one sample of it, if its batch is not recorded and pricing will name one that is."""
    batches = lookup.model(job.model).shape.batches
    recorded = not batches or max(shape.batch_size or job.batch_size for shape in job.shapes) in batches
    return job if recorded else job.replace(batch_size=1, buckets=())


def _gpus(settings: Settings, typed: Mapping[str, Any], count: int, notes: list[str]) -> int:
    """GPUs of one node: as typed, else as the launcher says, else as CUDA_VISIBLE_DEVICES lists, else one."""
    if typed.get("gpus") or count > 1:
        return int(typed.get("gpus") or count)
    if settings.get("gpus"):
        return int(settings["gpus"])
    if visible := settings.get("visible"):
        notes.append(f"{visible} GPU{'s' if int(visible) > 1 else ''}, from CUDA_VISIBLE_DEVICES")
        return int(visible)
    notes.append("1 GPU: neither the launcher nor CUDA_VISIBLE_DEVICES sets the number (--gpus)")
    return 1
