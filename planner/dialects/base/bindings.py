"""How a trainer's own words and ours say the same thing: one table of bindings, read in both directions.

A trainer's words are `Settings`, one flat mapping whatever they were typed into:

    "script"                      which of its scripts runs, as "flux_train.py"
    "gpus", "nodes"               processes per node and nodes, whichever launcher says so
    "--num_frames"                a flag of that script; True for a flag without a value
    "launch:--num_processes"      a flag of the launcher (accelerate launch, torchrun, deepspeed), the same name for all
    "config:data.num_frames"      a key of its config file, tables joined with dots
    "dataset:general.resolution"  a key of its dataset's file
    "deepspeed:zero_optimization.stage"  a key of DeepSpeed's JSON
    "edit:vae.enable_slicing()"   a line to add to its code, where it has no switch: read from nothing, never exported

Our words are `Fields`: those of Job and Strategy, and of Machine `gpus` and `nodes`, by name. Every field of Job is
said by one binding of a dialect, and every field of Strategy by at most one: a trainer leaves the others at our
defaults. So what it can express is a table too (`planner.dialects.base.dialect.Dialect`). Each binding is an inverse
pair over settings that no other binding has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.errors import VplanError, quoted

Settings = dict[str, Any]
Fields = dict[str, Any]
EDIT = "edit:"


class Remark(NamedTuple):
    """A flag or key, and a remark about it."""

    flag: str
    why: str


class UnsupportedValue(NamedTuple):
    """A field's value that a trainer has no setting for, and the value that it uses instead."""

    field: str
    value: object
    instead: object
    why: str

    @property
    def message(self) -> str:
        """The field, its value and the reason in words: "sharding zero-3: it has no ..., always ddp"."""
        return f"{self.field} {quoted(self.value)}: {self.why}"


class InexpressibleError(ValueError):
    """Raised when a trainer's settings cannot express some values of fields; `values` names them all."""

    def __init__(self, *values: UnsupportedValue) -> None:
        super().__init__("; ".join(value.message for value in values))
        self.values = values


def identity(value: Any) -> Any:
    """The value itself: for a setting that is written as the field is."""
    return value


@dataclass(frozen=True)
class Value:
    """A binding of one field to one setting."""

    field: str
    setting: str
    default: Any
    """the field's value where the setting is absent: the trainer's default (`source`)"""
    read: Callable[[Any], Any] = identity
    """setting -> field; raises a VplanError for what means nothing"""
    write: Callable[[Any], Any] = identity
    """field -> setting; raises an InexpressibleError"""
    source: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """The name of the bound field, in a tuple."""
        return (self.field,)

    @property
    def settings(self) -> tuple[str, ...]:
        """The name of the bound setting, in a tuple."""
        return (self.setting,)

    def to_fields(self, settings: Settings) -> Fields:
        """The field's value by the settings; the trainer's default where the setting is absent. Raises a VplanError for
        a value that means nothing."""
        return {self.field: self.read(settings[self.setting]) if self.setting in settings else self.default}

    def to_settings(self, fields: Fields) -> Settings:
        """The setting for the field's value; none where that is the trainer's default. Raises an InexpressibleError for
        a value it cannot hold."""
        value = fields[self.field]
        return {} if value == self.default else {self.setting: self.write(value)}

    def capabilities(self) -> dict[str, str]:
        """Field -> which of its values the binding can express, in words."""
        return {self.field: self.setting}


