"""Watching one GPU and this process tree from outside torch: NVML, and the kernel's own count of host RAM.

Nothing here makes a CUDA context: `torch.cuda.mem_get_info` would (426 MiB on an RTX 6000 Ada, unsloth-zoo#1053), NVML
does not. What cannot be had is named in `missing`; nothing fails because a number is not there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import psutil
import pynvml

from planner.hardware.memory_trace import Thinned
from planner.units import MIB

INTERVAL_SECONDS = 1 / 64
"""Between two samples. One a second would miss spikes; 50 a second is the least that shows them."""

PROCESSES_EVERY = 16
"""Samples of the card for one look at its processes, whose list costs the driver more than a counter."""

KINDS = ("Compute", "Graphics", "MPSCompute")
"""Of processes that NVML lists."""

CONTEXT_BYTES = 64 * MIB
"""Less than any CUDA context takes: a card that grew by more has a process of ours on it."""


class Observer(Protocol):
    """One source of memory counters. For a new counter, write one such class and give it to a `Monitor`."""

    missing: list[str]
    """what it could not get, in words that begin with the number's name"""

    def sample(self) -> None:
        """Reads the counter once; called in a thread many times a second."""

    def take(self) -> Mapping[str, int | None]:
        """The highest values since the last call, including now, in bytes by name; None for one that cannot be read."""


