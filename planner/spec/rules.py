"""What a strategy means for a job on a machine: the defaults that depend on them, and what contradicts what.

Sources: DESIGN section 3 and the rules and laws of other trainers gathered in the reference (DeepSpeed's stages, fused
backward, forward-only offload hooks). Rules that need a model's facts (its number of blocks) are in
`planner.catalog.lookup`.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.errors import ContradictionError
from planner.spec.job import QUANTISED, SPLIT, Job, Machine, Strategy

Contradiction = tuple[str, str]
"""What contradicts, and what to type instead."""


DEEPSPEED = {"weights_dtype": "bf16", "adapter_dtype": "bf16", "autocast": "none", "master_weights": "fp32"}
"""What DeepSpeed's ZeRO makes of a module: 16 bits throughout, and an fp32 master of what is trained. Context
parallelism trains the same, as its attention's backward does not run under autocast (see
`planner.layout.context_parallel`)."""


def resolve(job: Job, strategy: Strategy, machine: Machine | None = None) -> Strategy:
    """The strategy with everything that was left open filled in: storage by method, ddp for several GPUs.

    `expandable_segments` is switched off where torch cannot do it. What the user said stays as it is.
    """
    changes: dict[str, object] = {}
    exchanges = strategy.context_parallel > 1 and strategy.sharding != "fsdp" and job.method != "sample"
    if strategy.sharding.startswith("zero") or exchanges:
        changes = {field: value for field, value in DEEPSPEED.items() if field not in strategy.model_fields_set}
        trained = "adapter_dtype" if job.method == "lora" else "weights_dtype"
        if changes.get(trained, getattr(strategy, trained)) == "fp32":  # said so; a master of it is no second thing
            changes.pop("master_weights", None)
    elif strategy.weights_dtype is None:
        changes["weights_dtype"] = strategy.weights(job.method)
    if job.method == "sample" and "autocast" not in strategy.model_fields_set and strategy.weights_dtype != "fp32":
        changes["autocast"] = "none"  # diffusers' pipelines compute in the weights' own dtype
    if strategy.sharding == "fsdp" and "autocast" not in strategy.model_fields_set:
        changes["autocast"] = "none"  # weights are cast as they are gathered
    if job.experts == "both" and "inactive_expert" not in strategy.model_fields_set:
        changes["inactive_expert"] = "gpu"
    if machine is not None:
        said = strategy.model_fields_set
        if machine.world > strategy.context_parallel and "sharding" not in said and job.method != "sample":
            changes["sharding"] = "ddp"
        if machine.os == "windows" and "expandable_segments" not in said:
            changes["expandable_segments"] = False
    return strategy.replace(**changes) if changes else strategy


def check(job: Job, strategy: Strategy, machine: Machine) -> None:
    """Raises a ContradictionError for the first contradiction between the records: the fault and the fix."""
    for message, fix in contradictions(job, strategy, machine):
        raise ContradictionError(message, fix)


def contradictions(job: Job, strategy: Strategy, machine: Machine) -> Iterator[Contradiction]:
    """Every contradiction between the three records."""
    settled = resolve(job, strategy, machine)
    for rules in (_method, _checkpointing, _swapping, _optimizer, _offloading, _parallel, _engines):
        yield from rules(job, settled, machine)


def _method(job: Job, strategy: Strategy, machine: Machine) -> Iterator[Contradiction]:
    """What belongs to one method only.

    torchao's int4 has kernels that only infer: torch knows no derivative of `aten::_weight_int4pack_mm`, and peft turns
    an `Int4Tensor` away (peft/tuners/lora/torchao.py, `_check_dtype_supported`).
    """
    weights = strategy.weights(job.method)
    if job.method == "full" and weights in QUANTISED:
        yield f"weights stored as {weights} cannot be trained", "use --weights-dtype bf16, or --method lora"
    if job.method == "lora" and weights == "int4":
        fault = "weights_dtype int4 has no backward: torchao's 4-bit kernels only infer, and peft puts no LoRA on them"
        yield fault, "use --weights-dtype nf4, which takes the same 4 bits"
    if job.trainable and job.method != "full":
        yield f"trainable patterns mean nothing with method {job.method}", "use --method full, or --lora-targets"
    if job.experts == "both" and strategy.inactive_expert == "absent":
        used = "used" if job.method == "sample" else "trained"
        yield f"both experts are {used}, and the one that does not run must be somewhere", "use --inactive-expert cpu"
    trained = weights if job.method == "full" else strategy.adapter_dtype
    if strategy.master_weights == "fp32" and trained == "fp32":
        yield "the trained weights are fp32 already and need no fp32 master", "leave out --master-weights"
    if strategy.group_offload != "none" and job.method != "sample" and strategy.validation_mode == "off":
        fix = "use --swap-blocks for training, or --validation-mode on"
        yield "group_offload acts only where there are no gradients: its hooks do not see backward", fix
    if strategy.group_offload_stream and strategy.group_offload == "none":
        yield "group_offload_stream needs group_offload", "add --group-offload block or leaf"
    if job.method == "sample":
        yield from _sampling(job, strategy)


def _sampling(job: Job, strategy: Strategy) -> Iterator[Contradiction]:
    """Switches of training, asked of a job that trains nothing."""
    shape = job.validation
    if shape and (shape.frames, shape.height, shape.width) != (job.frames, job.height, job.width):
        yield "to sample makes samples of the job's own shape, and validation names another", "leave out --validation"
    if strategy.sharding != "none":
        yield f"sharding {strategy.sharding} is for training; to sample, every GPU works alone", "leave out --sharding"
    asked = {
        "gradient_checkpointing": strategy.gradient_checkpointing != "none",
        "gradient_accumulation": strategy.gradient_accumulation != 1,
        "ema": strategy.ema != "none",
        "offload_optimizer": strategy.offload_optimizer != "none",
        "offload_gradients": strategy.offload_gradients != "none",
        "master_weights": strategy.master_weights != "none",
        "optimizer": strategy.optimizer != "adamw",
        "optimizer_step": strategy.optimizer_step != "foreach",
        "validation_mode": strategy.validation_mode != "off",
    }
    for field in (field for field, is_asked in asked.items() if is_asked):
        fix = f"leave out --{field.replace('_', '-')}"
        yield f"{field} means nothing with method sample, which trains nothing", fix


def _checkpointing(job: Job, strategy: Strategy, machine: Machine) -> Iterator[Contradiction]:
    mode, blocks = strategy.gradient_checkpointing, strategy.checkpointed_blocks
    if mode == "partial" and blocks is None:
        yield "gradient_checkpointing partial needs to know how many blocks", "add --checkpointed-blocks N"
    if mode != "partial" and blocks is not None:
        fix = "use --gradient-checkpointing partial, or leave out --checkpointed-blocks"
        yield f"checkpointed_blocks says nothing with gradient_checkpointing {mode}", fix


def _swapping(job: Job, strategy: Strategy, machine: Machine) -> Iterator[Contradiction]:
    """Block swap: a weight must be on the GPU when backward reads it, and nobody else may be moving it."""
    if not strategy.swap_blocks:
        return
    if job.method == "full" and strategy.optimizer_step != "backward":
        fix = "add --optimizer-step backward, or use --swap-blocks 0"
        yield "swap_blocks in full training needs the optimizer step inside backward, while the block is there", fix
    # Autograd keeps the weight a forward pass used, so a swapped block frees nothing unless it is recomputed.
    if job.method != "sample" and strategy.gradient_checkpointing == "none":
        fix = "add --gradient-checkpointing full, or use --swap-blocks 0"
        yield "swap_blocks without gradient checkpointing frees nothing: backward needs every weight", fix
    if strategy.gradient_checkpointing == "partial" and strategy.swap_blocks > (strategy.checkpointed_blocks or 0):
        fix = f"use --swap-blocks {strategy.checkpointed_blocks} at most, or --gradient-checkpointing full"
        yield f"swap_blocks {strategy.swap_blocks} is more than the blocks that are checkpointed", fix
    if strategy.sharding in ("zero-3", "fsdp"):
        yield f"swap_blocks and {strategy.sharding} would both move the weights", "use --offload-params cpu instead"
    if strategy.group_offload != "none":
        yield "swap_blocks and group_offload would both move the weights", "use --swap-blocks 0"
    if strategy.compile == "cudagraphs":
        yield "CUDA graphs need weights that stay where they are, and swap_blocks moves them", "use --compile blocks"


def _optimizer(job: Job, strategy: Strategy, machine: Machine) -> Iterator[Contradiction]:
    step = strategy.optimizer_step
    if step == "backward" and strategy.gradient_accumulation > 1:
        fix = "use --gradient-accumulation 1, or --optimizer-step foreach"
        yield "optimizer_step backward frees each gradient at once, so there is nothing to accumulate", fix
    if step == "backward" and strategy.sharding.startswith("zero"):
        yield f"with {strategy.sharding} DeepSpeed does the step itself, after backward", "use --optimizer-step foreach"
    if step == "backward" and strategy.sharding == "ddp":
        fix = "use --optimizer-step foreach"
        yield "optimizer_step backward steps before ddp has summed the gradients of all GPUs", fix
    if step == "backward" and strategy.offload_optimizer != "none":
        yield "an optimizer in host RAM steps after backward, not inside it", "use --optimizer-step foreach"
    if strategy.master_weights == "fp32" and not strategy.sharding.startswith("zero"):
        yield from _masters(strategy)
    if step == "fused" and strategy.optimizer != "adamw":
        yield f"{strategy.optimizer} has no fused step", "use --optimizer-step foreach, or --optimizer adamw"


def _masters(strategy: Strategy) -> Iterator[Contradiction]:
    """Where fp32 masters outside DeepSpeed cannot be, or are something else by another name."""
    if strategy.sharding == "fsdp":
        trained = "--weights-dtype fp32 (full) or --adapter-dtype fp32 (lora)"
        yield "fsdp gathers 16 bits from shares of any format: its master_weights are shares in fp32", f"use {trained}"
    if strategy.offload_optimizer != "none":  # torchao's CPUOffloadOptimizer copies parameters in their own format
        fix = "use --weights-dtype fp32, or --zero-stage 2"
        yield "an optimizer in host RAM keeps weights in the format they have on the GPU, without master_weights", fix
    if strategy.optimizer_step == "backward":
        fix = "use --optimizer-step foreach, or --weights-dtype fp32"
        yield "master_weights are stepped over after backward, not inside it", fix


def _offloading(job: Job, strategy: Strategy, machine: Machine) -> Iterator[Contradiction]:
    """DeepSpeed: parameters are offloaded in stage 3 only, to NVMe in stage 3 only (docs, "Parameter offloading")."""
    sharding = strategy.sharding
    if strategy.offload_params != "none" and sharding not in ("zero-3", "fsdp"):
        fix = "add --sharding zero-3, or use --swap-blocks"
        yield f"offload_params needs zero-3 or fsdp; with sharding {sharding} the weights are not split", fix
    for field in ("offload_optimizer", "offload_gradients", "offload_params"):
        if getattr(strategy, field) == "nvme" and sharding != "zero-3":
            yield f"{field} nvme needs zero-3", f"add --sharding zero-3, or use --{field.replace('_', '-')} cpu"
    if strategy.offload_gradients == "nvme" and strategy.offload_optimizer == "cpu":
        yield "offload_gradients goes where the optimizer is, which is host RAM", "add --offload-optimizer nvme"
    if strategy.offload_gradients != "none" and strategy.offload_optimizer == "none":
        fix = "add --offload-optimizer cpu, or leave out --offload-gradients"
        yield "offload_gradients sends gradients where no optimizer is", fix
    if strategy.offload_gradients != "none" and not sharding.startswith("zero"):
        fix = "leave out --offload-gradients"
        if sharding == "ddp":
            yield "offload_gradients frees each gradient, but ddp keeps them whole in its buckets", fix
        if strategy.gradient_accumulation > 1:  # torchao CPUOffloadOptimizer says the same
            yield "offload_gradients clears the gradients in every backward, so there is nothing to accumulate", fix


def _engines(job: Job, strategy: Strategy, machine: Machine) -> Iterator[Contradiction]:
    """What DeepSpeed and torch's FSDP2 do themselves. FSDP2 gathers 16 bits from shares of their own format, and its
    offload moves everything."""
    if strategy.sharding in SPLIT and strategy.validation_mode == "offload":
        fix = "use --validation-mode on"
        yield f"with {strategy.sharding} the engine holds the weights, and validation cannot move them", fix
    if strategy.sharding in SPLIT and strategy.group_offload != "none":
        fix = "leave out --group-offload"
        yield f"with {strategy.sharding} the engine holds the weights, and group_offload cannot move them", fix
    if strategy.sharding != "fsdp":
        if strategy.ema != "none" and strategy.sharding == "zero-3":
            yield "ema averages whole weights, and with zero-3 no rank has them", "use --sharding fsdp, or zero-2"
        return
    if strategy.autocast != "none":
        fix = "use --autocast none"
        yield "fsdp casts the weights as it gathers them; autocast would keep a cast copy of every block", fix
    if strategy.optimizer == "adamw-8bit":  # bitsandbytes' kernels take plain tensors (bitsandbytes#1633)
        yield "adamw-8bit does not step over fsdp's shares (DTensors)", "use --optimizer adamw"
    if (strategy.offload_optimizer == "none") != (strategy.offload_params == "none"):
        missing = "optimizer" if strategy.offload_optimizer == "none" else "params"
        yield (
            "fsdp offloads weights, gradients and optimizer together (CPUOffloadPolicy)",
            f"add --offload-{missing} cpu, or leave both out",
        )


def _context(job: Job, strategy: Strategy) -> Iterator[Contradiction]:
    """What splitting samples over GPUs goes with: DDP, or FSDP2 over all GPUs (NVIDIA-NeMo/Automodel#3157,
    verl-project/verl-omni#59: both with diffusers' ``enable_parallelism``).

    Not autocast: it leaves queries and keys in fp32 behind torch's RMSNorm and values not, and diffusers' backward of
    attention runs outside it and refuses the mix (attention_dispatch.py, ``_native_attention_backward_op``).
    """
    if strategy.autocast != "none" and job.method != "sample":
        fault = "context_parallel under autocast: queries are fp32 there and values are not, which no backward takes"
        trained = "adapter" if job.method == "lora" else "weights"
        yield fault, f"use --autocast none, with --{trained}-dtype bf16"
    if strategy.sharding.startswith("zero"):
        fault = (
            f"context_parallel with {strategy.sharding}: DeepSpeed splits sequences in its own way, for transformers"
        )
        yield f"{fault} models only", "use --sharding fsdp"
    if strategy.validation_mode != "off":
        yield "validation under context_parallel is not estimated yet", "use --validation-mode off"
    if strategy.group_offload != "none":
        yield "group_offload under context_parallel is not estimated yet", "use --group-offload none"


def _parallel(job: Job, strategy: Strategy, machine: Machine) -> Iterator[Contradiction]:
    parts = strategy.context_parallel
    if machine.world % parts:
        known = [count for count in range(1, parts) if machine.world % count == 0]
        fix = f"use --context-parallel {known[-1]}, or --gpus {parts * -(-machine.gpus // parts)}"
        yield f"context_parallel {parts} does not divide {machine.world} GPU(s)", fix
    if parts > 1:
        yield from _context(job, strategy)
    if machine.world > parts and strategy.sharding == "none" and job.method != "sample":
        yield f"sharding none on {machine.world} GPUs would train as many different models", "use --sharding ddp"
    if machine.os == "windows" and strategy.expandable_segments:
        yield "expandable_segments does not exist on native Windows", "use --no-expandable-segments, or WSL"
