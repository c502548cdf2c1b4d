"""What is true of a model, a VAE or a text encoder and stands in no config: the `traits` tables of a model's TOML file.

Configs say how large a model is. How its code in diffusers works through a batch, how pipelines call it and what other
trainers do with it is said here, so that no code asks for a model's name. Traits are no part of `--json`, and a model
of the user's own has those of the bundled models of its classes (`planner.catalog.lookup`).
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
from typing import Annotated, Literal

from pydantic import Field

from planner.schema import Count, Flag, Record, Text
from planner.spec.job import FloatDtype


class ChunkedClip(Record):
    """How a VAE that takes a clip in chunks of frames, each by itself, makes another number of latent frames of a chunk
    than of what is left over (autoencoder_kl_minimax_h3.py ``_encode``: 17n + 5 frames become 5n + 2)."""

    frames: Count
    """of a chunk"""
    latents: Count
    """latent frames of a chunk"""
    rest: Count
    """frames that are left over"""
    rest_latents: Count
    """their latent frames"""


class VaeTraits(Record):
    """Facts about a VAE's class that its config does not hold (diffusers models/autoencoders); the same for all VAEs of
    a class."""

    recorded: Flag = True
    """else it has no tape, and an estimate counts its weights alone"""
    images: Flag = False
    """it works on images (batch, channels, rows, columns), which have no axis of frames"""
    colours: Count = 3
    """channels of its pixels, where no ``input_channels`` of the config says it: four with transparency"""
    one_frame: Flag = False
    """it works on clips (batch, channels, frames, rows, columns) of one frame alone (AutoencoderKLQwenImage21, whose
    weights are published for images)"""
    chunks: tuple[Count, Count] | None = None
    """latent frames of the first chunk and of each further one, where it takes a clip in chunks: Wan's, Qwen-Image's
    and EasyAnimate's one by one with a cache, CogVideoX's 8 frames (2 latent) and what is left in the first"""
    chunked: ChunkedClip | None = None
    """None: a clip of temporal * n + 1 frames has n + 1 latent ones"""
    fewest_chunks: Count = 5
    """chunks a long clip's tape has at least: three from the start and two from the end, more where it addresses more
    from its end, because it does not unfold at fewer. Clips of fewer chunks are recorded by themselves"""
    frame_tiles: tuple[Count, Count] | None = None
    """latent frames of a tile and of the stride, where it takes a long clip in overlapping tiles of frames:
    HunyuanVideo's 16+1 frames, 12 apart (``use_framewise_encoding``). Shorter clips are recorded by themselves"""
    splits_convolutions: Flag = False
    """a convolution over too many numbers is split in time, copied and joined (autoencoder_kl_cogvideox.py,
    CogVideoXSafeConv3d, which Mochi's has too)"""
    first_frame: Literal["alike", "apart", "whole", "repeated"] = "alike"
    """how a clip's first frame is resampled. apart: by itself, so that the F - 1 others are a length of their own
    (autoencoder_kl_hunyuanvideo15.py: HunyuanVideo15Downsample, HunyuanVideo15Upsample); whole: decoded to as many
    frames as the others, and those too many are dropped at the end (autoencoder_kl_mochi.py:
    drop_last_temporal_frames); repeated: put in front once more before a clip's frames are halved, and twice for the
    convolution, 2F + 2 at the lowest level (autoencoder_kl_ltx.py: LTXVideoDownsampler3d)"""

    @property
    def has_image_tapes(self) -> bool:
        """Whether one frame is recorded apart from a clip: it goes through whole, a clip in chunks or tiles."""
        return self.chunks is not None or self.frame_tiles is not None


class EncoderStates(Record):
    """How a pipeline takes the hidden states of a language model's layers, all of which are there until the forward is
    over (diffusers 0.42, pipelines/)."""

    stacked: Annotated[int, Field(strict=True, ge=-1)] = 0
    """how many of the last ones it joins, -1 for all; 0: it takes one as it is"""
    dim: Annotated[int, Field(strict=True, ge=-1)] = 0
    """the axis they are joined along"""
    cache: Flag = True
    """keys and values of all layers stay too: the forward's default, which no pipeline reads"""
    normalised: Flag = False
    """each state that it joins gets mean 0 and deviation 1 before, in a copy (Cosmos-Predict2.5)"""
    headless: Flag = False
    """the model below its head is called, though the head is loaded too (MiniMax H3)"""
    masked: Flag = True
    """prompts are filled up to one length, so that every layer takes a mask of all pairs"""


