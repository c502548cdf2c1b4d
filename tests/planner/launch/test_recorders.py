"""Workers that record: orders go to whoever is free, what a worker refuses is raised, and none outlives its parent."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import profiles
import vplan
from planner.commands import cli
from planner.errors import VplanError
from planner.launch.recorders import Recorders, TapeTask
from planner.tape.packed_json import pack
from planner.tape.packs import read_recording

pytestmark = pytest.mark.usefixtures("preloaded_python")

MODEL = "wan2.1-t2v-1.3b"
PATIENCE = 120

WORKER = """
for line in sys.stdin:
    order = json.loads(line)
    if order["variant"] == "dies":
        sys.exit("worn out")
    time.sleep(float(order["variant"]))
    answer = {"outcome": "ok", "pid": os.getpid(), "set": list({"full", "sliding", "global", "local"})}
    if order["model"] == "bad":
        answer = {"outcome": "refused", "message": "no", "fix": "do", "exit_code": 3}
    write_json(folder / f"result-{order['number']:05d}.json", answer)
"""


def task(variant: str, model: str = "good") -> TapeTask:
    return TapeTask(model, variant, "", Path("tape"), check=False)


@pytest.fixture
def own_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker: Callable[[str], None]) -> Path:
    """A worker that imports no torch; the folder of temporary files."""
    worker(WORKER)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


def gone(pids: set[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
    return value


def test_each_order_goes_to_a_worker_that_is_free(own_worker: Path) -> None:
    with Recorders(2) as pool:
        answers = list(pool.answers([task("1.5"), *[task("0")] * 4]))
        assert [position for position, _ in answers] == [1, 2, 3, 4, 0]
        pids = {answer["pid"] for _, answer in answers}
        assert len(pids) == 2
        assert len({answer["pid"] for _, answer in answers[:-1]}) == 1
        assert next(iter(pool.answers([task("0")])))[1]["pid"] in pids  # they wait for further orders
    assert gone(pids)
    assert list(own_worker.iterdir()) == []


def test_sets_of_names_have_one_order_in_all_workers(own_worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what transformers makes of Gemma's kinds of layers: 24 orders, one of which each process would draw."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with Recorders(4) as pool:
        orders = {tuple(answer["set"]) for _, answer in pool.answers([task("0.5")] * 4)}
        assert len({worker.process.pid for worker in pool._workers}) == 4
    assert len(orders) == 1


def test_without_orders_nothing_is_started(own_worker: Path) -> None:
    with Recorders(4) as pool:
        assert list(pool.answers([])) == []
        assert pool._workers == []


def test_what_a_worker_refuses_is_raised_and_ends_the_others(own_worker: Path) -> None:
    with pytest.raises(VplanError, match="no") as caught, Recorders(2) as pool:
        list(pool.answers([task("60"), task("0", "bad")]))
    assert (caught.value.fix, caught.value.exit_code) == ("do", 3)
    assert gone({worker.process.pid for worker in pool._workers})
    assert list(own_worker.iterdir()) == []


def test_a_worker_that_dies_is_exit_4_with_its_last_words_and_its_log(own_worker: Path) -> None:
    with pytest.raises(VplanError, match="recording ended with exit code 1: worn out") as caught, Recorders(1) as pool:
        list(pool.answers([task("dies")]))
    assert caught.value.exit_code == 4
    assert Path(caught.value.fix.removeprefix("read ")).read_text() == "worn out\n"


def test_two_workers_record_what_is_shipped() -> None:
    names = [f"optimizer-{method}-fp32-adamw-fused" for method in ("lora", "full")]
    words = [word for name in names for word in ("--variant", name)]
    done = CliRunner().invoke(cli, ["record", MODEL, *words, "--check", "--jobs", "2", "--json"], prog_name="vplan")
    assert done.exit_code == 0, done.output
    shipped = [(name, len(pack(read_recording(profiles.TAPES / MODEL / f"{name}.json.gz")))) for name in names]
    assert [(tape["variant"], tape["bytes"]) for tape in json.loads(done.stdout)["tapes"]] == shipped


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_workers_end_with_their_parent(tmp_path: Path, number: signal.Signals, code: int) -> None:
    words = vplan.command("record", MODEL, "--variant", "step", "--jobs", "2", "-o", str(tmp_path / "tapes"))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    quiet = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    # SIGINT is ignored in what a shell starts with &, SIGHUP behind nohup.
    heard = None if number == signal.SIGKILL else functools.partial(signal.signal, number, signal.SIG_DFL)
    parent = subprocess.Popen(words, **quiet, env=environment, preexec_fn=heard)
    try:
        children = psutil.Process(parent.pid)
        pids = wait_for(lambda: len(found := {child.pid for child in children.children()}) == 2 and found)
        time.sleep(1.0)  # so that they listen
        parent.send_signal(number)
        assert parent.wait(PATIENCE) == code
        wait_for(lambda: gone(pids))
    finally:
        parent.kill()
    if number != signal.SIGKILL:
        assert not list(tmp_path.glob("vplan-record-*"))
