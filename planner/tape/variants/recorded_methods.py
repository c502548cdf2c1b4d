"""What a recording trains: LoRA, DoRA or LoKr on a model's usual layers or on its wider choice, or all weights.

The name of a recorded method says both: ``lora``, ``dora`` or ``lokrFACTOR``, with ``-wide`` behind it for adapters on
the wider choice of layers, and ``full``.
"""

from __future__ import annotations

from collections.abc import Collection

from planner.catalog.profiles import ModelProfile
from planner.errors import NotRecordedError
from planner.spec.job import QUANTISED, SPLIT, Job, Strategy

WIDE = "lora-wide"
"""LoRA on a model's wider choice of layers, see `planner.catalog.profiles.LoraDefaults`."""

ON_MORE = "-wide"
"""Ends the name of every method whose adapters are on those layers."""

LOKR_FACTORS = (0, 4, 8, 16, 32)
"""The factors that LoKr is recorded with: ai-toolkit's page offers these, and SimpleTuner's example has 16."""


def methods(profile: ModelProfile) -> tuple[str, ...]:
    """The methods that are recorded of a model by default: LoRA on its usual layers, on the wider choice where the
    profile has one, and full training."""
    return ("lora", WIDE, "full") if profile.lora.wide else ("lora", "full")


def on_request_methods(profile: ModelProfile) -> tuple[str, ...]:
    """The methods that are recorded on request only: DoRA and LoKr, on the same layers as LoRA."""
    kinds = ("dora", *(f"lokr{factor}" for factor in LOKR_FACTORS))
    return kinds + tuple(f"{kind}{ON_MORE}" for kind in kinds) if profile.lora.wide else kinds


def has_adapters(method: str) -> bool:
    """Whether a recorded method trains adapters, of any kind and on any layers."""
    return method != "full"


def recorded_method(profile: ModelProfile, job: Job, strategy: Strategy) -> str:
    """The recorded method that answers for a job.

    A LoRA may be on layers that no recording has. The nearest recording answers for it: the one with the fewest layers
    that include all of the job's, else the one that includes most of them (`planner.layout.adapters` does the rest).
    """
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
    """The names of the layers that a recorded method has adapters on."""
    return frozenset(profile.lora.wide if method.endswith(ON_MORE) else profile.lora.targets)


def on_recorded_layers(profile: ModelProfile, job: Job, strategy: Strategy) -> bool:
    """Whether a job's adapters are on exactly the layers of the recording that answers for it."""
    layers = recorded_layers(profile, recorded_method(profile, job, strategy))
    return job.method != "lora" or not job.lora_targets or frozenset(job.lora_targets) == layers


def refuse_unrecorded_adapters(profile: ModelProfile, job: Job, strategy: Strategy) -> None:
    """Raises a NotRecordedError for DoRA and LoKr that no recording answers for.

    LoRA on other layers than the recorded ones is computed (`planner.layout.adapters`); DoRA and LoKr are not. Nor were
    they ever compared with a run under an engine, context parallelism or compilation.
    """
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
    """Whether a target names layers that are among the recorded ones."""
    return any(target == layer or target.endswith(f".{layer}") for layer in layers)
