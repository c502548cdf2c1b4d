"""Makes the padding mask of diffusers' CosmosTransformer3DModel work without torchvision."""

from __future__ import annotations

from types import SimpleNamespace

from diffusers.models.transformers import transformer_cosmos


def keep_size() -> None:
    """Replaces torchvision, with which the model resizes the mask, by a no-op: our masks have the latents' size."""
    if not hasattr(transformer_cosmos, "transforms"):
        modes = SimpleNamespace(NEAREST="nearest")
        unresized = SimpleNamespace(resize=lambda mask, size, interpolation: mask)
        transformer_cosmos.transforms = SimpleNamespace(functional=unresized, InterpolationMode=modes)
