"""The probe's worker process: one rank's few real steps of a plan, or what is encoded before them.

`planner.probe.probe` starts it as ``vplan worker probe FOLDER``, under torch's launcher where there are several ranks.
It reads the plan and its options from ``FOLDER/request.json``, writes what it measures into
``FOLDER/result-RANK.json`` before and after each phase, and a checkpoint that nobody keeps into ``FOLDER/scratch``.
Torch is imported by ``trainers.measuring.measure``, and that only once the allocator's settings are in the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from planner.errors import VplanError
from planner.spec.plan import Plan
from planner.worker_process import REQUEST, SCRATCH, read_json, result_file
from trainers.worker import ResultFile, end_with_parent, set_allocator

REFUSED, OUT_OF_MEMORY = 1, 75
"""Exit codes by which a launcher ends the other ranks. What happened is in the result file."""


def main(arguments: list[str]) -> int:
    """Runs one rank of the request in the folder named by the only argument."""
    folder = Path(arguments[0])
    end_with_parent()
    request = read_json(folder / REQUEST)
    report = ResultFile(folder / result_file(int(os.environ.get("RANK", "0"))))
    report.tell(pid=os.getpid())
    plan = Plan.read(request.pop("plan"), "probe")
    set_allocator(plan.strategy.expandable_segments)
    from trainers.measuring.measure import measure
    from trainers.measuring.phases import ProbeRequest

    try:
        measure(ProbeRequest.of(plan, scratch=folder / SCRATCH, **request), report)
    except VplanError as error:
        report.tell(refused={"message": error.message, "fix": error.fix})
        return REFUSED
    return OUT_OF_MEMORY if "oom" in report.facts["outcome"] else 0
