"""The whole search, worker by worker, on a machine that is simulated: to the end, stopped and gone on with, shared."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.evidence.ledger import Ledger
from planner.evidence.measurement import ProbeRow
from planner.search.search import Search
from planner.spec.plan import Plan
from planner.tune import study
from planner.tune.worker import Tuning
from tests.planner.search.searching import SCREEN, asked, searched, worker

optuna = pytest.importorskip("optuna")
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="forks")
KILLS = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tuning]:
    """A search that nobody disturbed. What it laid out is known to the processes that the other tests fork."""
    folder = tmp_path_factory.mktemp("whole")
    tuning = worker(folder)
    assert searched(tuning) == "no other plan is expected to be 5 % better"
    return folder, tuning


def plans(rows: list[ProbeRow]) -> list[str]:
    return [row.id for row in rows]


def test_from_the_suggested_plan_to_a_proof(whole: tuple[Path, Tuning]) -> None:
    folder, tuning = whole
    suggested = Search(asked(), SCREEN).best(asked().job, False)
    assert suggested is not None and tuning.probes[0].strategy == suggested.plan.strategy
    assert [row.measured.outcome for row in tuning.probes] == ["oom", "ok", "ok"]
    best = tuning.tuner.best
    assert best is not None and best.measured == tuning.study.trials()[-1].row.measured  # type: ignore[union-attr]
    assert plans(Ledger(folder / "ledger.jsonl").rows()) == plans(tuning.probes)
    optunas = tuning.study._study.best_trial
    assert optunas.value == best.measured.step_seconds
    assert [trial.state.name for trial in tuning.study._study.trials] == ["COMPLETE"] * 3
    assert tuning.study._study.trials[0].constraints["missing GiB"] > 0


def test_gone_on_with_there_is_nothing_to_measure(whole: tuple[Path, Tuning]) -> None:
    folder, tuning = whole
    again = worker(folder)
    searched(again)
    assert plans(again.probes) == plans(tuning.probes)
    assert len((folder / "probed.txt").read_text().split()) == 3
    assert again.tuner.best == tuning.tuner.best


def test_a_new_study_knows_what_the_ledger_knows(whole: tuple[Path, Tuning], tmp_path: Path) -> None:
    folder, tuning = whole
    seeded = worker(tmp_path)
    seeded.ledger = Ledger(folder / "ledger.jsonl")
    searched(seeded)
    assert seeded.probes == [] and not (tmp_path / "probed.txt").exists()
    assert seeded.tuner.best == tuning.tuner.best
    elsewhere = worker(tmp_path, str(tmp_path / "other.journal"))
    elsewhere.ledger = Ledger(folder / "ledger.jsonl")
    assert elsewhere.setup is not None
    elsewhere.setup = elsewhere.setup._replace(driver="another")
    elsewhere.limits = replace(elsewhere.limits, probes=1)
    searched(elsewhere)
    assert len(elsewhere.probes) == 1  # measured on another driver they say nothing


def test_no_more_probes_or_minutes_than_allowed(whole: tuple[Path, Tuning], tmp_path: Path) -> None:
    tuning = worker(tmp_path)
    tuning.limits = replace(tuning.limits, probes=2)
    assert searched(tuning) == "2 probes were allowed" and len(tuning.probes) == 2
    tuning.limits = replace(tuning.limits, probes=9, seconds=-1.0)
    assert "minutes were allowed" in searched(tuning) and len(tuning.probes) == 2


def test_a_machine_on_which_nothing_runs_is_not_tried_for_ever(whole: tuple[Path, Tuning], tmp_path: Path) -> None:
    tuning = worker(tmp_path)
    tuning.runner.runner.crash = 1.0  # type: ignore[attr-defined]
    assert "failed for another reason" in searched(tuning)
    assert [row.measured.outcome for row in tuning.probes] == ["crash"] * 3 and tuning.tuner.best is None
    anew = worker(tmp_path, str(tmp_path / "anew.journal"))
    searched(anew)
    assert anew.tuner.best is not None  # what crashed was no fault of the plans


class Stopped:
    """A runner that is interrupted, or cannot run a plan."""

    name = "simulate"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = False) -> ProbeRow:
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), VplanError("a probe of this plan needs bitsandbytes")])
def test_what_was_interrupted_is_free_for_the_next(
    error: BaseException, whole: tuple[Path, Tuning], tmp_path: Path
) -> None:
    tuning = worker(tmp_path)
    tuning.runner = Stopped(error)
    with pytest.raises(type(error)):
        searched(tuning)
    assert tuning.study.trials() == [] and tuning.ledger.rows() == []
    again = worker(tmp_path)
    again.limits = replace(again.limits, probes=1)
    searched(again)
    assert [row.id for row in again.probes] == [whole[1].probes[0].id]


def work(folder: Path) -> None:
    searched(worker(folder))


@POSIX
def test_kills_at_random_moments_lose_nothing(whole: tuple[Path, Tuning], tmp_path: Path) -> None:
    chance = random.Random(5)
    rows: list[str] = []
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for _ in range(KILLS):
        process = multiprocessing.get_context("fork").Process(target=work, args=(tmp_path,))
        process.start()
        while process.is_alive() and len(ledger.rows()) == len(rows) and chance.random() < 0.95:
            time.sleep(0.05)  # most die around the moment at which a probe is told
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        now = plans(ledger.rows())
        assert now[: len(rows)] == rows
        rows = now
    last = worker(tmp_path)
    searched(last)
    assert plans(last.ledger.rows())[: len(rows)] == rows
    assert {told.row.id for told in last.study.trials() if told.row} >= set(rows)
    assert Counter(plans(last.ledger.rows())).most_common(1)[0][1] == 1  # none that finished was measured again
    # What was priced on the way is not remembered, so a search gone on with may end at a plan that is about as good.
    best, alone = last.tuner.best, whole[1].tuner.best
    assert best is not None and alone is not None
    assert best.measured.step_seconds <= 1.1 * (alone.measured.step_seconds or 0)  # type: ignore[operator]


def short_of_room(folder: Path, kib: int) -> None:
    """A worker whose files may grow so far: the disk's end, as it sees it."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (kib * 1024, kib * 1024))
    try:
        searched(worker(folder))
    except VplanError as error:
        (folder / "said.txt").write_text(str(error))
        os._exit(3)


