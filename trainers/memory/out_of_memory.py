"""Which errors mean that memory ran out, and whose: the GPU's or the host's."""

from __future__ import annotations

import traceback

import torch


def out_of_memory(error: BaseException) -> str | None:
    """``oom`` or ``host-oom`` when an error means that; None for any other."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    # Activations offloaded into pinned host memory: CUDA gives the same error for either memory.
    pinning = "pack_to_cpu" in callers(error)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        return "host-oom"
    if "CUDA error: out of memory" in text:
        return "host-oom" if pinning else "oom"
    return "oom" if "CUBLAS_STATUS_ALLOC_FAILED" in text or "CUDNN_STATUS_ALLOC_FAILED" in text else None


def callers(error: BaseException) -> set[str]:
    """The names of all functions in an error's traceback."""
    return {frame.name for frame in traceback.extract_tb(error.__traceback__)}
