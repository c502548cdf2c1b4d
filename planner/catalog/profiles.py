"""What a profile says about a model: the records of `profiles/models/*.toml`."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import functools
import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.catalog.traits import EncoderTraits, TrainerTrait, Traits, VaeTraits
from planner.errors import VplanError
from planner.schema import Count, CountOrZero, Flag, NotNegative, Number, Positive, PositiveInt, Record, Text
from planner.spec.job import FloatDtype
from planner.spec.training import LossWeighting, ModeScale, Objective, Shift, TimestepSampling

Size = tuple[Count, Count]
"""Height and width, pixels."""


class Stack(Record):
    """A module list of repeated blocks. The lists are given in the order they run."""

    list: Text
    depth_key: str
    """the config key that holds the number of blocks, or a list with one entry per block (UNets); "" for none"""
    alike: Flag = True
    """false: what runs between the blocks differs from one to the next, so that all of them are recorded"""
    blocks: Count | None = None
    """how many there are, where no key of the config says it; none of them is left out then"""


VALUES = ("scaling_factor", "shift_factor", "latents_mean", "latents_std", "force_upcast")
"""Config keys that change numbers, not memory."""


def _folder(class_name: str, config: dict[str, Any]) -> str:
    """The folder of a component's tapes: its class and a hash of its config, so that models share what they share."""
    structure = {key: value for key, value in config.items() if key not in VALUES}
    digest = hashlib.sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()
    return f"{class_name}-{digest[:8]}"


class Vae(Record):
    """The VAE: how much it shrinks a clip, and what it weighs."""

    class_name: Text = Field(alias="class")
    temporal: Count
    spatial: Count
    latent_channels: Count
    parameters: PositiveInt
    dtype: FloatDtype
    config: dict[str, Any]
    traits: VaeTraits = Field(default_factory=VaeTraits, exclude=True)

    @functools.cached_property
    def folder(self) -> str:
        """The name of the folder that holds its tapes, from its class and config: models with the same VAE share it."""
        return _folder(self.class_name, self.config)

    def coded(self, frames: int) -> int:
        """The latent frames of a clip of so many frames. A single frame is one."""
        chunked = self.traits.chunked
        if chunked is None or frames == 1:
            return (frames - 1) // self.temporal + 1
        return (frames - chunked.rest) // chunked.frames * chunked.latents + chunked.rest_latents

    def decoded(self, latents: int) -> int:
        """The frames of a clip of so many latent frames."""
        chunked = self.traits.chunked
        if chunked is None or latents == 1:
            return (latents - 1) * self.temporal + 1
        return (latents - chunked.rest_latents) // chunked.latents * chunked.frames + chunked.rest

    @property
    def takes_clips(self) -> bool:
        """Whether it works on (batch, channels, frames, rows, columns); else on images, which have no frames."""
        return not self.traits.images

    @property
    def takes_frames(self) -> bool:
        """Whether it works on clips of several frames."""
        return self.takes_clips and not self.traits.one_frame

    @property
    def colours(self) -> int:
        """Channels of its pixels: three, or four with transparency."""
        return int(self.config.get("input_channels", self.traits.colours))


class TextEncoder(Record):
    """One encoder of the condition (a prompt, or an image for image-to-video)."""

    name: Text
    class_name: Text = Field(alias="class")
    parameters: PositiveInt
    max_tokens: Count
    dtype: FloatDtype
    config: dict[str, Any]
    traits: EncoderTraits = Field(default_factory=EncoderTraits, exclude=True)

    @functools.cached_property
    def folder(self) -> str:
        """The name of the folder that holds its tapes, from its class and config: models with the same encoder share
        it."""
        return _folder(self.class_name, self.config)

    @property
    def sees(self) -> bool:
        """Whether it encodes an image instead of a prompt."""
        return "image_size" in self.config


