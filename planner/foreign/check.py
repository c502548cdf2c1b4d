"""What another trainer's command needs, where it runs out of memory, and the smallest change of it that fits.

Pure except for looking up recordings: a dialect and an invocation in, an answer out.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from planner import dialects
from planner.dialects.base.bindings import Remark
from planner.dialects.base.dialect import nearest_fields, settings_for
from planner.dialects.base.flag_effects import OtherWay, other_ways
from planner.errors import NotRecordedError
from planner.foreign.case import Case
from planner.foreign.change_words import changed_words
from planner.foreign.least_memory import LeastMemory
from planner.foreign.pricing import CheckedEstimate, Pricing, in_doubt
from planner.foreign.smallest_change import Fix, smaller_batches, smallest_changes
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate, Plan


@dataclass(frozen=True)
class Checked:
    """The answer of `vplan check`: the case, its estimate, and fixes where it does not fit."""

    case: Case
    outcome: CheckedEstimate
    fixes: tuple[Fix, ...] = ()
    ineffective: tuple[Remark, ...] = ()
    helps: tuple[Fix, ...] = ()
    """changes that help and are not enough by themselves"""
    searched: bool = True
    today: str = ""
    """the same by today's script, for one that is gone"""
    least: Fix | None = None
    """where no option is enough: those that together need least"""
    unrecorded: tuple[str, ...] = ()
    """where no option is enough: those that nothing was recorded of, which were not tried"""
    smaller: tuple[Fix, ...] = ()
    """where no option is enough: a shorter clip and a smaller size that fit"""
    larger_card: CheckedEstimate | None = None
    """where no option is enough: the command as it is on the smallest class of card that it fits"""
    more_ram: int | None = None
    """where no option is enough: the host RAM in bytes, whole GiB, with which the command fits as it is"""
    as_lora: tuple[str, Estimate] | None = None
    """where no option is enough for full training: the question that answers with a LoRA, and what it needs"""
    together: LeastMemory | None = field(default=None, compare=False, repr=False)
    """where no option is enough: the search for the least, for whoever asks more"""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """How the command was understood, and what its estimate assumes; in words."""
        return (*self.case.notes, *self.outcome.estimate.assumptions)

    @property
    def not_priced(self) -> tuple[OtherWay, ...]:
        """Where no option is enough: settings of the trainer that need less where it ends, and that are not priced."""
        verdicts = {found.estimate.verdict for found in (self.outcome, *(fix.outcome for fix in self.fixes))}
        if "fits" in verdicts or not self.searched:
            return ()
        case, phase = self.case, self.outcome.phase
        return tuple(other_ways(case.dialect.name, case.invocation.settings, phase, case.machine.world))

    def to_json(self) -> dict[str, Any]:
        """The answer as `vplan check --json` prints it."""
        case, estimate = self.case, self.outcome.estimate
        estimate = estimate.replace(assumptions=self.assumptions)
        return {
            "trainer": case.dialect.name,
            "job": case.job.to_json(),
            "strategy": estimate.strategy.to_json(),
            "estimate": estimate.to_json(),
            "verdict": estimate.verdict,
            "limit": estimate.limit,
            "phase": self.outcome.phase,
            "moment": self.outcome.moment,
            "ineffective": [each._asdict() for each in self.ineffective],
            "gone": [each._asdict() for each in case.invocation.removed],
            "unknown": list(case.invocation.unknown),
            "refused": [each._asdict() for each in case.refused],
            "fixes": [_fix_json(fix) for fix in self.fixes],
            "least": _fix_json(self.least) if self.least else None,
            **({"unrecorded": list(self.unrecorded)} if self.unrecorded else {}),
            **({"not_priced": [each._asdict() for each in self.not_priced]} if self.not_priced else {}),
            "smaller": [_fix_json(fix) for fix in self.smaller],
            **({"larger_card": self.larger_card.estimate.machine.gpu} if self.larger_card else {}),
            **({"more_ram_bytes": self.more_ram} if self.more_ram else {}),
            **({"as_lora": self.as_lora[1].to_json()} if self.as_lora else {}),
            "helps": [{"change": list(fix.change), "lossy": fix.lossy, "cost": fix.cost} for fix in self.helps],
            **({"today": self.today} if self.today else {}),
        }


def _fix_json(fix: Fix) -> dict[str, Any]:
    estimate = fix.outcome.estimate.to_json()
    return {"change": list(fix.change), "lossy": fix.lossy, "cost": fix.cost, "estimate": estimate}


def check_case(case: Case, search: bool = True) -> Checked:
    """Estimates a case and, with ``search``, looks for the smallest changes that fit. Raises a NotRecordedError, worded
    in the trainer's flags, if a tape is missing."""
    pricing = Pricing(case)
    try:
        found = pricing.outcome(case)
    except NotRecordedError as error:
        raise _in_its_words(case, error, pricing) from None
    outcome = in_doubt(found)
    pricing.doubts = outcome is not found
    if outcome.estimate.verdict == "fits" or not search:
        return Checked(case, outcome, (), case.translation.ineffective, (), search, _today(case, outcome))
    fixes, helps = smallest_changes(case, outcome, pricing)
    least, together = None, None
    if not any(fix.outcome.estimate.verdict == "fits" for fix in fixes):
        together = LeastMemory(case, outcome, pricing)
        least = together.fix()
        verdict = least.outcome.estimate.verdict if least else "no"
        # Of more parts than are tried one by one; and tight, where nothing else is either.
        if least is not None and (
            verdict == "fits" or (verdict, outcome.estimate.verdict, fixes) == ("tight", "no", ())
        ):
            fixes = (least, *fixes)
    if fixes:
        least, together = None, None
    unrecorded = tuple(together.unrecorded()) if together else ()
    today = _today(fixes[0].case if fixes else case, outcome)
    return Checked(
        case, outcome, fixes, case.translation.ineffective, helps, search, today, least, unrecorded, together=together
    )


def _in_its_words(case: Case, error: NotRecordedError, pricing: Pricing) -> NotRecordedError:
    """The error for a batch that is not recorded, naming a smaller recorded one in the trainer's flags."""
    for move in smaller_batches(case.dialect):
        for step in move.steps(case.fields):
            other = case.changed(step)
            with contextlib.suppress(NotRecordedError):
                pricing.outcome(other)
                words = " ".join(changed_words(case, other.fields, frozenset(step)))
                return NotRecordedError(error.message, f"use {words}: {move.cost}")
    return error


def _today(case: Case, outcome: CheckedEstimate) -> str:
    """The same job with the trainer's current script, if a former one was given."""
    if not case.dialect.successor:
        return ""
    today = dialects.dialect(case.dialect.successor)
    assert today.files is not None
    fields = nearest_fields(today, {**case.fields, "expandable_segments": False})
    plan = Plan(
        job=Job.read({name: value for name, value in fields.items() if name in Job.model_fields}),
        strategy=Strategy.read({name: value for name, value in fields.items() if name in Strategy.model_fields}),
        machine=case.machine,
        trainer=today.name,
    )
    text = list(today.files(plan, settings_for(today, fields)).values())[-1]
    return "\n".join(line for line in text.splitlines() if not line.startswith(("#!", "set -e")))
