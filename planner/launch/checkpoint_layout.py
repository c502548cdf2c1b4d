"""What decides the form of a checkpoint's tensors: a run goes on from it only where the plan says the same.

It is compared before anything is set up, encoded or written, and again by each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.launch import checkpoints, training_settings
from planner.spec.fp16 import scales_loss
from planner.spec.job import Strategy
from planner.spec.plan import Plan

FLAGS = ("experts", "method", "adapter", "lokr_factor", "lora_rank", "lora_targets", "trainable", "optimizer")
"""Entries that are options of `vplan train` by the same name."""


def layout(plan: Plan, profile: ModelProfile) -> dict[str, Any]:
    """The layout of a plan's checkpoints, as their manifests have it."""
    job, strategy = plan.job, plan.strategy
    is_lora = job.method == "lora"
    return {
        "model": job.model,
        "experts": job.experts,
        "method": job.method,
        "adapter": job.adapter,
        "lokr_factor": job.lokr_factor if job.trains == "lokr" else None,
        "lora_rank": job.lora_rank if is_lora else None,
        "lora_targets": list(job.lora_targets or profile.lora.targets) if is_lora else None,
        "trainable": list(job.trainable),
        "optimizer": strategy.optimizer,
        "step inside backward": strategy.optimizer_step == "backward",
        "master_weights": strategy.master_weights,
        "loss scaling": scales_loss(job, strategy),
        "ema": strategy.ema != "none",
        "sharding": strategy.sharding if strategy.sharding not in ("none", "ddp") else "none or ddp",
        "ranks": plan.machine.world if needs_as_many_ranks(strategy) else None,
    }


def needs_as_many_ranks(strategy: Strategy) -> bool:
    """Whether a checkpoint can be taken up by as many ranks alone as have written it: 8-bit states have one constant
    for each block of a rank's flat share, and blocks that are cut elsewhere are other numbers."""
    return strategy.sharding.startswith("zero") and strategy.optimizer.startswith("adamw-8bit")


def check(written: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Raises one VplanError for all in which a checkpoint's layout is not the plan's, with the options that give its
    own back."""
    before = {"adapter": "lora", **written}  # older checkpoints have no other kind, and do not say which experts
    other = {name: (before[name], now) for name, now in planned.items() if before.get(name, now) != now}
    # What one of the two does not have at all goes with another entry: the rank with the method.
    pairs = {name: pair for name, pair in other.items() if None not in pair} or other
    if not pairs:
        return
    faults = "; ".join(
        f"with {name} {_word(then)}, but the plan has {_word(now)}" for name, (then, now) in pairs.items()
    )
    flags = {name: then for name, (then, _) in other.items() if name in FLAGS and then}
    typed = " ".join(f"--{name.replace('_', '-')} {_word(then)}" for name, then in flags.items())
    ways = [f"pass {typed}"] if typed else []
    ways += [f"set {name} back to {_word(then)}" for name, (then, _) in pairs.items() if name not in flags]
    raise VplanError(f"the checkpoint was written {faults}", f"{' and '.join(ways)}, or start over with --resume no")


def changes(manifest: Mapping[str, Any], plan: Plan, profile: ModelProfile) -> list[str]:
    """What a plan with complete settings trains otherwise than a checkpoint of its run, in words. A VplanError where it
    would be another run: first by the layout, of which settings are consequences."""
    check(manifest["layout"], layout(plan, profile))
    return training_settings.changes(manifest.get("training"), plan.training)


def check_resumable(output: Path, resume: str, plan: Plan, profile: ModelProfile) -> None:
    """Raises a VplanError where a plan is of another run than the checkpoint that it would go on from. By what that
    says of itself: whether it is whole is found when it is taken up. ``resume``: as `vplan train --resume` has it."""
    if resume == "no":
        return
    manifest = checkpoints.manifest_of(output, None if resume == "auto" else Path(resume).expanduser())
    if manifest is not None and isinstance(manifest.get("layout"), dict):
        changes(manifest, plan, profile)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
