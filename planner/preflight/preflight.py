"""Does a plan fit this machine as it is now? Checks free GPU memory, host RAM, disk, versions and data before a long
job.

Compares the machine's state (`planner.hardware.doctor`) with what the plan needs by an estimate or by a measurement of
that very plan. Nothing is started and no GPU is touched, unless a probe is requested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import check_blocks, check_job
from planner.dataset.sources import DataSource
from planner.errors import NotEstimatedError, VplanError
from planner.estimate.estimate import assess
from planner.evidence.from_ledger import with_learned
from planner.evidence.ledger import Ledger, default_path
from planner.hardware import doctor
from planner.launch.supported import supported_plan
from planner.layout.recordings import load_facts
from planner.preflight.checks import FAILED, SHORT, Check, Need, on_data, on_disk, on_host, versions
from planner.preflight.gpu_wait import cards_of, on_card, wait
from planner.probe.worker_python import WorkerPython
from planner.schema import JsonObject
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.plan import Estimate, Plan
from planner.units import format_gib


@dataclass(frozen=True)
class PreflightReport:
    """All checks, with the numbers they compare."""

    checks: tuple[Check, ...]
    estimate: Estimate | None = None
    need: Need | None = None
    gpus: tuple[JsonObject, ...] = ()
    measurement: JsonObject | None = None
    waited_seconds: float = 0.0
    data: JsonObject = field(default_factory=dict)
    login_node: bool = False
    """whether the GPUs are on another machine, to which a job is submitted"""

    @property
    def fault(self) -> Check | None:
        """The first failed check; None when the plan may start."""
        return next((one for one in self.checks if one.level == "error"), None)

    def raise_fault(self) -> None:
        """Raises the first failed check as a VplanError with its exit code; returns when there is none."""
        if self.fault:
            raise VplanError(self.fault.what, self.fault.fix, self.fault.exit_code)

    def to_json(self) -> JsonObject:
        """The report as `vplan preflight --json` prints it."""
        need = self.need
        return {
            "verdict": "no" if self.fault else "go",
            "login_node": self.login_node,
            "checks": [
                {"name": one.name, "level": one.level, "message": one.what, "fix": one.fix} for one in self.checks
            ],
            "need": None if need is None else {**need._asdict(), "phases": dict(need.phases)},
            "gpus": list(self.gpus),
            "data": self.data or None,
            "estimate": self.estimate.to_json() if self.estimate else None,
            "measurement": self.measurement,
            "waited_seconds": round(self.waited_seconds, 1),
        }


@dataclass(frozen=True)
class PreflightOptions:
    """What a plan is checked against on this machine, and whether to wait or probe."""

    device: Literal["cuda", "cpu"] = "cuda"
    sources: tuple[DataSource, ...] = ()
    output: Path | None = None
    keep_checkpoints: int = 2
    """checkpoints to keep; another one exists while it is being written"""
    checkpoints: int = 0
    """how many the run writes in all, if known: the LoRA files of all of them stay"""
    wait_seconds: float = 0.0
    skip_bad: bool = False
    probe: bool = False
    login_node: bool | None = False
    """whether this machine only submits jobs; None: if it has no GPU but a command to submit jobs"""


def preflight(plan: Plan, options: PreflightOptions, say: Callable[[str], None] = lambda text: None) -> PreflightReport:
    """Runs all checks of a plan on this machine. Raises a VplanError only when nothing can be checked: there is no GPU,
    or no estimate.

    `say` gets a line before each wait or slow check.
    """
    cards: list[JsonObject] = []
    submits = _is_login_node(options)
    if options.device == "cuda" and not submits:
        cards = cards_of(plan)
    rehearses = WorkerPython().is_virtual
    estimate, checks = estimated(plan, must=options.device == "cuda" and not options.probe and not rehearses)
    # A measurement of this very plan on such a card overrides the estimate, except for host RAM.
    need = needed(plan, estimate, cards)
    if (
        need
        and need.basis == "measured"
        and not (estimate and (estimate.basis == "measured" or estimate.limit == "host"))
    ):
        checks = [Check("plan", "ok", f"fits: {format_gib(need.high_bytes)} measured on such a card")]
    waited_seconds = 0.0
    if need and cards and options.wait_seconds:
        cards, waited_seconds = wait(plan, need, cards, options.wait_seconds, say)
    if need and cards:
        checks += [entry for card in cards for entry in on_card(card, need)]
    if submits:
        what = "no GPU is asked for on a login node: the job checks GPUs, their free memory and host RAM as it starts"
        checks.append(Check("GPU", "note", what))
    else:
        checks += list(on_host(plan, estimate))
    if rehearses:  # how much it needs is what the rehearsal is for
        checks = [each._replace(level="warning") if each.exit_code == SHORT else each for each in checks]
    output = options.output or Path.cwd()
    data, more = on_data(plan, options.sources, options.skip_bad) if options.sources else ({}, [])
    checks += more
    lora_files = options.checkpoints if plan.job.method == "lora" else 0
    checks += list(on_disk(output, estimate, options.keep_checkpoints, data.get("cache_bytes", 0), lora_files))
    if plan.evidence or not options.probe:
        checks += list(versions(plan, cards))
    row = None
    if options.probe and not any(entry.level == "error" for entry in checks):  # else it would fail for a known reason
        # An estimate that peaks in encoding is not tested by steps alone.
        encodes = estimate is not None and estimate.peak.phase == "encode"
        row, more = _probed(plan, options.device, encodes, cards, say)
        checks += more
    return PreflightReport(tuple(checks), estimate, need, tuple(cards), row, waited_seconds, data, submits)


def _is_login_node(options: PreflightOptions) -> bool:
    """Whether this machine only submits jobs, so that its own GPUs are not checked. Raises a VplanError if a probe is
    requested on one."""
    submits = options.login_node
    if submits is None:
        submits = options.device == "cuda" and bool(doctor.gpus()[0]["error"]) and doctor.submits_with() is not None
    if submits and options.probe:
        raise VplanError("a login node has no GPU to probe on", "leave --probe out here, and put it into the job")
    return submits


def ready(plan: Plan) -> Plan:
    """The plan with open fields filled in and its stored estimate dropped, which may be outdated or edited. Raises a
    VplanError for contradictions, and for options that our trainer does not apply if it is the plan's."""
    if plan.trainer == "vplan":
        return supported_plan(plan, trained=True).replace(ladder=plan.ladder, evidence=plan.evidence)
    profile = lookup.model(plan.job.model)
    configuration = plan.configuration
    check_job(profile, plan.job)
    check_blocks(profile, configuration.strategy)
    refuse_contradictions(configuration)
    return plan.replace(job=plan.job.replace(model=profile.name), strategy=configuration.strategy, estimate=None)


