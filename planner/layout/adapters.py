"""Adapters on layers of the user's choice: the nearest recording, without those that it has too many and with those
that it lacks.

A recording has adapters on a model's usual layers, or on its wide choice (`planner.tape.variants.recorded_methods`).
Weights, gradients and states of any other choice follow from the layers' sizes. What a step keeps for an adapter does
not: a frozen layer keeps no input and an adapter keeps its own, but several may share one, and the layer may have kept
it anyway. So it stays the recording's, and the answer's range takes in what the other adapters may keep: of one block
with checkpointing, else of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Set
from typing import NamedTuple

from planner.catalog.card_limits import BF16_ATTENTION_FROM
from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid, job_for
from planner.errors import VplanError
from planner.garbage_collection import recording_cache
from planner.layout.checkpoints.recomputation import CAST
from planner.layout.recorded_run import recorded_step
from planner.layout.recordings import load_facts, parameters
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT, Machine, Strategy
from planner.tape.program import Block, Stage
from planner.tape.variants.recorded_methods import on_recorded_layers

PIECES = 16
"""About as many layers as a block has."""

TRAINED_BYTES = 16
"""A trained number, its gradient and two states, in fp32: the most that an engine that splits them has on a GPU."""

PRODUCT = "mm"
"""Operator of a layer's backward, as recorded."""

OUTPUTS = frozenset({"addmm", "mm", "convolution", "bitsandbytes.gemm_4bit"})
"""Those of its forward."""

OUTPUT, SCALED_OUTPUT = "adapter's output", "scaled output"
"""Operators of what `compute_adapters` adds to a layer's forward."""

ADAPTER = ".lora_"
"""Between a layer's name and an adapter's own part (peft)."""


class LinearLayer(NamedTuple):
    """A layer's matrix or convolution as an adapter sees it."""

    rows: int
    columns: int
    block: Block | None
    window: int = 1
    """numbers of each channel that a filter of a depthwise convolution reads"""

    @property
    def numbers(self) -> int:
        """Those of an adapter of rank 1."""
        return self.rows + self.window * self.columns


def is_named(layer: str, targets: Iterable[str]) -> bool:
    """Whether peft puts an adapter on a layer: its full name is a target or ends with one, at a dot
    (tuners/tuners_utils.py ``check_target_module_exists``)."""
    return any(layer == target or layer.endswith(f".{target}") for target in targets)


def adapters_as_named(run: Run) -> None:
    """Adapters on ``job.lora_targets``, where neither recorded choice is these. Raises a VplanError where no layer has
    one of the names."""
    targets = run.job.lora_targets
    if not targets or on_recorded_layers(run.facts.model, run.job, run.strategy):
        return
    recorded = adapted_layers(run)
    table = parameters(run.facts.model.name)
    every = {name.removesuffix(".weight") for name in table.rows if name.endswith(".weight")}
    wanted = {layer for layer in every if is_named(layer, targets)}
    if unknown := [target for target in targets if not any(is_named(layer, [target]) for layer in every)]:
        example = max(sorted(recorded), key=len)
        fault = f"no layer of {run.facts.model.name} is called {', '.join(unknown)}"
        raise VplanError(fault, f"--lora-targets takes the ends of names like {example}")
    layers = linear_layers(run)
    lacking = [layers[name] for name in wanted - recorded if name in layers]
    added = run.job.lora_rank * sum(layer.numbers for layer in lacking)
    add_adapters(run, added)  # by what is recorded, of which nothing may be left
    _leave_out(run, recorded - wanted)
    compute_adapters(run, lacking)
    not_added = TRAINED_BYTES * added if run.strategy.sharding in SPLIT else 0
    run.device.kept_for_adapters = (
        _kept(run, [layers[name] for name in recorded - wanted if name in layers]),
        _kept(run, lacking) + not_added,
    )


def adapted_layers(run: Run) -> set[str]:
    """The names of the layers that have adapters in the recording."""
    return {name.partition(ADAPTER)[0] for name in run.named("weight") if ADAPTER in name}


def linear_layers(run: Run) -> dict[str, LinearLayer]:
    """Every linear layer and convolution of the run's model, by its name in diffusers."""
    usual = run.job.replace(adapter="lora", lora_targets=None, lora_dropout=0.0)
    return _linear_layers(Configuration.of(usual, _ANY_STRATEGY, of_recordings(run)), tuple(run.grid.items()))


