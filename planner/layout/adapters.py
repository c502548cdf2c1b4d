"""Adapters on layers of the user's choice: the nearest recording, without those that it has too many and with those
that it lacks.

A recording has adapters on a model's usual layers, or on its wide choice (`planner.tape.variants.recorded_method`).
Weights, gradients and states of any other choice follow from the layers' sizes. What a step keeps for an adapter does
not: a frozen layer keeps no input and an adapter keeps its own, but several may share one, and the layer may have kept
it anyway. So it stays the recording's, and the answer's range takes in what the other adapters may keep: of one block
with checkpointing, else of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from planner.errors import VplanError
from planner.garbage_collection import recording_cache
from planner.layout.inputs import load_facts, parameters
from planner.layout.recorded_run import recorded_step
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT, Strategy
from planner.tape.program import Stage
from planner.tape.variants import on_recorded_layers

PIECES = 16
"""About as many layers as a block has."""

TRAINED_BYTES = 16
"""A trained number, its gradient and two states, in fp32: the most that an engine that splits them has on a GPU."""

ADAPTER = ".lora_"
"""Between a layer's name and an adapter's own part (peft)."""


class LinearLayer(NamedTuple):
    """A layer's matrix or convolution as an adapter sees it."""

    rows: int
    columns: int
    block: tuple[str, int] | None


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
    recorded = {name.partition(ADAPTER)[0] for name in run.named("weight") if ADAPTER in name}
    table = parameters(run.facts.model.name)
    every = {name.removesuffix(".weight") for name in table.rows if name.endswith(".weight")}
    wanted = {layer for layer in every if is_named(layer, targets)}
    if unknown := [target for target in targets if not any(is_named(layer, [target]) for layer in every)]:
        example = max(sorted(recorded), key=len)  # the same each time
        fault = f"no layer of {run.facts.model.name} is called {', '.join(unknown)}"
        raise VplanError(fault, f"--lora-targets takes the ends of names like {example}")
    layers = linear_layers(run)
    _leave_out(run, recorded - wanted)
    lacking = [layers[name] for name in wanted - recorded if name in layers]
    added = run.job.lora_rank * sum(layer.rows + layer.columns for layer in lacking)
    add_adapters(run, added)
    not_added = TRAINED_BYTES * added if run.strategy.sharding in SPLIT else 0
    run.device.kept_for_adapters = (
        _kept(run, [layers[name] for name in recorded - wanted if name in layers]),
        _kept(run, lacking) + not_added,
    )


def linear_layers(run: Run) -> dict[str, LinearLayer]:
    """Every linear layer and convolution of the run's model, by its name in diffusers."""
    strategy = Strategy.read({"weights_dtype": "bf16", "adapter_dtype": "fp32", "gradient_checkpointing": "full"})
    usual = run.job.replace(lora_targets=None, lora_dropout=0.0)
    return _linear_layers(Configuration.of(usual, strategy, run.machine), tuple(run.grid.items()))


@recording_cache(maxsize=64)
def _linear_layers(configuration: Configuration, shape: tuple[tuple[str, int], ...]) -> dict[str, LinearLayer]:
    recorded = recorded_step(configuration, load_facts(configuration))
    table, sizes = parameters(recorded.facts.model.name), recorded.program.bytes_of(dict(shape))
    layers: dict[str, LinearLayer] = {}
    for name, buffer in recorded.named("weight").items():
        if not name.endswith(".weight") or ADAPTER in name or not table.is_parameter(name):
            continue
        rows, elements = table.rows_of(name, 1), table.elements(name, sizes[buffer])
        if elements > rows:  # not of a norm
            layer = name.removesuffix(".weight").removesuffix(".base_layer")
            layers[layer] = LinearLayer(rows, elements // rows, recorded.facts.step.block_of(name))
    return layers


def add_adapters(run: Run, elements: int) -> None:
    """Adds adapters of so many numbers to a LoRA: their weights, gradients and states. What the step keeps for them is
    not added. Nothing is added for an engine that splits parameters."""
    if run.job.method != "lora" or run.strategy.sharding in SPLIT:
        return
    own = run.total_bytes(run.named("gradient").values())
    trained = run.trained_experts * (4 if run.strategy.adapter_dtype == "fp32" else 2) * elements
    if trained <= 0 or not own:
        return
    states = run.total_bytes(run.named("optimizer").values())
    run.add(run.load, trained, "weight", "adapters on more layers")
    if run.strategy.offload_optimizer == "none":
        run.add(run.optimizer_first, states * trained // own, "optimizer", "states of more adapters")
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        keep_beside(run, stage, trained)
    for stage in (run.optimizer_first, run.optimizer):
        keep_beside(run, stage, trained + _passing(run, run.optimizer) * trained // own)


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
    by_block: dict[tuple[str, int] | None, int] = {}
    for layer in layers:
        by_block[layer.block] = by_block.get(layer.block, 0) + each * tokens * layer.columns
    none = run.strategy.gradient_checkpointing in ("none", "partial")
    return sum(by_block.values()) if none else max(by_block.values(), default=0)


def _passing(run: Run, stage: Stage) -> int:
    """Bytes that a stage takes at most over what was there before it."""
    return max(0, *itertools.accumulate(run.sizes[event] if event >= 0 else -run.sizes[~event] for event in stage.ops))
