"""A moving average of the trained weights, in fp32, on the GPU or in host RAM."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainers.parallel import parallel

DECAY = 0.9999
"""As diffusers' EMAModel and its training examples."""


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Average:
    """Follows the weights after every step; under FSDP2 each rank follows its shares.

    The decay grows with the steps, ``(1 + n) / (10 + n)`` up to 0.9999 (diffusers training_utils.EMAModel.get_decay),
    and one parameter at a time is moved by the difference (EMAModel.step).
    """

    def __init__(self, trainable: dict[str, nn.Parameter], where: str) -> None:
        self.trainable = trainable
        self.steps = 0
        self.shadow = {
            name: _local(parameter.detach()).to("cpu" if where == "cpu" else parameter.device, torch.float32, copy=True)
            for name, parameter in trainable.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the present weights: call it after each optimizer step."""
        self.steps += 1
        decay = min(DECAY, (1 + self.steps) / (10 + self.steps))
        for name, parameter in self.trainable.items():
            shadow = self.shadow[name]
            difference = shadow - _local(parameter.detach()).to(shadow.device)
            shadow.sub_(difference.mul_(1 - decay))

    def full_tensor(self, name: str) -> Tensor:
        """The average of one parameter, unsplit; all ranks ask together."""
        return parallel.join_like(self.shadow[name], self.trainable[name])

    @torch.no_grad()
    def load(self, name: str, unsplit: Tensor) -> None:
        """Loads the average of one weight from an unsplit tensor, as `full_tensor` gave it."""
        self.shadow[name].copy_(parallel.split_like(unsplit, self.trainable[name]))
