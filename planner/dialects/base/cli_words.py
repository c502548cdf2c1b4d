"""The command line that asks the same question again: records back into flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from planner.schema import Record
from planner.spec.job import Job, Machine, Strategy
from planner.spec.rules import resolve
from planner.units import GIB

UNTYPED = ("buckets", "validation", "links")
"""Fields whose values a plan file says better than a flag."""
SIZES = ("host_ram", "reserve")


def command(verb: str, job: Job, strategy: Strategy, machine: Machine, plan: str = "plan.toml") -> str:
    """`vplan VERB` of these records, quoted for a shell; of the plan's file, where flags would be unreadable."""
    if any(getattr(record, field, None) for record in (job, machine) for field in UNTYPED):
        return shlex.join(["vplan", verb, plan])
    plain = Job.model_construct(model=job.model, frames=job.frames, height=job.height, width=job.width)
    words = ["vplan", verb, job.model, "--gpu", machine.gpu]
    words += ["--frames", str(job.frames), "--height", str(job.height), "--width", str(job.width)]
    words += _differing(job, plain, ("model", "frames", "height", "width"))
    words += _differing(machine, Machine(gpu=machine.gpu), ("gpu",))
    words += _differing(strategy, resolve(job, Strategy(), machine), ())
    return shlex.join(words)


def _differing(record: Record, usual: Record, leave_out: tuple[str, ...]) -> list[str]:
    """Flags for the fields that are not as usual."""
    return [
        word
        for name in type(record).model_fields
        if name not in leave_out and getattr(record, name) not in (getattr(usual, name, None), None)
        for word in _flag(name, getattr(record, name))
    ]


def _flag(name: str, value: object) -> Iterator[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
        return
    yield f"--{flag}"
    if name in SIZES and isinstance(value, int):
        yield f"{value / GIB:.6g}GiB"
    else:
        yield ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
