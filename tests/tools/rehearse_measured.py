"""Whether a virtual GPU takes what a real one took: each measured row of our own trainer, rehearsed.

    python -m tests.tools.rehearse_measured --python cuda/bin/python

``--python`` names a Python with the CUDA wheel of the torch that measured them (each row says which), and with vplan's
packages. A line for each row has how far the rehearsed peaks are from the measured ones. Rows whose optimizer is
stepped in host RAM are left out: their states would be real here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from planner.evidence.jsonl import rows_by_id
from planner.evidence.measurement import ProbeRow
from planner.evidence.published import shipped_own
from planner.probe.fork_server import ForkServer
from planner.probe.probe import TIME_LIMIT
from planner.rehearsal.probe_runner import RehearsalRunner, cuda_interpreter, torch_release
from planner.spec.plan import RAN, Plan
from planner.units import MIB

COUNTERS = ("allocated_bytes", "reserved_bytes")


def main() -> None:
    """Rehearse the measured rows and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="a Python with PyTorch's CUDA wheel")
    interpreter = cuda_interpreter(parser.parse_args().python)
    compared = same = 0
    with ForkServer(interpreter.path) as server:
        runner = RehearsalRunner(interpreter=interpreter, server=server, command="rehearse_measured")
        for row in measured_rows(torch_release(interpreter)):
            plan = Plan(job=row.job, strategy=row.strategy, machine=row.machine)
            found = runner.run(plan, steps=1, time_limit=TIME_LIMIT).measured
            pairs = [(getattr(found, name), getattr(row.measured, name)) for name in COUNTERS]
            words = " ".join(f"{(one - other) / MIB:+9.1f} MiB {one / other - 1:+8.3%}" for one, other in pairs)
            print(f"{row.id:48} {words}", flush=True)
            compared, same = compared + 1, same + all(round((one - other) / MIB) == 0 for one, other in pairs)
    print(f"{same} of {compared} took the same, allocated and reserved, to the MiB")


def measured_rows(torch: str | None) -> Iterator[ProbeRow]:
    """The bundled rows of that torch that ran with room to spare."""
    rows = {name: row for path in shipped_own() for name, row in rows_by_id(path).items()}
    for row in map(ProbeRow.read, rows.values()):
        if row.measured.outcome in RAN and row.strategy.offload_optimizer == "none" and row.machine.torch == torch:
            yield row


if __name__ == "__main__":
    main()
