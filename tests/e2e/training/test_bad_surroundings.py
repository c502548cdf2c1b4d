"""`vplan train` where the computer around it fails: calls that fail or lie, a full disk, no RAM, a second run, and
files that somebody put in the place of its own. What was finished stays, and the same command goes on to its end."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vplan  # noqa: E402
from planner.launch import checkpoints  # noqa: E402
from planner.spec.plan import write_plan  # noqa: E402
from tests.trainers import runs  # noqa: E402

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux' ways to fail"),
    pytest.mark.usefixtures("preloaded_python"),
]

PATIENCE = 900
"""Seconds for a process on a busy machine; nobody measures them."""
SOURCE = Path(__file__).parents[2] / "tools" / "faulty_calls.c"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, preloaded_python: None) -> Iterator[runs.Place]:
    """A tiny model, its samples, and a run of six steps that nothing disturbed."""
    root = tmp_path_factory.mktemp("surroundings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = runs.Place(root, "wan")
        write_plan(made.plan(), root / "plan.toml")
        done = train(made, root / "whole")
        assert done.returncode == 0, done.stderr
        yield made


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library whose calls fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("faulty") / "faulty.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(made), "-ldl"], check=True)
    return str(made)


def words(place: runs.Place, output: Path, *more: str) -> list[str]:
    typed = {"--data": place.root / "data", "--output": output, "--steps": 6, "--checkpoint-every": 2}
    typed |= {"--keep-checkpoints": 9, "--device": "cpu"}
    pairs = [str(word) for pair in typed.items() for word in pair]
    return vplan.command("train", str(place.root / "plan.toml"), *pairs, "--json", *more)


def train(place: runs.Place, output: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    said = {**os.environ, **environment}
    command = words(place, output, *more)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=said)


def is_the_undisturbed_end(place: runs.Place, output: Path) -> bool:
    wanted, found = runs.tensors(place.root / "whole" / "final"), runs.tensors(output / "final")
    same = wanted.keys() == found.keys() and all(torch.equal(found[name], one) for name, one in wanted.items())
    return same and runs.losses(output) == runs.losses(place.root / "whole")


def error(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What a command that failed says, in one line with its fix; no traceback beside it."""
    said: dict[str, str] = json.loads(done.stdout)["error"]
    assert "\n" not in said["message"] and said["fix"] and "Traceback" not in done.stderr, done.stderr
    return said


# ---- calls that fail or lie


def test_a_clock_that_jumps_changes_nothing(place: runs.Place, tmp_path: Path, faulty: str) -> None:
    """By a year forth and back, from one look at it to the next."""
    lying = {"LD_PRELOAD": faulty, "FAULTY_CLOCK": str(365 * 86400)}
    first = train(place, tmp_path / "run", "--steps", "4", **lying)
    assert first.returncode == 0, first.stderr
    done = train(place, tmp_path / "run", **lying)
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and answer["resumed_from"] == 4
    assert is_the_undisturbed_end(place, tmp_path / "run")
    assert 0 < answer["step_seconds"] < PATIENCE
    stamps = [line["unix_seconds"] for line in runs.lines(tmp_path / "run")]
    assert max(stamps) - min(stamps) > 300 * 86400  # it did jump
    page = subprocess.run(vplan.command("report", str(tmp_path / "run")), check=False)
    assert page.returncode == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT])
@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "done all the same"])
def test_a_checkpoint_whose_renaming_fails(
    place: runs.Place, tmp_path: Path, faulty: str, number: int, is_done: bool
) -> None:
    """As on a network drive: the answer is an error, and it was done or not."""
    output = tmp_path / "run"
    failing = {"LD_PRELOAD": faulty, "FAULTY_RENAME": str(number), "FAULTY_PATH": "/step-00000004"}
    done = train(place, output, **failing, **({"FAULTY_DONE": "1"} if is_done else {}))
    assert done.returncode == 4
    said = error(done)
    assert os.strerror(number) in said["message"] and "same command again" in said["fix"]
    run = checkpoints.run_id(output)
    newest, faults = checkpoints.newest(output, run)
    assert newest is not None and newest.name == ("step-00000004" if is_done else "step-00000002") and not faults
    assert train(place, output).returncode == 0
    assert is_the_undisturbed_end(place, output)


