"""NVML as machines that we do not have answer it, for the tests of what asks it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from planner.units import MIB

TOLD = [
    "Name",
    "UUID",
    "CudaComputeCapability",
    "EccMode",
    "MigMode",
    "EnforcedPowerLimit",
    "ComputeRunningProcesses",
    "GraphicsRunningProcesses",
]


class Driver:
    """NVML as a machine with these cards answers it; a function a card lacks raises as NVML does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cards: list[dict[str, Any]], cuda: int = 12080) -> None:
        self.cards = cards
        for name, answer in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "570.86.10",
            "nvmlSystemGetCudaDriverVersion": lambda: cuda,
            "nvmlDeviceGetCount": lambda: len(cards),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": self.named,
            "nvmlDeviceGetMemoryInfo": self.memory,
            **{f"nvmlDeviceGet{key}": self.told(key) for key in TOLD},
        }.items():
            monkeypatch.setattr(pynvml, name, answer)

    def named(self, uuid: str) -> int:
        """A card by its number behind `GPU-`, or a slice behind `MIG-`."""
        if not uuid[4:].isdigit() or int(uuid[4:]) >= len(self.cards):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return int(uuid[4:])

    def memory(self, index: int, version: int | None = None) -> Any:
        if (version is None) == ("v2" in self.cards[index]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if "v2" not in self.cards[index] and "v1" not in self.cards[index]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(**self.cards[index]["v2" if version else "v1"])

    def told(self, key: str) -> Any:
        def answer(index: int) -> Any:
            if key not in self.cards[index]:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return self.cards[index][key]

        return answer


H100 = {
    "Name": "NVIDIA H100 80GB HBM3",
    "CudaComputeCapability": (9, 0),
    "EccMode": (1, 1),
    "MigMode": (0, 0),
    "EnforcedPowerLimit": 700_000,
    "ComputeRunningProcesses": [],
    "GraphicsRunningProcesses": [],
    "v2": {"total": 81_559 * MIB, "reserved": 560 * MIB, "used": 2 * MIB, "free": 80_997 * MIB},
}
