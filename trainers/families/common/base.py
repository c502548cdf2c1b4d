"""What all families share: shapes from the grid, flow matching, the mean squared error.

Shape letters: B batch, C latent channels, F latent frames, H and W the patch grid, T text tokens, D text width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.catalog.profiles import ModelProfile, Training
from planner.spec.job import Job
from trainers.families.common import noise_levels, random_draws
from trainers.families.common.encoding import EncoderTurn
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.common.squared_error import squared_error

Grid = Mapping[str, int]
"""The integer atoms of a shape: B, F, H, W, T, R (see planner.catalog.lookup.grid)."""


class Family:
    """A model family: how its batches, inputs, targets and encoders look. Batches hold what caching leaves on disk:
    latents and text embeddings."""

    short_sides = False
    """Whether its table of positions ends before the rows and columns tapes are usually recorded at."""

    sums: Mapping[str, tuple[int, tuple[str, ...]]] = {}
    """Lengths that are sums: name -> (constant, products), e.g. the joint sequence S = F*H*W + T."""

    rounded: Mapping[str, tuple[str, int]] = {}
    """Lengths counted in several: name -> (product, unit), as P = ceil(H*W / 32) where images are padded to 32 tokens.
    Sums may add them."""

    fixed: Mapping[str, int] = {"F": 1}
    """Grid atoms this family cannot vary."""

    extra_tokens = False
    """Whether samples have tokens beside the clip's own and its text's (grid atom E)."""

    idle: tuple[str, ...] = ()
    """Modules of the last block that work for an output nobody takes, and get no gradient."""

    masks_all_tokens = False
    """Whether attention takes a mask over the joint sequence, expanded to a view of S x S."""

    copies_masks = False
    """Whether it may mask all tokens of clip and text together: such a mask is copied into padded rows unless they are
    a multiple of 8, and a recording is made where they are none."""

    adds_masks_up = False
    """Whether a recording tells code that asks how many tokens of a prompt count: all. Else it says one."""

    places_by_mask = False
    """Whether its model works out by the numbers of a mask which token stands where, and how long the sequence is."""

    shared: frozenset[str] = frozenset()
    """Tensors of a batch that have no batch dimension, because all its samples have the same."""

    ragged: frozenset[str] = frozenset()
    """Tensors of a batch that are as long as the longest prompt in it, up to the plan's length."""

    reads_reference = False
    """Whether its samples are encoded with the image they were made from."""

    encoding = 1
    """Counted up when samples are encoded otherwise than before: what was cached is then made anew."""

    longest_side: int | None = None
    """Cells per axis that its tables of positions hold; None for as many as anybody trains."""

    limits = (0.0, 1.0)
    """the noise levels it trains"""

    plain_outputs: Mapping[str, bool] = {"return_dict": False}
    """What tells the model to return a tuple; nothing for a class that returns no records."""

    sample_needs = "what a folder of clips does not have"
    """What its samples would need, where it has no sampler."""

    captioned = True
    """Whether its samples have captions; else a clip says all there is, and its sound is a part of that."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.config = profile.config
        self.references = profile.shape.references
        self.loss_weights: Tensor | None = None
        """what each sample of the batch weighs whose inputs were made last, (B,); None where all weigh the same"""

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random tensors of the shapes and dtypes a real batch has on the device."""
        raise NotImplementedError

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Any]:
        """Adds noise; returns the model's keyword arguments and the target of the loss, one tensor or several."""
        raise NotImplementedError

    def complete(self, model: nn.Module) -> None:
        """Hook for what a model with fewer blocks, of which a recording is made, needs of the whole one, before
        weights are cast and quantised; by default nothing."""

    def prepare(self, model: nn.Module) -> None:
        """Hook for changes that a freshly built model needs before it trains; by default none."""

    def prediction(self, outputs: tuple[Tensor, ...]) -> Any:
        """The part of the model's outputs that the loss compares with the target; by default the first."""
        return outputs[0]

    def loss(self, prediction: Any, target: Any, inputs: dict[str, Any]) -> Tensor:
        """Mean squared error in fp32, as the published trainers compute it, weighted as the model's law says."""
        return squared_error(prediction.float(), target.float(), self.loss_weights)

    def without_gradient(self, name: str, blocks: int) -> bool:
        """Whether a parameter (by its full name, in a model of `blocks` blocks) never gets a gradient."""
        last = f"{self.profile.stacks[-1].list}.{blocks - 1}."
        return name.startswith(last) and name.removeprefix(last).startswith(self.idle)

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        """The encoders that clips go through, the VAE last; none where caching them is not built."""
        return ()

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        """The encoders that captions go through, the largest last. What one turn leaves the next may add to."""
        return ()

    def sampler(self) -> FamilyPipeline | None:
        """How samples are made with the family's pipeline; None for a family whose pipeline is not described."""
        return None

    def sampled_image(self, image: Any, height: int, width: int, frames: int) -> dict[str, Any]:
        """The pipeline's arguments for the image that a sample begins with. Sizes in pixels."""
        return {"image": image}

    def joined(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a sample as a batch names them, from those that all encoders' turns left."""
        return parts

    def cached_tensors(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that are cached of one sample, from a batch of one: without the batch's axis, but for those that
        all samples share."""
        return {name: tensor if name in self.shared else tensor[0] for name, tensor in batch.items()}

    def with_window(self, sample: dict[str, Tensor], window: dict[str, Tensor]) -> dict[str, Tensor]:
        """A sample with another window of its clip beside it: for models that see a clip in windows. Others raise
        NotImplementedError."""
        raise NotImplementedError

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """One batch of samples of one shape, as `batch` makes it. A sample is what caching left of clip and caption."""
        first = samples[0]
        return {
            name: first[name] if name in self.shared else torch.stack([sample[name] for sample in samples])
            for name in first
        }

    def collate_with_mask(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """One batch whose prompts are filled up to the longest one, with a mask wherever there are several samples: for
        families whose `collate` it is."""
        lengths = [sample["prompt"].shape[0] for sample in samples]
        longest = max(lengths)
        filled = [
            {**sample, "prompt": functional.pad(sample["prompt"], (0, 0, 0, longest - length))}
            for sample, length in zip(samples, lengths, strict=True)
        ]
        batch = Family.collate(self, filled)
        if len(samples) > 1:
            batch["prompt_mask"] = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        return batch

    def flow_matching(self, latents: Tensor, *, towards_clip: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy latents, noise levels between 0 and 1, and the velocity to predict (arXiv 2210.02747).

        The velocity is ``noise - latents``, or ``latents - noise`` for models that count from noise to clip.
        """
        drawn = random_draws.normal_like(latents)
        sigmas = self.levels(latents)
        spread = sigmas.view(-1, *[1] * (latents.ndim - 1)).to(latents.dtype)
        noisy = (1.0 - spread) * latents + spread * drawn
        return noisy, sigmas, latents - drawn if towards_clip else drawn - latents

    def levels(self, latents: Tensor) -> Tensor:
        """A noise level for each sample of a batch, (B,): drawn from the law's density where samples have seeds.

        A recorded step, whose numbers are never read, draws numbers that take the same memory, and weighs no error:
        weights are a number a sample.
        """
        uniform = random_draws.uniform(latents.shape[0], latents.device)
        if uniform is None:
            self.loss_weights = None
            return torch.sigmoid(random_draws.normal(latents.shape[0], latents.device))
        tokens = self.tokens_of(latents)
        training = self.law(tokens)
        drawn = noise_levels.levels(uniform, training, tokens, self.limits)
        self.loss_weights = noise_levels.weights(drawn, training, tokens)
        return drawn

    def law(self, tokens: int) -> Training:
        """How samples of so many tokens are trained; by default as the profile says, whatever their size."""
        return self.profile.training

    def tokens_of(self, latents: Tensor) -> int:
        """Tokens of one sample: packed latents are (B, tokens, C), others (B, C, ...) with rows and columns last."""
        if latents.ndim == 3:
            return latents.shape[1]
        return latents[0, 0].numel() // math.prod(self.profile.shape.patch)

    def for_job(self, job: Job) -> Self:
        """The family as it trains a job: one expert of two on its own noise levels, and with reference images."""
        self.references = job.references or self.profile.shape.references
        self.limits = noise_levels.limits(self.profile.training, job.experts)
        return self

    def video_latents(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Latents (B, C, F * patch, H * patch, W * patch), each axis with its own patch."""
        patch_f, patch_h, patch_w = self.profile.shape.patch
        channels = self.profile.vae.latent_channels
        size = (grid["B"], channels, grid["F"] * patch_f, grid["H"] * patch_h, grid["W"] * patch_w)
        return torch.randn(size, device=device, dtype=dtype)
