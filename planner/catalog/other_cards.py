"""Names of cards that are not in `profiles/gpus.toml`: laptops' ones, and AMD's and Intel's."""

from __future__ import annotations

import functools
import re
import tomllib
from typing import NamedTuple

import profiles

MAKERS = {"amd": "AMD", "intel": "Intel"}
_WORDS = {
    "amd": r"amd|ati|radeon|rx|instinct|firepro",
    "intel": r"intel|arc|xe",
}
_PREFIX = re.compile(r"^((nvidia|geforce|rtx|amd|radeon|rx|intel|arc)[\s-]*)+")
_STRIX_HALO = re.compile(r"(amd)?(strixhalo|ryzenaimax(pro)?\d*|8060s|gfx1151)")
"""AMD's processors whose GPU shares the system's memory (amd.com/products/processors)."""


class OtherCard(NamedTuple):
    """A card by another's name: who made it (or "laptop", NVIDIA's for laptops), and its memory where that is known."""

    maker: str
    memory_gb: int | None


def find(text: str) -> OtherCard | None:
    """The card that a name means; None where it is no such card's."""
    low = text.strip().lower()
    laptop = re.fullmatch(r"(.+?)[\s-]*(laptop|mobile|max-?q)([\s-]*gpu)?([\s-]*\d+\s*gb)?", low)
    if laptop:
        memory = _memory("laptop", laptop[1])
        return OtherCard("laptop", memory) if memory else None
    bare = _bare(low)
    for maker in ("amd", "intel"):
        if memory := _memory(maker, low):
            return OtherCard(maker, memory)
    if _STRIX_HALO.fullmatch(bare):
        return OtherCard("amd", None)
    words = set(re.findall(r"[a-z]+", low))
    return next((OtherCard(maker, None) for maker, own in _WORDS.items() if words & set(own.split("|"))), None)


def _bare(low: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _PREFIX.sub("", low))


def _memory(maker: str, low: str) -> int | None:
    return _table()[maker].get(_bare(low))


@functools.cache
def _table() -> dict[str, dict[str, int]]:
    return tomllib.loads(profiles.OTHER_CARDS.read_text(encoding="utf-8"))
