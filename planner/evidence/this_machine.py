"""`--gpu auto`: the card of this machine in its present state, with calibrated values instead of listed ones."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from planner.catalog import card_lookup
from planner.catalog.card_profiles import GpuProfile
from planner.errors import VplanError
from planner.evidence import calibration
from planner.hardware import doctor
from planner.hardware.diagnoses import HELD_BYTES
from planner.spec.job import Machine
from planner.units import format_gib, gib


class CardHere(NamedTuple):
    """The card of this machine to plan for, with the device memory to reserve, the available host RAM and the installed
    torch."""

    card: GpuProfile
    reserve_bytes: int
    """what other processes use now, and a reserve for them in addition"""
    host_ram: int
    """available bytes"""
    torch: str | None
    """the installed release"""
    notes: tuple[str, ...]
    """what was found, in words"""


RESERVE_BYTES = HELD_BYTES
"""Device memory to keep free for other processes, in addition to what they use now."""


def card_here(typed: Machine) -> CardHere:
    """The first card that CUDA shows to a process of this machine. Raises a VplanError if NVML finds none.

    ``typed``: has the reserve and the torch release if the user gave them.
    """
    driver, cards = doctor.visible()
    if driver["error"] or not cards or cards[0]["name"] is None:
        why = driver["error"] or "there is none"
        raise VplanError(f"--gpu auto found no card: NVML says {why}", "pass one: --gpu 24GB")
    here, ram = cards[0], doctor.host_ram()
    host_ram = ram["available_bytes"]
    name, total, used = here["name"], here["total_bytes"], here["used_bytes"] or 0
    if here["known_as"]:
        card = card_lookup.gpu(here["known_as"])
    elif total:
        card = card_lookup.gpu(f"{gib(total - (here['reserved_bytes'] or 0)):.4g}GiB")
    else:
        raise VplanError(f"NVML does not say how much memory {name} has", "pass it: --gpu 24GiB")
    notes = [f"{name}, {format_gib(used)} in use by other processes, {format_gib(host_ram)} of host RAM available"]
    torch, release = doctor.package_version("torch"), doctor.torch_release()
    if release and "torch" not in typed.model_fields_set:
        notes.append(f"torch {release} (installed)")
    with contextlib.suppress(VplanError):  # a damaged file is ignored; `vplan calibrate` replaces it
        found = calibration.read(name, driver["version"], torch) if torch and driver["version"] else None
        if found:
            card = calibration.calibrated(card, found)
            notes.append(f"context and speeds as calibrated {found.time[:10]}")
    kept = typed.reserve if "reserve" in typed.model_fields_set else RESERVE_BYTES
    return CardHere(card, used + kept, host_ram, release, tuple(notes))
