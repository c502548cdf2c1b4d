"""Number formats and optimizers of SimpleTuner, which follow from each other, both ways, read at bc8e6ab."""

from __future__ import annotations

from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.simpletuner.defaults import is_true
from planner.dialects.simpletuner.models import CONFIG, family_of, of
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.simpletuner import QUANTISED_WHOLE, QUANTO, QUANTO_WHOLE, TORCHAO_WHOLE
from planner.spec.job import QUANTISED

OPTIMIZERS = {
    "adamw_bf16": "adamw",
    "torch-adamw": "adamw",
    "optimi-adamw": "adamw",
    "bnb-adamw8bit": "adamw-8bit",
    "bnb-adamw8bit-paged": "adamw-8bit-paged",
    "bnb-lion8bit-paged": "adamw-8bit-paged",
    "optimi-lion": "lion",
    "prodigy": "prodigy",
}
LOOPS = "adamw_bf16"
"""Steps one parameter after another (helpers/training/optimizers/adamw_bfloat16)."""

FP32_ADAPTERS = ("optimi-", "torch-")
"""Beginnings of the optimizers that train adapters of a quantised base in fp32 (helpers/training/trainer.py); LyCORIS'
are cast behind that (``move_models``)."""

BASES = {
    "no_change": "",
    "int8-quanto": "int8",
    "int8-torchao": "int8",
    "fp8-quanto": "fp8",
    "fp8-torchao": "fp8",
    "fp8wo-torchao": "fp8",
    "nf4-bnb": "nf4",
}
"""``base_model_precision`` -> how the frozen base is stored; empty: as the mixed precision is."""

WRITTEN = {"int8": "int8-torchao", "fp8": "fp8wo-torchao", "nf4": "nf4-bnb"}
"""The other way. ``fp8-torchao`` rounds activations too, which takes a card of compute capability 8.9
(``Float8DynamicActivationFloat8WeightConfig``, helpers/training/quantisation/__init__.py)."""

STORED = {("ideogram", ""): "fp8", ("ideogram", "fp8"): "fp8", ("ideogram", "nf4"): "nf4"}
"""(``model_family``, ``model_flavour``) -> how its published weights are stored, and stay unless a
``base_model_precision`` or ``ideogram_fp8_base_upcast`` asks for others (helpers/models/ideogram/model.py
``load_model``)."""


def formats_of(settings: Settings) -> Fields:
    """The fields `weights_dtype`, `adapter_dtype` and `autocast`. Adapters are in the mixed precision's format, and
    their AdamW is made for it (helpers/training/trainer.py)."""
    precision = str(of(settings, "mixed_precision"))
    half = precision if precision in ("bf16", "fp16") else "fp32"
    base = str(of(settings, "base_model_precision"))
    if base not in BASES:
        raise VplanError(f"base_model_precision {quoted(base)} is not priced", f"priced: {', '.join(BASES)}")
    which = family_of(settings), str(of(settings, "model_flavour") or "")
    stored = "" if BASES[base] or is_true(of(settings, "ideogram_fp8_base_upcast")) else STORED.get(which, "")
    wide = str(of(settings, "optimizer")).startswith(FP32_ADAPTERS) and str(of(settings, "lora_type")) != "lycoris"
    sixteen = "fp32" if wide and BASES[base] else half
    return {
        "weights_dtype": BASES[base] or stored or half,
        "adapter_dtype": sixteen,
        "autocast": half if half != "fp32" else "none",
    }


def write_formats(fields: Fields) -> Settings:
    """The settings of the number formats. Raises an InexpressibleError for others."""
    weights, version = fields["weights_dtype"], fields.get("version") or ""
    refused = _refused_formats(fields)
    if refused:
        raise InexpressibleError(*refused)
    settings: Settings = {f"{CONFIG}mixed_precision": "bf16"}
    if _is_quantised(fields):
        by_quanto = weights == "int8" and version in (QUANTO, QUANTO_WHOLE)
        settings[f"{CONFIG}base_model_precision"] = "int8-quanto" if by_quanto else WRITTEN[weights]
        if weights != "nf4" and version not in (QUANTISED_WHOLE, TORCHAO_WHOLE, QUANTO_WHOLE):
            settings[f"{CONFIG}quantize_via"] = "cpu"  # else the model lies on the GPU whole before it is quantised
    elif fields["model"] == STORED_MODEL and weights not in QUANTISED:
        settings[f"{CONFIG}ideogram_fp8_base_upcast"] = True
    return settings


def _refused_formats(fields: Fields) -> list[UnsupportedValue]:
    weights, adapter, lora = fields["weights_dtype"], fields["adapter_dtype"], fields["method"] == "lora"
    refused = []
    if fields["autocast"] != "bf16":
        why = "its optimizers ask for mixed_precision bf16 (simpletuner/helpers/configuration/cmd_args.py)"
        refused.append(UnsupportedValue("autocast", fields["autocast"], "bf16", why))
    if weights != "bf16" and not (lora and weights in WRITTEN):
        why = "the base is in 16 bits, or quantised" if lora else "what is trained whole is in mixed_precision's own"
        refused.append(UnsupportedValue("weights_dtype", weights, "bf16", why))
    expected = "fp32" if _is_quantised(fields) and word_of(fields).startswith(FP32_ADAPTERS) else "bf16"
    if lora and adapter != expected:
        why = "adapters are in mixed_precision's format, or fp32 over a quantised base with torch-adamw and optimi-lion"
        refused.append(UnsupportedValue("adapter_dtype", adapter, expected, why))
    return refused


STORED_MODEL = "ideogram-4"
"""Ours of `STORED`."""


def _is_quantised(fields: Fields) -> bool:
    """Whether the base is quantised as it is loaded, and not stored so."""
    weights = fields["weights_dtype"]
    stored = fields["model"] == STORED_MODEL and weights in STORED.values()
    return fields["method"] == "lora" and weights in WRITTEN and not stored


def optimizer_of(settings: Settings) -> Fields:
    """The fields `optimizer` and `optimizer_step`."""
    name = str(of(settings, "optimizer"))
    if name not in OPTIMIZERS:
        raise VplanError(f"SimpleTuner's optimizer {quoted(name)} is not priced", f"priced: {', '.join(OPTIMIZERS)}")
    return {"optimizer": OPTIMIZERS[name], "optimizer_step": "loop" if name == LOOPS else "foreach"}


def word_of(fields: Fields) -> str:
    """``optimizer``; empty for one that it has not. Of AdamW the one that its documentation recommends, which is made
    for parameters in bf16."""
    if fields["optimizer"] == "adamw" and fields["adapter_dtype"] == "fp32" and _is_quantised(fields):
        return "torch-adamw"
    return next((theirs for theirs, ours in OPTIMIZERS.items() if ours == fields["optimizer"]), "")


def write_optimizer(fields: Fields) -> Settings:
    """The setting of the optimizer. Raises an InexpressibleError for others, and for another way of stepping."""
    word, step = word_of(fields), fields["optimizer_step"]
    if not word:
        known = ", ".join(dict.fromkeys(OPTIMIZERS.values()))
        raise InexpressibleError(UnsupportedValue("optimizer", fields["optimizer"], "adamw", f"priced: {known}"))
    expected = "loop" if word == LOOPS else "foreach"
    if step != expected:
        how = "one parameter after another" if expected == "loop" else "over all parameters at once"
        raise InexpressibleError(UnsupportedValue("optimizer_step", step, expected, f"{word} steps {how}"))
    return {f"{CONFIG}optimizer": word}
