"""A trainer that we read or write: its table of bindings, and what is done with the table as a whole.

`translate` reads settings into fields, and `settings_for` writes fields as settings. The two are inverse, because no
two bindings of a table share a setting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.dialects.base import flag_effects
from planner.dialects.base.bindings import (
    Binding,
    Fields,
    Fixed,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
    When,
    is_edit,
)
from planner.errors import VplanError
from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import left_behind


def _binding(entry: Binding | When) -> Binding:
    return entry.binding if isinstance(entry, When) else entry


OWN_ADAPTERS = "what it allocates for adapters of another kind is not recorded"
"""Why a trainer trains nothing but LoRA here, where its table does not say."""

MAY_NEED_LESS = " is not estimated, and may need less: this is the estimate without it"
"""Behind an option in a note, of one that takes nothing more: no verdict without it is firm."""


MOST_STEPS = 10**7
"""Of a run."""


@dataclass(frozen=True)
class Move:
    """A change that saves memory: fields and the values to try. Its settings are what the bindings write for them."""

    changes: Mapping[str, Any]
    cost: str = ""
    """in words, beside what seconds, host RAM and lossy fields say"""
    words: tuple[str, ...] = ()
    """what goes with it and is no field: a learning rate for another optimizer"""
    words_for: Callable[[Settings], list[str]] | None = None
    """its words for what was given, where they are not what its bindings write"""
    words_after: Callable[[Fields], list[str]] | None = None
    """its words by the fields that it leaves, where no binding writes them"""
    values: tuple[Any, ...] = ()
    """for one field that counts (blocks): values to find the first of that does it, the dearest last"""
    by_fields: Callable[[Fields], tuple[Mapping[str, Any], ...]] | None = None
    """the same of several fields together, by what is now (batch and accumulation)"""
    when: Callable[[Fields], bool] = field(default=lambda fields: True)
    """whether it can be done at all, by what is now"""
    lossy: bool = False
    """whether it rounds numbers, where no field of the strategy says so"""
    always: bool = False
    """whether nobody trains without it who knows of it: it saves memory and time and costs nothing"""
    last_resort: bool = False
    """whether it is tried only where no others are enough without loss, because it costs what no estimate counts"""

    @property
    def counts(self) -> bool:
        """Whether the move has several values to try."""
        return bool(self.values or self.by_fields)

    def steps(self, fields: Fields) -> tuple[Mapping[str, Any], ...]:
        """The changes to try in turn, the mildest first, as fields and new values; most moves have one. ``fields``: the
        values now."""
        if self.by_fields is not None:
            return self.by_fields(fields)
        return tuple(dict.fromkeys(self.changes, value) for value in self.values) or (self.changes,)


@dataclass(frozen=True)
class Clash:
    """Two settings that a trainer refuses together: its own code ends the run before the first step."""

    when: Callable[[Fields], bool]
    field: str
    """of the one that is given up"""
    instead: Any
    flag: str
    why: str
    """behind "FLAG is", with the source"""


@dataclass(frozen=True)
class Invocation:
    """What a trainer was started with: its settings, and the flags that it does not know."""

    trainer: str
    settings: Settings
    unknown: tuple[str, ...] = ()
    """flags and keys that the trainer's script does not have"""
    removed: tuple[Remark, ...] = ()
    """those it had once"""
    notes: tuple[str, ...] = ()
    refused: tuple[Remark, ...] = ()
    """those of `unknown` that the script's argparse refuses: the run ends before it starts"""
    config_alone: bool = False
    """whether a config was given without what starts it, and so without its environment"""


@dataclass(frozen=True)
class Translation:
    """A trainer's settings translated into fields of job, strategy and machine."""

    job: Fields
    strategy: Fields
    machine: Fields
    """`gpus` and `nodes`, as far as the launcher says"""
    notes: tuple[str, ...] = ()
    ineffective: tuple[Remark, ...] = ()
    version: str = ""
    """of the trainer's memory terms, where a setting decides which apply and no field says it"""
    refused: tuple[Remark, ...] = ()
    """settings that the trainer's own code ends the run for before the first step, each with why"""


