"""What the families of diffusers' CosmosTransformer3DModel share."""

from __future__ import annotations

from types import SimpleNamespace

from diffusers.models.transformers import transformer_cosmos
from torch import nn

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family


class CosmosTransformer(Family):
    """A family with one table of positions for all axes, whose model takes a padding mask."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        sizes = zip(self.config["max_size"], self.config["patch_size"], strict=True)
        self.longest_side = max(size // patch for size, patch in sizes)

    def prepare(self, model: nn.Module) -> None:
        """Makes the mask work without torchvision, with which the model resizes it: ours has the latents' size."""
        if not hasattr(transformer_cosmos, "transforms"):
            modes = SimpleNamespace(NEAREST="nearest")
            unresized = SimpleNamespace(resize=lambda mask, size, interpolation: mask)
            transformer_cosmos.transforms = SimpleNamespace(functional=unresized, InterpolationMode=modes)
