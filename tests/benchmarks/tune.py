"""A search that measures against machines nobody told it of: how many probes, how fast a plan, and whether it holds.

    python -m tests.benchmarks.tune [JOBS] [FILE.jsonl]

Draws jobs (model, method, shape, card) and hidden machines, searches each, and compares in the same run with Optuna's
TPE without our prior, with halving the batch until it fits, and with going from the smallest plan up. The best there is
is found with the machine's own numbers. A finished job is a line of FILE, and the same command goes on behind the last
one. Ten seconds a job and core; all cores work.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.allocator.caching import BLOCK_ROUND_BYTES
from planner.catalog import card_lookup, lookup
from planner.errors import VplanError
from planner.evidence.jsonl import append_row, rows_by_id
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.probe.simulated import SimulatedRunner
from planner.probe.simulated_truth import Hidden, true_seconds
from planner.search.question import Question
from planner.search.screening import Screen
from planner.search.search import Search
from planner.search.space import baseline
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT, Job, Machine, Strategy
from planner.spec.plan import Measured, Plan
from planner.tune.error_model import HEADROOM
from planner.tune.measured_policy import MeasuredPolicy
from planner.tune.tuner import Goal, Tuner
from planner.units import GIB

MOST_PROBES = 12
TPE_PROBES = 12
AGAIN = 5
"""How often a plan that was proved is run once more."""
MODELS = (
    "cogvideox-2b", "cogvideox-5b", "ltx-video-2b", "mochi-1", "sd3.5-medium", "sdxl", "wan2.1-t2v-1.3b",
    "wan2.1-i2v-14b-480p", "wan2.1-t2v-14b", "wan2.2-ti2v-5b", "flux.1-dev", "z-image",
)  # fmt: skip
"""Of each kind and size one or two; what takes longest to lay out is left out."""
CARDS = ("16GB", "24GB", "32GB", "48GB", "80GB")
LIMITS = {"steps": 3, "time_limit": 1e9}


def most_held(run: Run, sizes: NDArray[np.float64]) -> int:
    """The most bytes that tensors of these sizes hold at once."""
    rounded = -(-sizes.astype(np.int64) // BLOCK_ROUND_BYTES) * BLOCK_ROUND_BYTES
    rises: dict[int, tuple[int, int]] = {}  # a step's stages come more than once
    held = most = 0
    for _, stage in run.stages:
        if id(stage) not in rises:
            events = np.array([0, ~0, *stage.ops])  # something, where a stage has none
            on_the_way = np.where(events >= 0, rounded[events], -rounded[~events]).cumsum()
            rises[id(stage)] = int(on_the_way[-1]), int(on_the_way[1:].max())
        rise, peak = rises[id(stage)]
        held, most = held + rise, max(most, held + peak)
    return most


@dataclass
class Case:
    """One job on one hidden machine."""

    question: Question
    screen: Screen
    seed: int

    def __post_init__(self) -> None:
        self.hidden = Hidden.drawn(self.question.gpu, self.seed)
        self.policy = MeasuredPolicy(self.question, self.screen, lambda job, way: True)
        self.space = Search(self.question, self.screen, self.policy)
        self.runner = SimulatedRunner(self.seed, self.screen.facts, self.screen.run_cache.lay_out)
        self.still = replace(self.runner, crash=0.0, asked={})
        self.known: dict[tuple[Job, Strategy], float] = {}

    def plan(self, strategy: Strategy, job: Job | None = None) -> Plan:
        return Plan(job=job or self.question.job, strategy=strategy, machine=self.question.machine)

    def seconds(self, strategy: Strategy, job: Job | None = None) -> float:
        """Without noise; infinite where there is no recording."""
        key = job or self.question.job, strategy
        if key not in self.known:
            try:
                self.known[key] = true_seconds(self.still.runs(self.plan(strategy, job)), self.hidden)
            except VplanError:
                self.known[key] = math.inf
        return self.known[key]

    def fits(self, strategy: Strategy) -> bool:
        """Whether it truly runs, with the room a proof asks for."""
        return self.may_fit(strategy) and self.proved(self.still.run(self.plan(strategy), **LIMITS).measured)

    def may_fit(self, strategy: Strategy) -> bool:
        """Whether its tensors alone have room: known without a replay."""
        try:
            run = self.still.runs(self.plan(strategy))[0]
        except VplanError:
            return False
        factors = np.array([self.hidden.memory[kind] for kind in run.program.category])
        return most_held(run, run.sizes * factors) + self.hidden.context_bytes <= self.question.budget_bytes

    def proved(self, seen: Measured) -> bool:
        enough = (seen.device_bytes or 0) * (1 + HEADROOM) <= self.question.budget_bytes
        return seen.outcome == "ok" and not seen.retries and enough

    def probe(self, strategy: Strategy, job: Job | None = None) -> Measured:
        return self.runner.run(self.plan(strategy, job), **LIMITS).measured

    # ---- the best there is

    @functools.cached_property
    def best(self) -> tuple[float, Strategy] | None:
        """The fastest plan that truly fits, with as few swapped blocks of each way as can be: lossless if any does, and
        split over GPUs by an engine only if nothing else does, which is what a search is asked for."""
        for lossy, split in itertools.product((False, True), (False, True)):
            chosen = [way for way in self.ways(lossy) if (way.sharding in SPLIT) == split]
            found: tuple[float, Strategy] | None = None
            for seconds, _, way in sorted((self.seconds(way), index, way) for index, way in enumerate(chosen)):
                if found and seconds >= found[0]:
                    break
                least = self._least_swap(way)
                if least is not None and (found is None or self.seconds(least) < found[0]):
                    found = self.seconds(least), least
            if found:
                return found
        return None

    @property
    def asked_for(self) -> list[Strategy]:
        """The strategies of the kind that the best is of: nobody is compared with plans he may not choose."""
        if self.best is None:
            return self.ways(None)
        best = self.best[1]
        lossy, split = bool(best.lossy_fields(self.question.job)), best.sharding in SPLIT
        return [way for way in self.ways(lossy) if (way.sharding in SPLIT) == split]

    def ways(self, lossy: bool | None) -> list[Strategy]:
        """Every strategy that the search may choose, without block swap."""
        plain = self.space.candidates(self.question.job, lossy)
        parts = [part for way in plain for part in self.policy._partly_checkpointed(self.question.job, way)]
        return plain + parts

    def _least_swap(self, way: Strategy) -> Strategy | None:
        if self.fits(way):
            return way
        last = self.space.pruning.most_swapped(self.question.job, way)
        if way.gradient_checkpointing == "partial" or not last:
            return None
        low, high = 0, last
        if not self.fits(way.replace(swap_blocks=high)):  # host RAM may rule the most out, and not fewer
            parts = [last * part // 8 for part in range(1, 8)]
            high = next((count for count in parts if self.fits(way.replace(swap_blocks=count))), 0)
            low = max((count for count in parts if count < high), default=0)
            if not high:
                return None
        for fits in (self.may_fit, self.fits):  # what cannot fit is known for less
            bottom, top = low, high
            while top - bottom > 1:
                near = fits == self.fits and bottom == low  # it mostly does what its tensors do
                middle = bottom + 1 if near else (bottom + top) // 2
                bottom, top = (bottom, middle) if fits(way.replace(swap_blocks=middle)) else (middle, top)
            if fits == self.may_fit:
                low = bottom
        return way.replace(swap_blocks=top)


# ---- the ways to search


def ours(case: Case) -> dict[str, Any]:
    tuner = Tuner(case.question, case.screen, Goal())
    probes = 0
    first = None
    while probes < MOST_PROBES and (found := tuner.next()):
        probes += 1
        tuner.tell(found.job, found.strategy, case.probe(found.strategy))
        if first is None and tuner.best:
            first = probes
    best = tuner.best
    if best is None:
        return {"probes": probes, "first": None, "seconds": None}
    again = [case.still.run(case.plan(best.strategy), **LIMITS).measured.outcome for _ in range(AGAIN)]
    wrong = sum(outcome != "ok" for outcome in again)
    return {"probes": probes, "first": first, "seconds": case.seconds(best.strategy), "ran out again": wrong}


def tpe(case: Case) -> dict[str, Any]:
    """Optuna alone: it knows the parameters and what contradicts itself, not what is estimated."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=case.seed, constraints_func=None))
    job, plain = case.question.job, case.asked_for
    start = baseline(job, case.question.strategy, case.question.machine, case.question.fixed)
    fields = sorted(
        {name for way in plain for name in way.model_fields_set if getattr(way, name) != getattr(start, name)}
    )
    axes = {name: sorted({str(getattr(way, name)) for way in plain}) for name in fields}
    values = {name: {str(getattr(way, name)): getattr(way, name) for way in plain} for name in fields}
    probes, first, best, seen = 0, None, math.inf, {}
    for _ in range(10 * TPE_PROBES):
        if probes == TPE_PROBES:
            break
        trial = study.ask()
        chosen = {name: values[name][trial.suggest_categorical(name, axes[name])] for name in fields}
        swap = trial.suggest_int("swap_blocks", 0, case.question.model.blocks - 1)
        way = start.replace(**chosen, swap_blocks=swap)
        configuration = Configuration.of(job, way, case.question.machine)
        try:
            refuse_contradictions(configuration)
            case.screen.facts(configuration)
        except VplanError:  # costs no probe
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        if way not in seen:
            probes += 1
            try:
                seen[way] = case.probe(way)
            except VplanError:
                seen[way] = Measured(outcome="crash")
        measured = seen[way]
        short = (measured.device_bytes or 2 * case.question.budget_bytes) / case.question.budget_bytes - 1
        trial.set_constraint("memory", -1.0 if case.proved(measured) else max(short, 0.001))
        study.tell(trial, measured.step_seconds or 1e6)
        if case.proved(measured) and measured.step_seconds:
            first = first or probes
            best = min(best, case.seconds(way))
    return {"probes": probes, "first": first, "seconds": best if first else None}


