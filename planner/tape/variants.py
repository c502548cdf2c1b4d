"""Which recording answers for a Job and a Strategy: the few choices that change the stream of operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.catalog.traits import TrainerTrait
from planner.errors import NotRecordedError, VplanError
from planner.spec.job import HALF, QUANTISED, SPLIT, Job, Strategy

RMS_NORM_IN_FP32 = (2, 12)
"""The torch since which CUDA's autocast computes RMSNorm in fp32 (AT_FORALL_FP32 in ATen/autocast_mode.h). One before
leaves it in the format of its input: 4 to 7 % less of a checkpointed step of Wan 1.3B, 10 to 18 % of any other."""

FUSED_RMS_NORM = (2, 9)
"""The torch from which on CUDA has a kernel for it. One before took several operators, which are not recorded."""

NEWEST_TRIED = (2, 15)
"""The newest torch whose training was compared with the tapes, of an earlier one (docs/accuracy/rehearsals.md)."""

OLDER = "torch2.11"
"""What names a tape of the torch in between."""

CUDNN = "cudnn"
"""What names a tape for cards, and plans, whose attention is cuDNN's, of a model that attends by card."""


MPS = "mps"
"""What names a tape for Apple's GPUs: attention whose scores are whole, RMSNorm in several operators, and MPS's lists
of what autocast casts (`trainers.recording.mps_ops`)."""


def is_untried(torch: str | None) -> bool:
    """Whether a torch, as 2.16, is newer than any that was compared with the tapes."""
    return torch is not None and tuple(int(part) for part in torch.split(".")[:2]) > NEWEST_TRIED


def is_older(profile: ModelProfile, precision: Precision, torch: str | None) -> bool:
    """Whether a step under this torch differs from what the newest does; a NotRecordedError before `FUSED_RMS_NORM`."""
    if torch is None or profile.traits.rms_norm == "none":
        return False
    version = tuple(int(part) for part in torch.split(".")[:2])
    if version < FUSED_RMS_NORM:
        least = ".".join(map(str, FUSED_RMS_NORM))
        fault = f"{profile.title} under torch {torch} is not recorded (no RMSNorm kernel)"
        raise NotRecordedError(fault, f"train with torch {least} or newer, and pass --torch {least}")
    return version < RMS_NORM_IN_FP32 and ages(profile, precision) == BOTH


class Precision(NamedTuple):
    """Storage of the weights and of the adapter, and whether autocast is on; ``half`` is bf16 or fp16.

    Weights are ``fp32``, ``half``, or a quantised format by its own name.
    """

    weights: str
    adapter: str
    autocast: bool

    @classmethod
    def of(cls, job: Job, strategy: Strategy) -> Precision:
        weights = strategy.weights(job.method)
        # DeepSpeed keeps the module in 16 bits; FSDP2 gathers its weights in 16 bits. Neither casts as it computes.
        if strategy.sharding in SPLIT:
            return cls("half", "half" if job.method == "lora" else "", autocast=False)
        return cls(
            "half" if weights in HALF else weights,
            "" if job.method != "lora" else "fp32" if strategy.adapter_dtype == "fp32" else "half",
            strategy.autocast != "none",
        )

    @property
    def trained(self) -> str:
        """How the trained parameters are stored: "fp32" or "half"."""
        return self.adapter or self.weights

    @property
    def name(self) -> str:
        return "-".join(filter(None, [self.weights, self.adapter, "autocast" if self.autocast else ""]))

    @property
    def casts_inputs(self) -> bool:
        """Whether peft casts what an adapter reads to the adapter's dtype, and autocast casts it back. Under autocast
        bitsandbytes' layers (nf4) do not (peft/tuners/lora/bnb.py)."""
        return self.adapter == "fp32" and self.autocast and self.weights != "nf4"

    @property
    def flags(self) -> tuple[str, ...]:
        """The command-line options that ask for this precision, as a user types them."""
        typed = {"half": "bf16"}
        weights = f"--weights-dtype {typed.get(self.weights, self.weights)}"
        adapter = f"--adapter-dtype {typed.get(self.adapter, self.adapter)}" if self.adapter else ""
        return tuple(filter(None, [weights, adapter, f"--autocast {'bf16' if self.autocast else 'none'}"]))

    def nearest(self, known: Sequence[Precision]) -> str:
        """The options for the recorded precision that keeps the weights' format, else uses 16 bits, and otherwise
        differs least. ``known``: the recorded ones."""

        def distance(other: Precision) -> tuple[bool, bool, int]:
            kept = other.weights == self.weights
            return not kept, not kept and other.weights != "half", len(set(other.flags) - set(self.flags))

        return " ".join(flag for flag in min(known, key=distance).flags if flag not in self.flags)