@POSIX
def test_a_disk_that_fills_up_is_one_line_and_loses_nothing(whole: tuple[Path, Tuning], tmp_path: Path) -> None:
    ledger, told = Ledger(tmp_path / "ledger.jsonl"), ""
    for kib in (8, 16, 24):
        process = multiprocessing.get_context("fork").Process(target=short_of_room, args=(tmp_path, kib))
        process.start()
        process.join(60)
        assert process.exitcode == 3
        said = (tmp_path / "said.txt").read_text()
        assert "File too large; free some space there" in said and "\n" not in said
        text = ledger.path.read_text() if ledger.path.exists() else ""
        assert text.startswith(told) and (not text or text.endswith("\n"))
        told = text
    last = worker(tmp_path)
    searched(last)
    assert ledger.path.read_text().startswith(told) and plans(ledger.rows()) == plans(whole[1].probes)


def die_at(folder: Path, name: str) -> None:
    """A worker that dies as it takes its second plan: before its name is on it, or right after."""
    tuning = worker(folder)
    tuning.limits = replace(tuning.limits, probes=1)
    searched(tuning)
    tuning.limits = replace(tuning.limits, probes=2)
    setattr(study if name == "_me" else tuning, name, lambda _: os._exit(1))
    searched(tuning)


@POSIX
@pytest.mark.parametrize("moment", ["_me", "_time_limit"])
def test_a_worker_that_dies_taking_a_plan_changes_no_answer(
    moment: str, whole: tuple[Path, Tuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(tmp_path, moment))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    monkeypatch.setattr(study, "TAKING_SECONDS", 0.0)  # nobody else is about to take it
    again = worker(tmp_path)
    assert again.study.being_taken == (moment == "_me")
    searched(again)
    assert plans(again.probes) == plans(whole[1].probes)


@POSIX
def test_two_workers_share_a_search(whole: tuple[Path, Tuning], tmp_path: Path) -> None:
    workers = [multiprocessing.get_context("fork").Process(target=work, args=(tmp_path,)) for _ in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(240)
    assert [process.exitcode for process in workers] == [0, 0]
    probed = (tmp_path / "probed.txt").read_text().split()
    assert len(probed) == len(set(probed)) >= 2
    done = worker(tmp_path)
    searched(done)
    assert sorted(plans(done.probes)) == sorted(probed)
    best, alone = done.tuner.best, whole[1].tuner.best
    assert best is not None and alone is not None
    assert best.measured.step_seconds <= 1.1 * (alone.measured.step_seconds or 0)  # type: ignore[operator]
