"""The vocabulary: Job (what to train), Strategy (how it is made to fit) and Machine (on what).

The string under a field is also the help text of its flag; the flag is the field's name in kebab case. A strategy
field's `Note` (`planner.spec.field_notes`) says what our trainer applies, what is lossy and what a search tries. Which
combinations may run is in `planner.spec.combinations`.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import functools
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from planner.errors import VplanError, quoted
from planner.schema import Bytes, Count, CountOrZero, Flag, Positive, Record, Refused
from planner.spec.field_notes import ALL, Loss, Note, Searched

# Far above what anybody trains. They catch slips of the keyboard (10**12) and keep every product inside 64 bits.
MAX_FRAMES = 10_000
MAX_SIDE = 16_384
Frames = Annotated[int, Field(strict=True, ge=1, le=MAX_FRAMES)]
Side = Annotated[int, Field(strict=True, ge=1, le=MAX_SIDE)]
BatchSize = Annotated[int, Field(strict=True, ge=1, le=1_000)]
Rank = Annotated[int, Field(strict=True, ge=1, le=8_192)]

LokrFactor = Annotated[int, Field(strict=True, ge=0, le=1_024)]

Method = Literal["lora", "full", "sample"]
Adapter = Literal["lora", "dora", "lokr", "loha"]
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

HALF = frozenset({"bf16", "fp16"})
"""Formats of 16 bits."""

TRAINING = frozenset({"lora", "full"})
"""Methods that train something."""


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

    @property
    def words(self) -> str:
        """As `--buckets` has it: 81x480x832."""
        return f"{self.frames}x{self.height}x{self.width}"

    @property
    def pixels(self) -> int:
        """Pixels of all frames of a clip."""
        return self.frames * self.height * self.width


class ValidationShape(Record):
    """The shape of the sample that validation makes during training: frames, height and width in pixels, and whether
    guidance (cfg) is on."""

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
    adapter: Annotated[Adapter, Refused(frozenset({"loha"}))] = "lora"
    """kind of adapter: lora, dora (also trains the lengths of a weight's rows) or lokr (a Kronecker product of two
    matrices); loha is refused: it has not been recorded"""
    lokr_factor: LokrFactor = 16
    """LyCORIS' factor, which LoKr divides the sides of a weight by: 4, 8, 16, 32, or 0 for the one nearest to the
    square root (LyCORIS' -1)"""
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
    def trains(self) -> str:
        """What is trained, in a word: the kind of adapter, or else the method."""
        return self.adapter if self.method == "lora" else self.method

    @property
    def adapter_size(self) -> str:
        """What an adapter's size goes by, in words behind its kind: " rank 16"; empty where none is trained."""
        if self.method != "lora":
            return ""
        return f" factor {self.lokr_factor}" if self.adapter == "lokr" else f" rank {self.lora_rank}"

    @property
    def guided(self) -> bool:
        """Whether samples are made with classifier-free guidance."""
        return self.validation is None or self.validation.cfg

    @property
    def shapes(self) -> tuple[Bucket, ...]:
        """Every shape a step may have, each with its batch size filled in: the buckets, or the job's one shape."""
        return _shapes(self)


@functools.lru_cache(maxsize=256)
def _shapes(job: Job) -> tuple[Bucket, ...]:
    own = Bucket(frames=job.frames, height=job.height, width=job.width)
    return tuple(
        Bucket.model_construct(**{**shape.__dict__, "batch_size": shape.batch_size or job.batch_size})
        for shape in job.buckets or (own,)
    )


class Strategy(Record):
    """How the job is made to fit. The defaults are our trainer's; `planner.spec.rules.resolve` fills what a job
    decides.

    A field's `Note` says all else about it: what our trainer applies, what is lossy, what a search tries, and how it is
    worded. Combinations of fields are in `planner.spec.combinations`.
    """

    weights_dtype: Annotated[
        WeightsDtype | None,
        Refused(frozenset({"int4"})),  # see planner.spec.combinations.contradictions
        Note(
            trained=("fp32", "bf16", "fp16", "fp8", "int8", "nf4"),
            losses=(
                Loss(QUANTISED, "the frozen weights are rounded to 8 or 4 bits"),
                Loss(HALF, "updates below 1/256 of a weight round away", frozenset({"full"}), unless_master=True),
            ),
            # Quantised bases are recorded under autocast with an fp32 adapter.
            searched=Searched(4, lora=("bf16", "int8", "fp8", "nf4"), full=("fp32", "bf16")),
        ),
    ] = None
    """how the weights are stored: the frozen base in lora (bf16 by default), the trained weights in full (fp32)"""
    # The step's inputs have autocast's dtype (without autocast the weights'), as in the published trainers.
    compute_dtype: Annotated[FloatDtype, Note(trained=ALL)] = "bf16"
    """dtype of the model's inputs and outputs"""
    master_weights: Annotated[
        Literal["none", "fp32"],
        Note(trained=("none", "fp32"), searched=Searched(7, lora=("none", "fp32"), full=("none", "fp32"))),
    ] = "none"
    """keep an fp32 copy of the trained weights for the optimizer, so that small updates are not lost"""
    adapter_dtype: Annotated[
        FloatDtype,
        Note(
            trained=ALL,
            losses=(Loss(HALF, "updates below 1/256 of a weight round away", frozenset({"lora"}), unless_master=True),),
            words={"bf16": "bf16 adapters"},
            searched=Searched(6, lora=("fp32", "bf16"), full=("fp32",)),
        ),
    ] = "fp32"
    """dtype of the LoRA adapters"""
    adapter_inputs: Annotated[
        Literal["cast", "shared"],
        Note(
            trained=("cast", "shared"),  # no words: it is free, and nearly every plan has it
            searched=Searched(18, lora=("cast", "shared")),
        ),
    ] = "cast"
    """what fp32 LoRA adapters read under autocast: a copy of the layer's input in their own dtype, as peft makes it
    (cast), or that input itself (shared): the same numbers in less memory"""
    autocast: Annotated[
        Literal["none", "bf16", "fp16"],
        Note(trained=ALL, searched=Searched(5, lora=("bf16", "none"), full=("bf16", "none"))),
    ] = "bf16"
    """run matrix products in this 16-bit dtype, whatever dtype the weights are stored in"""
    gradient_checkpointing: Annotated[
        Literal["none", "full", "offload", "fp8", "partial"],
        Note(
            trained=ALL,
            losses=(
                Loss(frozenset({"fp8"}), "blocks are recomputed from inputs that are rounded to 8 bits", TRAINING),
            ),
            words={"full": "checkpointing", "offload": "checkpointing to host RAM", "fp8": "checkpoints in 8 bits"},
            searched=Searched(2, lora=("none", "full", "offload", "fp8"), full=("none", "full", "offload", "fp8")),
        ),
    ] = "none"
    """drop activations and recompute them in backward: of every block (full), the first blocks (partial), or all with
    what must be kept in host RAM (offload) or in 8 bits (fp8)"""
    checkpointed_blocks: Annotated[Count | None, Note(trained=ALL)] = None
    """number of blocks that `--gradient-checkpointing partial` covers, in execution order"""
    nested_checkpointing: Annotated[
        Flag,
        Note(
            trained=ALL,
            words={True: "nested checkpoints"},
            searched=Searched(19, lora=(False, True)),
        ),
    ] = False
    """checkpoint each attention and feed-forward again inside a checkpointed block, so that a recomputed block holds
    one of them at a time; each runs forward once more"""
    # lion, prodigy and muon are not less precise, they are other algorithms: the user's choice.
    optimizer: Annotated[
        Optimizer,
        Note(
            trained=("adamw", "adamw-8bit", "adamw-8bit-paged", "adafactor", "lion", "prodigy", "came", "muon"),
            losses=(
                Loss(frozenset({"adamw-8bit", "adamw-8bit-paged"}), "8-bit optimizer states", TRAINING),
                Loss(frozenset({"adafactor", "came"}), "second moments are row and column sums", TRAINING),
            ),
            words={"adamw-8bit": "8-bit AdamW", "adafactor": "Adafactor"},
            searched=Searched(8, lora=("adamw", "adamw-8bit"), full=("adamw", "adamw-8bit"), last=("adafactor",)),
        ),
    ] = "adamw"
    """optimizer; the 8-bit and factored ones (adafactor, came) keep smaller states and lose some precision"""
    optimizer_step: Annotated[
        Literal["foreach", "fused", "loop", "backward"],
        Note(
            trained=("foreach", "fused", "loop", "backward"),
            losses=(Loss(frozenset({"backward"}), "gradients are gone before they could be clipped", TRAINING),),
            words={"fused": "fused step", "backward": "step inside backward"},
            searched=Searched(9, lora=("foreach", "fused"), full=("foreach", "fused"), last=("backward",)),
        ),
    ] = "foreach"
    """foreach = all weights at once, with a temporary copy; fused = one kernel; loop = one weight at a time; backward =
    inside the backward pass, freeing each gradient at once"""
    gradient_accumulation: Annotated[Count, Note(trained=ALL)] = 1
    """forward and backward passes per optimizer step"""
    ema: Annotated[Literal["none", "gpu", "cpu"], Note(trained=("none", "gpu", "cpu"))] = "none"
    """keep a moving average of the trained weights, on the GPU or in host RAM"""
    sharding: Annotated[
        Sharding,
        Note(
            trained=("none", "ddp", "zero-1", "zero-2", "zero-3", "fsdp"),
            words={"zero-1": "ZeRO-1", "zero-2": "ZeRO-2", "zero-3": "ZeRO-3", "ddp": "DDP", "fsdp": "FSDP"},
            searched=Searched(3, lora=(), full=()),
        ),
    ] = "none"
    """what is sharded across GPUs: nothing (ddp, the default for several), optimizer states (zero-1), gradients too
    (zero-2), weights too, as they are loaded (zero-3, fsdp)"""
    # torch calls it hybrid sharding (HSDP): a device mesh of replicas x shards.
    fsdp_replicas: Annotated[Count, Note(trained=ALL, searched=Searched(20, lora=(), full=()))] = 1
    """copies of the model that fsdp shards, each over neighbouring GPUs, with gradients averaged over copies (hybrid
    sharding); as many as nodes gather weights inside nodes only"""
    grad_buckets: Annotated[Literal["copy", "view"], Note(trained=ALL)] = "view"
    """DDP's communication buckets: a second copy of all gradients, or the gradients themselves (view)"""
    # What an adapter's optimizer holds is small enough to stay.
    offload_optimizer: Annotated[
        Offload,
        Note(
            trained=("none", "cpu", "nvme"),
            words={"cpu": "optimizer in host RAM"},
            searched=Searched(10, lora=("none",), full=("none", "cpu")),
        ),
    ] = "none"
    """keep the optimizer states and run the optimizer step in host RAM, or on an NVMe disk"""
    offload_gradients: Annotated[
        Offload,
        Note(
            trained=("none", "cpu", "nvme"),
            words={"cpu": "gradients in host RAM"},
            searched=Searched(11, lora=("none",), full=("none", "cpu")),
        ),
    ] = "none"
    """move gradients to host RAM as they are computed; needs an offloaded optimizer"""
    offload_params: Annotated[
        Offload,
        Note(
            trained=("none", "cpu"),
            words={"cpu": "weights in host RAM"},
            searched=Searched(12, lora=("none", "cpu"), full=("none", "cpu")),
        ),
    ] = "none"
    """keep the sharded weights in host RAM or on an NVMe disk; needs zero-3 or fsdp"""
    # How many blocks a search swaps, `planner.search.swap_count` finds.
    swap_blocks: Annotated[CountOrZero, Note(trained=ALL, searched=Searched(14, lora=(), full=()))] = 0
    """transformer blocks kept in host RAM and copied to the GPU when they run"""
    text_encoder: Annotated[Residence, Note(trained=("cached",), words={"swapped": "text encoders swapped"})] = "cached"
    """cached = prompts are encoded before training, then the encoder is unloaded; resident = stays on the GPU;
    swapped = moves to the GPU when needed"""
    vae: Annotated[
        Residence,
        Note(
            trained=("cached",),
            words={"swapped": "VAE swapped"},
            searched=Searched(15, sample=("cached", "swapped")),
        ),
    ] = "cached"
    """cached = samples are encoded before training, then the VAE is unloaded; resident = stays on the GPU;
    swapped = moves to the GPU when needed"""
    text_encoder_dtype: Annotated[
        WeightsDtype,
        Note(trained=ALL, losses=(Loss(QUANTISED, "the text encoder's weights are rounded to 8 or 4 bits"),)),
    ] = "bf16"
    """how the text encoder's weights are stored"""
    vae_dtype: Annotated[FloatDtype, Note(trained=ALL)] = "bf16"
    """how the VAE's weights are stored and computed"""
    vae_tiling: Annotated[
        Flag,
        Note(
            trained=ALL,
            losses=(Loss(frozenset({True}), "tiles are blended where they meet"),),
            words={True: "VAE tiling"},
            searched=Searched(1, lora=(), full=(), sample=(False, True)),
        ),
    ] = False
    """encode and decode in overlapping tiles: less memory, faint differences where tiles meet"""
    vae_slicing: Annotated[Flag, Note(trained=ALL)] = False
    """encode and decode one sample of the batch at a time"""
    inactive_expert: Annotated[
        Literal["gpu", "cpu", "absent"],
        Note(
            trained=("absent", "gpu", "cpu"),
            words={"cpu": "idle expert in host RAM"},
            searched=Searched(13, lora=(), full=()),
        ),
    ] = "absent"
    """where to keep the inactive expert of a two-expert model; on the GPU if both are trained"""
    validation_mode: Annotated[Literal["off", "on", "offload"], Note(trained=("off", "on", "offload"))] = "off"
    """make validation samples during training; offload moves each component to the GPU only while it runs"""
    group_offload: Annotated[
        Literal["none", "block", "leaf"],
        Note(
            trained=("none", "block", "leaf"),
            words={"block": "weights offloaded by block", "leaf": "weights offloaded by layer"},
            searched=Searched(16, sample=("none", "block", "leaf")),
        ),
    ] = "none"
    """for sampling: keep weights in host RAM and load them block by block, or layer by layer (leaf)"""
    group_offload_stream: Annotated[
        Flag,
        Note(trained=ALL, words={True: "prefetched"}, searched=Searched(17, sample=(False, True))),
    ] = False
    """prefetch the next group while this one runs: faster, but needs room for two groups on the GPU"""
    attention: Annotated[
        Literal["sdpa", "flash", "flash-3", "cudnn", "efficient", "math", "xformers"],
        Refused(frozenset({"flash-3", "math", "xformers"})),  # without memory terms so far
        Note(trained=("sdpa", "flash", "cudnn", "efficient")),
    ] = "sdpa"
    """attention backend; sdpa lets torch choose the kernel"""
    expandable_segments: Annotated[Flag, Note(trained=ALL)] = True
    """let PyTorch's allocator grow its segments, which wastes less memory (not on native Windows)"""
    compile: Annotated[
        Literal["none", "blocks", "full", "cudagraphs"],
        Refused(frozenset({"cudagraphs"})),  # see planner.spec.combinations.estimate_gaps
        Note(trained=("none", "blocks")),
    ] = "none"
    """torch.compile: each repeated block, the whole model, or the whole model with CUDA graphs"""
    context_parallel: Annotated[Count, Note(trained=ALL)] = 1
    """split each sample's tokens across this many GPUs"""

    def weights(self, method: Method) -> WeightsDtype:
        """The storage format of the weights: the one asked for, else bf16 for a frozen base and fp32 for trained
        weights."""
        return self.weights_dtype or ("fp32" if method == "full" else "bf16")

    def lossy_fields(self, job: Job) -> tuple[str, ...]:
        """The fields whose values change what is learnt, not only where and when it is computed, in field order."""
        return tuple(field for field in _LOSSES if self._is_lossy(field, job))

    def _is_lossy(self, field: str, job: Job) -> bool:
        value = self.weights(job.method) if field == "weights_dtype" else getattr(self, field)
        has_master = self.master_weights == "fp32"
        return any(
            job.method in loss.methods and value in loss.values and not (loss.unless_master and has_master)
            for loss in _LOSSES[field]
        )


def note(field: str) -> Note:
    """The `Note` of a strategy field: its help text, values to search, wording. Raises StopIteration for a field
    without one."""
    return next(mark for mark in Strategy.model_fields[field].metadata if isinstance(mark, Note))


NOTES: dict[str, Note] = {field: note(field) for field in Strategy.model_fields}
"""Every field's note, in field order."""

_LOSSES = {field: one.losses for field, one in NOTES.items() if one.losses}


class Links(Record):
    """Speeds measured or known better than the card's profile, in GB/s (10**9) in one direction."""

    host_gbs: Positive | None = None
    """between host RAM and one GPU"""
    gpu_gbs: Positive | None = None
    """between two GPUs of one node"""
    node_gbs: Positive | None = None
    """between two nodes, per GPU"""


class Machine(Record):
    """What a plan runs on: card, GPUs per node, nodes, host RAM per node and device memory kept for others, both in
    bytes."""

    gpu: Annotated[str, Field(min_length=1, max_length=100)]
    """card (rtx4090, h100-80gb), card class (24GB) or exact budget (23.5GiB); 2x4090 is two of them; auto is the card
    of this machine"""
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
        """GPUs of all nodes together: `gpus * nodes`."""
        return self.gpus * self.nodes

    @model_validator(mode="after")
    def _host_ram_is_some(self) -> Self:
        if self.host_ram == 0:
            raise VplanError("host_ram 0 is too small", "pass the RAM of the computer, as 64GiB")
        return self

    @field_validator("torch")
    @classmethod
    def _torch_is_a_version(cls, version: str | None) -> str | None:
        if version is not None and not re.match(r"\d{1,3}\.\d{1,3}(?!\d)", version, re.ASCII):
            raise VplanError(f"{quoted(version)} is not a version", "use a form like 2.11")
        return version
