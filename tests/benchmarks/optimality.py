"""Whether `suggest` finds the best plan of its own space: random questions, against every strategy and every count.

    python -m tests.benchmarks.optimality [--questions 300] [--seed 1]

For each question, every strategy of the space is asked with every number of swapped and of checkpointed blocks, without
lower bounds, pruning or bisection: any that is cheaper than the answer by more than 2 % (in seconds a step, and among
lossy ones in what they give up, as the search weighs it) is replayed unless its allocated bytes alone are too many. One
that reaches the answer's verdict is a miss. Prints a line a miss and the counts; exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

from planner.catalog import lookup
from planner.errors import NotEstimatedError, VplanError
from planner.estimate.estimate import assess
from planner.layout.inputs import load_facts
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
WITHIN = 0.02
MOST_FRAMES = 81


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
    count, card = lookup.parse_gpus(dice.choice(CARDS))
    gpus = dice.choice((1, 1, 1, 2, 4, 8, 16))
    ram = dice.choice((lookup.default_host_ram(card, gpus), 64 * GIB * gpus))
    machine = Machine(gpu=card.name, gpus=count * gpus, host_ram=ram)
    return Question(job, Strategy(), machine, model, card, allow_lossy=dice.random() < 0.3)


class Exhaustive:
    """Every plan of a question's space, and what each costs."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.screen = Screen(load_facts)
        self.search = Search(question, self.screen)
        self.policy = EstimatePolicy(question)
        self.replays = self.asked = 0

    def plans(self, job: Job, lossy: bool | None) -> Iterator[QuickEstimate]:
        """The quick estimate of every strategy with every count."""
        for strategy in self.search.candidates(job, lossy):
            for counted in self._counts(job, strategy):
                if next(contradictions(self.question.candidate(job, counted)), None):
                    continue
                self.asked += 1
                try:
                    yield self.screen.quick_estimate(self.question.candidate(job, counted))
                except NotEstimatedError:
                    continue

    def _counts(self, job: Job, strategy: ResolvedStrategy) -> Iterator[ResolvedStrategy]:
        for swapped in range(self.search.space.most_swapped(job, strategy) + 1):
            yield strategy.replace(swap_blocks=swapped)
        if strategy.gradient_checkpointing == "full":
            for count in range(1, self.question.model.blocks):
                yield strategy.replace(gradient_checkpointing="partial", checkpointed_blocks=count)

    def cost(self, job: Job, strategy: ResolvedStrategy, seconds: float, lossy: bool | None) -> float:
        """Seconds a step; among lossy plans alone times what giving something up must be worth."""
        return seconds * (WORTH_SPEED ** loss(job, strategy) if lossy else 1.0)

    def reaches(self, quick: QuickEstimate, job: Job, verdict: str) -> bool:
        """Whether a plan comes to a verdict: by its replay, where its allocated bytes do not rule it out."""
        device, strategy = quick.device_bytes, quick.strategy
        if self.policy.exceeds_gpu(device, strategy, verdict) or self.policy.exceeds_ram(quick.host_ram_bytes):
            return False
        self.replays += 1
        configuration = self.question.candidate(job, strategy)
        try:
            facts = self.screen.facts(configuration)
            estimate = assess(configuration, facts, "vplan", self.screen.run_cache.lay_out).estimate
        except NotEstimatedError:
            return False
        return self.policy.reaches(estimate, verdict)

    def better(self, answer: Estimate | None) -> Iterator[tuple[QuickEstimate, str]]:
        """Plans that the search should have preferred to its answer, with their verdict."""
        job, any_kind = self.question.job, self.question.allow_lossy
        for verdict in ("fits", "tight"):
            for lossy in (None,) if any_kind else (False, True):
                here = answer is not None and answer.verdict == verdict and (any_kind or bool(answer.lossy) == lossy)
                limit = self.cost(job, answer.configuration.strategy, answer.step_seconds, lossy) if here else None
                for quick in self.plans(job, lossy):
                    cost = self.cost(job, quick.strategy, quick.step_seconds, lossy)
                    if (limit is None or cost < limit * (1 - WITHIN)) and self.reaches(quick, job, verdict):
                        yield quick, verdict
                if here:
                    return


def main(questions: int, seed: int) -> int:
    """Asks, compares and prints; the exit code."""
    dice, found = random.Random(seed), Counter[str]()
    while found["questions"] < questions:
        try:
            question = draw(dice)
            start = time.perf_counter()
            suggestion = Search(question, Screen(load_facts)).best(question.job, explain=False)
        except VplanError:
            found["questions that contradict themselves or have no recording"] += 1
            continue
        found["questions"] += 1
        seconds = time.perf_counter() - start
        answer = suggestion.plan if suggestion else None
        found[f"answers: {answer.verdict if answer else 'nothing fits'}"] += 1
        exhaustive = Exhaustive(question)
        misses = list(exhaustive.better(answer))
        found["plans"] += exhaustive.asked
        found["replays"] += exhaustive.replays
        job = question.job
        told = f"{job.model} {job.method} {job.frames}x{job.height}x{job.width} batch {job.batch_size} on "
        told += f"{question.machine.gpus} x {question.gpu.name}, {question.machine.host_ram / GIB:.0f} GiB RAM"
        line = f"[{found['questions']}] {told}: {len(misses)} better of {exhaustive.asked}, answered in {seconds:.2f} s"
        print(line, file=sys.stderr, flush=True)
        if misses:
            found["misses"] += 1
            best, verdict = min(misses, key=lambda miss: miss[0].step_seconds)
            print(f"MISS {told}, lossy {question.allow_lossy}:", flush=True)
            if answer:
                print(f"  answer {answer.verdict} {answer.step_seconds:.3f} s: {_words(answer.strategy)}")
            print(f"  better {verdict} {best.step_seconds:.3f} s: {_words(best.strategy)}", flush=True)
    for name, count in found.items():
        print(f"{count} {name}")
    return 1 if found["misses"] else 0


def _words(strategy: Strategy) -> str:
    usual = Strategy()
    return ", ".join(
        f"{name} {value}" for name, value in strategy if value is not None and value != getattr(usual, name)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    sys.exit(main(told.questions, told.seed))