class EncoderTraits(Record):
    """Facts about a text encoder's class that its config does not hold; the same for all encoders of a class and
    config, which have one tape."""

    package: Annotated[str, Field(pattern=r"^(transformers|diffusers(\.pipelines\.\w+)?)$")] = "transformers"
    """where its class is; diffusers has some of its own"""
    kept_in_fp32: str = ""
    """end of the names of weights that ``from_pretrained`` leaves in fp32 where the rest is loaded in fp16
    (transformers modeling_t5.py and modeling_umt5.py ``_keep_in_fp32_modules``; bf16 is not held back)"""
    states: EncoderStates | None = None
    """of a language model as encoder, of whose layers pipelines take the hidden states; None: its output is taken"""
    aligned_prompts: Flag = False
    """all models call it with prompts of a multiple of 8 tokens: such rows of a mask need no padding"""


class SplitPlan(Record):
    """What diffusers' context parallelism splits of a model (its ``_cp_plan``, diffusers/models/transformers)."""

    text: Flag
    """the text's tokens as well as the clip's"""
    from_the_start: Flag
    """already what goes into the model, not what goes into its blocks"""
    every_attention: Flag
    """else a block's first: the others look at the text, which every GPU has whole"""


TrainerTrait = Literal[
    "modulation-in-8-bits",
    "modulation-in-16-bits",
    "modulation-adapted",
    "nothing-in-fp32",
    "time-per-token",
    "positions-in-fp64",
    "moved-whole",
    "moved-whole-without-low-vram",
    "text-encoder-quantised-beside",
    "text-encoder-by-qtype",
    "own-model",
    "own-code",
    "blocks-in-16-bits",
    "rotates-real-numbers",
    "feed-forward-not-adapted",
    "attention-output-not-adapted",
    "last-encoder-stays",
    "last-encoder-cast",
    "last-encoder-in-model",
    "experts-without-gradients",
    "shift-by-size",
    "vae-in-fp32",
    "vae-caches-kept",
    "vae-attention-whole",
    "table-of-words-twice",
    "reentrant-checkpoints",
    "vae-tiles-of-128",
    "prompts-unpadded",
    "masks-by-head",
    "masks-one-sample",
    "joint-tensor-kept",
    "fusion-checkpointed",
    "sampled-without-encoders",
    "pipeline-kept",
    "text-encoders-trained",
    "loaded-as-trained",
    "loaded-as-published",
    "encoders-wait",
    "text-encoder-read",
    "read-for-swapped-blocks",
    "encoder-head-untied",
]
"""What a trainer does with some models and not with others; `planner.layout.trainer_terms` says in which of its lines.

The first two: layers that make scales and shifts, over an fp8 base. nothing-in-fp32: its own class keeps no layers so,
as diffusers' does. positions-in-fp64: queries and keys are turned so.
moved-whole: to the GPU in 16 bits, to be quantised there. text-encoder-quantised-beside: with the model on the GPU.
text-encoder-by-qtype: in the model's own format, whatever is written for it.
own-model: it is what the trainer's own scripts build. own-code: its step is recorded from the trainer's own model
(`planner.tape.variants.trainer_models.OWN_CODE`). blocks-in-16-bits: they modulate, gate and add so.
rotates-real-numbers: queries and keys, where diffusers' do so with complex ones.
feed-forward-not-adapted: its usual LoRA is on attention alone; attention-output-not-adapted: nor on its last layer.
last-encoder-stays: the last text encoder encodes in the loop, and is on the GPU for it.
last-encoder-cast: over a base in fp8 it comes in its file's fp16, and is cast on the GPU.
last-encoder-in-model: it is a part of the model there, frozen, and runs in every step.
experts-without-gradients: a mixture's experts run as in sampling.
shift-by-size: sampling's shift is to be set by the size. vae-in-fp32: its script keeps the VAE in fp32.
vae-caches-kept: what its causal convolutions keep of a clip stays until the next one is encoded.
vae-attention-whole: its own code of the VAE makes the scores of all pairs.
table-of-words-twice: a text encoder's, once for each of its names.
reentrant-checkpoints: its own code of the model checkpoints so.
vae-tiles-of-128: its own code of the VAE works in tiles of 128 pixels a side.
prompts-unpadded: they are as long as the longest of a batch, where diffusers fills them up. masks-by-head: its own code
makes a mask over all pairs of tokens for every head. masks-one-sample: prompts are padded and masked where there is one
sample too. joint-tensor-kept: of a block that gives text and image as parts of one tensor, only the image is offloaded.
fusion-checkpointed: blocks that fuse a prompt's states before the model's own, too.
text-encoders-trained: always, beside the model. pipeline-kept: the text encoders of the first samples stay on the GPU.
text-encoder-read: into host RAM whole, not mapped.
encoders-wait: in host RAM, from when their outputs are cached until training begins.
encoder-head-untied: its text encoder's, once it is quantised.
read-for-swapped-blocks: into host RAM whole, where blocks are swapped.
loaded-as-trained: its script loads it in the precision it trains in, loaded-as-published in that of its files, others
in fp32.
"""


