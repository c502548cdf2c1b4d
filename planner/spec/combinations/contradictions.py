"""Strategies that contradict themselves, their job or their machine, whoever trains.

`CONTRADICTIONS` is one table made of groups, in this order: method and sampling, adapters, checkpointing, block swap,
the optimizer, offload, parallelism, engines. A helper before a group builds its rows where they differ only in their
condition. Sources: DeepSpeed's rules for its stages, torch's for steps in backward, and diffusers' forward-only offload
hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.errors import ContradictionError
from planner.schema import refused_values
from planner.spec.combinations.combination import Combination, Refusal, refusals
from planner.spec.configuration import Configuration
from planner.spec.job import QUANTISED, Job


def _row(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    return Combination("contradiction", applies, reason, fix)


_METHOD = (
    _row(
        lambda s: s.job.method == "full" and s.weights in QUANTISED,
        "weights stored as {0.weights} cannot be trained",
        "use --weights-dtype bf16, or --method lora",
    ),
    # torch knows no derivative of `aten::_weight_int4pack_mm`, and peft turns an `Int4Tensor` away
    # (peft/tuners/lora/torchao.py, `_check_dtype_supported`).
    _row(
        lambda s: s.job.method == "lora" and s.weights == "int4",
        "weights_dtype int4 has no backward: torchao's 4-bit kernels only infer, and peft puts no LoRA on them",
        "use --weights-dtype nf4, which takes the same 4 bits",
    ),
    _row(
        lambda s: bool(s.job.trainable) and s.job.method != "full",
        "trainable patterns have no effect with method {0.job.method}",
        "use --method full, or --lora-targets",
    ),
    _row(
        lambda s: s.both_experts and s.strategy.inactive_expert == "absent" and s.job.method == "sample",
        "both experts are used, so the inactive one must be kept somewhere",
        "use --inactive-expert cpu",
    ),
    _row(
        lambda s: s.both_experts and s.strategy.inactive_expert == "absent" and s.job.method != "sample",
        "both experts are trained, so the inactive one must be kept somewhere",
        "use --inactive-expert cpu",
    ),
    _row(
        lambda s: s.strategy.master_weights == "fp32" and s.trained == "fp32",
        "the trained weights are fp32 already and need no fp32 master",
        "leave out --master-weights",
    ),
    _row(
        lambda s: (
            s.strategy.group_offload != "none" and s.job.method != "sample" and s.strategy.validation_mode == "off"
        ),
        "group_offload acts only where there are no gradients: its hooks do not see backward",
        "use --swap-blocks for training, or --validation-mode on",
    ),
    _row(
        lambda s: s.strategy.group_offload_stream and s.strategy.group_offload == "none",
        "group_offload_stream needs group_offload",
        "add --group-offload block or leaf",
    ),
)


def _another_shape(configuration: Configuration) -> bool:
    job, shape = configuration.job, configuration.job.validation
    return shape is not None and (shape.frames, shape.height, shape.width) != (job.frames, job.height, job.width)


_OF_TRAINING: dict[str, object] = {
    "gradient_checkpointing": "none",
    "gradient_accumulation": 1,
    "ema": "none",
    "offload_optimizer": "none",
    "offload_gradients": "none",
    "master_weights": "none",
    "optimizer": "adamw",
    "optimizer_step": "foreach",
    "validation_mode": "off",
    "adapter_inputs": "cast",
    "nested_checkpointing": False,
}
"""Switches that mean nothing to a job that only samples, and what they say when nobody asked for them."""


def _asked_to_sample(field: str, unasked: object) -> Callable[[Configuration], bool]:
    return lambda s: s.job.method == "sample" and getattr(s.strategy, field) != unasked


_SAMPLING = (
    _row(
        lambda s: s.job.method == "sample" and _another_shape(s),
        "method sample uses the job's own shape, but validation sets another",
        "leave out --validation",
    ),
    _row(
        lambda s: s.job.method == "sample" and s.strategy.sharding != "none",
        "sharding {0.strategy.sharding} is for training; in sampling every GPU works alone",
        "leave out --sharding",
    ),
    *(
        _row(
            _asked_to_sample(field, unasked),
            f"{field} has no effect with method sample",
            f"leave out --{field.replace('_', '-')}",
        )
        for field, unasked in _OF_TRAINING.items()
    ),
)


def _sharing(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    """A row of adapters that read their layer's input itself: where there is no copy to save, or it is not the same."""
    shares = "leave out --adapter-inputs"
    return _row(lambda s: s.strategy.adapter_inputs == "shared" and applies(s), reason, fix or shares)


