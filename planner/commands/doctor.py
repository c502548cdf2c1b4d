"""`vplan doctor`: what this machine has, what is wrong or missing for training, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from planner.commands._shared.rendering.wrapping import print_lines, wrapped
from planner.commands._shared.verb import Verb, examples, json_option, show
from planner.hardware.diagnoses import ERROR, NOTE, WARNING, Finding, findings
from planner.hardware.doctor import examine
from planner.schema import JsonObject
from planner.units import format_gib, plural

if TYPE_CHECKING:
    from rich.console import Console

DISKS = {"working": "current folder", "data": "your own models' folder", "shared": "/dev/shm"}
STYLES = {ERROR: "bold red", WARNING: "bold yellow", NOTE: "dim"}


@click.command(cls=Verb, epilog=examples("vplan doctor", "vplan doctor --json > machine.json"))
@json_option
def command(as_json: bool) -> None:
    """Report what this machine has, and what is wrong or missing for training here.

    The text is safe to paste into a bug report: it holds no host or user name, no path and no secret. Nothing is
    changed, and no GPU is used. The exit code is always 0.
    """
    facts = examine()
    found = findings(facts)
    answer = {**facts, "findings": [finding._asdict() for finding in found]}
    show(answer, as_json, lambda console: _render(console, facts, found))


INDENT = " " * 10
"""Before what continues a line: as wide as the names."""


def _render(console: Console, facts: JsonObject, findings: list[Finding]) -> None:
    for name, value in _lines(facts):
        first, *more = wrapped(value, console.width - len(INDENT))
        print_lines(console, [f"{name:<9} {first}", *(f"{INDENT}{line}" for line in more)])
    console.print("")
    for finding in findings:
        print_lines(console, wrapped(f"{finding.level}: {finding.what}", console.width, "  "), STYLES[finding.level])
        print_lines(console, wrapped(f"  fix: {finding.fix}", console.width, " " * 4))
    if not findings:
        console.print("nothing wrong or missing for training", style="bold green")


def _lines(facts: JsonObject) -> Iterator[tuple[str, str]]:
    system, memory = facts["system"], facts["host_ram"]
    where = [word for word, so in (("WSL", system["wsl"]), ("in a container", system["container"])) if so]
    yield "vplan", facts["vplan"]
    yield "system", ", ".join([system["os"], system["kernel"], system["machine"], *where])
    cores = f"{system['cores'] or '?'} cores, {system['threads_allowed']} of {system['threads']} threads allowed"
    yield "python", f"{system['python']}, {cores}"
    ram = f"{format_gib(memory['available_bytes'])} available of {format_gib(memory['total_bytes'])}"
    limit = f", limited to {format_gib(memory['limit_bytes'])}" if memory["limit_bytes"] else ""
    swap = f"swap {format_gib(memory['swap_free_bytes'])} free of {format_gib(memory['swap_total_bytes'])}"
    yield "RAM", f"{ram}{limit}; {swap if memory['swap_total_bytes'] else 'no swap'}"
    for name, disk in facts["disks"].items():
        yield "disk", f"{DISKS[name]}: {disk['free_bytes'] / 1e9:.1f} GB free of {disk['total_bytes'] / 1e9:.1f}"
    driver = facts["driver"]
    yield "driver", f"{driver['version']}, CUDA {driver['cuda']}" if driver["version"] else f"none: {driver['error']}"
    for card in facts["gpus"]:
        yield from _card_lines(card)
    versions = [f"{name} {version}" for name, version in facts["packages"].items() if version]
    yield "packages", ", ".join(versions) or "none of the training packages"
    build = facts["torch_build"]
    if build:
        yield "torch", f"built for {build['for']} {build['cuda'] or ''}".rstrip()
    segments = "available on this system" if facts["expandable_segments"] else "not available on this system"
    yield "allocator", f"expandable segments: {segments}"
    for name, value in facts["environment"].items():
        yield "variable", f"{name}={value if value.isprintable() else repr(value)}"
    recorded = facts["tapes"]["recorded_with"]
    said = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in recorded.items())
    own = f"; {plural(facts['tapes']['own_models'], 'model')} of your own" if facts["tapes"]["own_models"] else ""
    yield "tapes", f"recorded with {said}{own}"


def _card_lines(card: JsonObject) -> Iterator[tuple[str, str]]:
    if card["name"] is None:
        yield f"GPU {card['index']}", "does not respond"
        return
    words = [card["name"], f"known as {card['known_as']}" if card["known_as"] else "not a known card"]
    if card["compute_capability"]:
        words.append(f"capability {card['compute_capability']}")
    if card["total_bytes"] is not None:
        words.append(f"{format_gib(card['free_bytes'])} free of {format_gib(card['total_bytes'])}")
    if card["reserved_bytes"]:
        words.append(f"{format_gib(card['reserved_bytes'])} of it reserved by the driver")
    switches = [("ECC", card["ecc"]), ("MIG", card["mig"])]
    words += [f"{label} {'on' if is_on else 'off'}" for label, is_on in switches if is_on is not None]
    if card["power_limit_watts"]:
        words.append(f"{card['power_limit_watts']:.0f} W limit")
    yield f"GPU {card['index']}", ", ".join(words)
    for process in card["processes"]:
        size = "?" if process["used_bytes"] is None else format_gib(process["used_bytes"])
        yield "", f"  {size} held by {process['name'] or 'an invisible process'} (pid {process['pid']})"