def trained_storage(job: Job, strategy: Strategy) -> str:
    """fp32 or half: the format in which the optimizer finds what is trained. FSDP2 steps over shares of their own,
    another over fp32 masters; DeepSpeed does its own step, see `planner.layout.sharding.zero`."""
    if strategy.master_weights == "fp32" and strategy.sharding in ("none", "ddp"):
        return "fp32"
    if strategy.sharding != "fsdp":
        return Precision.of(job, strategy).trained
    dtype = strategy.adapter_dtype if job.method == "lora" else strategy.weights(job.method)
    return "fp32" if dtype == "fp32" else "half"


PRECISIONS = {
    "lora": (Precision("half", "fp32", True), Precision("half", "half", True), Precision("half", "half", False)),
    "full": (Precision("fp32", "", True), Precision("half", "", True), Precision("half", "", False)),
}
PLAIN_FP32 = Precision("fp32", "", False)
"""Full training without mixed precision, recorded of the models of which that is usual
(`planner.catalog.traits.Traits.trained_in_fp32`)."""

QUANTISED_BASES = tuple(Precision(weights, "fp32", True) for weights in ("fp8", "int8", "nf4"))
"""Frozen bases under LoRA on the usual layers, and on a second choice of them where a model's profile says so, with the
adapter that trainers put on them (see trainers.memory.quantise)."""

NOT_CAST = tuple(Precision(weights, "fp32", False) for weights in ("half", "fp8", "int8", "nf4"))
"""LoRA in fp32 without autocast, as ai-toolkit's: recorded when somebody names one, and shipped of its models."""

WIDE = "lora-wide"
"""LoRA on a model's second usual set of layers, see `planner.catalog.profiles.LoraDefaults`."""

ON_MORE = "-wide"
"""What ends the name of a method whose adapters are on those."""

LOKR_FACTORS = (0, 4, 8, 16, 32)
"""What LoKr is recorded with: ai-toolkit's page offers these, and SimpleTuner's example has 16."""

SHARED = "-shared"
"""What names a tape whose adapters read their layer's input itself."""

CHECKPOINTING = ("none", "full")
NESTED = "nested"
"""The checkpointing of a tape of blocks that checkpoint their attentions and feed-forwards again."""

OPTIMIZERS = (
    ("adamw", "foreach"),
    ("adamw", "fused"),
    ("adamw", "loop"),
    ("adamw-8bit", "foreach"),
    ("adafactor", "foreach"),
    ("lion", "foreach"),
    ("prodigy", "foreach"),
    ("came", "foreach"),
    ("muon", "foreach"),
)
"""(optimizer, how it steps). Only torch has ways to choose from; the others step one parameter after another."""

IN_BACKWARD = tuple((optimizer, "backward") for optimizer in ("adamw", "adamw-8bit", "adafactor"))
"""Steps inside backward, recorded of full training: an adapter's gradients are not worth freeing early."""

UNPAGED = {"adamw-8bit-paged": "adamw-8bit"}
"""Optimizers that do the same with their states in other memory."""


def methods(profile: ModelProfile) -> tuple[str, ...]:
    """The recorded methods of a model: LoRA on its usual layers, on more layers where that is usual too, and full
    training."""
    return ("lora", WIDE, "full") if profile.lora.wide else ("lora", "full")


