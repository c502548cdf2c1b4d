"""From a name as people type it to facts: models and cards. Reads the profiles, and only the file it needs.

Models are the bundled ones and, after them, the user's own (`vplan record FOLDER`, kept in
`planner.catalog.user_data`).

What a model's rules allow (frames, sizes, blocks) is in `planner.catalog.shapes`, given on from here.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import profiles
from planner.catalog import diffusers_folder, other_cards, user_data
from planner.catalog.forward_call import ForwardCall
from planner.catalog.profiles import GpuClass, GpuFile, GpuProfile, ModelProfile
from planner.catalog.shapes import check_blocks, check_job, check_shape, grid, job_for, parse_resolution
from planner.catalog.traits import Traits
from planner.errors import VplanError, nearest, quoted
from planner.schema import Record
from planner.units import GB, GIB, MIB, UNITS, format_gib, gib, parse_bytes, parse_count, split_quantity

__all__ = [
    "GpuClass",
    "GpuProfile",
    "ModelProfile",
    "bundled_name",
    "card_taken_for",
    "check_blocks",
    "check_job",
    "check_shape",
    "default_host_ram",
    "diffusers_classes",
    "gpu",
    "gpu_class",
    "gpu_classes",
    "gpu_names",
    "grid",
    "installed_host_ram",
    "job_for",
    "lent_traits",
    "model",
    "model_names",
    "parse_gpus",
    "parse_resolution",
    "several",
    "smaller_cards",
    "taken_for",
]

AnyRecord = TypeVar("AnyRecord", bound=Record)
_LONGEST_NAME = 200
"""Characters. A longer text is no name, and file systems refuse it with an error of their own."""
SYSTEM_RAM = 6 * GIB
"""RAM that the system, a desktop and its programs keep for themselves, bytes: of 32 GiB installed, 26 can be used.
Under WSL Linux gets half of it all (https://learn.microsoft.com/windows/wsl/wsl-config, ``memory``: 50 % of total
memory)."""
DESKTOP_BYTES = GIB
"""Device memory that a desktop and its programs hold: the reserve on Windows and WSL, where one is always there."""
_LARGEST_CARD = 999
"""GB. A number alone is a size up to here; larger ones are names that are mistyped, as 4900."""


def _toml(path: Path) -> dict[str, Any]:
    """A bundled file's tables, or a VplanError that names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VplanError(f"profile {path.name} is missing", "reinstall vplan") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise VplanError(f"profile {path.name} is damaged: {error}", "reinstall vplan") from None


def _load(path: Path, record: type[AnyRecord]) -> AnyRecord:
    """A bundled file as its record; anything wrong in it is named with the file."""
    return record.read(_toml(path), where=f"profile {path.name} is damaged")


def _squash(name: str) -> str:
    """Names that people would call the same: case, spaces and dashes out, the maker's name in front as well."""
    bare = re.sub(r"^((nvidia|geforce|tesla|quadro)\s+)+", "", name.strip().lower())
    return re.sub(r"[^a-z0-9]", "", bare)


# ---- models


def model_names() -> tuple[str, ...]:
    """Names of all models we know: the bundled ones, then the user's own, each alphabetical."""
    bundled = profiles.model_names()
    return (*bundled, *(name for name in user_data.model_names() if name not in bundled))


def model(name: str) -> ModelProfile:
    """The model of a name, an alias, a Hugging Face id, a start that only one model has, or an own one's folder."""
    if profile := _exactly(name):
        return profile
    if origin := _distilled().get(_model_key(name)):
        fault = f"{quoted(name)} is a distilled {_model(origin).title}, which vplan does not train"
        raise VplanError(fault, f"use {origin}, whose memory is the same, and its own weights")
    # A start that several models have is refused with their names: guessing one would plan for another model.
    variants = _variants(name.strip().lower())
    if len(variants) == 1:
        return model(variants[0])
    if variants:
        raise VplanError(f"model {quoted(name)} is ambiguous", "write one of " + ", ".join(variants))
    if profile := _recorded_from(name):  # a folder here, named without a path
        return profile
    raise VplanError(f"model {quoted(name)} is not known", _near_models(name.strip().lower()))


