"""Trains both experts of a two-expert model (Wan 2.2 A14B) in one run: which one a step trains, and where the other is.

One expert trains for `expert_steps` steps, then the next expert is drawn at random. Its probability is the share of the
noise levels' density on its side of the boundary, and samples draw their levels on that side. So all levels are as
frequent as the density says, every rank runs the same expert, and a resumed run continues with the same sequence. (In
musubi-tuner 30c658c the first sample of each batch decides, wan_train_network.py ``next_model_is_high_noise``, so the
experts may alternate at every batch; it has one adapter for both, while diffusers expects one for each.)

With ``inactive_expert cpu`` the frozen weights of the idle expert are kept in pinned host RAM, as many bytes as one
expert has. When it is to run, the two change places, weight by weight. Swapped blocks do not take part in that: those
of both experts are always in host RAM, and use the same ring of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.catalog.profiles import ModelProfile
from planner.launch.weight_files import model_folder
from planner.layout.experts import high_share
from planner.spec.job import Job, Strategy
from trainers.families.common.random_draws import sample_seed
from trainers.memory import swap
from trainers.memory.offload import InputsOnHost
from trainers.memory.pinned import pinned_tensor
from trainers.memory.quantise import Place, places
from trainers.step import step, weights

PARTS = {"high": "transformer", "low": "transformer_2"}
"""Expert -> its component in pipelines (diffusers WanPipeline). The high-noise expert makes the first part of a
sample."""

PIECE = 2**28
"""Bytes of host RAM that are pinned at once; a larger weight has a piece of its own."""


class Experts(nn.Module):
    """Two models of one architecture, only one of which runs at a time. The high-noise expert runs first."""

    def __init__(self, high: nn.Module, low: nn.Module) -> None:
        super().__init__()
        self.transformer, self.transformer_2 = high, low
        self.running = "high"
        self.waiting: list[torch.Tensor] = []
        """the host RAM with the frozen weights of the idle expert, except swapped blocks"""
        self.swaps: dict[str, swap.BlockSwap] = {}
        self._apart: frozenset[str] = frozenset()

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.part(self.running)(*arguments, **named)

    def part(self, which: str) -> nn.Module:
        """The expert for "high" or "low" noise."""
        return self.get_submodule(PARTS[which])

    def send_idle(self, moving: dict[str, swap.BlocksToHost], device: torch.device) -> None:
        """Moves the low-noise expert, which is idle at first, to pinned host RAM. ``moving``: the swapped blocks of
        both experts."""
        for which, blocks in moving.items():
            self._apart = blocks.names
            self.swaps[which] = swap.BlockSwap(blocks, device, self.swaps.get("high"))
        self.waiting = to_host(list(self._moving("low")), device)

    def turn(self, which: str) -> None:
        """Switches to the expert for "high" or "low" noise. If the idle expert is kept in host RAM, the frozen weights
        of the two change places."""
        if which == self.running:
            return
        if self.waiting:
            # Only frozen weights change places; the trained weights of both stay on the device.
            for out, back in zip(self._moving(self.running), self._moving(which), strict=True):
                exchange(out, back)
        if self.swaps:
            self.swaps[self.running].release_ring()  # the two share one ring
        self.running = which

    def _moving(self, which: str) -> Iterator[Place]:
        """The places of the tensors that move between device and host with an expert."""
        for name, parameter in self.part(which).named_parameters():
            if not parameter.requires_grad and name not in self._apart:
                yield from (place for _, place in places(name, parameter))


@torch.no_grad()
def exchange(one: Place, other: Place) -> None:
    """Swaps the contents of two places of the same shape. Needs memory for a copy of the first tensor on its device."""
    here, there = one.tensor, other.tensor
    between = here.clone()
    here.copy_(there, non_blocking=True)
    there.copy_(between, non_blocking=True)
    one.put(there)
    other.put(here)


def to_host(moving: list[Place], device: torch.device) -> list[torch.Tensor]:
    """Moves tensors into pieces of host RAM of at most `PIECE` bytes, pinned if ``device`` is a GPU; returns these.

    They are moved piece by piece, so that at most one piece exists twice at a time.
    """
    pieces: list[list[Place]] = [[]]
    for place in moving:
        if sum(map(_aligned_bytes, pieces[-1])) + _aligned_bytes(place) > PIECE:
            pieces.append([])
        pieces[-1].append(place)
    buffers = []
    for piece in filter(None, pieces):
        buffers.append(pinned_tensor(sum(map(_aligned_bytes, piece)), pinned=device.type == "cuda"))
        start = 0
        for place in piece:
            tensor = place.tensor.detach()
            kept = buffers[-1][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += _aligned_bytes(place)
            place.put(kept.copy_(tensor))
    return buffers


def _aligned_bytes(place: Place) -> int:
    return -(-place.tensor.nbytes // swap.ALIGNMENT) * swap.ALIGNMENT


Fill = Callable[[str, nn.Module, frozenset[str], swap.BlocksToHost | None], None]
"""Gives a built expert its weights on the device. Arguments: "high" or "low", the model, the names of the weights that
go to host RAM instead, and swapped blocks, whose weights do too."""


def pair(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    device: torch.device,
    fill: Fill,
    lora_alpha: float | None = None,
) -> Experts:
    """Builds both experts, each as a single model is built. They share the host RAM for offloaded checkpoints, because
    only one runs at a time."""
    inputs, waits = InputsOnHost(), strategy.inactive_expert == "cpu"
    models, moving = [], {}
    for which in PARTS:
        model = step.build_model(profile, job, strategy, inputs=inputs, lora_alpha=lora_alpha)
        names: frozenset[str] = frozenset()
        if waits and which == "low":
            names = frozenset(name for name, weight in model.named_parameters() if not weight.requires_grad)
        blocks = swap.blocks_to_host(model, profile, strategy, device) if waits else None
        fill(which, model, names, blocks)
        if blocks:
            moving[which] = blocks
        models.append(model)
    both = Experts(*models)
    if waits:
        both.send_idle(moving, device)
    return both


def from_folder(
    root: Path, profile: ModelProfile, job: Job, device: torch.device, begin: Callable[[str, nn.Module], weights.Begin],
    trained: weights.Weights | None = None,
) -> Fill:  # fmt: skip
    """Fills the experts with the weights of a pipeline's folder. ``begin`` gives the adapter initialisation for a
    part's name and model; ``trained``: a checkpoint's weights, of both experts."""

    def fill(which: str, model: nn.Module, waiting: frozenset[str], moving: swap.BlocksToHost | None) -> None:
        source = weights.published(model_folder(root, profile, job.replace(experts=which)), profile)
        of_part = trained.under(f"{PARTS[which]}.") if trained else None
        weights.load(model, source, device, begin(PARTS[which], model), of_part, moving, waiting)

    return fill


def chosen(profile: ModelProfile, seed: int, number: int, expert_steps: int | None = None) -> str:
    """The expert (``high`` or ``low``) that a step trains; the same on every rank and in a resumed run. ``number``: of
    the steps before it. ``expert_steps``: how many steps in a row train one expert; None: the profile's number."""
    drawn = sample_seed(seed, "expert", number // (expert_steps or profile.training.expert_steps)) / 2**63
    return "high" if drawn < high_share(profile.training) else "low"


def models_of(model: nn.Module) -> list[nn.Module]:
    """Both experts of a pair, high noise first; for any other model a list of itself."""
    return [model.transformer, model.transformer_2] if isinstance(model, Experts) else [model]
