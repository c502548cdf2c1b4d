"""Models that `profiles/other_models.toml` names and no profile describes: what is missing of each, so that a question
about one is refused by its name and not answered for a model called much alike."""

from __future__ import annotations

import functools

import profiles
from planner.catalog.names.model_names import model_key
from planner.catalog.profile_files import read_record
from planner.errors import VplanError, quoted
from planner.schema import Record, Text


class OtherModel(Record):
    """A model, or an adapter of one, that vplan knows by name alone."""

    title: Text
    names: tuple[Text, ...]
    """as people and trainers write them"""
    missing: Text
    """why there is no profile: the end of a sentence about it"""
    recorded_by: str = ""
    """diffusers' class of the part that is trained, where `vplan record` records it from the weights' folder with the
    inputs that it is trained with; not of a class that is bundled with other inputs, such as fewer channels"""
    goes_with: str = ""
    """the bundled model that an adapter stands beside"""
    source: Text

    def refusal(self, name: str) -> VplanError:
        """The answer to a question about it under one of its names."""
        if self.goes_with:
            fix = f"`vplan suggest {self.goes_with}` plans the model that it stands beside"
        elif self.recorded_by:
            fix = (
                f"record its {self.recorded_by} from the folder of its weights in diffusers format: vplan record FOLDER"
            )
        else:
            fix = "`vplan models` lists those that have one; docs/your-own-model.md: how to record a class of your own"
        return VplanError(f"model {quoted(name)} ({self.title}) has no profile: {self.missing}", fix)


class ModelGroup(Record):
    """A name that means several bundled models."""

    names: tuple[Text, ...]
    models: tuple[Text, ...]


class OtherNames(Record):
    """All that the file has."""

    group: tuple[ModelGroup, ...]
    """names that mean several bundled models"""
    model: tuple[OtherModel, ...]
    """models that are known by name alone"""


@functools.cache
def other_names() -> OtherNames:
    """What `profiles/other_models.toml` has."""
    return read_record(profiles.OTHER_MODELS, OtherNames)


def find(name: str) -> OtherModel | None:
    """The model of a name, which is none of ours; None where there is none."""
    return _by_name().get(model_key(name))


def group(name: str) -> tuple[str, ...]:
    """The bundled models that a name means together; empty where it means none."""
    return _groups().get(model_key(name), ())


@functools.cache
def _by_name() -> dict[str, OtherModel]:
    return {model_key(name): model for model in other_names().model for name in model.names}


@functools.cache
def _groups() -> dict[str, tuple[str, ...]]:
    return {model_key(name): group.models for group in other_names().group for name in group.names}
