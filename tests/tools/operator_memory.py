"""What each operator of a plan's first step and sample really allocates on CUDA, beside its outputs.

    vplan rehearse --gpu h100-80gb --no-values --steps 0 -- python -m tests.tools.operator_memory PLAN.toml OUT.json

OUT.json: operator, as tapes name it -> ``calls``; ``most_bytes`` that one call had beyond its inputs and outputs;
``shapes`` of the inputs of that call, and ``copied_bytes``, what those of them take that CUDA is said to copy.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.catalog import lookup
from planner.spec.plan import read_plan
from trainers.measuring.counters import Meter
from trainers.measuring.phases import ProbedTraining, ProbeRequest
from trainers.recording.op_table import is_copied
from trainers.worker import ResultFile

FEW_BLOCKS = {"num_layers": 2}
"""In a transformer: the others do what these do, at the same shapes."""

BLOCK_BYTES = 512
"""What the allocator rounds every request to."""


def allocated_bytes() -> dict[str, int]:
    """The allocator's counter. `torch.cuda.memory_allocated` puts a hundred and sixty into a flat dictionary to read
    one: a third of all the time here."""
    counter: dict[str, int] = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    return counter


class OperatorMemory(TorchDispatchMode):
    """Reads the allocator's counters around every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = allocated_bytes()["current"]
        torch.cuda.reset_peak_memory_stats()
        out = func(*args, **(kwargs or {}))
        most = allocated_bytes()["peak"] - before
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = {
            storage.data_ptr(): -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
            for tensor in tree_leaves(out)
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda
            for storage in [tensor.untyped_storage()]
            if storage.data_ptr() not in there
        }
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        entry = self.seen.setdefault(name, {"calls": 0, "most_bytes": -1})
        entry["calls"] += 1
        if most - sum(made.values()) > entry["most_bytes"]:
            entry["most_bytes"] = most - sum(made.values())
            entry["shapes"] = [list(tensor.shape) for tensor in given]
            entry["copied_bytes"] = sum(tensor.nbytes for tensor in given if is_copied(name, tensor))
        return out


def main(plan: str, out: str) -> None:
    """Runs the plan's first step, and its sample where it makes one, and writes what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        read = read_plan(plan)
        config = FEW_BLOCKS if FEW_BLOCKS.keys() <= lookup.model(read.job.model).config.keys() else {}
        request = ProbeRequest.of(read, config=config, scratch=folder, device="cuda", steps=1, saves=False)
        training = ProbedTraining(request, Meter(torch.device("cuda"), None, ResultFile(Path(folder) / "facts.json")))
        training.load()
        with OperatorMemory() as operators:
            training.first_step()
            if request.strategy.validation_mode != "off":
                training.sample()
    Path(out).write_text(json.dumps(operators.seen, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
