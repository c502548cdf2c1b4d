"""A plan as another trainer's files: complete, with the Plan field behind each line, or the nearest plan it can do."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from planner import dialects
from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import check_blocks, check_job
from planner.dialects.base import config_text
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.dialect import Dialect, nearest_fields, settings_for
from planner.dialects.base.launchers import ALLOCATOR
from planner.errors import NotEstimatedError, VplanError, did_you_mean, quoted
from planner.estimate.estimate import assess
from planner.file_writing import write_file
from planner.foreign.windows_script import with_batch_files
from planner.launch.slurm import slurm_script
from planner.layout import trainer_terms
from planner.layout.recordings import load_facts
from planner.schema import Record
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate, Plan, plan_to_toml
from planner.units import GIB, format_gib

SLURM = "slurm"
"""A target that is no trainer: a batch script that runs `vplan train`."""

OF_THE_JOB = ("model", "method")
"""Fields without which a plan is one of another job."""

MOST_TRIES = 40
"""Estimates that looking for a nearest plan that fits may take."""


@dataclass(frozen=True)
class Exported:
    """The files that were written for a plan, with the fields that they carry, leave out and change."""

    trainer: str
    plan: Plan
    """with its estimate under that trainer's memory terms, where there is one"""
    files: dict[str, str]
    """by name, the one to start last"""
    carried: dict[str, tuple[str, ...]]
    """the trainer's settings -> the Plan fields that they carry"""
    left_out: dict[str, Any] = field(default_factory=dict)
    """Plan fields that this target leaves to somebody else"""
    changed: dict[str, Any] = field(default_factory=dict)
    """field -> value of the nearest plan, where the plan itself could not be said"""
    notes: tuple[str, ...] = ()

    @property
    def sets_allocator(self) -> bool:
        """Whether what starts it sets torch's allocator, which no other file of it says."""
        return f"export {ALLOCATOR}" in list(self.files.values())[-1]

    @property
    def start(self) -> str:
        """The shell command that starts the exported training."""
        name = list(self.files)[-1]
        if self.trainer == SLURM:
            return f"sbatch {name}"
        return f"bash {name}" if name.endswith(".sh") else name


def export_targets() -> tuple[str, ...]:
    """The names that `vplan export --to` takes."""
    written = {name.partition("@")[0] for name, dialect in dialects.all_dialects().items() if dialect.files is not None}
    return (*sorted(written), SLURM)


def check_target(name: str) -> str:
    """The target of a name, or of the only one that begins so (`musubi`); a VplanError for any other."""
    begun = [target for target in export_targets() if target.startswith(name.lower())]
    if name in export_targets() or (len(begun) == 1 and name):
        return name if name in export_targets() else begun[0]
    listed = "export supports " + ", ".join(export_targets())
    if "kohya" in name.lower():  # who wrote both
        raise VplanError(f"there is no export to {name!r}", "did you mean sd-scripts (images) or musubi-tuner (video)?")
    if reader := next((each for each in dialects.all_dialects().values() if name.lower() == each.name), None):
        fix = f"`vplan check CONFIG --gpu CARD` prices a run of its own and says what to change; {listed}"
        raise VplanError(f"{reader.title}'s files are read, not written", fix)
    raise VplanError(f"there is no export to {name!r}", did_you_mean(name, export_targets(), listed))


def fields_of(plan: Plan) -> Fields:
    """The plan in the names that bindings use: Job's, Strategy's once everything open is filled in, gpus and nodes."""
    strategy = plan.configuration.strategy
    fields = {name: getattr(plan.job, name) for name in Job.model_fields}
    fields |= {name: getattr(strategy, name) for name in Strategy.model_fields}
    version = plan.trainer.partition("@")[2]
    return fields | {"gpus": plan.machine.gpus, "nodes": plan.machine.nodes, "version": version}


def idle(plan: Plan) -> frozenset[str]:
    """Fields that say nothing in this plan, whatever they are: a trainer that does otherwise does the same."""
    fields: set[str] = set()
    if plan.strategy.sharding != "ddp":
        fields.add("grad_buckets")
    if plan.job.method != "lora":
        fields |= {"adapter_dtype", "adapter", "lokr_factor", "lora_rank", "lora_targets", "lora_dropout"}
    if lookup.model(plan.job.model).experts == 1:
        fields |= {"experts", "inactive_expert"}
    if not plan.configuration.reads_compute_dtype:
        fields.add("compute_dtype")
    return frozenset(fields)


