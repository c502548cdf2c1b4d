"""Job (what to train), Strategy (how it is made to fit) and Machine (on what): the names of DESIGN section 3.

The string under a field is also the help text of its flag. What contradicts what is in `planner.spec.rules`.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from planner.errors import VplanError, quoted
from planner.schema import Bytes, Count, CountOrZero, Flag, Positive, Record

# Far above what anybody trains. They catch slips of the keyboard (10**12) and keep every product inside 64 bits.
MAX_FRAMES = 10_000
MAX_SIDE = 16_384
Frames = Annotated[int, Field(strict=True, ge=1, le=MAX_FRAMES)]
Side = Annotated[int, Field(strict=True, ge=1, le=MAX_SIDE)]
BatchSize = Annotated[int, Field(strict=True, ge=1, le=1_000)]
Rank = Annotated[int, Field(strict=True, ge=1, le=8_192)]

Method = Literal["lora", "full", "sample"]
WeightsDtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "nf4", "int4"]
FloatDtype = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal["adamw", "adamw-8bit", "adamw-8bit-paged", "adafactor", "lion", "prodigy", "came", "muon"]
Sharding = Literal["none", "ddp", "zero-1", "zero-2", "zero-3", "fsdp"]
SPLIT = frozenset({"zero-1", "zero-2", "zero-3", "fsdp"})
"""Shardings that split something between GPUs."""

Offload = Literal["none", "cpu", "nvme"]
Residence = Literal["cached", "resident", "swapped"]

QUANTISED = frozenset({"fp8", "int8", "nf4", "int4"})
"""Storage formats that hold a frozen base only: nothing can be trained in them."""


class Bucket(Record):
    """One shape of training sample. A job with buckets is priced at the worst of them."""

    frames: Frames
    """frames per clip (1 = image)"""
    height: Side
    """pixels"""
    width: Side
    """pixels"""
    batch_size: BatchSize | None = None
    """samples per GPU at this shape; the job's batch size when not given"""


class ValidationShape(Record):
    """The sample that validation makes during training."""

    frames: Frames
    """frames of the validation sample (1 = image)"""
    height: Side
    """pixels"""
    width: Side
    """pixels"""
    cfg: Flag = True
    """classifier-free guidance: every denoising step runs a batch of two"""


class Job(Record):
    """What to train: a model, a method and the shape of one sample."""

    model: Annotated[str, Field(min_length=1, max_length=400)]
    """model to train: a bundled name or a Hugging Face id (`vplan models` lists them)"""
    method: Method = "lora"
    """lora trains small adapters, full trains the weights, sample only generates (no gradients)"""
    trainable: tuple[str, ...] = ()
    """weights to train in full training, by parts of their names (attn1, blocks.0, *norm*); all by default"""
    lora_rank: Rank = 16
    """rank of the LoRA adapters"""
    lora_targets: tuple[str, ...] | None = None
    """layers that get an adapter, by name; the model's usual attention projections by default"""
    lora_dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    """dropout before the adapters, 0 to 1; above 0 it keeps one more activation per adapter"""
    frames: Frames
    """frames per clip (1 = image)"""
    height: Side
    """height of a sample, in pixels"""
    width: Side
    """width of a sample, in pixels"""
    batch_size: BatchSize = 1
    """samples per GPU in one forward pass"""
    buckets: tuple[Bucket, ...] = ()
    """several shapes instead of one; the plan must fit all of them"""
    text_tokens: Count | None = None
    """length prompts are padded to; the model's own by default"""
    references: CountOrZero = 0
    """conditioning images per sample"""
    experts: Literal["high", "low", "both"] | None = None
    """which experts of a two-expert model to train (high or low noise)"""
    validation: ValidationShape | None = None
    """shape of the validation sample; the job's by default. With method sample, only its guidance is used"""

    @property
    def guided(self) -> bool:
        """Whether samples are made with classifier-free guidance."""
        return self.validation is None or self.validation.cfg

    @property
    def shapes(self) -> tuple[Bucket, ...]:
        """Every shape a step may have, each with its batch size filled in: the buckets, or the job's one shape."""
        own = Bucket(frames=self.frames, height=self.height, width=self.width)
        return tuple(
            Bucket.model_construct(**{**shape.__dict__, "batch_size": shape.batch_size or self.batch_size})
            for shape in self.buckets or (own,)
        )


