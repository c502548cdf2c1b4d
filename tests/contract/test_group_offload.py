"""diffusers' real group offloading, on small models on the CPU: the weights it moves are the ones we count.

Its groups, leaders and prefetching run unchanged. Only the copies are recorded instead of done, because both devices
are the same here; so the test knows at every moment which weights would be on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel
from diffusers.hooks import group_offloading
from torch import nn
from transformers import T5Config, T5EncoderModel

from planner.layout.group_offload import GroupTransfers, host_copy_bytes
from planner.tape.program import Moment, Stage
from planner.units import power_of_two

Model = tuple[nn.Module, dict[str, Any], tuple[str, ...]]
"""The model, arguments of a forward, and the module lists that a tape follows block by block."""


def wan() -> Model:
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=8,
        ffn_dim=32, num_layers=4, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.zeros(1, 4, 2, 4, 4),
        "timestep": torch.zeros(1),
        "encoder_hidden_states": torch.zeros(1, 7, 16),
    }
    return model, inputs, ("blocks",)


def flux() -> Model:
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.zeros(1, 16, 4),
        "encoder_hidden_states": torch.zeros(1, 5, 32),
        "pooled_projections": torch.zeros(1, 32),
        "timestep": torch.zeros(1),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, inputs, ("transformer_blocks", "single_transformer_blocks")


def unet() -> Model:
    model = UNet2DConditionModel(
        block_out_channels=(4, 8), layers_per_block=1, norm_num_groups=2, cross_attention_dim=8,
        attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    inputs = {
        "sample": torch.zeros(1, 4, 8, 8),
        "timestep": torch.zeros(1),
        "encoder_hidden_states": torch.zeros(1, 3, 8),
    }
    return model, inputs, ("down_blocks", "up_blocks")


def t5() -> Model:
    config = T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=3, num_heads=4, vocab_size=100)
    return T5EncoderModel(config), {"input_ids": torch.zeros(1, 6, dtype=torch.long)}, ("encoder.block",)


class Watched:
    """Tracks which weights are present during a forward: the most bytes in each part of the model."""

    def __init__(self, model: nn.Module, blocks: dict[tuple[str, int], nn.Module]) -> None:
        self.there: set[torch.Tensor] = set()
        self.place: tuple[str, int] | None = None
        self.order: list[tuple[str, int]] = []
        self.most: dict[tuple[str, int] | None, int] = {}
        for key, block in blocks.items():
            block.register_forward_pre_hook(self._enter(key))
            block.register_forward_hook(self._leave)

    def onload(self, group: group_offloading.ModuleGroup) -> None:
        self.there |= set(tensors_of(group))
        self._look()

    def offload(self, group: group_offloading.ModuleGroup) -> None:
        self.there -= set(tensors_of(group))

    def _look(self) -> None:
        self.most[self.place] = max(self.most.get(self.place, 0), sum(map(rounded, self.there)))

    def _enter(self, key: tuple[str, int]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.place = key
            self.order.append(key)

        return hook

    def _leave(self, *_: Any) -> None:
        self.place = None


def rounded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 512) * 512


def tensors_of(group: group_offloading.ModuleGroup) -> Iterator[torch.Tensor]:
    for module in group.modules:
        yield from module.parameters()
        yield from module.buffers()
    yield from (*group.parameters, *group.buffers)


class Stream:
    """A stand-in for a CUDA stream; nothing is copied."""

    def synchronize(self) -> None:
        pass


def run(monkeypatch: pytest.MonkeyPatch, model: Model, kind: str, stream: bool) -> tuple[Watched, dict[str, int]]:
    """Runs a model twice under the real hooks; the first forward only discovers the order."""
    module, inputs, lists = model
    module.eval()
    blocks = {(name, i): block for name in lists for i, block in enumerate(module.get_submodule(name))}
    watched = Watched(module, blocks)
    monkeypatch.setattr(group_offloading.ModuleGroup, "_onload_from_memory", lambda group: watched.onload(group))
    monkeypatch.setattr(group_offloading.ModuleGroup, "_offload_to_memory", lambda group: watched.offload(group))
    sizes = {name: tensor.nbytes for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    group_offloading._apply_group_offloading(module, _config(kind, stream))
    with torch.no_grad():
        for _ in range(3):
            assert not watched.there
            watched.most, watched.order = {}, []
            module(**inputs)
    return watched, sizes


def _config(kind: str, stream: bool) -> group_offloading.GroupOffloadingConfig:
    return group_offloading.GroupOffloadingConfig(
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type=group_offloading.GroupOffloadingType(f"{kind}_level"),
        non_blocking=False,
        record_stream=False,
        low_cpu_mem_usage=True,  # else it pins, which needs a GPU
        num_blocks_per_group=1,
        stream=Stream() if stream else None,  # type: ignore[arg-type]
    )


def woven(watched: Watched, sizes: dict[str, int], kind: str, stream: bool) -> dict[tuple[str, int] | None, int]:
    """The most bytes of weights in each part of the model, as estimated."""
    table = [-(-nbytes // 512) * 512 for nbytes in sizes.values()]

    def new(nbytes: int) -> int:
        table.append(nbytes)
        return len(table) - 1

    outside = Moment("denoise", "forward", "", -1)
    places = [outside, *(Moment("denoise", "forward", *block) for block in watched.order), outside]
    stage = Stage("denoise", [(moment, []) for moment in places])
    GroupTransfers(kind, stream, table.__getitem__, new).insert(stage, {name: i for i, name in enumerate(sizes)})
    held = 0
    most: dict[tuple[str, int] | None, int] = {}
    for moment, events in stage.stretches:
        held += sum(table[event] if event >= 0 else -table[~event] for event in events)
        if moment.piece:
            place = (moment.module_list, moment.block) if moment.block >= 0 else None
            most[place] = max(most.get(place, 0), held)
    assert held == 0
    return most


MODELS = {"wan": wan, "flux": flux, "unet": unet, "t5": t5}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_by_block_the_same_weights_are_there(monkeypatch: pytest.MonkeyPatch, name: str, stream: bool) -> None:
    watched, sizes = run(monkeypatch, MODELS[name](), "block", stream)
    counted = woven(watched, sizes, "block", stream)
    assert max(watched.most.values()) == max(counted.values())
    if not stream:  # with one, a part's first weights come while the part before it runs
        assert {place: counted[place] for place in watched.most} == watched.most


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_by_leaf_no_more_weights_are_there_than_are_counted(
    monkeypatch: pytest.MonkeyPatch, name: str, stream: bool
) -> None:
    watched, sizes = run(monkeypatch, MODELS[name](), "leaf", stream)
    counted = woven(watched, sizes, "leaf", stream)
    assert max(watched.most.values()) <= max(counted.values())
    if not stream:  # with one, the two largest layers may not follow each other
        assert {place: counted[place] for place in watched.most} == watched.most


@pytest.mark.parametrize("kind", ["block", "leaf"])
@pytest.mark.parametrize("name", MODELS)
def test_with_a_stream_the_same_weights_have_a_copy_for_good(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    made: list[torch.Tensor] = []
    let_go: list[int] = []

    def copied(tensor: torch.Tensor, _low_memory: bool) -> torch.Tensor:
        made.append(tensor)
        return tensor.data

    monkeypatch.setattr(group_offloading.ModuleGroup, "_to_cpu", staticmethod(copied))
    monkeypatch.setattr(group_offloading.ModuleGroup, "offload_", lambda _: let_go.append(len(made)))
    model = MODELS[name]()
    config = _config(kind, stream=True)
    group_offloading._apply_group_offloading(model[0], config)
    sizes = {name: tensor.nbytes for name, tensor in (*model[0].named_parameters(), *model[0].named_buffers())}
    pageable, pinned = host_copy_bytes(kind, True, sizes, model[2])
    # Two layers of T5 hold one table of tokens, and each copies it; a layer that never runs is not counted.
    once = dict.fromkeys(made)
    assert len(made) - len(once) == (name == "t5" and kind == "leaf")
    assert sum(power_of_two(tensor.nbytes) for tensor in once) == pinned
    assert pageable == sum(sizes.values()) - sum(tensor.nbytes for tensor in once)
    # When the first group is let go: by block all copies are there, by leaf those of its own.
    assert let_go[0] == len(made) if kind == "block" else let_go[0] < len(made)


def test_a_text_encoders_layers_are_no_direct_children() -> None:
    """So by block the whole encoder is on the GPU while it runs."""
    module, _, _ = t5()
    assert not any(isinstance(child, nn.ModuleList | nn.Sequential) for child in module.children())