def settings_and_fields(dialect: Dialect, plan: Plan) -> tuple[Settings, Fields]:
    """(settings, fields): the trainer's settings for this plan, and the fields that they express. Raises an
    InexpressibleError for values that matter and cannot be expressed."""
    fields, nothing = fields_of(plan), idle(plan)
    for _ in fields:
        try:
            return settings_for(dialect, fields), fields
        except InexpressibleError as error:
            matters = [each for each in error.values if each.field not in nothing]
            if matters:
                raise InexpressibleError(*matters) from None
            fields = fields | {each.field: each.instead for each in error.values}
    raise AssertionError(f"{dialect.name} has no setting for what it does instead")


def plan_with(plan: Plan, wanted: Fields) -> Plan:
    """The plan with other fields; a VplanError where they contradict each other."""
    now = fields_of(plan)
    changes = {name: value for name, value in wanted.items() if now[name] != value}

    def of(record: type[Record]) -> Fields:
        return {name: value for name, value in changes.items() if name in record.model_fields}

    job = plan.job.replace(**of(Job))
    strategy = plan.configuration.strategy.replace(**of(Strategy))
    machine = plan.machine.replace(**of(Machine))
    configuration = Configuration(job, strategy, machine)
    refuse_contradictions(configuration)
    profile = lookup.model(job.model)
    check_job(profile, job)
    check_blocks(profile, strategy)
    return Plan.under(configuration, plan.trainer)


def priced(plan: Plan, trainer: str) -> Estimate | None:
    """The estimate of a plan under a trainer's memory terms; None when no recording answers. One that would run only
    because PyTorch empties its cache is `no`: what is exported runs for days."""
    profile, (_, card) = lookup.model(plan.job.model), card_lookup.parse_gpus(plan.machine.gpu)
    try:
        configuration = plan.configuration
        return assess(configuration, load_facts(configuration, profile, card), trainer, flushes=False).estimate
    except NotEstimatedError:
        return None


def export(plan: Plan, name: str, take_nearest: bool = False) -> Exported:
    """The files that make a trainer do this plan. What it cannot express is a VplanError that offers the nearest plan
    that it can; with `take_nearest` that one is exported. One that does not fit as that trainer trains is exit 3."""
    name = check_target(name)
    if name == SLURM:
        return _slurm(plan)
    dialect = dialects.writer(name, plan.job.model)
    assert dialect.files is not None
    changed: Fields = {}
    before = fields_of(plan)
    plan = plan_with(plan, before)
    try:
        settings, fields = settings_and_fields(dialect, plan)
    except InexpressibleError as error:
        other_job = tuple(each for each in error.values if each.field in OF_THE_JOB)  # no plan near this one
        faults = "; ".join(dict.fromkeys(each.message for each in other_job or error.values))
        if other_job:
            fault = f"{dialect.title} does not support this plan: {faults}"
            raise VplanError(fault, _elsewhere(plan, other_job)) from None
        near = nearest_plan(dialect, plan)
        after = fields_of(near)
        changed = {field: after[field] for field in after if after[field] != before[field] and field not in idle(near)}
        if not take_nearest:
            raise VplanError(
                f"{dialect.title} does not support this plan: {faults}", _offer(near, changed, dialect)
            ) from None
        plan, (settings, fields) = near, settings_and_fields(dialect, near)
    trainer = _as_written(plan, dialect)
    estimate = priced(plan, trainer)
    if estimate is not None and estimate.verdict == "no":
        fault = f"it does not fit as {dialect.title} trains it: {_shortage(estimate)}"
        raise VplanError(fault, _that_fits(dialect, plan), 3)
    own = dialects.module(name)
    carried = config_text.fields_by_setting(dialect, settings, getattr(own, "CARRIES", None), fields)
    files = {path: _headed(path, text, carried) for path, text in dialect.files(plan, settings).items()}
    files = with_batch_files(files) if plan.machine.os == "windows" else files
    left = getattr(own, "left_to_the_script", None)
    done = Plan.of(estimate, trainer=trainer) if estimate else plan
    return Exported(name, done, files, carried, left(plan) if left else {}, changed)


