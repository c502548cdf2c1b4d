"""The base class of all families: shapes from the grid, flow matching, the mean squared error.

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
    """A model family: its batches, model inputs, targets and encoders. A batch holds the tensors that caching writes to
    disk, such as latents and text embeddings."""

    short_sides = False
    """Whether its table of positions ends before the rows and columns that tapes are usually recorded at."""

    sums: Mapping[str, tuple[int, tuple[str, ...]]] = {}
    """Lengths that are sums: name -> (constant, products), e.g. the joint sequence S = F*H*W + T."""

    rounded: Mapping[str, tuple[str, int]] = {}
    """Lengths that are rounded up: name -> (product, unit), e.g. P = ceil(H*W / 32) where images are padded to a
    multiple of 32 tokens. Sums may contain them."""

    fixed: Mapping[str, int] = {"F": 1}
    """Grid atoms that this family cannot vary."""

    extra_tokens = False
    """Whether samples have tokens besides those of the clip and its text (grid atom E)."""

    idle: tuple[str, ...] = ()
    """Modules of the last block whose output is not used, so that they get no gradient."""

    masks_all_tokens = False
    """Whether attention takes a mask over the joint sequence, expanded to a view of S x S."""

    copies_masks = False
    """Whether it may mask all tokens of clip and text together. Such a mask is copied into padded rows unless their
    length is a multiple of 8, so recordings use a length that is not."""

    adds_masks_up = False
    """Whether a recording answers code that counts the tokens of a prompt's mask with all tokens; otherwise with 1."""

    places_by_mask = False
    """Whether its model computes the order and number of tokens from the values of a mask."""

    shared: frozenset[str] = frozenset()
    """Tensors of a batch without a batch dimension, because they are the same for all samples."""

    ragged: frozenset[str] = frozenset()
    """Tensors of a batch that are as long as its longest prompt, up to the plan's length."""

    reads_reference = False
    """Whether samples are encoded together with a reference image."""

    encoding = 1
    """Version of the encoding. Increase it when samples are encoded differently, so that they are cached again."""

    longest_side: int | None = None
    """Cells per axis that its tables of positions hold; None if there is no practical limit."""

    limits = (0.0, 1.0)
    """the range of noise levels it trains"""

    plain_outputs: Mapping[str, bool] = {"return_dict": False}
    """Arguments that make the model return a tuple; empty for a class that always does."""

    sample_needs = "what a folder of clips does not have"
    """What samples would need, for a family without a sampler; for the error message."""

    captioned = True
    """Whether samples have captions; otherwise the clip and its sound are the only input."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.config = profile.config
        self.references = profile.shape.references
        self.loss_weights: Tensor | None = None
        """the loss weights of the samples in the latest batch, (B,); None if all are 1"""

    def batch(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random tensors with the shapes and dtypes of a real batch on the device."""
        raise NotImplementedError

    def inputs_and_target(self, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Any]:
        """Adds noise; returns the model's keyword arguments and the target of the loss, one tensor or several."""
        raise NotImplementedError

    def complete(self, model: nn.Module) -> None:
        """Hook that adds to a shallow model for recording what it must have of the whole one, before weights are cast
        and quantised; does nothing by default."""

    def prepare(self, model: nn.Module) -> None:
        """Hook for changes to a newly built model before it trains; does nothing by default."""

    def prediction(self, outputs: tuple[Tensor, ...]) -> Any:
        """The part of the model's output that the loss compares with the target; the first by default."""
        return outputs[0]

    def loss(self, prediction: Any, target: Any, inputs: dict[str, Any]) -> Tensor:
        """Mean squared error in fp32, as the published trainers compute it, with the loss weights of the model's
        training settings."""
        return squared_error(prediction.float(), target.float(), self.loss_weights)

    def without_gradient(self, name: str, blocks: int) -> bool:
        """Whether a parameter (by its full name, in a model of `blocks` blocks) never gets a gradient."""
        last = f"{self.profile.stacks[-1].list}.{blocks - 1}."
        return name.startswith(last) and name.removeprefix(last).startswith(self.idle)

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        """The encoders to run over clips, the VAE last; empty if the family cannot encode clips."""
        return ()

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        """The encoders to run over captions, the largest last. A later turn may use the output of earlier ones."""
        return ()

    def sampler(self) -> FamilyPipeline | None:
        """How samples are made with the family's pipeline; None if they cannot be made (see `sample_needs`)."""
        return None

    def sampled_image(self, image: Any, height: int, width: int, frames: int) -> dict[str, Any]:
        """The pipeline's arguments for the image that a sample begins with. Sizes in pixels."""
        return {"image": image}

    def joined(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Combines the outputs of all encoders' turns for a sample into the tensors of a batch."""
        return parts

    def cached_tensors(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to cache for one sample, from a batch of one: without the batch dimension, which shared tensors
        do not have."""
        return {name: tensor if name in self.shared else tensor[0] for name, tensor in batch.items()}

    def with_window(self, sample: dict[str, Tensor], window: dict[str, Tensor]) -> dict[str, Tensor]:
        """A sample combined with another window of its clip, for models that take a clip in windows. Others raise a
        NotImplementedError."""
        raise NotImplementedError

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch of samples of one shape, in the form of `batch`. A sample: the cached tensors of clip and caption."""
        first = samples[0]
        return {
            name: first[name] if name in self.shared else torch.stack([sample[name] for sample in samples])
            for name in first
        }

    def collate_with_mask(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch with prompts padded to the longest one, and with a mask if there are several samples; an
        implementation of `collate` for families that need it."""
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

    def collate_repeating(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """A batch with prompts padded to the longest by repeating their last state; an implementation of `collate` for
        families whose model has no mask."""
        longest = max(sample["prompt"].shape[0] for sample in samples)
        filled = []
        for sample in samples:
            prompt = sample["prompt"]  # (T, D)
            repeated = prompt[-1:].expand(longest - prompt.shape[0], -1)
            filled.append({**sample, "prompt": torch.cat([prompt, repeated])})
        return Family.collate(self, filled)

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
        """A noise level for each sample of a batch, (B,): drawn from the density in the training settings if samples
        have seeds.

        Otherwise, as in recordings, where values do not matter, any numbers are drawn and errors are not weighted:
        weights are only one number per sample.
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
        """The training settings for samples with this number of tokens; the profile's by default."""
        return self.profile.training

    def tokens_of(self, latents: Tensor) -> int:
        """The number of tokens of one sample. Packed latents are (B, tokens, C), others (B, C, ..., rows, columns)."""
        if latents.ndim == 3:
            return latents.shape[1]
        return latents[0, 0].numel() // math.prod(self.profile.shape.patch)

    def for_job(self, job: Job) -> Self:
        """Sets the family up for a job: its reference images, and the range of noise levels of a single expert.
        Returns the family."""
        self.references = job.references or self.profile.shape.references
        self.limits = noise_levels.limits(self.profile.training, job.experts)
        return self

    def video_latents(self, grid: Grid, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Random latents (B, C, F * patch, H * patch, W * patch), each axis with its own patch size."""
        patch_f, patch_h, patch_w = self.profile.shape.patch
        channels = self.profile.vae.latent_channels
        size = (grid["B"], channels, grid["F"] * patch_f, grid["H"] * patch_h, grid["W"] * patch_w)
        return torch.randn(size, device=device, dtype=dtype)
