"""What tests of searches that measure share: a small question, and a worker of its study."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.catalog import card_lookup, lookup
from planner.evidence.ledger import Ledger
from planner.evidence.measurement import ProbeRow, Setup
from planner.layout.recordings import load_facts
from planner.probe.simulated import SimulatedRunner, environment
from planner.search.question import Question
from planner.search.screening import Screen
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Plan
from planner.tune.study import Study
from planner.tune.tuner import Goal, Tuner
from planner.tune.worker import Limits, Tuning
from planner.units import GIB

MODEL = lookup.model("cogvideox-2b")
SCREEN = Screen(load_facts)
QUESTION = {"job": "a test's"}
LIMITS = Limits(12, 600.0, 3, 1e6)


def question(gpu: str = "24GB", typed: dict[str, Any] | None = None, lossy: bool = False, **job: Any) -> Question:
    card = card_lookup.gpu(gpu)
    fixed = typed or {}
    record = lookup.job_for(MODEL, {"frames": 9, "height": 240, "width": 352, **job})
    machine = Machine(gpu=card.name, host_ram=32 * GIB)
    return Question(record, Strategy.read(fixed), machine, MODEL, card, frozenset(fixed), lossy)


@dataclass
class Written:
    """A runner that writes down which plans it is given, for a test that asks several processes."""

    runner: SimulatedRunner
    path: Path
    name: str = "simulate"

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = False) -> ProbeRow:
        row = self.runner.run(plan, steps=steps, time_limit=time_limit, encode=encode)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{row.id}\n")
        return row


SEED = 4
"""A machine on which the search below takes three probes, one of which runs out."""


@functools.cache
def asked() -> Question:
    return question("9GiB", batch_size=2)


def worker(folder: Path, storage: str | None = None, seed: int = SEED, asks: Question | None = None) -> Tuning:
    """A worker of a study that takes three probes, one of which runs out."""
    asks = asks or asked()
    runner = Written(SimulatedRunner(seed, SCREEN.facts, SCREEN.run_cache.lay_out, crash=0.0), folder / "probed.txt")
    study = Study(storage or str(folder / "study.journal"), "a-study", QUESTION)
    setup = Setup.of(environment(asks.gpu, seed, ""))
    return Tuning(Tuner(asks, SCREEN, Goal()), study, runner, Ledger(folder / "ledger.jsonl"), LIMITS, setup)


def searched(tuning: Tuning) -> str:
    return tuning.run(lambda tuning, now: None)
