"""Work in host RAM on values that nobody has is counted and not done; all other work is done."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest

from planner.rehearsal.hollow.tensor_files import TensorEntry, write_safetensors
from trainers.observer.hollow_tensors import HANDLED, MADE, HollowTensors, HollowUpdates

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

ELEMENTS = 2**30
"""Of a bf16 tensor: 4 GiB once it is cast to fp32."""
LITTLE_RAM = 2**28


def mode(hollow: HollowTensors) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name.partition("::")[2]
            if name in HANDLED:
                result = hollow.run(name, func, args, kwargs or {})
                if result is not MADE:
                    return result
            return func(*args, **(kwargs or {}))

    return Watching()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def hollow_weight(folder: Path) -> Any:
    """A weight of ELEMENTS in bf16 of a checkpoint without data."""
    path = folder / "model.safetensors"
    write_safetensors(path, [TensorEntry("weight", "bf16", (ELEMENTS // 1024, 1024))])
    return safetensors_torch.load_file(str(path))["weight"]


def test_a_cast_of_hollow_weights_takes_no_ram(tmp_path: Path) -> None:
    hollow = HollowTensors(torch, [str(tmp_path)])
    before = resident_bytes()
    with mode(hollow):
        weight = hollow_weight(tmp_path)
        cast = weight.to(torch.float32)
        again = cast.t().clone()
        assert (cast.dtype, cast.shape, cast.stride()) == (torch.float32, weight.shape, weight.stride())
        assert (again.dtype, again.shape, again.is_contiguous()) == (torch.float32, cast.t().shape, False)
        assert resident_bytes() - before < LITTLE_RAM
        assert hollow.most_unwritten_bytes == 2 * ELEMENTS * 4
        del cast, again
        weight.float()
        assert hollow.most_unwritten_bytes == 2 * ELEMENTS * 4


def test_an_update_of_hollow_weights_takes_no_ram(tmp_path: Path) -> None:
    hollow = HollowTensors(torch, [str(tmp_path)])
    before = resident_bytes()
    with mode(hollow):
        hollowed = torch.nn.Parameter(hollow_weight(tmp_path).float())
        real = torch.nn.Parameter(torch.ones(2**20))
        hollowed.grad, real.grad = torch.zeros_like(hollowed), torch.ones_like(real)
        optimizer = torch.optim.AdamW([hollowed, real], lr=0.5, weight_decay=0.0, fused=True)
        optimizer.step()
        hollowed.grad.mul_(0.5)
        assert resident_bytes() - before < LITTLE_RAM
    assert torch.allclose(real, torch.full_like(real, 0.5))
    assert hollow.most_unwritten_bytes == 4 * ELEMENTS * 4  # the weight, its gradient and two states
    assert optimizer.state[hollowed]["step"] == 1


def test_an_update_by_deepspeed_is_left_out_as_well(tmp_path: Path) -> None:
    class Library:
        """Its place here: DeepSpeed's own is compiled when it is first asked for."""

        updates = 0

        def adam_update(self, *arguments: Any) -> None:
            self.updates += 1

    hollow, library = HollowTensors(torch, [str(tmp_path)]), Library()
    updates = HollowUpdates(library, hollow)
    numbers = (0, 1, 1e-4, 0.9, 0.999, 1e-8, 0.0, True)
    with mode(hollow):
        weight = hollow_weight(tmp_path).float()
        updates.adam_update(*numbers, weight, *(torch.zeros_like(weight) for _ in range(3)))
        assert library.updates == 0
        updates.adam_update(*numbers, *(torch.ones(2**20) for _ in range(4)))
        assert library.updates == 1


def test_other_work_is_done(tmp_path: Path) -> None:
    hollow = HollowTensors(torch, [str(tmp_path)])
    with mode(hollow):
        values = torch.arange(2**20, dtype=torch.float32)
        target = torch.zeros(2**20 + 5)[5:]
        assert not target.any()
        assert values.double()[7] == 7
        assert values.clone()[8] == 8
        assert target.copy_(values)[9] == 9
        assert target.mul_(2.0)[9] == 18
    assert hollow.most_unwritten_bytes == 0


def test_what_was_hollow_is_filled(tmp_path: Path) -> None:
    hollow = HollowTensors(torch, [str(tmp_path)])
    with mode(hollow):
        filled = hollow_weight(tmp_path)[:1024].float()
        assert hollow.most_unwritten_bytes == 2**22
        assert filled.copy_(torch.ones_like(filled)).mul_(2.0).clone()[0, 0] == 2


def test_pages_that_the_program_wrote_to_before_are_given_back(tmp_path: Path) -> None:
    hollow = HollowTensors(torch, [str(tmp_path)])
    before = resident_bytes()
    with mode(hollow):
        part = hollow_weight(tmp_path)[:1024]
        casts = []
        for _ in range(128):
            read = bytearray(b"\1") * 2**22  # as much as the cast: malloc hands its pages out again
            del read
            casts.append(part.float())
        assert resident_bytes() - before < LITTLE_RAM
    assert not casts[0].any()


def test_zeros_that_a_program_read_itself_take_no_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "frombuffer", torch.frombuffer)  # so that it is put back
    hollow = HollowTensors(torch, [str(tmp_path)])
    hollow.watch_buffers()
    before = resident_bytes()
    read = [torch.frombuffer(bytearray(b"\0") * 2**22, dtype=torch.uint8) for _ in range(128)]
    assert resident_bytes() - before < LITTLE_RAM and not read[0].any()
    assert hollow.most_unwritten_bytes == 128 * 2**22
    last = bytearray(2**22)
    last[-1] = 7
    assert torch.frombuffer(last, dtype=torch.uint8)[-1] == 7
    assert hollow.most_unwritten_bytes == 128 * 2**22
