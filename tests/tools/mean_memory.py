"""What CUDA's mean or sum over the rows of a matrix allocates beside its output.

    vplan rehearse --gpu h100-80gb --no-values --steps 0 -- python -m tests.tools.mean_memory OUT.json sum-bfloat16 9x8

Then come ``mean`` or ``sum`` with a dtype of torch, more of them after commas, and matrices as ROWSxCOLUMNS. OUT.json:
for each of them a list of bytes, one for each matrix.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch


def most_bytes(operator: str, dtype: str, shape: str) -> int:
    """What one reduction has beside its output."""
    rows, columns = map(int, shape.split("x"))
    matrix = torch.empty(rows, columns, dtype=getattr(torch, dtype), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reduced = getattr(matrix, operator)(dim=-2)
    most: int = torch.cuda.max_memory_allocated() - before - reduced.nbytes
    return most


if __name__ == "__main__":
    out, reductions, *shapes = sys.argv[1:]
    found = {each: [most_bytes(*each.split("-"), shape) for shape in shapes] for each in reductions.split(",")}
    Path(out).write_text(json.dumps(found))
