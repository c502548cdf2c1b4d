"""Which recording answers for a Job and a Strategy: the few choices that change the stream of operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import NotRecordedError, VplanError
from planner.facts import ModelProfile
from planner.job import SPLIT, Job, Strategy

HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class Precision:
    """Storage of the weights and of the adapter, and whether autocast is on; ``half`` is bf16 or fp16."""

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
            "fp32" if weights == "fp32" else "half",
            "" if job.method != "lora" else "fp32" if strategy.adapter_dtype == "fp32" else "half",
            strategy.autocast != "none",
        )

    @property
    def trained(self) -> str:
        """fp32 or half: how the trained parameters are stored."""
        return self.adapter or self.weights

    @property
    def name(self) -> str:
        return "-".join(filter(None, [self.weights, self.adapter, "autocast" if self.autocast else ""]))


def trained_storage(job: Job, strategy: Strategy) -> str:
    """fp32 or half: the format in which the optimizer finds what is trained. FSDP2 steps over shares of their own."""
    if strategy.sharding != "fsdp":
        return Precision.of(job, strategy).trained
    dtype = strategy.adapter_dtype if job.method == "lora" else strategy.weights(job.method)
    return "fp32" if dtype == "fp32" else "half"


PRECISIONS = {
    "lora": (Precision("half", "fp32", True), Precision("half", "half", True), Precision("half", "half", False)),
    "full": (Precision("fp32", "", True), Precision("half", "", True), Precision("half", "", False)),
}
WIDE = "lora-wide"
"""LoRA on a model's second usual set of layers, see `planner.facts.LoraDefaults`."""

CHECKPOINTING = ("none", "full")
OPTIMIZERS = (("adamw", "foreach"), ("adamw", "fused"), ("adamw", "loop"), ("adamw-8bit", "foreach"))


def methods(profile: ModelProfile) -> tuple[str, ...]:
    """What is recorded of a model: LoRA on its usual layers, on more layers where that is usual too, and full."""
    return ("lora", WIDE, "full") if profile.lora.wide else ("lora", "full")


def recorded_method(profile: ModelProfile, job: Job) -> str:
    """Which of them a job is; a NotRecordedError for a LoRA on other layers."""
    targets = frozenset(job.lora_targets or profile.lora.targets)
    if job.method != "lora" or targets == frozenset(profile.lora.targets):
        return job.method
    if targets == frozenset(profile.lora.wide):
        return WIDE
    known = " or ".join(",".join(layers) for layers in (profile.lora.targets, profile.lora.wide) if layers)
    fault = f"no tape of {profile.name} for a LoRA on {', '.join(sorted(targets))}"
    raise NotRecordedError(fault, f"leave --lora-targets out, or use {known}")


def _records(profile: ModelProfile, method: str, precision: Precision, **strategy: object) -> tuple[Job, Strategy]:
    height, width = profile.shape.resolutions[0]
    job = Job.read(
        {
            "model": profile.name,
            "method": method.removesuffix("-wide"),
            "frames": profile.shape.default_frames,
            "height": height,
            "width": width,
            "lora_targets": profile.lora.wide if method == WIDE else profile.lora.targets,
        }
    )
    fields = {
        "weights_dtype": "fp32" if precision.weights == "fp32" else "bf16",
        "adapter_dtype": "bf16" if precision.adapter == "half" else "fp32",
        "autocast": "bf16" if precision.autocast else "none",
    }
    return job, Strategy.read({**fields, **strategy})


