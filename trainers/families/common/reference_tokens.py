"""What the families share whose models take a reference image as tokens behind the noisy ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from planner.catalog.profiles import ModelProfile
from trainers.families.common.base import Family


class ReferenceTokens(Family):
    """A family with a joint sequence of text, image and, in its edit models, the reference (grid atom E)."""

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.extra_tokens = profile.shape.references > 0
        extra = ("E",) if self.extra_tokens else ()
        self.sums = {"S": (0, ("FHW", "T", *extra))} | ({"I": (0, ("FHW", "E"))} if extra else {})

    def loss(self, prediction: Tensor, target: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The loss over the noisy tokens; the output for the reference is dropped."""
        return super().loss(prediction[:, : target.shape[1]] if self.extra_tokens else prediction, target, inputs)
