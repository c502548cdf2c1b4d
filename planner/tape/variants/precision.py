"""The formats that a step is recorded in: storage of weights and adapters, and autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.spec.job import HALF, SPLIT, Job, Strategy
from planner.tape.variants.recorded_methods import WIDE, has_adapters


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
        """Whether peft casts an adapter's input to the adapter's dtype and autocast casts it back. bitsandbytes' layers
        (nf4) do not do so under autocast (peft/tuners/lora/bnb.py)."""
        return self.adapter == "fp32" and self.autocast and self.weights != "nf4"

    @property
    def flags(self) -> tuple[str, ...]:
        """The command-line options that ask for this precision, as a user types them."""
        typed = {"half": "bf16"}
        weights = f"--weights-dtype {typed.get(self.weights, self.weights)}"
        adapter = f"--adapter-dtype {typed.get(self.adapter, self.adapter)}" if self.adapter else ""
        return tuple(filter(None, [weights, adapter, f"--autocast {'bf16' if self.autocast else 'none'}"]))

    def nearest(self, known: Sequence[Precision]) -> str:
        """The options to change to get one of the recorded precisions, ``known``. The one chosen keeps the weights'
        format, or else uses 16 bits, and differs in as few options as possible."""

        def distance(other: Precision) -> tuple[bool, bool, int]:
            kept = other.weights == self.weights
            return not kept, not kept and other.weights != "half", len(set(other.flags) - set(self.flags))

        return " ".join(flag for flag in min(known, key=distance).flags if flag not in self.flags)


def trained_storage(job: Job, strategy: Strategy) -> str:
    """The format in which the optimizer sees the trained parameters: "fp32" or "half".

    With fp32 masters on one GPU or under DDP it steps over those. FSDP2 steps over its own shares, in their storage
    format. DeepSpeed has its own step, see `planner.layout.sharding.zero`.
    """
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
"""Full training without mixed precision; recorded of models that are usually trained that way
(`planner.catalog.traits.Traits.trained_in_fp32`)."""

QUANTISED_BASES = tuple(Precision(weights, "fp32", True) for weights in ("fp8", "int8", "nf4"))
"""Quantised frozen bases, with the fp32 adapters that trainers put on them (trainers.memory.quantise). Recorded of LoRA
on the usual layers, and on the wider choice for the formats that the model's profile lists."""

NOT_CAST = tuple(Precision(weights, "fp32", False) for weights in ("half", "fp8", "int8", "nf4"))
"""LoRA in fp32 without autocast, as ai-toolkit trains. Recorded on request; shipped for the models it trains."""

PrecisionChoice = Callable[[ModelProfile, str], tuple[Precision, ...]]
"""The precisions that a method of a model is recorded in: `precisions` or `on_request_precisions`."""


def precisions(profile: ModelProfile, method: str) -> tuple[Precision, ...]:
    """The precisions that a method of a model is recorded in by default."""
    if method == "full" and profile.traits.trained_in_fp32:
        return (*PRECISIONS[method], PLAIN_FP32)
    if method == WIDE:
        bases = tuple(base for base in QUANTISED_BASES if base.weights in profile.lora.wide_bases)
        return unquantised_precisions(method) + _on_base(profile, bases)
    if method != "lora":
        return unquantised_precisions(method)
    return PRECISIONS[method] + _on_base(profile, QUANTISED_BASES)


def on_request_precisions(profile: ModelProfile, method: str) -> tuple[Precision, ...]:
    """The precisions that a method is recorded in on request only: fp32 adapters without autocast."""
    if not has_adapters(method):
        return ()
    return _on_base(profile, NOT_CAST if method == "lora" else NOT_CAST[:1])


def _on_base(profile: ModelProfile, choices: Iterable[Precision]) -> tuple[Precision, ...]:
    """Those of the choices that the model's base can be stored in. A UNet's convolutions cannot be cast layerwise."""
    return tuple(each for each in choices if each.weights != "fp8" or profile.traits.fp8_base)


def unquantised_precisions(method: str) -> tuple[Precision, ...]:
    """The precisions of a method whose base is not quantised."""
    return PRECISIONS["lora" if has_adapters(method) else "full"]
