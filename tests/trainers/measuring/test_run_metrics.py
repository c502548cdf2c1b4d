"""What a run writes about itself: losses that are read a step late, and the memory of what comes between steps."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.trainers import runs  # noqa: E402
from trainers.measuring.run_metrics import COUNTERS  # noqa: E402


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("metrics")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        yield runs.Place(root, "wan")


def memory(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "memory.jsonl").read_text().splitlines()]


def test_a_loss_is_read_when_the_next_step_has_been_launched(
    wan: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines that are there while each step runs: none is of the step before, whose loss nobody waits for; what is
    saved waits for all."""
    written: list[int] = []
    loss = torch.nn.functional.mse_loss

    def observed(*arguments: Any, **more: Any) -> Any:
        written.append(len(runs.lines(tmp_path)))
        return loss(*arguments, **more)

    monkeypatch.setattr(torch.nn.functional, "mse_loss", observed)
    assert runs.train(wan.request(tmp_path, steps=5, checkpoint_every=3))["outcome"] == "ok"
    assert written == [0, 0, 1, 3, 3]
    assert [line["step"] for line in runs.lines(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("every", [1, 100])
def test_a_loss_that_is_no_number_is_named_by_its_own_step(wan: runs.Place, tmp_path: Path, every: int) -> None:
    """Read at once, as before each checkpoint, and a step late; no checkpoint has the weights of that step."""
    request = wan.request(tmp_path, steps=40, checkpoint_every=every, learning_rate=1e5)
    assert runs.train(wan.request(tmp_path, steps=1, checkpoint_every=1))["outcome"] == "ok"
    newest = str(tmp_path / "checkpoints" / "step-00000001")
    told = runs.train(request.replace(resume=newest))
    lines = [line["step"] for line in runs.lines(tmp_path)]
    assert told["outcome"] == "nan" and lines == list(range(1, len(lines) + 1))
    assert str(len(lines) + 1) in told["message"] or "trained weights are not finite" in told["message"]
    if every == 100:
        assert told["message"] == f"the loss of step {len(lines) + 1} is not a number"
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_phases_between_steps_have_lines_of_their_own(wan: runs.Place, tmp_path: Path) -> None:
    assert runs.train(wan.request(tmp_path, steps=4, checkpoint_every=2))["outcome"] == "ok"
    assert [(line["phase"], line["step"]) for line in memory(tmp_path)] == [
        ("load", 0), ("save", 2), ("save", 4), ("save", 4),
    ]  # fmt: skip
    times = [line["unix_seconds"] for line in (*memory(tmp_path), *runs.lines(tmp_path))]
    for line in (*memory(tmp_path), *runs.lines(tmp_path)):
        assert line.keys() >= {*COUNTERS, "phase", "unix_seconds", "seconds"}
        assert line["host_bytes"] > 2**26 and line["device_bytes"] is None  # host RAM, where there is no GPU
        assert line["seconds"] >= 0 and "failed" not in line
    assert max(times) - min(times) < 600
    assert [line["phase"] for line in runs.lines(tmp_path)] == ["first_step", "train", "train", "train"]


def test_steps_that_are_done_again_stay_in_the_memory_log(wan: runs.Place, tmp_path: Path) -> None:
    """Of a process that was killed as well: what had been written, and that it loaded once more."""
    request = wan.request(tmp_path, steps=5, checkpoint_every=4)
    process = multiprocessing.get_context("fork").Process(target=runs.train, args=(request,))
    process.start()
    process.join()
    lines = runs.lines(tmp_path)
    (tmp_path / "memory.jsonl").open("a").write('{"phase": "sa')  # killed in the middle of a line
    resume = str(tmp_path / "checkpoints" / "step-00000004")
    assert runs.train(request.replace(steps=6, resume=resume))["outcome"] == "ok"
    whole = memory(tmp_path)
    assert [line for line in whole if line.get("repeated")] == [{**lines[4], "repeated": True}]
    assert [(line["phase"], line["step"]) for line in whole if line["phase"] == "load"] == [("load", 0), ("load", 4)]
    assert [line["step"] for line in runs.lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_runs_out_of_memory_leaves_a_line(
    wan: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(torch.nn.functional, "mse_loss", full)
    assert runs.train(wan.request(tmp_path))["outcome"] == "host-oom"
    last = memory(tmp_path)[-1]
    assert (last["phase"], last["step"], last["failed"]) == ("train", 1, True)
