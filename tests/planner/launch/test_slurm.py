"""The batch script, run by bash with `srun` and `scontrol` in Slurm's place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from planner.launch.slurm import slurm_script
from planner.launch.stop import STOPPED
from planner.preflight.preflight import estimated, ready
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.units import GIB

SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 ]] && shift
for number in $(seq 0 $((NODES - 1))); do SLURM_NODEID=$number "$@" || exit; done
exit ${CODE:-0}
"""
SCONTROL = """#!/bin/bash
if [[ $1 == requeue ]]; then echo "requeue $2"; else printf 'node-a\\nnode-b\\n'; fi
"""


def plan(nodes: int, gpus: int = 8) -> Plan:
    job = Job(model="wan2.1-t2v-14b", frames=81, height=480, width=832)
    return Plan(job=job, strategy=Strategy(sharding="zero-2"), machine=Machine(gpu="80GB", gpus=gpus, nodes=nodes))


def run(script: str, folder: Path, nodes: int, code: int = 0) -> list[str]:
    """The lines that the job prints, one an argument; ``code``: with which the training ends, and so the job."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    said = {"PATH": f"{folder}:{os.environ['PATH']}", "NODES": str(nodes), "SLURM_JOB_ID": "123456"}
    said |= {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_CPUS_PER_TASK": "32", "CODE": str(code)}
    (folder / "job.sh").write_text(script)
    done = subprocess.run(["bash", folder / "job.sh"], env=said, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


WORDS = ["printf", "%s\n", "a b", "it's", "$HOME", '"x"']


def test_every_node_starts_the_same_words_with_its_own_number(tmp_path: Path) -> None:
    estimate, _ = estimated(ready(plan(2)), must=True)
    assert estimate is not None
    known = estimate.replace(
        host_ram_bytes=100 * GIB, host=None, step_seconds=8.0, step_seconds_high=9.0, disk_bytes=10**10
    )
    script = slurm_script(plan(2), WORDS, log="/runs/a/slurm-%j.log", steps=10_000, estimate=known)
    where = ["--main-address", "node-a", "--main-port", "23456", "--node-rank"]
    assert run(script, tmp_path, 2) == [*WORDS[2:], *where, "0", *WORDS[2:], *where, "1"]
    for line in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "mem=125G", "time=1-07:51:00", "requeue"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --output=/runs/a/slurm-%j.log\n" in script
    # 2 minutes, two steps of 9 s, and 10 GB at 50 MB/s
    assert "#SBATCH --signal=USR1@338\n" in script and "#SBATCH --cpus-per-task=32\n" in script


def test_a_short_job_with_large_checkpoints_has_time_to_train_before_it_is_asked_to_stop() -> None:
    estimate, _ = estimated(ready(plan(1)), must=True)
    assert estimate is not None
    known = estimate.replace(step_seconds=5.0, step_seconds_high=5.0, disk_bytes=150 * 10**9)
    script = slurm_script(plan(1), WORDS, steps=100, estimate=known)
    # 625 s of training, half an hour for encoding, and the 3130 s that the last step and a checkpoint may take
    assert "#SBATCH --signal=USR1@3130\n" in script and "#SBATCH --time=0-01:33:00\n" in script
    huge = slurm_script(plan(1), WORDS, steps=100, estimate=known.replace(disk_bytes=4 * 10**12))
    assert "#SBATCH --signal=USR1@65535\n" in huge


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_was_stopped_before_its_limit_goes_back_into_the_queue(tmp_path: Path, nodes: int) -> None:
    script = slurm_script(plan(nodes), WORDS)
    assert run(script, tmp_path, nodes, code=STOPPED)[-1] == "requeue 123456"
    assert "requeue 123456" not in run(script, tmp_path, nodes, code=4)
    assert "requeue 123456" not in run(script, tmp_path, nodes)


def test_one_node_needs_no_address(tmp_path: Path) -> None:
    script = slurm_script(plan(1, gpus=1), WORDS, log="/runs/a b\n#SBATCH --uid=0/x", gpu=False)
    assert run(script, tmp_path, 1) == WORDS[2:]
    assert "uid" not in script and "gpus-per-node" not in script and "--mem" not in script