def several(name: str) -> tuple[str, ...]:
    """The models that a name may mean; empty where it means one of them, or none."""
    if _exactly(name) or _model_key(name) in _distilled():
        return ()
    variants = _variants(name.strip().lower())
    return tuple(variants) if len(variants) > 1 else ()


def taken_for(name: str, profile: ModelProfile) -> str:
    """How a name that is not the model's own was understood, in words: an alias, or the start of a name."""
    if profile.is_own or _model_key(name).replace(".", "") == _model_key(profile.name).replace(".", ""):
        return ""
    return f"{quoted(name)} taken for {profile.name}"


def _exactly(name: str) -> ModelProfile | None:
    """The model that a name, an alias, a Hugging Face id or a path says; None where it says none."""
    if diffusers_folder.is_path(name) and (profile := _recorded_from(name)):
        return profile
    text = name.strip().lower()
    if len(text) > _LONGEST_NAME:
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
    """The classes whose models can be recorded: those of the bundled models, which lend what a config does not say."""
    return tuple(sorted({_model(name).diffusers_class for name in profiles.model_names()}))


def bundled_name(text: str) -> str | None:
    """The bundled model that a text in lower case names, as its name or an alias; None when there is none."""
    return _model_aliases().get(_model_key(text))


@functools.cache
def _model(name: str) -> ModelProfile:
    """A bundled model by its file's name."""
    path = profiles.model_path(name)
    return _checked(_load(path, ModelProfile), name, f"profile {path.name} is damaged", "reinstall vplan")


def _own_model(name: str) -> ModelProfile | None:
    """The user's own model of a name. Read anew each time, because `vplan record` may just have written it."""
    data = user_data.read_profile(name)
    if data is None:
        return None
    opening, fix = f"your own profile {name}.json is damaged", f"record the model again (in {user_data.folder()})"
    return _checked(_with_traits(ModelProfile.read(data, where=opening)), name, opening, fix)


def lent_traits(lender: ModelProfile) -> Traits:
    """The traits that a bundled model lends to a user's model of its class: all but the names of other weights of its
    shape."""
    return lender.traits.replace(same_shape=())


def _with_traits(profile: ModelProfile) -> ModelProfile:
    """An own model with the traits of its classes. No file of the user's holds them, so that a model recorded by an
    earlier version has them as this one knows them."""
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
    """The user's own model recorded from a folder or config.json; None when the text is no path to a model.

    A folder that was not recorded, or changed since, is a VplanError.
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
    """The profile itself, after the checks that one field alone cannot make."""
    if profile.name != name:
        raise VplanError(f"{opening}: it says name = {profile.name!r}", fix)
    rules = profile.shape
    if any(side % rules.size_multiple for size in rules.resolutions for side in size):
        raise VplanError(f"{opening}: a resolution is not a multiple of {rules.size_multiple}", fix)
    cell = [profile.vae.spatial * patch for patch in rules.patch[1:]]
    if any(rules.size_multiple % side for side in cell):
        raise VplanError(f"{opening}: size_multiple {rules.size_multiple} is not a multiple of VAE times patch", fix)
    if (rules.default_frames - 1) % rules.frame_step:
        raise VplanError(f"{opening}: default_frames {rules.default_frames} is not {rules.frame_step}n+1", fix)
    for stack in profile.stacks:
        profile.depth(stack)
    return profile


def _model_key(name: str) -> str:
    """`Wan-AI/Wan2.1-T2V-1.3B-Diffusers` and `wan2.1-t2v-1.3b` are one: owner and "-diffusers" say nothing.

    The point stays, unlike in cards' names: 1.3B is not 13B.
    """
    return re.sub(r"[^a-z0-9.]", "", name.rpartition("/")[2].lower()).removesuffix("diffusers")


@functools.cache
def _model_aliases() -> dict[str, str]:
    """Every way of writing a model's name -> its bundled name. Opens all files, so it is built only when needed."""
    index: dict[str, str] = {}
    for name in profiles.model_names():
        aliases = _toml(profiles.model_path(name)).get("aliases")
        if not isinstance(aliases, list):
            raise VplanError(f"profile {name}.toml is damaged: it has no list of aliases", "reinstall vplan")
        for alias in (name, *aliases):
            owner = index.setdefault(_model_key(str(alias)), name)
            if owner != name:
                raise VplanError(
                    f"profiles {owner} and {name} are damaged: both have the alias {alias!r}", "reinstall vplan"
                )
    return index