class ShapeRules(Record):
    """The shapes of clips or images that a model takes, and which are usual. Sizes are in pixels."""

    patch: tuple[Count, Count, Count]
    """latent frames, rows and columns of one cell of the grid that tapes count in"""
    frame_step: Count
    """frames = step * n + rest, from the VAE's temporal compression"""
    frame_rest: Count = 1
    """the frames of the shortest clip: 1 but for a VAE that takes clips in chunks (`Vae.coded`)"""
    size_multiple: Count
    """height and width are multiples of it, pixels: VAE times patch"""
    text_tokens: Count
    filled_up: Size | None = None
    """the square whose tokens an image has that is not square: its code fills it up with empty ones, and takes none
    that has more"""
    references: CountOrZero = 0
    """reference images a sample has when the job does not say"""
    takes_references: Flag = False
    """whether a sample may have some, though it usually has none"""
    audio_tokens_per_frame: NotNegative = 0.0
    """for models that make sound too, at their usual frame rate, of one of its channels"""
    audio_channels: Count = 1
    """of that sound, each with tokens of its own"""
    min_frames: Count
    max_frames: Count
    """the longest clip it was trained on; longer ones run, and are extrapolation"""
    window: Flag = False
    """whether longer ones do not run: it sees a clip through a window of so many frames"""
    resolutions: Annotated[tuple[Size, ...], Field(min_length=1)]
    """height and width, the usual one first"""
    only_listed: Flag = False
    """no other sizes: its positions are learned, one per cell of the grid"""
    default_frames: Count
    batches: tuple[Count, ...] = ()
    """the batches it is recorded at, for code that loops over the samples of a batch, or takes one alone; none named:
    any batch"""

    @property
    def frame_rule(self) -> str:
        """Its numbers of frames in words: "8n+1"."""
        return f"{self.frame_step}n+{self.frame_rest}"

    def cut(self, frames: int) -> int:
        """The most of so many frames that it takes; none or fewer where the shortest clip is longer."""
        return (frames - self.frame_rest) // self.frame_step * self.frame_step + self.frame_rest

    def audio_tokens(self, frames: int) -> int:
        """Tokens of the sound of a clip of so many frames, of all its channels."""
        return self.audio_channels * round(frames * self.audio_tokens_per_frame)


class LoraDefaults(Record):
    """The layers that get an adapter when the job does not name any."""

    targets: Annotated[tuple[Text, ...], Field(min_length=1)]
    wide: tuple[Text, ...] = ()
    """a second usual choice of layers, recorded beside the default"""
    wide_bases: tuple[Literal["fp8", "int8", "nf4"], ...] = ()
    """the quantised bases over which that choice is recorded too"""


class Training(Record):
    """How the model is trained: its loss, its noise schedule, and the noise level at which a second expert takes
    over."""

    method: Literal["lora", "full"] = "lora"
    """what a job trains when it does not say"""
    objective: Objective
    weights_dtype: FloatDtype
    num_train_timesteps: Count
    timestep_sampling: TimestepSampling
    """density of the noise levels that training draws"""
    logit_mean: Number = 0.0
    """of the logit of the levels in `logit_normal`: above 0 is more noise"""
    logit_std: Positive = 1.0
    mode_scale: ModeScale = 1.29
    """of `mode`; the default is diffusers' (examples/dreambooth, ``--mode_scale``)"""
    training_shift: Shift = 1.0
    """of those levels; `resolution`: by the tokens of a sample, as `resolution_shift` says"""
    resolution_shift: tuple[Count, Positive, Count, Positive] = (256, 0.5, 4096, 1.15)
    """tokens and logarithm of the shift there, twice: the line that a shift by resolution follows. The default is
    FLUX.1's (diffusers pipelines/flux/pipeline_flux.py ``calculate_shift``)"""
    loss_weighting: LossWeighting = "none"
    """weight of a sample's error at its noise level"""
    snr_gamma: Positive | None = None
    """of `min_snr`"""
    guidance: NotNegative = 1.0
    """scale that a model with embedded guidance is trained with (diffusers examples/dreambooth README_flux.md and
    README_flux2.md; finetrainers models/hunyuan_video/base_specification.py)"""
    boundary: Annotated[float, Field(strict=True, gt=0, lt=1)] | None = None
    """noise level between two experts: where the low-noise one takes over"""
    expert_steps: Count = 10
    """steps that one of two experts trains before the next is drawn. An expert of Wan 2.2 A14B in bf16 and the other
    that waits in host RAM take 2 s to change places over PCIe 4.0: 0.1 s a step at 10"""
    shift: Positive | None = None
    shift_720p: Positive | None = None
    """of sampling at 720p, where that differs"""
    beta_schedule: str | None = None
    beta_start: Positive | None = None
    beta_end: Positive | None = None
    zero_terminal_snr: Flag | None = None
    snr_shift_scale: Positive | None = None
    source: Text

    @property
    def scheduler(self) -> dict[str, Any]:
        """Keyword arguments of the diffusers noise scheduler that trains this model."""
        arguments = {
            "num_train_timesteps": self.num_train_timesteps,
            "shift": self.shift,
            "beta_schedule": self.beta_schedule,
            "beta_start": self.beta_start,
            "beta_end": self.beta_end,
            "rescale_betas_zero_snr": self.zero_terminal_snr,
            "snr_shift_scale": self.snr_shift_scale,
            "prediction_type": {"v": "v_prediction", "epsilon": "epsilon"}.get(self.objective),
        }
        return {name: value for name, value in arguments.items() if value is not None}


