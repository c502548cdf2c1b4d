"""The GPUs that will train: how much memory is free on each, which processes hold the rest, and waiting for them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator

from planner.catalog import card_lookup
from planner.errors import VplanError, quoted
from planner.hardware import doctor
from planner.hardware.diagnoses import HELD_BYTES
from planner.preflight.checks import FAILED, SHORT, Check, Need
from planner.schema import JsonObject
from planner.spec.plan import Plan
from planner.units import format_gib, format_seconds, gib, plural

POLL_SECONDS = 2.0
LONGEST_WAIT = 7 * 86_400


def cards_of(plan: Plan) -> list[JsonObject]:
    """The GPUs that will train, as NVML reports them. Raises a VplanError if one is missing or does not respond."""
    driver, cards = doctor.visible()
    if driver["error"]:
        fix = "run it on a machine with one; without one: --device cpu for tiny models, --login-node to check all else"
        raise VplanError(f"training needs a GPU; NVML reports: {driver['error']}", fix)
    wanted = plan.machine.gpus
    if len(cards) < wanted:
        fix = f"`vplan suggest {plan.job.model} --gpus {max(1, len(cards))}`, or check CUDA_VISIBLE_DEVICES"
        raise VplanError(f"the plan is for {plural(wanted, 'GPU')}, but this machine shows {len(cards)}", fix)
    for card in cards[:wanted]:
        if card["name"] is None:
            fix = "check `nvidia-smi`: it may have fallen off the bus"
            raise VplanError(f"GPU {card['index']} does not respond", fix, FAILED)
    return [_with_free(card) for card in cards[:wanted]]


def _with_free(card: JsonObject) -> JsonObject:
    """The card; if it shares the CPU's memory and NVML reports no free bytes, with those of the system."""
    if card["free_bytes"] is not None or not (card["known_as"] and card_lookup.gpu(card["known_as"]).unified):
        return card
    return {**card, "free_bytes": doctor.host_ram()["available_bytes"], "unified": True}


def on_card(card: JsonObject, need: Need) -> Iterator[Check]:
    """Checks that a card has the free memory the plan needs in each phase, and names the processes that hold the
    rest."""
    name, free = f"GPU {card['index']}", card["free_bytes"]
    if free is None:
        fix = "see `nvidia-smi`; a probe shows whether it fits: --probe"
        yield Check(name, "warning", f"{name} ({card['name']}) does not report its free memory", fix)
        return
    most = max(need.phases.values(), default=need.high_bytes) or 1
    short = {
        phase: nbytes for phase, nbytes in need.phases.items() if nbytes * need.low_bytes > free * most
    }  # low ends of the phases, taken to be in the same ratio to their estimates as the peak's
    there = f"{name} ({card['name']}) has {format_gib(free)} free"
    fix = "stop other programs there, wait for them (--wait 10m), or use less memory"
    if need.low_bytes > free:
        phases = ", ".join(f"{phase} {gib(nbytes):.1f}" for phase, nbytes in short.items())
        needs = f" (GiB by phase: {phases})" if phases else ""
        fault = f"{there}, but the plan needs at least {format_gib(need.low_bytes)}{needs}{_held(card)}"
        yield Check(name, "error", fault, fix, SHORT)
    elif need.high_bytes > free:
        fault = f"{there}, but the plan may need {format_gib(need.high_bytes)}{_held(card)}"
        yield Check(name, "warning", fault, f"test it with --probe, or {fix}")
    else:
        yield Check(name, "ok", f"{there}, and the plan needs at most {format_gib(need.high_bytes)} ({need.basis})")
        if (card["used_bytes"] or 0) > HELD_BYTES:
            yield Check(name, "note", f"{name}{_held(card).replace('; ', ': ', 1)}")
    if card["mig"] and "MIG" not in card["name"]:
        what = f"{name} is split into MIG slices, and the number is for the whole card"
        yield Check(name, "warning", what, "select the slice: CUDA_VISIBLE_DEVICES=MIG-...")


def _held(card: JsonObject) -> str:
    """The processes that hold a card's memory, as "; ..." to append to a message. Containers and Windows hide some."""
    used = card["used_bytes"] or 0
    if used <= HELD_BYTES:
        return ""
    holders = [process for process in card["processes"] if process["used_bytes"] is None or process["used_bytes"] > 0]
    named = [
        f"{process['name'] or 'a process'} (pid {process['pid']}) holds "
        + ("some" if process["used_bytes"] is None else format_gib(process["used_bytes"]))
        for process in sorted(holders, key=lambda process: -(process["used_bytes"] or 0))
    ]
    return "; " + (", ".join(named[:5]) or f"an invisible process holds {format_gib(used)}")


def wait(
    plan: Plan, need: Need, cards: list[JsonObject], seconds: float, say: Callable[[str], None]
) -> tuple[list[JsonObject], float]:
    """Waits until each card has enough free memory, at most ``seconds``. Returns the cards' last state and the seconds
    waited.

    Enough is the plan's upper bound, or its lower bound if even an empty card is smaller than the upper one.
    """
    began, last_line = time.monotonic(), ""
    while True:
        short = [card for card in cards if card["free_bytes"] is not None and card["free_bytes"] < _target(card, need)]
        waited = time.monotonic() - began
        if not short or waited >= seconds:
            return cards, waited
        card = short[0]
        words = f"waiting for {format_gib(_target(card, need))} on GPU {card['index']}: "
        words += f"{format_gib(card['free_bytes'])} free{_held(card)}"
        if words != last_line:
            say(f"{words}; {format_seconds(seconds - waited)} left")
            last_line = words
        time.sleep(min(POLL_SECONDS, max(0.0, seconds - waited)))
        cards = cards_of(plan)


def _target(card: JsonObject, need: Need) -> int:
    empty = (card["total_bytes"] or math.inf) - (card["reserved_bytes"] or 0)
    return need.high_bytes if need.high_bytes <= empty else need.low_bytes


def parse_wait(text: str) -> float:
    """Seconds of a waiting time such as `90s`, `10m`, `2h` or a plain number. Raises a VplanError for anything else, or
    for more than a week."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|sec|m|min|h)?", text.strip().lower(), re.ASCII)
    seconds = float(match[1]) * {"m": 60, "h": 3600}.get((match[2] or "s")[0], 1) if match else math.inf
    if seconds > LONGEST_WAIT:
        raise VplanError(f"--wait {quoted(text)} is not a waiting time", "use 90s, 10m or 2h, at most a week")
    return seconds
