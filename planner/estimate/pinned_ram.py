"""Pinned host RAM: what a GPU copies from and to by itself, and so may not be paged out. A budget of its own.

Windows lets a process pin about half of the RAM, and so does WSL (`cudaHostAlloc` under WDDM: NVIDIA's forum 228235,
CUDA on WSL User Guide, "pinned system memory"); beyond it comes "CUDA error: out of memory" while the card has room.
Linux pins what there is. torch's own pinned memory comes in powers of two (`power_of_two`), also where a trainer copies
to the CPU with `non_blocking=True` (aten/src/ATen/native/TensorConversions.cpp, ``pin_out``); tried on a virtual GPU
with torch 2.13 and 2.15, where PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1 turns the rounding off.
"""

from __future__ import annotations

from planner.layout import single_gpu
from planner.layout.run import Run
from planner.spec.job import Machine

HALVED = ("windows", "wsl")
"""Systems that pin about half of the RAM."""


def pinned_bytes(run: Run, *, blocks: int, experts: int, checkpoints: int, optimizer: int, groups: int) -> int:
    """Pinned bytes of one process while it trains, out of what it keeps in host RAM: swapped ``blocks``, the idle
    ``experts``, ``checkpoints``, the ``optimizer`` with what it steps over, and the model's ``groups``.

    Ours pins all of these as they lie (trainers/memory/pinned.py). What DeepSpeed and FSDP2 pin is counted by
    `planner.layout.sharding.host_memory`, and nothing of a batch on its way.
    """
    strategy, host = run.strategy, run.host
    pinned = single_gpu.staged_bytes(run) if host.swap_pins == "staging" else blocks
    pinned += experts if run.trainer == "vplan" else 0
    pinned += 0 if host.checkpoints_pin == "none" else checkpoints
    pinned += optimizer if strategy.offload_optimizer == "cpu" else 0
    return pinned + (groups if strategy.group_offload_stream else 0) + host.pinned_bytes


def unpinnable_bytes(machine: Machine, pinned: int, whole: int) -> int:
    """RAM that must be there beside ``whole`` bytes in use so that ``pinned`` of them may be pinned; of one node."""
    return max(0, 2 * pinned - whole) if machine.os in HALVED else 0
