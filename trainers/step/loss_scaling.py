"""Loss scaling: small gradients underflow in fp16, so the loss is scaled up and the gradients are scaled down again.

Built on ``torch.amp.GradScaler`` (arXiv 1710.03740, section 3.2). It keeps a few numbers on the GPU and unscales in
place, so it does not change a plan's memory, and recordings leave it out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.spec.fp16 import scales_loss
from planner.spec.job import Job, Strategy
from trainers.step.optimizers import Optimizer


class LossScaler(torch.amp.GradScaler):
    """A scaler that counts the steps it skips because a gradient was infinite."""

    skipped = 0

    def step_unless_infinite(self, optimizer: Optimizer) -> None:
        """Steps with the unscaled gradients; if one is infinite, skips the step and halves the scale."""
        before = self.get_scale()
        self.step(optimizer)  # type: ignore[arg-type]  # ours have all that it asks of torch's
        self.update()
        self.skipped += self.get_scale() < before

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscales the gradients, those in host RAM (`OnHost`) too: torch copies the scale to the gradients' device
        asynchronously, and the CPU would read it before the copy is done. So it is copied synchronously first."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if any(weight.grad is not None and weight.grad.is_cpu for weight in weights):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(
            optimizer,  # type: ignore[arg-type]  # only its groups are read
            inv_scale,
            found_inf,
            allow_fp16,
        )

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state for a checkpoint, with the number of skipped steps."""
        return {**super().state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that `state_dict` gave."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "skipped"})
        self.skipped = state_dict["skipped"]


def loss_scaler(job: Job, strategy: Strategy, device: torch.device) -> LossScaler | None:
    """A loss scaler for a strategy that needs one; None for others."""
    return LossScaler(device.type) if scales_loss(job, strategy) else None
