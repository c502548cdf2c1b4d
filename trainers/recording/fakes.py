"""What Python code does to fake CPU tensors is made what it does to real CUDA ones, while a recording runs."""

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
"""Operators that tell the host a number, which no fake tensor has. Prodigy asks for two a parameter, and whether it is
all zero: then it keeps one zero in place of the weights it began at. An adapter's second matrix is, and is recorded as
if it were not; `planner.layout.optimizer.zero_starts` takes that copy out."""


def read(tensor: Tensor) -> float:
    """The number to use where code reads the value of a fake tensor, which has none; what is allocated hardly depends
    on it."""
    return 1.0 if tensor.is_floating_point() else 1


def converted_in_place() -> contextlib.AbstractContextManager[None]:
    """``Module.to`` gives a parameter new data, and lets go of the old unless autograd kept it.

    Fake parameters it would swap instead, which layerwise casting cannot do in the middle of a forward.
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
    """``torch.is_autocast_enabled()`` asks about CUDA when it is not told a device.

    peft's 4-bit layers decide by it whether to cast their input to the adapter's dtype.
    """
    is_enabled = torch.is_autocast_enabled
    return _patched(torch, "is_autocast_enabled", lambda device="cpu": is_enabled(device))


def autocast_to_fp32() -> contextlib.AbstractContextManager[None]:
    """``torch.autocast`` to fp32 as CUDA has it, which casts weights in 16 bits up: on the CPU it turns itself off
    (torch/amp/autocast_mode.py, ``supported_dtype``)."""
    cls = torch.amp.autocast_mode.autocast
    make = cls.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it turns itself off
            make(self, device_type, dtype, enabled, *args, **kwargs)
        if dtype is torch.float32:
            self._enabled = enabled

    return _patched(cls, "__init__", init)


def dropout(value: Tensor, p: float, train: bool) -> Tensor:
    """``aten::dropout`` as CUDA trains with it: one fused operator that keeps a mask of a byte per number, where the
    CPU keeps noise in the input's format (native/Dropout.cpp, is_fused_kernel_acceptable)."""
    return torch.ops.aten.native_dropout(value, p, train)[0] if train and 0 < p < 1 else value


@contextlib.contextmanager
def views_as_eagerly() -> Iterator[None]:
    """Views of fake tensors have the strides that those of real ones have.

    They differ where a dimension has one element, a batch of one sample: a view of (1, rows, channels) as an image is
    channels last to the fake mode (torch/_refs, ``_reshape_view_helper``), but not to ``cat``, which joins two real
    ones (ATen/TensorUtils.cpp, computeStride) to a contiguous one: the norm behind it has nothing to copy.
    """
    view = torch.ops.aten.view.default
    of_the_fake_mode = op_implementations_dict.pop(view)  # without it torch asks the operator itself
    FakeTensorMode.cache_clear()
    try:
        yield
    finally:
        op_implementations_dict[view] = of_the_fake_mode
        FakeTensorMode.cache_clear()


ARITHMETIC = frozenset(getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div"))


def with_number(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The result of arithmetic between one image that is channels last and a number, with the strides of a real one.

    The number is an operand without dimensions, so that TensorIterator leaves the stride that a batch of one sample has
    (ATen/TensorIterator.cpp, ``compute_fast_setup_type``); the fake mode makes that of a batch (torch/_prims_common,
    ``compute_elementwise_output_logical_to_physical_perm``). What follows is said in `views_as_eagerly`.
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
