"""A batch script for Slurm: one launcher on each node, which finds its number and the first node by itself."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

from planner.launch.stop import STOPPED
from planner.spec.plan import Estimate, Plan
from planner.units import GIB

SPARE = 1.25
"""Of the RAM and time that are asked for: an estimate is not a promise, and a job over its limit is killed."""
ENCODING_SECONDS = 1800.0
"""For loading and for encoding the data, which no estimate covers."""
CPUS_PER_GPU = 4
"""A rank's own thread, its loader's, and two that decode clips while data is encoded; more decode faster."""
SIGNAL_SECONDS, SAVE_BYTES_PER_SECOND = 120, 50 * 10**6
"""How long before the time limit a run is asked to stop: Slurm may signal a minute late (sbatch ``--signal``), and the
present step and a checkpoint, to a slow drive, come before the end."""
LONGEST_SIGNAL_SECONDS = 65_535
"""More is an error (sbatch ``--signal``)."""


def slurm_script(
    plan: Plan,
    words: Sequence[str],
    *,
    log: str | None = None,
    steps: int = 0,
    estimate: Estimate | None = None,
    gpu: bool = True,
) -> str:
    """The script for `sbatch` that runs `words` (a `vplan train` without --node-rank, --main-address, --main-port) on
    the plan's nodes. `log`: file of its output, with Slurm's `%j`; `steps`: of the training; `estimate`: of the plan,
    for RAM and time.

    One task a node: the launcher starts that node's ranks (Slurm's sbatch and srun manuals). Before the time limit the
    run is asked for a checkpoint, and the job goes back into the queue, from where it goes on with that.
    """
    machine = plan.machine
    name = re.sub(r"[^A-Za-z0-9._-]", "-", plan.job.model)[:40]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=vplan-{name}",
        f"#SBATCH --nodes={machine.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={machine.gpus}"] if gpu else []),
        f"#SBATCH --cpus-per-task={CPUS_PER_GPU * machine.gpus}",
        *(_limits(estimate, steps) if estimate else []),
        f"#SBATCH --signal=USR1@{_signal_seconds(estimate)}",
        *([f"#SBATCH --output={log}"] if log and _is_plain(log) else []),
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "# Add what your cluster needs: --partition, --account; --time is an estimate.",
        "# vplan train begins with the pre-flight checks on each node, and ends the job where one fails.",
        "set -euo pipefail",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since Slurm 22.05 srun does not take it from sbatch",
        "code=0",
        "",
    ]
    requeue = [
        "",
        f'if [ "$code" = {STOPPED} ]; then  # stopped before the time limit, after a checkpoint',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
        "",
    ]
    if machine.nodes == 1:
        return "\n".join([*lines, f"srun {shlex.join(words)} || code=$?", *requeue])
    return "\n".join([
        *lines,
        'main=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "port=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node must not meet",
        f"words=({shlex.join(words)})",
        """srun --kill-on-bad-exit=1 bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' vplan \\""",
        '    "${words[@]}" --main-address "$main" --main-port "$port" || code=$?',
        *requeue,
    ])  # fmt: skip


def _limits(estimate: Estimate, steps: int) -> list[str]:
    """The RAM of a node and the time of the job, by the estimate."""
    seconds = steps * _step_seconds(estimate)
    # The signal's lead comes on top: a job that is shorter than that would be asked to stop as soon as it starts.
    limit = SPARE * seconds + ENCODING_SECONDS + _signal_seconds(estimate)
    return [
        f"#SBATCH --mem={math.ceil(SPARE * estimate.host_ram_bytes / GIB)}G",
        *([f"#SBATCH --time={_time(limit)}"] if seconds else []),
    ]


def _signal_seconds(estimate: Estimate | None) -> int:
    if estimate is None:
        return SIGNAL_SECONDS
    lead = SIGNAL_SECONDS + 2 * _step_seconds(estimate) + estimate.disk_bytes / SAVE_BYTES_PER_SECOND
    return min(math.ceil(lead), LONGEST_SIGNAL_SECONDS)


def _step_seconds(estimate: Estimate) -> float:
    return estimate.step_seconds_high or estimate.step_seconds


def _time(seconds: float) -> str:
    """As Slurm writes it: `days-hours:minutes:00`."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def _is_plain(path: str) -> bool:
    """Whether a path can stand in a line that no shell reads: not all versions of Slurm know quotes there."""
    return bool(re.fullmatch(r"[\w./%+=:,@~-]+", path))