def halving(case: Case) -> dict[str, Any]:
    """The plain strategy, with half the batch until it runs; seconds are those of the whole batch."""
    job = case.question.job
    way = baseline(job, case.question.strategy, case.question.machine, case.question.fixed)
    probes, batch = 0, job.batch_size
    while batch >= 1:
        probes += 1
        smaller = job.replace(batch_size=batch)
        try:
            measured = case.probe(way, smaller)
        except VplanError:
            break
        if case.proved(measured):
            turns = math.ceil(job.batch_size / batch)
            return {"probes": probes, "first": probes, "seconds": turns * case.seconds(way, smaller)}
        batch //= 2
    return {"probes": probes, "first": None, "seconds": None}


def smallest_first(case: Case) -> dict[str, Any]:
    """From the plan that needs least up, by steps of an eighth of what lies between, until one runs out."""
    job = case.question.job
    looks = sorted(
        (case.space.quick_estimate(job, each) for way in case.asked_for for each in _rungs(case, way)),
        key=lambda look: look.device_bytes,
    )
    least, most = looks[0].device_bytes, looks[-1].device_bytes
    probes, first, best, above = 0, None, math.inf, 0.0
    for look in looks:
        if look.device_bytes < above:
            continue
        above = look.device_bytes + (most - least) / 8
        probes += 1
        measured = case.probe(look.strategy)
        if case.proved(measured):
            first = first or probes
            best = min(best, case.seconds(look.strategy))
        elif measured.outcome == "oom":
            break
    return {"probes": probes, "first": first, "seconds": best if first else None}


