"""What a trainer's settings that no binding reads do to its memory, as data: profiles/flag_effects/.

A flag that a trainer has and we do not translate must not pass in silence: it changes nothing that is estimated, or it
is said beside the answer, or there is none.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import functools
import re
import tomllib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import profiles
from planner.dialects.base.bindings import Settings
from planner.dialects.base.flags import Scalar, Text
from planner.errors import VplanError
from planner.schema import Record

SWITCHED_OFF = ("", "none", "false", "no", "off", "0", "0.0")
"""Values, in lower case, of a setting that does nothing."""

LAUNCHERS = ("accelerate", "deepspeed", "torchrun")
LAUNCH, DEEPSPEED = "launch:", "deepspeed:"

WORDS = {
    "more": "takes more than this",
    "less": "may need less: this is the estimate without it",
    "either": "takes more or less than this",
}


class Unpriced(Record):
    """Settings that change memory, or the seconds of a step, in a way that is not estimated."""

    names: tuple[Text, ...]
    """as `profiles/trainers` has them"""
    why: Text
    """what they do, in words that stand in brackets behind the name"""
    source: Text
    """where that is read in the trainer's code"""
    needs: Literal["more", "less", "either"]
    """memory, beside what is estimated"""
    refused: bool = False
    """whether an answer without it would be for another run"""
    off: tuple[Scalar, ...] = ()
    """values that do nothing, beside `SWITCHED_OFF`: those of another default"""
    on: tuple[Text, ...] = ()
    """the only values that act, in lower case, of a setting that acts by being switched off"""
    scripts: tuple[Text, ...] = ()
    """the ends of the names of the scripts that have them do so; none: of all"""
    models: tuple[Text, ...] = ()
    """the models whose code reads them; none: of all"""
    lowers: tuple[Text, ...] = ()
    """of settings that need less, the phases in which they do: said where one of these has the peak and no option that
    is priced is enough"""
    written: Text = ""
    """how the trainer takes it for that; "{gpus}" stands for the number of GPUs"""
    several_gpus: bool = False
    """whether it does something on several GPUs alone"""

    def acts(self, value: object, script: str, model: str) -> bool:
        """Whether a setting's value does what is said here, in a script and for a model."""
        if self.scripts and not script.endswith(self.scripts):
            return False
        if self.models and model not in self.models:
            return False
        if self.on:
            return str(value).lower() in self.on
        return str(value).lower() not in SWITCHED_OFF and value not in (None, [], {}, *self.off)


class FlagEffects(Record):
    """What a trainer's settings do to memory, of those that no binding reads."""

    unpriced: tuple[Unpriced, ...] = ()
    nothing: tuple[Text, ...] = ()
    """settings that change neither memory nor the seconds of a step by what an estimate could say"""

    def acting(self, settings: Settings, model: str = "") -> Iterator[tuple[str, Unpriced]]:
        """The settings that are given and act for a model, and what they do."""
        script = str(settings.get("script", ""))
        by_name = {name: row for row in self.unpriced for name in row.names}
        for key, value in settings.items():
            name = _plain(key)
            while name and name not in by_name:  # a key of a table that is named whole
                name = name.rpartition(".")[0]
            row = by_name.get(name)
            if row is not None and row.acts(value, script, model):
                yield name, row


class OtherWay(NamedTuple):
    """A setting that the trainer has against a shortage of memory and that is not priced."""

    written: str
    why: str


def other_ways(trainer: str, settings: Settings, phase: str, gpus: int) -> Iterator[OtherWay]:
    """Those of a trainer that lower the memory of a phase and are not in use."""
    said = effects(trainer)
    used = {id(row) for _, row in said.acting(settings)}
    for row in said.unpriced:
        if phase in row.lowers and id(row) not in used and (gpus > 1 or not row.several_gpus):
            yield OtherWay(row.written.replace("{gpus}", str(gpus)), row.why)


@functools.cache
def effects(trainer: str) -> FlagEffects:
    """What is known of a trainer's settings; nothing for one without a file."""
    path = profiles.flag_effects_path(trainer)
    if not path.is_file():
        return FlagEffects()
    return FlagEffects.read(tomllib.loads(path.read_text(encoding="utf-8")), f"profile {path.name} is damaged")


def notes(trainer: str, settings: Settings, model: str = "") -> tuple[str, ...]:
    """What of the settings is not estimated for a model, in words. Raises a VplanError for one without which an
    estimate would be of another run. Settings of a launcher are read by what is known of the launchers, whatever the
    trainer is."""
    launch = {key: value for key, value in settings.items() if key.startswith((LAUNCH, DEEPSPEED))}
    own = {key: value for key, value in settings.items() if key not in launch}
    found: dict[str, Any] = {}
    for program, given in ((trainer, own), *((launcher, launch) for launcher in LAUNCHERS)):
        for name, row in effects(program).acting(given, model):
            if row.refused:
                raise VplanError(f"{name} is not priced ({row.why})", f"leave {name} out")
            found[f"{name} is not estimated ({row.why}), and {WORDS[row.needs]}"] = None
    return tuple(found)


def _plain(key: str) -> str:
    """A key of the settings as `profiles/trainers` names it: `config:directory[0].path` is `directory[].path`."""
    return re.sub(r"\[\d+\]", "[]", key.partition(":")[2] if re.match(r"\w+:", key) else key)
