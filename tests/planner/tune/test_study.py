"""A study: what is told stays told, each plan is one worker's, and what fails says so in one line."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.catalog.plan_id import row_id
from planner.errors import VplanError
from planner.evidence.measurement import ProbeRow
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Environment, Measured, Plan
from planner.tune.storage import without_password
from planner.tune.study import GRACE_SECONDS, WORKER, Result, Study, Taken
from tests.planner.search.searching import QUESTION

optuna = pytest.importorskip("optuna")

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="forks")
PLANS = 8


def plan(rank: int = 4) -> Plan:
    job = Job.read({"model": "wan2.1-t2v-1.3b", "frames": 5, "height": 64, "width": 64, "lora_rank": rank})
    return Plan(job=job, strategy=Strategy(gradient_checkpointing="full"), machine=Machine(gpu="24GB"))


def row(of: Plan, outcome: Any = "ok") -> ProbeRow:
    env = Environment(gpu="a", driver="b", torch="c", diffusers="d", attention_kernel="e", command="f", time="g")
    measured = Measured(outcome=outcome, device_bytes=2**30, step_seconds=1.5 if outcome == "ok" else None)
    return ProbeRow(id=row_id(of), job=of.job, strategy=of.strategy, machine=of.machine, measured=measured, env=env)


def limit(of: Plan) -> float:
    return 900.0


def taken(study: Study) -> Taken:
    found = study.take(limit)
    assert found is not None
    return found


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(str(tmp_path / "deep" / "study.journal"), "one", QUESTION)


def trials(study: Study) -> list[Any]:
    found: list[Any] = study._study.get_trials(deepcopy=False)
    return found


def test_what_is_told_is_there_for_the_next_who_opens_it(study: Study) -> None:
    for number, (outcome, excess) in enumerate([("oom", 0.7), ("ok", -2.0), ("crash", 0.0)]):
        study.propose(plan(number + 1))
        assert study.waiting
        mine = taken(study)
        assert mine.plan == plan(number + 1)
        result = Result(10.0 - number, {"missing GiB": excess, "failed": float(outcome == "crash")})
        study.tell(mine, row(mine.plan, outcome), result)
        study.tell(mine, row(mine.plan, outcome), result)  # again: by a worker that found it told
    again = Study(study.storage, "one", QUESTION)
    told = again.trials()
    assert [entry.plan for entry in told] == [plan(1), plan(2), plan(3)]
    assert [entry.row.measured.outcome for entry in told if entry.row] == ["oom", "ok", "crash"]
    # Out of memory is a completed trial that does not count as the best, whatever its value.
    assert [trial.state.name for trial in trials(again)] == ["COMPLETE"] * 3
    assert trials(again)[0].constraints == {"missing GiB": 0.7, "failed": 0.0}
    assert again._study.best_trial.number == 1
    assert trials(again)[1].params["gradient_checkpointing"] == "full" and trials(again)[1].params["frames"] == 5
    assert not again.waiting and again.take(limit) is None


def test_a_plan_that_two_proposed_is_measured_by_one(study: Study) -> None:
    other = Study(study.storage, "one", QUESTION)
    study.propose(plan())
    other.propose(plan())
    assert [entry is not None for entry in (study.take(limit), other.take(limit))] == [True, False]
    assert [entry.row for entry in other.trials()] == [None]
    mine = study.trials()
    assert len(mine) == 1


def test_what_is_given_up_is_free_again(study: Study) -> None:
    study.propose(plan())
    study.give_up(taken(study))
    assert study.trials() == []
    study.propose(plan())
    assert taken(study).plan == plan()


def test_a_plan_of_a_ledger_counts_as_told(study: Study) -> None:
    study.add(plan(), row(plan()), Result(1.5, {"missing GiB": -1.0}))
    told = study.trials()[0]
    assert told.from_ledger and told.row is not None and told.row.measured == row(plan()).measured
    study.propose(plan())
    assert study.take(limit) is None


def test_a_dead_workers_plan_is_found(study: Study) -> None:
    study.propose(plan())
    mine = taken(study)
    assert list(study.abandoned()) == []
    alive = mine.trial.user_attrs[WORKER]
    mine.trial.set_user_attr(WORKER, {**alive, "started": alive["started"] - 60})  # its number is another's by now
    assert [found.plan for found in study.abandoned()] == [plan()]
    mine.trial.set_user_attr(WORKER, {**alive, "host": "elsewhere"})
    assert list(study.abandoned()) == []  # it may run still
    mine.trial.set_user_attr(WORKER, {**alive, "host": "elsewhere", "limit": -2 * GRACE_SECONDS})
    (found,) = study.abandoned()
    study.tell(found, row(found.plan), Result(1.0, {}))
    assert [entry.row is not None for entry in study.trials()] == [True]


def test_another_question_is_refused_by_name(study: Study) -> None:
    with pytest.raises(VplanError, match="another question: other job") as refusal:
        Study(study.storage, "one", {"job": "mine"})
    assert "--study" in refusal.value.fix
    Study(study.storage, "two", {"job": "mine"})


def test_half_a_line_at_the_end_of_a_journal_is_taken_away(study: Study) -> None:
    study.propose(plan())
    path = Path(study.storage)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":4,"worker_id"')
    again = Study(study.storage, "one", QUESTION)
    assert path.read_bytes().startswith(whole) and b'worker_id"{' not in path.read_bytes()
    assert taken(again).plan == plan()


@pytest.mark.parametrize("held", [b"not a journal\nat all\n", b"SQLite format 3\0\n\xff\n half a page"])
def test_a_file_that_is_no_journal_is_refused_and_stays(held: bytes, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    path.write_bytes(held)
    with pytest.raises(VplanError, match="is no study's journal"):
        Study(str(path), "one", QUESTION)
    assert path.read_bytes() == held


def test_a_damaged_journal_is_refused(study: Study) -> None:
    path = Path(study.storage)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"}", b"", 1) + b"{}\n")
    with pytest.raises(VplanError, match="is damaged"):
        Study(str(path), "one", QUESTION)


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("postgresql+psycopg2://me:secret@127.0.0.1:1/db", "does not respond|needs psycopg2"),
        ("nodb://host/db", "does not respond"),
        ("sqlite:////no/such/folder/study.db", "does not respond"),
        ("/proc/nowhere/study.journal", "cannot use the storage"),
    ],
)
def test_a_storage_that_does_not_answer_is_one_line(storage: str, said: str) -> None:
    with pytest.raises(VplanError, match=said) as refusal:
        Study(storage, "one", QUESTION)
    assert "secret" not in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_line_to_share_has_no_password() -> None:
    line = "vplan tune a -o me@here --storage postgresql://me:secret@db:5432/vplan --seed 1"
    assert without_password(line) == line.replace("secret", "***")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_no_space_left_is_one_line(study: Study, tmp_path: Path) -> None:
    path = Path(study.storage)
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(VplanError, match="No space left"):
        study.propose(plan())


# ---- several processes


def race(storage: str, barrier: Any, out: Path) -> None:
    """Proposes the same plans as everybody else, and takes what waits."""
    barrier.wait()
    study = Study(storage, "one", QUESTION)
    for rank in range(1, PLANS + 1):
        if plan(rank) not in [entry.plan for entry in study.trials()]:
            study.propose(plan(rank))
        while study.waiting:
            if mine := study.take(limit):
                with out.open("a", encoding="utf-8") as file:
                    file.write(f"{mine.plan.job.lora_rank}\n")
                study.tell(mine, row(mine.plan), Result(1.0, {"missing GiB": -1.0}))


def raced(storage: str, out: Path) -> list[int]:
    """The plans that two workers measured, in order; neither of them finds a study that is there already."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    workers = [context.Process(target=race, args=(storage, barrier, out)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    return [int(line) for line in out.read_text().split()]