@dataclass(frozen=True)
class Choice:
    """A binding of fields with few values (or combinations of values) to flags that are present or absent."""

    field: str | tuple[str, ...]
    rows: Mapping[Any, Settings]
    """value (a tuple of values for several fields) -> what says it; {} is what the trainer does when nothing is said.
    Rows later in the table win where several match equally well."""
    why: str = "it has no option for that"
    """for a value that is in no row"""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the bound fields."""
        return self.field if isinstance(self.field, tuple) else (self.field,)

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings that occur in any row."""
        return tuple(dict.fromkeys(name for row in self.rows.values() for name in row))

    def to_fields(self, settings: Settings) -> Fields:
        """The values of the row whose settings are all present, the longest if several match. Raises a VplanError when
        none does."""
        matching = [key for key, row in self.rows.items() if all(settings.get(name) == row[name] for name in row)]
        if not matching:
            present = ", ".join(
                f"{name} {' '.join(str(settings[name]).split())}" for name in self.settings if name in settings
            )
            options = " or ".join(", ".join(f"{name} {row[name]}" for name in row) for row in self.rows.values())
            raise VplanError(
                f"{present or 'nothing'} does not give a known {' and '.join(self.fields)}", f"use {options}"
            )
        return self._values(max(reversed(matching), key=lambda key: len(self.rows[key])))

    def to_settings(self, fields: Fields) -> Settings:
        """The settings of the row for these values. Raises an InexpressibleError with the nearest row's values when
        there is none."""
        values = tuple(fields[name] for name in self.fields)
        for key, row in self.rows.items():
            if tuple(self._values(key).values()) == values:
                return dict(row)
        nearest = max(self.rows, key=lambda key: _alike(tuple(self._values(key).values()), values))
        instead = self._values(nearest)
        different = [name for name in self.fields if instead[name] != fields[name]]
        raise InexpressibleError(*(UnsupportedValue(name, fields[name], instead[name], self.why) for name in different))

    def capabilities(self) -> dict[str, str]:
        """Field -> which of its values the binding can express, in words."""
        values = [self._values(key) for key, row in self.rows.items() if not any(map(is_edit, row))]
        return {name: ", ".join(dict.fromkeys(str(value[name]) for value in values)) for name in self.fields}

    def _values(self, key: Any) -> Fields:
        return dict(zip(self.fields, key if isinstance(self.field, tuple) else (key,), strict=True))


def _alike(a: Sequence[object], b: Sequence[object]) -> int:
    """How near values of several fields are: two ways of doing something are nearer than doing it and not."""
    return sum(
        2 if left == right else left not in _NOTHING and right not in _NOTHING for left, right in zip(a, b, strict=True)
    )


_NOTHING = ("none", "off", False, None)


@dataclass(frozen=True)
class Fixed:
    """A binding of a field that always has the same value in this trainer."""

    field: str
    value: Any
    why: str = ""
    """with its source; empty where the field means nothing in this trainer"""

    @property
    def fields(self) -> tuple[str, ...]:
        """The name of the bound field, in a tuple."""
        return (self.field,)

    settings: tuple[str, ...] = ()

    def to_fields(self, settings: Settings) -> Fields:
        """The field with its fixed value, whatever the settings."""
        return {self.field: self.value}

    def to_settings(self, fields: Fields) -> Settings:
        """No settings. Raises an InexpressibleError for another value; a fixed value of None accepts any."""
        if self.value is not None and fields[self.field] != self.value:
            why = self.why or f"it is always {self.value}"
            raise InexpressibleError(UnsupportedValue(self.field, fields[self.field], self.value, why))
        return {}

    def capabilities(self) -> dict[str, str]:
        """Field -> which of its values the binding can express, in words."""
        return {self.field: f"always {self.value}"}


@dataclass(frozen=True)
class FunctionPair:
    """A binding that is not one to one: two functions, inverse to each other over what they can express."""

    fields: tuple[str, ...]
    settings: tuple[str, ...]
    to_fields: Callable[[Settings], Fields]
    to_settings: Callable[[Fields], Settings]
    """raises an InexpressibleError"""
    words: Mapping[str, str]
    """field -> what of it can be said"""
    changed: Callable[[Settings, Fields, Fields], Settings | None] | None = None
    """(settings as given, fields before, fields after) -> the settings to change, each where its user says it, of what
    can be said in several places at once; None: as `to_settings` writes it"""

    def capabilities(self) -> dict[str, str]:
        """Field -> which of its values the binding can express, in words."""
        return {name: self.words[name] for name in self.fields}


def pair(
    to_fields: Callable[[Settings], Fields],
    to_settings: Callable[[Fields], Settings],
    settings: tuple[str, ...],
    **words: str,
) -> FunctionPair:
    """A `FunctionPair` of the fields that ``words`` names."""
    return FunctionPair(tuple(words), settings, to_fields, to_settings, words)


Binding = Value | Choice | Fixed | FunctionPair


@dataclass(frozen=True)
class When:
    """A binding that applies for some values of another field, which an earlier entry binds. Otherwise its fields stay
    at our defaults (the rank of adapters, without adapters)."""

    field: str
    values: frozenset[Any]
    binding: Binding


ONLY_LORA = frozenset({"lora"})
"""Of `When("method", ...)`: for a binding of adapters."""


def is_edit(setting: str) -> bool:
    """Whether a setting stands for a change to the trainer's code."""
    return setting.startswith(EDIT)