def test_a_drive_without_locks_is_named_and_used(place: runs.Place, tmp_path: Path, faulty: str) -> None:
    """It said that another run was writing there."""
    done = train(place, tmp_path / "run", LD_PRELOAD=faulty, FAULTY_FLOCK=str(errno.ENOLCK))
    assert done.returncode == 0 and "has no locks" in done.stderr
    assert is_the_undisturbed_end(place, tmp_path / "run")


# ---- a second run, a full disk, no RAM


def test_two_trainings_in_one_folder(place: runs.Place, tmp_path: Path) -> None:
    """The second is refused while the first trains, whose end is what it would have been."""
    output = tmp_path / "run"
    with (tmp_path / "first.txt").open("w") as log:
        first = subprocess.Popen(words(place, output), stdout=log, stderr=log)
    end = time.monotonic() + PATIENCE
    while not (output / checkpoints.RUN).exists():  # it has the lock by then
        assert first.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    seconds = [train(place, output, *more) for more in ((), ("--resume", "no"))]
    assert first.wait(PATIENCE) == 0
    assert [done.returncode for done in seconds] == [1, 1]
    assert all("another run is writing" in error(done)["message"] for done in seconds)
    assert is_the_undisturbed_end(place, output)


def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint(place: runs.Place, tmp_path: Path) -> None:
    """And when there is room again, the same command goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        output = disk / "run"
        assert train(place, output, "--steps", "2").returncode == 0
        written = sum(path.stat().st_size for path in (output / "checkpoints").rglob("*") if path.is_file())
        rest = shutil.disk_usage(disk).free - written // 2  # of the next checkpoint, half has room
        (disk / "rest").write_bytes(bytes(rest))
        done = train(place, output)
        assert done.returncode in (1, 4), done.stderr
        assert re.search("full|No space left|free", error(done)["message"])
        newest, faults = checkpoints.newest(output, checkpoints.run_id(output))
        assert newest is not None and newest.name == "step-00000002" and not faults
        (disk / "rest").unlink()
        assert train(place, output).returncode == 0
        assert is_the_undisturbed_end(place, output)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A group of processes with 1.5 GiB of RAM and no swap, where this user may make one (cgroup v1 or v2)."""
    root = Path("/sys/fs/cgroup")
    v1 = (root / "memory").is_dir()
    group = root / ("memory" if v1 else ".") / f"vplan-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(1536 << 20))
        (group / ("memory.swappiness" if v1 else "memory.swap.max")).write_text("0")
    except OSError as fault:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no cgroup can be made here: {fault}")
    yield group
    end = time.monotonic() + 60
    while group.is_dir() and time.monotonic() < end:
        try:
            group.rmdir()
        except OSError:  # its last process is on its way out
            time.sleep(0.1)


HOG = """
import time
kept = []
while True:
    kept.append(b"x" * (8 << 20))
    time.sleep(0.01)
"""


def test_a_worker_that_the_kernel_ends_for_want_of_ram(place: runs.Place, tmp_path: Path, cgroup: Path) -> None:
    """Something else in its cgroup takes all RAM, and of the two the kernel prefers the worker; the parent says so."""
    output = tmp_path / "run"
    into = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh"]
    with (tmp_path / "out.txt").open("w") as log:
        command = words(place, output, "--steps", "9999", "--checkpoint-every", "2")
        run = subprocess.Popen([*into, *command], stdout=log, stderr=subprocess.DEVNULL)
    end = time.monotonic() + PATIENCE
    while not (output / "checkpoints" / "step-00000002").is_dir():
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    (told,) = (output / "run").glob("result-*.json")
    worker = json.loads(told.read_text())["pid"]
    Path(f"/proc/{worker}/oom_score_adj").write_text("1000")
    hog = subprocess.Popen([*into, sys.executable, "-c", HOG])
    try:
        code = run.wait(PATIENCE)
    finally:
        hog.kill()
        hog.wait()
    assert code == 4
    message = json.loads((tmp_path / "out.txt").read_text())["error"]["message"]
    assert f"signal {int(signal.SIGKILL)}" in message and "host RAM" in message and "last good checkpoint" in message
    kept = max(checkpoints.step_of(path) for path in (output / "checkpoints").glob("step-*"))
    newest, faults = checkpoints.newest(output, checkpoints.run_id(output))
    assert newest is not None and checkpoints.step_of(newest) == kept and not faults
    on = train(place, output, "--steps", str(kept + 2), "--checkpoint-every", "2")
    assert on.returncode == 0 and json.loads(on.stdout)["resumed_from"] == kept


