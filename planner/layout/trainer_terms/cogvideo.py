"""CogVideo's finetune scripts (zai-org), read at 7a1af71."""

from __future__ import annotations

from planner.layout.run import STRATEGY_MOMENT, Run, Transform
from planner.layout.sharding.zero import bucket_as_backward_begins, share_comes_back_in_fp32
from planner.layout.trainer_terms.diffusers import cache_emptied, encoders_together
from planner.layout.trainer_terms.shared import cache_kept_while_sampling, from_pretrained
from planner.spec.job import SPLIT
from planner.tape.program import Block, Stage


def base_in_fp32(run: Run) -> None:
    """Under a LoRA the transformer stays in fp32: ``from_pretrained`` is called without a type
    (finetune/models/*/lora_trainer.py ``load_components``) and every model is cast but this one (finetune/trainer.py
    ``prepare_trainable_parameters``: ``ignore_list = ["transformer"]``). DeepSpeed casts it to 16 bits.

    The recording has the base in 16 bits. Autocast makes copies in 16 bits of a block's weights as it runs, and a
    block that is recomputed keeps them until its backward is over (ATen autocast_mode.cpp ``cached_cast`` keeps none of
    weights that take no gradient).
    """
    if run.job.method != "lora" or run.strategy.sharding in SPLIT or run.strategy.autocast == "none":
        return
    trained, table = run.named("gradient"), run.facts.model.traits.stored_positions
    frozen = [buffer for name, buffer in run.named("weight").items() if name not in trained and name != table]
    blocks = {block: run.total_bytes(weights) for block, weights in run.swappable_weights.items()}
    for buffer in frozen:
        run.resize(buffer, 2 * run.sizes[buffer])
    for stage in filter(None, (run.step, run.first_step, run.accumulate)):
        _copies_of_blocks(run, stage, blocks)


def loaded_in_fp32(run: Run) -> None:
    """``from_pretrained`` is called without a type (finetune/models/*/lora_trainer.py ``load_components``)."""
    from_pretrained(run, "fp32")


def _copies_of_blocks(run: Run, stage: Stage, blocks: dict[Block, int]) -> None:
    """Copies of a block's weights from where its backward begins, with its recomputation, to where it ends."""
    turns: dict[Block, list[int]] = {}
    for at, (moment, _) in enumerate(stage.stretches):
        if moment.passes == "backward" and (block := (moment.module_list, moment.block)) in blocks:
            turns.setdefault(block, []).append(at)
    first = {at[0]: block for block, at in turns.items()}
    last = {at[-1]: block for block, at in turns.items()}
    copies = {block: run.new(blocks[block], "temporary", "weights cast by autocast") for block in turns}
    woven = []
    for at, stretch in enumerate(stage.stretches):
        if at in first:
            woven.append((STRATEGY_MOMENT._replace(passes="autocast"), [copies[first[at]]]))
        woven.append(stretch)
        if at in last:
            woven.append((STRATEGY_MOMENT._replace(passes="autocast"), [~copies[last[at]]]))
    stage.stretches = woven


TERMS: tuple[Transform, ...] = (
    *(loaded_in_fp32, cache_emptied, encoders_together, cache_kept_while_sampling, base_in_fp32),
    *(share_comes_back_in_fp32, bucket_as_backward_begins),
)
