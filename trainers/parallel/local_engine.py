"""The engine of a process that has the whole model, and the base of those for DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.parallel import context
from trainers.parallel.state_files import SavedState, Share, share_of
from trainers.step import step
from trainers.step.loss_scaling import LossScaler
from trainers.step.optimizers import take_up

SCALER = "loss scaler"
"""Key of the loss scaler's state beside the optimizer's."""


class LocalEngine(step.Engine):
    """The engine of a process that has all weights and the whole optimizer: alone, or sharing gradients with others."""

    replicated = True
    """Whether every rank has the same state, so that one of them saves it for all."""

    averages = False
    """Whether the gradients of a step are the mean over all ranks."""

    gathers = False
    """Whether weights are split over the ranks, so that all ranks have to run every forward together."""

    splits_weights = False
    """Whether each rank saves its own share of the trained weights"""

    def __init__(self, trainee: step.Trainee, scaler: LossScaler | None = None) -> None:
        super().__init__(scaler)
        self.trainee = trainee
        self.parts = 1
        """ranks that share a sample"""
        self.plain = trainee.model
        """the model without what an engine puts around it"""
        self.parameters = dict(trainee.model.named_parameters())

    def backward(self, loss: Tensor) -> None:
        # Ranks that share a sample each have a part of its gradient, and the sum is needed. If the engine takes the
        # mean over all ranks, a larger loss makes up for it.
        super().backward(loss if self.parts == 1 or not self.averages else loss * self.parts)

    def step(self, trainee: step.Trainee) -> None:
        if self.parts > 1 and not self.averages:  # nothing else adds the parts up
            context.add_up(list(trainee.trainable.values()))
        super().step(trainee)

    def full_tensor(self, name: str) -> Tensor:
        """A trained weight by its full name, unsharded, on the device it is on. All ranks must call it together,
        because it may be gathered."""
        return self.parameters[name].detach()

    def kept_weight(self, name: str, key: str) -> list[Share]:
        """This rank's share of a trained weight, under its key in a checkpoint. All ranks call it together."""
        return share_of(key, self.full_tensor(name), dist.get_rank() if dist.is_initialized() else 0)

    def state(self) -> dict[str, Any]:
        """The optimizer's state for a checkpoint, as `state_files.taken_apart` takes it; its tensors are not copies."""
        assert self.trainee.optimizer is not None
        scaling = {SCALER: self.scaler.state_dict()} if self.scaler else {}
        return {**self.trainee.optimizer.state_dict(), **scaling}

    def read_state(self, saved: SavedState) -> None:
        """Restores the state from a checkpoint, whatever number of ranks wrote it."""
        self.load_state(saved.read(self.room))

    def room(self, shape: torch.Size, dtype: torch.dtype, is_split: bool) -> Tensor:
        """An empty tensor in host RAM for a tensor of the state. ``shape``: of the whole tensor."""
        assert not is_split
        return torch.empty(shape, dtype=dtype)

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads what `state` returned. Removes entries from the dict while it loads."""
        assert self.trainee.optimizer is not None
        if self.scaler:
            self.scaler.load_state_dict(state.pop(SCALER))
        take_up(self.trainee.optimizer, state)

    def release(self) -> None:
        """Frees weights that a forward without a backward has left gathered. All ranks call it together."""

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, whose ``lr`` is the learning rate of the next step."""
        assert self.trainee.optimizer is not None
        return self.trainee.optimizer.param_groups
