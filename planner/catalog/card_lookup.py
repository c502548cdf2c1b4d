"""Finds a card by name, class or size as people type it; and the host RAM that is usual with it."""

from __future__ import annotations

import functools
import re

import profiles
from planner.catalog import apple_cards, other_cards
from planner.catalog.card_profiles import GpuClass, GpuFile, GpuProfile
from planner.catalog.profile_files import LONGEST_NAME, read_record
from planner.errors import VplanError, nearest, quoted
from planner.units import GB, GIB, MIB, UNITS, format_gib, gib, parse_bytes, parse_count, split_quantity

SYSTEM_RAM = 6 * GIB
"""RAM that the system, a desktop and its programs keep for themselves, bytes: of 32 GiB installed, 26 can be used.
Under WSL Linux gets half of it all (https://learn.microsoft.com/windows/wsl/wsl-config, ``memory``: 50 % of total
memory)."""
DESKTOP_BYTES = GIB
"""Device memory that a desktop and its programs hold: the reserve on Windows and WSL, where one is always there."""
_LARGEST_CARD = 999
"""GB. A number alone is a size up to here; larger ones are names that are mistyped, as 4900."""


def _squash(name: str) -> str:
    """A name without case, spaces, dashes and the maker's name in front, for comparison."""
    bare = re.sub(r"^((nvidia|geforce|tesla|quadro)\s+)+", "", name.strip().lower())
    return re.sub(r"[^a-z0-9]", "", bare)


@functools.cache
def _gpu_file() -> GpuFile:
    """All cards and classes, after the checks that need more than one field."""
    file = read_record(profiles.GPUS, GpuFile)
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
    """The card for a name, a class (`24GB`, `24G` or `24`: its smallest reference card), an exact budget (`23.5GiB`), a
    prefix that only one card has (`4070ti-s`), or one of Apple's chips with its memory (`m4max-64gb`)."""
    text = name.strip()
    if len(text) > LONGEST_NAME:
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
    if mac := apple_cards.find(text):
        return mac
    starts = _starting_so(text)
    if len(starts) == 1 and len(_squash(text)) > 3:
        return gpu(starts[0])
    if other := other_cards.find(text):
        raise _other_card(text, other)
    raise _unknown_gpu(text, starts)


def card_taken_for(name: str, card: GpuProfile) -> str:
    """How a card's name that is not exact was understood, in words."""
    text = _count_and_card(name)[1]
    _, unit = split_quantity(text) or ("", None)
    own = _named_card(text) or unit in (*UNITS, "g", "") or apple_cards.find(text)
    return "" if own else f"{quoted(text)} taken for {card.name}"


def parse_gpus(text: str) -> tuple[int, GpuProfile]:
    """(number, card): `2x4090`, `8 x h100`, `4090x2` and `4090,4090` mean several cards, anything else one."""
    count, card = _count_and_card(text)
    return (parse_count(count, "--gpu count", at_most=1_024) if count else 1), gpu(card)


def _count_and_card(text: str) -> tuple[str, str]:
    """The number before or after a card, empty if there is none, and the card as typed.

    What follows the x must be a card or contain a digit: `24XB` and `7900xtx` are single (mistyped) words. What
    precedes it must be a card or class: in `2x24` it is the number. Raises a VplanError for a list of different cards.
    """
    text = text.strip()
    listed = [part.strip() for part in re.split(r"[,+]", text)] if re.search(r"\S\s*[,+]\s*\S", text) else []
    cards = [card for card in map(_named_card, listed) if card]
    if listed and len(cards) == len(listed):
        least = min(cards, key=lambda card: (card.allocatable_bytes, card.bf16_tflops))
        if any(card is not least for card in cards):
            fix = f"plan for the least of them, as --gpu {len(listed)}x{least.name}"
            raise VplanError(f"--gpu {quoted(text)} names cards of several kinds", fix)
        return str(len(listed)), listed[0]
    behind = re.fullmatch(r"(\S.*?)\s*[x×*]\s*(\d+)", text, re.IGNORECASE | re.ASCII)
    if behind and (_named_card(behind[1]) or gpu_class(behind[1])):
        return behind[2], behind[1]
    before = re.fullmatch(r"([+-]?\d+)\s*[x×*]\s*(\S.*)", text, re.IGNORECASE | re.ASCII)
    if before and (re.search(r"\d", before[2]) or _named_card(before[2])):
        return before[1], before[2]
    return "", text


