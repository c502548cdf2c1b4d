"""A run laid out for the replay: load, a first step, a later step, with the strategy's buffers put in.

Every strategy that changes what is where is one function on the Run, one named buffer or lifetime, one source. What
changes the stream of operators itself (checkpointing, method, precision, optimizer) is recorded, not transformed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from planner import attention
from planner.errors import VplanError
from planner.facts import GpuProfile, ModelProfile
from planner.job import Job, Machine, Strategy
from planner.tape import Moment, Program, Stage, Tape
from planner.units import KIB, MIB
from planner.variants import OptimizerVariant

SERVICE = Moment("", "", "", -1)
"""The moment of what a strategy adds outside the model's code."""


@dataclass(frozen=True)
class Facts:
    """What is known about a question: the model, the card, and the recordings that answer for it."""

    model: ModelProfile
    gpu: GpuProfile
    step: Tape
    optimizer: Tape


@dataclass
class Run:
    """The stages of a run in order, over one Program, with what the transformations need to know."""

    job: Job
    strategy: Strategy
    machine: Machine
    facts: Facts
    program: Program = field(default_factory=Program)
    load: Stage = field(default_factory=lambda: Stage("load", []))
    step: Stage = field(default_factory=lambda: Stage("step", []))
    optimizer_first: Stage = field(default_factory=lambda: Stage("optimizer_first", []))
    optimizer: Stage = field(default_factory=lambda: Stage("optimizer", []))
    sizes: list[int] = field(default_factory=list)

    def add(self, stage: Stage, nbytes: int, category: str, name: str, *, at: int | None = None) -> int:
        """Allocates a new buffer in a stage, before its ``at``-th stretch (at the end when None); returns its number."""
        buffer = self.program.buffer(nbytes, category, name)
        self.sizes.append(nbytes)
        position = len(stage.stretches) if at is None else at
        stage.stretches.insert(position, (SERVICE._replace(passes=name), [buffer]))
        return buffer

    def free(self, stage: Stage, buffers: Iterable[int], *, at: int | None = None) -> None:
        """Frees buffers in a stage, before its ``at``-th stretch (at the end when None)."""
        position = len(stage.stretches) if at is None else at
        stage.stretches.insert(position, (SERVICE, [~buffer for buffer in buffers]))

    def drop(self, stage: Stage, buffers: Iterable[int]) -> None:
        """Removes every event of the buffers from a stage."""
        dropped = set(buffers)
        stage.stretches = [
            (moment, [event for event in events if (event if event >= 0 else ~event) not in dropped])
            for moment, events in stage.stretches
        ]

    def named(self, category: str) -> dict[str, int]:
        """Name -> buffer of a category's named buffers."""
        return {name: buffer for (kind, name), buffer in self.program.named.items() if kind == category}

    @property
    def trained_parameters(self) -> int:
        """How many parameters are trained."""
        size = 4 if OptimizerVariant.of(self.job, self.strategy).trained == "fp32" else 2
        return sum(self.sizes[buffer] for buffer in self.named("gradient").values()) // size

    def frozen_block_weights(self) -> dict[tuple[str, int], list[int]]:
        """Buffers of each block's weights that are not trained, in the order the blocks are loaded."""
        blocks: dict[tuple[str, int], list[int]] = {}
        trained = self.named("gradient")
        for name, buffer in self.named("weight").items():
            block = self.facts.step.block_of(name)
            if block is not None and name not in trained:
                blocks.setdefault(block, []).append(buffer)
        return blocks


def lay_out(job: Job, strategy: Strategy, machine: Machine, facts: Facts, grid: dict[str, int]) -> Run:
    """The run of a job at the shape of ``grid`` under a resolved strategy."""
    run = Run(job, strategy, machine, facts)
    run.load = run.program.unfold(facts.step, "load")
    run.step = run.program.unfold(facts.step, "step")
    run.optimizer_first = run.program.unfold(facts.optimizer, "optimizer_first")
    run.optimizer = run.program.unfold(facts.optimizer, "optimizer")
    run.sizes = run.program.bytes_of(grid)
    _choose_kernels(run)
    _end_of_step(run)
    for transform in TRANSFORMS:
        transform(run)
    return run


def _choose_kernels(run: Run) -> None:
    """Drops the workspaces of attention kernels that will not run."""
    kernels = {"any", *attention.workspaces(attention.kernel(run.strategy, run.machine, run.facts.gpu))}
    others = [buffer for buffer, kernel in enumerate(run.program.kernel) if kernel not in kernels]
    if others:
        run.drop(run.step, others)


def _end_of_step(run: Run) -> None:
    """The loop's variables: the batch, the loss and whatever else a step leaves die when the next one begins."""
    alive: dict[int, None] = {}
    for event in run.step.ops:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    gradients = set(run.named("gradient").values())
    left = [buffer for buffer in alive if buffer not in gradients]
    run.free(run.optimizer_first, left)
    run.free(run.optimizer, left)


