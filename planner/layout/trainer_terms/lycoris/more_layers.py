"""What a step keeps for LyCORIS' adapters on layers that have none in the recording."""

from __future__ import annotations

from planner.layout.adapters import adapted_layers, is_named, linear_layers
from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.lora_layers import inputs_of_convolutions, keep_where_not_recomputed, tokens_of
from planner.tape.program import Block

HALF = 2


def kept_for_more_layers(between_factors: bool) -> Transform:
    """The term of such adapters: each keeps its own copy of its layer's input, which autocast makes of a norm in fp32.
    ``between_factors``: whether it keeps what its first factor gives too, as large as the layer's output. Of a U-Net
    those of convolutions count, all of them where one has an adapter."""

    def term(run: Run) -> None:
        """Inputs of adapters on more layers."""
        targets = run.job.lora_targets
        if run.job.method != "lora" or not targets:
            return
        if run.facts.model.traits.stages:
            if any(target.startswith("conv") for target in targets):
                inputs_of_convolutions(run)
            return
        layers, kept = linear_layers(run), dict[Block, int]()
        for name in layers.keys() - adapted_layers(run):
            layer = layers[name]
            if layer.block is not None and is_named(name, targets):
                width = layer.columns + (layer.rows if between_factors else 0)
                kept[layer.block] = kept.get(layer.block, 0) + HALF * width * tokens_of(run, name)
        for stage in filter(None, (run.first_step, run.step, run.accumulate)):
            keep_where_not_recomputed(run, stage, kept, "inputs of more adapters")

    return term
