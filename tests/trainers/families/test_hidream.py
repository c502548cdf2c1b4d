"""HiDream's target is what the model returns in training, whatever an image's sides; recordings of few blocks have the
whole model's texts; and experts that take rows by numbers keep for backward what those keep that take them by masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from diffusers.models.transformers import transformer_hidream_image as hidream  # noqa: E402

from planner.spec.job import Job, Strategy  # noqa: E402
from tests.trainers import tiny  # noqa: E402
from trainers import families  # noqa: E402
from trainers.recording import token_routing  # noqa: E402
from trainers.step import step  # noqa: E402

PROFILE = tiny.profile("hidream-i1")
PLAIN = {"weights_dtype": "fp32", "autocast": "none", "compute_dtype": "fp32", "optimizer": "adamw"}


def model(config: dict[str, Any] | None = None) -> torch.nn.Module:
    job = Job.read({"model": PROFILE.name, "method": "full", "frames": 1, "height": 64, "width": 64})
    return step.build_model(PROFILE, job, Strategy.read({**PLAIN, "gradient_checkpointing": "none"}), config)


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 8)])
def test_the_target_lies_as_the_class_returns_an_image_in_training(rows: int, columns: int) -> None:
    """One that is not square comes back filled up, and the loss leaves out what fills it up."""
    made, kind = model(), families.family(PROFILE)
    latents = torch.randn(2, 16, rows, columns)
    cells, _, sizes, _ = made.patchify(latents)
    returned = made.unpatchify(cells, sizes, is_training=True)
    target = kind.by_cell(latents)
    assert target.shape == (2, 16, rows * columns // 4, 4)
    assert returned.shape[2] == (target.shape[2] if rows == columns else made.max_seq)
    torch.testing.assert_close(returned[:, :, : target.shape[2]], target)
    assert kind.loss(returned, target, {}) == 0
    returned[:, :, target.shape[2] :] += 5
    assert kind.loss(returned, target, {}) == 0


def test_fewer_blocks_have_the_whole_model_s_texts() -> None:
    few = model({**PROFILE.config, "num_layers": 1, "num_single_layers": 1})
    assert len(few.caption_projection) == len(model().caption_projection) == 5
    projections = list(few.caption_projection)
    assert len({id(projection.linear.weight) for projection in projections}) == 5


def kept_bytes(layer: torch.nn.Module, states: torch.Tensor) -> int:
    """What a layer's forward keeps for backward, but for its weights: each memory once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(states)
    total = sum(storage.nbytes() for storage in kept.values())
    out.sum().backward()
    return total


@pytest.mark.parametrize("trained", [True, False])
def test_experts_keep_the_same_by_row_numbers_as_by_masks(trained: bool) -> None:
    torch.manual_seed(0)
    layer = hidream.MOEFeedForwardSwiGLU(64, 256, 4, 2).train().requires_grad_(trained)
    states = torch.randn(1, 512, 64, requires_grad=True)
    by_masks = kept_bytes(layer, states)
    own = layer.gate.forward

    def without_numbers(hidden: torch.Tensor) -> Any:
        chosen, weights, loss = own(hidden)
        return torch.zeros_like(chosen), weights, loss

    other = copy.deepcopy(layer)
    other.gate.forward = without_numbers
    with token_routing.by_row_numbers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", lambda tensor, *size: tensor.new_zeros(*size))  # rows that are there
        by_numbers = kept_bytes(other, states)
    assert by_numbers == pytest.approx(by_masks, rel=0.02)


def test_the_class_is_as_it_was_behind_a_recording() -> None:
    before = hidream.MOEFeedForwardSwiGLU.forward, hidream.HiDreamImageTransformer2DModel.patchify
    with token_routing.by_row_numbers():
        assert hidream.MOEFeedForwardSwiGLU.forward is not before[0]
    assert (hidream.MOEFeedForwardSwiGLU.forward, hidream.HiDreamImageTransformer2DModel.patchify) == before