def on_request_methods(profile: ModelProfile) -> tuple[str, ...]:
    """The methods of a model that are recorded only when somebody names one of their variants: DoRA and LoKr, on the
    layers that LoRA is recorded on."""
    kinds = ("dora", *(f"lokr{factor}" for factor in LOKR_FACTORS))
    return kinds + tuple(f"{kind}{ON_MORE}" for kind in kinds) if profile.lora.wide else kinds


def has_adapters(method: str) -> bool:
    """Whether a recorded method trains adapters, of any kind and on any layers."""
    return method != "full"


def recorded_method(profile: ModelProfile, job: Job, strategy: Strategy) -> str:
    """The recorded method (one of the tape variants) that answers for a job. Of a LoRA on layers that no tape has it is
    the nearest: the fewest layers that hold all of its, else the most of them (`planner.layout.adapters`)."""
    if job.method != "lora":
        return job.method
    usual = f"lokr{job.lokr_factor}" if job.adapter == "lokr" else job.adapter
    if not job.lora_targets:
        return usual
    targets = frozenset(job.lora_targets)
    choices = [usual]
    if profile.lora.wide and (
        strategy.weights_dtype not in QUANTISED or strategy.weights_dtype in profile.lora.wide_bases
    ):
        choices.append(f"{usual}{ON_MORE}")

    def nearness(method: str) -> tuple[bool, int, int]:
        layers = recorded_layers(profile, method)
        return targets == layers, sum(_holds(layers, target) for target in targets), -len(layers)

    return max(choices, key=nearness)


def recorded_layers(profile: ModelProfile, method: str) -> frozenset[str]:
    """The names of the layers that a recorded LoRA has adapters on."""
    return frozenset(profile.lora.wide if method.endswith(ON_MORE) else profile.lora.targets)


def on_recorded_layers(profile: ModelProfile, job: Job, strategy: Strategy) -> bool:
    """Whether the layers with adapters are those of the recording that answers."""
    layers = recorded_layers(profile, recorded_method(profile, job, strategy))
    return job.method != "lora" or not job.lora_targets or frozenset(job.lora_targets) == layers


def _refuse_other_adapters(profile: ModelProfile, job: Job, strategy: Strategy) -> None:
    """Raises a NotRecordedError for DoRA and LoKr that no recording is of and none can be: what LoRA takes on other
    layers is worked out (`planner.layout.adapters`), theirs is not; nor were they compared with an engine."""
    if job.trains not in ("dora", "lokr"):
        return
    beside = {
        f"under {strategy.sharding}": ("--sharding ddp", strategy.sharding in SPLIT),
        "under context_parallel": ("--context-parallel 1", strategy.context_parallel > 1),
        "in compiled blocks": ("--compile none", strategy.compile != "none"),
    }
    for where, (instead, is_so) in beside.items():
        if is_so:
            fault = f"{job.adapter} {where} is not estimated: it was not compared with a run"
            raise NotRecordedError(fault, f"use {instead}, or --adapter lora")
    if job.trains == "lokr" and job.lokr_factor not in LOKR_FACTORS:
        listed = ", ".join(map(str, LOKR_FACTORS))
        raise NotRecordedError(f"lokr_factor {job.lokr_factor} is not recorded", f"use a --lokr-factor of {listed}")
    if not on_recorded_layers(profile, job, strategy):
        layers = " and ".join(sorted(recorded_layers(profile, recorded_method(profile, job, strategy))))
        fault = f"{job.adapter} of {profile.name} is recorded on {layers} alone"
        raise NotRecordedError(fault, "leave out --lora-targets, or use --adapter lora")


def _holds(layers: Collection[str], target: str) -> bool:
    """Whether some recorded layers are all that a target names."""
    return any(target == layer or target.endswith(f".{layer}") for layer in layers)


def precisions(profile: ModelProfile, method: str) -> tuple[Precision, ...]:
    """The precisions that a method of a model is recorded in. A UNet's convolutions cannot be cast layerwise."""
    if method == "full" and profile.traits.trained_in_fp32:
        return (*PRECISIONS[method], PLAIN_FP32)
    if method == WIDE:
        bases = tuple(base for base in QUANTISED_BASES if base.weights in profile.lora.wide_bases)
        return _unquantised(method) + _on_base(profile, bases)
    if method != "lora":
        return _unquantised(method)
    return PRECISIONS[method] + _on_base(profile, QUANTISED_BASES)


