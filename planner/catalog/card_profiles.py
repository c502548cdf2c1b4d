"""What is known about a card: the records of `profiles/gpus.toml`."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
from typing import Annotated, Literal

from pydantic import Field

from planner.schema import Count, Flag, NotNegative, Positive, PositiveInt, Record, Text
from planner.units import GIB, MIB


class GpuProfile(Record):
    """One card. Rates are dense, as the kernels use them; a sparse marketing rate is twice that."""

    name: Text
    title: Text
    aliases: tuple[Text, ...] = ()
    vendor: Literal["nvidia", "amd", "apple"] = "nvidia"
    architecture: Text
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    multiprocessors: Count
    """streaming multiprocessors: reductions split their work, and so their workspace, over them"""
    class_gb: Count
    """what it is sold as"""
    nvml_total_mib: PositiveInt
    """what nvidia-smi shows"""
    allocatable_gib: Positive
    """what it gives to a process: torch `total_memory`, without the driver's reserve"""
    ecc: Flag = False
    context_mib: Positive
    """CUDA context of one process, inside what it gives"""
    bf16_tflops: NotNegative
    """0: emulated (Pascal, Volta, Turing)"""
    fp16_tflops: Positive
    fp8_tflops: NotNegative = 0.0
    """0: no fp8 matrix units"""
    fp32_tflops: Positive
    matmul_tflops: Positive | None = None
    """best of torch's matrix products in 16 bits, where this card was measured; else published shares are taken"""
    bandwidth_gbs: Positive
    """of its memory, GB/s (10**9)"""
    link: Text
    link_gbs: Positive
    """to host RAM, one direction, as reached"""
    nvlink_gbs: NotNegative = 0.0
    """to another card, one direction; 0: none"""
    power_watts: NotNegative
    """its power limit as shipped; 0: not known"""
    attention_tflops: tuple[Positive, Positive] | None = None
    """(forward, backward) of torch's own attention in bf16, where it was measured; else published shares are taken"""
    launch_us: Positive | None = None
    """CPU time of one operator of a training step, on the machine that it was measured on"""
    unified: Flag = False
    reference: Flag = False
    """one of the cards that stand for its class"""
    source: Text

    @property
    def allocatable_bytes(self) -> int:
        """What torch can allocate on this card, bytes: the budget of a plan. NVML's total less the driver's reserve."""
        return round(self.allocatable_gib * GIB)

    @property
    def backend(self) -> Literal["cuda", "mps"]:
        """The backend of PyTorch that runs on this card: it decides which allocator, kernels and libraries there are.
        Builds for ROCm name theirs `cuda` too."""
        return "mps" if self.vendor == "apple" else "cuda"

    @property
    def has_working_set(self) -> bool:
        """Whether the card may take a part of the memory that it shares with the CPU (Metal's
        `recommendedMaxWorkingSetSize`), which is then what it gives; else all of its memory is its own, or the CPU's
        as well."""
        return self.vendor == "apple"

    @property
    def tells_seconds(self) -> bool:
        """Whether anything is known of how fast torch's kernels are on this card; else rates only put plans in
        order."""
        return self.backend == "cuda"

    @property
    def context_bytes(self) -> int:
        """The CUDA context of one process on this card, bytes."""
        return round(self.context_mib * MIB)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability as (major, minor): (8, 9)."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    @property
    def threads_per_multiprocessor(self) -> int:
        """Threads that one multiprocessor holds at a time (CUDA C++ Programming Guide, "Technical Specifications per
        Compute Capability")."""
        if self.capability == (7, 5):
            return 1024
        return 1536 if self.capability in ((8, 6), (8, 7), (8, 9)) or self.capability[0] >= 11 else 2048


class GpuClass(Record):
    """What "a 24 GB card" means: its reference cards, and the cards that are sold under the same label and give
    less."""

    gb: Count
    reference: Annotated[tuple[Text, ...], Field(min_length=1)]
    smaller: tuple[Text, ...] = ()

    @property
    def name(self) -> str:
        """The name people type for it: `24GB`."""
        return f"{self.gb}GB"


class GpuFile(Record):
    """All records of `profiles/gpus.toml`: cards and classes."""

    gpu: Annotated[tuple[GpuProfile, ...], Field(min_length=1)]
    classes: Annotated[tuple[GpuClass, ...], Field(min_length=1)] = Field(alias="class")
