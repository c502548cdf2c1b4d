"""Strategies that contradict nothing and still get no answer: what no term covers yet, and what a model does not take.

A search leaves them out; who types one is told.
"""

from __future__ import annotations

from planner.catalog.shapes import grid
from planner.errors import NotEstimatedError
from planner.layout import attention_kernel, context_parallel
from planner.layout.run import Facts
from planner.spec.job import QUANTISED, SPLIT, Job, Machine, Strategy
from planner.tape.variants import Precision

PRICED: tuple[tuple[str, frozenset[object], str], ...] = (
    ("attention", frozenset({"sdpa", "flash", "cudnn", "efficient"}), "use --attention sdpa"),
)
"""Strategy fields of which only some values have memory terms so far, and what to ask instead."""


def refuse_unpriced(job: Job, strategy: Strategy) -> None:
    """Raises a NotEstimatedError for what would be left out of the answer without a word."""
    for field, values, fix in PRICED:
        value = getattr(strategy, field)
        if value not in values:
            raise NotEstimatedError(f"{field} {value} is not estimated yet", fix)
    if strategy.weights(job.method) in QUANTISED and strategy.sharding in SPLIT:
        _refuse_split_base(strategy)
    if job.experts == "both" and strategy.sharding in SPLIT:
        raise NotEstimatedError(f"both experts under {strategy.sharding} are not estimated yet", "use --experts high")
    if job.experts == "both" and strategy.gradient_accumulation > 1 and strategy.master_weights == "fp32":
        fault = "gradient_accumulation with master_weights over both experts is not estimated yet"
        raise NotEstimatedError(fault, "use --gradient-accumulation 1, or --experts high")
    if strategy.compile == "cudagraphs":  # SimpleTuner, documentation/quickstart/KREA2.md: 20.4 -> 58.7 GiB
        fault = "compile cudagraphs keeps pools of its own, which took 10 to 38 GiB where they were measured"
        raise NotEstimatedError(f"{fault}; no recording shows them", "use --compile blocks, or none")
    if job.trainable and Precision.of(job, strategy).autocast:
        fault = "trainable under autocast: it keeps the casts of what is trained only, and no recording shows which"
        raise NotEstimatedError(fault, "add --autocast none --weights-dtype bf16 --master-weights fp32")
    if job.trainable and strategy.swap_blocks:
        raise NotEstimatedError("trainable with swap_blocks is not estimated yet", "use --swap-blocks 0")
    if strategy.offload_optimizer != "none":
        _refuse_on_host(strategy)
    elif strategy.optimizer not in ("adamw", "adamw-8bit") and strategy.sharding in SPLIT:
        fault = f"{strategy.optimizer} under {strategy.sharding} is not estimated yet"
        raise NotEstimatedError(fault, "use --optimizer adamw")


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
        raise NotEstimatedError(why, "use --sharding ddp, or --weights-dtype bf16")
    if sharding == "zero-3":
        how = ", split as numbers of 16 bits that hold four each," if weights == "nf4" else ""
        fix = "use --weights-dtype bf16, or --sharding ddp"
        raise NotEstimatedError(f"a base in {weights} under zero-3{how} is not estimated", fix)
    fault = (
        f"a base in {weights} under {sharding} is not estimated, and {sharding} splits next to nothing of an adapter"
    )
    raise NotEstimatedError(fault, "use --sharding ddp")


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
    raise NotEstimatedError(fault, f"use --optimizer {' or '.join(known)}")


def refuse_untaken(job: Job, strategy: Strategy, machine: Machine, facts: Facts) -> None:
    """Raises a NotEstimatedError for what the model does not take: what laying the run out would find."""
    attention_kernel.kernel(strategy, machine, facts.gpu, facts.step.ops)
    for shape in job.shapes if strategy.context_parallel > 1 else ():
        context_parallel.split_plan(facts.model, grid(facts.model, job, shape), strategy.context_parallel)
