"""What each part of `suggest`'s space is worth: the same questions with that part left out.

    python -m tests.benchmarks.space_worth [--cards 24GB 80GB 4xh100]

Every bundled model is asked about at its default job, as LoRA on one card and in full on several. For each part of the
space it prints how many answers get worse without it (no lossless plan, or a step over 2 % slower), by how much, and
the seconds of CPU that the search saves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import job_for
from planner.errors import VplanError
from planner.search.policy import EstimatePolicy
from planner.search.question import Question
from planner.search.suggester import Suggester
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy
from planner.units import GIB

HOST_RAM = 64 * GIB
SLOWER = 0.02

PARTS: dict[str, Callable[[ResolvedStrategy], bool]] = {
    "partial checkpointing": lambda strategy: strategy.gradient_checkpointing == "partial",
    "nested checkpoints": lambda strategy: strategy.nested_checkpointing,
    "adapters that share inputs": lambda strategy: strategy.adapter_inputs == "shared",
    "checkpoints in host RAM": lambda strategy: strategy.gradient_checkpointing == "offload",
    "engines that split": lambda strategy: strategy.sharding not in ("none", "ddp"),
}


class Without(EstimatePolicy):
    """Every candidate but those of one part of the space; block swap can be left out too."""

    def __init__(self, question: Question, part: str) -> None:
        super().__init__(question)
        self.part = part

    def candidates(self, job: Job, recorded: Sequence[ResolvedStrategy]) -> Sequence[ResolvedStrategy]:
        left_out = PARTS.get(self.part)
        return [strategy for strategy in recorded if not left_out(strategy)] if left_out else recorded

    def may_swap(self, strategy: Strategy) -> bool:
        return self.part != "block swap" and super().may_swap(strategy)

    def may_checkpoint_partly(self, job: Job, strategy: Strategy) -> bool:
        return self.part != "partial checkpointing"


class Answer(NamedTuple):
    """What came out of one question."""

    plan: Estimate | None
    cpu_seconds: float

    def worse_by(self, whole: Estimate) -> float:
        """Seconds a step beyond those of the whole space's answer, as a share; infinite where a lossless plan is
        lost."""
        if self.plan is None or self.plan.verdict != whole.verdict or bool(self.plan.lossy) > bool(whole.lossy):
            return float("inf")
        return self.plan.step_seconds / whole.step_seconds - 1


def questions(cards: Sequence[str]) -> list[Question]:
    """The default job of every model: LoRA on one card, full training on several."""
    found = []
    for card in cards:
        gpus, gpu = card_lookup.parse_gpus(card)
        for name in lookup.model_names():
            model = lookup.model(name)
            job = job_for(model, {"method": "lora" if gpus == 1 else "full"})
            machine = Machine(gpu=gpu.name, gpus=gpus, host_ram=HOST_RAM * gpus)
            found.append(Question(job, Strategy(), machine, model, gpu, frozenset()))
    return found


def ask(question: Question, part: str) -> Answer:
    """The best plan of the space without a part."""
    before = time.process_time()
    suggester = Suggester(policy=lambda asked: Without(asked, part))
    try:
        search = suggester.search(question)
        found = suggester.best(search, explain=False)
    except VplanError:
        found = None
    return Answer(found.plan if found else None, time.process_time() - before)


def main() -> None:
    """Asks every question with the whole space, then without each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", default=["24GB", "80GB", "4xh100"])
    asked = questions(parser.parse_args().cards)
    whole = [ask(question, "") for question in asked]
    answered = [place for place, answer in enumerate(whole) if answer.plan is not None]
    seconds = sum(answer.cpu_seconds for answer in whole)
    print(f"{len(answered)} of {len(asked)} questions have a plan that fits; {seconds:.1f} s of CPU")
    for part in (*PARTS, "block swap"):
        without = [ask(question, part) for question in asked]
        worse = []
        for place in answered:
            plan = whole[place].plan
            assert plan is not None
            worse.append(without[place].worse_by(plan))
        lost = sum(one == float("inf") for one in worse)
        slower = [one for one in worse if SLOWER < one < float("inf")]
        middle = f", {statistics.median(slower):.0%} in the middle, {max(slower):.0%} at most" if slower else ""
        saved = seconds - sum(answer.cpu_seconds for answer in without)
        print(f"without {part}: {lost} lost, {len(slower)} slower{middle}; {saved:+.1f} s of CPU saved", flush=True)


if __name__ == "__main__":
    main()