def of_recordings(run: Run) -> Machine:
    """The run's machine with a card that computes in bf16, for what is looked up in recordings of it: what takes 16
    bits takes as many in fp16."""
    card = run.facts.gpu
    too_old = card.vendor == "nvidia" and card.capability < BF16_ATTENTION_FROM
    return run.machine.replace(gpu=_ANY_GPU) if too_old else run.machine


def layers_of(model: ModelProfile) -> dict[str, LinearLayer]:
    """The same of a model, where there is no run of it yet."""
    job = job_for(model, {"method": "lora"})
    return _linear_layers(Configuration.of(job, _ANY_STRATEGY, Machine(gpu=_ANY_GPU)), tuple(grid(model, job).items()))


_ANY_STRATEGY = Strategy.read({"weights_dtype": "bf16", "adapter_dtype": "fp32", "gradient_checkpointing": "full"})
_ANY_GPU = "h100-80gb"
"""A recording that every model has: layers are the same in all."""


@recording_cache(maxsize=64)
def _linear_layers(configuration: Configuration, shape: tuple[tuple[str, int], ...]) -> dict[str, LinearLayer]:
    recorded = recorded_step(configuration, load_facts(configuration))
    table, sizes = parameters(recorded.facts.model.name), recorded.program.bytes_of(dict(shape))
    depthwise = recorded.facts.model.traits.depthwise
    layers: dict[str, LinearLayer] = {}
    for name, buffer in recorded.named("weight").items():
        if not name.endswith(".weight") or ADAPTER in name or not table.is_parameter(name):
            continue
        rows, elements = table.rows_of(name, 1), table.elements(name, sizes[buffer])
        if elements > rows:  # not of a norm
            layer = name.removesuffix(".weight").removesuffix(".base_layer")
            columns, block = elements // rows, recorded.facts.step.block_of(name)
            apart = layer.endswith(depthwise)  # as many channels go in as come out
            layers[layer] = LinearLayer(rows, rows, block, columns) if apart else LinearLayer(rows, columns, block)
    return layers


MORE_ADAPTERS = "adapters on more layers"
"""Operator of the weights that `add_adapters` adds."""


