"""A strategy's optimizer, from the library that other trainers use for it, and wrappers: steps inside backward, fp32
masters, states in host RAM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

import torch
from torch import nn

from planner.spec.job import SPLIT, Strategy
from planner.spec.training import TrainingSettings, optimizer_arguments
from trainers.memory.pinned import pinned_tensor


class StepFlags(TypedDict, total=False):
    """The flags that choose how torch's AdamW steps (foreach, fused)."""

    foreach: bool
    fused: bool


LOOP: StepFlags = {"foreach": False}
FOREACH: dict[str, StepFlags] = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": LOOP, "backward": LOOP}
"""`optimizer_step` -> torch AdamW's flags. Inside backward each optimizer has a single parameter."""

ALIGNMENT = 16
"""Alignment of weights in host RAM in bytes: enough for vector registers and for every dtype."""

TRANSPOSING = frozenset({"muon"})
"""Optimizers whose temporaries depend on which side of a matrix is longer: Muon transposes one that has more rows than
columns (torch/optim/_muon.py, ``_zeropower_via_newtonschulz``)."""

WAYS = ("foreach", "fused")
"""Settings of a torch parameter group that say how the optimizer steps."""


class MuonAndAdamW:
    """torch's Muon for matrices, and AdamW for all other parameters, which Muon does not support.

    Muon's updates are scaled to AdamW's size, so that AdamW's learning rates apply (torch.optim.Muon,
    ``match_rms_adamw``, arXiv 2502.16982). An adapter on linear layers has matrices only.
    """

    def __init__(self, parameters: list[nn.Parameter], settings: TrainingSettings) -> None:
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim != 2]
        self.optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            arguments = optimizer_arguments("muon", settings)
            self.optimizers.append(torch.optim.Muon(matrices, **arguments, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.optimizers.append(torch.optim.AdamW(others, **optimizer_arguments("adamw", settings)))

    def step(self) -> None:
        """Steps the matrices (Muon), then all other parameters (AdamW)."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients: they become None, or zeros if `set_to_none` is false."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of both optimizers, for setting the learning rate."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The states of both optimizers for a checkpoint, Muon's first."""
        return {"both": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state that `state_dict` gave."""
        for optimizer, kept in zip(self.optimizers, state["both"], strict=True):
            take_up(optimizer, kept)

    @property
    def state(self) -> dict[torch.Tensor, dict[str, object]]:
        """Parameter -> its optimizer state, over all parameters."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}


class SteppedInBackward:
    """An optimizer for each parameter, which steps as soon as the parameter's gradient is ready and then frees it.

    Uses ``register_post_accumulate_grad_hook`` (PyTorch tutorial ``optimizer_step_in_backward``; sd-scripts
    ``--fused_backward_pass``, diffusion-pipe ``gradient_release``). Gradients cannot be clipped by their joint norm.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], strategy: Strategy, settings: TrainingSettings) -> None:
        self.optimizers: dict[torch.Tensor, torch.optim.Optimizer | MuonAndAdamW] = {
            parameter: make_one([parameter], strategy, settings) for parameter in parameters
        }
        self._taken_up: set[torch.Tensor] = set()
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self.step_parameter)

    def step_parameter(self, parameter: torch.Tensor) -> None:
        """Steps one parameter and frees its gradient; called during backward."""
        optimizer = self.optimizers[parameter]
        if parameter in self._taken_up:  # torch put loaded states where the parameter was: a swapped one, in host RAM
            self._taken_up.remove(parameter)
            state = optimizer.state[parameter]
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    state[name] = value.to(parameter.device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, for setting the learning rate."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The states for a checkpoint, parameter by parameter in their order."""
        return {"each": [optimizer.state_dict() for optimizer in self.optimizers.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state that `state_dict` gave."""
        for optimizer, kept in zip(self.optimizers.values(), state["each"], strict=True):
            take_up(optimizer, kept)
        self._taken_up = set(self.optimizers)

    @property
    def state(self) -> dict[torch.Tensor, dict[str, object]]:
        """Parameter -> its optimizer state, over all parameters."""
        return {parameter: optimizer.state[parameter] for parameter, optimizer in self.optimizers.items()}


class OverMasters:
    """An optimizer over fp32 copies of 16-bit parameters, which are copied back after each step.

    Works as apex's FP16_Optimizer (apex/fp16_utils). Gradients are cast to fp32 one by one, and each 16-bit gradient is
    freed after its cast. A parameter that is fp32 already is its own master.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], strategy: Strategy, settings: TrainingSettings) -> None:
        self.masters = {
            parameter: parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for parameter in parameters
        }
        self.optimizer = make_one(list(self.masters.values()), strategy, settings)

    def step(self) -> None:
        """Steps the masters with the parameters' gradients, and frees these."""
        for parameter, master in self.masters.items():
            if parameter.grad is not None and master is not parameter:
                master.grad = parameter.grad.float()
                parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the step has already freed the gradients."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer over the fp32 masters, for setting the learning rate."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's states for a checkpoint, and the masters that are copies of parameters."""
        copies = [None if master is parameter else master.detach() for parameter, master in self.masters.items()]
        return {"masters": copies, "over_masters": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state that `state_dict` gave. The parameters themselves are loaded elsewhere."""
        for master, kept in zip(self.masters.values(), state["masters"], strict=True):
            if kept is not None:
                master.copy_(kept)
        take_up(self.optimizer, state["over_masters"])

    @property
    def state(self) -> dict[torch.Tensor, dict[str, object]]:
        """Parameter (not master) -> its optimizer state."""
        return {parameter: self.optimizer.state[master] for parameter, master in self.masters.items()}


class OnHost:
    """An optimizer in host RAM over pinned copies of the parameters, in the parameters' dtype, and of their gradients.

    Similar to torchao's CPUOffloadOptimizer, which does not allow clipping. ``take_gradients`` copies the gradients
    after backward; with ``offload_gradients`` each is copied as soon as it is ready, while backward goes on.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], strategy: Strategy, settings: TrainingSettings) -> None:
        trained = list(parameters)
        device = trained[0].device
        self._host, views = _host_like([*trained, *trained], pinned=device.type == "cuda")
        copies, gradients = views[: len(trained)], views[len(trained) :]
        self.hosts = {
            parameter: nn.Parameter(copy.copy_(parameter.detach()))
            for parameter, copy in zip(trained, copies, strict=True)
        }
        self.gradients = dict(zip(trained, gradients, strict=True))
        self._sending = torch.cuda.Stream(device) if device.type == "cuda" else None
        # One parameter at a time; AdamW's fused kernel reads and writes each number once.
        how = "fused" if strategy.optimizer == "adamw" else "loop"
        self.optimizer = make_one(list(self.hosts.values()), strategy.replace(optimizer_step=how), settings)
        if strategy.offload_gradients != "none":
            for parameter in self.hosts:
                parameter.register_post_accumulate_grad_hook(self._send)

    def _send(self, parameter: torch.Tensor) -> None:
        """Copies a gradient to the host once it is computed, and frees it on the device."""
        gradient = parameter.grad
        assert gradient is not None and isinstance(parameter, nn.Parameter)
        host = self.gradients[parameter]
        if self._sending is None:
            host.copy_(gradient)
        else:
            self._sending.wait_stream(torch.cuda.current_stream(gradient.device))
            with torch.cuda.stream(self._sending):
                host.copy_(gradient, non_blocking=True)
            gradient.record_stream(self._sending)
        self.hosts[parameter].grad = host
        parameter.grad = None

    def take_gradients(self) -> list[nn.Parameter]:
        """Moves all remaining gradients to host RAM and waits for the copies. Returns the host weights, which have the
        gradients now."""
        for parameter in self.hosts:
            if parameter.grad is not None:
                self._send(parameter)
        if self._sending is not None:
            self._sending.synchronize()
        return list(self.hosts.values())

    @torch.no_grad()
    def step(self) -> None:
        """Steps in host RAM with the gradients that were copied there, and copies the weights back to the GPU."""
        self.optimizer.step()
        for parameter, host in self.hosts.items():
            parameter.copy_(host, non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; their buffers in host RAM are reused."""
        for host in self.hosts.values():
            host.grad = None
        if self._sending is not None:  # the weights must have been copied out before new gradients arrive
            torch.cuda.current_stream(self._sending.device).synchronize()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer in host RAM, for setting the learning rate."""
        return self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's states for a checkpoint, in the same form as those of an optimizer on the GPU, so that a run
        can be resumed with either."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state that `state_dict` gave."""
        take_up(self.optimizer, state)

    @property
    def state(self) -> dict[torch.Tensor, dict[str, object]]:
        """Parameter (on the GPU) -> its optimizer state in host RAM."""
        return {parameter: self.optimizer.state[host] for parameter, host in self.hosts.items()}


def _host_like(parameters: list[nn.Parameter], pinned: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A buffer in host RAM as large as some parameters, and a view of it for each. It is pinned as a whole: CUDA pins
    pages, and a page may hold several small weights."""
    ends = [0]
    for parameter in parameters:
        ends.append(ends[-1] + -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT)
    host = pinned_tensor(ends[-1], pinned)
    return host, [
        host[begin : begin + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        for begin, parameter in zip(ends, parameters, strict=False)
    ]


Optimizer = torch.optim.Optimizer | MuonAndAdamW | SteppedInBackward | OverMasters | OnHost


def take_up(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Loads a saved optimizer state, each tensor in the dtype it was saved in.

    ``torch.optim.Optimizer.load_state_dict`` casts states to the parameters' dtype, but Adafactor and CAME keep those
    of 16-bit weights in fp32. (bitsandbytes handles its states separately and does not cast them.) The settings in
    `WAYS` are the plan's, not the checkpoint's: a run that ran out of memory may continue with another
    `optimizer_step`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict(saved)
        return
    ways = [{name: group[name] for name in WAYS if name in group} for group in optimizer.param_groups]
    groups = [{**group, **way} for group, way in zip(saved["param_groups"], ways, strict=True)]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = optimizer.state[parameter]
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dtype != state[name].dtype:
                state[name] = value.to(state[name].device)


AS_PRESET = TrainingSettings()
"""Default settings, for steps whose results do not matter."""


def make_optimizer(
    trainable: dict[str, nn.Parameter], strategy: Strategy, settings: TrainingSettings = AS_PRESET
) -> Optimizer:
    """The optimizer that a strategy asks for, over the trained parameters."""
    if strategy.master_weights == "fp32" and not strategy.sharding.startswith("zero"):  # DeepSpeed keeps its own
        return OverMasters(trainable.values(), strategy, settings)
    if strategy.offload_optimizer == "cpu" and strategy.sharding not in SPLIT:  # those offload it themselves
        return OnHost(trainable.values(), strategy, settings)
    if strategy.optimizer_step == "backward":
        return SteppedInBackward(trainable.values(), strategy, settings)
    return make_one(list(trainable.values()), strategy, settings)


def make_one(
    parameters: list[nn.Parameter], strategy: Strategy, settings: TrainingSettings
) -> torch.optim.Optimizer | MuonAndAdamW:
    """One optimizer over some parameters.

    AdamW and Muon are torch's. 8-bit AdamW, paged or not, and Lion are bitsandbytes'. Adafactor is transformers' with a
    fixed learning rate, as sd-scripts recommends. CAME is its authors' (came-pytorch, arXiv 2307.02047), Prodigy
    prodigyopt's.
    """
    if strategy.optimizer == "muon":
        return MuonAndAdamW(parameters, settings)
    arguments = optimizer_arguments(strategy.optimizer, settings)
    optimizer: torch.optim.Optimizer
    if strategy.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, **arguments, **FOREACH[strategy.optimizer_step])
    elif strategy.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        optimizer = Adafactor(parameters, **arguments, scale_parameter=False, relative_step=False, warmup_init=False)
    elif strategy.optimizer == "prodigy":
        from prodigyopt import Prodigy

        optimizer = Prodigy(parameters, **arguments)
    elif strategy.optimizer == "came":
        from came_pytorch import CAME

        optimizer = CAME(parameters, **arguments)
    else:
        from bitsandbytes import optim

        classes = {"adamw-8bit": optim.AdamW8bit, "adamw-8bit-paged": optim.PagedAdamW8bit, "lion": optim.Lion}
        optimizer = classes[strategy.optimizer](parameters, **arguments)
    return optimizer
