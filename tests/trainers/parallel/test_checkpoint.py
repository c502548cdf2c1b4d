"""Checkpoints: whole or not there, a run's own and unchanged or named; nothing finished is ever lost."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from planner.errors import VplanError  # noqa: E402
from planner.launch import checkpoints, launch  # noqa: E402
from planner.launch.launch import RunRequest  # noqa: E402
from planner.worker_process import Ended  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.parallel import checkpoint, state_files  # noqa: E402
from trainers.train import TrainingRun  # noqa: E402

WEIGHTS = "state/rank-00000-00000.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        yield runs.Place(root, "wan")


@pytest.fixture(scope="module")
def finished(place: runs.Place) -> Path:
    """A run of six steps that kept its last three checkpoints."""
    output = place.root / "finished"
    assert runs.train(place.request(output, steps=6, keep_checkpoints=3))["outcome"] == "ok"
    return output


@pytest.fixture
def output(finished: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def folders(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def newest(output: Path) -> tuple[str | None, list[str]]:
    found, faults = checkpoints.newest(output, checkpoints.run_id(output))
    return found.name if found else None, faults


def test_the_last_ones_are_kept(place: runs.Place, finished: Path, tmp_path: Path) -> None:
    assert folders(finished) == ["step-00000002", "step-00000004", "step-00000006"]
    assert newest(finished) == ("step-00000006", [])
    runs.train(place.request(tmp_path, place.plan(method="full"), steps=6, keep_checkpoints=1, learning_rate=1e-4))
    assert folders(tmp_path) == ["step-00000006"]


def test_lora_files_of_all_checkpoints_stay(place: runs.Place, tmp_path: Path) -> None:
    """Of the older ones the training state goes, and they are none to resume from."""
    runs.train(place.request(tmp_path, steps=6, keep_checkpoints=1))
    assert folders(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]
    assert newest(tmp_path) == ("step-00000006", [])
    for name in folders(tmp_path)[:2]:
        pruned = tmp_path / "checkpoints" / name
        assert {path.name for path in pruned.iterdir()} == {*checkpoints.LORA_FILES, "manifest.json"}
        with pytest.raises(VplanError, match=f"'{name}' has its LoRA files alone"):
            checkpoints.check(pruned, checkpoints.run_id(tmp_path))
    loras = [load_file(tmp_path / "checkpoints" / name / checkpoints.COMFYUI_LORA) for name in folders(tmp_path)]
    assert len({float(sum(tensor.sum() for tensor in lora.values())) for lora in loras}) == 3
    finished = load_file(tmp_path / "final" / checkpoints.DIFFUSERS_LORA)
    last = load_file(tmp_path / "checkpoints" / "step-00000006" / checkpoints.DIFFUSERS_LORA)
    assert all(torch.equal(tensor, finished[key]) for key, tensor in last.items()) and last.keys() == finished.keys()


def test_a_kill_while_pruning_leaves_nothing_to_resume_from(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = output / "checkpoints" / "step-00000002"

    def kill(path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kill)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.prune(first)
    assert (first / WEIGHTS).is_file() and newest(output) == ("step-00000006", [])
    with pytest.raises(VplanError, match="LoRA files alone"):
        checkpoints.check(first, checkpoints.run_id(output))
    checkpoints.keep_newest(first.parent, 3)
    assert {path.name for path in first.iterdir()} == {*checkpoints.LORA_FILES, "manifest.json"}


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "strange", "no manifest", "half a manifest"])
def test_a_damaged_one_is_named_and_the_one_before_taken(output: Path, damage: str) -> None:
    last = output / "checkpoints" / "step-00000006"
    weights, manifest = last / WEIGHTS, last / "manifest.json"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-1])
    elif damage == "changed":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "missing":
        (last / "state" / "outline.json").unlink()
    elif damage == "strange":
        (last / "state" / "rank-00001-00000.safetensors").write_bytes(b"cos\nsystem\n")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:100])
    found, faults = newest(output)
    assert found == "step-00000004"
    assert len(faults) == 1 and "step-00000006" in faults[0]
    with pytest.raises(VplanError, match="step-00000006"):
        checkpoints.check(last, checkpoints.run_id(output))


def test_another_runs_checkpoint_is_refused(output: Path, tmp_path: Path) -> None:
    theirs = checkpoints.run_id(tmp_path)
    with pytest.raises(VplanError, match="from another run"):
        checkpoints.check(output / "checkpoints" / "step-00000006", theirs)


def as_format_1(folder: Path) -> None:
    """Makes a checkpoint what vplan wrote before: whole weights as safetensors, states by ``torch.save``."""
    state = state_files.SavedState(folder, 0).read(lambda shape, dtype, _: torch.empty(shape, dtype=dtype))
    tensors = load_file(folder / WEIGHTS)
    shutil.rmtree(folder / "state")
    for start, name in (("weights/", "weights.safetensors"), ("average/", "average.safetensors")):
        found = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
        if found:
            save_file(found, folder / name)
    torch.save(state, folder / "optimizer-00000.pt")
    seal_again(folder, format=1)


def seal_again(folder: Path, **said: Any) -> None:
    """Whoever changes a file may also write its hash."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    hashes = {path.relative_to(folder).as_posix(): checkpoints.sha256(path) for path in files}
    (folder / "manifest.json").write_text(json.dumps({**manifest, **said, "sha256": hashes}))