def _named_card(text: str) -> GpuProfile | None:
    """A card by name, alias or title, with or without its memory after it (`RTX 4090 24GB`, `4090 (24g)`)."""
    index = _gpu_aliases()
    if card := index.get(_squash(text)):
        return card
    name, size = _name_and_size(text)
    if not size:
        return None
    if card := index.get(_squash(f"{name} {size}gb")):
        return card
    card = index.get(_squash(name))
    return card if card and str(card.class_gb) == size else None


def _name_and_size(text: str) -> tuple[str, str]:
    """A card's name and the GB after it; empty if there are none."""
    match = re.fullmatch(r"(.+?)[\s-]*\(?(\d+)\s*g(?:i?b)?\)?", text.strip(), re.IGNORECASE | re.ASCII)
    return (match[1], match[2]) if match else (text, "")


def _class_card(group: GpuClass) -> GpuProfile:
    """The class as one card: the reference card with the least usable memory, with the rates of the slower one if two
    tie."""
    cards = [card for card in _gpu_file().gpu if card.name in group.reference]
    least = min(cards, key=lambda card: (card.allocatable_bytes, card.bf16_tflops))
    named = {"name": group.name, "title": f"{group.gb} GB card, as {least.title}", "aliases": ()}
    return least.model_copy(update=named)


def _custom_card(text: str, number: str, unit: str) -> GpuProfile:
    """A card with exactly the requested budget, and the kernels, rates and context of the nearest reference card."""
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
    """The refusal of an unknown card name, with cards that start like it, else cards that look like it, else the
    accepted forms."""
    typed_key = _squash(text)
    name, size = _name_and_size(text)
    if size and (card := _gpu_aliases().get(_squash(name))):
        fault = f"a {card.title} has {card.class_gb} GB, and none with {size} is known"
        return VplanError(fault, f"use --gpu {card.name}, or for {size} GB alone --gpu {float(size) - 0.5:g}GiB")
    if len(starts) > 1:
        return VplanError(f"--gpu {quoted(text)} matches several cards", "use one of " + ", ".join(starts[:8]))
    index: dict[str, str] = {key: card.name for key, card in _gpu_aliases().items()}
    index |= {group.name.lower(): group.name for group in gpu_classes()}
    near = starts or list(dict.fromkeys(index[key] for key in nearest(typed_key, index)))
    start = f"did you mean {' or '.join(near)}? Else" if near else ""
    fix = f"{start} use a class (24GB), exact memory (23.5GiB) or a card from `vplan gpus`".strip()
    return VplanError(f"--gpu {quoted(text)} is neither a card nor a size", fix)


def smaller_cards(card: GpuProfile) -> tuple[GpuProfile, ...]:
    """For a class, the cards sold under its label that have less usable memory; empty for a card by name."""
    group = gpu_class(card.name)
    return tuple(_gpu_aliases()[_squash(name)] for name in group.smaller) if group else ()


def installed_host_ram(card: GpuProfile, gpus: int) -> int:
    """Host RAM per node, in bytes, that computers with such cards usually have: 32 GiB for each card under 40 GB, 128
    GiB for each larger one. A card that shares its memory with the CPU has no RAM besides its own."""
    if card.has_working_set:
        return card.class_gb * GIB
    if card.unified:
        return card.allocatable_bytes
    return (32 if card.class_gb < 40 else 128) * GIB * gpus


def default_host_ram(card: GpuProfile, gpus: int, system: str = "linux") -> int:
    """The part of `installed_host_ram` that a run can use, in bytes; the rest is the system's. ``system``: as in
    `Machine.os`."""
    installed = installed_host_ram(card, gpus)
    if card.unified and not card.has_working_set:
        return installed
    return installed // 2 if system == "wsl" else installed - SYSTEM_RAM