def on_request_precisions(profile: ModelProfile, method: str) -> tuple[Precision, ...]:
    """Those that a method is recorded in only when somebody names one: adapters' without autocast."""
    if not has_adapters(method):
        return ()
    return _on_base(profile, NOT_CAST if method == "lora" else NOT_CAST[:1])


PrecisionChoice = Callable[[ModelProfile, str], tuple[Precision, ...]]
"""Those of a method of a model."""


def _on_base(profile: ModelProfile, choices: Iterable[Precision]) -> tuple[Precision, ...]:
    return tuple(each for each in choices if each.weights != "fp8" or profile.traits.fp8_base)


def _unquantised(method: str) -> tuple[Precision, ...]:
    """The precisions of a method over a base that is not quantised."""
    return PRECISIONS["lora" if has_adapters(method) else "full"]


BOTH = (False, True)


def attention_paths(profile: ModelProfile, precision: Precision) -> tuple[bool, ...]:
    """Whether a recording is of cuDNN's attention: both, where cards differ in more than a kernel. Never in fp32."""
    return BOTH if profile.traits.attends_by_card and precision != PLAIN_FP32 else (False,)


class OwnCode(NamedTuple):
    """What is recorded of a trainer whose model is its own, and not diffusers': the tensors that it makes, in its
    order, leave the allocator with other holes."""

    recorded: tuple[tuple[str, Precision], ...]
    """methods, each with a precision"""
    checkpointing: tuple[str, ...]
    one_sample: tuple[bool, ...]
    trait: TrainerTrait = "own-code"
    """of the models that it is recorded of"""
    on_all_linear: bool = False
    """its adapters over a quantised base are on every layer of a block too"""
    unpacked: frozenset[str] = frozenset()
    """formats of a base whose weights it unpacks for one product: their step is recorded over a base in 16 bits, and
    `planner.layout.trainer_terms` says the rest"""
    with_gradient: tuple[str, ...] = ()
    """the layers whose adapters get a gradient, where those are not all that have one"""


