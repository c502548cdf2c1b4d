"""Watching one GPU and this process from outside torch: NVML, and the kernel's own count of host RAM.

Nothing here makes a CUDA context: `torch.cuda.mem_get_info` would (426 MiB on an RTX 6000 Ada, unsloth-zoo#1053), NVML
does not. What cannot be had is named in `missing`; nothing fails because a number is not there.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

import psutil
import pynvml

INTERVAL_SECONDS = 0.01
"""Between two samples: 100 a second. At 1 a second spikes are missed (the 50 Hz of DESIGN section 6 is the least)."""


class DeviceMemory:
    """The bytes in use on one GPU, sampled in a thread, less what was in use before: this process's share.

    Entered before CUDA starts, so that the context counts as ours. Others must leave the card alone meanwhile.
    """

    def __init__(self, uuid: str) -> None:
        """`uuid` as torch or NVML write it, with or without `GPU-` in front."""
        self.missing: list[str] = []
        self.base_bytes: int | None = None
        """in use when we began: other processes"""
        self.driver: str | None = None
        self.samples = 0
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._handle: Any = None
        self._peak = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vplan-nvml", daemon=True)
        self._began = 0.0

    def __enter__(self) -> Self:
        try:
            pynvml.nvmlInit()
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            self.base_bytes = self._used()
        except pynvml.NVMLError as error:
            self._give_up(error)
            return self
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
    def hertz(self) -> float | None:
        """Samples a second so far; None when there were none."""
        elapsed = time.monotonic() - self._began
        return self.samples / elapsed if self.samples and elapsed > 0 else None

    def take_peak(self) -> int | None:
        """The highest use since the last call, this moment included, bytes; None when NVML does not tell."""
        self._sample()
        with self._lock:
            peak, self._peak = self._peak, 0
        return None if self.base_bytes is None or self._handle is None else max(0, peak - self.base_bytes)

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            self._sample()

    def _sample(self) -> None:
        if self._handle is None:
            return
        try:
            used = self._used()
        except pynvml.NVMLError as error:
            self._give_up(error)
            return
        with self._lock:
            self._peak = max(self._peak, used)
            self.samples += 1

    def _used(self) -> int:
        """Version 2 leaves out the driver's own reserve; older drivers count it in, before us as well as now."""
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
        except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch):
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        return int(memory.used)

    def _give_up(self, error: Exception) -> None:
        self._handle = None
        self.missing.append(f"device_bytes: NVML says {error}")


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
