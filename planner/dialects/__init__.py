"""Other trainers' words: how their commands and config files are read, and how ours are written for them.

One package per trainer. Its ``settings.DIALECT`` (`planner.dialects.base.dialect`) is the table of bindings between its
words and ours (`planner.dialects.base.bindings`). How these trainers hold memory is in `planner.layout.trainer_terms`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from planner.dialects.base.bindings import InexpressibleError
from planner.errors import VplanError, did_you_mean

if TYPE_CHECKING:
    from planner.dialects.base.dialect import Dialect, Invocation
    from planner.dialects.base.script import Script

TRAINERS = (
    "accelerate",
    "ai-toolkit",
    "diffsynth",
    "diffusers",
    "diffusers-pipeline",
    "diffusion-pipe",
    "easyanimate",
    "latentsync",
    "musubi-tuner",
    "sd-scripts",
    "simpletuner",
    "videox-fun",
)
"""Trainers whose words we know."""


FORMER = ("diffsynth-2025",)
"""Trainers' former scripts, whose commands are still pasted; their terms are those of ``trainer@version``."""


FURTHER = (
    *("sd-scripts-unet", "sd-scripts-hunyuan", "sd-scripts-sd3", "sd-scripts-anima", "onetrainer", "cogvideo"),
    *("cogvideox-factory", "ltx-trainer"),
)
"""Further scripts of a trainer, for other models and under terms of their own (``trainer@version``), and trainers that
are read and not written."""


@functools.cache
def all_dialects() -> dict[str, Dialect]:
    """All dialects, former versions of trainers included, by name."""
    table: tuple[Dialect, ...] = tuple(module(name).DIALECT for name in (*TRAINERS, *FORMER, *FURTHER))
    return {dialect.name: dialect for dialect in table}


def dialect(name: str) -> Dialect:
    """The dialect of a trainer by name; of `trainer@scripts@version` that of the scripts, or else the trainer's. Raises
    a VplanError that lists the supported ones."""
    table = all_dialects()
    while name not in table and "@" in name:
        name = name.rpartition("@")[0]
    if name not in table:
        listed = "supported trainers: " + ", ".join(table)
        raise VplanError(f"trainer {name} is not supported", did_you_mean(name, table, listed))
    return table[name]


def writer(trainer: str, model: str) -> Dialect:
    """The dialect that writes a trainer's files for a model: of a trainer with several scripts the one that trains it,
    else the first, which says that none does. Raises a VplanError for a trainer that is not supported."""
    first = dialect(trainer)
    own = [other for other in all_dialects().values() if other.files and other.name.partition("@")[0] == first.name]
    return next((other for other in own if len(own) > 1 and _writes(other, model)), first)


def _writes(dialect: Dialect, model: str) -> bool:
    (binding,) = (each for each in dialect.bindings if each.fields == ("model",))
    try:
        binding.to_settings({"model": model})
    except InexpressibleError:
        return False
    return True


def read_script(script: Script) -> tuple[Dialect, Invocation]:
    """The dialect whose script, config or Python file this is, and its settings. Raises a VplanError that says what it
    is instead, or lists the supported trainers, when it is none of theirs."""
    from planner.dialects.refusal import other_model, refusal, unread_config

    if refused := unread_config(script) or other_model(script):
        raise refused
    readers = [dialect for dialect in all_dialects().values() if dialect.read_script is not None]
    for reader in readers:
        assert reader.read_script is not None
        invocation = reader.read_script(script)
        if invocation is not None:
            notes = (*_trainings(reader, script, invocation), *invocation.notes)
            return reader, replace(invocation, notes=notes, config_alone=script.config is not None)
    raise refusal(script, readers)


def _trainings(reader: Dialect, script: Script, invocation: Invocation) -> Iterator[str]:
    """That a script has several commands of a trainer, where one of them alone is what was read: both experts of a
    model are often trained one after the other."""
    assert reader.read_script is not None
    alone: list[Invocation] = []
    for program in script.programs if len(script.programs) > 1 else ():
        with contextlib.suppress(VplanError):  # of a command that is not the answer's
            alone += filter(None, [reader.read_script(replace(script, programs=(program,)))])
    if len(alone) > 1 and alone[-1].settings == invocation.settings:
        yield f"{len(alone)} commands of this trainer in {script.name}: the last one is estimated"


def module(name: str) -> ModuleType:
    """A trainer's settings: its ``DIALECT``, and where it writes files what each of their lines carries."""
    return importlib.import_module(f"planner.dialects.{name.replace('-', '_')}.settings")