_KOHYA = ((WIDE, Precision("half", "fp32", True)),)
_MUSUBI = (*_KOHYA, ("lora", Precision("fp8", "fp32", True)))
_LTX = (("lora", Precision("half", "fp32", True)),)
_QUANTO = frozenset({"int8"})
_VIDEO_LAYERS = tuple(f"attn{at}.{layer}" for at in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0"))
OWN_CODE = {
    "diffsynth": OwnCode(
        (
            (WIDE, Precision("half", "half", False)),
            (WIDE, Precision("half", "half", True)),
            ("full", Precision("half", "", False)),
        ),
        ("full",),
        (True,),
    ),
    "sd-scripts": OwnCode(_KOHYA, CHECKPOINTING, BOTH),
    "musubi-tuner": OwnCode(_MUSUBI, CHECKPOINTING, (True,), on_all_linear=True),
    "musubi-tuner@2.1-time-embedding": OwnCode(_MUSUBI, CHECKPOINTING, (True,), "time-per-token", True),
    "ltx-trainer": OwnCode(_LTX, CHECKPOINTING, BOTH, unpacked=_QUANTO),
    "ltx-trainer@video": OwnCode(_LTX, CHECKPOINTING, BOTH, unpacked=_QUANTO, with_gradient=_VIDEO_LAYERS),
}
"""Trainers, and versions of them as `planner.layout.trainer_terms` names those, whose own models are recorded
(trainers/recording/trainer_code). DiffSynth-Studio has no batch size, and always checkpoints Wan's blocks;
musubi-tuner turns one sample after another by its positions, and its adapters are on every layer of a block, over a
base in fp8 too. ltx-trainer has a time step for each token, and, by version, no sound. Anything else is answered for by
diffusers' model."""


def ages(profile: ModelProfile, precision: Precision) -> tuple[bool, ...]:
    """Whether a recording is of an older torch: both, where that makes a difference."""
    return BOTH if profile.traits.rms_norm == "torch" and precision.autocast else (False,)


def _records(profile: ModelProfile, method: str, precision: Precision, **strategy: object) -> tuple[Job, Strategy]:
    kind = method.removesuffix(ON_MORE)
    adapter = kind.rstrip("0123456789") if has_adapters(method) else "lora"
    height, width = profile.shape.resolutions[0]
    job = Job.read(
        {
            "model": profile.name,
            "method": "lora" if has_adapters(method) else "full",
            "adapter": adapter,
            **({"lokr_factor": int(kind.removeprefix(adapter))} if adapter == "lokr" else {}),
            "frames": profile.shape.default_frames,
            "height": height,
            "width": width,
            "lora_targets": profile.lora.wide if method.endswith(ON_MORE) else profile.lora.targets,
        }
    )
    fields = {
        "weights_dtype": "bf16" if precision.weights == "half" else precision.weights,
        "adapter_dtype": "bf16" if precision.adapter == "half" else "fp32",
        "autocast": "bf16" if precision.autocast else "none",
    }
    return job, Strategy.read({**fields, **strategy})


class StepVariant(NamedTuple):
    """One recording of a training step: loading, forward and backward under a method, precision and checkpointing."""

    method: str
    precision: Precision
    checkpointing: str
    one_sample: bool
    """Batch 1: some copies of expanded tensors do not happen then."""

    samples: int | None = None
    """The very batch above 1 of a model that loops over its samples; None: any."""

    dropout: bool = False
    """Each adapted layer drops some of its input, and keeps what is left and a mask. How much does not matter."""

    shared: bool = False
    """Adapters read their layer's input itself, see `planner.spec.job.Strategy`."""

    older: bool = False
    """Under a torch before `RMS_NORM_IN_FP32`, of a model and a precision where that makes a difference."""

    code: str = ""
    """The trainer whose own model and step it is of, see `OwnCode`; else diffusers' model and our step."""

    cudnn: bool = False
    """With cuDNN's attention, of a model that attends by card; else as cards run it that put flash first."""

    mps: bool = False
    """As MPS runs it, on Apple's GPUs."""

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        job: Job,
        strategy: Strategy,
        batch: int,
        torch: str | None = None,
        cudnn: bool = False,
        mps: bool = False,
    ) -> StepVariant:
        """The variant that answers for a job; ``cudnn``: where cuDNN's attention runs; ``mps``: on Apple's GPUs.
        Checkpoints in host RAM and in 8 bits are transformations of ``full``; partial ones are put together from
        ``none``, which this gives, and ``full``."""
        precision = Precision.of(job, strategy)
        mode = {"offload": "full", "fp8": "full", "partial": "none"}.get(
            strategy.gradient_checkpointing, strategy.gradient_checkpointing
        )
        if strategy.nested_checkpointing:
            if profile.traits.stages:
                fault = f"{profile.title} checkpoints parts of its blocks already, so none are nested"
                raise NotRecordedError(fault, "leave out --nested-checkpointing")
            mode = NESTED
        if mode != "none" and not profile.traits.checkpoints:
            fault = f"diffusers' {profile.diffusers_class} has no gradient checkpointing"
            raise NotRecordedError(fault, "use --gradient-checkpointing none")
        if job.method == "sample":
            raise VplanError("method sample is not estimated yet", "use --method lora or full")
        method = recorded_method(profile, job, strategy)
        _refuse_other_adapters(profile, job, strategy)
        known = precisions(profile, method)
        if precision not in known + on_request_precisions(profile, method):
            fault = f"{job.trains} of {profile.name} is not recorded with {' '.join(precision.flags)}"
            raise NotRecordedError(fault, f"use {precision.nearest(known)}")
        if strategy.gradient_checkpointing in ("offload", "fp8", "partial") and profile.traits.stages:
            fault = f"{profile.title} checkpoints parts of its blocks, for which {strategy.gradient_checkpointing}"
            raise NotRecordedError(f"{fault} is not estimated", "use --gradient-checkpointing full")
        _refuse_batch(profile, batch)
        samples = batch if profile.shape.batches and batch > 1 else None
        dropout, shared = job.method == "lora" and job.lora_dropout > 0, strategy.adapter_inputs == "shared"
        older = not mps and is_older(profile, precision, torch)
        by_cudnn = cudnn and not mps and True in attention_paths(profile, precision)
        return cls(method, precision, mode, batch == 1, samples, dropout, shared, older, cudnn=by_cudnn, mps=mps)

    @classmethod
    def all(cls, profile: ModelProfile) -> Iterator[StepVariant]:
        yield from cls._of_methods(profile, methods(profile))

    @classmethod
    def _of_methods(
        cls, profile: ModelProfile, methods: Sequence[str], choose: PrecisionChoice = precisions
    ) -> Iterator[StepVariant]:
        for method in methods:
            larger = tuple(batch for batch in profile.shape.batches if batch > 1)
            batches = larger if profile.shape.batches else (None,)
            modes = CHECKPOINTING if profile.traits.checkpoints else ("none",)
            for precision, mode in itertools.product(choose(profile, method), modes):
                for older, cudnn in itertools.product(ages(profile, precision), attention_paths(profile, precision)):
                    one = cls(method, precision, mode, one_sample=True, older=older, cudnn=cudnn)
                    yield one
                    yield from (one._replace(one_sample=False, samples=samples) for samples in batches)

    @classmethod
    def on_request(cls, profile: ModelProfile) -> Iterator[StepVariant]:
        """Variants that are recorded only when somebody names them: DoRA and LoKr; LoRA in fp32 without autocast,
        shipped of ai-toolkit's models; dropout, shipped of LoRA where a published row needs it; adapters that share
        their layer's input, shipped on the usual layers over a base in 16 bits; nested checkpoints, shipped with those;
        and all of them as MPS runs them, over a base in 16 or 32 bits.
        """
        others = tuple(cls._on_request_of_cuda(profile))
        yield from others
        for known in (*cls.all(profile), *others):
            if not (known.code or known.older or known.cudnn or known.precision.weights in QUANTISED):
                yield known._replace(mps=True)

    @classmethod
    def _on_request_of_cuda(cls, profile: ModelProfile) -> Iterator[StepVariant]:
        kinds = on_request_methods(profile)
        others = (
            *cls._of_methods(profile, kinds),
            *cls._of_methods(profile, (*methods(profile), *kinds), on_request_precisions),
        )
        yield from others
        dropping = (known for known in (*cls.all(profile), *others) if known.method.startswith(("lora", "dora")))
        yield from (known._replace(dropout=True) for known in dropping)
        shared = [known._replace(shared=True) for known in cls.all(profile) if known.precision.casts_inputs]
        yield from shared
        if not profile.traits.stages:
            checkpointed = (known for known in (*cls.all(profile), *shared, *others) if known.checkpointing == "full")
            yield from (known._replace(checkpointing=NESTED) for known in checkpointed)
        yield from cls.in_own_code(profile)

    @classmethod
    def in_own_code(cls, profile: ModelProfile) -> Iterator[StepVariant]:
        """The variants that are recorded of other trainers' own models, and shipped."""
        for trainer, own in OWN_CODE.items():
            name = trainer.partition("@")[0]
            if not (profile.trained_with(name, "own-code") and profile.trained_with(name, own.trait)):
                continue
            choices = itertools.product(own.recorded, own.checkpointing, own.one_sample)
            for (method, precision), mode, one in choices:
                if method in methods(profile) and precision in precisions(profile, method):
                    yield cls(method, precision, mode, one_sample=one, code=trainer)

    @property
    def name(self) -> str:
        batch = "one" if self.one_sample else str(self.samples or "many")
        method = self.method + ("-dropout" if self.dropout else "") + (SHARED if self.shared else "")
        code = self.code and f"-{self.code}".replace("@", "-")
        return "-".join(
            filter(
                None,
                [
                    f"step-{method}-{self.precision.name}-{self.checkpointing}-{batch}{code}",
                    MPS if self.mps else "",
                    CUDNN if self.cudnn else "",
                    OLDER if self.older else "",
                ],
            )
        )

    def records(self, profile: ModelProfile) -> tuple[Job, Strategy]:
        """The job and strategy to make this recording with."""
        fields: dict[str, object] = {"gradient_checkpointing": self.checkpointing}
        if self.checkpointing == NESTED:
            fields = {"gradient_checkpointing": "full", "nested_checkpointing": True}
        if self.shared:
            fields["adapter_inputs"] = "shared"
        job, strategy = _records(profile, self.method, self.precision, **fields)
        return job.replace(lora_dropout=0.1 if self.dropout else 0.0), strategy


