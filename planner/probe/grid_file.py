"""Grid files: TOML files of plans to measure one after another.

A file lists jobs (what is trained, at which shape), each with several strategies, so that their ranking by speed can
be judged too. It is user input: its size is limited, and a fault is reported in one line.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

import profiles
from planner.errors import VplanError, quoted
from planner.schema import Count, Flag, Record
from planner.spec.job import Job, Strategy
from planner.untrusted import parse, read_bytes

LARGEST_BYTES = 1 << 20
MOST_PLANS = 1_000

Cap = Literal["under", "over"]
"""A cap on a plan's memory: `under` is the most at which the estimate says that it does not fit, `over` the least at
which it says that it does."""


BESIDE = frozenset({"cap", "cap_share", "encode", "gpus"})
"""Keys of a plan in the file that are not fields of a Strategy."""


class GridEntry(Record):
    """One plan of a grid file; the card is not part of it."""

    job: Job
    strategy: Strategy
    cap: Cap | None = None
    cap_share: Annotated[float, Field(gt=0.5, lt=2)] | None = None
    """instead of `cap`: memory that the plan may use, as a share of its predicted device peak"""
    encode: Flag = False
    """first runs text encoders and VAE in a separate process, as caching does"""
    gpus: Count = 1
    """GPUs, all in one machine"""
    config: dict[str, Any] = {}
    """replaced keys of the model's published architecture, to shrink it for rehearsals"""

    @property
    def is_capped(self) -> bool:
        """Whether the plan's memory is capped."""
        return self.cap is not None or self.cap_share is not None

    @property
    def title(self) -> str:
        """A short description: model, method, shape, and the fields that the file sets."""
        job = self.job
        shape = f"{job.frames}x{job.height}x{job.width}" if job.frames > 1 else f"{job.height}x{job.width}"
        shape += f" x {job.batch_size}" if job.batch_size > 1 else ""
        ways = [_words(name, getattr(self.strategy, name)) for name in sorted(self.strategy.model_fields_set)]
        ways += ["encodes"] if self.encode else []
        ways += [f"on {self.gpus} GPUs"] if self.gpus > 1 else []
        ways += [f"capped {self.cap} its peak"] if self.cap else []
        ways += [f"capped at {self.cap_share:g} of its peak"] if self.cap_share else []
        return f"{job.model} {job.method} {shape}: {', '.join(filter(None, ways)) or 'as it is'}"


def _words(name: str, value: object) -> str:
    return f"{name.replace('_', '-')} {'off' if value is False else 'on' if value is True else value}"


def read_grid(path: str | Path) -> tuple[GridEntry, ...]:
    """The plans of a grid file, in order. Raises a VplanError that names the file and its fault."""
    path = Path(path)
    try:
        text = read_bytes(path, LARGEST_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise VplanError(f"{path.name} is not TOML: {error}", "correct that line") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        names = ", ".join(sorted(grid.stem for grid in profiles.GRIDS.glob("*.toml")))
        fix = f"pass a grid's .toml file, or a bundled grid: {names}"
        raise VplanError(f"cannot read the grid {quoted(str(path))}: {reason}", fix) from None
    whole = parse(text, "toml", path.name)
    entries = tuple(_entries(whole, path.name))
    if not 0 < len(entries) <= MOST_PLANS:
        fix = f"write 1 to {MOST_PLANS} plans, as [[jobs]] with plans = [{{}}, ...]"
        raise VplanError(f"{path.name} has {len(entries)} plans", fix)
    return entries


def _entries(whole: Mapping[str, Any], where: str) -> Iterator[GridEntry]:
    if whole.get("schema") != 1:
        raise VplanError(f"{where} is not a grid of schema 1, which this vplan reads", "add schema = 1 at the top")
    if unknown := sorted(whole.keys() - {"schema", "jobs"}):
        raise VplanError(f"{where}: a grid has no {quoted(unknown[0])}", "write [[jobs]] tables")
    jobs = whole.get("jobs", [])
    for number, table in enumerate(jobs if isinstance(jobs, list) else [jobs], start=1):
        here = f"{where}: job {number}"
        if not isinstance(table, dict):
            raise VplanError(f"{here} is not a table", "write [[jobs]] above it")
        fields = dict(table)
        plans, config = fields.pop("plans", None), fields.pop("config", {})
        job = Job.read(fields, here)
        if not isinstance(plans, list) or not all(isinstance(plan, dict) for plan in plans):
            raise VplanError(f"{here} ({job.model}) has no list of plans", "write plans = [{}] below it")
        for place, plan in enumerate(plans, start=1):
            ways = {name: value for name, value in plan.items() if name not in BESIDE}
            strategy = Strategy.read(ways, f"{here}, plan {place}")
            how = {name: value for name, value in plan.items() if name in BESIDE}
            yield GridEntry.read({"job": job, "strategy": strategy, "config": config, **how}, f"{here}, plan {place}")
