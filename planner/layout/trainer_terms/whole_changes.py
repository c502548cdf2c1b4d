"""Adapters that make the change of a layer's weight whole, LoKr and LoHa, where a recording has LoRA's two products.

The change is made in fp32, and autocast reads it in 16 bits: that copy stays for the gradient of the layer's input. In
backward the change has a gradient, and so has every factor of the product, each as large as the weight, until the
factors' own sums are made.
"""

from __future__ import annotations

from planner.layout.adapters import LinearLayer, adapted_layers, is_named, linear_layers
from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.lora_layers import keep_by_block
from planner.spec.job import QUANTISED
from planner.tape.program import Block

HALF, FP32 = 2, 4
KRONECKER = 3
"""Tensors of a Kronecker product (``torch.kron``, an elementwise product of two views) in backward: the gradient of the
change and those of both views, which are summed behind that."""
HADAMARD = 5
"""Tensors of a Hadamard product of two products (musubi-tuner networks/loha.py ``HadaWeight.backward``): the gradient,
the same scaled, one product of its factors, and both of their gradients."""


def whole_changes(parts: int) -> Transform:
    """The term of such adapters. ``parts``: how many tensors of a weight's size a layer's backward holds in fp32."""

    def term(run: Run) -> None:
        """What a block keeps of its weights' changes, and what the largest takes in backward."""
        if run.job.method != "lora":
            return
        kept: dict[Block, int] = {}
        passing: dict[Block, int] = {}
        for layer in _adapted(run):
            if layer.block is not None:
                numbers = layer.rows * layer.columns
                kept[layer.block] = kept.get(layer.block, 0) + HALF * numbers
                passing[layer.block] = max(passing.get(layer.block, 0), parts * FP32 * numbers)
        recomputed = run.strategy.gradient_checkpointing != "none"
        for stage in filter(None, (run.first_step, run.step, run.accumulate)):
            keep_by_block(run, stage, kept, "changes of weights", recomputed)
            keep_by_block(run, stage, passing, "gradients of a change", recomputed=True)

    return term


def _adapted(run: Run) -> list[LinearLayer]:
    """The layers with adapters, those too that a recording over a quantised base lacks (`wider_adapters`)."""
    model, recorded = run.facts.model, adapted_layers(run)
    usual_of_quantised = run.job.lora_targets is None and run.strategy.weights_dtype in QUANTISED
    wide = model.lora.wide if usual_of_quantised and model.traits.wide_is_all_linear else ()
    return [layer for name, layer in linear_layers(run).items() if name in recorded or is_named(name, wide)]
