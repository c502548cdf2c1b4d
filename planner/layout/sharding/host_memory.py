"""What engines that split a model keep in host RAM with ``cpu`` offload, and how much of it they pin.

Both pin through torch (``Tensor.pin_memory``), whose pinned memory comes in powers of two: one for each buffer. Adam's
states, made by ``zeros_like``, are not pinned. DeepSpeed pins unless its file says ``pin_memory: false``
(runtime/zero/offload_config.py). S = elements of a rank's share of what is trained.

| kept | pinned by | in |
|---|---|---|
| ZeRO-1, 2: fp32 master 4S, fp32 gradients 4S, new weights 2S | share | deepspeed 0.19.8 stage_1_and_2.py |
| the same: staging for the largest gradient, in 16 bits | buffer | (``temp_grad_buffer_for_cpu_offload``) |
| the same, accumulating: gradients in 16 bits, whole | parameter | (``accumulated_grads_in_cpu``) |
| ZeRO-3: fp32 gradients 4S | sub-group | stage3.py (``subgroup_gradient_buffer``) |
| ZeRO-3: gradients in 16 bits 2S | share | (``grad_partitions_flat_buffer``) |
| ZeRO-3: fp32 master 4S | not pinned | (``fp32_partitioned_groups_flat``) |
| ZeRO-3, weights: each parameter's share in 16 bits | parameter | partition_parameters.py (``_partition_param``) |
| the same of what is trained, once more | share, always | stage3.py (``param_groups_fp16_flat_cpu_memory``) |
| FSDP2: shares, and gradients of what is trained | parameter | torch 2.13 _fsdp_param.py, _fsdp_collectives.py |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from planner.layout.run import Run
from planner.layout.sharding.fsdp import padded_share
from planner.layout.sharding.nvme import trained_shares
from planner.layout.sharding.zero import (
    FULL,
    HALF,
    aligned_elements,
    parameters_in_share,
    sub_groups,
    trained_elements,
    zero_settings,
)
from planner.spec.job import SPLIT
from planner.tape.variants.precision import trained_storage
from planner.units import power_of_two

STATES = {"lion": 1}
"""fp32 states per trained number, where it is not Adam's two (deepspeed/ops/lion/cpu_lion.py)."""


class EngineHostBytes(NamedTuple):
    """Host RAM of one rank, bytes, pinned buffers as large as they really are."""

    weights: int = 0
    """of offloaded weights; under FSDP2 with the gradients and states that are beside them"""
    optimizer: int = 0
    """of the offloaded optimizer: what it steps over, gradients and states"""
    pinned: int = 0
    """of both together, what is pinned"""


def engine_host_bytes(run: Run) -> EngineHostBytes:
    """What the engine of a run keeps in the host RAM of one rank: nothing without ``cpu`` offload, or without an
    engine. The run need not be transformed."""
    strategy = run.strategy
    if strategy.sharding not in SPLIT or "cpu" not in (strategy.offload_optimizer, strategy.offload_params):
        return EngineHostBytes()
    trained = run.job.method, run.job.trainable
    return run.shared_by_weights(
        _engine_host_bytes, strategy, *trained, run.configuration.shards, run.machine.world, run.grid["R"]
    )


def _engine_host_bytes(run: Run) -> EngineHostBytes:
    if run.strategy.sharding == "fsdp":
        return _fsdp(run) if run.strategy.offload_params == "cpu" else EngineHostBytes()
    optimizer = weights = (0, 0)
    if run.strategy.offload_optimizer == "cpu":
        optimizer = _zero_3_optimizer(run) if run.strategy.sharding == "zero-3" else _zero_1_or_2(run)
    if run.strategy.offload_params == "cpu":
        weights = _zero_3_weights(run)
    return EngineHostBytes(sum(weights), sum(optimizer), weights[0] + optimizer[0])


def _buffers(sizes: Iterable[int], pinned: bool) -> tuple[int, int]:
    """(pinned, pageable) bytes of buffers."""
    return (sum(map(power_of_two, sizes)), 0) if pinned else (0, sum(sizes))


def bytes_per_parameter(optimizer: str) -> int:
    """What ZeRO's stages keep in host RAM per number of a rank's share at least: 18 with Adam."""
    return FULL + FULL + HALF + _states(optimizer)


def _states(optimizer: str) -> int:
    return FULL * STATES.get(optimizer, 2)


def _zero_1_or_2(run: Run) -> tuple[int, int]:
    """(pinned, pageable) bytes of master, gradients, new weights and states."""
    elements, world = trained_elements(run), run.machine.world
    share = aligned_elements(sum(elements.values()), world) // world
    pins = zero_settings(run).pin_optimizer
    kept = [_buffers([FULL * share, FULL * share, HALF * share, HALF * max(elements.values())], pins)]
    if run.strategy.gradient_accumulation > 1:
        counts = list(elements.values())
        whole = ([HALF * count for count in parameters_in_share(counts, world, rank)] for rank in range(world))
        kept.append(max((_buffers(sizes, pins) for sizes in whole), key=sum))
    pinned, pageable = map(sum, zip(*kept, strict=True))
    return pinned, pageable + _states(run.strategy.optimizer) * share


def _zero_3_optimizer(run: Run) -> tuple[int, int]:
    """(pinned, pageable) bytes of gradients, master and states."""
    counts = trained_shares(run)
    settings, share = zero_settings(run), sum(counts)
    sizes = [*(FULL * group for group in sub_groups(counts, settings.sub_group)), HALF * share]
    pinned, pageable = _buffers(sizes, settings.pin_optimizer)
    return pinned, pageable + (FULL + _states(run.strategy.optimizer)) * share


def _zero_3_weights(run: Run) -> tuple[int, int]:
    """(pinned, pageable) bytes. Shares of trained parameters move into one buffer, but torch keeps what they lay in for
    later. Small parameters that are whole on the GPU have theirs here too: they are marked (``ds_persist``) when all
    are split."""
    shares = [HALF * -(-count // run.machine.world) for count in run.elements.values()]
    pinned, pageable = _buffers(shares, zero_settings(run).pin_params)
    return pinned + power_of_two(HALF * sum(trained_shares(run))), pageable


def _fsdp(run: Run) -> EngineHostBytes:
    """Shares in the format that they are stored in; gradients and two states of what is trained have it too."""
    table, trained = run.facts.parameters, trained_elements(run)
    wide = FULL if trained_storage(run.job, run.strategy) == "fp32" else HALF
    frozen = FULL if run.strategy.weights_dtype == "fp32" else HALF
    pinned = states = 0
    for name, elements in run.elements.items():
        share = padded_share(table.rows_of(name, run.grid["R"]), elements, run.configuration.shards)
        if name in trained:
            pinned += 2 * power_of_two(wide * share)
            states += 2 * wide * share
        else:
            pinned += power_of_two(frozen * share)
    return EngineHostBytes(pinned + states, 0, pinned)