class Strategy(Record):
    """How the job is made to fit. The defaults are our trainer's; `planner.spec.rules.resolve` fills what a job
    decides."""

    refused: ClassVar[Mapping[str, frozenset[str]]] = {
        "weights_dtype": frozenset({"int4"}),  # see planner.spec.rules
        "attention": frozenset({"flash-3", "math", "xformers"}),  # see planner.layout.pipeline
        "compile": frozenset({"cudagraphs"}),
    }

    weights_dtype: WeightsDtype | None = None
    """how the weights are stored: the frozen base in lora (bf16 by default), the trained weights in full (fp32)"""
    compute_dtype: FloatDtype = "bf16"
    """dtype of the model's inputs and outputs"""
    master_weights: Literal["none", "fp32"] = "none"
    """keep an fp32 copy of the trained weights for the optimizer, so that small updates are not lost"""
    adapter_dtype: FloatDtype = "fp32"
    """dtype of the LoRA adapters"""
    autocast: Literal["none", "bf16", "fp16"] = "bf16"
    """run matrix products in this 16-bit dtype, whatever dtype the weights are stored in"""
    gradient_checkpointing: Literal["none", "full", "offload", "partial"] = "none"
    """drop activations and recompute them in backward: of every block (full), of the first blocks (partial), or of
    every block with what must be kept in host RAM (offload)"""
    checkpointed_blocks: Count | None = None
    """number of blocks that `--gradient-checkpointing partial` covers, in execution order"""
    optimizer: Optimizer = "adamw"
    """optimizer; the 8-bit and factored ones (adafactor, came) keep smaller states and lose some precision"""
    optimizer_step: Literal["foreach", "fused", "loop", "backward"] = "foreach"
    """foreach = all weights at once, with a temporary copy; fused = one kernel; loop = one weight at a time; backward =
    inside the backward pass, freeing each gradient at once"""
    gradient_accumulation: Count = 1
    """forward and backward passes per optimizer step"""
    ema: Literal["none", "gpu", "cpu"] = "none"
    """keep a moving average of the trained weights, on the GPU or in host RAM"""
    sharding: Sharding = "none"
    """what is sharded across GPUs: nothing (ddp, the default for several), optimizer states (zero-1), gradients too
    (zero-2), weights too (zero-3, fsdp)"""
    grad_buckets: Literal["copy", "view"] = "view"
    """DDP's communication buckets: a second copy of all gradients, or the gradients themselves (view)"""
    offload_optimizer: Offload = "none"
    """keep the optimizer states and run the optimizer step in host RAM, or on an NVMe disk"""
    offload_gradients: Offload = "none"
    """move gradients to host RAM as they are computed; needs an offloaded optimizer"""
    offload_params: Offload = "none"
    """keep the sharded weights in host RAM or on an NVMe disk; needs zero-3 or fsdp"""
    swap_blocks: CountOrZero = 0
    """transformer blocks kept in host RAM and copied to the GPU when they run"""
    text_encoder: Residence = "cached"
    """cached = prompts are encoded before training, then the encoder is unloaded; resident = stays on the GPU;
    swapped = moves to the GPU when needed"""
    vae: Residence = "cached"
    """cached = samples are encoded before training, then the VAE is unloaded; resident = stays on the GPU;
    swapped = moves to the GPU when needed"""
    text_encoder_dtype: WeightsDtype = "bf16"
    """how the text encoder's weights are stored"""
    vae_dtype: FloatDtype = "bf16"
    """how the VAE's weights are stored and computed"""
    vae_tiling: Flag = False
    """encode and decode in overlapping tiles: less memory, faint differences where tiles meet"""
    vae_slicing: Flag = False
    """encode and decode one sample of the batch at a time"""
    inactive_expert: Literal["gpu", "cpu", "absent"] = "absent"
    """where to keep the inactive expert of a two-expert model; on the GPU if both are trained"""
    validation_mode: Literal["off", "on", "offload"] = "off"
    """make validation samples during training; offload moves each component to the GPU only while it runs"""
    group_offload: Literal["none", "block", "leaf"] = "none"
    """for sampling: keep weights in host RAM and load them block by block, or layer by layer (leaf)"""
    group_offload_stream: Flag = False
    """prefetch the next group while this one runs: faster, but needs room for two groups on the GPU"""
    attention: Literal["sdpa", "flash", "flash-3", "cudnn", "efficient", "math", "xformers"] = "sdpa"
    """attention backend; sdpa lets torch choose the kernel"""
    expandable_segments: Flag = True
    """let PyTorch's allocator grow its segments, which wastes less memory (not on native Windows)"""
    compile: Literal["none", "blocks", "full", "cudagraphs"] = "none"
    """torch.compile: each repeated block, the whole model, or the whole model with CUDA graphs"""
    context_parallel: Count = 1
    """split each sample's tokens across this many GPUs"""

    def weights(self, method: Method) -> WeightsDtype:
        """How the weights are stored: what was asked for, else bf16 for a frozen base and fp32 for trained weights."""
        return self.weights_dtype or ("fp32" if method == "full" else "bf16")

    def lossy_fields(self, job: Job) -> tuple[str, ...]:
        """The fields whose values change what is learnt, not only where and when it is computed, in field order."""
        marked = {mark.field for mark in LOSSY if mark.applies(job, self)}
        return tuple(field for field in type(self).model_fields if field in marked)


