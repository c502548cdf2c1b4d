"""The words of a verdict in the terminal, and their colours."""

from __future__ import annotations

from planner.spec.plan import Estimate
from planner.units import gib

VERDICTS = {"fits": ("fits", "bold green"), "tight": ("tight", "bold yellow"), "no": ("does not fit", "bold red")}


def need_words(found: Estimate) -> str:
    """The verdict of a plan and what it needs."""
    return f"{VERDICTS[found.verdict][0]}, {gib(found.peak.device_bytes):.1f} GiB"
