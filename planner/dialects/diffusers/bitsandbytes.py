"""The file of ``--bnb_quantization_config_path``: how the scripts that have the flag load the frozen base
(examples/dreambooth/train_dreambooth_lora_qwen_image.py ``BitsAndBytesConfig(**config_kwargs)``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.dialects.base.bindings import Settings
from planner.errors import VplanError, quoted

BNB = "--bnb_quantization_config_path"

BASE, DOUBLE = "bnb:base", "bnb:double"
"""The settings that hold what the file makes of the base, and whether its blocks' scales are quantised once more."""

WITHOUT_EFFECT = {"bnb_4bit_compute_dtype", "quant_method"}
"""Keys that take no memory: the script itself sets what the products are computed in."""


def quantised_base(document: Mapping[str, Any] | None, path: str) -> Settings:
    """The format of the base, as a plan calls it, and whether it is double quantised. Raises a VplanError where the
    file is not there, or asks for what is not recorded."""
    if document is None:
        fault = f"{BNB} {quoted(path)} is not here, and it says how the base is stored"
        raise VplanError(fault, "pass the file behind the script, or run vplan where it lies")
    wanted = {name: value for name, value in document.items() if name not in WITHOUT_EFFECT and value is not False}
    double = wanted.get("bnb_4bit_use_double_quant") is True and bool(wanted.pop("bnb_4bit_use_double_quant"))
    quantised, kind = wanted.pop("load_in_4bit", None), wanted.pop("bnb_4bit_quant_type", "fp4")
    if quantised is True and kind == "nf4" and not wanted:
        return {BASE: "nf4", DOUBLE: double}
    refused = wanted or ({"bnb_4bit_quant_type": kind} if quantised is True else {"load_in_4bit": quantised})
    name, value = next(iter(refused.items()))
    fault = f"{name} = {quoted(value)} in {quoted(path)} is not estimated"
    raise VplanError(fault, 'estimated is {"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}')
