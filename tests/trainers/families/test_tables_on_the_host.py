"""Tables of positions that a class makes on the host are moved once, before its blocks would copy them one by one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from torch import nn  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from trainers.families.any_class import AnyClass  # noqa: E402


class Rotations(nn.Module):
    """Makes its tables where torch makes what nobody asks for elsewhere: on the host."""

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(image.shape[-1]), torch.zeros(image.shape[-1])


class Model(nn.Module):
    """Rotations outside its blocks, and the same in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Rotations()
        self.single_transformer_blocks = nn.ModuleList([Rotations()])

    def forward(self, image: torch.Tensor) -> tuple[Any, Any]:
        frames = torch.arange(image.shape[-1])  # on the host as well, as Helios has them
        return self.rope(image=frames), self.single_transformer_blocks[0](image)


def test_tables_lie_where_the_input_of_the_model_does() -> None:
    profile = lookup.model("flux.1-dev")
    called = {"forward": {"hidden_states": "B HW 64"}, "main": "hidden_states", "channel_axis": 2}
    model = Model()
    AnyClass(profile.replace(inputs=called)).prepare(model)
    tables, in_block = model(torch.empty(2, 3, device="meta"))
    assert [table.device.type for table in tables] == ["meta", "meta"], "the device of the image"
    assert [table.device.type for table in in_block] == ["cpu", "cpu"], "blocks are left as they are"
