"""Pinned (page-locked) host RAM, which has a limit of its own; and what Windows promises RAM or page file for.

Windows and WSL let a process pin about half of the RAM (`cudaHostAlloc` under WDDM: NVIDIA's forum 228235, CUDA on WSL
User Guide, "pinned system memory"); beyond that, CUDA reports "out of memory" although the card has room. Linux has no
such limit. torch rounds its own pinned allocations up to powers of two (`power_of_two`), also when a trainer copies to
the CPU with `non_blocking=True` (aten/src/ATen/native/TensorConversions.cpp, ``pin_out``). Confirmed on a virtual GPU
with torch 2.13 and 2.15, where PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1 turns the rounding off.
"""

from __future__ import annotations

from planner.layout import single_gpu
from planner.layout.run import Run
from planner.spec.job import Machine
from planner.spec.plan import Estimate
from planner.units import MIB, format_gib

HALVED = ("windows", "wsl")
"""Systems that let a process pin about half of the RAM."""

SURE_ON_WSL = 800 * MIB
"""Pinned bytes that no report from WSL fails at. The limit there is often far below half of the RAM, and nothing tells
it beforehand: with 60 GB of RAM 769 MiB could be pinned and 1025 not (tdrussell/diffusion-pipe#306), nor what block
swap takes with 32 and 96 GB (kohya-ss/musubi-tuner#202, diffusion-pipe#342); elsewhere 16 GiB could, by our count
(diffusion-pipe#510). NVIDIA's guide gives no number (CUDA on WSL User Guide, known limitations)."""


def pinned_bytes(run: Run, *, blocks: int, experts: int, checkpoints: int, optimizer: int, groups: int) -> int:
    """Pinned bytes of one process while it trains. The arguments are its bytes in host RAM: swapped ``blocks``, the
    idle ``experts``, ``checkpoints``, the ``optimizer`` with its weights and gradients, and the model's ``groups``.

    Our trainer pins all of these in place, without rounding (trainers/memory/pinned.py). What DeepSpeed and FSDP2 pin
    is counted in `planner.layout.sharding.host_memory`. Batches in transit are not counted.
    """
    strategy, host = run.strategy, run.host
    pinned = single_gpu.staged_bytes(run) if host.swap_pins == "staging" else blocks
    pinned += experts if run.trainer == "vplan" else 0
    pinned += 0 if host.checkpoints_pin == "none" else checkpoints
    pinned += optimizer if strategy.offload_optimizer == "cpu" else 0
    return pinned + (groups if strategy.group_offload_stream else 0) + host.pinned_bytes


def unpinnable_bytes(machine: Machine, pinned: int, whole: int) -> int:
    """RAM that one node needs beyond the ``whole`` bytes in use so that ``pinned`` of them can be pinned."""
    return max(0, 2 * pinned - whole) if machine.os in HALVED else 0


def wsl_doubts(machine: Machine, pinned: int) -> tuple[str, ...]:
    """Why a plan that has room may still run out under WSL, in words."""
    if machine.os != "wsl" or pinned <= SURE_ON_WSL:
        return ()
    what = f"WSL may refuse to pin {format_gib(pinned)} of RAM, whatever there is"
    return (f"{what}: it ends in 'CUDA error: out of memory' then, with room on the card",)


def page_file_doubts(estimate: Estimate) -> tuple[str, ...]:
    """Why a plan that has room may still run out on Windows, in words: RAM alone does not cover all that Windows counts
    against RAM and page file, and how large a page file is, or may grow, is not known."""
    usable, mapped = estimate.machine.host_ram, estimate.host.mapped_bytes if estimate.host else 0
    if usable is None or not mapped or (whole := mapped + estimate.host_ram_bytes) <= usable:
        return ()
    files = f"Windows counts {format_gib(mapped)} of mapped weight files too"
    return (f"RAM and page file must be {format_gib(whole)} together: {files}",)