def _rungs(case: Case, way: Strategy) -> Iterator[Strategy]:
    most = case.space.most_in_ram(case.question.job, way)
    yield way
    if most.swap_blocks > way.swap_blocks:
        yield most


WAYS = {"ours": ours, "TPE": tpe, "halving": halving, "smallest first": smallest_first}


# ---- the jobs


def drawn(number: int) -> Case:
    """The job and machine of a number, of those for which the estimate has a plan."""
    chance = random.Random(number)
    while True:
        model = lookup.model(chance.choice(MODELS))
        card = card_lookup.gpu(chance.choice(CARDS))
        method = chance.choice(("lora", "lora", "lora", "full"))
        frames = 1
        if model.kind == "video":
            step = model.shape.frame_step
            frames = 1 + step * chance.randint(1, max(1, (model.shape.default_frames - 1) // step))
        height, width = chance.choice(model.shape.resolutions)
        shape = {"frames": frames, "height": height, "width": width, "batch_size": chance.choice((1, 1, 1, 2, 4, 8))}
        gpus = chance.choice((1, 1, 1, 1, 2, 4))
        ram = chance.choice((64, 128, 256)) * gpus * GIB
        seed = chance.randrange(10**6)
        machine = Machine(gpu=card.name, gpus=gpus, host_ram=ram)
        screen = Screen(lambda configuration, model=model, card=card: load_facts(configuration, model, card))
        try:
            job = lookup.job_for(model, {"method": method, "lora_rank": chance.choice((8, 16, 64)), **shape})
            question = Question(job, Strategy.read({}), machine, model, card)
            case = Case(question, screen, seed)
            if case.space.best(job, False):
                case.space.screen = screen
                return case
        except VplanError:
            continue


def measured(number: int) -> dict[str, Any]:
    began = time.perf_counter()
    case = drawn(number)
    job = case.question.job
    row: dict[str, Any] = {"id": str(number), "model": job.model, "method": job.method, "gpu": case.question.gpu.name}
    for name, way in WAYS.items():
        started = time.perf_counter()
        row[name] = way(case) | {"took": round(time.perf_counter() - started, 2)}
    row["best"] = case.best[0] if case.best else None
    row["took"] = round(time.perf_counter() - began, 1)
    return row


# ---- what it says


def ratios(rows: list[dict[str, Any]], way: str) -> list[float]:
    """Seconds over the best there are, of what was solved; rows whose best is another kind (lossy) are over it too."""
    return sorted(row[way]["seconds"] / row["best"] for row in rows if row[way]["seconds"] and row["best"])


def quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else math.nan


def report(rows: list[dict[str, Any]]) -> None:
    solvable = [row for row in rows if row["best"]]
    print(f"{len(rows)} jobs, {len(solvable)} with a plan that fits")
    head = f"{'':16}{'solved':>8}{'probes p50':>12}{'p95':>5}{'first p50':>11}{'p95':>5}"
    print(f"{head}{'over best p50':>15}{'p95':>8}{'s':>7}")
    for way in WAYS:
        done = [row[way] for row in solvable if row[way]["seconds"]]
        probes = sorted(float(row[way]["probes"]) for row in solvable)
        first = sorted(float(each["first"]) for each in done)
        over = ratios(solvable, way)
        took = statistics.median(row[way]["took"] for row in solvable)
        print(
            f"{way:16}{len(done):8}{quantile(probes, 0.5):12.0f}{quantile(probes, 0.95):5.0f}"
            f"{quantile(first, 0.5):11.0f}{quantile(first, 0.95):5.0f}"
            f"{100 * (quantile(over, 0.5) - 1):14.1f}%{100 * (quantile(over, 0.95) - 1):7.1f}%{took:7.1f}"
        )
    wrong = sum(row["ours"].get("ran out again", 0) for row in rows)
    print(f"proved plans run {AGAIN} times more: {wrong} of {AGAIN * len(solvable)} ran out")


def main(jobs: int, path: Path | None) -> None:
    rows = rows_by_id(path) if path else {}
    missing = [number for number in range(jobs) if str(number) not in rows]
    with ProcessPoolExecutor() as pool:
        for row in pool.map(answer, missing):
            rows[row["id"]] = row
            if path:
                append_row(path, row)
            print(f"[{len(rows)}/{jobs}] {row['error'] if 'error' in row else _told(row)}", flush=True)
    counted = [rows[str(number)] for number in range(jobs)]
    report([row for row in counted if "error" not in row])
    if failed := sum("error" in row for row in counted):
        print(f"{failed} jobs ended in an error")


def answer(number: int) -> dict[str, Any]:
    """The row of a job; a strategy that cannot be priced is no fault of a search, but is not hidden either."""
    try:
        return measured(number)
    except VplanError as error:
        return {"id": str(number), "error": str(error)}


def _told(row: dict[str, Any]) -> str:
    over = row["ours"]["seconds"] / row["best"] - 1 if row["ours"]["seconds"] and row["best"] else math.nan
    what = f"{row['model']} {row['method']} {row['gpu']}"
    return f"{what}: {row['ours']['probes']} probes, {100 * over:+.1f} %, {row['took']} s"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