_ADAPTERS = (
    _sharing(lambda s: s.job.method == "full", "adapter_inputs has no effect with method full", ""),
    _sharing(
        lambda s: s.job.method == "lora" and s.strategy.adapter_dtype != "fp32",
        "adapter_inputs shared has no effect: adapters in {0.strategy.adapter_dtype} make no copies of their inputs",
        "",
    ),
    _sharing(
        lambda s: s.job.method == "lora" and s.weights == "nf4",
        "adapter_inputs shared has no effect: over a base in nf4 adapters make no copies of their inputs",
        "",
    ),
    _sharing(  # only autocast's product casts what it reads back to 16 bits
        lambda s: s.job.method == "lora" and s.strategy.autocast == "none",
        "without autocast adapters in fp32 compute in fp32, on inputs that are cast to it",
        "add --autocast bf16, or leave out --adapter-inputs",
    ),
    _sharing(  # torch draws and scales in the dtype it is given
        lambda s: s.job.method == "lora" and s.job.lora_dropout > 0,
        "lora_dropout of a shared input in 16 bits gives other numbers than of a copy in fp32",
        "",
    ),
)

_UNRECORDED_ADAPTERS = refused_values(Job, "adapter")


def _dora(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    """A row of DoRA, which reads the base's weights beside the layer that has them (peft 0.21.2,
    tuners/lora/dora.py)."""
    return _row(lambda s: s.job.trains == "dora" and applies(s), reason, fix)


def _lokr(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    """A row of LoKr, of two whole matrices (peft 0.21.2, tuners/lokr/layer.py)."""
    return _row(lambda s: s.job.trains == "lokr" and applies(s), reason, fix)


_KINDS_OF_ADAPTERS = (
    _row(
        lambda s: s.job.adapter in _UNRECORDED_ADAPTERS,
        "adapter {0.job.adapter} is not supported: what its layers allocate has not been recorded",
        "use --adapter lora, dora or lokr",
    ),
    _row(
        lambda s: s.job.method != "lora" and s.job.adapter != "lora",
        "adapter {0.job.adapter} has no effect with method {0.job.method}",
        "leave out --adapter, or use --method lora",
    ),
    _dora(  # `get_weight_norm` adds both in the dtype that the adapter's input has
        lambda s: s.strategy.adapter_inputs == "shared",
        "adapter_inputs shared gives dora other numbers: it adds the weight and its change in its input's dtype",
        "leave out --adapter-inputs",
    ),
    _dora(  # `update_layer` adds the adapter's product to the weight as it is stored
        lambda s: s.weights == "fp8",
        "dora adds to the base's weights as they are stored, and torch adds no numbers in fp8",
        "use --weights-dtype bf16, or --adapter lora",
    ),
    _row(  # of LoKr its shape, which is then that of nothing
        lambda s: s.job.trains in ("dora", "lokr") and s.strategy.sharding == "zero-3",
        "{0.job.adapter} reads a weight after its layer has run, when zero-3 has sent it away again",
        "use --sharding ddp, or --adapter lora",
    ),
    _row(
        lambda s: s.job.trains != "lokr" and s.job.lokr_factor != Job.model_fields["lokr_factor"].default,
        "lokr_factor has no effect without adapter lokr",
        "leave out --lokr-factor, or use --adapter lokr",
    ),
    _lokr(
        lambda s: s.job.lora_rank != Job.model_fields["lora_rank"].default,
        "lora_rank has no effect with adapter lokr, whose matrices are whole",
        "leave out --lora-rank; --lokr-factor says how large they are",
    ),
    _lokr(
        lambda s: s.job.lora_dropout > 0,
        "lora_dropout has no effect with adapter lokr: peft's drops ranks or layers, and no inputs",
        "leave out --lora-dropout",
    ),
    _lokr(
        lambda s: s.strategy.adapter_inputs == "shared",
        "adapter_inputs shared of lokr is not recorded",
        "leave out --adapter-inputs",
    ),
    _lokr(  # `get_delta_weight`
        lambda s: s.weights == "nf4",
        "lokr gives its product the shape of the base's weight as it is stored, and nf4 is packed",
        "use --weights-dtype bf16, or --adapter lora",
    ),
)

_CHECKPOINTING = (
    _row(
        lambda s: s.strategy.gradient_checkpointing == "partial" and s.strategy.checkpointed_blocks is None,
        "gradient_checkpointing partial needs a number of blocks",
        "add --checkpointed-blocks N",
    ),
    _row(
        lambda s: s.strategy.gradient_checkpointing != "partial" and s.strategy.checkpointed_blocks is not None,
        "checkpointed_blocks has no effect with gradient_checkpointing {0.strategy.gradient_checkpointing}",
        "use --gradient-checkpointing partial, or leave out --checkpointed-blocks",
    ),
    _row(
        lambda s: s.strategy.nested_checkpointing and s.strategy.gradient_checkpointing == "none",
        "nested_checkpointing needs blocks that are checkpointed",
        "add --gradient-checkpointing full, or leave out --nested-checkpointing",
    ),
    _row(
        lambda s: s.strategy.nested_checkpointing and s.strategy.compile != "none",
        "compile {0.strategy.compile} chooses itself what a block keeps, nested_checkpointing would choose it too",
        "use --compile none, or leave out --nested-checkpointing",
    ),
)


def _swapping(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    """A row of block swap: a weight must be on the GPU when backward reads it, and nobody else may be moving it."""
    return _row(lambda s: s.strategy.swap_blocks > 0 and applies(s), reason, fix)


# Autograd keeps the weight a forward pass used, so a swapped block frees nothing unless it is recomputed.
_KEPT_FOR_BACKWARD = _swapping(
    lambda s: s.job.method != "sample" and s.strategy.gradient_checkpointing == "none",
    "swap_blocks without gradient checkpointing frees nothing: backward needs every weight",
    "add --gradient-checkpointing full, or use --swap-blocks 0",
)

_SWAPPING = (
    _swapping(
        lambda s: s.job.method == "full" and s.strategy.optimizer_step != "backward",
        "swap_blocks in full training needs the optimizer step inside backward, while the block is there",
        "add --optimizer-step backward, or use --swap-blocks 0",
    ),
    _KEPT_FOR_BACKWARD,
    _swapping(
        lambda s: (
            s.strategy.gradient_checkpointing == "partial"
            and s.strategy.swap_blocks > (s.strategy.checkpointed_blocks or 0)
        ),
        "swap_blocks {0.strategy.swap_blocks} exceeds the number of checkpointed blocks",
        "use --swap-blocks {0.strategy.checkpointed_blocks} at most, or --gradient-checkpointing full",
    ),
    _swapping(
        lambda s: s.strategy.sharding in ("zero-3", "fsdp"),
        "swap_blocks and {0.strategy.sharding} would both move the weights",
        "use --offload-params cpu instead",
    ),
    _swapping(
        lambda s: s.strategy.group_offload != "none",
        "swap_blocks and group_offload would both move the weights",
        "use --swap-blocks 0",
    ),
    _swapping(
        lambda s: s.strategy.compile == "cudagraphs",
        "CUDA graphs need weights that stay in place, but swap_blocks moves them",
        "use --compile blocks",
    ),
)

_IN_BACKWARD = (
    _row(
        lambda s: s.strategy.optimizer_step == "backward" and s.strategy.gradient_accumulation > 1,
        "optimizer_step backward frees each gradient at once, so none can accumulate",
        "use --gradient-accumulation 1, or --optimizer-step foreach",
    ),
    _row(
        lambda s: s.strategy.optimizer_step == "backward" and s.zero,
        "with {0.strategy.sharding} DeepSpeed runs the optimizer step itself, after backward",
        "use --optimizer-step foreach",
    ),
    _row(
        lambda s: s.strategy.optimizer_step == "backward" and s.strategy.sharding == "ddp",
        "optimizer_step backward steps before ddp has summed the gradients of all GPUs",
        "use --optimizer-step foreach",
    ),
    _row(
        lambda s: s.strategy.optimizer_step == "backward" and s.strategy.offload_optimizer != "none",
        "an optimizer in host RAM steps after backward, not inside it",
        "use --optimizer-step foreach",
    ),
)


def _own_masters(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    """A row of fp32 masters outside DeepSpeed: where they cannot be, or are something else by another name."""
    return _row(lambda s: s.strategy.master_weights == "fp32" and not s.zero and applies(s), reason, fix)


_OPTIMIZER = (
    *_IN_BACKWARD,
    _own_masters(
        lambda s: s.strategy.sharding == "fsdp",
        "fsdp gathers 16 bits from shares of any format: its master_weights are shares in fp32",
        "use --weights-dtype fp32 (full) or --adapter-dtype fp32 (lora)",
    ),
    _own_masters(  # torchao's CPUOffloadOptimizer copies parameters in their own format
        lambda s: s.strategy.offload_optimizer != "none",
        "an optimizer in host RAM keeps weights in the format they have on the GPU, without master_weights",
        "use --weights-dtype fp32, or --zero-stage 2",
    ),
    _own_masters(
        lambda s: s.strategy.optimizer_step == "backward",
        "master_weights are stepped over after backward, not inside it",
        "use --optimizer-step foreach, or --weights-dtype fp32",
    ),
    _row(
        lambda s: s.strategy.optimizer_step == "fused" and s.strategy.optimizer != "adamw",
        "{0.strategy.optimizer} has no fused step",
        "use --optimizer-step foreach, or --optimizer adamw",
    ),
)


def _on_nvme(field: str) -> Callable[[Configuration], bool]:
    return lambda s: getattr(s.strategy, field) == "nvme" and s.strategy.sharding != "zero-3"


def _copies(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    """A row of several copies of a sharded model, which FSDP2 makes alone: a mesh of copies x shards."""
    return _row(lambda s: s.strategy.fsdp_replicas > 1 and applies(s), reason, fix)


_COPIES = (
    _copies(
        lambda s: s.strategy.sharding != "fsdp",
        "fsdp_replicas has no effect with sharding {0.strategy.sharding}",
        "add --sharding fsdp, or leave out --fsdp-replicas",
    ),
    _copies(
        lambda s: s.machine.world % s.strategy.fsdp_replicas != 0,
        "fsdp_replicas {0.strategy.fsdp_replicas} does not divide {0.machine.world} GPU(s)",
        "use --fsdp-replicas {0.fewer_replicas}",
    ),
    _copies(
        lambda s: s.shards == 1,
        "fsdp_replicas {0.strategy.fsdp_replicas} on {0.machine.world} GPUs leaves nothing to shard over",
        "use --sharding ddp, or --fsdp-replicas {0.fewer_replicas}",
    ),
)

# DeepSpeed offloads parameters in stage 3 only, and to NVMe in stage 3 only (its docs, "Parameter offloading").
_OFFLOADING = (
    _row(
        lambda s: s.strategy.offload_params != "none" and s.strategy.sharding not in ("zero-3", "fsdp"),
        "offload_params needs zero-3 or fsdp; with sharding {0.strategy.sharding} the weights are not split",
        "add --sharding zero-3, or use --swap-blocks",
    ),
    *(
        _row(
            _on_nvme(field),
            f"{field} nvme needs zero-3",
            f"add --sharding zero-3, or use --{field.replace('_', '-')} cpu",
        )
        for field in ("offload_optimizer", "offload_gradients", "offload_params")
    ),
    _row(
        lambda s: s.strategy.offload_gradients == "nvme" and s.strategy.offload_optimizer == "cpu",
        "offload_gradients goes where the optimizer is, which is host RAM",
        "add --offload-optimizer nvme",
    ),
    _row(
        lambda s: s.strategy.offload_gradients != "none" and s.strategy.offload_optimizer == "none",
        "offload_gradients needs an offloaded optimizer",
        "add --offload-optimizer cpu, or leave out --offload-gradients",
    ),
    _row(
        lambda s: s.strategy.offload_gradients != "none" and s.strategy.sharding == "ddp",
        "offload_gradients frees each gradient, but ddp keeps them whole in its buckets",
        "leave out --offload-gradients",
    ),
    _row(  # torchao's CPUOffloadOptimizer says the same
        lambda s: s.strategy.offload_gradients != "none" and not s.zero and s.strategy.gradient_accumulation > 1,
        "offload_gradients clears the gradients in every backward, so none can accumulate",
        "leave out --offload-gradients",
    ),
)


def _split_samples(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    """A row of samples split over GPUs, which goes with DDP, or FSDP2 over all GPUs (NVIDIA-NeMo/Automodel#3157,
    verl-project/verl-omni#59: both with diffusers' ``enable_parallelism``)."""
    return _row(lambda s: s.strategy.context_parallel > 1 and applies(s), reason, fix)


_PARALLEL = (
    _row(
        lambda s: s.machine.world % s.strategy.context_parallel != 0,
        "context_parallel {0.strategy.context_parallel} does not divide {0.machine.world} GPU(s)",
        "use --context-parallel {0.divisor}, or --gpus {0.divisible_gpus}",
    ),
    # Autocast leaves queries and keys in fp32 behind torch's RMSNorm and values not, and diffusers' backward of
    # attention runs outside it and refuses the mix (attention_dispatch.py, ``_native_attention_backward_op``).
    _split_samples(
        lambda s: s.strategy.autocast != "none" and s.job.method != "sample",
        "context_parallel under autocast: queries are fp32 but values are not, which no backward kernel supports",
        "use --autocast none, with --{0.trained_flag}-dtype bf16",
    ),
    _split_samples(
        lambda s: s.zero,
        "context_parallel with {0.strategy.sharding}: DeepSpeed splits sequences in its own way, for transformers "
        "models only",
        "use --sharding fsdp",
    ),
    _split_samples(
        lambda s: s.strategy.validation_mode != "off",
        "validation under context_parallel is not estimated yet",
        "use --validation-mode off",
    ),
    _split_samples(
        lambda s: s.strategy.group_offload != "none",
        "group_offload under context_parallel is not estimated yet",
        "use --group-offload none",
    ),
    _row(
        lambda s: (
            s.machine.world > s.strategy.context_parallel and s.strategy.sharding == "none" and s.job.method != "sample"
        ),
        "sharding none on {0.machine.world} GPUs would train that many different models",
        "use --sharding ddp",
    ),
    _row(
        lambda s: s.machine.os == "windows" and s.strategy.expandable_segments,
        "expandable_segments does not exist on native Windows",
        "use --no-expandable-segments, or WSL",
    ),
)

# What DeepSpeed and torch's FSDP2 do themselves. FSDP2 gathers 16 bits from shares of their own format, and its offload
# moves everything.
_ENGINES = (
    _row(
        lambda s: s.splits and s.strategy.validation_mode == "offload",
        "with {0.strategy.sharding} the engine holds the weights, and validation cannot move them",
        "use --validation-mode on",
    ),
    _row(
        lambda s: s.splits and s.strategy.group_offload != "none",
        "with {0.strategy.sharding} the engine holds the weights, and group_offload cannot move them",
        "leave out --group-offload",
    ),
    _row(
        lambda s: s.strategy.ema != "none" and s.strategy.sharding == "zero-3",
        "ema averages whole weights, and with zero-3 no rank has them",
        "use --sharding fsdp, or zero-2",
    ),
    _row(
        lambda s: s.strategy.sharding == "fsdp" and s.strategy.autocast != "none",
        "fsdp casts the weights as it gathers them; autocast would keep a cast copy of every block",
        "use --autocast none",
    ),
    _row(  # bitsandbytes' kernels take plain tensors (bitsandbytes#1633)
        lambda s: s.strategy.sharding == "fsdp" and s.strategy.optimizer == "adamw-8bit",
        "adamw-8bit does not support fsdp's sharded parameters (DTensors)",
        "use --optimizer adamw",
    ),
    _row(
        lambda s: (
            s.strategy.sharding == "fsdp"
            and s.strategy.offload_params != "none"
            and s.strategy.offload_optimizer == "none"
        ),
        "fsdp offloads weights, gradients and optimizer together (CPUOffloadPolicy)",
        "add --offload-optimizer cpu, or leave both out",
    ),
    _row(
        lambda s: (
            s.strategy.sharding == "fsdp"
            and s.strategy.offload_optimizer != "none"
            and s.strategy.offload_params == "none"
        ),
        "fsdp offloads weights, gradients and optimizer together (CPUOffloadPolicy)",
        "add --offload-params cpu, or leave both out",
    ),
)

CONTRADICTIONS = (
    *_METHOD,
    *_SAMPLING,
    *_ADAPTERS,
    *_KINDS_OF_ADAPTERS,
    *_CHECKPOINTING,
    *_SWAPPING,
    *_OPTIMIZER,
    *_OFFLOADING,
    *_PARALLEL,
    *_COPIES,
    *_ENGINES,
)


def refuse_contradictions(configuration: Configuration, *, fetched_again: bool = False) -> None:
    """Raises a ContradictionError for the first contradiction between the records: the fault and the fix.
    ``fetched_again``: whether what swaps brings each weight once more for its backward, so that autograd keeps none."""
    rows = [row for row in CONTRADICTIONS if not (fetched_again and row is _KEPT_FOR_BACKWARD)]
    for reason, fix in refusals(rows, configuration):
        raise ContradictionError(reason, fix)


def contradictions(configuration: Configuration) -> Iterator[Refusal]:
    """Every contradiction between the three records, in the order of the table."""
    return refusals(CONTRADICTIONS, configuration)
