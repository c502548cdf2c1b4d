"""Finds a model by the name that people type. Reads the profiles, and only the file it needs.

Models are the bundled ones and, after them, the user's own (`vplan record FOLDER`, kept in
`planner.catalog.user_data`). `model` is the entry point. What a model's rules allow (frames, sizes, blocks) is in
`planner.catalog.shapes` and re-exported here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import profiles
from planner.catalog import diffusers_folder, user_data
from planner.catalog.forward_call import ForwardCall
from planner.catalog.names import other_models
from planner.catalog.names.model_names import model_key
from planner.catalog.profile_files import LONGEST_NAME, read_record, read_toml
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import (
    check_blocks,
    check_job,
    check_shape,
    grid,
    job_for,
    parse_resolution,
    sample_grid,
)
from planner.catalog.traits import Traits
from planner.errors import VplanError, nearest, quoted

__all__ = [
    "ModelProfile",
    "bundled_name",
    "check_blocks",
    "check_job",
    "check_shape",
    "diffusers_classes",
    "distilled_from",
    "grid",
    "job_for",
    "lent_traits",
    "model",
    "model_names",
    "parse_resolution",
    "sample_grid",
    "several",
    "taken_for",
]


# ---- models


def model_names() -> tuple[str, ...]:
    """Names of all models we know: the bundled ones, then the user's own, each alphabetical."""
    bundled = profiles.model_names()
    return (*bundled, *(name for name in user_data.model_names() if name not in bundled))


def model(name: str) -> ModelProfile:
    """The model for a name, an alias, a Hugging Face id, a prefix that only one model has, or the folder of an own
    model."""
    if profile := _exactly(name):
        return profile
    if origin := distilled_from(name):
        fault = f"{quoted(name)} is a distilled {_model(origin).title}, which vplan does not train"
        raise VplanError(fault, f"use {origin}, whose memory is the same, and its own weights")
    # Before starts of names: Anima is no Wan 2.2 Animate.
    if other := other_models.find(name):
        raise other.refusal(name)
    # A start that several models have is refused with their names: guessing one would plan for another model.
    variants = _meanings(name)
    if len(variants) == 1:
        return model(variants[0])
    if variants:
        raise VplanError(f"model {quoted(name)} is ambiguous", "write one of " + ", ".join(variants))
    if profile := _recorded_from(name):  # a folder here, named without a path
        return profile
    if name.strip() and Path(name).is_dir():
        raise _no_model_in(name)
    raise VplanError(f"model {quoted(name)} is not known", _near_models(name.strip().lower()))


def _no_model_in(folder: str) -> VplanError:
    """Why a folder is not a model: peft and diffusers save an adapter without the config of its base model."""
    adapters = ("adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors")
    if any((Path(folder) / name).is_file() for name in adapters):
        fix = "name the model it was trained on (`vplan models` lists them)"
        return VplanError(f"{quoted(folder)} holds a LoRA, not a model", fix)
    return VplanError(
        f"{quoted(folder)} holds no model", "pass a folder with a config.json, or a name from `vplan models`"
    )


def several(name: str) -> tuple[str, ...]:
    """The models that a name may mean; empty if it means exactly one, or none."""
    if _exactly(name) or distilled_from(name) or other_models.find(name):
        return ()
    variants = _meanings(name)
    return variants if len(variants) > 1 else ()


def taken_for(name: str, profile: ModelProfile) -> str:
    """How a name that is not exact was understood, in words: as an alias, or as a prefix."""
    if profile.is_own or model_key(name).replace(".", "") == model_key(profile.name).replace(".", ""):
        return ""
    return f"{quoted(name)} taken for {profile.name}"


def _exactly(name: str) -> ModelProfile | None:
    """The model for an exact name, alias, Hugging Face id or path; None for anything else."""
    if diffusers_folder.is_path(name) and (profile := _recorded_from(name)):
        return profile
    text = name.strip().lower()
    if len(text) > LONGEST_NAME:
        raise VplanError(f"model {quoted(name)} is not known", "`vplan models` lists all models")
    if re.fullmatch(r"[a-z0-9][a-z0-9._-]*", text):
        # An exact name first, which opens one file; aliases need all of them.
        if profiles.model_path(text).is_file():
            return _model(text)
        if user_data.is_name(text) and (own_profile := _own_model(text)):
            return own_profile
    canonical = bundled_name(text)
    return _model(canonical) if canonical else None


def diffusers_classes() -> tuple[str, ...]:
    """The classes whose models can be recorded: those of the bundled models, which supply what a config does not
    say."""
    return tuple(sorted({_model(name).diffusers_class for name in profiles.model_names()}))


def bundled_name(text: str) -> str | None:
    """The bundled model that a lower-case text names, by its name or an alias; None if there is none."""
    return _model_aliases().get(model_key(text))


@functools.cache
def _model(name: str) -> ModelProfile:
    """A bundled model by its file's name."""
    path = profiles.model_path(name)
    return _checked(read_record(path, ModelProfile), name, f"profile {path.name} is damaged", "reinstall vplan")


def _own_model(name: str) -> ModelProfile | None:
    """The user's own model of that name. Read anew each time, because `vplan record` may just have written it."""
    data = user_data.read_profile(name)
    if data is None:
        return None
    opening, fix = f"your own profile {name}.json is damaged", f"record the model again (in {user_data.folder()})"
    return _checked(_with_traits(ModelProfile.read(data, where=opening)), name, opening, fix)


