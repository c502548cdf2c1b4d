"""`vplan train` as people call it: processes, exit codes, kills at any moment, and nothing left running."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

torch = pytest.importorskip("torch")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

import vplan  # noqa: E402
from planner.launch import checkpoints  # noqa: E402
from planner.spec.job import Job, Machine, Strategy  # noqa: E402
from planner.spec.plan import Plan, read_plan, write_plan  # noqa: E402
from tests.preloaded_python import new_processes  # noqa: E402
from tests.trainers import runs  # noqa: E402
from trainers.data.entries import read_entries, write_entries  # noqa: E402

pytestmark = pytest.mark.usefixtures("preloaded_python")

PATIENCE = 300
"""Seconds for a process on a busy machine; nobody measures them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VPLAN_HOME", str(root / "home"))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = runs.Place(root, "wan")
        write_plan(made.plan(), root / "plan.toml")
        write_plan(made.plan({"sharding": "ddp"}, gpus=2), root / "two.toml")
        one_each = made.plan({"sharding": "ddp"}, gpus=2)
        write_plan(one_each.replace(machine=Machine(gpu="24GB", nodes=2)), root / "nodes.toml")
        large = Job(model="wan2.1-t2v-14b", method="full", frames=81, height=480, width=832)
        write_plan(Plan(job=large, strategy=Strategy(), machine=Machine(gpu="24GB")), root / "large.toml")
        yield made


def words(place: runs.Place, output: Path, *more: str, plan: str = "plan.toml") -> list[str]:
    said = ["--data", str(place.root / "data"), "--output", str(output), "--device", "cpu"]
    return vplan.command("train", str(place.root / plan), *said, "--learning-rate", "0.01", *more)


def run(*said: Any, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words(*said, **how), capture_output=True, text=True, check=False, timeout=PATIENCE)


def wait_for(condition: Any, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)