@pytest.mark.parametrize("strategy", [{"ema": "gpu"}, {"weights_dtype": "bf16", "master_weights": "fp32"}])
def test_a_checkpoint_of_an_older_vplan_is_taken_up(
    place: runs.Place, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    plan = place.plan(strategy, method="full")
    assert runs.train(place.request(tmp_path / "new", plan, steps=2))["outcome"] == "ok"
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    as_format_1(tmp_path / "old" / "checkpoints" / "step-00000002")
    for name in ("new", "old"):
        kept, _ = checkpoints.newest(tmp_path / name, checkpoints.run_id(tmp_path / name))
        assert runs.train(place.request(tmp_path / name, plan, resume=str(kept)))["outcome"] == "ok"
    assert runs.losses(tmp_path / "old") == runs.losses(tmp_path / "new")
    wanted, found = (runs.tensors(tmp_path / name / "final") for name in ("new", "old"))
    assert all(torch.equal(tensor, found[key]) for key, tensor in wanted.items())


def test_split_states_of_an_older_vplan_are_refused_with_the_fix(place: runs.Place, output: Path) -> None:
    last = output / "checkpoints" / "step-00000006"
    seal_again(last, format=1)
    manifest = checkpoints.check(last, checkpoints.run_id(output))
    run = TrainingRun.__new__(TrainingRun)
    run.strategy = place.plan({"sharding": "fsdp"}, gpus=2).strategy
    with pytest.raises(VplanError, match=r"older vplan.*finish the run with the vplan that began it"):
        run._take_up(manifest)


def test_a_pickle_that_runs_code_is_not_loaded(output: Path, place: runs.Place) -> None:
    """Not even when whoever changed the file also wrote its hash."""
    last = output / "checkpoints" / "step-00000006"
    as_format_1(last)

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (output / "ran",))

    torch.save({"state": Evil()}, last / "optimizer-00000.pt")
    seal_again(last)
    told = runs.train(place.request(output, steps=8, resume=str(last)))
    assert told["outcome"] == "refused" and "more than tensors" in told["message"]
    assert not (output / "ran").exists()


