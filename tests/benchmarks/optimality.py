"""Whether `suggest` finds the best plan of its own space: random questions, against every strategy and every count.

    python -m tests.benchmarks.optimality ROWS.jsonl [--questions 300] [--seed 1]

For each question every strategy of the space is looked at with every number of swapped and of checkpointed blocks:
without pruning, bisection, or conclusions from one strategy about another. What its passes alone make dearer than the
answer, or whose lower bound of memory is too large, is left at that; of these a random share is estimated all the same,
to see that the bounds are bounds. What is left and cheaper than the answer by more than 2 % (in seconds a step, and
among lossy plans in what they give up, as the search weighs it) is replayed unless its allocated bytes alone are too
many. One that reaches the answer's verdict is a miss.

Each question is drawn from the seed and its own number, and answered in a process of its own; its row is appended to
ROWS.jsonl, and what has a row there is not asked again. Prints a line a question, and the counts over all rows; exits
with 1 if there is a miss or a bound that is none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.catalog import card_lookup, lookup
from planner.errors import NotEstimatedError, VplanError
from planner.estimate.estimate import assess
from planner.layout.recordings import load_facts
from planner.search.cost import WORTH_SPEED, loss
from planner.search.policy import EstimatePolicy
from planner.search.question import Question
from planner.search.screening import QuickEstimate, Screen
from planner.search.search import Search
from planner.spec.combinations.contradictions import contradictions
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy
from planner.units import GIB

CARDS = ("8GB", "12GB", "16GB", "24GB", "32GB", "40GB", "48GB", "80GB", "h200", "b200")
MACHINES = ((1, 1), (1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (8, 2))
"""(GPUs, nodes)"""
WITHIN = 0.02
MOST_FRAMES = 81
CHECKED = 0.03
"""Share of the plans that a bound rules out which are estimated nonetheless."""


def draw(dice: random.Random) -> Question:
    """A question that nobody chose; a VplanError where it contradicts itself."""
    model = lookup.model(dice.choice(lookup.model_names()))
    shape = model.shape
    most = min(shape.max_frames, MOST_FRAMES)
    frames = dice.choice(range(shape.min_frames, most + 1, shape.frame_step)) if most > shape.min_frames else most
    height, width = dice.choice(shape.resolutions)
    said = {"frames": frames, "height": height, "width": width, "batch_size": dice.choice((1, 1, 1, 2, 4))}
    said["method"] = dice.choice(("lora", "lora", "full"))
    job = lookup.job_for(model, said)
    card = card_lookup.parse_gpus(dice.choice(CARDS))[1]
    gpus, nodes = dice.choice(MACHINES)
    ram = dice.choice((card_lookup.default_host_ram(card, gpus), 64 * GIB * gpus))
    machine = Machine(gpu=card.name, gpus=gpus, nodes=nodes, host_ram=ram)
    return Question(job, Strategy(), machine, model, card, allow_lossy=dice.random() < 0.3)


class Exhaustive:
    """Every plan of a question's space, and what each costs."""

    def __init__(self, question: Question, screen: Screen, dice: random.Random) -> None:
        self.question = question
        self.screen = screen
        self.dice = dice
        self.search = Search(question, screen)
        self.policy = EstimatePolicy(question)
        self.found = Counter[str](plans=0, estimated=0, replayed=0, checked=0)
        self.wrong: list[str] = []
        """bounds that were none"""

    def plans(self, job: Job, lossy: bool | None) -> Iterator[ResolvedStrategy]:
        """Every strategy with every count."""
        for strategy in self.search.candidates(job, lossy):
            for counted in self._counts(job, strategy):
                if next(contradictions(self.question.candidate(job, counted)), None) is None:
                    self.found["plans"] += 1
                    yield counted

    def _counts(self, job: Job, strategy: ResolvedStrategy) -> Iterator[ResolvedStrategy]:
        for swapped in range(self.search.pruning.most_swapped(job, strategy) + 1):
            yield strategy.replace(swap_blocks=swapped)
        if strategy.gradient_checkpointing == "full":
            for count in range(1, self.question.model.blocks):
                yield strategy.replace(gradient_checkpointing="partial", checkpointed_blocks=count)

    def cost(self, job: Job, strategy: ResolvedStrategy, seconds: float, lossy: bool | None) -> float:
        """Seconds a step; among lossy plans alone times what giving something up must be worth."""
        return seconds * (WORTH_SPEED ** loss(job, strategy) if lossy else 1.0)

    def reaches(self, quick: QuickEstimate, job: Job, verdict: str) -> Estimate | None:
        """A plan's estimate where its replay comes to a verdict."""
        self.found["replayed"] += 1
        configuration = self.question.candidate(job, quick.strategy)
        try:
            facts = self.screen.facts(configuration)
            estimate = assess(configuration, facts, "vplan", self.screen.run_cache.lay_out, flushes=False).estimate
        except NotEstimatedError:
            return None
        return estimate if self.policy.reaches(estimate, verdict) else None

    def better(self, answer: Estimate | None) -> tuple[Estimate, str, float] | None:
        """The cheapest plan that the search should have preferred to its answer, with its verdict and its cost as a
        share of the answer's (0 where there was no such answer)."""
        job, any_kind = self.question.job, self.question.allow_lossy
        for verdict in ("fits", "tight"):
            for lossy in (None,) if any_kind else (False, True):
                here = answer is not None and answer.verdict == verdict and (any_kind or bool(answer.lossy) == lossy)
                limit = float("inf")
                if here and answer is not None:
                    own = answer.configuration.strategy
                    limit = (1 - WITHIN) * self.cost(job, own, answer.step_seconds, lossy)
                if found := self._cheapest(job, lossy, verdict, limit):
                    return found[1], verdict, (found[0] / limit * (1 - WITHIN) if here else 0.0)
                if here:
                    return None
        return None

    def _cheapest(self, job: Job, lossy: bool | None, verdict: str, limit: float) -> tuple[float, Estimate] | None:
        """The cheapest plan below a cost that reaches a verdict, with its cost."""
        cheaper = []
        for strategy in self.plans(job, lossy):
            quick = self._quick(job, strategy, lossy, verdict, limit)
            if quick is None or self.policy.exceeds_ram(quick.host_ram_bytes):
                continue
            cost = self.cost(job, strategy, quick.step_seconds, lossy)
            if cost < limit and not self.policy.exceeds_gpu(quick.device_bytes, strategy, verdict):
                cheaper.append((cost, quick))
        best = None
        for cost, quick in sorted(cheaper, key=lambda one: one[1].device_bytes):
            if (best is None or cost < best[0]) and (estimate := self.reaches(quick, job, verdict)):
                best = cost, estimate
        return best

    def _quick(
        self, job: Job, strategy: ResolvedStrategy, lossy: bool | None, verdict: str, limit: float
    ) -> QuickEstimate | None:
        """The quick estimate of a plan that no bound rules out; None for the others, and without a recording."""
        configuration = self.question.candidate(job, strategy)
        try:
            seconds = self.screen.floor_seconds(configuration)
            ruled_out = self.cost(job, strategy, seconds, lossy) >= limit
            nbytes = 0
            if not ruled_out:
                nbytes = self.screen.floor_bytes(configuration)
                ruled_out = self.policy.exceeds_gpu(nbytes, strategy, verdict)
            check = self.dice.random() < CHECKED
            if ruled_out and not check:
                return None
            self.found["estimated"] += 1
            quick = self.screen.quick_estimate(configuration)
        except NotEstimatedError:
            return None
        if check:
            self.found["checked"] += 1
            least = self.screen.floor_seconds(configuration), self.screen.floor_bytes(configuration)
            ram = self.screen.floor_ram_bytes(configuration)
            exact = quick.step_seconds * (1 + 1e-9), quick.device_bytes
            if least[0] > exact[0] or least[1] > exact[1] or ram > quick.host_ram_bytes:
                self.wrong.append(f"{_words(strategy)}: {least}, {ram} above {exact}, {quick.host_ram_bytes}")
        return quick


