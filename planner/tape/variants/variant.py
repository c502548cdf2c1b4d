"""A variant of a recording: its fields, the name of its tape, and the job and strategy to record it with.

A model's denoiser has recordings of three kinds: `StepVariant`, `SampleVariant` and `OptimizerVariant`. The name of a
tape consists of its variant's fields, for example ``step-lora-half-fp32-autocast-full-one``.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.spec.job import Job, Strategy
from planner.tape.variants.precision import Precision
from planner.tape.variants.recorded_methods import ON_MORE, has_adapters
from planner.tape.variants.trainer_models import OWN_CODE

OLDER = "torch2.11"
"""Marks a tape of a torch between `FUSED_RMS_NORM` and `RMS_NORM_IN_FP32` (`torch_and_card`)."""

CUDNN = "cudnn"
"""Marks a tape with cuDNN's attention, of a model whose attention depends on the card."""

MPS = "mps"
"""Marks a tape for Apple's GPUs: attention that keeps all scores, RMSNorm in several operators, and MPS's lists of what
autocast casts (`trainers.recording.mps_ops`)."""

SHARED = "-shared"
"""Marks a tape whose adapters read their layer's input itself."""

NESTED = "nested"
"""The checkpointing of blocks that checkpoint their attentions and feed-forwards again."""

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
"""(optimizer, how it steps). Only torch's AdamW offers a choice; the others step one parameter after another."""

IN_BACKWARD = tuple((optimizer, "backward") for optimizer in ("adamw", "adamw-8bit", "adafactor"))
"""Steps inside backward, recorded of full training only: an adapter's gradients are not worth freeing early."""

UNPAGED = {"adamw-8bit-paged": "adamw-8bit"}
"""Paged optimizers, and those that do the same with their states in GPU memory."""


def optimizer_ways(method: str) -> tuple[tuple[str, str], ...]:
    """(optimizer, how it steps) of every optimizer recording that a method has."""
    return OPTIMIZERS + IN_BACKWARD if method == "full" else OPTIMIZERS


class StepVariant(NamedTuple):
    """A recording of loading a model and of one forward and backward."""

    method: str
    precision: Precision
    checkpointing: str
    one_sample: bool
    """Batch 1, at which some copies of expanded tensors do not happen."""

    samples: int | None = None
    """The exact batch, above 1, of a model that loops over its samples; None where any batch is alike."""

    dropout: bool = False
    """Each adapted layer drops part of its input and keeps the rest with a mask. The rate does not matter."""

    shared: bool = False
    """Adapters read their layer's input without a cast copy, see `adapter_inputs` of `planner.spec.job.Strategy`."""

    older: bool = False
    """Under a torch before `RMS_NORM_IN_FP32`, where that makes a difference."""

    code: str = ""
    """The trainer whose own model and step are recorded (`trainer_models`); "" for diffusers' model and our step."""

    cudnn: bool = False
    """With cuDNN's attention, of a model whose attention depends on the card; else with flash attention."""

    mps: bool = False
    """On Apple's GPUs, as MPS runs it."""

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


class SampleVariant(NamedTuple):
    """A recording of one forward without gradients, as validation and sampling run at every noise level."""

    method: str
    precision: Precision
    one_sample: bool
    shared: bool = False
    """See `StepVariant`."""

    older: bool = False
    """See `StepVariant`."""

    cudnn: bool = False
    """See `StepVariant`."""

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
    """A recording of the optimizer's first step, which creates its states, and of a later one."""

    method: str
    trained: str
    """fp32 or half: how the trained parameters are stored."""

    optimizer: str
    how: str
    code: str = ""
    """the trainer whose own model gives a gradient to some adapters only (`OwnCode.with_gradient`)"""

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


def _records(profile: ModelProfile, method: str, precision: Precision, **strategy: object) -> tuple[Job, Strategy]:
    """The job and strategy to record a method in a precision with; ``strategy``: further fields of it."""
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
