"""Host RAM that a GPU can copy from and to while it computes, of just the size that is asked for.

torch's own pinned memory comes in powers of two (c10 ``CachingHostAllocator``), which takes up to twice as much. So
ordinary memory is registered with CUDA; ``Tensor.is_pinned`` and asynchronous copies ask CUDA, and know no difference.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor

from planner.errors import VplanError
from planner.units import format_gib


def pinned_tensor(nbytes: int, pinned: bool) -> Tensor:
    """A tensor of `nbytes` bytes in host RAM, pinned where asked and where there is a GPU. Raises a VplanError when
    CUDA cannot pin so much."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if pinned and nbytes:
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0))
        if code:
            fault = f"CUDA could not pin {format_gib(nbytes)} of host RAM (error {code})"
            raise VplanError(fault, "raise the limit (ulimit -l), or keep less in host RAM")
        weakref.finalize(buffer, _unregister, buffer.data_ptr())
    return buffer


def _unregister(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # the driver is gone at the end of a process
        torch.cuda.cudart().cudaHostUnregister(address)
