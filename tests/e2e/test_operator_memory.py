"""`trainers.recording.op_table` compared with what CUDA operators allocate on a virtual GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.catalog import card_lookup
from planner.commands import cli
from planner.layout import attention_kernel
from planner.layout.optimizer.reduction_workspace import INDEXED_BYTES, column_mean_bytes
from planner.spec.job import Machine, Strategy
from planner.units import MIB
from tests.cuda_wheel import CUDA_PYTHON, needs_cuda_wheel
from trainers.recording.op_table import COPYING, KNOWN_SMALL, MATMULS, SAME

pytestmark = needs_cuda_wheel

MODELS = ("wan2.1-t2v-1.3b", "cogvideox-2b", "sd1.5")
SCALAR_BYTES = 512
"""A number passed next to a tensor becomes a tensor in some overloads."""

SMALL_BYTES = 16 * MIB
"""Limit for the operators in `KNOWN_SMALL`, at the shapes below."""

CUBLAS_BYTES = 32 * MIB
"""The first matrix product of a thread allocates its cuBLAS workspace, which has this size on Hopper and stays."""


def operators(model: str, folder: Path) -> dict[str, dict[str, Any]]:
    """A LoRA's first step and a sample: the bytes that each operator allocated beyond its inputs and outputs."""
    frames = () if model == "sd1.5" else ("--frames", "9")
    plan, out = folder / "plan.toml", folder / "seen.json"
    options = ("--gpu", "h100-80gb", *frames, "--gradient-checkpointing", "full", "--validation-mode", "on")
    assert CliRunner().invoke(cli, ["estimate", model, *options, "-o", str(plan)]).exit_code == 0
    rehearse("h100-80gb", "tests.tools.operator_memory", str(plan), str(out))
    found: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return found


def rehearse(gpu: str, module: str, *arguments: str) -> None:
    """Runs a module of these tests on a virtual GPU."""
    script = [CUDA_PYTHON, "-m", module, *arguments]
    options = ["--gpu", gpu, "--no-values", "--steps", "0", "--python", CUDA_PYTHON, "--", *script]
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, str(root / "vplan.py"), "rehearse", *options],
        cwd=root,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},  # blocks as large as what is asked
        check=True,
        capture_output=True,
    )


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
        assert 0 <= most[name] - seen[name]["copied_bytes"] <= SMALL_BYTES, name


MATRICES = (
    (2048, 8192),
    (8192, 2048),
    (36864, 4096),
    (1024, 4096),
    (512, 4096),
    (8960, 1536),
    (5120, 13824),
    (1000, 1000),
    (640, 6),
    (3000, 1001),
    (4096, 64),
    (1536, 1536),
    (2432, 9728),
    (4608, 3840),
    (4608 * 30, 128),
    (4680, 1536),
    (2**18, 8192),  # over 2 GiB: read in parts
    (2**17, 4096),
)


@pytest.mark.parametrize(
    ("gpu", "reductions"),
    [
        ("h100-80gb", "mean-float32,sum-float32,sum-bfloat16"),
        ("rtx-4090", "mean-float32"),
        ("t4", "mean-float32"),
    ],
)
def test_a_reduction_of_rows_takes_the_workspace_that_the_layout_says(
    gpu: str, reductions: str, tmp_path: Path
) -> None:
    """In addition come 4 bytes per block for counters, and for a 16-bit sum that is read in parts the fp32 partial
    results (ATen/native/cuda/Reduce.cuh ``AccumulationBuffer``): 32 KiB here, which are not counted."""
    out = tmp_path / "bytes.json"
    rehearse(gpu, "tests.tools.mean_memory", str(out), reductions, *(f"{rows}x{columns}" for rows, columns in MATRICES))
    taken_by = json.loads(out.read_text())
    assert list(taken_by) == reductions.split(",")
    for reduction, found in taken_by.items():
        number_bytes = 4 if reduction.endswith("float32") else 2
        said = [column_mean_bytes(*shape, card_lookup.gpu(gpu), number_bytes) for shape in MATRICES]
        assert sum(map(bool, said)) >= 8
        for shape, workspace, taken in zip(MATRICES, said, found, strict=True):
            parts = number_bytes < 4 and number_bytes * shape[0] * shape[1] > INDEXED_BYTES
            assert workspace <= taken <= workspace + 2 * SCALAR_BYTES + 4 * shape[1] * parts, (reduction, shape)


@pytest.mark.parametrize(
    ("gpu", "kernel", "copies"),
    [("h100-80gb", "Cudnn", 0), ("b200", "Cudnn", 0), ("rtx-4090", "Efficient", 1), ("rtx-5090", "Efficient", 1)],
)
def test_only_memory_efficient_attention_pads_a_mask(gpu: str, kernel: str, copies: int, tmp_path: Path) -> None:
    """A boolean mask is converted to numbers; if its rows are not a multiple of 8, most cards' kernel copies it."""
    out, length = tmp_path / "mask.json", 2055
    rehearse(gpu, "tests.tools.mask_memory", str(out), str(length))
    seen = json.loads(out.read_text())
    assert seen["kernel"].startswith(f"ScaledDotProduct{kernel}Attention")
    assert seen["allocated"] == [2 * length * length, *[2 * length * (length + -length % 8)] * copies]
    named = attention_kernel.kernel(
        Strategy(), Machine(gpu=gpu), card_lookup.gpu(gpu), ["_scaled_dot_product_efficient_attention"]
    )
    assert named == kernel.lower()