def ask(number: int, seed: int) -> dict[str, Any]:
    """One question asked and compared: its row."""
    dice, skipped = random.Random(f"{seed}/{number}"), 0
    while True:
        screen = Screen(load_facts)
        try:
            question = draw(dice)
            start = time.perf_counter()
            suggestion = Search(question, screen).best(question.job, explain=False)
            break
        except VplanError:  # it contradicts itself, or there is no recording
            skipped += 1
    answered = time.perf_counter()
    answer = suggestion.plan if suggestion else None
    exhaustive = Exhaustive(question, screen, dice)
    miss = exhaustive.better(answer)
    job, machine = question.job, question.machine
    told = f"{job.model} {job.method} {job.frames}x{job.height}x{job.width} batch {job.batch_size} on "
    told += f"{machine.nodes} x {machine.gpus} x {question.gpu.name}, {(machine.host_ram or 0) / GIB:.0f} GiB RAM"
    row: dict[str, Any] = {"seed": seed, "number": number, "question": told, "allow_lossy": question.allow_lossy}
    row |= {"model": job.model, "skipped": skipped, "verdict": answer.verdict if answer else "no"}
    row |= {"answered_seconds": round(answered - start, 3), "seconds": round(time.perf_counter() - answered, 1)}
    row |= {**exhaustive.found, "wrong_bounds": exhaustive.wrong, "miss": None}
    if answer:
        row["answer"] = [answer.step_seconds, _words(answer.configuration.strategy)]
    if miss:
        better, verdict, share = miss
        row["miss"] = {"verdict": verdict, "share": round(share, 4), "seconds": better.step_seconds}
        row["miss"]["plan"] = _words(better.configuration.strategy)
    return row


def _words(strategy: Strategy) -> str:
    usual = Strategy()
    return ", ".join(
        f"{name} {value}" for name, value in strategy if value is not None and value != getattr(usual, name)
    )


def main(path: Path, questions: int, seed: int) -> int:
    """Asks what has no row yet, and prints; the exit code."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in rows if row["seed"] == seed and row["number"] < questions]
    known = {row["number"] for row in rows}
    fork = multiprocessing.get_context("fork")
    for number in range(questions):
        if number in known:
            continue
        with fork.Pool(1) as pool:  # what one question read is given back
            row = pool.apply(ask, (number, seed))
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        line = f"[{number}] {row['question']}: {row['verdict']}, {row['plans']} plans, {row['seconds']} s"
        print(line, "MISS" if row["miss"] else "", *row["wrong_bounds"], flush=True)
    misses = [row for row in rows if row["miss"]]
    for row in misses:
        print(
            f"MISS {row['question']}, lossy {row['allow_lossy']}: {row['verdict']} {row.get('answer')}, {row['miss']}"
        )
    wrong = sum(len(row["wrong_bounds"]) for row in rows)
    total = {name: sum(row[name] for row in rows) for name in ("skipped", "plans", "estimated", "replayed", "checked")}
    print(f"{len(rows)} questions, {len({row['model'] for row in rows})} models: {len(misses)} misses")
    print(f"answers: {dict(Counter(row['verdict'] for row in rows))}; {total}; {wrong} wrong bounds")
    return 1 if misses or wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    sys.exit(main(told.rows, told.questions, told.seed))
