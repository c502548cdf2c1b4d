"""What `vplan check` says of a command that was rehearsed: its prediction beside the run, and the smallest change.

The prediction and the changes are estimates: nothing of them has been rehearsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import dialects
from planner.dialects.base.script import Script, from_file, from_words
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import Checked, check_case
from planner.rehearsal.answer import PHASES, RehearsalAnswer

SHELLS = ("sh", "bash", "zsh", "dash")


@dataclass(frozen=True)
class CheckedRehearsal:
    """The prediction for a rehearsed command."""

    checked: Checked
    predicted_bytes: int
    """device, the highest of the phases that were rehearsed; where one ended by an error, of that one"""
    rehearsed_bytes: int
    """device; of a run that ends, with the request that found no room"""
    is_least: bool
    """whether it would have taken more: it ended before its peak"""

    @property
    def missed_bytes(self) -> int:
        """What the run took beyond its prediction. The changes leave as much room."""
        return max(0, self.rehearsed_bytes - self.predicted_bytes)

    def to_json(self) -> dict[str, Any]:
        """The object `check` of docs/rehearsal.md."""
        answer = self.checked.to_json()
        kept = ("trainer", "verdict", "phase", "moment", "fixes", "helps")
        return {
            "basis": "estimated",
            "predicted_bytes": self.predicted_bytes,
            "missed_bytes": self.missed_bytes,
            **{name: answer[name] for name in kept},
        }


def checked_rehearsal(answer: RehearsalAnswer) -> CheckedRehearsal | str:
    """What `vplan check` says of the command, or in one line why it says nothing; empty for a command that belongs to
    no supported trainer, or that did nothing to compare."""
    rehearsal = answer.rehearsal
    if answer.verdict != "no" and not answer.steps:
        return ""
    try:
        dialect, invocation = dialects.read_script(script_of(rehearsal.command))
    except VplanError:
        return ""
    machine: dict[str, Any] = {"gpu": rehearsal.card.name, "gpus": rehearsal.gpus, "host_ram": rehearsal.host_ram}
    try:
        plain = check_case(read_case(dialect, invocation, {}, machine), search=False)
        predicted = _predicted(plain, answer)
        took = answer.device_bytes + answer.short_of_bytes
        # The run is nearer to the truth: what it took more, a change has to save as well.
        machine["reserve"] = max(0, took - predicted)
        checked = check_case(read_case(dialect, invocation, {}, machine)) if answer.verdict != "fits" else plain
    except VplanError as error:
        return f"vplan check does not predict this command: {error.message}"
    return CheckedRehearsal(checked, predicted, took, answer.limit == "gpu")


def script_of(command: tuple[str, ...]) -> Script:
    """The command, or the shell script that it runs."""
    scripts = [word for word in command[1:] if not word.startswith("-")]
    if Path(command[0]).name in SHELLS and scripts and Path(scripts[0]).is_file():
        return from_file(Path(scripts[0]))
    if command[0].endswith(".sh") and Path(command[0]).is_file():
        return from_file(Path(command[0]))
    return from_words(command)


def _predicted(checked: Checked, answer: RehearsalAnswer) -> int:
    """Of the phases that ran; of the one that ended, where an error named it."""
    estimate = checked.outcome.estimate
    phases = estimate.phases
    ran = {name for rank in answer.ranks for name in rank.phases}
    if answer.verdict == "no":
        ran = {answer.phase} if answer.phase in phases else set(PHASES)
    elif estimate.peak.phase in ran:
        return checked.outcome.seen_bytes
    return max((peak.device_bytes for name, peak in phases.items() if name in ran), default=0)