def estimated(plan: Plan, *, must: bool) -> tuple[Estimate | None, list[Check]]:
    """(estimate, checks): the plan estimated anew by this version, and whether it fits its own budget. If no recording
    covers it: a NotEstimatedError with `must`, else None and a warning."""
    profile, (_, card) = lookup.model(plan.job.model), card_lookup.parse_gpus(plan.machine.gpu)
    try:
        machine = plan.machine.replace(torch=doctor.torch_release()) if plan.trainer == "vplan" else plan.machine
        configuration = replace(plan.configuration, machine=machine)
        facts = with_learned(load_facts(configuration, profile, card), plan.trainer)
        estimate = assess(configuration, facts, plan.trainer).estimate
    except NotEstimatedError as error:
        if must:
            raise
        return None, [Check("plan", "warning", f"not estimated: {error.message}", error.fix)]
    fix = f"`vplan suggest {plan.job.model} --gpu {plan.machine.gpu}` finds one that does"
    if estimate.verdict == "no" and estimate.limit == "host":
        fault = f"the plan needs {format_gib(estimate.host_ram_bytes)} of host RAM, and it has"
        return estimate, [Check("plan", "error", f"{fault} {format_gib(plan.machine.host_ram or 0)}", fix, SHORT)]
    if estimate.verdict == "no":
        fault = f"the plan does not fit: {format_gib(estimate.low_bytes)} at least, and {card.title} gives"
        return estimate, [Check("plan", "error", f"{fault} {format_gib(estimate.budget_bytes)}", fix, SHORT)]
    budget = f"{format_gib(estimate.high_bytes)} at most of {format_gib(estimate.budget_bytes)} ({card.title})"
    if estimate.verdict == "tight":
        return estimate, [
            Check("plan", "warning", f"it is tight: up to {budget}", "use less memory, or test it: --probe")
        ]
    return estimate, [Check("plan", "ok", f"fits: {budget}")]


