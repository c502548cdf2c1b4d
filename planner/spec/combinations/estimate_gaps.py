"""Strategies that contradict nothing and still get no answer, because no recording or memory term covers them yet.

A search leaves them out; who types one is told.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.schema import refused_values
from planner.spec.combinations.combination import Combination
from planner.spec.configuration import Configuration
from planner.spec.job import QUANTISED, Strategy


def _row(applies: Callable[[Configuration], bool], reason: str, fix: str) -> Combination[Configuration]:
    return Combination("not estimated", applies, reason, fix)


_UNPRICED_ATTENTION = refused_values(Strategy, "attention") - {"math", "flash-3"}
"""Of these two the layout knows whose they are priced of (`planner.layout.unpriced.refuse_attention_of_others`)."""

# A quantised base under an engine that splits: what cannot be, and what only is not recorded. FSDP2 hands out plain
# parameters in place of bitsandbytes' and torchao's, whose constants are gone then (bitsandbytes#1945, accelerate#3983;
# torchao's Int8Tensor has no ``fsdp_pre_all_gather``), and layerwise casting puts other data in a parameter than the
# share FSDP2 knows. DeepSpeed's stages 1 and 2 leave the base whole, stage 3 splits it where ``bnb_4bit_quant_storage``
# is bf16 (peft, docs/source/accelerate/deepspeed.md).
_SPLIT_BASES = (
    _row(
        lambda s: s.weights in QUANTISED and s.strategy.sharding == "fsdp",
        "fsdp splits parameters without the constants or hooks that turn {0.weights} back into numbers",
        "use --sharding ddp, or --weights-dtype bf16",
    ),
    _row(
        lambda s: s.weights == "nf4" and s.strategy.sharding == "zero-3",
        "a base in nf4 under zero-3, split as numbers of 16 bits that hold four each, is not estimated",
        "use --weights-dtype bf16, or --sharding ddp",
    ),
    _row(
        lambda s: s.weights in QUANTISED and s.strategy.sharding == "zero-3",
        "a base in {0.weights} under zero-3 is not estimated",
        "use --weights-dtype bf16, or --sharding ddp",
    ),
    _row(
        lambda s: s.weights in QUANTISED and s.splits,
        "a base in {0.weights} under {0.strategy.sharding} is not estimated, and {0.strategy.sharding} splits next to "
        "nothing of an adapter",
        "use --sharding ddp",
    ),
)


def _on_host(*optimizers: str, zero: bool = False, split: bool = False) -> Callable[[Configuration], bool]:
    """Whether one of these optimizers steps in host RAM, under DeepSpeed (``zero``), an engine that splits
    (``split``), or any."""

    def applies(configuration: Configuration) -> bool:
        strategy = configuration.strategy
        offloaded = strategy.offload_optimizer != "none" and strategy.optimizer in optimizers
        return offloaded and (configuration.zero or not zero) and (configuration.splits or not split)

    return applies


_GPU_ONLY = ("adamw-8bit", "adamw-8bit-paged")


def _host_row(applies: Callable[[Configuration], bool], why: str) -> Combination[Configuration]:
    return _row(
        applies,
        "{0.strategy.optimizer} " + why + ", so offload_optimizer cannot take it",
        "use --optimizer {0.host_optimizers}",
    )


# Optimizers that nobody's step in host RAM knows: DeepSpeed has CPU kernels for AdamW and Lion (deepspeed/ops), torchao
# and FSDP2 run an optimizer's own Python there, one parameter at a time.
_IN_HOST_RAM = (
    _host_row(_on_host("prodigy"), "finds one rate over all parameters, and in host RAM each is stepped alone"),
    _host_row(_on_host("muon"), "is two optimizers, one for what is no matrix, and in host RAM all are stepped by one"),
    _host_row(_on_host("adafactor", zero=True), "has no CPU kernel in DeepSpeed"),
    _host_row(_on_host("came", split=True), "has no CPU kernel in DeepSpeed, and over fsdp's shares no row is whole"),
    _host_row(_on_host(*_GPU_ONLY), "uses bitsandbytes kernels, which run on the GPU only"),
    _host_row(
        lambda s: _on_host("lion")(s) and not s.zero,
        "uses bitsandbytes kernels, which run on the GPU only",
    ),
)

ESTIMATE_GAPS = (
    _row(
        lambda s: s.strategy.attention in _UNPRICED_ATTENTION,
        "attention {0.strategy.attention} is not estimated yet",
        "use --attention sdpa",
    ),
    *_SPLIT_BASES,
    _row(
        lambda s: s.strategy.nested_checkpointing and s.strategy.gradient_checkpointing == "partial",
        "nested_checkpointing of the first blocks only is not estimated",
        "use --gradient-checkpointing full",
    ),
    _row(
        lambda s: s.strategy.nested_checkpointing and (s.splits or s.strategy.context_parallel > 1),
        "nested_checkpointing of a model that is split between GPUs is not estimated",
        "leave out --nested-checkpointing",
    ),
    _row(
        lambda s: s.both_experts and s.splits,
        "both experts under {0.strategy.sharding} are not estimated yet",
        "use --experts high",
    ),
    _row(
        lambda s: s.both_experts and s.strategy.gradient_accumulation > 1 and s.strategy.master_weights == "fp32",
        "gradient_accumulation with master_weights over both experts is not estimated yet",
        "use --gradient-accumulation 1, or --experts high",
    ),
    _row(  # SimpleTuner, documentation/quickstart/KREA2.md: 20.4 -> 58.7 GiB
        lambda s: s.strategy.compile == "cudagraphs",
        "compile cudagraphs keeps its own memory pools, 10 to 38 GiB where measured; no recording shows them",
        "use --compile blocks, or none",
    ),
    _row(
        lambda s: bool(s.job.trainable) and s.autocasts,
        "trainable under autocast: it keeps the casts of what is trained only, and no recording shows which",
        "add --autocast none --weights-dtype bf16 --master-weights fp32",
    ),
    _row(
        lambda s: bool(s.job.trainable) and s.strategy.swap_blocks > 0,
        "trainable with swap_blocks is not estimated yet",
        "use --swap-blocks 0",
    ),
    *_IN_HOST_RAM,
    _row(
        lambda s: (
            s.splits and s.strategy.offload_optimizer == "none" and s.strategy.optimizer not in ("adamw", "adamw-8bit")
        ),
        "{0.strategy.optimizer} under {0.strategy.sharding} is not estimated yet",
        "use --optimizer adamw",
    ),
)
