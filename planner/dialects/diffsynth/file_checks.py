"""What DiffSynth-Studio's training scripts end a run for before the first step, read at fed7b18."""

from __future__ import annotations

from collections.abc import Iterator

from planner.dialects.base.bindings import Remark, Settings
from planner.dialects.diffsynth.names import AT, PREQUANTISED

WITHOUT_GRADIENTS = tuple(
    f"torchao_{name}"
    for name in ("int4_w4a16", "int8_w8a8", "fp8_w8a8", "int4_w4a8", "mxfp8_w8a8", "mxfp4_w4a4", "nvfp4_w4a4")
)
"""Methods whose layers pass no gradients on (diffsynth/core/quant/backends/torchao.py:30
``_DIFFERENTIABLE_CONFIGS``, :153)."""

QUANT, FP8, OFFLOADED = "--quant_options", "--fp8_models", "--offload_models"


def stops(settings: Settings) -> Iterator[Remark]:
    """The settings that it refuses, each with the reason. Every entry is asked, a text encoder's too."""
    on_disk = _listed(settings, OFFLOADED) - _listed(settings, FP8)  # fp8 goes first (training_module.py:153)
    for entry in str(settings.get(QUANT) or "").split(";"):
        path, separator, method = entry.rpartition(":")
        name = method.partition("/")[0]
        if entry and not separator:
            why = f"refused: {entry} names no file and method, as FILE:METHOD"
            yield Remark(QUANT, f"{why} ({AT} diffsynth/diffusion/training_module.py:188)")
        elif name in WITHOUT_GRADIENTS:
            why = f"refused with {name}, which passes no gradients on"
            yield Remark(QUANT, f"{why} ({AT} diffsynth/diffusion/training_module.py:194)")
        elif method and path in on_disk and _is_quantised_here(path):
            yield Remark(OFFLOADED, f"refused with {QUANT} of the same file ({AT} diffsynth/core/loader/model.py:36)")


def _listed(settings: Settings, flag: str) -> set[str]:
    return set(str(settings.get(flag) or "").split(","))


def _is_quantised_here(path: str) -> bool:
    """Whether a file is told by its repository to come in bf16: of one that is quantised already the method is ignored,
    and what a local file is its name does not say."""
    repository, separator, _ = path.partition(":")
    return bool(separator) and repository.rpartition("/")[2] not in PREQUANTISED