@dataclass(frozen=True)
class Dialect:
    """A trainer that we read, write or both. Its memory terms are in `planner.layout.trainer_terms`."""

    name: str
    title: str
    source: str
    """URL and commit that it was read at"""
    scripts: tuple[str, ...]
    """tails of the paths of its scripts, or of modules written as paths"""
    table: tuple[Binding | When, ...]
    read_script: Callable[[Any], Invocation | None] | None = None
    """`planner.dialects.base.script.Script` -> what was given, for a script or config that is its own; None: it is
    another's"""
    remarks: Callable[[Settings, Fields], Iterable[Remark]] = field(default=lambda settings, fields: ())
    """settings that were given and do nothing, and why"""
    notes: Callable[[Settings, Fields], Iterable[str]] = field(default=lambda settings, fields: ())
    """what it does without being asked, with the source"""
    moves: tuple[Move, ...] = ()
    """what saves memory, the cheapest first"""
    clashes: tuple[Clash, ...] = ()
    """fields that it refuses together, which are neither written nor part of a fix"""
    stops: Callable[[Settings], Iterable[Remark]] = field(default=lambda settings: ())
    """settings, given or missing, that its own code ends the run for before the first step, and why"""
    version: Callable[[Settings, Fields], str] = field(default=lambda settings, fields: "")
    """which of the trainer's terms `BY_VERSION` these settings mean; empty: those of what is written"""
    captures: Callable[[Settings], bool] = field(default=lambda settings: False)
    """whether these settings have torch capture parts of a step as CUDA graphs, which keep what they make"""
    user_loop: bool = False
    """whether the training loop is the user's: fields without a binding are then his to set, and not at our defaults"""
    drops_inputs: bool = True
    """whether dropout of adapters is of a layer's input, whose mask is as large; else it is behind an adapter's first
    matrix, of ``rank`` numbers a token, and not counted"""
    assigns: str = " = "
    """between a key and its value in the trainer's files: TOML's, or YAML's `: `"""
    steps: tuple[str, ...] = ()
    """the setting that says how many optimizer steps a run has, and those that say it in another way where given"""
    fewer_bits: Mapping[str, str] = field(default_factory=dict)
    """versions of the memory terms in which a base in fp8 takes fewer bits, the least lossy first, and what a user
    writes for each: no field of a plan says it"""
    successor: str = ""
    """the trainer of today, of a script that is gone"""
    files: Callable[[Any, Settings], dict[str, str]] | None = None
    """(Plan, settings) -> complete files by name, the one to start last"""

    def __post_init__(self) -> None:
        fields = [name for binding in self.bindings for name in binding.fields]
        assert len(fields) == len(set(fields)), f"{self.name} binds a field twice: {sorted(fields)}"

    @functools.cached_property
    def entries(self) -> tuple[Binding | When, ...]:
        """The entries of the table, followed by one for every strategy field that it does not bind: the trainer has no
        setting for such a field and leaves it at our default. So it does where its adapters are not peft's."""
        if self.user_loop:
            return self.table
        bound = {field for entry in self.table for field in _binding(entry).fields}
        unbound = (field for field in Strategy.model_fields if field not in bound)
        adapter = [] if "adapter" in bound else [Fixed("adapter", "lora", OWN_ADAPTERS)]
        adapter.append(Fixed("lokr_factor", Job.model_fields["lokr_factor"].get_default(), OWN_ADAPTERS))
        rest = (Fixed(field, Strategy.model_fields[field].get_default()) for field in unbound)
        return (*self.table, *adapter, *rest)

    def clashing(self, fields: Fields) -> list[Clash]:
        """What the trainer refuses of these fields."""
        return [each for each in self.clashes if each.when(fields)]

    def optimizer_steps(self, settings: Settings) -> int | None:
        """How many optimizer steps a run has, where its settings say so and not in epochs."""
        if not self.steps or any(settings.get(name) for name in self.steps[1:]):
            return None
        steps = settings.get(self.steps[0])
        return steps if isinstance(steps, int) and 1 <= steps <= MOST_STEPS else None

    @property
    def bindings(self) -> list[Binding]:
        """The bindings of all entries, without their conditions."""
        return [_binding(entry) for entry in self.entries]