def _as_written(plan: Plan, dialect: Dialect) -> str:
    """Whose memory terms the files have: the trainer's, of the plan's own version where it is this trainer's."""
    own, _, version = plan.trainer.partition("@")
    same = f"{plan.trainer}@".startswith(f"{dialect.name}@") and version in trainer_terms.versions(own)
    return plan.trainer if same else dialect.name


def _slurm(plan: Plan) -> Exported:
    """The plan's own file, and a batch script that trains it with vplan."""
    estimate = priced(plan, "vplan")
    words = ["vplan", "train", "plan.toml", "--data", "data/my_set", "--output", "run", "--weights", "models/weights"]
    script = slurm_script(plan, words, log="slurm-%j.log", estimate=estimate)
    done = Plan.of(estimate) if estimate else plan
    return Exported(SLURM, done, {"plan.toml": plan_to_toml(done), "job.sh": script}, {})


def _headed(path: str, text: str, carried: dict[str, tuple[str, ...]]) -> str:
    """A script with the Plan field of every flag at its top: lines of one command take no comments of their own."""
    flags = {name.removeprefix("launch:"): own for name, own in carried.items() if name.startswith(("--", "launch:"))}
    if not path.endswith(".sh") or not flags:
        return text
    first, _, rest = text.partition("\n")
    lines = [f"#   {name}: {', '.join(own)}" for name, own in flags.items() if name in rest]
    return "\n".join([first, "# Which setting holds which field of the plan:", *lines, rest])


# ---- other trainers


class Writers(NamedTuple):
    """The targets that can write a plan. Whether it fits as they train it is not asked."""

    exact: tuple[str, ...]
    """as it is"""
    nearest: tuple[str, ...]
    """one near it"""


def writers_of(plan: Plan) -> Writers:
    """The targets that can write a plan as it is, and those that can write one near it."""
    exact: list[str] = []
    near: list[str] = []
    for name in export_targets():
        if name == SLURM:
            exact.append(name)
            continue
        dialect = dialects.writer(name, plan.job.model)
        try:
            settings_and_fields(dialect, plan)
            exact.append(name)
        except InexpressibleError as error:
            if not any(each.field in OF_THE_JOB for each in error.values):
                with contextlib.suppress(VplanError):
                    _nearest(dialect, plan, {})
                    near.append(name)
    return Writers(tuple(exact), tuple(near))


def _elsewhere(plan: Plan, unsupported: tuple[UnsupportedValue, ...]) -> str:
    """What to do where a trainer does not train this model by this method: another method, or another trainer."""
    exact, near = writers_of(plan)
    fix = f"--to {', '.join(exact)} can write this plan"
    fix += f"; --to {', '.join(near)} one near it (--nearest)" if near else ""
    if all(each.field == "method" and each.instead for each in unsupported):
        fix = f"use --method {unsupported[0].instead}; {fix}"
    return fix


# ---- the nearest plan


def nearest_plan(dialect: Dialect, plan: Plan) -> Plan:
    """The plan with the fewest fields changed that the trainer can do, and that fits as far as it can be made to.

    Where a trainer's adapters are fp32 and the base is not, only mixed precision brings them together; nothing else is
    recorded of such a plan.
    """
    near = _nearest(dialect, plan, {})
    half = near.strategy.compute_dtype
    if priced(near, dialect.name) is None and near.strategy.autocast == "none" and half != "fp32":
        with contextlib.suppress(VplanError):  # an engine that casts by itself has none
            mixed = _nearest(dialect, plan, {"autocast": half})
            near = mixed if priced(mixed, dialect.name) else near
    return fitting(dialect, near) or near


def _nearest(dialect: Dialect, plan: Plan, changes: Fields) -> Plan:
    try:
        return plan_with(plan, nearest_fields(dialect, fields_of(plan) | changes))
    except VplanError as error:
        fix = f"change the plan by hand: {error.message}"
        raise VplanError(f"{dialect.title} supports neither this plan nor one near it", fix) from None


def fitting(dialect: Dialect, plan: Plan) -> Plan | None:
    """The plan itself if it fits, else with the first of the trainer's own changes that make it fit: one, then two."""
    estimate = priced(plan, dialect.name)
    if estimate is None or estimate.verdict != "no":
        return plan
    for tried, changes in enumerate(_changes(dialect, fields_of(plan))):
        if tried == MOST_TRIES:
            return None
        wanted = fields_of(plan) | changes
        try:
            changed = plan_with(plan, wanted)
            settings_and_fields(dialect, changed)
        except (InexpressibleError, VplanError):  # it cannot be said, or contradicts what the plan has
            continue
        estimate = priced(changed, dialect.name)
        if estimate is not None and estimate.verdict != "no":
            return changed
    return None