def lent_traits(lender: ModelProfile) -> Traits:
    """The traits that a user's model takes from the bundled model of its class: all except the names of other weights
    of the same shape."""
    return lender.traits.replace(same_shape=())


def _with_traits(profile: ModelProfile) -> ModelProfile:
    """An own model with the traits of its class. Profiles of own models do not store them, so a model recorded by an
    earlier version gets the current ones."""
    call = ForwardCall.of(profile.inputs)
    if not profile.lent_by and call is None:
        return profile

    def bundled() -> Iterator[ModelProfile]:  # the lender first: opening all files takes time
        if profile.lent_by:
            yield _model(profile.lent_by)
        yield from map(_model, profiles.model_names())

    encoders = []
    for encoder in profile.text_encoders:
        alike = (component for lender in bundled() for component in lender.text_encoders)
        traits = next(
            (component.traits for component in alike if component.class_name == encoder.class_name), encoder.traits
        )
        encoders.append(encoder.replace(traits=traits))
    vaes = (lender.vae for lender in bundled() if lender.vae.class_name == profile.vae.class_name)
    vae = profile.vae.replace(traits=next((component.traits for component in vaes), profile.vae.traits))
    model_traits = lent_traits(_model(profile.lent_by)) if call is None else call.traits
    return profile.replace(traits=model_traits, vae=vae, text_encoders=tuple(encoders))


def _recorded_from(text: str) -> ModelProfile | None:
    """The user's own model that was recorded from a folder or config.json; None if the text is no path to a model.

    Raises a VplanError for a folder that was not recorded, or has changed since.
    """
    location = diffusers_folder.locate(text.strip())
    if location is None:
        return None
    root, place = location
    record = f"vplan record {text.strip()}"
    for name in user_data.model_names():
        profile = _own_model(name)
        if profile and profile.origin == str(place):
            config = diffusers_folder.architecture(diffusers_folder.read_config(place, root))
            if any(profile.config.get(key) != value for key, value in config.items()):
                raise VplanError(f"{quoted(text)} has changed since it was recorded as {name}", record)
            return profile
    raise VplanError(f"the model in {quoted(text)} is not recorded yet", record)


def _checked(profile: ModelProfile, name: str, opening: str, fix: str) -> ModelProfile:
    """The profile, after the checks that need more than one field."""
    if profile.name != name:
        raise VplanError(f"{opening}: it says name = {profile.name!r}", fix)
    rules = profile.shape
    if any(side % rules.size_multiple for size in rules.resolutions for side in size):
        raise VplanError(f"{opening}: a resolution is not a multiple of {rules.size_multiple}", fix)
    cell = [profile.vae.spatial * patch for patch in rules.patch[1:]]
    if any(rules.size_multiple % side for side in cell):
        raise VplanError(f"{opening}: size_multiple {rules.size_multiple} is not a multiple of VAE times patch", fix)
    if rules.cut(rules.default_frames) != rules.default_frames:
        raise VplanError(f"{opening}: default_frames {rules.default_frames} is not {rules.frame_rule}", fix)
    for stack in profile.stacks:
        profile.depth(stack)
    return profile


@functools.cache
def _model_aliases() -> dict[str, str]:
    """Every way of writing a model's name -> its bundled name. It opens all files, so it is built only when needed."""
    index: dict[str, str] = {}
    for name in profiles.model_names():
        aliases = read_toml(profiles.model_path(name)).get("aliases")
        if not isinstance(aliases, list):
            raise VplanError(f"profile {name}.toml is damaged: it has no list of aliases", "reinstall vplan")
        for alias in (name, *aliases):
            owner = index.setdefault(model_key(str(alias)), name)
            if owner != name:
                raise VplanError(
                    f"profiles {owner} and {name} are damaged: both have the alias {alias!r}", "reinstall vplan"
                )
    return index


def distilled_from(name: str) -> str | None:
    """The bundled model whose distilled weights a name means; such a name is refused. None if it means none."""
    return _distilled().get(model_key(name))


@functools.cache
def _distilled() -> dict[str, str]:
    """The names of distilled weights -> the bundled model of their shape."""
    return {model_key(alias): name for name in profiles.model_names() for alias in _model(name).traits.distilled}


def _meanings(name: str) -> tuple[str, ...]:
    """The models that an ambiguous name may mean: those of a group, or all that start with it."""
    text = name.strip().lower()
    joined = re.sub(r"(?<=[a-z])[\s_-]+(?=\d\.)", "", text)  # wan-2.1
    return other_models.group(name) or tuple(_variants(text) or _variants(joined) or _variants(joined, dots=False))


def _variants(text: str, dots: bool = True) -> list[str]:
    """Names in which every typed word is the start of some word: `wan2.1`, `wan i2v`, `cogvideox-2`; 14b also matches
    a14b. Without ``dots`` also `wan21`, `sd35`."""
    words = [word for word in re.split(r"[\s_/-]+", text) if word]
    parts = {name: (name if dots else name.replace(".", "")).split("-") for name in model_names()}
    return [
        name
        for name, own in parts.items()
        if words and all(any(part.startswith((word, f"a{word}")) for part in own) for word in words)
    ]


def _near_models(text: str) -> str:
    index = _model_aliases() | {model_key(name): name for name in user_data.model_names()}
    names = dict.fromkeys(index[key] for key in nearest(model_key(text), index, count=4))
    start = "did you mean " + " or ".join(list(names)[:3]) + "? " if names else ""
    return start + "`vplan models` lists what is known"
