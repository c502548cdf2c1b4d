"""Which layers of a model a trainer puts its adapters on, in our words, and what those need that are not recorded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.errors import NotRecordedError
from planner.garbage_collection import recording_cache
from planner.layout.adapters import (
    MORE_ADAPTERS,
    adapted_layers,
    add_adapters,
    compute_adapters,
    keep_beside,
    linear_layers,
    of_recordings,
)
from planner.layout.checkpoints.recomputation import CAST
from planner.layout.recorded_run import recorded_step
from planner.layout.recordings import load_facts
from planner.layout.run import Run, Transform
from planner.spec.configuration import Configuration
from planner.spec.job import QUANTISED, Strategy
from planner.tape.program import Block, Stage


def on_all_linear(profile: ModelProfile, weights_dtype: object) -> tuple[str, ...] | None:
    """`lora_targets` of a trainer that adapts every linear layer of the blocks; None is the model's usual layers.

    Those are taken where the wider choice is not recorded: of other families, and over a quantised base
    (`planner.tape.variants.precision.precisions`), where `wider_adapters` adds what is missing.
    """
    wide = profile.lora.wide if profile.traits.wide_is_all_linear else ()
    return wide if wide and weights_dtype not in QUANTISED else None


def unpriced_layers_note(profile: ModelProfile, targets: object) -> str | None:
    """A note on what the estimate leaves out when a trainer adapts more layers than the recorded ones; None when the
    targets are given."""
    if targets is not None:
        return None
    if profile.lora.wide and profile.traits.wide_is_all_linear:
        return "every linear layer of the blocks has an adapter; all but the usual ones are priced as over a bf16 base"
    return f"every linear layer of the blocks has an adapter: only {profile.title}'s usual layers are priced"


def more_layers_note(profile: ModelProfile, targets: object) -> str | None:
    """The same for a trainer to which `adapters_on_blocks` applies."""
    if profile.traits.stages or (profile.lora.wide and profile.traits.wide_is_all_linear):
        return unpriced_layers_note(profile, targets)
    if targets is not None:
        return None
    return "every linear layer of the blocks has an adapter: what those take that were not recorded is worked out"


HALF = 2
"""Bytes of a number in 16 bits."""

HALF_ADAPTERS = "half-adapters"
"""The version of memory terms with adapters in 16 bits over a quantised base, where fp32 is recorded."""


IN_THEIR_FORMAT = ("adamw", "lion", "prodigy")
"""Optimizers whose states are made like the parameters."""


def adapters_in_half(run: Run) -> None:
    """Over a quantised base adapters are recorded in fp32. diffusion-pipe's are ``adapter.dtype``, and their
    optimizer's states and gradients are in that format too (models/base.py ``configure_adapter``: ``p.data =
    p.data.to(adapter_config['dtype'])``; optimi ``AdamW`` makes states like its parameters). 8-bit states stay."""
    trained = run.named("gradient")
    weights = run.named("weight")
    buffers = [*trained.values(), *(weights[name] for name in trained if name in weights)]
    if run.strategy.optimizer in IN_THEIR_FORMAT:
        buffers += run.named("optimizer").values()
    for buffer in buffers:
        run.resize(buffer, run.sizes[buffer] // 2)


WITHOUT_EXPERTS = "without-experts"
"""The version of memory terms with adapters on all layers but a mixture's experts."""

EXPERT_ADAPTER = re.compile(r"\.experts\.\d+\..*lora_")


def experts_not_adapted(run: Run) -> None:
    """Experts of a mixture have no adapters, where the recorded choice of layers gives them some."""
    for category in ("weight", "gradient", "optimizer"):
        for name, buffer in run.named(category).items():
            if EXPERT_ADAPTER.search(name):
                run.resize(buffer, 0)


class _Step(NamedTuple):
    """Of one recorded step, in bytes."""

    peak: int
    """over what is loaded"""
    trained: int
    of_experts: int
    """what of it is adapters on experts"""