@functools.cache
def _distilled() -> dict[str, str]:
    """The names of distilled weights -> the bundled model of their shape."""
    return {_model_key(alias): name for name in profiles.model_names() for alias in _model(name).traits.distilled}


def _variants(text: str) -> list[str]:
    """Names in which every word typed starts some word: `wan2.1`, `wan i2v`, `cogvideox-2`; 14b is also a14b."""
    words = [word for word in re.split(r"[\s_/-]+", text) if word]
    return [
        name
        for name in model_names()
        if words and all(any(part.startswith((word, f"a{word}")) for part in name.split("-")) for word in words)
    ]


def _near_models(text: str) -> str:
    index = _model_aliases() | {_model_key(name): name for name in user_data.model_names()}
    names = dict.fromkeys(index[key] for key in nearest(_model_key(text), index, count=4))
    start = "did you mean " + " or ".join(list(names)[:3]) + "? " if names else ""
    return start + "`vplan models` lists what is known"


# ---- cards


@functools.cache
def _gpu_file() -> GpuFile:
    """All cards and classes, with the checks that one field alone cannot make."""
    file = _load(profiles.GPUS, GpuFile)
    names = {card.name for card in file.gpu}
    for group in file.classes:
        for name in (*group.reference, *group.smaller):
            if name not in names:
                raise VplanError(f"profile gpus.toml is damaged: class {group.gb} names {name!r}", "reinstall vplan")
    return file


@functools.cache
def _gpu_aliases() -> dict[str, GpuProfile]:
    index: dict[str, GpuProfile] = {}
    for card in _gpu_file().gpu:
        for alias in (card.name, card.title, *card.aliases):
            if index.setdefault(_squash(alias), card) is not card:
                raise VplanError(f"profile gpus.toml is damaged: two cards have the alias {alias!r}", "reinstall vplan")
    return index


def gpu_names() -> tuple[str, ...]:
    """Names of all cards in `profiles/gpus.toml`, in the file's order."""
    return tuple(card.name for card in _gpu_file().gpu)


def gpu_classes() -> tuple[GpuClass, ...]:
    """All card classes (8GB, 24GB, ...) of `profiles/gpus.toml`, the smallest first."""
    return tuple(sorted(_gpu_file().classes, key=lambda group: group.gb))


def gpu_class(name: str) -> GpuClass | None:
    """The class that `24GB` or `24 gb` names; None when it does not name one."""
    parts = split_quantity(name)
    if parts is None or parts[1] != "gb":
        return None
    return next((group for group in gpu_classes() if str(group.gb) == parts[0]), None)