def add_adapters(run: Run, elements: int, number_bytes: int | None = None) -> None:
    """Adds adapters of so many numbers to a LoRA: their weights, gradients and states. What the step keeps for them is
    not added. Nothing is added for an engine that splits parameters. ``number_bytes``: of each number, if not those of
    the strategy's `adapter_dtype`."""
    if run.job.method != "lora" or run.strategy.sharding in SPLIT:
        return
    own = run.total_bytes(run.named("gradient").values())
    number_bytes = number_bytes or (4 if run.strategy.adapter_dtype == "fp32" else 2)
    trained = run.trained_experts * number_bytes * elements
    if trained <= 0 or not own:
        return
    states = run.total_bytes(run.named("optimizer").values())
    run.add(run.load, trained, "weight", MORE_ADAPTERS)
    if run.strategy.offload_optimizer == "none":
        run.add(run.optimizer_first, states * trained // own, "optimizer", "states of more adapters")
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        keep_beside(run, stage, trained)
    for stage in (run.optimizer_first, run.optimizer):
        keep_beside(run, stage, trained + _passing(run, run.optimizer) * trained // own)


def compute_adapters(run: Run, layers: Iterable[LinearLayer]) -> None:
    """Adds what the products of adapters take in passing that a recording lacks. ``layers``: those with such adapters.

    In forward a layer's output lies beside the adapter's and that one times its scale (peft tuners/lora/layer.py
    ``forward``). In backward the input of a frozen layer has its gradient from the layer and from the adapter, and
    autograd sums both into a third tensor (torch input_buffer.cpp ``accumulate``). Of each block its widest layers
    count: the others come one by one too, and are smaller.
    """
    rows: dict[Block, int] = {}
    columns: dict[Block, int] = {}
    for layer in layers:
        if layer.block is not None:
            rows[layer.block] = max(layer.rows, rows.get(layer.block, 0))
            columns[layer.block] = max(layer.columns, columns.get(layer.block, 0))
    tokens, passing = _token_counts(run), _Passing(run)
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        for at, (moment, events) in enumerate(stage.stretches):
            block = moment.module_list, moment.block
            if block not in rows:
                continue
            outputs, inputs = ({2 * count * width[block] for count in tokens} for width in (rows, columns))
            changed = passing.with_outputs(events, outputs)
            if moment.passes == "backward":
                changed = passing.with_sum(changed, inputs)
            stage.stretches[at] = (moment, changed)


def _token_counts(run: Run) -> set[int]:
    """Tokens of a batch that a layer may run on: the clip's, the text's or both; in a UNet the clip's at each of its
    levels, of which the grid counts the coarsest."""
    grid = run.grid
    clip, text = grid["B"] * grid["F"] * grid["H"] * grid["W"], grid["B"] * grid.get("T", 0)
    levels = len(run.facts.model.config.get("block_out_channels", (0,)))
    return {text, clip + text, *(clip * 4**level for level in range(levels))}


class _Passing:
    """Two buffers that come and go at the product of a layer, for each of their sizes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pairs: dict[tuple[int, str], tuple[int, int]] = {}

    def _pair(self, nbytes: int, first: str, second: str) -> tuple[int, int]:
        if (nbytes, first) not in self._pairs:
            self._pairs[nbytes, first] = (
                self._run.new(nbytes, "temporary", first),
                self._run.new(nbytes, "temporary", second),
            )
        return self._pairs[nbytes, first]

    def with_outputs(self, events: list[int], outputs: Set[int]) -> list[int]:
        """The events of a stretch with an adapter's output behind each product of one of these sizes."""
        sizes, op = self._run.sizes, self._run.program.op
        changed = []
        for event in events:
            changed.append(event)
            if event >= 0 and sizes[event] in outputs and op[event] in OUTPUTS:
                own, scaled = self._pair(sizes[event], OUTPUT, SCALED_OUTPUT)
                changed += [own, scaled, ~own, ~scaled]
        return changed

    def with_sum(self, events: list[int], halves: Set[int]) -> list[int]:
        """The events of a block's backward with an adapter's part of the widest input's gradient, and the sum."""
        found = _input_gradient(self._run, events, halves)
        if found is None:
            return events
        made, gone, nbytes = found
        own, total = self._pair(nbytes, "adapter's gradient", "sum of both")
        return [*events[:made], own, *events[made : gone + 1], total, ~own, ~total, *events[gone + 1 :]]


def _input_gradient(run: Run, events: list[int], halves: Set[int]) -> tuple[int, int, int] | None:
    """(position of the product, position of its free, bytes of the gradient) of a layer's input gradient: the last
    product of one of the sizes ``halves``, and its copy in fp32 where the input is in fp32."""
    sizes, op = run.sizes, run.program.op
    for made in range(len(events) - 1, -1, -1):
        product = events[made]
        if product < 0 or sizes[product] not in halves or op[product] != PRODUCT or ~product not in events[made:]:
            continue
        gone = events.index(~product, made)
        wide = 2 * sizes[product]
        copied = any(event >= 0 and op[event] == CAST and sizes[event] == wide for event in events[made:gone])
        return made, gone, wide if copied else sizes[product]
    return None


def keep_beside(run: Run, stage: Stage, nbytes: int) -> None:
    """Puts what more adapters keep beside a whole step, in pieces as they come one by one."""
    kept = [run.new(nbytes // PIECES, "activation", "kept for more adapters") for _ in range(PIECES)]
    run.place(stage, kept, "kept for more adapters", at=0)
    run.free(stage, kept)


def _leave_out(run: Run, layers: set[str]) -> None:
    """Takes away the weights, gradients and states of the adapters on some layers."""
    for category in ("weight", "gradient", "optimizer"):
        for name, buffer in run.named(category).items():
            layer, adapter, _ = name.partition(ADAPTER)
            if adapter and layer in layers:
                run.resize(buffer, 0)


def _kept(run: Run, layers: Iterable[LinearLayer]) -> int:
    """The most bytes that a step keeps for adapters on some layers: each one's input, as it came and as adapters in
    fp32 read it."""
    grid, each = run.grid, 2 + (4 if run.strategy.adapter_dtype == "fp32" else 0)
    tokens = grid["B"] * (grid["F"] * grid["H"] * grid["W"] + grid.get("T", 0))
    by_block: dict[Block | None, int] = {}
    for layer in layers:
        by_block[layer.block] = by_block.get(layer.block, 0) + each * tokens * layer.columns
    none = run.strategy.gradient_checkpointing in ("none", "partial")
    return sum(by_block.values()) if none else max(by_block.values(), default=0)


def _passing(run: Run, stage: Stage) -> int:
    """Bytes that a stage takes at most over what was there before it."""
    return max(0, *itertools.accumulate(run.sizes[event] if event >= 0 else -run.sizes[~event] for event in stage.ops))
