"""planner/launch/checkpoints: which checkpoint a run goes on from, whatever became of its notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.launch import checkpoints


def write(output: Path, step: int, text: str = "one", run: str | None = None) -> Path:
    folder = output / checkpoints.FOLDER
    partial = folder / f".partial-{step}"
    partial.mkdir(parents=True)
    (partial / "state").write_text(text)
    said = {"run": run or checkpoints.run_id(output), "step": step, "position": {"steps": step}, "layout": {}}
    checkpoints.seal(partial, folder / checkpoints.folder_name(step), said)
    return folder / checkpoints.folder_name(step)


def steps(folder: Path) -> list[int]:
    return sorted(checkpoints.step_of(path) for path in folder.glob("step-*"))


def newest(output: Path) -> int:
    found, _ = checkpoints.newest(output, checkpoints.run_id(output))
    assert found is not None
    return checkpoints.step_of(found)


def test_going_on_from_an_earlier_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    two, _, _ = (write(tmp_path, step) for step in (2, 4, 6))
    here, aside = checkpoints.branch_off(tmp_path, two)
    assert (here, aside, newest(tmp_path)) == (two, tmp_path / "checkpoints.before-0", 2)
    assert aside is not None and steps(aside) == [4, 6]
    four = write(tmp_path, 4, "other")
    checkpoints.keep_newest(four.parent, 1)
    assert newest(tmp_path) == 4 and (four / "state").read_text() == "other"
    # And back to the first branch: its checkpoint is copied here, and both branches stay.
    here, again = checkpoints.branch_off(tmp_path, aside / "step-00000004")
    assert here == four and (here / "state").read_text() == "one" and steps(four.parent) == [4]
    assert again is not None and (again / "step-00000004" / "state").read_text() == "other"
    assert steps(aside) == [4, 6]
    checkpoints.check(here, checkpoints.run_id(tmp_path))


def test_going_on_from_the_newest_sets_nothing_aside(tmp_path: Path) -> None:
    write(tmp_path, 2)
    assert checkpoints.branch_off(tmp_path, write(tmp_path, 4)) == (tmp_path / "checkpoints" / "step-00000004", None)
    assert steps(tmp_path / "checkpoints") == [2, 4] and not list(tmp_path.glob("checkpoints.before*"))


@pytest.mark.parametrize("text", ["", "null", "{}", '{"id": 3}', '{"id": ""}', "\0" * 100, "[" * 100_000, None])
def test_the_id_of_a_run_is_written_anew_from_its_checkpoints(tmp_path: Path, text: str | None) -> None:
    write(tmp_path, 2)
    before, path = checkpoints.run_id(tmp_path), tmp_path / checkpoints.RUN
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    assert checkpoints.run_id(tmp_path) == before
    assert json.loads(path.read_text()) == {"id": before} and newest(tmp_path) == 2


def test_an_id_is_not_guessed_from_checkpoints_of_several_runs(tmp_path: Path) -> None:
    write(tmp_path, 2, run="a" * 32)
    write(tmp_path, 4, run="b" * 32)
    (tmp_path / checkpoints.RUN).write_text("")
    with pytest.raises(VplanError, match="several runs"):
        checkpoints.run_id(tmp_path)


@pytest.mark.parametrize("key", ["step", "position", "layout", "run", "format", "sha256"])
@pytest.mark.parametrize("value", [None, "x", [], 1.5])
def test_a_manifest_without_what_a_run_goes_on_from_is_named_and_the_one_before_taken(
    tmp_path: Path, key: str, value: object
) -> None:
    write(tmp_path, 2)
    manifest = write(tmp_path, 4) / checkpoints.MANIFEST
    run, said = checkpoints.run_id(tmp_path), json.loads(manifest.read_text())
    for damaged in ({name: each for name, each in said.items() if name != key}, {**said, key: value}):
        manifest.write_text(json.dumps(damaged))
        found, faults = checkpoints.newest(tmp_path, run)
        assert found is not None and checkpoints.step_of(found) == 2
        assert len(faults) == 1 and "step-00000004" in faults[0]
