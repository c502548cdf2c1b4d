"""Adapters that make the change of a layer's weight whole, LoKr and LoHa, where a recording has LoRA's two products.

What the product with the layer's input reads stays for the gradient of that input, where that has one: of a prompt it
has none. In backward the change has a gradient, and so have the factors of its product, each as large as the weight,
until the factors' own sums are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from planner.layout.adapters import ADAPTER, PRODUCT, LinearLayer, adapted_layers, is_named, linear_layers
from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.lora_layers import keep_by_block, keep_where_not_recomputed
from planner.spec.job import QUANTISED
from planner.tape.program import Block, Stage, frees

HALF, FP32 = 2, 4


class WholeChange(NamedTuple):
    """What the change of a weight takes under autocast, in bytes for each of the weight's numbers."""

    kept_bytes: int
    """from its layer's forward to its backward, where the layer's input has a gradient"""
    backward_bytes: int
    """in its layer's backward, beside the changes that are kept for the others"""
    forward_bytes: int = 0
    """in its layer's forward, beside what is kept"""
    always_kept_bytes: int = 0
    """as `kept_bytes`, and beside it, where the layer's input has no gradient too"""


KRONECKER = WholeChange(HALF, 3 * FP32 - HALF, FP32)
"""A Kronecker product of fp32 factors (``torch.kron``, an elementwise product of two views), read in 16 bits; the layer
holds the product itself until its forward ends. In backward: the gradient of the change and those of both views, which
are summed behind that. What was kept goes with the backward of the product that read it, before these."""

HADAMARD = WholeChange(HALF, 2 * HALF + 3 * FP32 - HALF)
"""A Hadamard product of two products of factors, in 16 bits, made again in backward, which has no autocast (LyCORIS'
and musubi-tuner's loha.py ``HadaWeight.backward``): the gradient and the same scaled, in 16 bits; one product of
factors, its gradient, and the other's before it, in fp32. What was kept is gone, as in `KRONECKER`."""

HADAMARD_KEPT = WholeChange(3 * HALF, 4 * HALF)
"""The same by autograd alone, whose products autocast makes in 16 bits: both of them and the change are kept. In
backward: the gradient, the same scaled, and both of the products' gradients."""

KRONECKER_IN_16_BITS = WholeChange(HALF, 2 * HALF, 2 * HALF)
"""A Kronecker product of factors in 16 bits, as lycoris-lora 3.4.0 makes it in the format of the base's weight
(lycoris/modules/lokr.py ``forward``): the product and its sum with the weight stay until the layer's forward ends,
their difference for the gradient of the input. In backward: the gradient, and those of the product's two views; what
was kept is gone."""

HADAMARD_IN_16_BITS = WholeChange(HALF, 4 * HALF - HALF, 2 * HALF)
"""The same of a Hadamard product (lycoris/modules/loha.py, functional/loha.py ``HadaWeight.backward``): the gradient
and the same scaled; one product of factors and its gradient."""

PRODUCT_IN_16_BITS = WholeChange(HALF, 2 * HALF - HALF, 2 * HALF)
"""The same of a LoRA's two matrices (lycoris/modules/locon.py ``forward``): the gradient and the same scaled."""

KRONECKER_OF_FP32 = KRONECKER._replace(forward_bytes=2 * HALF)
HADAMARD_OF_FP32 = HADAMARD._replace(forward_bytes=2 * HALF)
"""Of factors in fp32, in lycoris-lora's ``forward``, which rounds their product to the format of the base's weight."""


def with_lengths(change: WholeChange, width: int) -> WholeChange:
    """The same where an adapter trains the lengths of a weight's rows too (``dora_wd``): the changed weight stays for
    its length, in the adapter's format of ``width`` bytes; what it is made of its length and what of that is the change
    come in fp32, as autocast has norms (lycoris/modules/*.py ``apply_weight_decompose``), and their gradients."""
    return WholeChange(change.kept_bytes, max(change.backward_bytes, 3 * FP32 - HALF), HALF + 2 * FP32, width)


