"""The part of `vplan record` about the user's own models: from a folder to a stored profile, and which tapes to record
first."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import profiles
from planner.catalog import diffusers_folder, lookup, user_data
from planner.catalog.own_code import NamedClass
from planner.catalog.own_inputs import OwnInputs
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import job_for
from planner.errors import VplanError, quoted
from planner.hardware import doctor
from planner.launch.recorders import Derivation, Recorders
from planner.spec.job import Strategy
from planner.spec.rules import resolve
from planner.tape.codec import read_tape
from planner.tape.variants.choice import ONE_SAMPLE, optimizer_variant, sample_variant, step_variant
from planner.tape.variants.torch_and_card import BOTH, TorchAndCard

FIRST_OPTIMIZERS = ("adamw", "adamw-8bit")


class Kept(NamedTuple):
    """A stored profile of a user's model, the path of its file, and notes on the sources of its facts."""

    profile: ModelProfile
    path: Path
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object for `--json`."""
        return {
            "name": self.profile.name,
            "class": self.profile.diffusers_class,
            "parameters": self.profile.parameters,
            "profile": str(self.path),
            "lent_by": self.profile.lent_by,
            "notes": list(self.notes),
        }


def is_folder(text: str) -> bool:
    """Whether an argument of `vplan record` is a folder or config.json; if it is also a model's name, it is the
    name."""
    if not diffusers_folder.is_path(text):
        known = text.lower() in lookup.model_names() or lookup.bundled_name(text.lower())
        return not known and len(text) < 4096 and os.path.isdir(text)
    return text.startswith((".", "/", "~")) or text.endswith(".json") or diffusers_folder.locate(text) is not None


def read(text: str, name: str | None, code: NamedClass | None = None) -> tuple[diffusers_folder.Source, str]:
    """Reads the facts of a folder or config.json, and the name its model gets; builds and writes nothing.

    ``code``: the class, if the config does not name it. Raises a VplanError for an invalid config, for a class that
    diffusers does not have, and for a name in use.
    """
    classes = {*lookup.diffusers_classes(), *diffusers_folder.installed_classes()}
    source = diffusers_folder.read_source(text, classes, code.class_name if code else None)
    if name is None:
        chosen = user_data.check_name(user_data.name_for(source.folder), "the folder's name")
        _check_untaken(chosen, source)
    else:
        chosen = user_data.check_name(name)
    if chosen in profiles.model_names() or lookup.bundled_name(chosen):
        fault = f"{quoted(chosen)} is the name of a bundled model"
        raise VplanError(fault, "choose another: --name NAME")
    return source, chosen


def keep(source: diffusers_folder.Source, name: str, inputs: OwnInputs, recorders: Recorders) -> Kept:
    """Builds the model on the meta device and stores its profile, before anything is recorded.

    Raises a VplanError for an architecture that cannot be built.
    """
    ((_, answer),) = recorders.answers([Derivation(source, name, inputs.model_dump(mode="json", exclude_unset=True))])
    path = user_data.write_profile(name, answer["profile"])
    return Kept(lookup.model(name), path, tuple(answer["notes"]))


def _check_untaken(name: str, source: diffusers_folder.Source) -> None:
    """Raises a VplanError if a derived name would replace the model of another folder."""
    there = user_data.read_profile(name)
    if there is not None and there.get("origin") != source.origin:
        raise VplanError(f"you have a model {quoted(name)} from another folder", "choose another name: --name NAME")


def first_variants(profile: ModelProfile) -> Iterator[str]:
    """The variants needed first: LoRA and full training in our default precision, with and without checkpointing, batch
    size 1 and more, and validation samples; for the newest torch and the installed one, and for both attention kernels,
    if they differ."""
    samples = ONE_SAMPLE if profile.shape.batches == ONE_SAMPLE else (1, 2)
    places = itertools.starmap(TorchAndCard, itertools.product((None, doctor.torch_release()), BOTH))
    contexts = tuple(itertools.product(samples, places))
    for method in ("lora", "full"):
        job = job_for(profile, {"method": method})
        for mode in ("none", "full") if profile.traits.checkpoints else ("none",):
            strategy = resolve(job, Strategy.read({"gradient_checkpointing": mode}))
            names = (step_variant(profile, job, strategy, *context).name for context in contexts)
            yield from dict.fromkeys(names)
        names = (sample_variant(profile, job, resolve(job, Strategy()), *context).name for context in contexts)
        yield from dict.fromkeys(names)
        for optimizer in FIRST_OPTIMIZERS:
            yield optimizer_variant(profile, job, resolve(job, Strategy.read({"optimizer": optimizer}))).name


def is_current(path: Path) -> bool:
    """Whether a tape's file exists and can be read. A damaged one is recorded again."""
    try:
        read_tape(path)
    except VplanError:
        return False
    return True
