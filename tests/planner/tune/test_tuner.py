"""Which plan is measured next, and what the probes teach: pure, on the bundled tapes of a small model."""

from __future__ import annotations

from itertools import pairwise

import pytest

from planner.estimate.estimate import estimate
from planner.layout import margin
from planner.probe.simulated import SimulatedRunner
from planner.search.objectives.objective import batch
from planner.search.search import Search
from planner.spec.configuration import Configuration
from planner.spec.job import Strategy
from planner.spec.plan import Estimate, Measured, Plan
from planner.tune.error_model import HEADROOM, ErrorModel, FinishedProbe
from planner.tune.measured_policy import CHANCES
from planner.tune.tuner import WORTH_A_PROBE, Goal, Tuner
from tests.planner.search.searching import MODEL, SCREEN, SEED, asked, question

OOM = Measured(outcome="oom", phase="train")


def tuner(*words: object, goal: Goal | None = None, **job: object) -> Tuner:
    return Tuner(question(*words, **job), SCREEN, goal or Goal())  # type: ignore[arg-type]


def ran(found: Estimate, ratio: float = 1.0, slower: float = 1.0) -> Measured:
    device = int(found.peak.device_bytes * ratio)
    return Measured(outcome="ok", phase="train", device_bytes=device, step_seconds=found.step_seconds * slower)


def told(search: Tuner, found: Estimate, measured: Measured) -> FinishedProbe:
    seen = search.tell(found.job, found.strategy, measured)
    assert seen is not None
    return seen


def first_of(search: Tuner) -> Estimate:
    found = search.next()
    assert found is not None
    return found


def seen(ratio: float | None, budget_gib: float = 24.0) -> FinishedProbe:
    asks = question(f"{budget_gib}GiB")
    found = estimate_of(asks.job.model, f"{budget_gib}GiB")
    return FinishedProbe(found, OOM if ratio is None else ran(found, ratio))


def estimate_of(model: str, gpu: str) -> Estimate:
    asks = question(gpu)
    configuration = Configuration.of(asks.job, Strategy(), asks.machine)
    return estimate(configuration, SCREEN.facts(configuration))


def test_before_a_probe_the_margin_of_recordings_is_believed() -> None:
    belief, budget = ErrorModel([]), 24 * 10**9
    below, above = margin.RECORDED
    assert belief.chance(int(budget / (1 + above) / (1 + HEADROOM)), budget) == pytest.approx(0.92, abs=0.04)
    assert belief.chance(int(budget / (1 - below)), budget) < 0.1
    chances = [belief.chance(int(budget * share / 20), budget) for share in range(1, 30)]
    assert all(one >= other for one, other in pairwise(chances))
    for chance in CHANCES:
        limit = belief.limit(chance, budget)
        assert belief.chance(limit, budget) >= chance > belief.chance(int(limit * 1.001), budget)


def test_a_probe_narrows_what_is_believed_and_one_that_ran_out_lowers_it() -> None:
    budget = 24 * 10**9
    before, after, heavier = ErrorModel([]), ErrorModel([seen(1.0)]), ErrorModel([seen(1.05)])
    assert after.limit(0.9, budget) > before.limit(0.9, budget)
    assert heavier.limit(0.9, budget) < after.limit(0.9, budget)
    tight = estimate_of(MODEL.name, "24GiB").peak.device_bytes / 2**30
    short = ErrorModel([seen(None, tight)])  # all it was estimated to need was not enough
    assert short.limit(0.9, budget) < before.limit(0.9, budget)
    far = ErrorModel([seen(1.6)])  # outside all that was thought possible
    assert 0 < far.limit(0.5, budget) < heavier.limit(0.5, budget)


def test_the_speed_of_a_plan_is_as_far_off_as_that_of_the_plan_most_like_it() -> None:
    found = estimate_of(MODEL.name, "24GiB")
    swapping = found.replace(strategy=found.strategy.replace(gradient_checkpointing="full", swap_blocks=9))
    slow, fast = FinishedProbe(found, ran(found, slower=1.5)), FinishedProbe(swapping, ran(swapping, slower=1.1))
    belief = ErrorModel([slow, fast])
    assert belief.seconds(found.strategy, 10.0) == pytest.approx(15.0)
    assert belief.seconds(swapping.strategy.replace(swap_blocks=12), 10.0) == pytest.approx(11.0)
    assert belief.soonest(10.0) == pytest.approx(11.0)
    assert ErrorModel([]).seconds(found.strategy, 10.0) == 10.0


