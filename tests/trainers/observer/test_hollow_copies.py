"""Copies of hollow weights in host RAM are counted and not made; copies of anything else are made."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from planner.rehearsal.hollow.tensor_files import TensorEntry, write_safetensors
from trainers.observer.hollow_copies import HollowCopies

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

ELEMENTS = 2**30
"""Of a bf16 tensor: 4 GiB once it is cast to fp32."""


def mode(copies: HollowCopies) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name.partition("::")[2]
            if name in ("_to_copy", "clone", "copy_"):
                result = copies.run(name, func, args, kwargs or {})
                if result is not None:
                    return result
            return func(*args, **(kwargs or {}))

    return Watching()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_cast_of_hollow_weights_takes_no_ram(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, [TensorEntry("weight", "bf16", (ELEMENTS // 1024, 1024))])
    copies = HollowCopies(torch, [str(tmp_path)])
    before = resident_bytes()
    with mode(copies):
        weight = safetensors_torch.load_file(str(path))["weight"]
        cast = weight.to(torch.float32)
        again = cast.t().clone()
        assert (cast.dtype, cast.shape, cast.stride()) == (torch.float32, weight.shape, weight.stride())
        assert (again.dtype, again.shape, again.is_contiguous()) == (torch.float32, cast.t().shape, False)
        assert resident_bytes() - before < 2**28
        assert copies.most_unwritten_bytes == 2 * ELEMENTS * 4
        del cast, again
        weight.float()
        assert copies.most_unwritten_bytes == 2 * ELEMENTS * 4


def test_other_copies_are_made(tmp_path: Path) -> None:
    copies = HollowCopies(torch, [str(tmp_path)])
    with mode(copies):
        values = torch.arange(2**20, dtype=torch.float32)
        target = torch.zeros(2**20)
        assert values.double()[7] == 7
        assert values.clone()[8] == 8
        assert target.copy_(values)[9] == 9
    assert copies.most_unwritten_bytes == 0
