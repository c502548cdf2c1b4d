"""Pinned host RAM, which a GPU can copy from and to while it computes, in exactly the size that is asked for.

torch's own pinned memory is rounded up to powers of two (c10 ``CachingHostAllocator``), which takes up to twice as
much. So ordinary memory is registered with CUDA instead; ``Tensor.is_pinned`` and asynchronous copies ask CUDA, which
treats both alike.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import Tensor

from planner.errors import VplanError
from planner.units import format_gib

MEMORY_ALLOCATION = 2
"""cudaErrorMemoryAllocation (CUDA Runtime API, cudaError_t)."""


def pinned_tensor(nbytes: int, pinned: bool) -> Tensor:
    """A tensor of `nbytes` bytes in host RAM; ``pinned`` needs a GPU.

    Raises a MemoryError if host RAM, or what of it may be pinned, is too small, and a VplanError for other errors of
    CUDA.
    """
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    if pinned and nbytes:
        pin(buffer)
    return buffer


def pin(buffer: Tensor) -> None:
    """Pins a tensor in host RAM where it is, until its storage is freed. Raises as `pinned_tensor` does."""
    storage = buffer.untyped_storage()
    nbytes = storage.nbytes()
    code = int(torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), nbytes, 0))
    if code:
        fault = f"CUDA could not pin {format_gib(nbytes)} of host RAM (error {code})"
        if code == MEMORY_ALLOCATION:
            raise MemoryError(fault)
        raise VplanError(fault, "raise the limit (ulimit -l), or keep less in host RAM")
    weakref.finalize(storage, _unregister, storage.data_ptr())


def _unregister(address: int) -> None:
    with contextlib.suppress(RuntimeError):  # at the end of a process the driver may be gone already
        torch.cuda.cudart().cudaHostUnregister(address)
