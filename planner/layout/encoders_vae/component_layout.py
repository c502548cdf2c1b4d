"""Lays a component's pass out from its recording: its weights are loaded, it runs, and its outputs stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from planner.allocator import implementation
from planner.layout.encoders_vae.component_pass import TABLE, ComponentPass
from planner.layout.encoders_vae.tiles import repeat_over_tiles
from planner.layout.group_offload import GroupTransfers, host_copy_bytes
from planner.layout.run import STRATEGY_MOMENT
from planner.tape.format import Tape
from planner.tape.program import Program, Stage

UNPACKED_AT_ONCE = 2
"""A weight in 16 bits before and behind its scale (optimum-quanto ``dequantize``: ``scale * data.to(dtype)``)."""


def load_component(program: Program, component: ComponentPass) -> tuple[Stage, dict[tuple[str, int], list[int]]]:
    """(stage, blocks): the stage that loads a component's weights, and, by (module list, block), the buffers of weights
    that group offload brings to the GPU only when the block runs."""
    stage = Stage("load", [])
    blocks: dict[tuple[str, int], list[int]] = {}
    if component.tape is None:
        buffer = program.buffer(component.weight_bytes, "residents", component.name)
        stage.stretches.append((STRATEGY_MOMENT, [buffer]))
        return stage, blocks
    first = len(program.buffers)
    stage = program.unfold(component.tape, "load", None, component.part._replace(batch=1))
    if component.is_quantised:  # recorded in 16 bits
        tables = set(_tables(program, component))
        for buffer in range(first, len(program.buffers)):
            if buffer not in tables:
                program.resize(buffer, int(program.plain_bytes(buffer) * component.bytes_per_parameter / 2))
    if component.second_table:
        nbytes = component.second_table * (4 if component.dtype == "fp32" else 2)
        stage.stretches.append((STRATEGY_MOMENT, [program.buffer(nbytes, "residents", "table of words")]))
    if component.head_parameters:
        nbytes = int(component.head_parameters * component.bytes_per_parameter)
        stage.stretches.append((STRATEGY_MOMENT, [program.buffer(nbytes, "residents", "head")]))
    if component.dtype == "fp16" and component.kept_in_fp32:
        for name, buffer in _weights(program, component).items():
            if name.endswith(component.kept_in_fp32):
                program.resize(buffer, 2 * program.plain_bytes(buffer))
    if component.cast:
        copy = program.buffer(max(map(program.plain_bytes, _weights(program, component).values())), "temporary", "cast")
        stage.stretches.append((STRATEGY_MOMENT, [copy, ~copy]))
    if component.offload == "layers":
        blocks = _taken_out(program, component.tape, stage, component.part.name)
    elif component.offload != "none":
        stage.stretches = []
    return stage, blocks


def _taken_out(program: Program, tape: Tape, stage: Stage, name: str) -> dict[tuple[str, int], list[int]]:
    """Takes the weights of blocks out of a loading stage; returns them by block."""
    blocks: dict[tuple[str, int], list[int]] = {}
    for full_name, buffer in program.named.get(f"weight of {name}", {}).items():
        block = tape.block_of(full_name)
        if block is not None:
            blocks.setdefault(block, []).append(buffer)
    gone = {buffer for buffers in blocks.values() for buffer in buffers}
    stage.stretches = [(moment, [event for event in events if event not in gone]) for moment, events in stage.stretches]
    return blocks


def run_component(program: Program, component: ComponentPass, blocks: dict[tuple[str, int], list[int]]) -> Stage:
    """The stage of one encode or decode. Its outputs (latents, embeddings) stay allocated after it. ``blocks``: from
    `load_component`."""
    if component.tape is None:
        return Stage(component.piece, [])
    stage = program.unfold(component.tape, component.piece, component.counts, component.part)
    if blocks:
        _bring(program, stage, blocks)
    elif component.offload != "none":
        transfers = GroupTransfers(component.offload, component.stream, program.plain_bytes, _weight(program))
        transfers.insert(stage, _weights(program, component))
    if component.is_quantised:
        packed = set(_weights(program, component).values()) - set(_tables(program, component))
        largest = max(map(program.plain_bytes, packed))
        whole = int(largest * 2 / component.bytes_per_parameter)
        whole = max(whole, UNPACKED_AT_ONCE * 2 * component.head_parameters)
        unpacked = program.buffer(whole, "temporary", "dequantised weight")
        stage.stretches.insert(0, (STRATEGY_MOMENT, [unpacked]))
        stage.stretches.append((STRATEGY_MOMENT, [~unpacked]))
    if component.is_repeated:
        repeat_over_tiles(program, component, stage)
    return stage


def _weights(program: Program, component: ComponentPass) -> dict[str, int]:
    return program.named.get(component.weights, {})


def _tables(program: Program, component: ComponentPass) -> list[int]:
    """The tables of words, and layers, that stay in 16 bits."""
    weights = _weights(program, component) if component.table_parameters else {}
    kept = component.kept_in_16_bits
    return [buffer for name, buffer in weights.items() if TABLE.search(name) or (kept and name.endswith(kept))]


def _weight(program: Program) -> Callable[[int], int]:
    return lambda nbytes: program.buffer(nbytes, "residents", "group offload")


def _bring(program: Program, stage: Stage, blocks: dict[tuple[str, int], list[int]]) -> None:
    """A layer's weights are there while it runs."""
    for position, (moment, events) in enumerate(stage.stretches):
        block = (moment.module_list, moment.block)
        if block not in blocks or all(event < 0 for event in events):  # what it made goes without it
            continue
        nbytes = sum(program.plain_bytes(buffer) for buffer in blocks[block])
        brought = program.buffer(nbytes, "residents", "layer")
        stage.stretches[position] = (moment, [brought, *events, ~brought])


def alive_after(*stages: Stage) -> list[int]:
    """The buffers that are allocated after these stages, run one after another on an empty allocator."""
    stretches = itertools.chain.from_iterable(stage.stretches for stage in stages)
    return implementation.alive(list(itertools.chain.from_iterable(events for _, events in stretches)), [])


def waiting_bytes(program: Program, component: ComponentPass) -> int:
    """Host RAM, bytes, of the weights of a component that come to the GPU in turn; 0 of one that is there whole."""
    if component.offload == "none" or component.tape is None:
        return 0
    if component.offload == "layers":
        return component.weight_bytes
    sizes = {name: program.plain_bytes(buffer) for name, buffer in _weights(program, component).items()}
    lists = {run.module_list for run in component.tape.runs}
    return sum(host_copy_bytes(component.offload, component.stream, sizes, lists))
