"""What a strategy switches on, in words for one line: of a table, a page or a message."""

from __future__ import annotations

from collections.abc import Sequence

from planner.spec.job import NOTES, Strategy
from planner.spec.plan import Estimate
from planner.units import plural

_FIRST = ("gradient_checkpointing", "sharding", "optimizer", "optimizer_step", "adapter_dtype")
_LAST = ("inactive_expert", "vae_tiling", "vae", "group_offload", "group_offload_stream")
"""What a line begins and ends with; fields between them come in the order in which they are declared."""

_WORDED = (*_FIRST, *(field for field in NOTES if field not in _FIRST and field not in _LAST), *_LAST)


def ways(estimate: Estimate) -> str:
    """The options that an estimate's strategy switches on, as words for one line: "gradient checkpointing, 8-bit
    AdamW"."""
    return words(estimate.strategy, estimate.lossy)


def words(strategy: Strategy, lossy: Sequence[str]) -> str:
    """The options that a strategy switches on, as words for one line. ``lossy``: the names of its lossy fields, which
    are worded too."""
    said = [NOTES[field].words[value] for field in _WORDED if (value := getattr(strategy, field)) in NOTES[field].words]
    if "weights_dtype" in lossy:
        said.append(f"{strategy.weights_dtype} weights")
    if strategy.gradient_checkpointing == "partial":
        said.append(f"{plural(strategy.checkpointed_blocks or 0, 'block')} checkpointed")
    if strategy.fsdp_replicas > 1:
        said.append(f"{strategy.fsdp_replicas} copies sharded")
    if strategy.swap_blocks:
        said.append(f"{plural(strategy.swap_blocks, 'block')} swapped")
    return ", ".join(said) or "no memory options"
