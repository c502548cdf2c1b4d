"""What a strategy switches on, in words for one line: of a table, a page or a message."""

from __future__ import annotations

from collections.abc import Sequence

from planner.spec.job import Strategy
from planner.spec.plan import Estimate

FIELD_WORDS: dict[str, dict[str | bool, str]] = {
    "gradient_checkpointing": {"full": "checkpointing", "offload": "checkpointing to host RAM"},
    "sharding": {"zero-1": "ZeRO-1", "zero-2": "ZeRO-2", "zero-3": "ZeRO-3", "ddp": "DDP", "fsdp": "FSDP"},
    "optimizer": {"adamw-8bit": "8-bit AdamW"},
    "optimizer_step": {"fused": "fused step"},
    "adapter_dtype": {"bf16": "bf16 adapters"},
    "offload_optimizer": {"cpu": "optimizer in host RAM"},
    "offload_gradients": {"cpu": "gradients in host RAM"},
    "offload_params": {"cpu": "weights in host RAM"},
    "inactive_expert": {"cpu": "idle expert in host RAM"},
    "vae_tiling": {True: "VAE in tiles"},
    "vae": {"swapped": "VAE swapped in"},
    "group_offload": {"block": "weights block by block", "leaf": "weights layer by layer"},
    "group_offload_stream": {True: "fetched ahead"},
}
"""How a line says a switch."""


def ways(found: Estimate) -> str:
    """What a plan switches on, in words for one line."""
    return words(found.strategy, found.lossy)


def words(strategy: Strategy, lossy: Sequence[str]) -> str:
    """What a strategy with these lossy fields switches on, in words for one line."""
    said = [known[value] for field, known in FIELD_WORDS.items() if (value := getattr(strategy, field)) in known]
    if "weights_dtype" in lossy:
        said.append(f"{strategy.weights_dtype} weights")
    if strategy.gradient_checkpointing == "partial":
        said.append(f"{strategy.checkpointed_blocks} blocks checkpointed")
    if strategy.swap_blocks:
        said.append(f"{strategy.swap_blocks} blocks swapped")
    return ", ".join(said) or "nothing switched on"
