"""From what a probe's workers report to the outcome and numbers of its row. Nothing is run or read here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from planner.spec.plan import Measured, Outcome
from planner.worker_process import Ended

COUNTERS = ("allocated_bytes", "reserved_bytes", "device_bytes")
STEADY = ("step", "train", "optimizer")
"""Phases without new allocation patterns: if the allocator has to empty its cache here, it does so in every step."""
WORST_FIRST = ("oom", "host-oom", "nan", "ok")
"""The outcome of several ranks is the first of these that one reports."""


def facts_of_all_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the facts of all ranks: the highest peaks, the slowest steps, the sum of host RAM, and the worst outcome,
    with all other facts of the rank that reported it.

    Unless every rank reported an outcome there is none, except if a rank ran out of memory or got NaNs.
    """
    if refused := next((rank for rank in ranks if "refused" in rank), None):
        return dict(refused)
    outcomes = [rank.get("outcome") for rank in ranks]
    worst = next((name for name in WORST_FIRST if name in outcomes), None)
    if worst == "ok" and None in outcomes:
        worst = None
    facts = dict(ranks[outcomes.index(worst)])
    names = dict.fromkeys(name for rank in ranks for name in rank.get("phases", {}))
    facts["phases"] = {
        name: _highest([rank["phases"][name] for rank in ranks if name in rank.get("phases", {})]) for name in names
    }
    facts["host_bytes"] = _over_known(sum, (rank.get("host_bytes") for rank in ranks))
    if len(ranks) > 1:
        steps = zip(*(rank.get("step_seconds", ()) for rank in ranks), strict=False)
        facts["step_seconds"] = [max(seconds) for seconds in steps]
        peaks = (_highest(list(rank.get("phases", {}).values())) for rank in ranks)
        facts["device_bytes_by_rank"] = [peak.get("device_bytes") for peak in peaks]
    return facts


def _highest(phases: Sequence[Mapping[str, int | None]]) -> dict[str, int | None]:
    """The highest value of each counter."""
    names = dict.fromkeys(name for phase in phases for name in phase)
    return {name: _over_known(max, (phase.get(name) for phase in phases)) for name in names}


def steady_retries(facts: Mapping[str, Any]) -> int:
    """How often the allocator had to empty its cache and retry during steady steps, from a probe's facts."""
    phases = facts.get("phases", {})
    return sum(phases[name]["retries"] or 0 for name in STEADY if name in phases)


def with_encoding(facts: Mapping[str, Any], encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Phases, missing counters and host RAM of the encoding process and of the step processes (if they ran), merged."""
    phases = {**encoded.get("phases", {}), **facts.get("phases", {})}
    missing = list(dict.fromkeys([*facts.get("missing", ()), *encoded.get("missing", ())]))
    host = _over_known(max, (part.get("host_bytes") for part in (facts, encoded)))
    return {"phases": phases, "missing": missing, "host_bytes": host}


def classify(reported: str | None, ended: Ended) -> Outcome:
    """The outcome of a probe: what its worker reported, else what follows from how the process ended.

    SIGKILL before the time limit counts as the kernel running out of host RAM: we only send it at the limit.
    """
    if reported in ("ok", "oom", "host-oom", "nan"):
        return cast(Outcome, reported)
    if ended.timed_out:
        return "timeout"
    return "host-oom" if ended.returncode in (-9, 137) else "crash"


def measurement_of(outcome: Outcome, facts: Mapping[str, Any]) -> Measured:
    """The row's numbers: each counter's highest value over all phases, and the median time of steady steps."""
    phases: Mapping[str, Mapping[str, Any]] = facts.get("phases", {})
    finished = outcome in ("ok", "nan")
    steps = facts.get("step_seconds")
    where: Any = "train" if facts.get("phase") == "step" else facts.get("phase")
    return Measured(
        outcome=outcome,
        phase=_peak_phase(phases) if finished else where,
        **{name: _over_known(max, (phase[name] for phase in phases.values())) for name in COUNTERS},
        host_bytes=facts.get("host_bytes"),
        step_seconds=statistics.median(steps) if finished and steps else None,
        retries=_over_known(sum, (phase["retries"] for phase in phases.values())),
    )


def _over_known(reduce: Any, values: Iterable[int | None]) -> int | None:
    """Applies ``max`` or ``sum`` to the values that are not None; None if all are."""
    present = [value for value in values if value is not None]
    return cast(int, reduce(present)) if present else None


def _peak_phase(phases: Mapping[str, Mapping[str, Any]]) -> Any:
    """The phase with the highest allocated peak, as named in an estimate; of equals the last; None without counters.

    `step` is left out, as it is no phase of an estimate: it covers whole steady steps, `train` and `optimizer`.
    """
    seen = [(name, phase["allocated_bytes"]) for name, phase in phases.items() if name != "step"]
    counted = [(name, nbytes) for name, nbytes in seen if nbytes is not None]
    return max(reversed(counted), key=lambda pair: pair[1])[0] if counted else None