def cublas_workspace(run: Run) -> None:
    """cuBLAS takes a workspace per handle from the caching allocator: one for the thread that runs forward, one for
    autograd's. 4096 KiB x 2 + 16 KiB x 8, on Hopper 32 MiB (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    nbytes = 32 * MIB if run.facts.gpu.capability[0] >= 9 else (4096 * 2 + 16 * 8) * KIB
    run.add(run.load, nbytes, "workspace", "cublas")
    run.add(run.load, nbytes, "workspace", "cublas")


def residents(run: Run) -> None:
    """Text encoders and VAE that stay on the GPU instead of being cached: their weights, loaded before the model."""
    strategy, model = run.strategy, run.facts.model
    size = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "nf4": 0.5, "int4": 0.5}
    if strategy.vae == "resident":
        run.add(run.load, int(model.vae.parameters * size[strategy.vae_dtype]), "residents", "vae", at=0)
    if strategy.text_encoder == "resident":
        for encoder in model.text_encoders:
            nbytes = int(encoder.parameters * size[strategy.text_encoder_dtype])
            run.add(run.load, nbytes, "residents", encoder.name, at=0)


def checkpoint_offload(run: Run) -> None:
    """``save_on_cpu`` around each checkpoint: block inputs go to host RAM in forward and come back, block by block, in
    backward (torch.autograd.graph.save_on_cpu). Tensors that every block takes come back once per block."""
    if run.strategy.gradient_checkpointing != "offload":
        return
    saved = saved_block_inputs(run)
    for position in reversed(range(len(run.step.stretches))):
        moment, events = run.step.stretches[position]
        block = (moment.module_list, moment.block)
        if block not in saved.own:
            continue
        own = saved.own[block]
        if moment.passes == "forward":
            events += [~buffer for buffer in own]
        else:
            copies = [run.program.buffer(run.sizes[buffer], "activation", "from host") for buffer in saved.shared]
            run.sizes += [run.sizes[buffer] for buffer in saved.shared]
            kept = [event for event in events if event >= 0 or ~event not in own]
            freed = [~buffer for buffer in [*own, *copies]]
            run.step.stretches[position] = (moment, [*own, *copies, *kept, *freed])


@dataclass(frozen=True)
class SavedInputs:
    """What the checkpoints of all blocks keep: buffers that only one block needs, and buffers that all of them take."""

    own: dict[tuple[str, int], list[int]]
    shared: list[int]


def saved_block_inputs(run: Run) -> SavedInputs:
    """Finds the checkpoints' inputs: made in forward, freed in the backward of a block."""
    made: dict[int, int] = {}
    own: dict[tuple[str, int], list[int]] = {}
    order = [(m.module_list, m.block) for m, _ in run.step.stretches if m.passes == "forward" and m.block >= 0]
    first = order[0] if order else None
    shared: list[int] = []
    for position, (moment, events) in enumerate(run.step.stretches):
        block = (moment.module_list, moment.block)
        for event in events:
            if event >= 0:
                if moment.passes == "forward":
                    made[event] = position
            elif ~event in made and moment.passes == "backward" and moment.block >= 0:
                prologue = run.step.stretches[made[~event]][0].block < 0
                (shared if block == first and prologue else own.setdefault(block, [])).append(~event)
    # The first block's own input comes from the prologue too: it has the size of the others' inputs.
    if first is not None and len(order) > 1:
        second = own.get(order[1], [])
        wanted = sorted(run.sizes[buffer] for buffer in second)
        for nbytes in wanted:
            match = next((buffer for buffer in shared if run.sizes[buffer] == nbytes), None)
            if match is not None:
                shared.remove(match)
                own.setdefault(first, []).append(match)
    return SavedInputs(own, shared)


def block_swap(run: Run) -> None:
    """Block swap: the last ``swap_blocks`` blocks live in pinned host RAM and stream through a ring of two buffers, each
    as large as the largest of them (musubi-tuner, ``--block_swap_h2d_only``; OneTrainer docs/RamOffloading.md)."""
    count = run.strategy.swap_blocks
    if not count:
        return
    blocks = run.frozen_block_weights()
    if count > len(blocks):
        raise VplanError(f"swap_blocks {count}: the model has {len(blocks)} blocks", f"use at most {len(blocks)}")
    swapped = list(blocks)[len(blocks) - count :]
    largest = max(sum(run.sizes[buffer] for buffer in blocks[block]) for block in swapped)
    run.drop(run.load, [buffer for block in swapped for buffer in blocks[block]])
    for _ in range(min(2, count)):
        run.add(run.load, largest, "buckets", "swap ring")


def gradients_leave(run: Run) -> None:
    """Each gradient is freed at the end of the block whose backward made it."""
    gradients = set(run.named("gradient").values())
    for _, events in run.step.stretches:
        events += [~event for event in events if event in gradients]
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, gradients)


def offloaded_optimizer(run: Run) -> None:
    """Optimizer states and step in host RAM (torchao CPUOffloadOptimizer): nothing of the step is on the GPU; with
    ``offload_gradients`` each gradient leaves as soon as it is accumulated."""
    strategy = run.strategy
    if strategy.offload_optimizer == "none" or strategy.sharding.startswith("zero"):
        return
    for stage in (run.optimizer_first, run.optimizer):
        run.drop(stage, [event for event in stage.ops if event >= 0])
    if strategy.offload_gradients != "none":
        gradients_leave(run)


def ddp(run: Run) -> None:
    """DistributedDataParallel's buckets: a second copy of all gradients, or, with ``gradient_as_bucket_view``, the
    gradients themselves, which then never go away (torch.nn.parallel.DistributedDataParallel)."""
    if run.strategy.sharding != "ddp":
        return
    nbytes = sum(run.sizes[buffer] for buffer in run.named("gradient").values())
    run.add(run.load, nbytes, "buckets", "ddp buckets")
    if run.strategy.grad_buckets == "view":
        gradients_leave(run)


TRANSFORMS: tuple[Callable[[Run], None], ...] = (
    cublas_workspace,
    residents,
    checkpoint_offload,
    block_swap,
    offloaded_optimizer,
    ddp,
)
"""In the order in which they apply."""
