"""Estimates a command and its changes, and finds the phase and moment at which each runs out if it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.catalog.shapes import check_blocks
from planner.catalog.swapped_stacks import fetches_again
from planner.dialects.base.engine_files.deepspeed_file import zero_settings
from planner.dialects.base.own_models import SHORT_PROMPT
from planner.errors import NotRecordedError, VplanError
from planner.estimate.estimate import assess, outside_bytes
from planner.estimate.peak_moment import OPTIMIZER_MOMENT, PHASE_MOMENTS, describe_moment
from planner.estimate.pinned_ram import page_file_doubts, wsl_doubts
from planner.foreign.case import Case, as_read
from planner.layout import margin
from planner.layout.recordings import Library, load_facts
from planner.layout.run import Facts
from planner.search.run_cache import RunCache
from planner.search.screening import QuickEstimate, Screen
from planner.spec.combinations.contradictions import refuse_contradictions
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
    """Estimates one case and its changes; what they share is looked up once."""

    def __init__(self, case: Case, other: Pricing | None = None) -> None:
        """``other``: of the same command on another card, whose recordings are laid out already."""
        self.model, self.gpu = case.model, case.gpu
        self.zero = zero_settings(case.invocation.settings)
        self.library: Library = other.library if other else Library()
        self.run_caches: dict[str, RunCache] = other.run_caches if other else {}
        self.screens: dict[str, Screen] = {}
        self.doubts = False
        """Whether `in_doubt` counts in an outcome: where the command as it is is in doubt, a change has to end that.
        Elsewhere it does not: on WSL nothing that swaps would be left, and on Windows a loss would be advised where a
        page file does."""

    def facts(self, configuration: Configuration) -> Facts:
        """The facts (tapes, model, card, measurements) for an estimate."""
        return load_facts(configuration, self.model, self.gpu, self.library)._replace(zero=self.zero)

    def may_be(self, verdict: str, case: Case) -> bool:
        """Whether, by a quick estimate, a replay could still reach the verdict ("fits" or "tight"); False when there is
        no quick estimate."""
        device_bytes = self.device_bytes(case)
        if device_bytes is None:
            return False
        low, high = margin.interval(device_bytes)
        return (high if verdict == "fits" else low) <= self.gpu.allocatable_bytes - case.machine.reserve

    def device_bytes(self, case: Case) -> int | None:
        """What a case needs on the device, by a quick estimate; None without one, or where the host has not the RAM."""
        quick, ram = self.quick_estimate(case), case.machine.host_ram
        return None if quick is None or (ram is not None and quick.host_ram_bytes > ram) else quick.device_bytes

    def is_unrecorded(self, case: Case) -> bool:
        """Whether a case has no estimate because nothing was recorded of it, and not because it contradicts itself."""
        try:
            refuse_contradictions(case.configuration, fetched_again=fetches_again(case.trainer))
            self._screen(case.trainer).facts(as_read(case).configuration)
        except NotRecordedError:
            return True
        except VplanError:
            return False
        return False

    def _screen(self, trainer: str) -> Screen:
        """The quick estimates of a trainer's version, whose runs replays are laid out from too."""
        if trainer not in self.screens:
            run_cache = self.run_caches.setdefault(trainer, RunCache())
            self.screens[trainer] = Screen(self.facts, trainer, run_cache)
        return self.screens[trainer]

    def quick_estimate(self, case: Case) -> QuickEstimate | None:
        """What a case needs, without a replay; None where it contradicts itself, its trainer refuses it, or nothing
        was recorded of it."""
        if case.dialect.clashing(case.fields):
            return None
        screen = self._screen(case.trainer)
        try:
            configuration = as_read(case).configuration
            refuse_contradictions(configuration, fetched_again=fetches_again(case.trainer))
            check_blocks(case.model, case.strategy)
            return screen.quick_estimate(configuration)
        except VplanError:
            return None

    def outcome(self, case: Case) -> CheckedEstimate:
        """The estimate of a case, with the phase and moment at which it ends if it does not fit."""
        found = self._at_lengths(case)
        if case.dialect.captures(case.invocation.settings) and case.strategy.gradient_checkpointing != "none":
            found = self._with_graphs(case, found)
        return in_doubt(found) if self.doubts else found

    def _with_graphs(self, case: Case, found: CheckedEstimate) -> CheckedEstimate:
        """The same of a step whose blocks are captured as CUDA graphs. Each keeps a pool of its own between its uses,
        so that what a block recomputes is not freed for the next one: at most all that backward needs is there at
        once, as without checkpoints. Of the five runs that SimpleTuner's page prints with graphs, two over bf16 take 92
        and 95 % of that and three over int8 60 to 85 %, where the estimate with checkpoints is 29 to 73 % (bc8e6ab
        documentation/quickstart/KREA2.md)."""
        whole = self._at_lengths(case.changed({"gradient_checkpointing": "none"})).estimate
        estimate = found.estimate.replace(high_bytes=max(found.estimate.high_bytes, whole.high_bytes))
        if estimate.verdict == "fits" and whole.verdict != "fits":
            estimate = estimate.replace(verdict="tight")
        return replace(found, estimate=estimate)

    def _at_lengths(self, case: Case) -> CheckedEstimate:
        """The same without CUDA graphs. Where prompts are not filled up, how long they are stands in no command: priced
        is the longest, and the low end at `SHORT_PROMPT`."""
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
        configuration = as_read(case).configuration
        screen = self._screen(case.trainer)
        facts = screen.facts(configuration)
        run, played, estimate, kept = assess(configuration, facts, case.trainer, screen.run_cache.lay_out)
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


def in_doubt(found: CheckedEstimate) -> CheckedEstimate:
    """What fits and may still run out, for a limit of Windows or WSL that nothing tells beforehand, as tight."""
    estimate = found.estimate
    pinned = estimate.host.pinned_bytes if estimate.host else 0
    files, pins = page_file_doubts(estimate), wsl_doubts(estimate.machine, pinned)
    if estimate.verdict != "fits" or not (files or pins):
        return found
    return replace(found, estimate=estimate.replace(verdict="tight", assumptions=(*files, *estimate.assumptions)))


def _phase(phase: str, moment: str) -> str:
    """The phase as people count it: loading, training and its optimizer step all belong to the first step."""
    if moment == PHASE_MOMENTS["load"]:
        return "load"
    if phase != "first_step":
        return phase
    return "optimizer" if moment == OPTIMIZER_MOMENT else "train"
