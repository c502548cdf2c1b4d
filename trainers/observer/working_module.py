"""Which module of the model a stack of Python frames is at work in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import FrameType
from typing import Any

RECOMPUTING = ("recompute_fn", "unpack_hook", "backward")
"""Functions of torch/utils/checkpoint.py in which a forward runs again."""

_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")
_AUTOGRAD = os.path.join("torch", "autograd", "graph.py")


def working_moment(torch: Any, frame: FrameType | None, model: Any) -> str | None:
    """What is going on in words, such as "forward of blocks.12.attn"; None outside of any module and backward pass.

    ``frame``: the innermost frame of the program, or of the thread in which torch's autograd runs a backward.
    ``model``: the one in training, which names its modules; None before its first forward.
    """
    inner = outer = None
    recomputes = False
    for entry in _outwards(frame):
        name, file = entry.f_code.co_name, entry.f_code.co_filename
        if name == "_engine_run_backward" and file.endswith(_AUTOGRAD):
            if inner is None:
                return "backward"
            break  # what lies around a backward is no part of it
        recomputes |= name in RECOMPUTING and file.endswith(_CHECKPOINT)
        if name in ("_call_impl", "forward"):
            module = entry.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                inner, outer = inner or module, module
    if inner is None or outer is None:
        return None
    path = _path(model, inner) or _path(outer, inner) or type(inner).__name__
    return f"{'recompute' if recomputes else 'forward'} of {path}"


def _path(model: Any, inner: Any) -> str:
    """The name of a module in a model; empty for the model itself, and for one that it does not have."""
    names = model.named_modules() if model is not None else ()
    return next((path for path, module in names if module is inner), "")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