def test_a_step_does_not_wait_for_the_files(place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is written training goes on; what is written is of the step it is named for."""
    ends: list[int] = []
    write = state_files.write_shares
    run = TrainingRun(place.request(tmp_path / "slow", steps=6), runs.ReportInMemory())

    def slow(path: Path, shares: list[state_files.Share]) -> None:
        while run.done < min(6, 2 * len(ends) + 4):  # two steps behind the one that it is of
            time.sleep(0.01)
        ends.append(run.done)
        write(path, shares)

    with monkeypatch.context() as patch:
        patch.setattr(state_files, "write_shares", slow)
        assert run.train()
    assert ends[0] >= 4
    assert runs.train(place.request(tmp_path / "waits", steps=6))["outcome"] == "ok"
    for name in ("step-00000004", "step-00000006"):
        found, wanted = (load_file(tmp_path / kind / "checkpoints" / name / WEIGHTS) for kind in ("slow", "waits"))
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_without_room_in_host_ram_a_step_waits_and_the_files_are_the_same(
    place: runs.Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = place.plan({"ema": "cpu"}, method="full")
    assert runs.train(place.request(tmp_path / "room", plan))["outcome"] == "ok"
    threads: set[str] = set()
    write = state_files.write_shares

    def noted(path: Path, shares: list[state_files.Share]) -> None:
        threads.add(threading.current_thread().name)
        write(path, shares)

    with monkeypatch.context() as patch:
        patch.setattr(state_files, "STATE_FILE_BYTES", 2000)
        patch.setattr(state_files, "write_shares", noted)
        patch.setattr(checkpoint.doctor, "host_ram", lambda: {"available_bytes": 1000})
        assert runs.train(place.request(tmp_path / "none", plan))["outcome"] == "ok"
    assert threads == {threading.main_thread().name}
    one, many = (tmp_path / name / "checkpoints" / "step-00000004" / "state" for name in ("room", "none"))
    assert len(list(one.glob("*.safetensors"))) == 1 and len(list(many.glob("*.safetensors"))) > 10
    wanted, found = runs.tensors(one), runs.tensors(many)
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    request = place.request(tmp_path / "none", plan, steps=5, resume=str(many.parent))
    assert runs.train(request)["outcome"] == "ok"


def test_a_full_disk_leaves_the_earlier_ones(output: Path, place: runs.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in (output / "checkpoints").rglob("*") if path.is_file()}
    save = state_files.save_file

    def full(tensors: Any, path: Path, **header: Any) -> None:
        save(tensors, path, **header)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_files, "save_file", full)
    request = place.request(output, steps=8, keep_checkpoints=3, resume=str(output / "checkpoints" / "step-00000006"))
    told = runs.train(request)
    assert told["outcome"] == "refused" and "No space left" in told["message"] and told["exit_code"] == 4
    assert {path: path.read_bytes() for path in (output / "checkpoints").rglob("*") if path.is_file()} == before


def test_a_disk_that_fills_up_stops_the_run_with_a_line(place: runs.Place, tmp_path: Path) -> None:
    """A real one: as long as there is room checkpoints are written, and those that were stay whole."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        told = runs.train(place.request(disk, steps=99, checkpoint_every=1, keep_checkpoints=99))
        assert told["outcome"] == "refused" and told["exit_code"] == 4, told
        assert "the disk is full" in told["message"] or "No space left" in told["message"]
        assert "\n" not in told["message"] and "resumes from the last checkpoint" in told["fix"]
        assert told["saved"] >= 1
        found, faults = checkpoints.newest(disk, checkpoints.run_id(disk))
        assert found is not None and found.name == f"step-{told['saved']:08d}" and not faults
        with contextlib.suppress(OSError):  # what was half written is gone: there is room again
            (disk / "rest").write_bytes(bytes(300 * 1024))
        assert launch.outcome(disk, Ended(1)).message == f"the disk of {disk} is full"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_a_kill_leaves_behind_is_no_checkpoint_and_goes(output: Path, place: runs.Place) -> None:
    folder = output / "checkpoints"
    shutil.copytree(folder / "step-00000006", folder / ".partial-step-00000008")
    (folder / ".removed-step-00000000").mkdir()
    assert newest(output) == ("step-00000006", [])
    request = place.request(output, steps=8, keep_checkpoints=3, resume=str(folder / "step-00000006"))
    assert runs.train(request)["outcome"] == "ok"
    assert folders(output) == ["step-00000002", "step-00000004", "step-00000006", "step-00000008"]


@pytest.mark.parametrize(
    ("strategy", "job", "named"),
    [
        ({"optimizer": "lion"}, {}, "optimizer adamw"),
        ({}, {"lora_rank": 8}, "lora_rank 4"),
        ({"ema": "cpu"}, {}, "ema False"),
        ({}, {"method": "full"}, "method lora"),
    ],
)
def test_a_state_of_another_form_is_refused_by_name(
    output: Path, place: runs.Place, strategy: dict[str, Any], job: dict[str, Any], named: str
) -> None:
    request = place.request(
        output, place.plan(strategy, **job), steps=8, resume=str(output / "checkpoints" / "step-00000006")
    )
    told = runs.train(request)
    assert told["outcome"] == "refused" and named in told["message"]


def resumed(place: runs.Place, tmp_path: Path, plan: Any) -> tuple[RunRequest, Path, Path]:
    """A run of four steps, and one of two that went on for two more."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert runs.train(place.request(once, plan))["outcome"] == "ok"
    assert runs.train(place.request(twice, plan, steps=2))["outcome"] == "ok"
    request = place.request(twice, plan, resume=str(twice / "checkpoints" / "step-00000002"))
    assert runs.train(request)["outcome"] == "ok"
    return request, once, twice


@pytest.mark.parametrize(
    ("strategy", "job"),
    [
        ({}, {}),
        ({"gradient_accumulation": 2, "gradient_checkpointing": "full"}, {"batch_size": 2, "lora_dropout": 0.3}),
        ({"optimizer_step": "backward", "ema": "gpu"}, {"method": "full"}),
        ({"optimizer_step": "backward", "swap_blocks": 1, "gradient_checkpointing": "full"}, {"method": "full"}),
        ({"weights_dtype": "bf16", "master_weights": "fp32", "ema": "cpu"}, {"method": "full", "trainable": ["attn1"]}),
        ({"optimizer": "adamw-8bit"}, {}),
        ({"optimizer": "adamw-8bit-paged"}, {}),
        ({"optimizer": "lion"}, {}),
        ({"optimizer": "prodigy"}, {}),
        ({"offload_optimizer": "cpu", "offload_gradients": "cpu"}, {}),
        ({"optimizer": "muon"}, {"method": "full"}),
        ({"optimizer": "came", "adapter_dtype": "bf16"}, {}),
        ({"optimizer": "adafactor", "adapter_dtype": "bf16"}, {}),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    place: runs.Place, tmp_path: Path, strategy: dict[str, Any], job: dict[str, Any]
) -> None:
    _, once, twice = resumed(place, tmp_path, place.plan(strategy, **job))
    assert runs.losses(once) == runs.losses(twice)
    for folder in ("final", "checkpoints/step-00000004"):
        wanted, found = runs.tensors(once / folder), runs.tensors(twice / folder)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def test_weights_that_are_no_numbers_are_never_written(
    output: Path, place: runs.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step can end in NaN weights with a good loss: the next loss would show it, and the checkpoint comes first."""
    update, done = torch.optim.AdamW.step, []

    def poisoned(self: torch.optim.AdamW, *arguments: Any) -> Any:
        done.append(update(self, *arguments))
        if len(done) == 2:  # the eighth step of the run
            self.param_groups[0]["params"][0].data.fill_(float("nan"))
        return done[-1]

    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    told = runs.train(place.request(output, steps=8, resume=str(output / "checkpoints" / "step-00000006")))
    assert told["outcome"] == "nan" and "after step 8 " in told["message"]
    assert newest(output) == ("step-00000006", [])
