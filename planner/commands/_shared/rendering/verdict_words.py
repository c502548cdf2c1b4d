"""The words of a verdict and of a card, and the colours of a verdict in the terminal."""

from __future__ import annotations

from planner.catalog.card_profiles import GpuProfile
from planner.spec.job import Machine
from planner.spec.plan import Estimate
from planner.units import format_gib, gib

VERDICTS = {"fits": ("fits", "bold green"), "tight": ("tight", "bold yellow"), "no": ("does not fit", "bold red")}
AS = ", as "
"""Between a class of cards and the card that it is priced as."""


def count_words(machine: Machine) -> str:
    """The number of cards in words, to stand before the card's name: "2 nodes of 8 x "; empty for one card."""
    nodes = f"{machine.nodes} nodes of " if machine.nodes > 1 else ""
    return nodes + (f"{machine.gpus} x " if machine.gpus > 1 else "")


def card_words(machine: Machine, card: GpuProfile) -> str:
    """The cards of a machine: "a 24 GB card", "4 x 80 GB cards", "2 x GeForce RTX 4090"."""
    title, is_class, _ = card.title.partition(AS)
    if count := count_words(machine):
        return f"{count}{title}{'s' if is_class else ''}"
    article = "an " if title.startswith("8") else "a "
    return f"{article}{title}" if is_class else title


def need_words(estimate: Estimate) -> str:
    """The verdict of a plan and what it needs: host RAM, where that is what it lacks."""
    if estimate.verdict == "no" and estimate.limit == "host":
        return f"{VERDICTS[estimate.verdict][0]}, {format_gib(estimate.host_ram_bytes)} of host RAM"
    return f"{VERDICTS[estimate.verdict][0]}, {gib(estimate.peak.device_bytes):.1f} GiB"
