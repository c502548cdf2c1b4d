"""A moving average of the trained weights, in fp32, on the GPU or in host RAM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.spec.training import EMA_DECAY
from trainers.parallel import parallel


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _write(parameter: nn.Parameter, values: Tensor) -> None:
    """Overwrites a parameter's values where it is now: making a sample may have moved it to host RAM and back."""
    _local(parameter.detach()).copy_(values)


def _exchange(parameter: nn.Parameter, shadow: Tensor) -> None:
    own = _local(parameter.detach()).to(shadow.device, copy=True)
    _write(parameter, shadow)
    shadow.copy_(own)


class Average:
    """Follows the trained weights after every step; under FSDP2 each rank follows its own shards.

    The decay grows with the steps, ``(1 + n) / (10 + n)`` up to ``decay`` (diffusers training_utils,
    EMAModel.get_decay), and parameters are moved by the difference one at a time (EMAModel.step).
    """

    def __init__(self, trainable: dict[str, nn.Parameter], where: str, decay: float = EMA_DECAY) -> None:
        self.trainable, self.decay = trainable, decay
        self.steps = 0
        # FSDP2's stay DTensors as they are copied: `DTensor.from_local` would move a part in host RAM to the GPU.
        self._kept = {
            name: parameter.detach().to("cpu" if where == "cpu" else parameter.device, torch.float32, copy=True)
            for name, parameter in trainable.items()
        }
        self.shadow = {name: _local(average) for name, average in self._kept.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the current weights; call it after each optimizer step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, parameter in self.trainable.items():
            shadow = self.shadow[name]
            difference = shadow - _local(parameter.detach()).to(shadow.device)
            shadow.sub_(difference.mul_(1 - decay))

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """A context in which the model holds the average; afterwards it has its own weights again, bit for bit. No step
        and no checkpoint may happen in between.

        fp32 weights are swapped with the average, one parameter at a time. For other dtypes the average would lose
        precision in the swap, so the weights are kept in host RAM.
        """
        with contextlib.ExitStack() as back:
            for name, parameter in self.trainable.items():
                shadow = self.shadow[name]
                if parameter.dtype == shadow.dtype:
                    _exchange(parameter, shadow)
                    back.callback(_exchange, parameter, shadow)
                else:
                    back.callback(_write, parameter, _local(parameter.detach()).to("cpu", copy=True))
                    _write(parameter, shadow)
            yield

    def kept(self, name: str) -> Tensor:
        """The average of one parameter, for a checkpoint to save or to read into; a DTensor if the parameter is one."""
        return self._kept[name]

    def full_tensor(self, name: str) -> Tensor:
        """The average of one parameter, unsharded. All ranks call it together."""
        parameter = self.trainable[name]
        if not isinstance(parameter, DTensor):
            return self.shadow[name]
        spread = parallel.spread_like(self.shadow[name].to(parameter.device), parameter)
        assert isinstance(spread, DTensor)
        return spread.full_tensor()
