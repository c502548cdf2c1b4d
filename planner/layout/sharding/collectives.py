"""What engines that split a model send to other GPUs in a step, and the NCCL communicators they send it over."""

from __future__ import annotations

from planner.layout.run import Run
from planner.layout.sharding.zero import FULL, HALF


def communicators(run: Run) -> int:
    """How many NCCL communicators a rank has. To sample, every GPU works alone; but GPUs that share a sample's tokens
    have one of their own.

    DeepSpeed clones the group of all ranks (``_clone_world_group``) and broadcasts the model over the clone, on one GPU
    too. Several ranks have the first group's as well: DeepSpeed names the device, and torch makes it at once.
    """
    if run.samples_only:
        return int(run.strategy.context_parallel > 1)
    several, cloned = run.machine.world > 1, run.strategy.sharding.startswith("zero")
    of_a_mesh = 2 if run.strategy.fsdp_replicas > 1 else 0  # FSDP2's two dimensions have groups of their own
    return several + cloned + of_a_mesh + int(run.strategy.context_parallel > 1)


def sent_bytes(run: Run) -> int:
    """What engines that split send in a step, as if to all GPUs of what they split.

    DeepSpeed: stages 1 and 2 all-reduce gradients (``use_multi_rank_bucket_allreduce``), stage 1 behind the last
    micro-batch, and gather the new weights; stage 3 reduce-scatters, and gathers weights for forward and again for
    backward. FSDP2 the same, with gradients in fp32, and weights outside the blocks gathered once.
    """
    accumulation, trained = run.strategy.gradient_accumulation, _trained_elements(run)
    match run.strategy.sharding:
        case "zero-1":
            return 3 * HALF * trained
        case "zero-2":
            return (2 * accumulation + 1) * HALF * trained
        case "zero-3":
            return accumulation * HALF * (trained + 2 * sum(run.elements.values()))
    block_of = run.facts.step.block_of
    gathered = sum(elements * (1 if block_of(name) is None else 2) for name, elements in run.elements.items())
    return accumulation * (HALF * gathered + FULL * trained)


def reduced_share_bytes(run: Run) -> int:
    """A rank's share of FSDP2's gradients as it sums them over copies of the model: in fp32, behind the last
    micro-batch (trainers/parallel/parallel.py ``Fsdp.micro_batch``)."""
    return FULL * _trained_elements(run) // run.configuration.shards


def _trained_elements(run: Run) -> int:
    gradients = run.named("gradient")
    return sum(elements for name, elements in run.elements.items() if name in gradients)