def whole_changes(
    change: WholeChange,
    layers: Callable[[Run], Mapping[str, LinearLayer]] | None = None,
    lets_go: bool = False,
    prompts_trained: bool = False,
) -> Transform:
    """The term of adapters with such a change. ``layers``: those with an adapter; else those that the run says.
    ``lets_go``: whether an adapter's output goes once it is multiplied, where the recorded LoRA holds it until its
    forward ends. ``prompts_trained``: whether a prompt's states have a gradient too, as where its encoder has
    adapters."""

    def term(run: Run) -> None:
        """What a block keeps of its weights' changes, and what one takes in forward and backward."""
        if run.job.method != "lora":
            return
        adapted = dict((layers or _adapted)(run))
        inputs = set() if prompts_trained else _without_gradient(run)
        changes = {
            name: (change.always_kept_bytes + (0 if name in inputs else change.kept_bytes)) * _numbers(layer)
            for name, layer in adapted.items()
        }
        recomputed = run.strategy.gradient_checkpointing != "none"
        kept = _by_unit(changes, adapted) if recomputed else _by_block(changes, adapted, sum)
        apart = 0 if recomputed else sum(size for name, size in changes.items() if adapted[name].block is None)
        backward = {name: change.backward_bytes * _numbers(layer) for name, layer in adapted.items()}
        forward = {name: change.forward_bytes * _numbers(layer) for name, layer in adapted.items()}
        largest = _by_block(forward, adapted, max)
        for stage in filter(None, (run.first_step, run.step, run.accumulate)):
            keep_where_not_recomputed(run, stage, kept, "changes of weights")
            _keep_throughout(run, stage, apart)
            _pass_in_backward(run, stage, backward, adapted)
            if lets_go:
                _let_go_of_outputs(run, stage, largest)

    return term


LOKR, LOHA, LOCON = "lokr", "loha", "locon"
"""Versions of memory terms with LyCORIS' adapters."""

LENGTHS = "-dora"
"""Behind these, where they train the lengths of rows too."""


def with_and_without_lengths(changes: Mapping[str, WholeChange], width: int) -> dict[str, WholeChange]:
    """What the changes take of each version, with and without the lengths of rows."""
    return {
        f"{version}{lengths}": with_lengths(each, width) if lengths else each
        for version, each in changes.items()
        for lengths in ("", LENGTHS)
    }


CHANGES_IN_16_BITS = with_and_without_lengths(
    {LOKR: KRONECKER_IN_16_BITS, LOHA: HADAMARD_IN_16_BITS, LOCON: PRODUCT_IN_16_BITS}, HALF
)
CHANGES_OF_FP32 = with_and_without_lengths(
    {LOKR: KRONECKER_OF_FP32, LOHA: HADAMARD_OF_FP32, LOCON: PRODUCT_IN_16_BITS}, FP32
)
"""Version -> what its changes take, of adapters in 16 bits, and of those in fp32 under autocast."""


def _numbers(layer: LinearLayer) -> int:
    return layer.rows * layer.columns


def _by_block(
    sizes: Mapping[str, int], layers: Mapping[str, LinearLayer], of_all: Callable[[list[int]], int]
) -> dict[Block, int]:
    """Of each block the sum of its layers' sizes, or the highest."""
    found: dict[Block, list[int]] = {}
    for name, size in sizes.items():
        block = layers[name].block
        if block is not None:
            found.setdefault(block, []).append(size)
    return {block: of_all(each) for block, each in found.items()}


UNIT = re.compile(r"(.*\.(?:transformer_blocks|resnets)\.\d+)\.")
"""What a U-Net checkpoints at once, inside of its blocks, by the names of its layers."""


def _by_unit(sizes: Mapping[str, int], layers: Mapping[str, LinearLayer]) -> dict[Block, int]:
    """Of each block what its fullest part takes that is checkpointed at once: a transformer's is all of it."""
    found: dict[Block, dict[str, int]] = {}
    for name, size in sizes.items():
        block, unit = layers[name].block, UNIT.match(name)
        if block is not None:
            units = found.setdefault(block, {})
            part = unit[1] if unit else ""
            units[part] = units.get(part, 0) + size
    return {block: max(units.values()) for block, units in found.items()}


def _keep_throughout(run: Run, stage: Stage, nbytes: int) -> None:
    """What layers outside of blocks keep, as a U-Net's middle, stays for the whole step."""
    if nbytes:
        buffer = run.new(nbytes, "activation", "changes of weights")
        run.place(stage, [buffer], "changes of weights", at=0)
        run.free(stage, [buffer])


def _layer_of(gradients: Mapping[str, int]) -> dict[int, str]:
    """Gradient of an adapter's part -> its layer."""
    return {buffer: name.partition(ADAPTER)[0] for name, buffer in gradients.items() if ADAPTER in name}