def gpu(name: str) -> GpuProfile:
    """The card of a name, a class (`24GB`, `24G` or `24`: its smallest reference card), an exact budget (`23.5GiB`), or
    a start that only one card has (`4070ti-s`)."""
    text = name.strip()
    if len(text) > _LONGEST_NAME:
        raise VplanError(f"--gpu {quoted(name)} is not known", "`vplan gpus` lists all cards")
    if card := _named_card(text):
        return card
    number, unit = split_quantity(text) or ("", "")
    if number.replace(".", "").isdigit() and unit in ("", "g") and 1 <= float(number) <= _LARGEST_CARD:
        unit = "gb"
    if group := gpu_class(number + unit):
        return _class_card(group)
    if unit in UNITS or "n" in number.lower():
        return _custom_card(text, number, unit)
    starts = _starting_so(text)
    if len(starts) == 1 and len(_squash(text)) > 3:
        return gpu(starts[0])
    if other := other_cards.find(text):
        raise _other_card(text, other)
    raise _unknown_gpu(text, starts)


def card_taken_for(name: str, card: GpuProfile) -> str:
    """How a card's name that is not its own was understood, in words."""
    text = re.sub(r"^\s*\d+\s*[x×*]\s*", "", name, flags=re.IGNORECASE)
    _, unit = split_quantity(text) or ("", None)
    return "" if _named_card(text) or unit in (*UNITS, "g", "") else f"{quoted(text)} taken for {card.name}"


