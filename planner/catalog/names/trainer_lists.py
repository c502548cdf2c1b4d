"""Which models each trainer lists in its documentation, and what vplan answers where one is asked for by that name.

The lists are `profiles/model_lists/TRAINER.toml`, read of the trainers' repositories at the commit they name."""

from __future__ import annotations

import enum
import functools

import profiles
from planner.catalog import lookup
from planner.catalog.names import other_models
from planner.catalog.profile_files import read_record
from planner.errors import VplanError
from planner.schema import Record, Text


class NameVerdict(enum.StrEnum):
    """What a name gets."""

    NUMBERS = "numbers"
    SEVERAL = "several"
    """it means several models of ours, each with numbers"""
    REFUSED = "refused"
    """it is known, and a sentence says what is missing"""
    UNKNOWN = "unknown"


class ListedModel(Record):
    """A model as a trainer writes its name."""

    listed: Text
    typed: str = ""
    """what a user of it types, where the trainer's words stand for more or less than a name"""
    ours: tuple[Text, ...] = ()
    """the bundled models that the name means; none where vplan refuses it"""
    file: str = ""
    """where it is listed, if not in the list's own file"""

    @property
    def name(self) -> str:
        return self.typed or self.listed


class TrainerList(Record):
    """A trainer's list of models."""

    trainer: Text
    """its name in `profiles/trainers/`"""
    title: Text
    repository: Text
    commit: Text
    read_at: Text
    """day, as 2026-11-28"""
    file: Text
    section: Text
    """the part of the file that was read, and what was left out of it"""
    models: tuple[ListedModel, ...]


@functools.cache
def trainer_lists() -> tuple[TrainerList, ...]:
    """The lists of all trainers that were read, by the trainer's name in alphabetical order."""
    return tuple(read_record(path, TrainerList) for path in sorted(profiles.MODEL_LISTS.glob("*.toml")))


def name_verdict(name: str) -> tuple[NameVerdict, tuple[str, ...]]:
    """What lookup makes of a name, and the bundled models that it means: one, several, or none of a refused one."""
    if several := lookup.several(name):
        return NameVerdict.SEVERAL, several
    try:
        return NameVerdict.NUMBERS, (lookup.model(name).name,)
    except VplanError:
        if origin := lookup.distilled_from(name):
            return NameVerdict.REFUSED, (origin,)
        return (NameVerdict.REFUSED if other_models.find(name) else NameVerdict.UNKNOWN), ()
