"""Which kernel torch's attention takes for a boolean mask of rows and columns, and what the mask takes until then.

    vplan rehearse --gpu h100-80gb --no-values --steps 0 -- python -m tests.tools.mask_memory OUT.json LENGTH

OUT.json: ``kernel``, autograd's name for it; ``allocated``, the bytes of every allocation at least as large as the
mask in bf16, in order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

if __name__ == "__main__":
    length = int(sys.argv[2])
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda")
    query, key, value = (
        torch.empty(1, 1, length, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)
    )
    scaled_dot_product_attention(query, key, value, attn_mask=mask)  # the allocator's first
    torch.cuda.memory._record_memory_history()
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    taken = [entry["size"] for entry in trace if entry["action"] == "alloc" and entry["size"] >= 2 * mask.numel()]
    kernel = out.grad_fn.name()
    Path(sys.argv[1]).write_text(json.dumps({"kernel": kernel, "allocated": taken}))
