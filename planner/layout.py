"""Lays a run out: unfolds the recordings and applies the strategy's transformations, in a fixed order."""

from __future__ import annotations

from planner import attention, dialects
from planner.context import context_parallel
from planner.errors import VplanError
from planner.experts import experts, waiting_gradients
from planner.fsdp import fsdp
from planner.job import QUANTISED, SPLIT, Job, Machine, Strategy
from planner.master import masters
from planner.nvme import check_buffers
from planner.phases import residents, saving, validation
from planner.positions import stored_positions, stored_positions_in_validation
from planner.run import Facts, Run, Term, recorded
from planner.sampling import sampling
from planner.strategies import (
    accumulation,
    block_swap,
    checkpoint_offload,
    cublas_workspace,
    ddp,
    ema,
    offloaded_optimizer,
    paged_states,
    step_in_backward,
    workspaces_at_first_use,
)
from planner.trainable import part_trained
from planner.variants import Precision
from planner.zero import zero

TRANSFORMS: tuple[Term, ...] = (
    stored_positions,
    context_parallel,
    part_trained,
    cublas_workspace,
    residents,
    experts,
    checkpoint_offload,
    block_swap,
    step_in_backward,
    accumulation,
    masters,
    offloaded_optimizer,
    paged_states,
    ddp,
    waiting_gradients,
    check_buffers,
    zero,
    fsdp,
    ema,
    validation,
    stored_positions_in_validation,
    sampling,
    saving,
)


def transforms(trainer: str) -> tuple[Term, ...]:
    """All that is applied to a recorded run, in order, as ``trainer`` would run it."""
    return (*TRANSFORMS, *dialects.terms(trainer), workspaces_at_first_use)


PRICED: tuple[tuple[str, frozenset[object], str], ...] = (
    ("attention", frozenset({"sdpa", "flash", "cudnn", "efficient"}), "use --attention sdpa"),
)
"""Strategy fields of which only some values have memory terms so far, and what to ask instead."""


def refuse_unpriced(job: Job, strategy: Strategy) -> None:
    """Raises a VplanError for what would be left out of the answer without a word."""
    for field, values, fix in PRICED:
        value = getattr(strategy, field)
        if value not in values:
            raise VplanError(f"{field} {value} is not estimated yet", fix)
    if strategy.weights(job.method) in QUANTISED and strategy.sharding in SPLIT:
        _refuse_split_base(strategy)
    if job.experts == "both" and strategy.sharding in SPLIT:
        raise VplanError(f"both experts under {strategy.sharding} are not estimated yet", "use --experts high")
    if job.experts == "both" and strategy.gradient_accumulation > 1 and strategy.master_weights == "fp32":
        fault = "gradient_accumulation with master_weights over both experts is not estimated yet"
        raise VplanError(fault, "use --gradient-accumulation 1, or --experts high")
    if strategy.compile == "cudagraphs":  # SimpleTuner, documentation/quickstart/KREA2.md: 20.4 -> 58.7 GiB
        fault = "compile cudagraphs keeps pools of its own, which took 10 to 38 GiB where they were measured"
        raise VplanError(f"{fault}; no recording shows them", "use --compile blocks, or none")
    if job.trainable and Precision.of(job, strategy).autocast:
        fault = "trainable under autocast: it keeps the casts of what is trained only, and no recording shows which"
        raise VplanError(fault, "add --autocast none --weights-dtype bf16 --master-weights fp32")
    if job.trainable and strategy.swap_blocks:
        raise VplanError("trainable with swap_blocks is not estimated yet", "use --swap-blocks 0")
    if strategy.offload_optimizer != "none":
        _refuse_on_host(strategy)
    elif strategy.optimizer not in ("adamw", "adamw-8bit") and strategy.sharding in SPLIT:
        fault = f"{strategy.optimizer} under {strategy.sharding} is not estimated yet"
        raise VplanError(fault, "use --optimizer adamw")


