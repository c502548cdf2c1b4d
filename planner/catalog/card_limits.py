"""What torch cannot do on a card whatever its memory: formats, kernels and versions made for newer ones.

A search leaves these out; who types one is told.
"""

from __future__ import annotations

from planner.catalog.card_profiles import GpuProfile
from planner.catalog.profiles import ModelProfile
from planner.errors import NotEstimatedError
from planner.spec.configuration import Configuration
from planner.spec.job import QUANTISED
from planner.spec.rules import ResolvedStrategy

FLASH_FROM = (8, 0)
"""FlashAttention-2 needs Ampere or newer (torch SDPA: sm80 or later)."""

CUDNN_FIRST = (9, 10)
"""Major compute capabilities on which torch chooses cuDNN's attention before flash
(ATen/native/transformers/cuda/sdp_utils.cpp)."""

CUDNN_SAMPLES = 65_535
"""The largest batch of its attention; of more torch runs flash (likewise, ``check_cudnn_tensor_shapes``; seen on a
virtual H200 under torch 2.13). A UNet's motion modules have a batch of all pixels."""

BF16_ATTENTION_FROM = (8, 0)
"""Before it memory-efficient attention takes fp16 and fp32 alone, and there is no other kernel but the math path
(ATen/native/transformers/cuda/sdp_utils.cpp, ``less_than_sm80_mem_efficient_dtypes``)."""

TRITON_FROM = (7, 0)
"""Inductor's kernels are Triton's ("too old to be supported by the triton GPU compiler", vllm-project/vllm#13255)."""

CUDA_13_FROM = (7, 5)
"""CUDA 13 has no older cards, and wheels of CUDA 12.8 and later none of Pascal (pytorch#157517)."""

LAST_OF_CUDA_12 = (2, 14)
"""The last torch with wheels of CUDA 12.6, which alone are built for Pascal and Volta (pytorch#190385, done in
pytorch/test-infra#8739)."""

NEW_ALLOC_CONF_FROM = (2, 10)
"""torch's first version that takes expandable segments from PYTORCH_ALLOC_CONF: the CUDA wheels of 2.9.0 and 2.9.1
leave them off, those of 2.10, 2.11 and 2.13 do not (pytorch#183387)."""

EXPANDABLE_ON_AMD_FROM = (2, 12)
"""pytorch#177974. Off where nobody asks for it: a copy may hang (pytorch#192259)."""


def in_fp16(strategy: ResolvedStrategy) -> ResolvedStrategy:
    """The strategy with fp16 for the bf16 in which it computes: as many bytes."""
    fields = ("weights_dtype", "compute_dtype", "autocast")
    changes = {field: "fp16" for field in fields if getattr(strategy, field) == "bf16"}
    return ResolvedStrategy(strategy.replace(**changes))


def refuse_on_card(configuration: Configuration, gpu: GpuProfile, model: ModelProfile) -> None:
    """Raises a NotEstimatedError for what runs on this card in another way than it was recorded, or not at all."""
    if gpu.vendor == "amd":
        _refuse_on_amd(configuration, gpu, model)
        return
    if gpu.backend == "mps":
        _refuse_on_mps(configuration, gpu, model)
        return
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


def _refuse_on_amd(configuration: Configuration, gpu: GpuProfile, model: ModelProfile) -> None:
    """What has another library on AMD's cards, whose memory nobody has published: bitsandbytes' blocks of 128 in place
    of 64, RCCL's buffers, MIOpen's workspaces, Inductor's choices."""
    strategy, machine = configuration.strategy, configuration.machine
    version = tuple(int(part) for part in machine.torch.split(".")[:2]) if machine.torch else EXPANDABLE_ON_AMD_FROM
    refusals = (
        (machine.os != "linux", f"{gpu.title} runs under Linux alone", "use --os linux"),
        (machine.world > 1, "RCCL's buffers between AMD's cards are not estimated", "use --gpus 1"),
        ("UNet" in model.diffusers_class, "MIOpen's workspaces for a U-Net's convolutions are not estimated", ""),
        (configuration.weights in ("int8", "nf4", "int4"), f"{configuration.weights} on AMD is not estimated", _FP8),
        (strategy.optimizer in _BITSANDBYTES, f"{strategy.optimizer} on AMD is not estimated", "use --optimizer adamw"),
        (strategy.compile != "none", "torch.compile on AMD is not estimated", "use --compile none"),
        (strategy.attention not in ("sdpa", "flash"), f"AMD has no {strategy.attention} attention", _SDPA),
        (
            strategy.expandable_segments and version < EXPANDABLE_ON_AMD_FROM,
            f"torch {machine.torch} has no expandable segments on AMD",
            "use --no-expandable-segments",
        ),
    )
    for applies, fault, fix in refusals:
        if applies:
            size = f"--gpu {gpu.allocatable_gib:g}GiB"
            raise NotEstimatedError(fault, fix or f"to compare memory with an NVIDIA card, use {size}")


