"""OneTrainer, read at 23df3832 (files are those below ``modules``).

A part of a model waits in host RAM (``temp_device``) until it is wanted: text encoders and VAE while latents and
prompts are cached, one at a time, then the model alone (modelSetup, ``materialize_only``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from planner.layout.run import Run, Transform
from planner.layout.single_gpu import weights_made_anew
from planner.layout.trainer_terms.kohya_lora import inputs_as_they_are
from planner.layout.trainer_terms.lora_layers import (
    adapters_on_linear_layers,
    keep_by_block,
    width_of,
)
from planner.layout.trainer_terms.shared import modulation_in_8_bits

EVERY_LAYER, LAYERS_OF_BLOCKS = "every-layer", "layers-of-blocks"
"""The versions of memory terms with adapters on all linear layers, and on all of the blocks (``layer_filter``)."""

ALIGNMENT = 4096
HALF = 2
MOST_BUFFERS = 10


def layers_in_buffers(run: Run) -> None:
    """``offload_fraction``: the layers that are on the GPU lie in buffers that stay, and the next ones are fetched into
    them (util/LayerOffloadConductor.py). Together they hold the share of the layers that is not offloaded, and each one
    more tensor of the largest size (``StaticLayerAllocator.allocate_cache``)."""
    count = run.strategy.swap_blocks
    if not count:
        return
    blocks = run.swappable_weights
    layers = list(blocks.values())
    total = sum(map(run.total_bytes, layers))
    loaded = _most_loaded([run.total_bytes(layer) for layer in layers], total * (len(layers) - count) // len(layers))
    largest = max(run.sizes[buffer] for layer in layers for buffer in layer)
    buffers = min(-(-int(0.1 * loaded) // largest), -(-loaded // (2 * largest)), MOST_BUFFERS)
    rings = [buffer for buffer, op in enumerate(run.program.op) if op == "swap ring"]
    weights = set(itertools.chain.from_iterable(layers))
    run.drop(run.load, (*rings, *weights))
    anew = weights & run.shared(weights_made_anew)  # the buffers hold them
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        run.drop(stage, anew)
    for _ in range(buffers):
        run.add(run.load, math.ceil(loaded / buffers) + largest + ALIGNMENT, "buckets", "buffer of layers")


def _most_loaded(layers: Sequence[int], limit: int) -> int:
    """The most bytes of neighbouring layers that are on the GPU together: two at the least
    (``LayerOffloadStrategy.__get_layers_below``)."""
    most = 0
    for first in range(len(layers)):
        together = 0
        for number, layer in enumerate((*layers[first:], *layers[:first])):
            if together + layer > limit and number >= 2:
                break
            together += layer
        most = max(most, together)
    return most


def joint_tensor_kept(run: Run) -> None:
    """``activation_offloading`` sends a single-stream block's ``hidden_states`` away (util/checkpointing_util.py
    ``enable_checkpointing_for_flux_transformer``). What the block before gave are two parts of one tensor
    (diffusers transformer_flux.py ``hidden_states[:, :text_seq_len]``), and the text's part keeps it whole."""
    offloads = run.strategy.gradient_checkpointing == "offload"
    if not offloads or not run.facts.model.trained_with("onetrainer", "joint-tensor-kept"):
        return
    grid, stack = run.grid, run.facts.model.stacks[-1].list
    tokens = grid["B"] * (grid["F"] * grid["H"] * grid["W"] + grid["T"])
    kept = {block: HALF * width_of(run) * tokens for block in run.swappable_weights if block[0] == stack and block[1]}
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        keep_by_block(run, stage, kept, "text and image of a block")


TERMS: tuple[Transform, ...] = (
    *(modulation_in_8_bits("onetrainer"), layers_in_buffers, inputs_as_they_are, joint_tensor_kept),
)
"""``inputs_as_they_are``: module/LoRAModule.py ``delta_forward``."""

OLDER: dict[str, tuple[Transform, ...]] = {
    EVERY_LAYER: (adapters_on_linear_layers(of_blocks=False),),
    LAYERS_OF_BLOCKS: (adapters_on_linear_layers(of_blocks=True),),
}
