"""Errors of memory that do not come from PyTorch's allocator on the card, or come without its numbers.

Each format has the cause that its wording proves and what helps. They are told apart by who ran out: a library beside
PyTorch, host RAM, pinned memory, Windows' commit limit, shared memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Cause = Literal[
    "fragmentation",
    "others",
    "need",
    "large",
    "refused",
    "beside",
    "driver",
    "host",
    "pinned",
    "commit",
    "crash",
    "shared",
    "kernel",
    "unknown",
]
"""What an error means: memory between tensors, other processes, the tensors themselves, one request larger than the
card, a request that the driver refused though there was room, no room beside PyTorch, the driver with no word of whose
memory, host RAM, pinned host memory, Windows' commit limit, an access violation, which most often is that too, shared
memory, a kernel's own limit on the chip."""

ON_HOST = frozenset({"host", "pinned", "commit", "crash", "shared"})
"""Causes that are not the card's."""


@dataclass(frozen=True)
class Format:
    """An error as it is worded, with what it means."""

    name: str
    pattern: re.Pattern[str]
    """group 1, where there is one: bytes that were asked for"""
    cause: Cause
    why: str
    advice: tuple[str, ...]


def _format(name: str, pattern: str, cause: Cause, why: str, *advice: str) -> Format:
    return Format(name, re.compile(pattern, re.MULTILINE | re.IGNORECASE), cause, why, advice)


LEAVE_ROOM = "leave the driver room: torch.cuda.set_per_process_memory_fraction(0.95), or empty_cache() before the call"
SMALLER = "then what makes training smaller: gradient checkpointing, block swap, a smaller batch or fewer frames"
RAM = "`vplan check` of the command, without --error, says what host RAM it needs; fewer DataLoader workers hold less"
SWAP_LESS = "fewer blocks in host RAM (swap, offload), or caches on disk instead of in memory"
PINNING = "less pinned memory: fewer swapped blocks, no pinned block swap, pin_memory off in the DataLoader"
MORE_TO_PIN = "more RAM, on WSL its share (`memory=` in .wslconfig): about half of the RAM may be pinned"
PAGE_FILE = "raise Windows' page file (System > Advanced > Virtual memory), to twice the RAM or managed by the system"
SHM = "raise /dev/shm: `docker run --shm-size=16g` or `--ipc=host`; or fewer DataLoader workers (0 needs none)"
PINNED = (
    r"pin_memory\(|in pin_memory|pin memory thread|cudaHostAlloc|cudaHostRegister|cudaMallocHost|pinned host memory"
)
BARE = r"CUDA (?:driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
STARTING = r"_cuda_init|_lazy_init|set_device|init_process_group|cuDevicePrimaryCtxRetain|cudaSetDevice"