ONE_SAMPLE = (1,)
"""The batches of a model whose class runs with one sample alone."""


def _refuse_batch(profile: ModelProfile, batch: int) -> None:
    """Raises a NotRecordedError for a batch that a model with a list of them has no recording of."""
    counts = profile.shape.batches
    if not counts or batch in counts:
        return
    fault = f"{profile.title} processes a batch sample by sample, and batch {batch} is not recorded"
    if counts == ONE_SAMPLE:
        fault = f"diffusers' {profile.diffusers_class} takes one sample at a time of {profile.title}, not {batch}"
    batches = " or ".join(map(str, counts))
    raise NotRecordedError(fault, f"use --batch-size {batches}, with --gradient-accumulation for more")


class SampleVariant(NamedTuple):
    """A recording of one forward without gradients, as validation and sampling do at every noise level."""

    method: str
    precision: Precision
    one_sample: bool
    shared: bool = False
    """As a step's."""

    older: bool = False
    """As a step's."""

    cudnn: bool = False
    """As a step's."""

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        job: Job,
        strategy: Strategy,
        batch: int,
        torch: str | None = None,
        cudnn: bool = False,
    ) -> SampleVariant:
        """The variant that answers for a job; ``cudnn`` as a step's. To sample without adapters is the forward of full
        fine-tuning."""
        method = "full" if job.method == "sample" else recorded_method(profile, job, strategy)
        if profile.shape.batches == ONE_SAMPLE:
            _refuse_batch(profile, batch)
        precision = Precision.of(job, strategy)
        if job.method != "sample" and precision.weights in QUANTISED:  # its activations are those over 16 bits
            precision = precision._replace(weights="half")
        known = _unquantised(method)
        if precision not in known + on_request_precisions(profile, method):
            what = "sampling" if job.method == "sample" else "validation"
            fix = f"use {precision.nearest(known)}" + (", or --validation-mode off" if what == "validation" else "")
            raise NotRecordedError(f"{what} is not recorded with {' '.join(precision.flags)}", fix)
        shared = strategy.adapter_inputs == "shared" and precision.casts_inputs
        by_cudnn = cudnn and True in attention_paths(profile, precision)
        return cls(method, precision, batch == 1, shared, is_older(profile, precision, torch), by_cudnn)

    @classmethod
    def all(cls, profile: ModelProfile) -> Iterator[SampleVariant]:
        yield from cls._of_methods(profile, methods(profile))

    @classmethod
    def _of_methods(
        cls, profile: ModelProfile, methods: Sequence[str], choose: PrecisionChoice = precisions
    ) -> Iterator[SampleVariant]:
        for method in methods:
            sampled = (
                each for each in choose(profile, method) if not (each.weights in QUANTISED or each == PLAIN_FP32)
            )
            alone = (True,) if profile.shape.batches == ONE_SAMPLE else (True, False)
            for precision, one in itertools.product(sampled, alone):
                ways = itertools.product(ages(profile, precision), attention_paths(profile, precision))
                yield from (cls(method, precision, one, older=older, cudnn=cudnn) for older, cudnn in ways)

    @classmethod
    def on_request(cls, profile: ModelProfile) -> Iterator[SampleVariant]:
        """As a step's: DoRA and LoKr, LoRA in fp32 without autocast, and adapters that share their layer's input."""
        kinds = on_request_methods(profile)
        yield from cls._of_methods(profile, kinds)
        yield from cls._of_methods(profile, (*methods(profile), *kinds), on_request_precisions)
        yield from (known._replace(shared=True) for known in cls.all(profile) if known.precision.casts_inputs)

    @property
    def name(self) -> str:
        method = self.method + (SHARED if self.shared else "")
        name = f"sample-{method}-{self.precision.name}-{'one' if self.one_sample else 'many'}"
        return "-".join(filter(None, [name, CUDNN if self.cudnn else "", OLDER if self.older else ""]))

    def records(self, profile: ModelProfile) -> tuple[Job, Strategy]:
        """The job and strategy to make this recording with."""
        adapters = {"adapter_inputs": "shared"} if self.shared else {}
        return _records(profile, self.method, self.precision, **adapters)


