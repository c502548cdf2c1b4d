"""The results of `vplan calibrate` for a GPU under a driver and a torch release, and their files.

There is one file for each in the user's folder. `calibrated` replaces a card's listed values by the measured ones.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from planner.catalog import user_data
from planner.catalog.card_profiles import GpuProfile
from planner.errors import VplanError, quoted
from planner.estimate.roofline import COPY_EFFICIENCY, matmul_efficiency
from planner.evidence.measurement import Setup
from planner.schema import Bytes, NotNegative, Record
from planner.units import GIB, MIB
from planner.untrusted import read_bytes
from planner.worker_process import write_json

FOLDER = "calibrations"


class Rates(Record):
    """The rates that large kernels and copies reached in a calibration."""

    matmul_flops_per_second: NotNegative
    """bf16 with fp32 accumulation"""
    attention_forward_flops_per_second: NotNegative
    attention_backward_flops_per_second: NotNegative
    copy_bytes_per_second: NotNegative
    """on the device, read and written bytes together"""
    to_device_bytes_per_second: NotNegative
    to_host_bytes_per_second: NotNegative


class Calibration(Record):
    """The measured context, kernel modules and rates of one GPU under one driver, torch and diffusers."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    gpu: str
    driver: str
    torch: str
    diffusers: str
    time: str
    """ISO 8601, UTC"""
    total_bytes: Bytes | None = None
    """the card's allocatable memory: torch `total_memory`"""
    context_bytes: Bytes | None = None
    """the CUDA context of a process that has done nothing yet; None if NVML does not tell"""
    kernels: dict[str, Bytes | None] = {}
    """by kind of kernel: what its first run adds outside torch's allocator"""
    workspaces: dict[str, Bytes | None] = {}
    """by kind of kernel: what its first run leaves in torch's allocator"""
    rates: Rates
    launch_seconds: NotNegative | None = None
    """CPU time of one operator of a training step, including the Python code around it"""

    @property
    def outside_bytes(self) -> int | None:
        """Bytes of the CUDA context and loaded kernels together; None if NVML does not tell."""
        if self.context_bytes is None or None in self.kernels.values():
            return None
        return self.context_bytes + sum(nbytes or 0 for nbytes in self.kernels.values())

    @property
    def setup(self) -> Setup:
        """The GPU, driver, torch and diffusers that it was measured with."""
        return Setup(self.gpu, self.driver, self.torch, self.diffusers)


def path_of(gpu: str, driver: str, torch: str) -> Path:
    """The calibration file of a GPU under a driver and a torch. It need not exist."""
    return user_data.folder() / FOLDER / f"{user_data.name_for(f'{gpu}-{driver}-{torch}')}.json"


def write(calibration: Calibration) -> Path:
    """Writes a calibration, replacing the one of the same GPU, driver and torch; returns its path. Raises a VplanError
    if it cannot be written."""
    path = path_of(calibration.gpu, calibration.driver, calibration.torch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, calibration.to_json())
    except OSError as error:
        fix = f"free some space there, or set {user_data.VARIABLE} to a writable folder"
        raise VplanError(f"cannot write {quoted(str(path))}: {error.strerror}", fix) from None
    return path


def read(gpu: str, driver: str, torch: str) -> Calibration | None:
    """The calibration of a GPU under a driver and a torch; None if there is none. Raises a VplanError for a damaged
    file."""
    path = path_of(gpu, driver, torch)
    try:
        data: Any = json.loads(read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        raise VplanError(f"{path.name} is damaged", f"remove it and run `vplan calibrate` again: {path}") from None
    if not isinstance(data, Mapping):
        raise VplanError(f"{path.name} is damaged", f"remove it and run `vplan calibrate` again: {path}")
    return Calibration.read(data, path.name)


def calibrated(card: GpuProfile, calibration: Calibration) -> GpuProfile:
    """A card with the measured memory, context and rates. Rates of other dtypes are scaled in proportion."""
    card, rates = card.replace(matmul_tflops=None), calibration.rates  # replaces what others measured on such a card
    matmul = rates.matmul_flops_per_second / matmul_efficiency(card) / 1e12
    share = matmul / card.bf16_tflops if card.bf16_tflops else 1.0
    changes: dict[str, object] = {
        "bf16_tflops": matmul if card.bf16_tflops else 0.0,
        "fp16_tflops": card.fp16_tflops * share,
        "bandwidth_gbs": rates.copy_bytes_per_second / COPY_EFFICIENCY / 1e9,
        "link_gbs": min(rates.to_device_bytes_per_second, rates.to_host_bytes_per_second) / 1e9,
        "source": f"{card.source}; calibrated {calibration.time}",
    }
    if card.bf16_tflops:
        passes = rates.attention_forward_flops_per_second, rates.attention_backward_flops_per_second
        changes["attention_tflops"] = tuple(rate / 1e12 for rate in passes)
    if calibration.launch_seconds:
        changes["launch_us"] = calibration.launch_seconds * 1e6
    if calibration.outside_bytes:
        changes["context_mib"] = calibration.outside_bytes / MIB
    if calibration.total_bytes:
        changes["allocatable_gib"] = calibration.total_bytes / GIB
    return card.replace(**changes)
