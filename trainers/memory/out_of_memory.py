"""Classifies errors that mean out of memory: of the GPU or of the host."""

from __future__ import annotations

import traceback

import torch


def out_of_memory(error: BaseException) -> str | None:
    """``oom`` (GPU) or ``host-oom`` if the error means that memory ran out; None for any other error."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate" in text:
        return "host-oom"
    if "CUDA error: out of memory" in text:
        return "host-oom" if _while_pinning(error) else "oom"
    return "oom" if "CUBLAS_STATUS_ALLOC_FAILED" in text or "CUDNN_STATUS_ALLOC_FAILED" in text else None


def _while_pinning(error: BaseException) -> bool:
    """Whether the error was raised by a call of ``Tensor.pin_memory``, as FSDP2, DeepSpeed and diffusers' group offload
    make them: CUDA gives the same error for pinned host RAM as for the GPU's memory."""
    return any(".pin_memory(" in (frame.line or "") for frame in traceback.extract_tb(error.__traceback__))


def callers(error: BaseException) -> set[str]:
    """The names of all functions in an error's traceback."""
    return {frame.name for frame in traceback.extract_tb(error.__traceback__)}
