"""Tests that run on a virtual GPU need a Python with PyTorch's CUDA wheel; `ci/cuda-python DIR` makes one.

VPLAN_CUDA_PYTHON names it. Without it these tests are skipped by name, unless VPLAN_CUDA_TESTS=1 says that they must
run, as in CI.
"""

from __future__ import annotations

import os

import pytest

CUDA_PYTHON = os.environ.get("VPLAN_CUDA_PYTHON", "")

MUST_RUN = os.environ.get("VPLAN_CUDA_TESTS") == "1"

needs_cuda_wheel = pytest.mark.skipif(
    not CUDA_PYTHON and not MUST_RUN,
    reason="needs VPLAN_CUDA_PYTHON: a Python with PyTorch's CUDA wheel (no GPU); ci/cuda-python makes one",
)
