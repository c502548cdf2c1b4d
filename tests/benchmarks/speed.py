"""How fast vplan answers: cold processes, allocated peaks a second, the replay of a 14B model's tape, a report.

    python -m tests.benchmarks.speed [--times N] [--cold]

Medians of N runs of each (default 5), in seconds, beside what is promised. Run it on an idle machine; needs no torch.
Behind a cold process stand its CPU seconds, user and system, the least of the runs: on a busy machine they say more
than the clock. ``--cold``: only cold processes.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

import vplan
from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.estimate.stages import replay_stages
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.search.batched_peaks import peak_forms
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

MACHINE = Machine(gpu="rtx4090")
COMMANDS = (
    (0.5, ("estimate", "wan2.1-t2v-1.3b", "--gpu", "24GB", "--frames", "81", "--gradient-checkpointing", "full")),
    (0.5, ("estimate", "wan2.1-t2v-14b", "--gpu", "80GB", "--frames", "81", "--gradient-checkpointing", "full")),
    (0.6, ("suggest", "wan2.1-t2v-1.3b", "--gpu", "24GB", "--frames", "81")),
    (0.6, ("suggest", "wan2.1-t2v-14b", "--gpu", "80GB", "--frames", "81")),
    (0.6, ("suggest", "wan2.1-t2v-14b", "--gpu", "24GB", "--frames", "81")),
    (0.6, ("suggest", "wan2.1-t2v-14b", "--gpu", "rtx4090", "--prefer", "frames")),
    (0.6, ("suggest", "wan2.1-i2v-14b-480p", "--gpu", "h100-80gb", "--frames", "129")),
    (0.6, ("suggest", "flux.1-dev", "--method", "full", "--gpu", "80GB")),
    (0.6, ("suggest", "easyanimate-v5.1-7b", "--method", "full", "--gpu", "4x80GB", "--frames", "49")),
    (0.6, ("suggest", "hunyuan-video", "--gpu", "24GB")),
    (2.5, ("suggest", "--gpu", "24GB", "--frames", "81")),
)

REPORTED = (
    ("suggest", "wan2.1-i2v-14b-480p", "--gpu", "h100-80gb", "--frames", "81"),
    ("suggest", "wan2.1-t2v-14b", "--gpu", "rtx4090", "--frames", "81"),
)
"""Answers whose plans full pages are made of, each with a capacity map of 12 x 8."""


def median_seconds(call: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def cold(words: tuple[str, ...]) -> Callable[[], object]:
    """A fresh process, as a user starts it: with bytecode in place, as pip leaves it, whatever is set here. Does not
    fit (3) is an answer too."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = os.path.join(tempfile.gettempdir(), "vplan-speed-bytecode")

    def run() -> None:
        done = subprocess.run(vplan.command(*words), capture_output=True, text=True, check=False, env=environment)
        assert done.returncode in (0, 3), done.stderr

    run()
    return run


def cpu_seconds(call: Callable[[], object], times: int) -> float:
    """The least CPU seconds that a call's processes took, with those that they started."""
    found = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        call()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def report_seconds(words: tuple[str, ...], times: int) -> tuple[float, float]:
    """Seconds by the clock of a cold `vplan report` of that answer's plan, and those of all its processes."""

    def used() -> float:
        spent = os.times()
        return spent.children_user + spent.children_system

    with tempfile.TemporaryDirectory() as folder:
        plan, page = os.path.join(folder, "plan.toml"), os.path.join(folder, "report.html")
        cold((*words, "-o", plan))()
        before = used()
        taken = median_seconds(cold(("report", plan, "-o", page)), times)
        return taken, (used() - before) / times


def laid_out(model: str, **more: object) -> tuple[dict[str, int], object]:
    profile = lookup.model(model)
    height, width = profile.shape.resolutions[0]
    job = Job(model=model, frames=profile.shape.default_frames, height=height, width=width)
    configuration = Configuration.of(job, Strategy.read({"gradient_checkpointing": "full", **more}), MACHINE)
    shape = grid(profile, job)
    return shape, lay_out(configuration, load_facts(configuration), shape)


def peaks_per_second(times: int) -> tuple[float, float]:
    """Allocated peaks a second over 10,000 shapes, and the seconds it takes to prepare for them."""
    shape, run = laid_out("wan2.1-t2v-14b")
    start = time.perf_counter()
    forms = peak_forms(run)
    prepared = time.perf_counter() - start
    random = np.random.default_rng(0)
    grids = [{**shape, **dict(zip("FHW", map(int, random.integers(2, 60, 3)), strict=True))} for _ in range(10_000)]
    return len(grids) / median_seconds(lambda: forms.at(grids), times), prepared


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.speed", description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    times = given.times
    late = 0

    def line(what: str, found: float, promised: float, unit: str, *, more_is_better: bool = False) -> None:
        nonlocal late
        kept = found >= promised if more_is_better else found <= promised
        late += not kept
        sign = ">=" if more_is_better else "<="
        print(f"{'' if kept else 'LATE ':5}{found:12,.3f} {unit:5} {sign} {promised:9,.1f}  {what}", flush=True)

    for promised, words in COMMANDS:
        runs: list[float] = []
        used = cpu_seconds(lambda words=words, runs=runs: runs.append(median_seconds(cold(words), 1)), times)
        line("vplan " + " ".join(words), statistics.median(runs), promised, "s")
        print(f"     {used:12,.3f} s        (CPU)")
    if given.cold:
        return int(late > 0)
    for words in REPORTED:
        taken, used = report_seconds(words, times)
        line("vplan report of vplan " + " ".join(words), taken, 5.0, "s")
        print(f"     {used:12,.3f} s        (of all cores together)")
    rate, prepared = peaks_per_second(times)
    line("allocated peaks a second, over 10,000 shapes", rate, 10_000, "1/s", more_is_better=True)
    print(f"     {prepared:12,.3f} s        (prepared once per strategy)")
    for checkpointing in ("full", "none"):
        _, run = laid_out("wan2.1-t2v-14b", gradient_checkpointing=checkpointing)
        line(
            f"replay of a 14B tape, five stages, checkpointing {checkpointing}",
            median_seconds(lambda run=run: replay_stages(run), times),
            0.5,
            "s",
        )
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
