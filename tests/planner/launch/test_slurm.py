"""The batch script, run by bash with `srun` and `scontrol` in Slurm's place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from planner.launch.slurm import slurm_script
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.units import GIB

SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=1 ]] && shift
for number in $(seq 0 $((NODES - 1))); do SLURM_NODEID=$number "$@" || exit; done
"""


def plan(nodes: int, gpus: int = 8) -> Plan:
    job = Job(model="wan2.1-t2v-14b", frames=81, height=480, width=832)
    return Plan(job=job, strategy=Strategy(sharding="zero-2"), machine=Machine(gpu="80GB", gpus=gpus, nodes=nodes))


def run(script: str, folder: Path, nodes: int) -> list[str]:
    """The lines that the job prints, one an argument."""
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\nprintf 'node-a\\nnode-b\\n'\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    said = {"PATH": f"{folder}:{os.environ['PATH']}", "NODES": str(nodes), "SLURM_JOB_ID": "123456"}
    said |= {"SLURM_JOB_NODELIST": "node-[a-b]"}
    (folder / "job.sh").write_text(script)
    done = subprocess.run(["bash", folder / "job.sh"], env=said, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


WORDS = ["printf", "%s\n", "a b", "it's", "$HOME", '"x"']


def test_every_node_starts_the_same_words_with_its_own_number(tmp_path: Path) -> None:
    script = slurm_script(plan(2), WORDS, log="/runs/a/slurm-%j.log", seconds=90_000, ram_bytes=100 * GIB)
    where = ["--main-address", "node-a", "--main-port", "23456", "--node-rank"]
    assert run(script, tmp_path, 2) == [*WORDS[2:], *where, "0", *WORDS[2:], *where, "1"]
    for line in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=8", "mem=125G", "time=1-07:45:00", "requeue"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --output=/runs/a/slurm-%j.log\n" in script


def test_one_node_needs_no_address(tmp_path: Path) -> None:
    script = slurm_script(plan(1, gpus=1), WORDS, log="/runs/a b\n#SBATCH --uid=0/x", gpu=False)
    assert run(script, tmp_path, 1) == WORDS[2:]
    assert "uid" not in script and "gpus-per-node" not in script and "--mem" not in script
