"""The machine that is not there: hidden from the estimate, the same for one seed, as short of memory as a real one."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import planner.probe.simulated
import planner.probe.simulated_truth
from planner.allocator.caching import LARGE_SEGMENT_BYTES
from planner.catalog import card_lookup
from planner.probe.simulated import SimulatedRunner
from planner.probe.simulated_truth import MEMORY, REACHED, SPEED, Hidden
from planner.spec.plan import Plan
from planner.units import GIB
from tests.planner.search.searching import SCREEN, question

GPU = card_lookup.gpu("24GB")


def plan(gpu: str = "24GB", host: int = 32 * GIB, batch: int = 1, **strategy: object) -> Plan:
    asks = question(gpu, batch_size=batch)
    machine = asks.machine.replace(host_ram=host)
    return Plan(job=asks.job, strategy=asks.strategy.replace(**strategy), machine=machine)


def runner(seed: int = 0, crash: float = 0.0) -> SimulatedRunner:
    return SimulatedRunner(seed, SCREEN.facts, SCREEN.run_cache.lay_out, crash)


@pytest.mark.parametrize("module", [planner.probe.simulated_truth, planner.probe.simulated])
def test_it_shares_nothing_with_the_estimate(module: ModuleType) -> None:
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {f"{node.module}.{name.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
             for name in node.names}  # fmt: skip
    assert not {f"planner.{name}" for name in ("estimate", "timing", "traffic", "margin", "host")} & (imported | names)


def test_machines_differ_within_what_is_said() -> None:
    machines = [Hidden.drawn(GPU, seed) for seed in range(200)]
    for category in machines[0].memory:
        terms = [machine.memory[category] for machine in machines]
        assert 1 - MEMORY <= min(terms) < 1 - MEMORY / 2 < 1 + MEMORY / 2 < max(terms) <= 1 + MEMORY
    for kind, rate in REACHED.items():
        rates = [machine.reached[kind] / rate for machine in machines]
        assert 1 - SPEED <= min(rates) < 1 - SPEED / 2 < 1 + SPEED / 2 < max(rates) <= 1 + SPEED
    assert Hidden.drawn(GPU, 7) == machines[7]


def test_a_seed_says_the_same_again_and_two_runs_differ_by_noise() -> None:
    one, other = runner(), runner()
    rows = [each.run(plan(), steps=3, time_limit=1e6) for each in (one, one, other, other)]
    assert rows[0] == rows[2] and rows[1] == rows[3]
    first, second = rows[0].measured, rows[1].measured
    assert first != second and first.allocated_bytes == second.allocated_bytes
    assert first.step_seconds == pytest.approx(second.step_seconds, rel=0.08)
    assert runner(1).run(plan(), steps=3, time_limit=1e6).measured.allocated_bytes != first.allocated_bytes


def test_memory_host_ram_and_time_run_out_and_some_probes_crash() -> None:
    seen = runner().run(plan("4GiB"), steps=3, time_limit=1e6)
    assert seen.measured.outcome == "oom" and seen.requested_bytes
    device = seen.measured.device_bytes or 0
    assert device <= 4 * GIB < device + seen.requested_bytes + LARGE_SEGMENT_BYTES
    roomy = runner().run(plan("80GB"), steps=3, time_limit=1e6).measured
    assert roomy.outcome == "ok" and (roomy.device_bytes or 0) > 4 * GIB
    swapping = {"gradient_checkpointing": "full", "swap_blocks": 20}
    assert runner().run(plan(host=2 * GIB, **swapping), steps=3, time_limit=1e6).measured.outcome == "host-oom"
    assert runner().run(plan(), steps=3, time_limit=1.0).measured.outcome == "timeout"
    often = runner(crash=0.5)
    outcomes = Counter(often.run(plan("4GiB"), steps=1, time_limit=1e6).measured.outcome for _ in range(12))
    assert set(outcomes) == {"crash", "oom"}


def test_swapping_costs_time_and_frees_memory_and_checkpointing_in_part_lies_between() -> None:
    def run(**strategy: object) -> tuple[float, int]:
        measured = runner().run(plan("80GB", batch=8, **strategy), steps=3, time_limit=1e6).measured
        assert measured.step_seconds and measured.device_bytes
        return measured.step_seconds, measured.device_bytes

    none, full = run(), run(gradient_checkpointing="full")
    part = run(gradient_checkpointing="partial", checkpointed_blocks=15)
    swapped = run(gradient_checkpointing="full", swap_blocks=20)
    assert none[0] < part[0] < full[0] < swapped[0] * 1.05
    assert none[1] > part[1] > full[1] > swapped[1]