def needed(plan: Plan, estimate: Estimate | None, cards: list[JsonObject]) -> Need | None:
    """What each GPU must have free: as probed, if this very plan was probed on such a card with this torch; else as
    estimated."""
    phases: dict[str, int] = {}
    if estimate:
        phases |= {phase: peak.device_bytes for phase, peak in estimate.phases.items()}
    names = {card["name"] for card in cards}
    for proof in reversed(plan.evidence):
        measured, env = proof.measured, proof.env
        if (
            measured.outcome == "ok"
            and measured.device_bytes
            and names == {env.gpu}
            and env.torch == doctor.package_version("torch")
        ):
            return Need(measured.device_bytes, measured.device_bytes, phases, "measured")
    return Need(estimate.low_bytes, estimate.high_bytes, phases, estimate.basis) if estimate else None


def _probed(
    plan: Plan, device: Literal["cuda", "cpu"], encodes: bool, cards: list[JsonObject], say: Callable[[str], None]
) -> tuple[JsonObject, list[Check]]:
    """Probes the plan; returns the ledger row as JSON, and the resulting check."""
    from planner.probe.probe import RealRunner, probe

    say("probing: a few real steps ...")
    probe_row = probe(plan, RealRunner(device=device, command="vplan preflight --probe"), encode=encodes)
    try:
        Ledger(default_path()).append(probe_row)
    except VplanError as error:  # the probe answers even if its row cannot be stored
        say(f"warning: {error}")
    row = probe_row.to_json()
    measured, message = row["measured"], row["details"].get("message", "")
    outcome, where = measured["outcome"], f" in {measured['phase']}" if measured["phase"] else ""
    if outcome in ("oom", "host-oom"):
        fault = f"the plan ran out of {'GPU' if outcome == 'oom' else 'host'} memory{where}"
        return row, [Check("probe", "error", fault, "use less memory", SHORT)]
    if outcome != "ok":
        fault = f"the probe ended with {outcome}{where}: {message}".rstrip(": ")
        return row, [Check("probe", "error", fault, f"read {row['details'].get('log', 'the row (--json)')}", FAILED)]
    if measured["retries"]:
        fault = f"the allocator emptied its cache {measured['retries']} times: at the limit, and slower for it"
        return row, [Check("probe", "error", fault, "use less memory", SHORT)]
    peak = measured["device_bytes"]
    if peak is None:
        return row, [Check("probe", "ok", f"ran, {measured['step_seconds']:.2f} s/step; no GPU was measured")]
    free = min((card["free_bytes"] for card in cards if card["free_bytes"] is not None), default=None)
    if free is not None and peak > free:
        fault = f"it took {format_gib(peak)} of a GPU, and {format_gib(free)} are free"
        return row, [Check("probe", "error", fault, "stop other programs there, or use less memory", SHORT)]
    return row, [Check("probe", "ok", f"ran: {format_gib(peak)} of a GPU, {measured['step_seconds']:.2f} s/step")]