def _changes(dialect: Dialect, now: Fields) -> Iterator[Fields]:
    """Each of the trainer's changes alone, then two together; of a field with several values the mildest first."""
    single: list[Fields] = [dict(step) for move in dialect.moves for step in move.steps(now)]
    yield from single
    for one, other in itertools.combinations(single, 2):
        if not one.keys() & other.keys():
            yield one | other


def flags_of(changed: Fields) -> str:
    """Changed fields as options of our own command line."""
    words = []
    for name, value in changed.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{name.replace('_', '-')}")
        elif isinstance(value, tuple):
            words.append(f"{flag} {','.join(map(str, value))}")
        elif value is not None:
            words.append(f"{flag} {value}")
    return " ".join(words)


def _offer(near: Plan, changed: Fields, dialect: Dialect) -> str:
    estimate = priced(near, dialect.name)
    how = "not estimated"
    if estimate is not None:
        how = f"{estimate.verdict}, {format_gib(estimate.peak.device_bytes)} of {format_gib(estimate.budget_bytes)}"
    return f"the nearest plan it supports is with {flags_of(changed)} ({how}): add --nearest to export that"


def _shortage(estimate: Estimate) -> str:
    """What is short, and what the plan takes of it."""
    host_ram = estimate.configuration.machine.host_ram
    if estimate.limit == "host" and host_ram is not None:
        return f"{format_gib(estimate.host_ram_bytes)} of {format_gib(host_ram)} of host RAM"
    return f"at least {format_gib(estimate.low_bytes)} of {format_gib(estimate.budget_bytes)}"


def _that_fits(dialect: Dialect, plan: Plan) -> str:
    better = fitting(dialect, plan)
    if better is None:
        return f"`{_search_for(dialect, plan)}` says what fits, or what it takes"
    before, after = fields_of(plan), fields_of(better)
    flags = flags_of({field: after[field] for field in after if after[field] != before[field]})
    estimate = priced(better, dialect.name)
    word = "fits" if estimate and estimate.verdict == "fits" else "is tight"
    return f"it {word} with {flags}: `vplan estimate PLAN.toml {flags} -o PLAN.toml` writes that plan"


def _search_for(dialect: Dialect, plan: Plan) -> str:
    """The command that searches what the trainer can do for a plan's job on its machine."""
    job, machine = plan.job, plan.machine
    asked = {"method": job.method, "frames": job.frames, "height": job.height, "width": job.width}
    asked |= {"batch_size": job.batch_size} if job.batch_size > 1 else {}
    asked |= {"references": job.references} if job.references > lookup.model(job.model).shape.references else {}
    asked |= {name: value for name, value in (("gpus", machine.gpus), ("nodes", machine.nodes)) if value > 1}
    ram = "" if machine.host_ram is None else f" --host-ram {machine.host_ram / GIB:g}GiB"
    return f"vplan suggest {job.model} --gpu {machine.gpu}{ram} {flags_of(asked)} --for {dialect.name}"


# ---- files


def write_files(exported: Exported, folder: Path, force: bool) -> list[Path]:
    """Puts the files into a folder, each aside and renamed; other files of their names are left unless `force`."""
    paths = [folder / name for name in exported.files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        other = [path for path, text in zip(paths, exported.files.values(), strict=True) if _differs(path, text)]
        if other and not force:
            fault = f"{quoted(str(other[0]))} already exists with other contents"
            raise VplanError(fault, "choose another folder with -o, or add --force")
        for path, text in zip(paths, exported.files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, text, executable=path.suffix == ".sh")
    except OSError as error:
        raise VplanError(
            f"cannot write into {quoted(str(folder))}: {error.strerror}", "choose another folder"
        ) from None
    return paths


def _differs(path: Path, text: str) -> bool:
    """Whether something else is there; a link is, wherever it leads."""
    if not os.path.lexists(path):
        return False
    return path.is_symlink() or not path.is_file() or path.read_bytes() != text.encode()
