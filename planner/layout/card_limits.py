"""What torch cannot do on a card whatever its memory: formats, kernels and versions made for newer ones.

A search leaves these out; who types one is told.
"""

from __future__ import annotations

from planner.catalog.profiles import GpuProfile
from planner.errors import NotEstimatedError
from planner.layout.attention_kernel import FLASH_FROM
from planner.spec.configuration import Configuration

BF16_ATTENTION_FROM = (8, 0)
"""Before it memory-efficient attention takes fp16 and fp32 alone, and there is no other kernel but the math path
(ATen/native/transformers/cuda/sdp_utils.cpp, ``less_than_sm80_mem_efficient_dtypes``)."""

TRITON_FROM = (7, 0)
"""Inductor's kernels are Triton's ("too old to be supported by the triton GPU compiler", vllm-project/vllm#13255)."""

CUDA_13_FROM = (7, 5)
"""CUDA 13 has no older cards, and wheels of CUDA 12.8 and later none of Pascal (pytorch#157517)."""

LAST_OF_CUDA_12 = (2, 14)
"""The last torch with wheels of CUDA 12.6, which alone are built for Pascal and Volta (pytorch#190385)."""


def refuse_on_card(configuration: Configuration, gpu: GpuProfile) -> None:
    """Raises a NotEstimatedError for what runs on this card in another way than it was recorded, or not at all."""
    strategy, torch = configuration.strategy, configuration.machine.torch
    if gpu.capability < BF16_ATTENTION_FROM and configuration.computes_in == "bf16":
        fault = f"{gpu.title} has no bf16: torch computes attention in it by the math path, which is not estimated"
        raise NotEstimatedError(fault, "use --compute-dtype fp16")
    if gpu.capability < FLASH_FROM and strategy.attention in ("flash", "cudnn"):
        fault = f"{gpu.title} has no {strategy.attention} attention, which needs Ampere or newer"
        raise NotEstimatedError(fault, "use --attention sdpa")
    if gpu.capability < TRITON_FROM and strategy.compile != "none":
        raise NotEstimatedError(f"{gpu.title} is too old for torch.compile", "use --compile none")
    version = tuple(int(part) for part in torch.split(".")[:2]) if torch else LAST_OF_CUDA_12
    if gpu.capability < CUDA_13_FROM and version > LAST_OF_CUDA_12:
        fault = f"torch {torch} is not built for {gpu.title}"
        raise NotEstimatedError(fault, "use torch 2.14 or older, of CUDA 12.6")
