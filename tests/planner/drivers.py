"""NVML as machines that we do not have answer it, and what else is in such a machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from planner.hardware import doctor
from planner.units import GIB, MIB

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

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        cards: list[dict[str, Any]],
        cuda: int = 12080,
        version: str = "570.86.10",
    ) -> None:
        self.cards = cards
        for name, answer in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: version,
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

RTX_4090 = {
    "Name": "NVIDIA GeForce RTX 4090",
    "CudaComputeCapability": (8, 9),
    "ComputeRunningProcesses": [],
    "GraphicsRunningProcesses": [],
    "v2": {"total": 24 * GIB, "reserved": GIB // 2, "used": 0, "free": 47 * GIB // 2},
}


class Computer:
    """Another computer around this process: what its driver answers, its packages and its host RAM."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        """``folder``: a new one, for what describes it."""
        self._monkeypatch = monkeypatch
        self._folder = folder
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)

    def has_cards(self, *cards: dict[str, Any], driver: str = "580.1") -> Driver:
        """These cards, as NVML answers for them."""
        self._monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return Driver(self._monkeypatch, list(cards), version=driver)

    def has_packages(self, **versions: str) -> None:
        """These versions of packages, by the metadata that an installer leaves; others as they are here."""
        for name, version in versions.items():
            for older in self._folder.glob(f"{name}-*.dist-info/METADATA"):
                older.unlink()
                older.parent.rmdir()
            metadata = self._folder / f"{name}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def has_ram(self, total: int, available: int) -> None:
        """So many bytes of host RAM, with no limit of a container or job."""
        memory = SimpleNamespace(total=total, available=available)
        self._monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        self._monkeypatch.setattr(doctor, "GROUPS", str(self._folder / "no groups"))
