"""Adapters that make the change of a layer's weight whole, LoKr and LoHa, where a recording has LoRA's two products.

What the product with the layer's input reads stays for the gradient of that input. In backward the change has a
gradient, and so have the factors of its product, each as large as the weight, until the factors' own sums are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from planner.layout.adapters import LinearLayer, adapted_layers, is_named, linear_layers
from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.lora_layers import keep_by_block
from planner.spec.job import QUANTISED
from planner.tape.program import Block

HALF, FP32 = 2, 4


class WholeChange(NamedTuple):
    """What the change of a weight takes under autocast, in bytes for each of the weight's numbers."""

    kept: int
    """from its layer's forward to its backward"""
    passing: int
    """in its layer's backward"""


KRONECKER = WholeChange(HALF, 3 * FP32)
"""A Kronecker product of fp32 factors (``torch.kron``, an elementwise product of two views), read in 16 bits. In
backward: the gradient of the change and those of both views, which are summed behind that."""

HADAMARD = WholeChange(HALF, 5 * FP32)
"""A Hadamard product of two products of fp32 factors, made again in backward (LyCORIS' and musubi-tuner's loha.py
``HadaWeight.backward``): the gradient, the same scaled, one product of its factors, and both of their gradients."""

HADAMARD_KEPT = WholeChange(3 * HALF, 4 * HALF)
"""The same by autograd alone, whose products autocast makes in 16 bits: both of them and the change are kept. In
backward: the gradient, the same scaled, and both of the products' gradients."""


def whole_changes(each: WholeChange, layers: Callable[[Run], Iterable[LinearLayer]] | None = None) -> Transform:
    """The term of such adapters. ``layers``: those with an adapter; else those that the run says."""

    def term(run: Run) -> None:
        """What a block keeps of its weights' changes, and what the largest takes in backward."""
        if run.job.method != "lora":
            return
        kept: dict[Block, int] = {}
        passing: dict[Block, int] = {}
        for layer in (layers or _adapted)(run):
            if layer.block is not None:
                numbers = layer.rows * layer.columns
                kept[layer.block] = kept.get(layer.block, 0) + each.kept * numbers
                passing[layer.block] = max(passing.get(layer.block, 0), each.passing * numbers)
        recomputed = run.strategy.gradient_checkpointing != "none"
        for stage in filter(None, (run.first_step, run.step, run.accumulate)):
            keep_by_block(run, stage, kept, "changes of weights", recomputed)
            keep_by_block(run, stage, passing, "gradients of a change", recomputed=True)

    return term


def every_layer(run: Run) -> Iterable[LinearLayer]:
    """All linear layers of the run's model."""
    return linear_layers(run).values()


def _adapted(run: Run) -> list[LinearLayer]:
    """The layers with adapters: those that were named, or are recorded; over a quantised base those too that a
    recording lacks (`wider_adapters`)."""
    model, recorded = run.facts.model, adapted_layers(run)
    if run.job.lora_targets:
        return [layer for name, layer in linear_layers(run).items() if is_named(name, run.job.lora_targets)]
    wide = model.lora.wide if run.strategy.weights_dtype in QUANTISED and model.traits.wide_is_all_linear else ()
    return [layer for name, layer in linear_layers(run).items() if name in recorded or is_named(name, wide)]