def _refuse_split_base(strategy: Strategy) -> None:
    """A quantised base under an engine that splits: what cannot be, and what only is not recorded.

    FSDP2 hands out plain parameters in place of bitsandbytes' and torchao's, whose constants are gone then
    (bitsandbytes#1945, accelerate#3983; torchao's Int8Tensor has no ``fsdp_pre_all_gather``), and layerwise casting
    puts other data in a parameter than the share FSDP2 knows. DeepSpeed's stages 1 and 2 leave the base whole, stage 3
    splits it where ``bnb_4bit_quant_storage`` is bf16 (peft, docs/source/accelerate/deepspeed.md).
    """
    weights, sharding = strategy.weights_dtype, strategy.sharding
    if sharding == "fsdp":
        why = f"fsdp splits parameters without the constants or hooks that turn {weights} back into numbers"
        raise VplanError(why, "use --sharding ddp, or --weights-dtype bf16")
    if sharding == "zero-3":
        how = ", split as numbers of 16 bits that hold four each," if weights == "nf4" else ""
        fix = "use --weights-dtype bf16, or --sharding ddp"
        raise VplanError(f"a base in {weights} under zero-3{how} is not estimated", fix)
    fault = (
        f"a base in {weights} under {sharding} is not estimated, and {sharding} splits next to nothing of an adapter"
    )
    raise VplanError(fault, "use --sharding ddp")


def _refuse_on_host(strategy: Strategy) -> None:
    """Optimizers that nobody's step in host RAM knows: DeepSpeed has CPU kernels for AdamW and Lion (deepspeed/ops),
    torchao and FSDP2 run an optimizer's own Python there, one parameter at a time."""
    zero = strategy.sharding.startswith("zero")
    known = ("adamw", "lion") if zero else ("adamw", "adafactor")
    if strategy.optimizer in known or (strategy.optimizer == "came" and strategy.sharding not in SPLIT):
        return
    why = {
        "prodigy": "finds one rate over all parameters, and in host RAM each is stepped alone",
        "muon": "is two optimizers, one for what is no matrix, and in host RAM all are stepped by one",
        "adafactor": "has no CPU kernel in DeepSpeed",
        "came": "has no CPU kernel in DeepSpeed, and over fsdp's shares no row is whole",
    }.get(strategy.optimizer, "steps with bitsandbytes' kernels, which are the GPU's")
    fault = f"{strategy.optimizer} {why}, so offload_optimizer cannot take it"
    raise VplanError(fault, f"use --optimizer {' or '.join(known)}")


def lay_out(
    job: Job, strategy: Strategy, machine: Machine, facts: Facts, grid: dict[str, int], trainer: str = "vplan"
) -> Run:
    """The run of a job at the shape of ``grid`` under a resolved strategy, as ``trainer`` would do it."""
    refuse_unpriced(job, strategy)
    run = Run(job, strategy, machine, facts, grid=grid)
    run.load, run.step, run.checkpointed = recorded(run.program, facts, strategy)
    run.optimizer_first = run.program.unfold(facts.optimizer, "optimizer_first")
    run.optimizer = run.program.unfold(facts.optimizer, "optimizer")
    run.sizes = run.program.bytes_of(grid)
    choose_kernels(run)
    end_of_step(run)
    for transform in transforms(trainer):
        transform(run)
    return run


def kernels(strategy: Strategy, machine: Machine, facts: Facts) -> frozenset[str]:
    """The attention kernels whose workspaces will be taken."""
    return frozenset(attention.workspaces(attention.kernel(strategy, machine, facts.gpu, facts.step.ops)))


def choose_kernels(run: Run) -> None:
    """Drops the workspaces of attention kernels that will not run."""
    chosen = kernels(run.strategy, run.machine, run.facts)
    others = [buffer for buffer, kernel in run.program.kernel.items() if kernel not in chosen]
    if others:
        run.drop(run.step, others)


def end_of_step(run: Run) -> None:
    """The loop's variables: the batch, the loss and whatever else a step leaves die when the next one begins."""
    if run.samples:  # the next call makes its input anew, from what the scheduler made of this prediction
        run.free(run.step, run.left)
        return
    run.free(run.optimizer_first, run.left)
    run.free(run.optimizer, run.left)