class Traits(Record):
    """Facts about a model that no config holds: what its class in diffusers does, how its pipeline calls it, and what
    trainers do with it."""

    same_shape: tuple[Text, ...] = ()
    """other weights of the same shape, but for what goes in and a few layers around the blocks, by the names that
    trainers give them"""
    distilled: tuple[Text, ...] = ()
    """likewise, weights that need few steps, which this model's training would undo: they take the same memory, and are
    not trained as this model"""
    few_steps: Flag = False
    """it was distilled to need few steps, which training it like any other model undoes little by little"""
    caution: str = ""
    """what is not known of it, said beside every answer"""
    part: Text = "transformer"
    """what pipelines call it: its folder, and the prefix of its LoRA weights"""
    trained_by: str = ""
    """file in trainers/families that trains it, where that is not the family's"""
    frames_per_second: Count | None = None
    """of the clips a video model was trained on, where `inputs` has no frame_rate that the model is given"""
    trained_in_fp32: Flag = False
    """other trainers' scripts train all of it in fp32 without autocast, unless they are told otherwise"""
    stages: Flag = False
    """its stacks are the levels of a UNet, each of a resolution of its own with several blocks inside: those are what
    is checkpointed and compiled, and nothing of it is swapped by a search"""
    checkpoints: Flag = True
    """diffusers' class can checkpoint its blocks (``_supports_gradient_checkpointing``)"""
    head_dim_counts_heads: Flag = False
    """attention_head_dim in the config is the number of heads, in spite of its name (diffusers UNets)"""
    last_block_apart: Flag = False
    """the last block is unlike the others, and recorded beside them: it has no output for the text"""
    layer_beside_each_block: Flag = False
    """beside its blocks, each has a layer that works for it alone (HiDream's projection of a text): full training,
    where all of them get gradients, is recorded with all blocks"""
    ends_in_linear: Flag = False
    """its blocks end in a linear layer: recomputation that stops as early as it can would stop inside it, and leave the
    weights of an fp8 base as they were cast"""
    fp8_base: Flag = True
    """LoRA trains over a base in fp8 by diffusers' layerwise casting; a convolution's backward reads its weights, which
    are cast back by then"""
    rms_norm: Literal["none", "torch", "torch-in-fp32"] = "none"
    """torch: its blocks call torch's own RMSNorm, which CUDA's autocast computes in fp32 since 2.12; torch-in-fp32:
    they do, and cast to fp32 themselves, whatever autocast does; none: they do not (diffusers' class of that name is
    made of other operators)"""
    attends_by_card: Flag = False
    """it attends with a mask and with fewer heads of keys than of queries, which of CUDA's kernels cuDNN's alone takes:
    where torch puts that first it runs, and elsewhere the math path, so both are recorded (`trainers.recording`
    `.cuda_ops.CudaAttention`)"""
    guidance_in_one_batch: Flag = False
    """its pipeline runs the prompt and the empty prompt as one batch of two (diffusers pipelines); else the model is
    called twice, or was distilled to need it once"""
    denoising_steps: Count = 50
    """of one sample, when nobody says: ``num_inference_steps`` of its pipeline's call (diffusers pipelines)"""
    published_dtype: FloatDtype = "bf16"
    """of its weights in the repository that diffusers reads. What is loaded so stays in the files, which are mapped"""
    stored_positions: str = ""
    """buffer with the table of sine positions for the shape in the config, from which any other shape's is made anew"""
    trained_share: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.99
    """of its parameters, that full training gives gradients at the least: what the last block makes of the prompt goes
    nowhere (EasyAnimate 12B 0.993, HunyuanVideo 1.5 0.995, Qwen-Image 0.996; of the others all), and some models have
    blocks for what is not trained with"""
    depthwise: tuple[Text, ...] = ()
    """ends of the names of convolutions with a filter for each channel: an adapter of one reads all channels"""
    saved_tables: tuple[Text, ...] = ()
    """buffers that a checkpoint holds: they are loaded in the weights' format, and no engine splits or casts them"""
    wide_is_all_linear: Flag = False
    """`lora.wide` is every linear layer of the blocks but modulation"""
    split: SplitPlan | None = None
    """what context parallelism splits; None: it cannot"""
    split_fault: str = ""
    """why not, where diffusers has a plan that does not run"""
    not_encoded: str = ""
    """what its samples have that `vplan train` cannot read from a folder and encode yet (`trainers.families`): it
    trains on samples then that are encoded already"""
    trainers: dict[str, tuple[TrainerTrait, ...]] = {}
    """what other trainers do with it, by the trainer's name"""
