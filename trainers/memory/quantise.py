"""Frozen bases in 8 and 4 bits, quantised by the libraries that trainers use.

* ``fp8``: diffusers' layerwise casting. A layer's weights are cast to the compute dtype before its forward and back
  after it. Autograd keeps the copy that a matrix product used, so without checkpointing all copies live until backward.
* ``int8``: torchao's weight-only int8, one scale per row (diffusers ``TorchAoConfig``, peft ``TorchaoLoraLinear``,
  SimpleTuner ``int8-torchao``). It multiplies with a copy in the compute dtype, which autograd keeps likewise.
* ``nf4``: bitsandbytes' 4-bit layers with one constant per 64 weights and the constants quantised to 8 bits
  (SimpleTuner ``nf4-bnb`` and DiffSynth-Studio ``bitsandbytes_nf4`` both turn double quantisation on). Backward
  dequantises a weight again.

As in diffusers, every linear layer is quantised except those of ``_keep_in_fp32_modules``; layerwise casting also skips
norms, embeddings and the modules that each model class names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.errors import VplanError


def prepare(model: nn.Module, weights_dtype: str, compute_dtype: torch.dtype, *, casts_layerwise: bool) -> None:
    """Prepares a half-precision model on ``meta`` to be stored in a quantised format.

    Call it before the adapter is added: layerwise casting would cast the adapter too, and peft chooses its layer by the
    base layer. ``casts_layerwise``: whether the model can train in fp8 (`planner.catalog.traits.Traits.fp8_base`).
    """
    if weights_dtype == "fp8":
        if not casts_layerwise:
            fault = "fp8 cannot train a UNet: backward of its convolutions would read weights that were cast back"
            raise VplanError(fault, "use --weights-dtype int8 or nf4")
        model.enable_layerwise_casting(  # type: ignore[operator]  # diffusers' own method
            storage_dtype=torch.float8_e4m3fn, compute_dtype=compute_dtype
        )
    elif weights_dtype == "int8":
        _prepare_int8(model)
    elif weights_dtype == "nf4":
        _prepare_nf4(model, compute_dtype)
    else:
        fault = f"weights_dtype {weights_dtype} cannot be built: there is no portable 4-bit integer format for training"
        raise VplanError(fault, "use --weights-dtype nf4, which takes the same 4 bits")


def _fp32_modules(model: nn.Module) -> list[str]:
    """The names of modules that stay in fp32 and are not quantised."""
    return list(getattr(model, "_keep_in_fp32_modules", None) or ())


def _prepare_int8(model: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    fp32_modules = _fp32_modules(model)

    def is_quantised(module: nn.Module, name: str) -> bool:
        outside = not any(f"{key}." in f"{name}." for key in fp32_modules)
        return isinstance(module, nn.Linear) and outside

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_quantised)


def _prepare_nf4(model: nn.Module, compute_dtype: torch.dtype) -> None:
    from diffusers import BitsAndBytesConfig
    from diffusers.quantizers.bitsandbytes import replace_with_bnb_linear

    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )
    replace_with_bnb_linear(model, modules_to_not_convert=_fp32_modules(model), quantization_config=config)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what peft asks before it looks at the layers


def is_packed(parameter: Tensor) -> bool:
    """Whether a parameter on ``meta`` will be stored as quantised data (int8 or nf4) rather than as plain numbers."""
    return hasattr(parameter, "qdata") or hasattr(parameter, "compress_statistics")


def store(module: nn.Module, name: str, weight: Tensor) -> None:
    """Stores a half-precision weight in its module, in the format that the module's parameter was prepared for."""
    place = module._parameters[name]
    assert place is not None
    if hasattr(place, "qdata"):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        del weight
        quantize_(module, Int8WeightOnlyConfig())
    elif hasattr(place, "compress_statistics"):
        from bitsandbytes.functional import quantize_4bit

        how = {setting: getattr(place, setting) for setting in ("compress_statistics", "quant_type")}
        packed, state = quantize_4bit(weight, **how)
        stored = nn.Parameter(packed, requires_grad=False)
        stored.quant_state = module.quant_state = state  # type: ignore[attr-defined]  # all that Linear4bit reads
        module._parameters[name] = stored
    else:
        module._parameters[name] = nn.Parameter(weight, requires_grad=place.requires_grad)


class Place(NamedTuple):
    """Where a plain tensor is stored: an attribute of a parameter, or of an object that belongs to it."""

    holder: Any
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that is stored there now."""
        tensor: Tensor = getattr(self.holder, self.attribute)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Replaces the tensor by one of the same shape and dtype, on any device."""
        setattr(self.holder, self.attribute, tensor)


def places(name: str, parameter: Tensor) -> Iterator[tuple[str, Place]]:
    """(name, place) of the plain tensors that hold a parameter: itself, or its integers and their scales."""
    if hasattr(parameter, "qdata"):
        for part in parameter.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # torchao's wraps tensors
            yield f"{name}.{part}", Place(parameter, part)
        return
    yield name, Place(parameter, "data")
    state, prefix = getattr(parameter, "quant_state", None), name
    while state is not None:
        for part in ("absmax", "code", "offset"):
            if getattr(state, part) is not None:
                yield f"{prefix}.{part}", Place(state, part)
        state, prefix = state.state2, f"{prefix}.nested"


def stored_tensors(name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the plain tensors that hold a parameter."""
    for full_name, place in places(name, parameter):
        yield full_name, parameter if place.holder is parameter and place.attribute == "data" else place.tensor


def to_host(parameter: Tensor) -> None:
    """Moves the tensors that hold a parameter to host RAM; the device that the parameter itself reports stays the
    same."""
    for _, place in places("", parameter):
        place.put(place.tensor.cpu())
