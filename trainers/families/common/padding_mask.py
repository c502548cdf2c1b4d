"""The mask of padding that diffusers' CosmosTransformer3DModel takes, without torchvision."""

from __future__ import annotations

from types import SimpleNamespace

from diffusers.models.transformers import transformer_cosmos


def keep_size() -> None:
    """Lets the model do without torchvision, which it resizes the mask with: ours has the latents' size."""
    if not hasattr(transformer_cosmos, "transforms"):
        modes = SimpleNamespace(NEAREST="nearest")
        unresized = SimpleNamespace(resize=lambda mask, size, interpolation: mask)
        transformer_cosmos.transforms = SimpleNamespace(functional=unresized, InterpolationMode=modes)