@POSIX
def test_two_workers_on_one_journal_never_measure_a_plan_twice(tmp_path: Path) -> None:
    storage = str(tmp_path / "study.journal")
    assert sorted(raced(storage, tmp_path / "out")) == list(range(1, PLANS + 1))
    assert sorted(entry.plan.job.lora_rank for entry in Study(storage, "one", QUESTION).trials()) == list(
        range(1, PLANS + 1)
    )


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[str]:
    """The URL of a PostgreSQL server of this test's own, on loopback."""
    psycopg2 = pytest.importorskip("psycopg2", reason="PostgreSQL's driver psycopg2 is not installed")
    found = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()]
    home = str(found[-1]) if found else os.path.dirname(shutil.which("initdb") or "")
    if not home:
        pytest.skip("PostgreSQL is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "database"
    folder.mkdir()
    user: dict[str, Any] = {}
    if os.geteuid() == 0:  # the server refuses to be root's
        pwd = pytest.importorskip("pwd")
        name = next((entry.pw_name for entry in pwd.getpwall() if entry.pw_name in ("postgres", "nobody")), None)
        if name is None:
            pytest.skip("PostgreSQL does not run as root")
        shutil.chown(folder, name)
        for parent in folder.parents[: len(folder.relative_to(tmp_path.parents[2]).parts)]:
            parent.chmod(0o755)
        user = {"user": name}
    run: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **user}
    subprocess.run(
        [f"{home}/initdb", "-D", folder / "data", "-U", "tuner", "-A", "trust", "--no-sync"], check=True, **run
    )
    settings = ["-h", "127.0.0.1", "-p", str(port), "-k", folder, "-c", "fsync=off"]
    log = (folder / "log").open("wb")
    server = subprocess.Popen([f"{home}/postgres", "-D", folder / "data", *settings], **{**run, "stderr": log})
    try:
        for _ in range(300):
            try:
                psycopg2.connect(host="127.0.0.1", port=port, user="tuner", dbname="postgres").close()
                break
            except psycopg2.OperationalError:  # it starts
                time.sleep(0.1)
        yield f"postgresql+psycopg2://tuner@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
        log.close()


@POSIX
def test_two_workers_on_one_postgresql_never_measure_a_plan_twice(postgresql: str, tmp_path: Path) -> None:
    assert sorted(raced(postgresql, tmp_path / "out")) == list(range(1, PLANS + 1))
    study = Study(postgresql, "one", QUESTION)
    assert len(study.trials()) == PLANS and study._study.best_trial.value == 1.0
