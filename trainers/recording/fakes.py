"""Patches that make Python code treat fake CPU tensors as it treats real CUDA tensors, while a recording runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

READS = frozenset(getattr(torch.ops.aten, name).default for name in ("item", "is_nonzero", "_local_scalar_dense"))
"""Operators that return a value to the host, which no fake tensor has. Prodigy reads two for each parameter, and
whether the parameter is all zero: if so, Prodigy keeps a single zero instead of a copy of the initial weights. An
adapter's second matrix is all zero but is recorded with a copy, which `planner.layout.optimizer.zero_starts` drops."""


def read(tensor: Tensor) -> float:
    """The value returned to code that reads a fake tensor, which has none; allocations hardly depend on it."""
    return 1.0 if tensor.is_floating_point() else 1


def converted_in_place() -> contextlib.AbstractContextManager[None]:
    """A context in which ``Module.to`` replaces the data of parameters, as it does for real ones.

    The data of fake parameters would be swapped instead, which does not work for layerwise casting in the middle of a
    forward.
    """
    return _patched(nn.Module, "_apply", _apply)


def _apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        _apply(child, convert)
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.data = convert(parameter.data)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else convert(buffer)
    return module


def autocast_asked_of_cpu() -> contextlib.AbstractContextManager[None]:
    """A context in which ``torch.is_autocast_enabled()`` without a device is about the CPU instead of CUDA.

    peft's 4-bit layers use it to decide whether to cast their input to the adapter's dtype.
    """
    is_enabled = torch.is_autocast_enabled
    return _patched(torch, "is_autocast_enabled", lambda device="cpu": is_enabled(device))


def autocast_to_fp32() -> contextlib.AbstractContextManager[None]:
    """A context in which ``torch.autocast`` to fp32 works as on CUDA, where it casts 16-bit weights up; on the CPU it
    would disable itself (torch/amp/autocast_mode.py, ``supported_dtype``)."""
    cls = torch.amp.autocast_mode.autocast
    make = cls.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "... is not supported. Disabling autocast."
            make(self, device_type, dtype, enabled, *args, **kwargs)
        if dtype is torch.float32:
            self._enabled = enabled

    return _patched(cls, "__init__", init)


def dropout(value: Tensor, p: float, train: bool) -> Tensor:
    """``aten::dropout`` as CUDA runs it in training: a fused operator that saves a mask of one byte per element. The
    CPU saves noise in the input's dtype (native/Dropout.cpp, is_fused_kernel_acceptable)."""
    return torch.ops.aten.native_dropout(value, p, train)[0] if train and 0 < p < 1 else value


@contextlib.contextmanager
def views_as_eagerly() -> Iterator[None]:
    """A context in which views of fake tensors have the same strides as views of real tensors.

    They differ if a dimension has one element, as in a batch of one sample. A view of (1, rows, channels) as an image
    is channels last in the fake mode (torch/_refs, ``_reshape_view_helper``). A real one is not
    (ATen/TensorUtils.cpp, computeStride), so ``cat`` joins two of them to a contiguous tensor, and the following norm
    has nothing to copy.
    """
    view = torch.ops.aten.view.default
    of_the_fake_mode = op_implementations_dict.pop(view)  # without it torch runs the operator's own meta kernel
    FakeTensorMode.cache_clear()
    try:
        yield
    finally:
        op_implementations_dict[view] = of_the_fake_mode
        FakeTensorMode.cache_clear()


ARITHMETIC = frozenset(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))


def with_number(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """Corrects the strides of a result of arithmetic between a number and a single channels-last image.

    For a real tensor the number is an operand without dimensions, so TensorIterator keeps the stride of the batch
    dimension (ATen/TensorIterator.cpp, ``compute_fast_setup_type``). The fake mode computes a new one
    (torch/_prims_common, ``compute_elementwise_output_logical_to_physical_perm``). The consequence is the one described
    in `views_as_eagerly`.
    """
    if func not in ARITHMETIC or not isinstance(args[1], int | float) or args[0].dim() != 4:
        return out
    image = args[0]
    one_sample = image.shape[0] == 1 and image.is_contiguous(memory_format=torch.channels_last)
    if not one_sample or image.is_contiguous() or image.stride(0) >= image.numel():
        return out
    return out.as_strided(out.shape, image.stride())


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