def lines(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_from_a_plan_to_a_lora_file_with_a_kill_and_a_resume(place: runs.Place, tmp_path: Path) -> None:
    """Killed five times: three times the worker, forked off here where torch is loaded, then the whole of the command,
    then its parent alone. Each goes on from where the one before was, and the end is the uninterrupted one's."""
    assert runs.train(place.request(tmp_path / "whole", steps=60, checkpoint_every=60))["outcome"] == "ok"
    output = tmp_path / "killed"
    # A checkpoint is whole when the next one begins, so the first kill is behind the second one's begin.
    kills = ((11, kill_worker), (17, kill_worker), (24, kill_worker), (38, kill_tree), (52, kill_parent))
    finished: set[str] = set()
    for steps, kill in kills:
        kill(place, output, steps)
        newest, _ = checkpoints.newest(output, checkpoints.run_id(output))
        assert newest is not None and finished <= {newest.name} | finished
        assert int(newest.name[5:]) > steps - 11  # no more is lost than since the last checkpoint and its writing
        finished.add(newest.name)
    done = run(place, output, "--steps", "60", "--checkpoint-every", "5", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["steps"] == 60 and answer["resumed_from"] >= 45 and Path(answer["weights"]).is_dir()
    assert "resuming from" in done.stderr
    beyond = run(place, output, "--steps", "50")
    assert beyond.returncode == 1 and "step-00000060 has 60 steps, but --steps is 50" in beyond.stderr
    assert runs.losses(output) == runs.losses(tmp_path / "whole")
    page = (output / "report.html").read_text()
    assert "Finished: step 60 of 60" in page and "host RAM peak" in page
    wanted, found = runs.tensors(tmp_path / "whole" / "final"), runs.tensors(output / "final")
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def kill_worker(place: runs.Place, output: Path, steps: int) -> None:
    """The command's worker alone, once so many steps are done."""
    newest, _ = checkpoints.newest(output, checkpoints.run_id(output)) if output.exists() else (None, [])
    asked = place.request(output, steps=60, checkpoint_every=5, resume=str(newest) if newest else None)
    process = multiprocessing.get_context("fork").Process(target=runs.train, args=(asked,))
    process.start()
    while process.is_alive() and lines(output) < steps:
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def kill_tree(place: runs.Place, output: Path, steps: int, *, children: bool = True) -> None:
    """The command with all that it started, or it alone."""
    said = words(place, output, "--steps", "60", "--checkpoint-every", "5")
    process = subprocess.Popen(said, stderr=subprocess.DEVNULL)
    wait_for(lambda: lines(output) >= steps, process)
    tree = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in tree if children else ():
        child.kill()
    process.wait()
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert not alive, "workers end with their parent"


def kill_parent(place: runs.Place, output: Path, steps: int) -> None:
    """The command alone: its worker ends with it."""
    kill_tree(place, output, steps, children=False)


def test_a_signal_before_the_time_limit_leaves_a_checkpoint(place: runs.Place, tmp_path: Path) -> None:
    """On two ranks, one of which is asked: both end after the same step, and the end is the uninterrupted run's."""
    output = tmp_path / "stopped"
    # Far more steps than are done before the signal comes, however late that is.
    said = words(place, output, "--steps", "9999", "--checkpoint-every", "9999", plan="two.toml")
    process = subprocess.Popen(said, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: lines(output) >= 3, process)  # type: ignore[arg-type]
    for each in psutil.Process(process.pid).children(recursive=True):  # as Slurm does with SignalChildrenProcesses
        each.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGUSR1)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 138, stderr
    newest, _ = checkpoints.newest(output, checkpoints.run_id(output))
    assert newest is not None
    done = int(newest.name[5:])
    assert 3 <= done < 9999 and f"stopped after step {done} of 9999" in stdout
    assert "error" not in stderr and "run the same command again" in stdout
    assert not (output / "final").exists() and not (output / "stop").exists()
    steps = str(done + 10)
    resumed = run(place, output, "--steps", steps, "--json", plan="two.toml")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["resumed_from"] == done
    whole = run(place, tmp_path / "whole", "--steps", steps, plan="two.toml")
    assert whole.returncode == 0, whole.stderr
    assert runs.losses(output) == runs.losses(tmp_path / "whole")


def test_ctrl_c_leaves_a_checkpoint(place: runs.Place, tmp_path: Path) -> None:
    said = words(place, tmp_path / "out", "--steps", "9999", "--checkpoint-every", "9999")
    heard = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's &
    process = subprocess.Popen(said, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    wait_for(lambda: lines(tmp_path / "out") >= 3, process)  # type: ignore[arg-type]
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 138, stderr
    assert "Ctrl-C again ends without one" in stderr and "run the same command again" in stdout
    newest, _ = checkpoints.newest(tmp_path / "out", checkpoints.run_id(tmp_path / "out"))
    assert newest is not None and int(newest.name[5:]) >= 3


def test_a_rank_that_dies_takes_the_others_with_it(place: runs.Place, tmp_path: Path) -> None:
    said = words(place, tmp_path / "out", "--steps", "9999", "--checkpoint-every", "5", plan="two.toml")
    with new_processes():  # the launcher, its ranks and their signals as they are for users
        process = subprocess.Popen(said, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: lines(tmp_path / "out") >= 7, process)  # type: ignore[arg-type]
    tree = psutil.Process(process.pid).children(recursive=True)
    told = json.loads((tmp_path / "out" / "run" / "result-00001.json").read_text())
    os.kill(told["pid"], signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "a rank died" in stderr and "the last good checkpoint is" in stderr
    assert "Traceback" not in stderr
    assert stderr.count("error:") == 1
    assert not psutil.wait_procs(tree, timeout=1)[1]


@pytest.fixture
def own_data(place: runs.Place, tmp_path: Path) -> Path:
    """The samples in a folder that a test may spoil."""
    return runs.make_entries(tmp_path / "data", place.model, place.kind).parent


def test_an_error_on_one_rank_of_a_sharded_run_ends_the_others(
    place: runs.Place, own_data: Path, tmp_path: Path
) -> None:
    """Each rank holds half of every weight: without the one that cannot read its sample, the other would wait for its
    halves for good. What is told is that error, and not what it did to the other rank."""
    write_plan(place.plan({"sharding": "fsdp"}, gpus=2, method="full"), place.root / "sharded.toml")
    said = words(place, tmp_path / "out", "--steps", "9999", "--checkpoint-every", "5", plan="sharded.toml")
    said[said.index("--data") + 1] = str(own_data)
    process = subprocess.Popen(said, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: lines(tmp_path / "out") >= 7, process)  # type: ignore[arg-type]
    tree = psutil.Process(process.pid).children(recursive=True)
    spoilt = sorted(own_data.glob("*.latents.safetensors"))[0]
    spoilt.write_bytes(b"no tensors")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode in (1, 4), stderr
    assert spoilt.name in stderr and stderr.count("error:") == 1 and "Traceback" not in stderr
    assert not psutil.wait_procs(tree, timeout=10)[1]
    newest, _ = checkpoints.newest(tmp_path / "out", checkpoints.run_id(tmp_path / "out"))
    assert newest is not None and int(newest.name[5:]) >= 5


def test_what_cannot_be_is_said_in_two_lines(place: runs.Place, tmp_path: Path) -> None:
    cases = [
        (("--learning-rate", "1e30", "--steps", "5"), 4, "is not a number"),
        (("--resume", str(tmp_path)), 1, "is not a checkpoint"),
        (("--attention", "cudnn"), 1, "attention cudnn has no kernel for the CPU"),
    ]
    for number, (more, code, named) in enumerate(cases):
        done = run(place, tmp_path / f"out-{number}", *more)
        assert done.returncode == code, (more, done.stderr)
        assert named in done.stderr and "Traceback" not in done.stderr
        assert done.stdout == ""


def test_a_plan_that_does_not_fit_is_not_begun(place: runs.Place, tmp_path: Path) -> None:
    done = run(place, tmp_path, "--weights", str(place.root / "model"), "--json", plan="large.toml")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert "does not fit" in error["message"] and "vplan suggest" in error["fix"]
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_the_same_folder_is_refused(place: runs.Place, tmp_path: Path) -> None:
    from planner.launch.launch import locked

    with locked(tmp_path):
        done = run(place, tmp_path)
    assert done.returncode == 1 and "another run is writing" in done.stderr


def test_a_folder_that_nobody_may_write_to_is_named(place: runs.Place, tmp_path: Path) -> None:
    (tmp_path / ".lock-0").mkdir()  # what even root cannot write
    done = run(place, tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"cannot write to {tmp_path}: " in done.stderr and "choose another --output" in done.stderr


def test_the_printed_command_trains(place: runs.Place, tmp_path: Path) -> None:
    done = run(place, tmp_path, "--steps", "2", "--print-command", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["environment"].items() >= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}.items()
    assert "CUDA_DEVICE_ORDER" in told["environment"]
    with new_processes():
        ended = subprocess.run(
            told["command"], env={**os.environ, **told["environment"]}, stdin=subprocess.DEVNULL, capture_output=True,
            check=False, timeout=PATIENCE,
        )  # fmt: skip
    assert ended.returncode == 0 and lines(tmp_path) == 2
    kept = sorted((tmp_path / checkpoints.FOLDER).iterdir())
    done = run(place, tmp_path, "--steps", "2", "--resume", "no", "--print-command")
    assert done.returncode == 0 and "move them before you run the command" in done.stderr
    assert sorted((tmp_path / checkpoints.FOLDER).iterdir()) == kept  # printing moves nothing


def test_a_model_is_planned_for_first(place: runs.Place, tmp_path: Path) -> None:
    """The plan that suggest chooses is written and said, and then trained like any other."""
    (tmp_path / "data").mkdir()
    of_shape = [entry for entry in read_entries(place.entries) if entry.bucket.frames == 5]
    write_entries(tmp_path / "data" / "entries.jsonl", of_shape)
    said = ["--data", str(tmp_path / "data"), "--output", str(tmp_path), "--weights", str(place.root / "model")]
    job = ["--frames", "5", "--height", "32", "--width", "48", "--gpu", "24GB", "--device", "cpu", "--steps", "1"]
    done = subprocess.run(
        vplan.command("train", "wan2.1-t2v-1.3b", *said, *job, "--json"),
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    # The folder holds another architecture.
    assert "attention_head_dim = 12" in json.loads(done.stdout)["error"]["message"]
    assert read_plan(tmp_path / "plan.toml").job.model == "wan2.1-t2v-1.3b"
    assert "plan written to" in done.stderr


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="limits of another process are Linux's")
def test_two_computers_train_what_one_does_and_go_on_together_when_memory_runs_out(
    place: runs.Place, tmp_path: Path
) -> None:
    """The second one's rank may take no more address space in the middle: both go on with what recomputes, from the
    last checkpoint, and the losses are those of one rank with the whole global batch."""
    output, steps = tmp_path / "out", 60
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    asked = ["--steps", str(steps), "--checkpoint-every", "5", "--main-address", "127.0.0.1", "--main-port", port]
    asked += ["--log-with", "tensorboard"]
    # glibc asks the system for every tensor anew: memory it kept from the step before would be under no limit
    unpooled = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TRIM_THRESHOLD_": "0"}
    both = [
        subprocess.Popen(
            words(place, output, *asked, "--node-rank", str(rank), "--json", plan="nodes.toml"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=unpooled,
        )
        for rank in (1, 0)
    ]  # fmt: skip
    for process in both:
        wait_for(lambda: lines(output) >= 7, process)  # type: ignore[arg-type]
    told = json.loads((output / "run-1" / "result-00001.json").read_text())
    psutil.Process(told["pid"]).rlimit(psutil.RLIMIT_AS, (1 << 20, 1 << 20))
    second, first = (process.communicate(timeout=PATIENCE) for process in both)
    assert [process.returncode for process in both] == [0, 0], first[1] + second[1]
    (note,) = [note for note in json.loads(first[0])["notes"] if "memory" in note]
    assert "out of host memory at" in note and "gradient_checkpointing none -> full" in note
    assert read_plan(output / "plan.toml").strategy.gradient_checkpointing == "full"
    assert read_plan(output / "plan.before-0.toml").strategy.gradient_checkpointing == "none"
    alone = place.request(tmp_path / "alone", place.plan(batch_size=2), steps=steps, checkpoint_every=steps)
    assert runs.train(alone)["outcome"] == "ok"
    assert runs.losses(output) == pytest.approx(runs.losses(tmp_path / "alone"), abs=1e-5)
    tracked = EventAccumulator(str(output / "vplan")).Reload().Scalars("loss")
    assert {event.step: event.value for event in tracked} == pytest.approx(
        dict(enumerate(runs.losses(output), start=1)), abs=1e-6
    )


def test_a_batch_script_repeats_what_was_typed(place: runs.Place, tmp_path: Path) -> None:
    said = words(place, tmp_path / "out", "--nodes", "2", "--sharding", "ddp", "--skip-bad", "--seed", "5")
    done = subprocess.run(
        [*said, "--slurm", str(tmp_path / "job.sh"), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    script = (tmp_path / "job.sh").read_text()
    assert json.loads(done.stdout) == {"schema": 1, "script": str(tmp_path / "job.sh"), "nodes": 2}
    typed = f"--data {place.root / 'data'} --output {tmp_path / 'out'} --seed 5 --skip-bad"
    assert f"train {tmp_path / 'out' / 'plan.toml'} {typed} --device cpu)" in script
    kept = read_plan(tmp_path / "out" / "plan.toml")
    assert (kept.machine.nodes, kept.training.learning_rate) == (2, 0.01)