class LossyMark(NamedTuple):
    """Values of one field that lose something (DESIGN section 3, "Lossless before lossy"); the rest is lossless."""

    field: str
    values: frozenset[str | bool]
    methods: frozenset[Method]
    why: str
    unless_master: bool = False
    """an fp32 master of the trained weights removes the loss"""

    def applies(self, job: Job, strategy: Strategy) -> bool:
        """Whether this job under this strategy loses what the mark describes."""
        value = strategy.weights(job.method) if self.field == "weights_dtype" else getattr(strategy, self.field)
        cured = self.unless_master and strategy.master_weights == "fp32"
        return job.method in self.methods and value in self.values and not cured


_TRAINING: frozenset[Method] = frozenset({"lora", "full"})
_ANY: frozenset[Method] = frozenset({"lora", "full", "sample"})
_HALF: frozenset[str | bool] = frozenset({"bf16", "fp16"})
LOSSY = (
    LossyMark("weights_dtype", QUANTISED, _ANY, "the frozen weights are rounded to 8 or 4 bits"),
    LossyMark("weights_dtype", _HALF, frozenset({"full"}), "updates below 1/256 of a weight round away", True),
    LossyMark("adapter_dtype", _HALF, frozenset({"lora"}), "updates below 1/256 of a weight round away", True),
    LossyMark(
        "optimizer", frozenset({"adamw-8bit", "adamw-8bit-paged"}), _TRAINING, "the optimizer's states have 8 bits"
    ),
    LossyMark("optimizer", frozenset({"adafactor", "came"}), _TRAINING, "second moments are row and column sums"),
    LossyMark("text_encoder_dtype", QUANTISED, _ANY, "the text encoder's weights are rounded to 8 or 4 bits"),
    LossyMark("vae_tiling", frozenset({True}), _ANY, "tiles are blended where they meet"),
)
"""Every lossy value. lion, prodigy and muon are not less precise, they are other algorithms: the user's choice."""


class Links(Record):
    """Speeds measured or known better than the card's profile, in GB/s (10**9) in one direction."""

    host_gbs: Positive | None = None
    """between host RAM and one GPU"""
    gpu_gbs: Positive | None = None
    """between two GPUs of one node"""
    node_gbs: Positive | None = None
    """between two nodes, per GPU"""


class Machine(Record):
    """On what: cards, nodes and host RAM."""

    gpu: Annotated[str, Field(min_length=1, max_length=100)]
    """card (rtx4090, h100-80gb), card class (24GB) or exact budget (23.5GiB); 2x4090 is two of them"""
    gpus: Annotated[int, Field(strict=True, ge=1, le=1_024)] = 1
    """GPUs per node"""
    nodes: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """number of nodes"""
    host_ram: Bytes | None = None
    """host RAM per node that the run may use, as 64GiB; by card class if not set"""
    reserve: Bytes = 0
    """GPU memory left free for other programs, as 0.3GiB"""
    os: Literal["linux", "windows", "wsl"] = "linux"
    """operating system of the training machine"""
    unified: Flag = False
    """GPU and CPU share one memory"""
    torch: Annotated[str, Field(max_length=100)] | None = None
    """torch version used for training, as 2.11; the newest by default"""
    links: Links | None = None
    """link speeds, where they are known better than from the card's profile"""

    @property
    def world(self) -> int:
        """GPUs in all nodes together."""
        return self.gpus * self.nodes

    @model_validator(mode="after")
    def _host_ram_is_some(self) -> Self:
        if self.host_ram == 0:
            raise VplanError("host_ram 0 is too small", "write the RAM of the computer, as 64GiB")
        return self

    @field_validator("torch")
    @classmethod
    def _torch_is_a_version(cls, version: str | None) -> str | None:
        if version is not None and not re.match(r"\d{1,3}\.\d{1,3}(?!\d)", version, re.ASCII):
            raise VplanError(f"{quoted(version)} is no version", "write it as 2.11")
        return version