def parse_gpus(text: str) -> tuple[int, GpuProfile]:
    """How many of which card: `2x4090` and `8 x h100` are several, anything else is one.

    What stands behind the x must be a card or have a digit: `24XB` and `7900xtx` are one mistyped word.
    """
    match = re.fullmatch(r"([+-]?\d+)\s*[x×*]\s*(\S.*)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or not (re.search(r"\d", match[2]) or _named_card(match[2])):
        return 1, gpu(text)
    return parse_count(match[1], "--gpu count", at_most=1_024), gpu(match[2])


def _named_card(text: str) -> GpuProfile | None:
    """By name, alias or title, with or without its memory behind it (`RTX 4090 24GB`)."""
    index = _gpu_aliases()
    if card := index.get(_squash(text)):
        return card
    with_memory = re.fullmatch(r"(.+?)[\s-]*(\d+)\s*gb", text, re.IGNORECASE | re.ASCII)
    card = index.get(_squash(with_memory[1])) if with_memory else None
    return card if card and with_memory and str(card.class_gb) == with_memory[2] else None


def _class_card(group: GpuClass) -> GpuProfile:
    """The class as one card: the least that its reference cards give, and the slower one's rates where they tie."""
    cards = [card for card in _gpu_file().gpu if card.name in group.reference]
    least = min(cards, key=lambda card: (card.allocatable_bytes, card.bf16_tflops))
    named = {"name": group.name, "title": f"{group.gb} GB card, as {least.title}", "aliases": ()}
    return least.model_copy(update=named)


def _custom_card(text: str, number: str, unit: str) -> GpuProfile:
    """Exactly the budget asked for, with the kernels, rates and context of the nearest reference card."""
    budget = parse_bytes(number + unit.upper().replace("I", "i"), "--gpu")
    if not GIB <= budget <= 1024 * GIB:
        side = "smaller" if budget < GIB else "larger"
        raise VplanError(f"--gpu {quoted(text)} is {side} than any card", "use a class (24GB) or a budget (23.5GiB)")
    # GB names a class, the label that cards are sold under; what a card gives, and so a budget, is in GiB. Below the
    # smallest class a card of N GB is taken to give N * 10^9 bytes, as those of 8 do within 2 %.
    if unit == "gb" and budget >= min(group.gb for group in gpu_classes()) * GB:
        near = min(gpu_classes(), key=lambda group: abs(group.gb * GB - budget))
        exact = number if text == number else f"{budget / GIB:.5g}"
        fix = f"use {near.name}, or {exact}GiB for exactly that much"
        raise VplanError(f"--gpu {quoted(text)} is not a card class", fix)
    # A budget typed as a number is a discrete card's: one that shares its memory with the CPU counts host RAM in it.
    like = min(
        (card for card in _gpu_file().gpu if card.reference and not card.unified),
        key=lambda card: (abs(card.allocatable_bytes - budget), card.bf16_tflops),
    )
    return like.replace(
        name=number + UNITS[unit],
        title=f"{format_gib(budget)} of a card like {like.title}",
        aliases=(),
        allocatable_gib=gib(budget),
        nvml_total_mib=-(-budget // MIB),
        reference=False,
        source=f"the budget as typed; all else: {like.name}",
    )


def _starting_so(text: str) -> list[str]:
    """The cards whose names start with a text, with or without their RTX."""
    typed_key = _squash(text)
    keys = [(_squash(card.name), card.name) for card in _gpu_file().gpu] if len(typed_key) > 1 else []
    return [name for key, name in keys if key.startswith(typed_key) or key.removeprefix("rtx").startswith(typed_key)]


def _other_card(text: str, other: other_cards.OtherCard) -> VplanError:
    """The refusal of a card that is not in `profiles/gpus.toml`, with the size to compare with."""
    group = gpu_class(f"{other.memory_gb}GB")
    if other.maker == "laptop":
        assert other.memory_gb is not None
        fault = f"{quoted(text)} has {other.memory_gb} GB, less than any card that vplan prices"
        return VplanError(fault, f"for memory alone, use --gpu {other.memory_gb - 0.5:g}GiB")
    maker = other_cards.MAKERS[other.maker]
    size = f"--gpu {group.name if group else f'{other.memory_gb}GiB'}" if other.memory_gb else "its size, as --gpu 24GB"
    fault = f"{quoted(text)} is a card of {maker}, and vplan knows what PyTorch takes on NVIDIA's alone"
    # Radeon's and Strix Halo's are experimental (pytorch#166397, aotriton's isArchExperimentallySupported): without
    # TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 torch takes the math path, which is not estimated.
    if other.maker == "amd":
        fault = f"{quoted(text)} is a card of AMD for which torch's fast attention is experimental or missing"
    return VplanError(fault, f"to compare memory with an NVIDIA card, use {size}; speed and kernels are not the same")


def _unknown_gpu(text: str, starts: list[str]) -> VplanError:
    """The refusal of a card's name: what starts so, else what looks so, else the forms there are."""
    typed_key = _squash(text)
    if len(starts) > 1:
        return VplanError(f"--gpu {quoted(text)} matches several cards", "use one of " + ", ".join(starts[:8]))
    index: dict[str, str] = {key: card.name for key, card in _gpu_aliases().items()}
    index |= {group.name.lower(): group.name for group in gpu_classes()}
    near = starts or list(dict.fromkeys(index[key] for key in nearest(typed_key, index)))
    start = f"did you mean {' or '.join(near)}? Else" if near else ""
    fix = f"{start} use a class (24GB), exact memory (23.5GiB) or a card from `vplan gpus`".strip()
    return VplanError(f"--gpu {quoted(text)} is neither a card nor a size", fix)


def smaller_cards(card: GpuProfile) -> tuple[GpuProfile, ...]:
    """For a class of cards, those that are sold under its label and give less memory than it stands for; empty for a
    card by name."""
    group = gpu_class(card.name)
    return tuple(_gpu_aliases()[_squash(name)] for name in group.smaller) if group else ()


def installed_host_ram(card: GpuProfile, gpus: int) -> int:
    """Host RAM per node in bytes that usually stands beside such cards: 32 GiB for cards under 40 GB, 128 GiB per GPU
    above (DESIGN section 5). A card that shares its memory with the CPU has no other RAM than its own."""
    if card.unified:
        return card.allocatable_bytes
    return 32 * GIB if card.class_gb * GB < 40 * GB else 128 * GIB * gpus


def default_host_ram(card: GpuProfile, gpus: int, system: str = "linux") -> int:
    """What a run can use of `installed_host_ram`, bytes: the rest is the system's. ``system``: as `Machine.os`."""
    installed = installed_host_ram(card, gpus)
    if card.unified:
        return installed
    return installed // 2 if system == "wsl" else installed - SYSTEM_RAM
