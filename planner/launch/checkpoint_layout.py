"""The layout of a checkpoint: everything that determines its tensors. A run can only resume with the same layout.

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
"""Layout entries that are options of `vplan train` with the same name."""


def layout(plan: Plan, profile: ModelProfile) -> dict[str, Any]:
    """The layout of a plan's checkpoints, as stored in their manifests."""
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
    """Whether a checkpoint can only be resumed with as many ranks as wrote it: 8-bit states have one constant per block
    of a rank's flat shard, and with other shard boundaries the blocks would hold other numbers."""
    return strategy.sharding.startswith("zero") and strategy.optimizer.startswith("adamw-8bit")


def check(written: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Raises a VplanError that lists every difference between a checkpoint's layout and the plan's, with the options
    that restore the checkpoint's."""
    before = {"adapter": "lora", **written}  # older layouts do not name the adapter, which is lora, nor experts
    other = {name: (before[name], now) for name, now in planned.items() if before.get(name, now) != now}
    # An entry that one of the two lacks follows from another one, as the rank does from the method: do not name it.
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
    """What changes when a checkpoint is resumed with a plan (with complete settings), as lines of text. Raises a
    VplanError for changes that a run cannot make; the layout is checked first, because settings depend on it."""
    check(manifest["layout"], layout(plan, profile))
    return training_settings.changes(manifest.get("training"), plan.training)


def check_resumable(output: Path, resume: str, plan: Plan, profile: ModelProfile) -> None:
    """Raises a VplanError if a plan does not match the checkpoint that it would resume from. Only reads the manifest:
    whether the checkpoint is complete is checked when resuming. ``resume``: the value of `vplan train --resume`."""
    if resume == "no":
        return
    manifest = checkpoints.manifest_of(output, None if resume == "auto" else Path(resume).expanduser())
    if manifest is not None and isinstance(manifest.get("layout"), dict):
        changes(manifest, plan, profile)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