# ---- pickles in the place of tensors


class Payload:
    """What creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


@pytest.fixture
def forged(tmp_path: Path) -> Iterator[bytes]:
    """A pickle that creates a file wherever it is loaded, by whatever; nothing may."""
    canary = tmp_path / "canary"
    content = pickle.dumps({"state_dict": Payload(canary)})
    pickle.loads(content)
    assert canary.exists()  # it would
    canary.unlink()
    yield content
    assert not canary.exists()


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors", "model.ckpt"])
def test_forged_weights(place: runs.Place, tmp_path: Path, forged: bytes, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(place.root / "model", folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.unlink()
    weights.with_name(name).write_bytes(forged)
    done = train(place, tmp_path / "run", "--weights", str(folder))
    assert done.returncode in (1, 4) and error(done)["message"]


def test_a_forged_index_of_weights(place: runs.Place, tmp_path: Path, forged: bytes) -> None:
    folder = tmp_path / "model"
    shutil.copytree(place.root / "model", folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    names = list(runs.tensors(folder))
    (tmp_path / "forged.bin").write_bytes(forged)
    for leads_to in ("pytorch_model.bin", "../../forged.bin"):
        weights.unlink(missing_ok=True)
        (weights.parent / "pytorch_model.bin").write_bytes(forged)
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, leads_to)}
        weights.with_name(f"{weights.name}.index.json").write_text(json.dumps(index))
        done = train(place, tmp_path / "run", "--weights", str(folder))
        assert done.returncode in (1, 4) and error(done)["message"]


@pytest.mark.parametrize("option", ["--transformer", "--lora-init"])
@pytest.mark.parametrize("name", ["forged.safetensors", "forged.pt"])
def test_a_forged_file_of_weights(place: runs.Place, tmp_path: Path, forged: bytes, option: str, name: str) -> None:
    (tmp_path / name).write_bytes(forged)
    done = train(place, tmp_path / "run", option, str(tmp_path / name))
    assert done.returncode in (1, 2, 4) and error(done)["message"]


def test_a_forged_checkpoint(place: runs.Place, tmp_path: Path, forged: bytes) -> None:
    """With the hashes that belong to it: somebody who can write into the run's folder made it."""
    output = tmp_path / "run"
    shutil.copytree(place.root / "whole", output)
    newest = output / "checkpoints" / "step-00000006"
    for path in (newest / "state").glob("*.safetensors"):
        path.write_bytes(forged)
    done = train(place, output, "--steps", "8")  # as it is: it is not what was written
    assert done.returncode == 0 and json.loads(done.stdout)["resumed_from"] == 4 and "skipped" in done.stderr
    shutil.rmtree(output)
    shutil.copytree(place.root / "whole", output)
    (state,) = (newest / "state").glob("*.safetensors")
    for content, name in ((forged, state.name), (forged, "optimizer-00000.pt")):
        (newest / "state" / name).write_bytes(content)
        manifest = json.loads((newest / "manifest.json").read_text())
        files = {path.relative_to(newest).as_posix(): path for path in newest.rglob("*") if path.is_file()}
        manifest["sha256"] = {name: checkpoints.sha256(path) for name, path in files.items() if name != "manifest.json"}
        (newest / "manifest.json").write_text(json.dumps(manifest))
        done = train(place, output, "--steps", "8")
        assert done.returncode in (1, 4) and error(done)["message"]


def test_forged_samples(place: runs.Place, tmp_path: Path, forged: bytes) -> None:
    """Of a cache that others made: nothing of it is made again, and it stays."""
    data = tmp_path / "data"
    shutil.copytree(place.root / "data", data)
    for path in data.glob("*.safetensors"):
        path.write_bytes(forged)
    done = train(place, tmp_path / "run", "--data", str(data))
    assert done.returncode in (1, 4) and "it is damaged" in error(done)["message"]
    assert all(path.read_bytes() == forged for path in data.glob("*.safetensors"))
