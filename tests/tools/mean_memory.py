"""What CUDA's mean or sum over the rows of a matrix allocates beside its output.

    vplan rehearse --gpu h100-80gb --no-values --steps 0 -- python -m tests.tools.mean_memory OUT.json sum bfloat16 9x8

Then come ``mean`` or ``sum``, a dtype of torch, and matrices as ROWSxCOLUMNS. OUT.json: a list of bytes, one for each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    out, operator, dtype, *shapes = sys.argv[1:]
    found = []
    for shape in shapes:
        rows, columns = map(int, shape.split("x"))
        matrix = torch.empty(rows, columns, dtype=getattr(torch, dtype), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        reduced = getattr(matrix, operator)(dim=-2)
        found.append(torch.cuda.max_memory_allocated() - before - reduced.nbytes)
    Path(out).write_text(json.dumps(found))
