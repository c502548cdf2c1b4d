"""What `trainers.recording.op_table` says of CUDA's operators, held against what they allocate on a virtual GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.commands import cli
from planner.units import MIB
from tests.cuda_wheel import CUDA_PYTHON, needs_cuda_wheel
from trainers.recording.op_table import COPYING, KNOWN_SMALL, MATMULS, SAME

pytestmark = needs_cuda_wheel

MODELS = ("wan2.1-t2v-1.3b", "cogvideox-2b", "sd1.5")
SCALAR_BYTES = 512
"""A number beside a tensor becomes a tensor in some overloads."""

SMALL_BYTES = 16 * MIB
"""Of what `KNOWN_SMALL` names, at the shapes below."""

CUBLAS_BYTES = 32 * MIB
"""The first product of a thread makes the workspace of its handle, on Hopper of this size, and it stays."""


def operators(model: str, folder: Path) -> dict[str, dict[str, Any]]:
    """A LoRA's first step, and a sample: what each operator had beyond its inputs and outputs."""
    frames = () if model == "sd1.5" else ("--frames", "9")
    plan, out = folder / "plan.toml", folder / "seen.json"
    options = ("--gpu", "h100-80gb", *frames, "--gradient-checkpointing", "full", "--validation-mode", "on")
    assert CliRunner().invoke(cli, ["estimate", model, *options, "-o", str(plan)]).exit_code == 0
    script = [CUDA_PYTHON, "-m", "tests.tools.operator_memory", str(plan), str(out)]
    rehearse = ["--gpu", "h100-80gb", "--no-values", "--steps", "0", "--python", CUDA_PYTHON, "--", *script]
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, str(root / "vplan.py"), "rehearse", *rehearse],
        cwd=root,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},  # blocks as large as what is asked
        check=True,
        capture_output=True,
    )
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("model", MODELS)
def test_operators_allocate_what_the_table_says(model: str, tmp_path: Path) -> None:
    seen = operators(model, tmp_path)
    most = {name: entry["most_bytes"] for name, entry in seen.items()}
    outputs_alone = seen.keys() & (SAME - MATMULS)
    assert len(outputs_alone) > 30
    assert not {name: most[name] for name in outputs_alone if most[name] > SCALAR_BYTES}
    assert not {name: most[name] for name in seen.keys() & MATMULS if most[name] > CUBLAS_BYTES}
    assert not {name: most[name] for name in seen.keys() & KNOWN_SMALL.keys() - COPYING if most[name] > SMALL_BYTES}
    for name in seen.keys() & COPYING:
        assert most[name] <= seen[name]["scattered_bytes"] + SMALL_BYTES, name