def translate(dialect: Dialect, invocation: Invocation) -> Translation:
    """Translates an invocation into fields of job, strategy and machine, with notes and the settings that have no
    effect. Raises a VplanError for settings that mean nothing."""
    fields: Fields = {}
    for entry in dialect.entries:
        if isinstance(entry, When):
            if fields[entry.field] not in entry.values:
                continue
            entry = entry.binding
        fields |= entry.to_fields(invocation.settings)
    if invocation.settings.get("launch:--use_fsdp") and fields["sharding"] != "fsdp":
        raise VplanError(f"FSDP of accelerate's launch is not priced with {dialect.title}", "leave --use_fsdp out")
    launch = {"launch:--zero_stage": 2} | dict(invocation.settings)
    staged = launch.get("launch:--use_deepspeed") and int(launch["launch:--zero_stage"]) > 0
    if staged and not fields["sharding"].startswith("zero"):
        fault = f"DeepSpeed of accelerate's launch is not priced with {dialect.title}"
        raise VplanError(fault, "leave --use_deepspeed out")
    # Behind the fields: that a job is not known at all says more than that one of its options is not priced.
    unpriced = flag_effects.notes(invocation.trainer, invocation.settings, fields["model"])
    job, strategy, machine = (
        {name: value for name, value in fields.items() if name in record.model_fields}
        for record in (Job, Strategy, Machine)
    )
    return Translation(
        job,
        strategy,
        machine,
        notes=(*invocation.notes, *dialect.notes(invocation.settings, fields), *unpriced),
        ineffective=tuple(dialect.remarks(invocation.settings, fields)),
        version=dialect.version(invocation.settings, fields),
        refused=(
            *(Remark(each.flag, each.why) for each in dialect.clashing(fields)),
            *dialect.stops(invocation.settings),
        ),
    )


def settings_for(dialect: Dialect, fields: Fields) -> Settings:
    """The settings that express these fields (Job's, Strategy's after `resolve`, Machine's). Raises an
    InexpressibleError that names everything the trainer cannot express."""
    settings: Settings = {}
    unsupported: list[UnsupportedValue] = []
    for entry in dialect.entries:
        if isinstance(entry, When):
            if fields[entry.field] not in entry.values:
                continue
            entry = entry.binding
        try:
            words = entry.to_settings(fields)
        except InexpressibleError as error:
            unsupported += error.values
            continue
        # A line to add to the trainer's code is a fix that `check` may name, but no command can carry it.
        if any(map(is_edit, words)):
            instead = entry.to_fields({})
            why = "it has no option for that; it takes a code change"
            changed = [name for name in entry.fields if instead[name] != fields[name]]
            unsupported += [UnsupportedValue(name, fields[name], instead[name], why) for name in changed]
            continue
        assert not settings.keys() & words.keys(), f"two bindings write {settings.keys() & words.keys()}"
        settings |= words
    unsupported += [
        UnsupportedValue(each.field, fields[each.field], each.instead, f"{each.flag} is {each.why}")
        for each in dialect.clashing(fields)
    ]
    if unsupported:
        raise InexpressibleError(*unsupported)
    return settings


def nearest_fields(dialect: Dialect, fields: Fields) -> Fields:
    """The nearest fields that the trainer can express. An unsupported value is replaced by what the trainer uses
    instead; fields that refined it (such as how many blocks are checkpointed) are reset with it."""
    for _ in range(len(dialect.entries)):  # one thing instead of another may be what a second binding cannot say
        try:
            settings_for(dialect, fields)
            return fields
        except InexpressibleError as error:
            fields = fields | {value.field: value.instead for value in error.values}
            fields = fields | left_behind(fields)
    raise AssertionError(f"{dialect.name} has no way to say what it does instead")


def capabilities(dialect: Dialect) -> dict[str, str]:
    """Field -> which of its values the trainer can express, in words."""
    words: dict[str, str] = {}
    for binding in dialect.bindings:
        words |= binding.capabilities()
    return words