class OptimizerVariant(NamedTuple):
    """A recording of the optimizer's first and later steps. It depends on the storage of what is trained."""

    method: str
    trained: str
    """fp32 or half: how the trained parameters are stored."""

    optimizer: str
    how: str
    code: str = ""
    """of adapters of which a trainer's own model gives only some a gradient (`OwnCode.with_gradient`)"""

    @classmethod
    def of(cls, profile: ModelProfile, job: Job, strategy: Strategy) -> OptimizerVariant:
        method = recorded_method(profile, job, strategy)
        optimizer, how = UNPAGED.get(strategy.optimizer, strategy.optimizer), strategy.optimizer_step
        if optimizer != "adamw" and how == "loop":
            how = "foreach"
        if (optimizer, how) not in cls.ways(method):
            fault = f"no tape for {method} with optimizer {strategy.optimizer} ({strategy.optimizer_step})"
            raise NotRecordedError(fault, "leave --optimizer-step out")
        return cls(method, trained_storage(job, strategy), optimizer, how)

    @staticmethod
    def ways(method: str) -> tuple[tuple[str, str], ...]:
        """(optimizer, kind of step) of every optimizer recording that a method has."""
        return OPTIMIZERS + IN_BACKWARD if method == "full" else OPTIMIZERS

    @classmethod
    def all(cls, profile: ModelProfile) -> Iterator[OptimizerVariant]:
        yield from cls._of_methods(methods(profile))

    @classmethod
    def _of_methods(cls, methods: Sequence[str]) -> Iterator[OptimizerVariant]:
        for method, trained in itertools.product(methods, ("fp32", "half")):
            for optimizer, how in cls.ways(method):
                yield cls(method, trained, optimizer, how)

    @classmethod
    def on_request(cls, profile: ModelProfile) -> Iterator[OptimizerVariant]:
        """Of DoRA and LoKr; and of what only a trainer's own model leaves without a gradient, which are shipped."""
        yield from cls._of_methods(on_request_methods(profile))
        ways = (("adamw", "foreach"), ("adamw", "fused"), ("adamw-8bit", "foreach"))
        own = {(step.method, step.precision.trained, step.code): None for step in StepVariant.in_own_code(profile)}
        for (method, trained, code), (optimizer, how) in itertools.product(own, ways):
            if OWN_CODE[code].with_gradient:
                yield cls(method, trained, optimizer, how, code)

    @property
    def name(self) -> str:
        code = self.code and f"-{self.code}".replace("@", "-")
        return f"optimizer-{self.method}-{self.trained}-{self.optimizer}-{self.how}{code}"

    def records(self, profile: ModelProfile) -> tuple[Job, Strategy]:
        """The job and strategy to make this recording with."""
        lora = has_adapters(self.method)
        precision = Precision("half" if lora else self.trained, self.trained if lora else "", autocast=False)
        job, strategy = _records(profile, self.method, precision, optimizer=self.optimizer, optimizer_step=self.how)
        with_gradient = OWN_CODE[self.code].with_gradient if self.code else ()
        return job.replace(lora_targets=with_gradient) if with_gradient else job, strategy
