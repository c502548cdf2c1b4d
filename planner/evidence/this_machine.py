"""`--gpu auto`: the card that is here, as it is now, with what was calibrated of it in the place of what is listed."""

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
    """The card of this machine to plan for, with the device memory to reserve and host RAM, bytes, and the installed
    torch."""

    card: GpuProfile
    reserve_bytes: int
    """what others hold of it now, and what is kept for them beside that"""
    host_ram: int
    torch: str | None
    """the release that is installed"""
    notes: tuple[str, ...]
    """how it was understood"""


RESERVE_BYTES = HELD_BYTES
"""Kept for other processes on this machine's card, in addition to what they hold now."""


def card_here(typed: Machine) -> CardHere:
    """The first card that CUDA shows a process started here; a VplanError when NVML answers for none.

    `typed` has the reserve and the torch that were typed, if they were.
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
    with contextlib.suppress(VplanError):  # a damaged file: `vplan calibrate` writes it anew
        found = calibration.read(name, driver["version"], torch) if torch and driver["version"] else None
        if found:
            card = calibration.calibrated(card, found)
            notes.append(f"context and speeds as calibrated {found.time[:10]}")
    kept = typed.reserve if "reserve" in typed.model_fields_set else RESERVE_BYTES
    return CardHere(card, used + kept, host_ram, release, tuple(notes))
