"""The calibration's worker process: what this GPU takes beside tensors, and how fast it really is.

`planner.probe.probe.measure_device` starts it as ``vplan worker calibrate FOLDER``. It reads the device from
``FOLDER/request.json`` and writes what it measures into ``FOLDER/result-00000.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import VplanError
from planner.worker_process import REQUEST, read_json, result_file
from trainers.worker import ResultFile, end_with_parent, set_allocator

SECONDS_EACH = 1.0
"""Of repeating one kernel, at least, until its times settle (torch.utils.benchmark)."""


@dataclass(frozen=True)
class KernelSizes:
    """How large the kernels are: large enough to fill any card, and on the CPU small enough to take no time."""

    square: int
    """side of the matrices"""
    tokens: int
    heads: int
    copied_bytes: int
    seconds: float


FULL = KernelSizes(8192, 16_384, 24, 1 << 30, SECONDS_EACH)
TINY = KernelSizes(128, 64, 2, 1 << 20, 0.02)
HEAD = 128
"""Size of a head, that of most video models."""


def main(arguments: list[str]) -> int:
    """Measures what the request in the folder named by the only argument asks for, and tells."""
    folder = Path(arguments[0])
    end_with_parent()
    report = ResultFile(folder / result_file(0))
    request = read_json(folder / REQUEST)
    set_allocator(True)
    try:
        Calibrating(request["device"], report).run()
    except VplanError as error:
        report.tell(refused={"message": error.message, "fix": error.fix})
        return 1
    report.tell(outcome="ok")
    return 0


class Calibrating:
    """The calibration of one device: context, kernel modules and rates, measured kernel by kernel."""

    def __init__(self, device: str, report: ResultFile) -> None:
        import torch

        from planner.hardware.nvml import DeviceMemory
        from trainers.measuring.measure import _uuid, find_device

        self.report = report
        self.device = find_device(device)
        self.on_gpu = self.device.type == "cuda"
        self.sizes = FULL if self.on_gpu else TINY
        self.watch = DeviceMemory(_uuid(self.device)).__enter__() if self.on_gpu else None
        properties = torch.cuda.get_device_properties(self.device) if self.on_gpu else None
        report.tell(
            gpu=torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu",
            driver=self.watch.driver if self.watch else "none",
            total_bytes=properties.total_memory if properties else None,
        )

    def run(self) -> None:
        """Measures the CUDA context, then what kernels load on their first run, then rates and the CPU's time of an
        operator, and reports each."""
        import torch

        try:
            self.report.tell(phase="context")
            if self.on_gpu:
                torch.zeros(1, device=self.device)
            self.report.tell(context_bytes=self.outside())
            self.report.tell(phase="kernels")
            self.report.tell(**self.kernels())
            self.report.tell(phase="rates")
            self.report.tell(rates=self.rates())
            self.report.tell(phase="launches")
            self.report.tell(launch_seconds=self.launch_seconds())
        finally:
            if self.watch:
                self.report.tell(missing=self.watch.missing)
                self.watch.__exit__(None, None, None)

    def launch_seconds(self) -> float:
        """CPU time of one operator of a training step."""
        from trainers.measuring import launches  # with models and tapes, which come after the context is measured

        return launches.launch_seconds(self.device)

    def outside(self) -> int | None:
        """Device bytes of this process that torch's allocator does not hold; None where NVML does not tell."""
        import torch

        if self.watch is None:
            return None
        torch.cuda.synchronize(self.device)
        self.watch.take_peak()
        used = self.watch.take_peak()
        return None if used is None else max(0, used - torch.cuda.memory_reserved(self.device))

    def kernels(self) -> dict[str, Any]:
        """Bytes by kind of kernel: what its first run left on the device outside torch's allocator (code, library
        handles), and inside it after all tensors were freed (workspaces)."""
        import torch

        outside: dict[str, int | None] = {}
        workspace: dict[str, int | None] = {}
        for kind, run in self.first_runs().items():
            before = self.outside(), torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
            run()
            after = self.outside(), torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
            outside[kind] = None if before[0] is None or after[0] is None else max(0, after[0] - before[0])
            workspace[kind] = max(0, after[1] - before[1]) if self.on_gpu else None
        return {"kernels": outside, "workspaces": workspace}

    def first_runs(self) -> dict[str, Callable[[], None]]:
        """One small forward and backward run of each kind of kernel, by name."""
        import torch
        from torch.nn import functional

        def back(output: torch.Tensor) -> None:
            output.float().sum().backward()

        def leaf(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, requires_grad=True, dtype=torch.bfloat16, device=self.device)

        def attention() -> torch.Tensor:
            query, key, value = (leaf(1, 2, 64, HEAD) for _ in "qkv")
            return functional.scaled_dot_product_attention(query, key, value)

        return {
            "matmul": lambda: back(leaf(64, 64) @ leaf(64, 64)),
            "attention": lambda: back(attention()),
            "convolution": lambda: back(functional.conv3d(leaf(1, 8, 4, 16, 16), leaf(8, 8, 3, 3, 3), padding=1)),
            "norm": lambda: back(functional.layer_norm(leaf(4, 64), [64])),
        }

    def rates(self) -> dict[str, float]:
        """FLOP/s of large kernels in bf16, and bytes a second of copies; links one way, from and to pinned memory."""
        found = {**self.matmul_rate(), **self.attention_rates(), **self.copy_rates()}
        return {f"{name}_per_second": rate for name, rate in found.items()}

    def matmul_rate(self) -> dict[str, float]:
        """The rate of a square bf16 matrix product, FLOP per second."""
        import torch

        side = self.sizes.square
        left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=self.device) for _ in "ab")
        return {"matmul_flops": 2 * side**3 / self.seconds(lambda: left @ right)}

    def attention_rates(self) -> dict[str, float]:
        """The rates of attention without a mask, forward and backward, FLOP per second; its forward is two matrix
        products, its backward five."""
        import torch
        from torch.nn import functional

        heads, tokens = self.sizes.heads, self.sizes.tokens
        query, key, value = inputs = [
            torch.randn(1, heads, tokens, HEAD, requires_grad=True, dtype=torch.bfloat16, device=self.device)
            for _ in "qkv"
        ]
        product = 2 * heads * tokens**2 * HEAD
        with torch.no_grad():
            forward = self.seconds(lambda: functional.scaled_dot_product_attention(query, key, value))
        output = functional.scaled_dot_product_attention(query, key, value)
        gradient = torch.randn_like(output)
        backward = self.seconds(lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True))
        return {
            "attention_forward_flops": 2 * product / forward,
            "attention_backward_flops": 5 * product / backward,
        }

    def copy_rates(self) -> dict[str, float]:
        """The rates of copies, bytes per second: on the device (bytes read and written), and over the link to the host
        in both directions."""
        import torch

        count = self.sizes.copied_bytes
        here, there = (torch.empty(count, dtype=torch.uint8, device=self.device) for _ in "ab")
        host = torch.empty(count, dtype=torch.uint8, pin_memory=self.on_gpu)
        return {
            "copy_bytes": 2 * count / self.seconds(lambda: there.copy_(here)),
            "to_device_bytes": count / self.seconds(lambda: here.copy_(host)),
            "to_host_bytes": count / self.seconds(lambda: host.copy_(here)),
        }

    def seconds(self, run: Callable[[], Any]) -> float:
        """The median seconds of one call of `run`, with the GPU's work waited for."""
        from torch.utils.benchmark import Timer

        timer = Timer("run()", globals={"run": run})  # it waits for the GPU
        timer.timeit(3)
        return float(timer.blocked_autorange(min_run_time=self.sizes.seconds).median)