def test_the_first_plan_is_the_suggested_one() -> None:
    search = tuner("9GiB", batch_size=2)
    suggested = Search(search.question, SCREEN).best(search.question.job, False)
    assert suggested is not None
    assert first_of(search) == suggested.plan


def test_a_roomy_card_takes_one_probe() -> None:
    search = tuner("80GB")
    told(search, first_of(search), ran(first_of(search)))
    assert search.next() is None
    assert search.best is not None and search.best.proved


def test_nothing_is_measured_that_is_measured_or_running_and_all_that_is_could_be_better() -> None:
    search, runner = (
        Tuner(asked(), SCREEN, Goal()),
        SimulatedRunner(SEED, SCREEN.facts, SCREEN.run_cache.lay_out, crash=0.0),
    )
    keys, outcomes = [], []
    while found := search.next():
        best = search.best
        if best is not None:
            belief = search.policy.error_model
            assert belief is not None and best.measured.step_seconds is not None
            assert belief.seconds(found.strategy, found.step_seconds) * WORTH_A_PROBE <= best.measured.step_seconds
        key = found.job, found.strategy
        assert key not in keys
        assert (other := search.next([key])) is None or (other.job, other.strategy) != key
        keys.append(key)
        row = runner.run(Plan.of(found), steps=3, time_limit=1e6)
        outcomes.append(told(search, found, row.measured).measured.outcome)
        assert len(keys) < 12
    assert "oom" in outcomes and search.best is not None and not search.best.estimate.lossy
    assert search.best.measured.step_seconds == min(
        each.measured.step_seconds for each in search.finished.values() if each.proved and each.measured.step_seconds
    )


def test_out_of_memory_leads_to_less_and_less_until_nothing_is_left() -> None:
    plain = {"weights_dtype": "bf16", "optimizer": "adamw", "adapter_dtype": "fp32", "optimizer_step": "fused"}
    search = tuner("9GiB", {**plain, "gradient_checkpointing": "full"})
    needs = []
    while found := search.next():
        told(search, found, OOM)
        needs.append(found.peak.device_bytes)
        assert len(needs) < 30
    assert search.best is None
    assert needs == sorted(needs, reverse=True)
    least = search.tightest()
    assert least.peak.device_bytes <= needs[-1] and least.verdict == "no"


def test_at_the_edge_is_not_proved() -> None:
    search = tuner("24GiB")
    found = first_of(search)
    budget = found.budget_bytes
    edge = Measured(outcome="ok", phase="train", device_bytes=int(budget * (1 - HEADROOM / 2)), step_seconds=1.0)
    assert not told(search, found, edge).proved
    assert search.best is None
    assert 0 < search.finished[found.job, found.strategy].excess_bytes <= HEADROOM * budget


def test_a_batch_is_as_large_as_what_was_measured_lets_it_be() -> None:
    plain = {"weights_dtype": "bf16", "gradient_checkpointing": "full", "swap_blocks": 0}
    search = tuner("24GB", plain, goal=Goal(batch(MODEL)), frames=49, height=480, width=720)
    first = first_of(search)
    assert first.job.batch_size > 1
    roomy = told(search, first, ran(first, 0.85))
    assert roomy.proved
    more = search.next()
    assert more is not None and more.job.batch_size >= WORTH_A_PROBE * first.job.batch_size
    assert search.value(roomy) < search.value(
        FinishedProbe(more.replace(job=first.job.replace(batch_size=1)), ran(more))
    )


def test_what_the_runner_cannot_apply_is_not_looked_at() -> None:
    asks = question("9GiB", batch_size=2)
    search = Tuner(asks, SCREEN, Goal(), lambda job, way: way.gradient_checkpointing == "full" and not way.swap_blocks)
    assert first_of(search).strategy.gradient_checkpointing == "full"
    told(search, first_of(search), ran(first_of(search), 0.95))
    assert search.next() is None


def test_what_was_rehearsed_has_the_seconds_of_its_estimate() -> None:
    search = Tuner(question("24GiB"), SCREEN, Goal(), basis="rehearsed")
    first = first_of(search)
    probe = told(search, first, ran(first).replace(step_seconds=None))
    assert probe.proved and search.best is probe and search.value(probe) == first.step_seconds
    answer = search.answer(probe)
    assert (answer.basis, answer.step_seconds, answer.high_bytes) == (
        "rehearsed",
        first.step_seconds,
        first.peak.device_bytes,
    )
    assert {other.basis for other in search.runners_up(probe)} <= {"recorded"}
    following = search.next()
    assert following is None or following.step_seconds * WORTH_A_PROBE <= first.step_seconds
