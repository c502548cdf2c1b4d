"""A batch script for Slurm: one launcher on each node, which finds its number and the first node by itself."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

from planner.spec.plan import Plan
from planner.units import GIB

SPARE = 1.25
"""Of the RAM and time that are asked for: an estimate is not a promise, and a job over its limit is killed."""
ENCODING_SECONDS = 1800.0
"""For loading and for encoding the data, which no estimate covers."""


def slurm_script(
    plan: Plan,
    words: Sequence[str],
    *,
    log: str | None = None,
    seconds: float | None = None,
    ram_bytes: int | None = None,
    gpu: bool = True,
) -> str:
    """The script for `sbatch` that runs `words` (a `vplan train` without --node-rank, --main-address, --main-port) on
    the plan's nodes. `log`: file of its output, with Slurm's `%j`; `seconds`: of the training; `ram_bytes`: of a node.

    One task a node: the launcher starts that node's ranks (Slurm's sbatch and srun manuals). A job that is put back
    into the queue goes on from its last checkpoint.
    """
    machine = plan.machine
    name = re.sub(r"[^A-Za-z0-9._-]", "-", plan.job.model)[:40]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=vplan-{name}",
        f"#SBATCH --nodes={machine.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={machine.gpus}"] if gpu else []),
        *([f"#SBATCH --mem={math.ceil(SPARE * ram_bytes / GIB)}G"] if ram_bytes else []),
        *([f"#SBATCH --time={_time(SPARE * seconds + ENCODING_SECONDS)}"] if seconds else []),
        *([f"#SBATCH --output={log}"] if log and _is_plain(log) else []),
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "# Add what your cluster needs: --partition, --account, --cpus-per-task; --time is an estimate.",
        "set -euo pipefail",
        "",
    ]
    if machine.nodes == 1:
        return "\n".join([*lines, f"srun {shlex.join(words)}", ""])
    return "\n".join([
        *lines,
        'main=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "port=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node must not meet",
        f"words=({shlex.join(words)})",
        """srun --kill-on-bad-exit=1 bash -c 'exec "$@" --node-rank "$SLURM_NODEID"' vplan \\""",
        '    "${words[@]}" --main-address "$main" --main-port "$port"',
        "",
    ])  # fmt: skip


def _time(seconds: float) -> str:
    """As Slurm writes it: `days-hours:minutes:00`."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def _is_plain(path: str) -> bool:
    """Whether a path can stand in a line that no shell reads: not all versions of Slurm know quotes there."""
    return bool(re.fullmatch(r"[\w./%+=:,@~-]+", path))
