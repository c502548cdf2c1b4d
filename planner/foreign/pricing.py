"""Estimates of a command and its changes, with the phase and moment at which each ends if it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.catalog.shapes import check_blocks
from planner.catalog.swapped_stacks import fetches_again
from planner.dialects.base.deepspeed_file import zero_settings
from planner.dialects.base.own_models import SHORT_PROMPT
from planner.errors import VplanError
from planner.estimate.estimate import OPTIMIZER_MOMENT, PHASE_MOMENTS, assess, describe_moment, outside_bytes
from planner.foreign.case import Case
from planner.layout import margin
from planner.layout.inputs import Library, load_facts
from planner.layout.run import Facts
from planner.search.screening import QuickEstimate, Screen
from planner.spec.combinations.contradictions import check
from planner.spec.configuration import Configuration
from planner.spec.plan import Estimate


@dataclass(frozen=True)
class CheckedEstimate:
    """The estimate of a command, with the phase and moment that decide its verdict."""

    estimate: Estimate
    phase: str
    moment: str
    kept_bytes: int = 0
    """on the device with what torch's allocator leaves in pieces as long as there is room; 0 where `estimate` has it"""

    @property
    def seen_bytes(self) -> int:
        """What people see on the device."""
        return self.kept_bytes or self.estimate.peak.device_bytes


class Pricing:
    """Estimates of one case and its changes; what they share is looked up once."""

    def __init__(self, case: Case) -> None:
        self.model, self.gpu = case.model, case.gpu
        self.zero = zero_settings(case.given.settings)
        self.library = Library()
        self.screens: dict[str, Screen] = {}

    def facts(self, configuration: Configuration) -> Facts:
        """The facts (tapes, model, card, measurements) for an estimate."""
        return load_facts(configuration, self.model, self.gpu, self.library)._replace(zero=self.zero)

    def may_be(self, verdict: str, case: Case) -> bool:
        """Whether, by a quick estimate, a replay could still reach the verdict ("fits" or "tight"); False when there is
        no quick estimate."""
        quick = self.quick_estimate(case)
        if quick is None:
            return False
        budget = self.gpu.allocatable_bytes - case.machine.reserve
        held = case.machine.host_ram is None or quick.host_ram_bytes <= case.machine.host_ram
        low, high = margin.interval(quick.device_bytes)
        return held and (high if verdict == "fits" else low) <= budget

    def quick_estimate(self, case: Case) -> QuickEstimate | None:
        """What a case needs, without a replay; None where it contradicts itself, or nothing was recorded of it."""
        screen = self.screens.setdefault(case.trainer, Screen(self.facts, case.trainer))
        try:
            configuration = case.configuration
            check(configuration, fetched_again=fetches_again(case.trainer))
            check_blocks(case.model, case.strategy)
            return screen.quick_estimate(configuration)
        except VplanError:
            return None

    def outcome(self, case: Case) -> CheckedEstimate:
        """The estimate of a case, with the phase and moment at which it ends if it does not fit. Where prompts are not
        filled up, how long they are stands in no command: priced is the longest, and the low end at `SHORT_PROMPT`."""
        found = self._outcome(case)
        unpadded = self.model.trained_with(case.trainer.partition("@")[0], "prompts-unpadded")
        if not unpadded or case.job.text_tokens is not None:
            return found
        short = self._outcome(replace(case, job=case.job.replace(text_tokens=SHORT_PROMPT))).estimate
        estimate = found.estimate.replace(low_bytes=min(found.estimate.low_bytes, short.low_bytes))
        if estimate.verdict == "no" and estimate.limit == "gpu" and short.verdict != "no":
            estimate = estimate.replace(verdict="tight", limit=None)
        return replace(found, estimate=estimate)

    def _outcome(self, case: Case) -> CheckedEstimate:
        configuration = case.configuration
        run, played, estimate, kept = assess(configuration, self.facts(configuration), case.trainer)
        if kept:
            moment = estimate.peak.moment
            return CheckedEstimate(estimate, _phase(estimate.peak.phase, moment), moment, kept)
        if estimate.verdict == "no" and estimate.limit == "host" and estimate.host:
            return CheckedEstimate(estimate, estimate.host.phase, "host RAM")
        room = estimate.budget_bytes - outside_bytes(run)
        over = (entry for entry in played if entry.replayed.reserved_peak_bytes > room)
        ended = next(over, None) if estimate.verdict != "fits" else None
        if ended is None:
            return CheckedEstimate(estimate, _phase(estimate.peak.phase, estimate.peak.moment), estimate.peak.moment)
        moment = describe_moment(ended, estimate.strategy)
        phase = _phase(ended.phase, moment)
        # What is cached before training is encoded apart; what stays on the GPU encodes each batch.
        beside = [entry for entry in played if entry.phase == "encode" and not entry.run.encoding_only.peak_bytes]
        if any(entry is ended for entry in beside[1:]):  # it had room before there were gradients and states beside it
            return CheckedEstimate(estimate, "train", "encoding the next batch beside gradients and optimizer states")
        return CheckedEstimate(estimate, phase, moment)


def _phase(phase: str, moment: str) -> str:
    """The phase as people count: the first step's own are loading, training and its optimizer step."""
    if moment == PHASE_MOMENTS["load"]:
        return "load"
    if phase != "first_step":
        return phase
    return "optimizer" if moment == OPTIMIZER_MOMENT else "train"