MPS_OF = (2, 13)
"""The torch whose allocator for Apple's GPUs is replayed (`planner.allocator.mps`)."""


def _refuse_on_mps(configuration: Configuration, gpu: GpuProfile, model: ModelProfile) -> None:
    """What PyTorch cannot do on Apple's GPUs, what it does in memory of Metal's that nobody has published, and what is
    no help where GPU and CPU share one memory."""
    job, strategy, machine = configuration.job, configuration.strategy, configuration.machine
    version = tuple(int(part) for part in machine.torch.split(".")[:2]) if machine.torch else MPS_OF
    listed = ".".join(map(str, MPS_OF))
    moved = next((field for field, stays in _STAYS if getattr(strategy, field) not in stays), None)
    beside = next((field for field in ("text_encoder", "vae") if getattr(strategy, field) != "cached"), None)
    refusals = (
        (machine.os != "linux", f"{gpu.title} runs macOS", "leave out --os"),
        (machine.world > 1, "training over several Macs is not estimated", "use --gpus 1"),
        (
            version != MPS_OF,
            f"the allocator of torch {machine.torch} for Apple's GPUs is not modelled",
            f"use {listed}",
        ),
        (job.method == "sample", "sampling on Apple's GPUs is not estimated: MPSGraph's memory is not known", ""),
        ("UNet" in model.diffusers_class, "MPSGraph's memory for a U-Net's convolutions is not known", ""),
        (configuration.weights in QUANTISED, f"PyTorch has no {configuration.weights} products on MPS", _BF16),
        (strategy.optimizer != "adamw", f"{strategy.optimizer} on MPS is not estimated", "use --optimizer adamw"),
        (strategy.optimizer_step not in _MPS_STEPS, f"MPS has no {strategy.optimizer_step} step", _LOOP),
        (strategy.compile != "none", "torch.compile on MPS is not estimated", "use --compile none"),
        (strategy.attention != "sdpa", f"MPS has no {strategy.attention} attention", _SDPA),
        (job.lora_dropout > 0, "dropout on MPS is not estimated", "use --lora-dropout 0"),
        (strategy.gradient_checkpointing == "fp8", "MPS has no fp8", "use --gradient-checkpointing full"),
        (moved is not None, f"{_flag(moved)} moves what stays in the same memory: a Mac has one", "leave it out"),
        (beside is not None, "what MPS takes to encode is not known", f"use {_flag(beside)} cached"),
        (strategy.validation_mode != "off", "validation on MPS is not estimated", "use --validation-mode off"),
    )
    for applies, fault, fix in refusals:
        if applies:
            size = f"--gpu {gpu.allocatable_gib:g}GiB"
            raise NotEstimatedError(fault, fix or f"to compare memory with an NVIDIA card, use {size}")


def _flag(field: str | None) -> str:
    return f"--{field or ''}".replace("_", "-")


_STAYS = (
    ("swap_blocks", (0,)),
    ("offload_optimizer", ("none",)),
    ("offload_gradients", ("none",)),
    ("offload_params", ("none",)),
    ("group_offload", ("none",)),
    ("ema", ("none", "gpu")),
    ("inactive_expert", ("absent", "gpu")),
    ("gradient_checkpointing", ("none", "full", "partial", "fp8")),
)
"""Fields that say what waits in host RAM -> their values without that."""
_MPS_STEPS = ("loop", "fused")
"""torch/utils/_foreach_utils.py: MPS is not among the devices of ``_get_foreach_kernels_supported_devices``, so torch
steps one parameter after another where nothing is said; it is among those of fused kernels."""
_BF16 = "use --weights-dtype bf16"
_LOOP = "use --optimizer-step loop or fused"
_SDPA = "use --attention sdpa"
_FP8 = "use --weights-dtype bf16 or fp8"
_BITSANDBYTES = ("adamw-8bit", "adamw-8bit-paged", "lion")
