"""OneTrainer, read at 23df3832 (files are those below ``modules``).

A part of a model waits in host RAM (``temp_device``) until it is wanted: the VAE while latents are cached, all text
encoders while prompts are, then the model alone (modelSetup, ``materialize_only``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from planner.layout.adapters import linear_layers
from planner.layout.checkpoints.recomputation import CAST
from planner.layout.cublas import kept_workspaces, workspace_bytes
from planner.layout.encoders_vae.component_layout import load_component
from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER, ComponentPass, encoders
from planner.layout.phases import take_sizes
from planner.layout.run import Run, Transform
from planner.layout.single_gpu import swapped_host_bytes, weights_made_anew
from planner.layout.trainer_terms.kohya_lora import inputs_as_they_are
from planner.layout.trainer_terms.lora_layers import (
    adapters_on_linear_layers,
    inputs_of_convolutions,
    keep_by_block,
    width_of,
)
from planner.layout.trainer_terms.lycoris.whole_changes import HADAMARD_KEPT, KRONECKER, whole_changes
from planner.layout.trainer_terms.sd_scripts.unet import kept_before_adapters
from planner.layout.trainer_terms.shared import modulation_in_8_bits
from planner.tape.program import Moment, Stage, frees

EVERY_LAYER, LAYERS_OF_BLOCKS = "every-layer", "layers-of-blocks"
"""The versions of memory terms with adapters on all linear layers, and on all of the blocks (``layer_filter``)."""

NF4_BLOCK, SCALES_BLOCK, NF4_VALUES, FP32 = 64, 256, 16, 4
"""Numbers with one scale, scales with one scale of their own, values of the format, bytes."""

SMALLEST_MATRIX = 2**16
"""Elements."""

ALIGNMENT = 4096
HALF = 2
MOST_BUFFERS = 10
LEAST_LOADED = 2
"""Layers."""

LEAD = Moment("step", "forward", "", -1)
"""What a step does before its blocks."""


def layers_in_buffers(run: Run) -> None:
    """``offload_fraction``: the layers that are on the GPU lie in buffers that stay, and the next ones are fetched into
    them (util/LayerOffloadConductor.py). Together they hold the share of the layers that is not offloaded, and each one
    more tensor of the largest size (``StaticLayerAllocator.allocate_cache``). Those in host RAM lie in such buffers
    too, registered with CUDA, with room for one more layer (``max_offloaded_bytes``)."""
    count = run.strategy.swap_blocks
    if not count:
        return
    blocks = run.swappable_weights
    layers = list(blocks.values())
    sizes = [run.total_bytes(layer) for layer in layers]
    loaded = _loaded_bytes(sizes, sum(sizes) * (len(layers) - count) // len(layers))
    largest = max(run.sizes[buffer] for layer in layers for buffer in layer)
    rings = [buffer for buffer, op in enumerate(run.program.op) if op == "swap ring"]
    weights = set(itertools.chain.from_iterable(layers))
    run.drop(run.load, (*rings, *weights))
    anew = weights & run.shared(weights_made_anew)  # the buffers hold them
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        run.drop(stage, anew)
    for nbytes in _buffers(max(loaded), largest):
        run.add(run.load, nbytes, "buckets", "buffer of layers")
    waiting = sum(_buffers(sum(sizes) - min(loaded) + max(sizes), largest)) - swapped_host_bytes(run)
    run.host.extra_bytes += waiting
    run.host.pinned_bytes += waiting


def _buffers(nbytes: int, largest: int) -> list[int]:
    """The sizes of the buffers that layers of so many bytes lie in."""
    count = min(math.ceil(int(0.1 * nbytes) / largest), math.ceil(nbytes / (2 * largest)), MOST_BUFFERS)
    return [math.ceil(nbytes / count) + largest + ALIGNMENT] * count


def _loaded_bytes(layers: Sequence[int], limit: int) -> list[int]:
    """Bytes of the layers that are on the GPU together as each one runs: of neighbours as many as fit, two at the
    least, before the next forward and, forwards and backwards, before the turn
    (``LayerOffloadStrategy.__get_layers_below``)."""
    count, found = len(layers), []
    for first in range(count):
        ahead, back = range(first, count), range(first, -1, -1)
        for order in ((*ahead, *range(first)), (*ahead, *back[1:]), (*back, *ahead[1:])):
            together = 0
            for number, layer in enumerate(order):
                if together + layers[layer] > limit and number >= LEAST_LOADED:
                    break
                together += layers[layer]
            found.append(together)
    return found


def statistics_kept(run: Run) -> None:
    """``LinearNf4`` registers what bitsandbytes scales by as buffers and keeps the same tensors beside them
    (module/quantized/LinearNf4.py). Where ``to`` gives a module new buffers, the old tensors stay on the GPU: the
    model's are there twice, and a text encoder's when it is in host RAM. Offloaded layers take the tensors along, and
    leave the buffers (util/LayerOffloadConductor.py ``__module_to_device_except_layers``)."""
    if run.strategy.weights_dtype == "nf4":
        op = run.program.op
        packed = [buffer for buffer in run.named("weight").values() if op[buffer] == "bitsandbytes.quantize_4bit"]
        run.add(run.load, sum(_statistics(2 * run.sizes[buffer]) for buffer in packed), "residents", "scales of nf4")
    for encoder in encoders(run, "cached", 1):
        if encoder.dtype == "nf4" and encoder.tape is not None:
            first = len(run.program.buffers)
            load_component(run.program, encoder)
            take_sizes(run, first)
            nbytes = sum(_statistics(elements) for elements in _quantised(run, encoder))
            run.add(run.load, nbytes, "residents", "scales of nf4")


def _quantised(run: Run, encoder: ComponentPass) -> Iterator[int]:
    """The elements of each matrix of a text encoder's layers; of those that transformers keeps in fp32 none. Norms'
    vectors are below the limit."""
    assert encoder.tape is not None
    for name, buffer in run.program.named.get(encoder.weights, {}).items():
        elements = int(run.program.plain_bytes(buffer) / encoder.bytes_per_parameter)
        kept = encoder.kept_in_16_bits and name.endswith(encoder.kept_in_16_bits)
        if encoder.tape.block_of(name) and not kept and elements >= SMALLEST_MATRIX:
            yield elements


def _statistics(elements: int) -> int:
    """Bytes of the GPU that the scales of so many numbers take: one byte for 64, fp32 for 256 of these, and fp32 tables
    of both formats' values (bitsandbytes functional.py ``quantize_4bit``, ``compress_statistics``)."""
    scales = elements // NF4_BLOCK
    return scales + FP32 * (scales // SCALES_BLOCK + SCALES_BLOCK + NF4_VALUES)


def parts_in_host_ram(run: Run) -> None:
    """Each part is loaded in its format into host RAM, where only what its file has in that format stays mapped
    (modelLoader/mixin/HFModelLoaderMixin.py ``__load_sub_module``: ``value.to``), and quantised there, layer by layer
    over the GPU (module/quantized/LinearFp8.py, LinearNf4.py ``quantize``). It first goes to the GPU, then back while
    others encode, and what has encoded stays (model/BaseModel.py ``materialize_only``, ``component.to``)."""
    cached = "cached" in (run.strategy.text_encoder, run.strategy.vae)
    run.host.waits_for_latents = run.host.cached_parts_stay = cached
    weights = run.strategy.weights(run.job.method)
    if weights != run.facts.model.traits.published_dtype:
        run.host.loaded_bytes = BYTES_PER_PARAMETER[weights]


def text_encoders_together(run: Run) -> None:
    """All text encoders are on the GPU while prompts are cached (modelSetup/Base*Setup.py ``prepare_text_caching``).
    What transformers would keep in fp32 is loaded in ``train_dtype`` or with the rest, and a tied table of words is
    made a parameter of its own, which moves by itself (modelLoader/mixin/HFModelLoaderMixin.py)."""
    run.device.text_encoders_together = run.device.encoders_in_one_format = True


def workspace_of_caching(run: Run) -> None:
    """Latents and prompts are cached in threads of their own (mgds pipelineModules/DiskCache.py ``executor``), and a
    thread keeps cuBLAS's workspace. Of ``dataloader_threads`` one is counted."""
    if "cached" in (run.strategy.text_encoder, run.strategy.vae) and kept_workspaces(run.facts.gpu, run.machine.torch):
        run.add(run.load, workspace_bytes(run.facts.gpu), "workspace", "cublas of caching", at=0)


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


def fusion_checkpointed(run: Run) -> None:
    """Krea 2's four blocks that fuse what a text encoder's layers give are checkpointed like the others, where
    diffusers' model, which is recorded, keeps all that they make to the end of backward (util/checkpointing_util.py
    ``enable_checkpointing_for_krea2_transformer``). Those on every layer's states hold nearly all of it: they come back
    one after the other, the last with what is behind it."""
    model = run.facts.model
    if run.strategy.gradient_checkpointing == "none" or not model.trained_with("onetrainer", "fusion-checkpointed"):
        return
    tokens = run.grid["B"] * run.grid["T"]
    states = HALF * tokens * model.config["num_text_layers"] * model.config["text_hidden_dim"]
    last = HALF * tokens * model.config["text_intermediate_size"]
    inputs = states + 2 * states // model.config["num_text_layers"]
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        _checkpoint_prologue(run, stage, states, last, inputs)


def _checkpoint_prologue(run: Run, stage: Stage, first_size: int, last_size: int, inputs: int) -> None:
    """Lets go of what a step makes before its blocks, from the first activation of one size to the last of another, and
    makes it again where backward frees it. ``inputs``: bytes that are kept instead."""
    lead = next(at for at, (moment, _) in enumerate(stage.stretches) if moment == LEAD)
    tail = max(at for at, (moment, _) in enumerate(stage.stretches) if (moment.passes, moment.block) == ("backward", 0))
    made, gone = stage.stretches[lead][1], stage.stretches[tail][1]
    freed = {~event for event in gone if event < 0}
    sizes = [run.sizes[event] if event in freed else 0 for event in made]
    if not {first_size, last_size} <= set(sizes):
        return  # weights alone are trained, behind them: nothing of it has a gradient
    begins, ends = sizes.index(first_size), len(sizes) - sizes[::-1].index(last_size)
    held = [event for event, size in zip(made[begins:ends], sizes[begins:ends], strict=True) if size]
    half = sum(map(run.sizes.__getitem__, held)) // 2
    together = itertools.accumulate(map(run.sizes.__getitem__, held))
    count = sum(nbytes <= half for nbytes in together)
    groups = [held[:count], held[count:]]
    kept = run.new(inputs, "activation", "inputs of checkpoints before the blocks")
    between = made.index(groups[1][0])
    forward = [*made[:between], *frees(groups[0]), *made[between:ends], *frees(groups[1]), kept, *made[ends:]]
    backward = list(gone)
    for group in groups:
        at = next(at for at, event in enumerate(backward) if event < 0 and ~event in group)
        backward[at:at] = group
    stage.stretches[lead] = (stage.stretches[lead][0], forward)
    stage.stretches[tail] = (stage.stretches[tail][0], [*backward, ~kept])


CONVOLUTION, CONVOLUTION_BACKWARD = "convolution", "convolution_backward"
"""Operators."""


def convolutions_with_adapters(run: Run) -> None:
    """An adapter of a convolution keeps its own copy of the layer's input where a checkpointed block is computed again,
    and the input has a gradient from both (module/LoRAModule.py ``delta_forward``), which autograd sums into a third
    tensor (torch input_buffer.cpp ``accumulate``). The adapter, made later, is first in backward, and its copy gone."""
    if run.strategy.autocast == "none":
        return
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        for at, (moment, events) in enumerate(stage.stretches):
            if moment.passes == "backward":
                stage.stretches[at] = (moment, _with_convolution_adapters(run, events))


def gradient_before_attention(run: Run) -> None:
    """With an adapter on its first layer a U-Net's backward goes to its end, where a recording's ends at the first
    attention."""
    if run.job.method == "lora" and run.facts.model.traits.stages:
        kept_before_adapters(run, "none" if run.strategy.gradient_checkpointing == "none" else "full")


def _with_convolution_adapters(run: Run, events: Sequence[int]) -> list[int]:
    """The events of a backward pass with what adapters of its convolutions add."""
    op, sizes = run.program.op, run.sizes
    copies: dict[int, int] = {}
    before: dict[int, list[int]] = {}
    behind: dict[int, list[int]] = {}
    for at, event in enumerate(events):
        following = events[at + 1] if at + 1 < len(events) else -1
        if event < 0:
            continue
        if op[event] == CAST and following >= 0 and op[following] == CONVOLUTION and ~event in events[at:]:
            copies[event] = run.new(sizes[event], "activation", "input of an adapter")
            behind[at] = [copies[event]]
        elif op[event] == CONVOLUTION_BACKWARD:
            cast = next((each for each in events[at + 1 :] if each >= 0), event)
            in_fp32 = op[cast] == CAST and sizes[cast] == 2 * sizes[event]
            made = events.index(cast, at) if in_fp32 else at
            nbytes = sizes[cast] if in_fp32 else sizes[event]
            own, total = (run.new(nbytes, "temporary", name) for name in ("adapter's gradient", "sum of both"))
            read = next((~each for each in events[at : made + 1] if each < 0 and ~each in copies), None)
            before[at] = [own] if read is None else [own, ~copies.pop(read)]
            behind[made] = [*behind.get(made, ()), total, ~own, ~total]
    for event, copy in copies.items():
        gone = events.index(~event)
        behind[gone] = [*behind.get(gone, ()), ~copy]
    return [each for at, event in enumerate(events) for each in (*before.get(at, ()), event, *behind.get(at, ()))]


FIRST: tuple[Transform, ...] = (text_encoders_together,)
TERMS: tuple[Transform, ...] = (
    modulation_in_8_bits("onetrainer"),
    layers_in_buffers,
    statistics_kept,
    parts_in_host_ram,
    workspace_of_caching,
    inputs_as_they_are,
    joint_tensor_kept,
    fusion_checkpointed,
)
"""``inputs_as_they_are``: module/LoRAModule.py ``delta_forward``."""

LOHA, LOKR = "loha", "whole-lokr"
"""The versions with `peft_type` LOHA, and LOKR without `lokr_vec_trick`."""

ENCODERS_OFFLOADED = "encoders-offloaded"
"""The version in which the text encoder has an ``offload_fraction`` too. Since version 11 of its configs each part has
its own; before, one fraction was that of all parts (util/config/TrainConfig.py ``__migration_10``)."""


def encoders_offloaded(run: Run) -> None:
    """Layers of the text encoders wait in host RAM and come one by one (util/checkpointing_util.py
    ``enable_checkpointing``, whose conductor text encoders have as well)."""
    run.device.encoders_whole = False


_LAYERS: dict[str, tuple[Transform, ...]] = {
    "": (),
    EVERY_LAYER: (
        *(adapters_on_linear_layers(of_blocks=False), inputs_of_convolutions),
        *(convolutions_with_adapters, gradient_before_attention),
    ),
    LAYERS_OF_BLOCKS: (adapters_on_linear_layers(of_blocks=True),),
}
_ADAPTERS = {"": None, LOHA: HADAMARD_KEPT, LOKR: KRONECKER}
BY_VERSION: dict[str, tuple[Transform, ...]] = {
    "-".join(filter(None, (layers, kind, encoders))): (
        *terms,
        *((whole_changes(change, linear_layers if layers else None),) if change else ()),
        *((encoders_offloaded,) if encoders else ()),
    )
    for layers, terms in _LAYERS.items()
    for kind, change in _ADAPTERS.items()
    for encoders in ("", ENCODERS_OFFLOADED)
    if layers or kind or encoders
}
"""Not older: which layers have adapters, of which kind (module/LoRAModule.py ``LoHaModule``, ``LoKrModule``), and
whether text encoders are offloaded."""