class Monitor:
    """Samples observers in a thread while it is entered, and puts together what they saw."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        self.samples = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vplan-monitor", daemon=True)
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def missing(self) -> list[str]:
        """What no observer could read so far, each with the reason, in words."""
        return [words for observer in self.observers for words in observer.missing]

    @property
    def hertz(self) -> float | None:
        """Samples per second so far; None before the first."""
        elapsed = time.monotonic() - self._began
        return self.samples / elapsed if self.samples and elapsed > 0 else None

    def take(self) -> dict[str, int | None]:
        """The highest values of all observers since the last call, in bytes by name; None for one that cannot be
        read."""
        with self._lock:
            return {name: value for observer in self.observers for name, value in observer.take().items()}

    def _watch(self) -> None:
        while not self._stopped.is_set():
            time.sleep(INTERVAL_SECONDS)  # half the processor's time of an event's own wait
            with self._lock:
                for observer in self.observers:
                    observer.sample()
            self.samples += 1


class Card:
    """One GPU in NVML, found by its UUID. After the first error it is not asked again; `fault` keeps the error."""

    def __init__(self, uuid: str) -> None:
        """`uuid` as torch or NVML write it: torch leaves out `GPU-`, and of a MIG slice `MIG-`."""
        self.driver: str | None = None
        self.fault: str | None = None
        self.handle: Any = None
        # torch's UUID does not say whether it is a card or a slice: both are tried.
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
        try:
            pynvml.nvmlInit()
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            self.fault = f"NVML says {error}"
            return
        for name in names:
            try:
                self.handle = pynvml.nvmlDeviceGetHandleByUUID(name)
                self.fault = None
                return
            except pynvml.NVMLError as error:
                self.fault = self.fault or f"NVML says {error}"

    def used_bytes(self) -> int:
        """Bytes in use by all. Version 2 leaves out the driver's own reserve; older drivers count it in, before us as
        well as now."""
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self.handle, version=pynvml.nvmlMemory_v2)
        except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch):
            memory = pynvml.nvmlDeviceGetMemoryInfo(self.handle)
        return int(memory.used)


def processes(handle: Any) -> dict[int, int | None]:
    """Bytes by pid of all processes that compute or draw on a card, MPS clients included; None where the driver does
    not count them.

    A kind of process that this driver cannot list is skipped. Raises an NVMLError when it can list none.
    """
    bytes_by_pid: dict[int, int | None] = {}
    refused = []
    for kind in KINDS:
        try:
            running = getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses")(handle)
        except pynvml.NVMLLibraryMismatchError:  # older than R510; it is no NVMLError
            refused.append(pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
            continue
        except pynvml.NVMLError as error:
            refused.append(error)
            continue
        bytes_by_pid |= {process.pid: process.usedGpuMemory for process in running}
    if len(refused) == len(KINDS):
        raise refused[0]
    return bytes_by_pid


class CardUse:
    """Device memory by NVML. `used_bytes`: the most in use on the card; `device_bytes`: the same less what was in use
    at the start, which is this process's share while others do not change theirs."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.missing: list[str] = []
        self.base_bytes: int | None = None
        """in use when we began: other processes"""
        self.grown = False
        """whether something of ours has come onto the card"""
        self.trace = Thinned()
        """how `device_bytes` went, MiB"""
        self._peak = 0
        self.sample()
        # The first sample is what others use; only what comes on top of it is ours.
        self.base_bytes = None if self.missing else self._peak
        self.trace.take()

    def sample(self) -> None:
        """Reads the bytes in use on the card once."""
        if self.missing:
            return
        if self.card.fault:
            self.missing.append(f"device_bytes: {self.card.fault}")
            return
        try:
            used_bytes = self.card.used_bytes()
            self._peak = max(self._peak, used_bytes)
            self.trace.add(max(0, used_bytes - (self.base_bytes or 0)) // MIB)
        except pynvml.NVMLError as error:
            # A card that shares the CPU's memory (GB10) has no number of its own: NOT_SUPPORTED.
            self.missing.append(f"device_bytes: NVML says {error}")

    def take(self) -> dict[str, int | None]:
        """The highest since the last call: `used_bytes` by all, and `device_bytes` on top of what was in use at the
        start; None where NVML cannot say."""
        self.sample()
        peak, self._peak = self._peak, 0
        if self.missing or self.base_bytes is None:
            return {"device_bytes": None, "used_bytes": None}
        self.grown |= peak - self.base_bytes > CONTEXT_BYTES
        return {"device_bytes": max(0, peak - self.base_bytes), "used_bytes": peak}


class CardShares:
    """Device memory by process, from NVML's list. `tree_bytes` and `others_bytes`: the most that this process tree and
    all others held.

    Windows (WDDM) does not count by process, and a container sees no pids or foreign ones: both are reported as
    missing, not guessed.
    """

    def __init__(self, card: Card, use: CardUse, root: int | None = None) -> None:
        """`root`: the pid at whose top the tree is; this process's own when not given."""
        self.card, self.use = card, use
        self.root = root or os.getpid()
        self.missing: list[str] = []
        self._ours: dict[int, bool] = {}
        self._lists_us = False
        self._count = 0
        self._peaks = [0, 0]

    def sample(self) -> None:
        """Reads the card's process list on every `PROCESSES_EVERY`-th call."""
        if self._count % PROCESSES_EVERY == 0:
            self._look()
        self._count += 1

    def take(self) -> dict[str, int | None]:
        """The highest bytes since the last call of our own process tree (`tree_bytes`) and of all others
        (`others_bytes`); None where they cannot be told apart."""
        self._look()
        if not self.missing and self.use.grown and not self._lists_us:
            self._give_up("NVML lists no process of ours, as in a container that hides pids")
        (ours, others), self._peaks = self._peaks, [0, 0]
        return {"tree_bytes": None if self.missing else ours, "others_bytes": None if self.missing else others}

    def _look(self) -> None:
        if self.missing:
            return
        if self.card.fault:
            self._give_up(self.card.fault)
            return
        try:
            bytes_by_pid = processes(self.card.handle)
        except pynvml.NVMLError as error:
            self._give_up(f"NVML says {error}")
            return
        if None in bytes_by_pid.values():
            self._give_up("this driver does not count memory by process (WDDM)")
            return
        # Looked up once per pid: walking the parents of every process at every sample would cost more than the sample.
        self._ours = {pid: self._ours[pid] if pid in self._ours else self._is_ours(pid) for pid in bytes_by_pid}
        self._lists_us |= any(self._ours.values())
        for side, is_ours in enumerate((True, False)):
            total = sum(nbytes or 0 for pid, nbytes in bytes_by_pid.items() if self._ours[pid] is is_ours)
            self._peaks[side] = max(self._peaks[side], total)

    def _is_ours(self, pid: int) -> bool:
        try:
            return self.root in (pid, *(parent.pid for parent in psutil.Process(pid).parents()))
        except psutil.Error:  # gone meanwhile, or another user's, or of another namespace
            return False

    def _give_up(self, why: str) -> None:
        self.missing.append(f"tree_bytes, others_bytes: {why}")


class HostUse:
    """Host RAM of this process: `host_bytes`, the most that was resident, pinned memory and mapped files included."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self._process = psutil.Process()
        self._peak = 0

    def sample(self) -> None:
        """Reads the resident bytes once."""
        self._peak = max(self._peak, int(self._process.memory_info().rss))

    def take(self) -> dict[str, int | None]:
        """The most resident bytes since the last call."""
        self.sample()
        peak, self._peak = self._peak, 0
        return {"host_bytes": peak}


class DeviceMemory(Monitor):
    """A card's use and shares, as `take` tells them. Made before CUDA starts, so that the context counts as ours."""

    def __init__(self, uuid: str, *more: Observer) -> None:
        """`uuid` as torch or NVML write it; `more` observers are sampled beside."""
        self.card = Card(uuid)
        self.use = CardUse(self.card)
        super().__init__(self.use, CardShares(self.card, self.use), *more)

    @property
    def base_bytes(self) -> int | None:
        """Bytes in use on the card when watching began, by other processes; None when it could not be read."""
        return self.use.base_bytes

    @property
    def driver(self) -> str | None:
        """The version of the NVIDIA driver; None when NVML does not answer."""
        return self.card.driver

    def take_trace(self) -> list[int]:
        """The card's use above `base_bytes` since the last call, MiB, as the highest values of equal stretches; empty
        when NVML does not tell."""
        with self._lock:
            return self.use.trace.take()

    def take_peak(self) -> int | None:
        """The most of the card that came on top of `base_bytes` since the last call; None when NVML does not tell."""
        return self.take()["device_bytes"]


def host_peak_bytes() -> int:
    """The highest resident memory of this process so far, bytes, as the kernel counted it.

    Not `ru_maxrss`: after a fork that also counts the parent. Where only the present value can be had, it is that one.
    """
    if sys.platform == "linux":
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    memory = psutil.Process().memory_info()
    return int(getattr(memory, "peak_wset", memory.rss))
