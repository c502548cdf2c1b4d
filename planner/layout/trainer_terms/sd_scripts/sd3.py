"""sd-scripts' own code of Stable Diffusion 3, read at 48d368f (library/sd3_models.py, networks/lora_sd3.py).

Held to rehearsals of its scripts (`profiles/rehearsals/commands/sd-scripts.jsonl`).
"""

from __future__ import annotations

from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.lora_layers import keep_by_block, width_of

BLOCKS = "transformer_blocks"

KEPT_BYTES = 2 + 8 + 4 + 10 - 4
"""What a block keeps for each number of its two streams beyond diffusers' with adapters on attention: values as a part
of one fused product, 2 bytes; what both norms give, in fp32, for the gradient of the scales, 8; what attention and the
feed-forward give, for the gradient of the gates, 4; the inputs of both layers of the feed-forward, whose second is four
times as wide, 10. Queries and keys it does not keep in 16 bits before text and image are joined, as diffusers does: 4
less. In a second attention of the image, values and gate are as much as its queries and keys are less."""


def kept_by_its_own_blocks(run: Run) -> None:
    """A LoRA on every linear layer of a block, without checkpoints. With them one block's is recomputed, and nothing is
    added: 3.5 Large is then 0.7 % above what was rehearsed as it is."""
    if run.job.method != "lora" or run.strategy.gradient_checkpointing != "none":
        return
    grid, depth = run.grid, int(run.facts.model.config["num_layers"])
    clip, text = grid["B"] * grid["F"] * grid["H"] * grid["W"], grid["B"] * grid["T"]
    each = KEPT_BYTES * width_of(run)
    kept = {(BLOCKS, block): each * (clip + text) for block in range(depth - 1)}
    kept[BLOCKS, depth - 1] = each * clip  # the text's stream ends before it
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        keep_by_block(run, stage, kept, "kept by its own blocks")
    run.device.kept_for_adapters = (0, 0)  # what these adapters keep is counted


MMDIT: tuple[Transform, ...] = (kept_by_its_own_blocks,)
