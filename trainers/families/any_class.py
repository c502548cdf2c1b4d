"""Any transformer or UNet of diffusers, called with the arguments that its profile describes.

`vplan record` finds that description (`trainers.recording.any_class`) or gets it from the user; this family makes
tensors of it. The loss is the squared error of the velocity, or of the noise if the pipeline's scheduler is a DDPM one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Self

import torch
from diffusers import DDPMScheduler
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.catalog import shapes
from planner.catalog.forward_call import ForwardCall
from planner.catalog.forward_inputs import LEVELS, SAMPLES, Argument, parse_argument
from planner.catalog.profiles import ModelProfile, Stack
from planner.errors import VplanError
from planner.spec.job import Job
from planner.tape.format import HEAD, TAIL
from trainers.families.common import random_draws
from trainers.families.common.base import Family, Grid
from trainers.families.common.model_classes import class_of


class AnyClass(Family):
    """A model without a family of its own. Its batch has a tensor for each tensor in the description."""

    copies_masks = adds_masks_up = True

    def __init__(self, profile: ModelProfile) -> None:
        super().__init__(profile)
        self.called = ForwardCall.read(profile.inputs)
        self.fixed = {**({"F": 1} if profile.kind == "image" else {}), **self.called.fixed}
        self.sums = {name: (entry.constant, entry.products) for name, entry in self.called.sums.items()}
        self.rounded = {name: (entry.product, entry.unit) for name, entry in self.called.rounded.items()}
        self.short_sides = self.called.short_sides
        self.extra_tokens = self.called.uses("E")
        self.shared = frozenset(
            name for name, leaf in self._leaves.items() if not leaf.has_samples and leaf.kind != "number"
        )
        self._grid: Mapping[str, int] | None = None
        forward = class_of(profile.diffusers_class).forward
        if "return_dict" not in inspect.signature(forward).parameters:
            self.plain_outputs = {}

    @functools.cached_property
    def _leaves(self) -> dict[str, Argument]:
        """Every argument by its dotted name; lists with an entry per sample are one tensor with a batch dimension."""
        return dict(self.called.arguments())

    @functools.cached_property
    def _scheduler(self) -> DDPMScheduler:
        return DDPMScheduler(**self.profile.training.scheduler)

    def for_job(self, job: Job) -> Self:
        if len(job.shapes) == 1:
            self._grid = shapes.sample_grid(self.profile, job)
        return super().for_job(job)

    def prepare(self, model: nn.Module) -> None:
        """Adds hooks that move the outputs of modules without weights to the device of the model's inputs, once a step.
        A few classes make their tables of positions on the host (EasyAnimate), and every block would copy them and keep
        its copies for backward. The module's own inputs do not tell the device: they may be on the host too (Helios'
        frames)."""
        blocks = tuple(f"{stack.list}." for stack in self.profile.stacks)
        device = _DeviceOfInputs()
        model.register_forward_pre_hook(device.note, with_kwargs=True)
        for name, module in model.named_modules():
            plain = type(module).__module__.startswith("torch.nn.") or any(True for _ in module.parameters())
            if name and not plain and not f"{name}.".startswith(blocks):
                module.register_forward_hook(device.moved)

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        self._grid = dict(grid)
        tensors = {}
        for name, argument in self._leaves.items():
            if argument.kind in ("number", *LEVELS):
                continue
            size = list(argument.shape(grid))
            if name == self.called.main:
                size[self.called.channel_axis] -= self.called.condition
            tensors[name] = _filled(tuple(size), argument.kind, device, dtype)
        if self.called.condition:
            size = list(self._leaves[self.called.main].shape(grid))
            size[self.called.channel_axis] = self.called.condition
            tensors["condition"] = torch.randn(size, device=device, dtype=dtype)
        if self.called.target:
            tensors["target"] = torch.randn(
                parse_argument(self.called.target, "target").shape(grid), device=device, dtype=dtype
            )
        return tensors

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        latents = batch[self.called.main]
        if self.profile.training.objective == "flow":
            noisy, levels, target = self.flow_matching(latents)
            steps = levels * self.profile.training.num_train_timesteps
        else:
            noisy, steps, target = self._noised(latents)
            levels = steps
        if self.called.condition:
            noisy = torch.cat([noisy, batch["condition"]], dim=self.called.channel_axis)
        values = {**batch, self.called.main: noisy}
        for name, argument in self._leaves.items():
            if argument.kind in LEVELS:
                level = steps if argument.kind.startswith("timestep") else levels
                if not level.is_floating_point() and argument.kind.startswith("sigma"):
                    level = level / self.profile.training.num_train_timesteps
                level = level.to(latents.dtype) if argument.kind.endswith("_as_latents") else level
                values[name] = self._expanded(level, argument)
        inputs = {name: self._built(tree, name, values, per_sample=False) for name, tree in self.called.forward.items()}
        return inputs, batch.get("target", target)

    def _noised(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(noisy latents, timesteps, noise), as DDPM trains (arXiv 2006.11239)."""
        noise = random_draws.normal_like(latents)
        steps = random_draws.integers(self.profile.training.num_train_timesteps, latents.shape[0], latents.device)
        return self._scheduler.add_noise(latents, noise, steps), steps, noise

    def _expanded(self, levels: Tensor, argument: Argument) -> Tensor:
        """Noise levels (B,) in the shape of an argument: one per sample, or repeated over its other dimensions."""
        if not argument.has_samples:
            if not argument.dims:
                return levels[0]
            size = argument.shape(self._sizes() if argument.letters else {})
            return levels[:1].expand(size).contiguous()
        if len(argument.dims) == 1:
            return levels
        size = argument.shape(self._sizes())
        return levels.view(-1, *[1] * (len(size) - 1)).expand(size).contiguous()

    def _sizes(self) -> Mapping[str, int]:
        if self._grid is None:
            fault = f"{self.profile.name} is called with sizes that its samples do not show"
            raise VplanError(fault, "train it on clips of one shape: leave out --buckets")
        return self._grid

    def _built(self, tree: Any, name: str, values: Mapping[str, Tensor], per_sample: bool) -> Any:
        """One argument of `forward` from its description and the tensors of a batch."""
        if isinstance(tree, dict) and SAMPLES in tree:
            inner = tree[SAMPLES]
            if isinstance(inner, str) and not inner.startswith("number"):
                return list(values[name].unbind())
            return [self._built(inner, name, values, per_sample=True)] * self._sizes()["B"]
        if isinstance(tree, dict):
            return {key: self._built(inner, f"{name}.{key}", values, per_sample) for key, inner in tree.items()}
        if isinstance(tree, list):
            parts = (self._built(inner, f"{name}.{index}", values, per_sample) for index, inner in enumerate(tree))
            return list(parts) if any(isinstance(inner, list) for inner in tree) else tuple(parts)
        argument = self._leaves[name]
        if argument.kind == "number":
            return argument.shape(self._sizes() if argument.letters else {})[0]
        return values[name]

    def prediction(self, outputs: Any) -> Any:
        """The model's first output: stacked if it is a list of samples, and only its first half if the model also
        predicts a variance. Some classes do not return a tuple."""
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        if isinstance(first, list | tuple):
            first = torch.stack(list(first))
        if self.called.prediction == "half":
            return first.chunk(2, dim=self.called.channel_axis)[0]
        return first

    def without_gradient(self, name: str, blocks: int) -> bool:
        """Whether a parameter, or that of an identical block, got no gradient in a dry run."""
        return self.called.is_idle(name, self._depths(blocks))

    def _depths(self, blocks: int) -> dict[str, int]:
        """The number of blocks of each list in a model with ``blocks`` blocks in total: the published depth or the
        recorded one."""
        profile = self.profile
        whole = blocks == profile.blocks
        return {
            stack.list: profile.depth(stack) if whole or not stack.alike else self._recorded_depth(stack)
            for stack in profile.stacks
        }

    def _recorded_depth(self, stack: Stack) -> int:
        few = HEAD + TAIL + 2  # as `trainers.recording.tapes.shallow_config`
        return min(few + self.profile.traits.last_block_apart, self.profile.depth(stack))

    def tokens_of(self, latents: Tensor) -> int:
        """The cells of one sample, in any layout."""
        return latents[0].numel() // self._leaves[self.called.main].numbers


class _DeviceOfInputs:
    """The device of the first tensor that a model is called with."""

    def __init__(self) -> None:
        self._device: torch.device | None = None

    def note(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """A pre-forward hook of the model that records the device."""
        self._device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))

    def moved(self, _: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook of a module that moves its output to that device."""
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device), output)


def _filled(size: tuple[int, ...], kind: str, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """A tensor of a kind in `planner.catalog.forward_inputs.KINDS`."""
    if kind in ("ones", "zeros"):
        return (torch.ones if kind == "ones" else torch.zeros)(size, device=device, dtype=torch.long)
    if kind in ("bool", "false", "long"):
        make = torch.ones if kind == "bool" else torch.zeros
        return make(size, device=device, dtype=torch.long if kind == "long" else torch.bool)
    return torch.randn(size, device=device, dtype={"fp32": torch.float32, "complex": torch.complex64}.get(kind, dtype))


FAMILY = AnyClass