def _without_gradient(run: Run) -> set[str]:
    """Layers whose input needs none, as those of a prompt. Between the gradients of a LoRA's two matrices stands the
    product that is the second one, and where the input has a gradient, another."""
    layer_of = _layer_of(run.named("gradient"))
    found: set[str] = set()
    last, products = "", 0
    for event in run.step.ops:
        if event >= 0 and event in layer_of:
            layer = layer_of[event]
            if layer == last and products == 1:
                found.add(layer)
            last, products = layer, 0
        elif event >= 0 and run.program.op[event] == PRODUCT:
            products += 1
    return found


def _pass_in_backward(run: Run, stage: Stage, sizes: Mapping[str, int], layers: Mapping[str, LinearLayer]) -> None:
    """A change's gradients come and go where the recorded LoRA of its layer has its own. A block's largest is there for
    its whole backward where none is recorded."""
    layer_of = {buffer: name for buffer, name in _layer_of(run.named("gradient")).items() if name in sizes}
    buffers = {size: run.new(size, "activation", "gradients of a change") for size in set(sizes.values())}
    recorded: set[str] = set()
    for at, (moment, events) in enumerate(stage.stretches):
        if moment.passes == "backward" and not layer_of.keys().isdisjoint(events):
            changed: list[int] = []
            for event in events:
                changed.append(event)
                if event in layer_of:
                    recorded.add(layer_of[event])
                    passing = buffers[sizes[layer_of[event]]]
                    changed += [passing, ~passing]
            stage.stretches[at] = (moment, changed)
    others = _by_block({name: size for name, size in sizes.items() if name not in recorded}, layers, max)
    keep_by_block(run, stage, _pass_by_convolutions(run, stage, others), "gradients of a change", recomputed=True)


CONVOLUTION = "convolution_backward"


def _pass_by_convolutions(run: Run, stage: Stage, sizes: Mapping[Block, int]) -> dict[Block, int]:
    """What a block's largest takes comes and goes where the recorded gradients of its convolutions' inputs do. Returns
    the sizes of the blocks that have none."""
    buffers = {block: run.new(size, "activation", "gradients of a change") for block, size in sizes.items()}
    passed: set[Block] = set()
    for at, (moment, events) in enumerate(stage.stretches):
        block = moment.module_list, moment.block
        if block not in buffers or moment.passes != "backward":
            continue
        changed: list[int] = []
        for event in events:
            changed.append(event)
            if event >= 0 and run.program.op[event] == CONVOLUTION:
                passed.add(block)
                changed += [buffers[block], ~buffers[block]]
        stage.stretches[at] = (moment, changed)
    return {block: size for block, size in sizes.items() if block not in passed}


SCALED, SUM = "mul", "add"
"""Operators of an adapter's forward behind its product."""

REACH = 10
"""Events from an adapter's product to the last use of its output, at the most."""


def _let_go_of_outputs(run: Run, stage: Stage, largest: Mapping[Block, int]) -> None:
    """Frees an adapter's output once it is multiplied. ``largest``: bytes that a block's largest change takes until
    then, and until the layer's output is summed."""
    operators, sizes = run.program.op, run.sizes
    buffers = {block: run.new(size, "activation", "change of a weight") for block, size in largest.items()}
    for at, (moment, events) in enumerate(stage.stretches):
        block = moment.module_list, moment.block
        if block not in buffers:
            continue
        changed = list(events)
        for place, event in enumerate(events[:-1]):
            scaled, near = events[place + 1], events[place + 1 : place + REACH]
            if min(event, scaled) < 0 or (operators[event], operators[scaled]) != (PRODUCT, SCALED):
                continue
            summed = any(later >= 0 and operators[later] == SUM and sizes[later] == sizes[event] for later in near)
            if summed and sizes[scaled] == sizes[event] and ~event in near:
                start, end = changed.index(event), changed.index(~event)
                change = [buffers[block]] if largest[block] else []
                last = frees(change)
                changed[start : end + 1] = [*change, event, scaled, ~event, *changed[start + 2 : end], *last]
        stage.stretches[at] = (moment, changed)


def _adapted(run: Run) -> dict[str, LinearLayer]:
    """The layers with adapters: those that were named, or are recorded; over a quantised base those too that a
    recording lacks (`wider_adapters`)."""
    model, recorded = run.facts.model, adapted_layers(run)
    layers = linear_layers(run)
    if run.job.lora_targets:
        return {name: layer for name, layer in layers.items() if is_named(name, run.job.lora_targets)}
    wide = model.lora.wide if run.strategy.weights_dtype in QUANTISED and model.traits.wide_is_all_linear else ()
    return {name: layer for name, layer in layers.items() if name in recorded or is_named(name, wide)}
