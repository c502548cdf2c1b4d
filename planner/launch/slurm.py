"""A batch script for Slurm: one launcher per node, with node rank and main address taken from Slurm."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

from planner.launch.stop import STOPPED
from planner.spec.plan import Estimate, Plan
from planner.units import GIB

SPARE = 1.25
"""Safety factor on the RAM and time requested: estimates can be low, and a job over its limit is killed."""
ENCODING_SECONDS = 1800.0
"""Time for loading and for encoding the data, which estimates do not cover."""
CPUS_PER_GPU = 4
"""The rank's main thread, its loader's, and two that decode clips while data is encoded; more decode faster."""
SIGNAL_SECONDS, SAVE_BYTES_PER_SECOND = 120, 50 * 10**6
"""How long before the time limit a run is asked to stop, plus the time for steps and for a checkpoint, at the rate of a
slow drive: Slurm may signal a minute late (sbatch ``--signal``)."""
LONGEST_SIGNAL_SECONDS = 65_535
"""The most that sbatch ``--signal`` accepts."""


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
    the plan's nodes. `log`: output file, which may contain Slurm's `%j`; `steps`: number of training steps; `estimate`:
    the plan's estimate, from which RAM and time are requested.

    There is one task per node: the launcher starts that node's ranks (Slurm's sbatch and srun manuals). Before the time
    limit, the run is asked to stop with a checkpoint, and the job is requeued and resumes from it.
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
    """The `#SBATCH` lines that request RAM per node and, if `steps` is given, time."""
    seconds = steps * _step_seconds(estimate)
    # Add the lead of the signal: a job that is shorter than it would be asked to stop as soon as it starts.
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
    """A duration in Slurm's format: `days-hours:minutes:00`."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def _is_plain(path: str) -> bool:
    """Whether a path needs no quoting: not all versions of Slurm understand quotes in `#SBATCH` lines."""
    return bool(re.fullmatch(r"[\w./%+=:,@~-]+", path))