@dataclass(frozen=True)
class StepVariant:
    """A recording of loading, forward and backward."""

    method: str
    precision: Precision
    checkpointing: str
    one_sample: bool
    """Batch 1: some copies of expanded tensors do not happen then."""

    @classmethod
    def of(cls, profile: ModelProfile, job: Job, strategy: Strategy, batch: int) -> StepVariant:
        """The variant that answers for a job. Offloaded checkpoints are a transformation of ``full``."""
        precision = Precision.of(job, strategy)
        mode = "full" if strategy.gradient_checkpointing == "offload" else strategy.gradient_checkpointing
        if job.method == "sample":
            raise VplanError("method sample is not estimated yet", "use --method lora or full")
        if precision not in PRECISIONS.get(job.method, ()):
            raise NotRecordedError(
                f"no tape for {job.method} with {precision.name or 'this precision'}",
                "use one of " + ", ".join(known.name for known in PRECISIONS.get(job.method, ())),
            )
        if strategy.gradient_checkpointing == "offload" and profile.family == "unet":
            fault = f"{profile.title} checkpoints parts of its blocks, whose offload is not estimated yet"
            raise NotRecordedError(fault, "use --gradient-checkpointing full")
        if mode not in CHECKPOINTING:
            fix = f"use one of {', '.join(CHECKPOINTING)}"
            raise NotRecordedError(f"no tape for gradient_checkpointing {mode}", fix)
        return cls(recorded_method(profile, job), precision, mode, batch == 1)

    @classmethod
    def all(cls, profile: ModelProfile) -> Iterator[StepVariant]:
        for method in methods(profile):
            precisions = PRECISIONS[method.removesuffix("-wide")]
            for precision, mode, one in itertools.product(precisions, CHECKPOINTING, (True, False)):
                yield cls(method, precision, mode, one)

    @property
    def name(self) -> str:
        batch = "one" if self.one_sample else "many"
        return f"step-{self.method}-{self.precision.name}-{self.checkpointing}-{batch}"

    def records(self, profile: ModelProfile) -> tuple[Job, Strategy]:
        """The Job and Strategy to record it with."""
        return _records(profile, self.method, self.precision, gradient_checkpointing=self.checkpointing)


@dataclass(frozen=True)
class SampleVariant:
    """A recording of one forward without gradients, as validation and sampling do at every noise level."""

    method: str
    precision: Precision
    one_sample: bool

    @classmethod
    def of(cls, profile: ModelProfile, job: Job, strategy: Strategy, batch: int) -> SampleVariant:
        """The variant that answers for a job. To sample without adapters is the forward of full fine-tuning."""
        method = "full" if job.method == "sample" else recorded_method(profile, job)
        precision = Precision.of(job.replace(method=method.removesuffix("-wide")), strategy)
        known = PRECISIONS[method.removesuffix("-wide")]
        if precision not in known:
            fault = f"no tape for sampling with {precision.name or 'this precision'}"
            raise NotRecordedError(fault, "use one of " + ", ".join(entry.name for entry in known))
        return cls(method, precision, batch == 1)

    @classmethod
    def all(cls, profile: ModelProfile) -> Iterator[SampleVariant]:
        for method in methods(profile):
            for precision, one in itertools.product(PRECISIONS[method.removesuffix("-wide")], (True, False)):
                yield cls(method, precision, one)

    @property
    def name(self) -> str:
        return f"sample-{self.method}-{self.precision.name}-{'one' if self.one_sample else 'many'}"

    def records(self, profile: ModelProfile) -> tuple[Job, Strategy]:
        """The Job and Strategy to record it with."""
        return _records(profile, self.method, self.precision)


@dataclass(frozen=True)
class OptimizerVariant:
    """A recording of the optimizer's first and later steps. It depends on the storage of what is trained."""

    method: str
    trained: str
    """fp32 or half: how the trained parameters are stored."""

    optimizer: str
    how: str

    @classmethod
    def of(cls, profile: ModelProfile, job: Job, strategy: Strategy) -> OptimizerVariant:
        how = strategy.optimizer_step
        if (strategy.optimizer, how) not in OPTIMIZERS:
            known = ", ".join(sorted({optimizer for optimizer, _ in OPTIMIZERS}))
            fault = f"no tape for optimizer {strategy.optimizer} ({strategy.optimizer_step})"
            raise NotRecordedError(fault, f"use {known}")
        return cls(recorded_method(profile, job), trained_storage(job, strategy), strategy.optimizer, how)

    @classmethod
    def all(cls, profile: ModelProfile) -> Iterator[OptimizerVariant]:
        for method, trained, (optimizer, how) in itertools.product(methods(profile), ("fp32", "half"), OPTIMIZERS):
            yield cls(method, trained, optimizer, how)

    @property
    def name(self) -> str:
        return f"optimizer-{self.method}-{self.trained}-{self.optimizer}-{self.how}"

    def records(self, profile: ModelProfile) -> tuple[Job, Strategy]:
        """The Job and Strategy to record it with."""
        lora = self.method != "full"
        precision = Precision("half" if lora else self.trained, self.trained if lora else "", autocast=False)
        return _records(profile, self.method, precision, optimizer=self.optimizer, optimizer_step=self.how)
