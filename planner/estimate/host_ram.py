"""Host RAM and disk space of a run. A run can fail for lack of either, so each has its own budget.

RAM is counted by phase and in parts, like the GPU's memory. Memory-mapped files (safetensors) are not counted, because
the kernel reclaims their pages when needed; what is copied or cast out of them is.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.estimate.pinned_ram import pinned_bytes, unpinnable_bytes
from planner.estimate.shared_ram import bytes_held_once
from planner.layout import experts, group_offload, phases, single_gpu
from planner.layout.checkpoints.block_inputs import offloaded_bytes
from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER, components_host_bytes
from planner.layout.optimizer.fp32_masters import master_bytes
from planner.layout.run import Run
from planner.layout.sharding import nvme
from planner.layout.sharding.host_memory import EngineHostBytes, bytes_per_parameter, engine_host_bytes
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT, Machine, Strategy
from planner.spec.plan import PhaseName
from planner.tape.variants.precision import trained_storage
from planner.tape.variants.variant import UNPAGED
from planner.units import GIB

PROCESS_BYTES = 3 * GIB
"""One training process: Python, torch and CUDA libraries. An assumption that was not measured."""

HOST_STATES = {"adafactor": 0, "came": 4}
"""Bytes of optimizer states per parameter when the optimizer runs in host RAM, in addition to weight and gradient in
the trained format (trainers/step/optimizers.py ``OnHost``, like torchao's CPUOffloadOptimizer). Others have AdamW's two
states in the trained format; CAME has one in fp32; factored row and column states are negligible."""

SHARD_BYTES = 10 * 10**9
"""Largest file of a saved model (diffusers ``ModelMixin.save_pretrained``, ``max_shard_size``)."""

STATE_FILE_BYTES = 2 * GIB
"""Largest file of our own checkpoint's state. If host RAM is short, one file at a time is copied."""

PREFETCHED = 2
"""Batches that each worker of a loader prefetches (torch ``DataLoader``, ``prefetch_factor``)."""

RGB = 3

HALF, FP32 = 2, 4
"""Bytes per number."""

ZERO_STATES = 12
"""Bytes per parameter of DeepSpeed's fp32 master and AdamW's two states."""

Parts = dict[str, int]
"""Bytes by kind: process, weights, activations, optimizer, ema, data, loading, saving, pinning."""


class HostRam(NamedTuple):
    """Host RAM of all processes on one node: bytes by phase, the phase that needs most, and its categories."""

    phase: PhaseName
    """the phase that needs most, the later of equals"""
    phases: dict[PhaseName, int]
    parts: Parts
    """of that phase; they sum to its bytes"""
    pinned_bytes: int
    """of all processes of the node, while they train"""

    @property
    def nbytes(self) -> int:
        """Host RAM that one node needs in its worst phase, bytes."""
        return self.phases[self.phase]


class HostShare(NamedTuple):
    """What a run's layout keeps in the host RAM of one process, in bytes. Each part is counted by the transformation
    that puts it there."""

    experts: int
    """the idle expert, or its swapped blocks"""
    blocks: int
    """swapped blocks of the running model"""
    ema: int
    """the moving average"""
    components: int
    """text encoders and the VAE that come to the GPU for each batch"""
    loaded_components: int
    """those that are there while the model is loaded"""
    encoding: int
    """peak while text encoders encode, before the model is loaded"""
    waiting: int
    """text encoders that stay loaded until training begins, after their outputs are cached"""
    staying: int
    """text encoders and the VAE that come back once their outputs are cached, and stay to the end"""
    beside_latents: int
    """the model and its text encoders, while latents are cached; with those that stay, all of them"""
    groups: int
    """the model under group offload"""
    grouping: int
    """peak while group offload is being applied"""
    moved: int
    """the model while it makes room for a validation sample's VAE"""
    checkpoints: int
    """inputs of checkpointed blocks"""
    drive_weights: int
    """buffers for weights on a drive"""
    drive_states: int
    """buffers for optimizer states on a drive"""
    drive_saving: int
    """the same while a checkpoint is written"""
    engine: EngineHostBytes
    """what a sharding engine offloads to host RAM"""


def host_share(run: Run) -> HostShare:
    """The host RAM of a run's layout; the run need not be transformed yet."""
    moved = phases.moved_host_bytes(run)
    encoding = phases.encoding_host_bytes(run)
    groups, grouping = group_offload.model_host_bytes(run)
    return HostShare(
        experts=experts.host_bytes(run),
        blocks=single_gpu.swapped_host_bytes(run),
        ema=single_gpu.ema_bytes(run) if run.strategy.ema == "cpu" else 0,
        components=components_host_bytes(run),
        loaded_components=phases.loaded_encoders_bytes(run),
        encoding=encoding,
        waiting=phases.waiting_encoders_bytes(run),
        staying=(staying := phases.staying_parts_bytes(run)),
        beside_latents=run.summed(_weights) + (staying or phases.encoders_bytes(run))
        if run.host.waits_for_latents
        else 0,
        groups=groups,
        grouping=grouping,
        moved=moved,
        checkpoints=offloaded_bytes(run),
        drive_weights=nvme.params_host_bytes(run),
        drive_states=nvme.optimizer_host_bytes(run),
        drive_saving=nvme.checkpoint_host_bytes(run),
        engine=engine_host_bytes(run),
    )


def host_ram(run: Run, machine: Machine) -> HostRam:
    """Host RAM of one node by phase. What every process holds counts once per GPU; what only rank 0 holds, and what
    all ranks share, counts once."""
    share = host_share(run)
    once = bytes_held_once(run, share.blocks, share.experts)
    per_process = _sampling(run, share) if run.samples_only else _training(run, share)
    on_rank_0 = {} if run.samples_only else _rank_0(run)
    ours = run.trainer == "vplan" and not run.samples_only
    by_phase: dict[PhaseName, Parts] = {}
    for phase, parts in per_process.items():
        total = {name: nbytes * machine.gpus for name, nbytes in {"process": PROCESS_BYTES, **parts}.items()}
        for name, nbytes in on_rank_0.get(phase, {}).items():
            total[name] = total.get(name, 0) + nbytes
        if phase != "encode":
            total["weights"] -= once
        by_phase[phase] = {name: nbytes for name, nbytes in total.items() if nbytes}
    if ours:
        _save_ours(by_phase, run, machine, share)
    pinned = machine.gpus * _pinned(run, share) - once
    for phase, parts in by_phase.items():
        beside = unpinnable_bytes(machine, pinned, sum(parts.values())) if phase not in ("encode", "load") else 0
        parts |= {"pinning": beside} if beside else {}
    totals = {phase: sum(parts.values()) for phase, parts in by_phase.items()}
    top = max(reversed(totals), key=totals.__getitem__)
    return HostRam(top, totals, by_phase[top], pinned)


def mapped_bytes(run: Run, machine: Machine) -> int:
    """Bytes of 16-bit weight files that all processes of a node map while loading; 0 except on Windows. Linux can
    reclaim their pages. Windows charges copy-on-write mappings in full against RAM and page file (``MapViewOfFile``,
    FILE_MAP_COPY; huggingface/transformers#48285)."""
    if machine.os != "windows" or not run.host.maps_files:
        return 0
    return machine.gpus * HALF * run.facts.model.parameters


def _pinned(run: Run, share: HostShare) -> int:
    held = _held(run, share)
    return share.engine.pinned + pinned_bytes(
        run,
        blocks=share.blocks,
        experts=share.experts,
        checkpoints=share.checkpoints,
        optimizer=held["optimizer"] - share.drive_states - share.engine.optimizer,
        groups=share.groups,
    )


def ram_bytes(run: Run, machine: Machine) -> int:
    """Host RAM of all processes on one node in the worst phase, bytes."""
    return host_ram(run, machine).nbytes


# ---- training


def _training(run: Run, share: HostShare) -> dict[PhaseName, Parts]:
    held = _held(run, share)
    by_phase: dict[PhaseName, Parts] = {}
    loading = _loading(run)
    if before := max(share.encoding, share.beside_latents):
        by_phase["encode"] = {"weights": before}
    if share.waiting:  # the model was loaded before they encoded, and moves to the GPU after them
        by_phase["encode"] = {"weights": share.waiting, "loading": loading}
        loading = run.summed(_largest_weight)
    if _loaded_bytes(run) is not None:  # swapped blocks are part of the model that was loaded
        loading = max(0, loading - share.blocks)
    weights = held["weights"] - share.components - share.staying + share.loaded_components + share.waiting
    by_phase["load"] = {"weights": weights, "ema": held["ema"], "loading": loading}
    by_phase["train"] = held
    if run.strategy.validation_mode != "off":
        by_phase["denoise"] = {**held, "weights": held["weights"] + max(share.groups, share.grouping)}
        by_phase["decode"] = {**held, "weights": held["weights"] + share.groups + share.moved}
    by_phase["save"] = {**held, "saving": 0 if run.trainer == "vplan" else share.drive_saving}
    return by_phase


def _rank_0(run: Run) -> dict[PhaseName, Parts]:
    """What only the main process holds, for validation and saving.

    With a moving average, validation runs on the average while the trained weights wait (diffusers ``EMAModel.store``
    copies them to the CPU, ``copy_to`` overwrites them on the GPU).
    """
    stored = run.trained_bytes if run.strategy.ema != "none" else 0
    saving = 0 if run.trainer == "vplan" else _saving(run)
    return {"denoise": {"ema": stored}, "decode": {"ema": stored}, "save": {"saving": saving}}


def has_room(copied: int, free: int) -> bool:
    """Whether our trainer copies a checkpoint's state of ``copied`` bytes per node to host RAM and writes it from there
    while training continues. The copy may take half of the ``free`` bytes; otherwise training waits for the write."""
    return 2 * copied <= free


def _save_ours(by_phase: dict[PhaseName, Parts], run: Run, machine: Machine, share: HostShare) -> None:
    """Adds the copy that our trainer makes of a checkpoint (trainers/parallel/checkpoint.py ``CheckpointWriter``).

    The copy lives until it is written, while training continues. Without room for it, each writing process holds one
    file at a time, in addition to what is read back from a drive.
    """
    copied, writers = _copied(run, machine), machine.gpus if run.strategy.sharding in SPLIT else 1
    beside = [phase for phase in ("train", "denoise", "decode", "save") if phase in by_phase]
    most = max(sum(by_phase[phase].values()) for phase in beside)
    if machine.host_ram is None or has_room(copied, machine.host_ram - most):
        for phase in beside:
            by_phase[phase]["saving"] = copied
    else:
        by_phase["save"]["saving"] = min(copied, writers * STATE_FILE_BYTES + machine.gpus * share.drive_saving)


def _copied(run: Run, machine: Machine) -> int:
    """Bytes of a checkpoint on one node. Rank 0 has everything that is not sharded. For sharded adapters and for moving
    averages it also has a whole copy, for the LoRA files."""
    strategy, averages = run.strategy, run.strategy.ema != "none"
    split = strategy.sharding == "fsdp"
    whole = FP32 * run.trained_parameters if averages else run.trained_bytes
    gathered = whole if run.job.method == "lora" and (split or averages) else 0
    if strategy.sharding not in SPLIT:
        return state_bytes(run) + gathered
    if split:  # only the first replica is written, which may be on one node
        shards = run.configuration.shards
        return state_bytes(run) * min(machine.gpus, shards) // shards + gathered
    shares = ZERO_STATES * run.trained_parameters
    return state_bytes(run) - shares + shares // machine.nodes + gathered


def _held(run: Run, share: HostShare) -> Parts:
    """What a process holds throughout training."""
    strategy = run.strategy
    weights = share.experts + share.components + share.blocks + share.drive_weights + share.engine.weights
    weights += share.staying
    optimizer = share.drive_states + share.engine.optimizer
    if strategy.offload_optimizer == "cpu" and strategy.sharding not in SPLIT:
        optimizer += _offloaded_bytes(strategy, run.trained_bytes, run.trained_parameters)
    if strategy.optimizer in UNPAGED:
        optimizer += run.total_bytes(run.paged_states)
    return {
        "weights": weights,
        "activations": run.host.extra_bytes + share.checkpoints,
        "optimizer": optimizer,
        "ema": share.ema,
        "data": _data(run),
    }


def _offloaded_bytes(strategy: Strategy, trained: int, parameters: int) -> int:
    """Bytes of weights, gradients and states in a process whose optimizer runs in host RAM without an engine.
    ``trained``: bytes of ``parameters`` parameters in their trained format."""
    states = HOST_STATES.get(strategy.optimizer)
    return 2 * trained + (2 * trained if states is None else states * parameters)


def floor_bytes(configuration: Configuration, parameters: int) -> int:
    """A lower bound in bytes on the host RAM of one node that trains `parameters` parameters, without laying out a
    run."""
    job, strategy, machine = configuration.job, configuration.strategy, configuration.machine
    whole = job.method == "full" and not job.trainable
    offloaded = strategy.offload_optimizer == "cpu" and strategy.sharding != "fsdp"
    if not whole or not offloaded:
        return machine.gpus * PROCESS_BYTES
    if strategy.sharding.startswith("zero"):
        return machine.gpus * (bytes_per_parameter(strategy.optimizer) * parameters // machine.world)
    trained = (4 if trained_storage(job, strategy) == "fp32" else 2) * parameters
    return machine.gpus * _offloaded_bytes(strategy, trained, parameters)


def _data(run: Run) -> int:
    """Bytes of the loader's batches: those its workers prefetched, and the one in use.

    A sample is its latents in fp32. If the VAE encodes every batch, it is the decoded clip in uint8 and in fp32.
    """
    model, grid = run.facts.model, run.grid
    frames, rows, columns = (grid[atom] * patch for atom, patch in zip("FHW", model.shape.patch, strict=True))
    vae = model.vae
    sample = 4 * vae.latent_channels * frames * rows * columns
    if run.strategy.vae != "cached":
        sample = (1 + 4) * RGB * vae.decoded(frames) * rows * columns * vae.spatial**2
    return (PREFETCHED * run.host.loader_workers + 1) * grid["B"] * sample


def _loading(run: Run) -> int:
    """Bytes in host RAM while weights are loaded.

    Our trainer reads them one by one from mapped files (trainers/step/placement.py ``materialise``), so this is the
    largest weight in the GPU's format. Others may load the whole model first (``HostTerms.loaded_bytes``). Stage 3
    copies a rank's trained shares to host RAM, to put them into one buffer on the GPU (runtime/zero/utils.py
    ``defragment``).
    """
    if (loaded := _loaded_bytes(run)) is not None:
        return loaded
    if run.strategy.sharding in SPLIT and run.elements:  # whole, before it is split
        moved = run.strategy.sharding == "zero-3" and run.strategy.offload_params == "none"
        return HALF * max(*run.elements.values(), sum(nvme.trained_shares(run)) if moved else 0)
    return run.summed(_largest_weight)


def _loaded_bytes(run: Run) -> int | None:
    """Bytes of the whole model if it is loaded into host RAM first; else None."""
    host = run.host
    if not host.loaded_bytes or (host.loaded_for_swapping and not run.strategy.swap_blocks):
        return None
    return int(host.loaded_bytes * run.facts.model.parameters)


def _largest_weight(run: Run) -> int:
    return max(map(run.sizes.__getitem__, run.named("weight").values()), default=0)


def _saving(run: Run) -> int:
    """Bytes of the CPU copies of what is saved.

    safetensors copies GPU tensors before it writes (torch.py ``_to_ndarray``): the adapter (peft
    ``get_peft_model_state_dict`` copies nothing itself), or a model file by file. Engines return the whole model:
    ZeRO-3 and FSDP2 gather every weight on rank 0 (``_zero3_consolidated_16bit_state_dict``, ``full_state_dict`` with
    ``cpu_offload``); with ZeRO-1 and ZeRO-2 the module is cloned (accelerate ``get_state_dict``,
    ``clone_tensors_for_torch_save``). A moving average is saved as a model of its own, built on the CPU in fp32
    (diffusers ``EMAModel.save_pretrained``).
    """
    strategy, trained = run.strategy, run.trained_bytes
    if strategy.sharding in ("zero-3", "fsdp"):
        beyond = trained - 2 * run.trained_parameters if strategy.sharding == "fsdp" else 0
        return 2 * sum(run.elements.values()) + beyond
    if run.job.method == "lora" or strategy.sharding.startswith("zero"):
        return trained
    average = 4 * run.trained_parameters if strategy.ema != "none" else 0
    return average + min(trained, SHARD_BYTES)


# ---- sampling


def _sampling(run: Run, share: HostShare) -> dict[PhaseName, Parts]:
    """What is in host RAM while other components are on the GPU. If one is ``swapped``, the whole pipeline is there
    from the start."""
    strategy, vae = run.strategy, run.facts.model.vae
    held, model = _held(run, share)["weights"], run.summed(_weights)
    if strategy.vae == "swapped":
        held += int(vae.parameters * BYTES_PER_PARAMETER[strategy.vae_dtype])
    away = model if strategy.vae == "swapped" and not share.groups else 0
    before = model if strategy.text_encoder == "swapped" else 0
    return {
        "encode": {"weights": before + max(held, share.encoding)},
        "load": {"weights": held + max(share.grouping, share.groups), "loading": 0 if share.groups else _loading(run)},
        "denoise": {"weights": held + share.groups},
        "decode": {"weights": held + max(share.groups, away)},
    }


def _weights(run: Run) -> int:
    return run.total_bytes(run.named("weight").values())


# ---- disk


def disk_bytes(run: Run) -> int:
    """Disk space in bytes: one checkpoint, and what NVMe offload keeps on the drive."""
    return state_bytes(run) + (nvme.drive_bytes(run) if run.strategy.sharding.startswith("zero") else 0)


def state_bytes(run: Run) -> int:
    """Bytes of a checkpoint's state: trained weights, optimizer states and moving average; under ZeRO also fp32
    masters."""
    average = FP32 * run.trained_parameters if run.strategy.ema != "none" else 0
    if run.strategy.sharding.startswith("zero"):
        return (HALF + ZERO_STATES) * run.trained_parameters + average
    if run.strategy.sharding == "fsdp":
        return 3 * run.trained_bytes + average
    return run.trained_experts * (run.gradient_bytes + run.summed(_states)) + master_bytes(run) + average


def _states(run: Run) -> int:
    """Bytes of the optimizer states without the step counters: only the fused optimizer has them on the GPU, one number
    per weight, which is negligible."""
    return run.total_bytes(buffer for name, buffer in run.named("optimizer").items() if name[-5:] != ":step")