FORMATS: tuple[Format, ...] = (
    _format("1 EB", r"out of memory\.? Tried to allocate more than 1EB", "large",
            "no card has such a size: it came of a length or shape that overflowed, and memory had no part in it",
            "look for the tensor in the traceback: a negative or corrupted size, often behind another rank's failure"),
    _format("cuBLAS", r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED", "beside",
            "cuBLAS asks the driver for its own memory, and PyTorch's cache had left none", LEAVE_ROOM, SMALLER),
    _format("cuDNN", r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
            r"|Unable to find a valid cuDNN algorithm|unable to find an engine to execute this computation", "beside",
            "cuDNN found no room for a convolution's workspace or its own memory", LEAVE_ROOM,
            "tile or slice the VAE, whose convolutions are the largest", SMALLER),
    _format("NCCL", r"(?:NCCL|RCCL)[^\n]{0,200}Failed to (?:CUDA|HIP) [cm]alloc(?: async)? (\d+) bytes", "beside",
            "NCCL takes its buffers from the driver, and PyTorch's cache had left none", LEAVE_ROOM,
            "smaller NCCL_BUFFSIZE and fewer NCCL_MAX_NCHANNELS", SMALLER),
    _format("NCCL", r"(?:NCCL|RCCL|nccl\w*Error)[\s\S]{0,600}?(?:Cuda|HIP) failure (?:2 )?'out of memory'", "beside",
            "NCCL takes its buffers from the driver, and PyTorch's cache had left none", LEAVE_ROOM,
            "smaller NCCL_BUFFSIZE and fewer NCCL_MAX_NCHANNELS", SMALLER),
    _format("bitsandbytes, managed memory", r"Error out of memory at line \d+ in file \S*pythonInterface", "pinned",
            "a paged optimizer's states are in managed memory, which is host RAM that the driver must be able to map",
            "more free host RAM (on WSL its share in .wslconfig), or the same optimizer without paging"),
    _format("bitsandbytes", r"Error out of memory at line \d+ in file \S*", "beside",
            "bitsandbytes asks the driver for its own memory, and PyTorch's cache had left none", LEAVE_ROOM, SMALLER),
    _format("pinned memory", rf"(?:{PINNED})[\s\S]{{0,3000}}?(?:{BARE})", "pinned",
            "the driver could not lock so much host RAM: Windows gives half of the RAM, a container its limit, and"
            " PyTorch rounds each tensor up to a power of two", PINNING, MORE_TO_PIN),
    _format("start", rf"(?:{STARTING})[\s\S]{{0,1500}}?(?:{BARE})", "others",
            "CUDA itself found no room to start, before there was any tensor: the card was in use",
            "end the other processes on this card (`nvidia-smi` lists them), or use another card"),
    _format("CUDA's driver", BARE, "driver",
            "where PyTorch has no room for a tensor its message has numbers, and this one has none. If the card had"
            " free memory, it was pinned host memory, of which Windows and WSL allow about half of the RAM; if it had"
            " none, a library or a kernel asked for memory of its own",
            f"if the card had free memory: {PINNING}; {MORE_TO_PIN}", f"if it had none: {LEAVE_ROOM}",
            "watch `nvidia-smi` while it runs: it shows free memory and other processes on the card", SMALLER),
    _format("ComfyUI", r"^.*Allocation on device\s*(?:\d+\s*)?$", "unknown",
            "cudaMallocAsync had nothing left, and its message has no numbers",
            "start with --disable-cuda-malloc (or PYTORCH_CUDA_ALLOC_CONF=backend:native) for a message with numbers",
            "a smaller shape, quantised weights, or --lowvram"),
    _format("Windows", r"DefaultCPUAllocator: not enough memory: you tried to allocate (\d+) bytes", "commit",
            "Windows could not commit it: RAM and page file together are promised to somebody", PAGE_FILE, SWAP_LESS),
    _format("1455", r"(?:os|Win)\s?error 1455|paging file is too small", "commit",
            "Windows could not commit it: RAM and page file together are promised to somebody", PAGE_FILE, SWAP_LESS),
    _format("access violation", r"\b3221225477\b|\b0xC0000005\b|-1073741819\b"
            r"|Windows fatal exception: access violation", "crash",
            "3221225477 is 0xC0000005, an access violation: the process touched memory that it did not have. While"
            " weights are read or moved it is mostly that they are mapped from their file, and Windows had neither RAM"
            " nor page file to stand behind them; it tells no numbers, and the card's memory had no part in it",
            PAGE_FILE, "Task Manager > Performance > Memory: `Committed` near its limit as the weights load says so",
            SWAP_LESS, RAM,
            "with memory committed to spare it is a fault in a library: `python -X faulthandler` names the call, and a"
            " PyTorch built for another driver or card is the usual one"),
    _format("host", r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+) bytes", "host",
            "this process's host RAM ran out", RAM, SWAP_LESS),
    _format("mmap", r"unable to mmap (\d+) bytes from file [^\n]*Cannot allocate memory", "host",
            "the system would not map a file of that size: its address space or overcommit is limited",
            "load without mmap, or set vm.overcommit_memory=1 (`ulimit -v` says whether a limit is set)", RAM),
    _format("shared memory", r"killed by signal: Bus error|insufficient shared memory|out of shared memory\."
            r"|unable to (?:open shared memory"
            r" object|allocate shared memory|write to file </torch_)", "shared",
            "DataLoader workers hand batches over in /dev/shm, which was full", SHM),
    _format("numpy", r"MemoryError: Unable to allocate [^\n]{1,40} for an array", "host",
            "a numpy array found no host RAM", RAM, SWAP_LESS),
    _format("kernel", r"OutOfResources: out of resource: (?:shared memory|registers|tensor memory)", "kernel",
            "a Triton kernel asks for more of the chip's own memory than a multiprocessor has: no memory of the card",
            "another attention or quantisation backend, or a kernel tuned for this card"),
    _format("killed", r"DataLoader worker \(pid \d+\) is killed by signal: Killed"
            r"|(?:exit ?code:?|exited with code|return code|exits with return code =)\s*\(?-9\b|exitcode\s*:\s*-9\b"
            r"|Signal:? 9 \(SIGKILL\)|died with <Signals\.SIGKILL: 9>|received signal: 9"
            r"|(?:terminated|killed|died|ended|exited) (?:with|by|on) signal:? (?:SIGKILL|9)\b"
            r"|exit(?:ed)?(?: with)?(?: code| status)?:? 137\b|^137$"
            r"|Out of memory: Killed process|oom[-_]kill(?:er)?\b|OOMKilled"
            r"|^(?:\S+: line \d+:\s+\d+ |zsh: )?Killed\b", "host",
            "the kernel ended the process (signal 9, exit code 137), nearly always because host RAM was used up, or"
            " what its container or job may have; the card's memory had no part in it", RAM, SWAP_LESS,
            "more RAM for it: swap space, the container's `--memory`, Slurm's `--mem`",
            "`dmesg | grep -i kill` names the process and what it held"),
    _format("python", r"^MemoryError\s*$|\bstd::bad_alloc\b|Cannot allocate memory", "host",
            "this process's host RAM ran out", RAM, SWAP_LESS),
)  # fmt: skip
"""The telling ones first. Sources of wordings: pytorch c10/core/impl/alloc_cpu.cpp, aten/src/ATen/MapAllocator.cpp,
torch/utils/data/_utils/signal_handling.py, torch/distributed/elastic; NVIDIA/nccl src/include/alloc.h; bitsandbytes
csrc/pythonInterface.cpp and csrc/ops.cu (CUDA_CHECK_RETURN); safetensors #528; ComfyUI #6073; ai-toolkit #993;
AkaneTendon25/musubi-tuner #67 (0xC0000005 as weights load); Windows error 1455 is ERROR_COMMITMENT_LIMIT."""


CUT_OFF = _format("cut off", r"out of memory|OutOfMemoryError", "unknown",
    "the text ends before the numbers, which say what tensors, PyTorch's cache and other processes held",
    "paste the message to its end (`CUDA out of memory. Tried to allocate ...`), or the log as a file",
    "`vplan check --gpu CARD` of the command, without --error, says what it needs and the smallest change that fits",
    "gradient checkpointing, cached latents and prompts, block swap, a smaller shape; then an 8-bit optimizer or a"
    " quantised base")  # fmt: skip
"""What is left of PyTorch's message where people quote its first words alone."""


def find(text: str) -> tuple[Format, re.Match[str]] | None:
    """The first of these errors in a text, and of several that begin there the most telling; `CUT_OFF` where there is
    no other."""
    found = [(each, match) for each in FORMATS if (match := each.pattern.search(text))]
    if not found and (match := CUT_OFF.pattern.search(text)):
        return CUT_OFF, match
    return min(found, key=lambda entry: entry[1].start(), default=None)