class ModelProfile(Record):
    """One model: its published architecture (the config), and the facts around it: VAE, text encoders, shapes,
    sources."""

    name: Text
    title: Text
    family: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    """models that one file in trainers/families trains, which is named like it"""
    kind: Literal["video", "image"]
    diffusers_class: Text
    parameters: PositiveInt
    """of the transformer or UNet, counted on the meta device"""
    experts: Literal[1, 2] = 1
    """2: a high-noise and a low-noise model of this architecture"""
    license: Text
    aliases: tuple[Text, ...]
    sources: Annotated[tuple[Text, ...], Field(min_length=1)]
    config: dict[str, Any]
    stacks: Annotated[tuple[Stack, ...], Field(min_length=1)]
    vae: Vae
    text_encoders: tuple[TextEncoder, ...]
    shape: ShapeRules
    lora: LoraDefaults
    inputs: dict[str, Any]
    """what the family's code needs beside the config"""
    training: Training
    traits: Traits = Field(default_factory=Traits, exclude=True)
    origin: str = ""
    """the config.json it was recorded from, for a model of the user's own"""
    lent_by: str = ""
    """the bundled model whose VAE, text encoders, clip rules and LoRA layers an own one has"""

    @property
    def train_data(self) -> str:
        """What `vplan train` takes: `files` of a folder, or only samples that are `encoded` already."""
        return "encoded" if self.traits.not_encoded else "files"

    @property
    def is_own(self) -> bool:
        """Whether this is a model of the user's, made by `vplan record FOLDER`, and not a bundled one."""
        return bool(self.origin)

    def depth(self, stack: Stack) -> int:
        """The number of blocks in one stack of the model. Raises a VplanError when the config has no such key."""
        if stack.blocks is not None:
            return stack.blocks
        value = self.config.get(stack.depth_key)
        if isinstance(value, list):
            return len(value)
        if not isinstance(value, int):
            raise VplanError(f"profile {self.name}: config has no {stack.depth_key}", "correct the stack's depth_key")
        return value

    @property
    def blocks(self) -> int:
        """The number of blocks in all stacks: what checkpointing and swapping count."""
        return sum(self.depth(stack) for stack in self.stacks)

    @property
    def hidden_size(self) -> int | None:
        """Numbers in one token of what its blocks hand on; None where its config does not say. Heads may have more
        together (MiniMax H3: 56 of 128, and 5376)."""
        named = next((self.config[name] for name in ("dim", "hidden_size", "model_dim") if name in self.config), None)
        heads, size = self.config.get("num_attention_heads"), self.config.get("attention_head_dim")
        if named is None and isinstance(heads, int) and isinstance(size, int):
            return heads * size
        return named

    @property
    def head_size(self) -> int:
        """Numbers in one head of its attention; where the config counts heads instead, at the highest resolution."""
        size, channels = self.config.get("attention_head_dim"), self.config.get("block_out_channels")
        if self.traits.head_dim_counts_heads and channels:
            return int(channels[0]) // int(size[0] if isinstance(size, list) else size or 1)
        if size is None and (axes := self.config.get("axes_dims")):  # a head's numbers, by the axes that turn them
            return int(sum(axes))
        return size if isinstance(size, int) else 128

    def trained_with(self, trainer: str, trait: TrainerTrait) -> bool:
        """Whether a trainer, by its name, has a trait with this model (as "own-model"): from the profile's traits."""
        return trait in self.traits.trainers.get(trainer, ())
