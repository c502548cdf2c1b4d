"""Which attention kernel torch's ``scaled_dot_product_attention`` runs on a card, what it takes beside its output, and
how fast it is.

All of flash, cuDNN and memory-efficient attention save q, k, v, the output and one fp32 logsumexp per row, so a tape
holds for any of them; what they take inside backward differs a little, and the math path is another graph altogether.
"""

from __future__ import annotations

from collections.abc import Collection

from planner.catalog.profiles import GpuProfile
from planner.errors import NotEstimatedError
from planner.spec.job import Job, Machine, Strategy

FLASH_FROM = (8, 0)
"""FlashAttention-2 needs Ampere or newer (torch SDPA: sm80 or later)."""


SMALL_HEAD = 64
"""Up to this size of an attention head the second of the pairs below holds, beyond it the first."""

FLASH_2 = {9: ((0.374, 0.326), (0.328, 0.294)), 10: ((0.374, 0.326), (0.328, 0.294))}
"""(forward, backward) by major compute capability, for heads of 128 and of 64. H100: 370 and 322, 324 and 291 of 989
TFLOP/s at 16k tokens, no mask (FlashAttention-3 paper, arXiv 2407.08608, figures 5 and 6). B200 is not published and
taken alike."""

FLASH_2_MMA = ((0.73, 0.63), (0.73, 0.63))
"""The same where the kernel uses the card's only matrix instruction (8.x, 12.x): best of A100 in the FlashAttention-2
paper (arXiv 2307.08691, section 4.1). RTX A5000, heads of 64: 0.74 and 0.70 (gpu-mode/ring-attention#10)."""

FLASH_3 = ((0.655, 0.567), (0.503, 0.479))
"""H100: 648 and 561, 497 and 474 of 989 TFLOP/s, the same figures of arXiv 2407.08608."""

CUDNN = {9: ((0.60, 0.52), (0.418, 0.438)), 10: ((0.55, 0.47), (0.383, 0.396))}
"""H100: 595 and 516, 413 and 433 of 989 TFLOP/s, the same figures. B200: FlashAttention-4 reaches 0.71 and is up to 1.3
times faster than cuDNN 9.13 (its abstract); backward, and small heads, in H100's proportion."""

EFFICIENT = (0.82, 0.53)
"""Memory-efficient attention over FlashAttention-2: 43.4 of 53.1 and 27.4 of 51.9 TFLOP/s on one card
(Dao-AILab/flash-attention#416, 4096 tokens)."""

MATH = (0.15, 0.18)
"""Standard attention: H100 0.14 and 0.18 (arXiv 2407.08608), RTX A5000 0.17 and 0.18 (gpu-mode/ring-attention#10)."""


def kernel(strategy: Strategy, machine: Machine, gpu: GpuProfile, operators: Collection[str]) -> str:
    """The kernel of the recorded attention on a card: cudnn, flash or efficient. ``operators``: those of the recording.

    torch 2.13 puts cuDNN first on sm90 and sm100; Windows wheels are built without flash; older cards than Ampere
    have the memory-efficient kernel only (ATen/native/transformers/cuda/sdp_utils.cpp). Masked attention is never
    flash: asking for it would end in an error (diffusers attention_dispatch.py ``_native_flash_attention``), so it is a
    NotEstimatedError.
    """
    if strategy.attention == "flash" and "_scaled_dot_product_efficient_attention" in operators:
        fault = "attention flash supports neither masks nor fp32, and this model at this precision uses one"
        raise NotEstimatedError(fault, "use --attention sdpa, which lets torch choose for each")
    if strategy.attention != "sdpa":
        return str(strategy.attention)
    if "_scaled_dot_product_flash_attention" not in operators:
        return "efficient"
    if gpu.capability[0] in (9, 10):
        return "cudnn"
    if gpu.capability < FLASH_FROM or machine.os == "windows":
        return "efficient"
    return "flash"


def workspaces(name: str) -> tuple[str, ...]:
    """The tapes' workspace entries that hold for a kernel that runs where flash was recorded.

    FlashAttention-2, cuDNN and memory-efficient attention all accumulate dq in fp32 for half-precision inputs.
    """
    return ("flash",) if name in ("flash", "cudnn", "efficient") else ()


def attention_efficiency(gpu: GpuProfile, strategy: Strategy, job: Job, half: int, head_size: int) -> float:
    """The part of the peak rate that attention reaches, forward and backward mixed by their FLOPs: backward does five
    products where forward does two."""
    forward, backward = _attention_passes(gpu, strategy, half, head_size)
    if job.method == "sample":
        return forward
    runs = 1 if strategy.gradient_checkpointing == "none" else 2
    return (runs + 2.5) / (runs / forward + 2.5 / backward)


def _attention_passes(gpu: GpuProfile, strategy: Strategy, half: int, head_size: int) -> tuple[float, float]:
    """(forward, backward) efficiency of the kernel that runs.

    torch 2.13 asks cuDNN (from 9.15.1) first on 9.x and 10.x (sdp_utils.cpp, check_prefer_cudnn_attention), else flash,
    which needs 8.0 and a half format.
    """
    if gpu.attention_tflops and half and strategy.attention == "sdpa":
        forward, backward = (rate / gpu.bf16_tflops for rate in gpu.attention_tflops)
        return forward, backward
    major, _ = gpu.capability
    size = int(head_size <= SMALL_HEAD)
    flash = FLASH_2.get(major, FLASH_2_MMA)[size]
    requested = strategy.attention
    if requested == "math":
        return MATH
    if major < 8 or not half or requested in ("efficient", "xformers"):
        return flash[0] * EFFICIENT[0], flash[1] * EFFICIENT[1]
    if requested == "flash-3" and major == 9:
        return FLASH_3[size]
    if requested in ("sdpa", "cudnn") and major in CUDNN:
        return CUDNN[major][size]
    return flash
