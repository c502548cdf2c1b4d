"""What the page of a rehearsal shows, as plain records: `planner` has every number of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from planner.foreign.rehearsed_command import CheckedRehearsal
from planner.rehearsal.answer import PHASES, RehearsalAnswer
from planner.rehearsal.live_memory import MemoryCourse
from planner.units import format_gib, gib, plural
from reports.data import Fact

VERDICTS = {"fits": "fits", "tight": "is tight", "no": "does not fit"}


class SourceLine(NamedTuple):
    """A row of the table of lines that hold the memory."""

    colour: str
    """class of its bar"""
    allocated_bytes: int
    place: str
    inner: str
    """a library's line that most of it is of; empty where it is the line itself"""
    code: str


@dataclass(frozen=True)
class RehearsalPage:
    """The content of one HTML file about one rehearsal."""

    answer: RehearsalAnswer
    checked: CheckedRehearsal | None
    """what `vplan check` says of the command"""
    environment: tuple[Fact, ...] = ()
    command: str = ""
    """that makes this page again"""
    template: ClassVar[str] = "rehearsal.html"

    @property
    def title(self) -> str:
        """Which page this is."""
        return f"Rehearsal on {self.answer.rehearsal.card.title}"

    @property
    def rehearsed(self) -> str:
        """The command that ran, for a shell."""
        return shlex.join(self.answer.rehearsal.command)

    @property
    def verdict(self) -> str:
        """In a sentence."""
        answer = self.answer
        if answer.limit == "host":
            return "It does not fit: not enough host RAM."
        need = f"{gib(answer.device_bytes):.2f} GiB of {answer.rehearsal.card.allocatable_gib:.2f} at the peak"
        return f"It {VERDICTS[answer.verdict]}: {need}{self._end}."

    @property
    def _end(self) -> str:
        answer = self.answer
        if answer.limit != "gpu":
            return f", in {answer.phase}" if answer.phase else ""
        room = f"no room for {format_gib(answer.short_of_bytes)}"
        if answer.oom is None:
            return f", then {room}"
        moment = f" ({answer.oom.moment})" if answer.oom.moment else ""
        rank = f", rank {answer.rank}" if len(answer.ranks) > 1 else ""
        return f"; it ends in {answer.oom.phase}{moment}, step {answer.oom.step}{rank}, with {room}"

    @property
    def course(self) -> MemoryCourse | None:
        """Of the rank that the page is about; None where its events are not known."""
        return self.answer.history.course if self.answer.history else None

    @property
    def lines(self) -> tuple[SourceLine, ...]:
        """The lines that hold the memory, the largest first, the rest together last; those of nothing are left out."""
        live = self.answer.live
        if live is None:
            return ()
        rows = [
            SourceLine(
                "p-weights",
                site.allocated_bytes,
                site.frame.place,
                site.inner.place if site.inner != site.frame else "",
                site.frame.source,
            )
            for site in live.largest
        ]
        backward = "gradients, and temporary tensors of the backward pass"
        rows.append(SourceLine("p-gradients", live.backward_bytes, "backward", "", backward))
        rows.sort(key=lambda row: -row.allocated_bytes)
        rows.append(SourceLine("p-context", live.other_bytes, plural(live.other_lines, "other line"), "", ""))
        return tuple(row for row in rows if row.allocated_bytes)

    @property
    def phases(self) -> tuple[str, ...]:
        """Those of the chart, in the order of a run."""
        names = {name for _, name in self.course.phases} if self.course else set()
        return tuple(name for name in PHASES if name in names)