def wider_adapters(run: Run) -> None:
    """Over a quantised base adapters are recorded on the usual layers alone. What those on every linear layer take
    beside is the difference of two recordings over a base in 16 bits, which is frozen like the quantised one: their
    weights, gradients and states, and what the step keeps for them."""
    wide = run.facts.model.lora.wide
    usual_layers = run.job.method == "lora" and run.job.lora_targets is None and run.strategy.weights_dtype in QUANTISED
    if not usual_layers or not wide or not run.facts.model.traits.wide_is_all_linear:
        return
    if run.in_own_code:
        return  # its recording has them
    strategy = Strategy.read(
        {
            "weights_dtype": "bf16",
            "adapter_dtype": "fp32",
            "autocast": "none" if run.strategy.autocast == "none" else "bf16",
            "gradient_checkpointing": "none" if run.strategy.gradient_checkpointing in ("none", "partial") else "full",
        }
    )
    shape = tuple(run.grid.items())
    try:
        usual, more = (
            _step(Configuration.of(run.job.replace(lora_targets=targets), strategy, of_recordings(run)), shape)
            for targets in (None, wide)
        )
    except NotRecordedError:  # of a model of the user's own, of which not everything is recorded
        return
    trained, kept = more.trained - usual.trained, max(0, more.peak - usual.peak)
    if WITHOUT_EXPERTS in run.trainer:
        kept -= kept * more.of_experts // trained
        trained -= more.of_experts
    trained //= 2 if HALF_ADAPTERS in run.trainer else 1  # of two recordings in fp32
    own = run.total_bytes(run.named("gradient").values())
    states = run.total_bytes(run.named("optimizer").values())
    copies = run.trained_experts
    run.add(run.load, copies * trained, "weight", MORE_ADAPTERS)
    if run.strategy.offload_optimizer == "none" and own:
        run.add(run.optimizer_first, copies * states * trained // own, "optimizer", "states of more adapters")
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        keep_beside(run, stage, kept)


MODULATION = re.compile(r"(\.norm\w*\.linear|_mod\.1)\.weight$")
"""Layers that make a block's scales and shifts from one vector, by the ends of diffusers' names."""

VECTORS = {".norm.linear": 3}
"""How many of the model's width they make: 6, and 3 in a single block (AdaLayerNormZero, AdaLayerNormZeroSingle)."""


def adapters_on_modulation(trainer: str) -> Transform:
    """The term of a trainer that adapts modulation too, of which our recordings have no adapters. Their layers run on
    one vector a sample, so they themselves take little; but scales and gates need a gradient now, and for it what they
    are multiplied with is kept. sd-scripts networks/lora_flux.py:820: every linear layer of a block; musubi-tuner
    networks/lora_qwen_image.py:37 leaves out ``.*(_mod_).*``, which no name has. Of which models, their profiles
    say."""

    def term(run: Run) -> None:
        """Adapters on modulation layers: their weights, gradients and states, and the factors of scales and gates."""
        if run.job.method != "lora" or not run.facts.model.trained_with(trainer, "modulation-adapted"):
            return
        width = width_of(run)
        made = [VECTORS.get(layer[1], 6) for name in run.named("weight") if (layer := MODULATION.search(name))]
        added = run.job.lora_rank * width * sum(1 + vectors for vectors in made)
        own = run.total_bytes(run.named("gradient").values())
        states = run.total_bytes(run.named("optimizer").values())
        trained = (4 if run.strategy.adapter_dtype == "fp32" else 2) * added
        run.add(run.load, trained, "weight", "adapters on modulation")
        if run.strategy.offload_optimizer == "none" and own:
            run.add(run.optimizer_first, states * trained // own, "optimizer", "states of adapters on modulation")
        # With checkpoints they are one block's, and sd-scripts' own FLUX code (48d368f, rehearsed) takes 0.14 GiB less
        # there than we say without them, which is not explained: they are left out rather than added to that.
        kept = _factors(run) if run.strategy.gradient_checkpointing == "none" else {}
        for stage in filter(None, (run.first_step, run.step, run.accumulate)):
            keep_beside(run, stage, trained)
            keep_by_block(run, stage, kept, "factors of scales and gates")

    return term


def inputs_of_more_adapters(run: Run) -> None:
    """What a step keeps for adapters on linear layers of the blocks that have none in the recording: each its own copy
    of its layer's input (ai-toolkit toolkit/network_mixins.py ``lora_input = x.to(self.lora_down.weight.dtype)``), in
    fp32 without autocast; of modulation, which runs on one vector a sample, the factors of its scales and gates. With
    checkpoints it is one block's, from its recomputation on."""
    width = 4 if run.strategy.autocast == "none" and run.strategy.adapter_dtype == "fp32" else 2
    recomputed = run.strategy.gradient_checkpointing != "none"
    layers = linear_layers(run)
    kept = _factors(run)
    for name in layers.keys() - adapted_layers(run):
        layer = layers[name]
        if layer.block is not None and not MODULATION.search(f"{name}.weight"):
            kept[layer.block] = kept.get(layer.block, 0) + width * layer.columns * tokens_of(run, name)
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        keep_by_block(run, stage, kept, "inputs of more adapters", recomputed)


def tokens_of(run: Run, layer: str) -> int:
    """Tokens of a batch that a layer of a block runs on: the text's, the clip's, or both in a single-stream block."""
    grid = run.grid
    clip, text = grid["B"] * grid["F"] * grid["H"] * grid["W"], grid["B"] * grid["T"]
    if TEXT_STREAM.search(layer):
        return text
    return clip + text if layer.startswith("single_") else clip


def adapters_on_linear_layers(of_blocks: bool) -> Transform:
    """The term of a trainer that adapts every linear layer, and every convolution, where a recording has adapters on
    some: their weights, gradients and states, and what their products take in passing. With rank r a layer of ``out``
    rows takes r (out + in). What the step keeps for them is not added: with checkpoints it is one block's."""

    def term(run: Run) -> None:
        """Adapters on the linear layers that have none in the recording."""
        if run.job.method != "lora":
            return
        layers = {name: layer for name, layer in linear_layers(run).items() if layer.block or not of_blocks}
        there = run.job.lora_rank * sum(layer.numbers for layer in layers.values())
        each = 4 if run.strategy.adapter_dtype == "fp32" else 2
        own = run.total_bytes(run.named("gradient").values())
        in_half = HALF if HALF_ADAPTERS in run.trainer else None
        add_adapters(run, there - own // (each * run.trained_experts), in_half)
        compute_adapters(run, [layers[name] for name in layers.keys() - adapted_layers(run)])

    return term


def adapters_on_blocks(run: Run) -> None:
    """Every linear layer of a transformer's blocks has an adapter, its modulation too, of models too whose recording
    has them on the usual layers alone (ai-toolkit toolkit/lora_special.py ``transformer_only``; diffusion-pipe
    models/base.py ``get_target_modules``). A U-Net's are priced as usual."""
    model = run.facts.model
    recorded = run.in_own_code or (model.lora.wide and model.traits.wide_is_all_linear)
    if recorded or model.traits.stages or run.job.lora_targets is not None:
        return
    inputs_of_more_adapters(run)
    adapters_on_linear_layers(of_blocks=True)(run)


CONVOLUTION = "convolution"
"""Operator of a convolution's forward."""


def inputs_of_convolutions(run: Run) -> None:
    """An adapter of a convolution casts the layer's fp32 input to 16 bits for itself, and keeps that copy beside the
    layer's (OneTrainer modules/module/LoRAModule.py ``delta_forward``, lycoris-lora lycoris/modules/*.py ``forward``).
    Those of checkpointed blocks are gone before backward."""
    if run.job.method != "lora" or run.strategy.autocast == "none":
        return
    op, category = run.program.op, run.program.category
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        copies: dict[int, int] = {}
        for _, events in stage.stretches:
            for event, following in itertools.pairwise(events):
                cast = event >= 0 and op[event] == CAST and category[event] == "activation"
                if cast and following >= 0 and op[following] == CONVOLUTION:
                    copies[event] = run.new(run.sizes[event], "activation", "input of an adapter")
        for at, (moment, events) in enumerate(stage.stretches):
            if copies.keys() & {event if event >= 0 else ~event for event in events}:
                stage.stretches[at] = (moment, list(_beside(events, copies)))


def _beside(events: Sequence[int], copies: Mapping[int, int]) -> Iterator[int]:
    """The events with a copy made and freed with each of some buffers."""
    for event in events:
        yield event
        own = copies.get(event if event >= 0 else ~event)
        if own is not None:
            yield own if event >= 0 else ~own


def width_of(run: Run) -> int:
    """A transformer's hidden size: heads times their width."""
    config = run.facts.model.config
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def _factors(run: Run) -> dict[Block, int]:
    """Bytes that a block keeps for the gradients of its scales and gates: what a norm gives, which autocast computes in
    fp32, and what attention or feed-forward gives; of the clip's tokens, the text's, or both in a single-stream
    block."""
    normed = 2 if run.strategy.autocast == "none" else 4
    grid = run.grid
    clip = grid["B"] * grid["F"] * grid["H"] * grid["W"]
    text = grid["B"] * grid["T"]
    kept: dict[Block, int] = {}
    for name in run.named("weight"):
        block = run.facts.step.block_of(name)
        if block is None or not (layer := MODULATION.search(name)):
            continue
        single = layer[1] in VECTORS
        tokens = clip + text if single else text if TEXT_STREAM.search(name) else clip
        times = VECTORS.get(layer[1], 6) // 3
        kept[block] = kept.get(block, 0) + times * (normed + 2) * width_of(run) * tokens
    return kept


TEXT_STREAM = re.compile(r"norm1_context|txt_m|ff_context|\.add_\w_proj|to_add_out")
"""Layers of the text's stream, by diffusers' names."""


def keep_by_block(run: Run, stage: Stage, kept: Mapping[Block, int], name: str, recomputed: bool = False) -> None:
    """Keeps something from each block's forward to the end of its backward, or from its recomputation on: in the
    longest stretch of its backward, as the last ones stand behind the next block's recomputation."""
    backward: dict[Block, list[int]] = {}
    forward: dict[Block, int] = {}
    for at, (moment, _) in enumerate(stage.stretches):
        block = moment.module_list, moment.block
        if block in kept and moment.passes == "backward":
            backward.setdefault(block, []).append(at)
        elif block in kept and moment.passes == "forward":
            forward.setdefault(block, at)
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for block, again in backward.items():
        buffer = run.new(kept[block], "activation", name)
        longest = max(again, key=lambda at: len(stage.stretches[at][1]))
        begins.setdefault(longest if recomputed else forward[block], []).append(buffer)
        ends.setdefault(longest if recomputed else again[-1], []).append(~buffer)
    stage.stretches = [
        (moment, [*begins.get(at, ()), *events, *ends.get(at, ())])
        for at, (moment, events) in enumerate(stage.stretches)
    ]


def keep_where_not_recomputed(run: Run, stage: Stage, kept: Mapping[Block, int], name: str) -> None:
    """Keeps something from each block's forward, or from the recomputation of one that is checkpointed."""
    whole = run.strategy.gradient_checkpointing
    again = {block for block in kept if whole != "none" and (whole != "partial" or block in run.checkpointed)}
    keep_by_block(run, stage, {block: kept[block] for block in kept.keys() - again}, name)
    keep_by_block(run, stage, {block: kept[block] for block in again}, name, recomputed=True)


@recording_cache(maxsize=64)
def _step(configuration: Configuration, shape: tuple[tuple[str, int], ...]) -> _Step:
    recordings = load_facts(configuration)
    run = recorded_step(configuration, recordings)
    sizes = run.program.bytes_of(dict(shape))
    held = itertools.accumulate(sizes[event] if event >= 0 else -sizes[~event] for event in run.step.ops)
    gradients = {name: sizes[buffer] for name, buffer in run.named("gradient").items()}
    of_experts = sum(nbytes for name, nbytes in gradients.items() if EXPERT_ADAPTER.search(name))
    return _Step(max(held), sum(gradients.values()), of_experts)
