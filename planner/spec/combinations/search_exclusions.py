"""Combinations that a search does not try, though they may run: what is worth no estimate of its own.

A row holds where the search is free to set all of the row's fields; what the user typed is not judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from planner.spec.combinations.combination import Combination
from planner.spec.job import HALF, QUANTISED, SPLIT, Job, Machine


class SearchCandidate(NamedTuple):
    """One combination of values of the searched fields, for one job on one machine: the subject of rows that leave it
    out."""

    job: Job
    machine: Machine
    values: Mapping[str, object]
    """field -> value, of every field that a search of this method sets"""

    def offloads(self, field: str) -> bool:
        """Whether the field `offload_FIELD` (optimizer, gradients, params) is anything but `none`."""
        return self.values[f"offload_{field}"] != "none"

    @property
    def zero(self) -> bool:
        """Whether the sharding is one of DeepSpeed's ZeRO stages."""
        return str(self.values["sharding"]).startswith("zero")

    @property
    def fsdp(self) -> bool:
        """Whether the sharding is FSDP2."""
        return self.values["sharding"] == "fsdp"

    @property
    def half(self) -> bool:
        """Whether the model is in 16 bits throughout, its adapters included."""
        adapter = self.job.method == "full" or self.values["adapter_dtype"] in HALF
        return self.values["weights_dtype"] in HALF and adapter

    @property
    def masters(self) -> bool:
        """Whether the optimizer has an fp32 copy of what is trained."""
        return self.values["master_weights"] == "fp32"

    @property
    def quantised(self) -> bool:
        """Whether the frozen base is stored in 8 or 4 bits."""
        return self.values["weights_dtype"] in QUANTISED

    @property
    def adam_8bit(self) -> bool:
        """Whether the optimizer is 8-bit AdamW."""
        return self.values["optimizer"] == "adamw-8bit"

    @property
    def adafactor(self) -> bool:
        """Whether the optimizer is Adafactor."""
        return self.values["optimizer"] == "adafactor"


def _row(
    fields: tuple[str, ...], applies: Callable[[SearchCandidate], bool], reason: str
) -> Combination[SearchCandidate]:
    return Combination("not worth searching", applies, reason, fields=fields)


_MASTERS = (
    _row(
        ("master_weights",),
        lambda c: c.zero and not c.masters,
        "DeepSpeed trains a module in 16 bits with an fp32 master of its own",
    ),
    _row(  # what trains a part of the weights is not recorded under autocast, so it may have 16 bits and masters
        ("master_weights",),
        lambda c: c.masters and not c.zero and not c.job.trainable,
        "outside DeepSpeed the trained weights are kept in fp32, which needs no master",
    ),
    _row(
        ("weights_dtype", "adapter_dtype"),
        lambda c: c.zero and not c.half,
        "DeepSpeed trains a module in 16 bits",
    ),
)


def _other_than(field: str, plain: str) -> Callable[[SearchCandidate], bool]:
    return lambda c: c.quantised and c.values[field] != plain


# Where billions of weights were rounded, rounding the adapter or its states as well saves megabytes.
_QUANTISED_BASES = (
    _row(
        ("weights_dtype",),
        lambda c: c.quantised and c.values["sharding"] in SPLIT,
        "a quantised base under an engine that splits is not estimated",
    ),
    *(
        _row(
            ("weights_dtype", field),
            _other_than(field, plain),
            f"beside a quantised base another {field} saves only megabytes",
        )
        for field, plain in (("adapter_dtype", "fp32"), ("optimizer", "adamw"), ("optimizer_step", "foreach"))
    ),
)


def _shares_nothing(candidate: SearchCandidate) -> bool:
    """Whether adapters would share their inputs where they make no copies, or not the same numbers, or where that is
    not recorded."""
    values = candidate.values
    if values.get("adapter_inputs") != "shared":
        return False
    sharing = values["adapter_dtype"] == "fp32" and values["autocast"] != "none" and values["weights_dtype"] in HALF
    return not sharing or candidate.job.lora_dropout > 0


_ADAPTERS = (
    _row(("adapter_inputs",), _shares_nothing, "only adapters in fp32 under autocast make copies of their inputs"),
)

_NESTED = (
    _row(
        ("nested_checkpointing",),
        lambda c: bool(c.values.get("nested_checkpointing")) and c.values["gradient_checkpointing"] == "none",
        "only what is recomputed holds a whole block at once",
    ),
    _row(
        ("nested_checkpointing", "adapter_inputs"),
        lambda c: bool(c.values.get("nested_checkpointing")) and c.values["adapter_inputs"] != "shared",
        "to go without copies of inputs costs nothing, and nested checkpoints a forward",
    ),
)

_AUTOCAST = (
    _row(
        ("autocast",),
        lambda c: c.values["autocast"] != "none" and (c.half or c.fsdp),
        "autocast does nothing for a model that is in 16 bits throughout, and FSDP2 casts as it gathers",
    ),
    _row(
        ("autocast",),
        lambda c: c.values["autocast"] == "none" and not (c.half or c.fsdp),
        "without autocast what is stored in fp32 computes in fp32",
    ),
)

_ADAM_8BIT = (
    _row(("optimizer",), lambda c: c.adam_8bit and c.offloads("optimizer"), "8-bit AdamW has no CPU kernel"),
    _row(("optimizer",), lambda c: c.adam_8bit and c.zero, "over DeepSpeed's flat shares 8-bit states lose more"),
    _row(("optimizer",), lambda c: c.adam_8bit and c.fsdp, "8-bit AdamW does not run over FSDP2's shares"),
)

_ADAFACTOR = (
    _row(
        ("optimizer", "optimizer_step"),
        lambda c: c.adafactor and c.values["optimizer_step"] == "foreach",
        "behind backward, beside all gradients, 8-bit AdamW is what people take",
    ),
    _row(("optimizer",), lambda c: c.adafactor and c.fsdp, "a share of a matrix has not all its rows"),
)

_OFFLOADING = (
    _row(
        ("optimizer_step",),
        lambda c: c.values["optimizer_step"] != "foreach" and c.offloads("optimizer"),
        "the kernels of another step are the GPU's, and the optimizer is in host RAM",
    ),
    _row(
        ("sharding",),
        lambda c: c.fsdp and c.offloads("params") != c.offloads("optimizer"),
        "FSDP2 offloads weights, gradients and optimizer together",
    ),
    _row(
        ("sharding",),
        lambda c: c.machine.world == 1 and c.values["sharding"] == "zero-3" and not c.offloads("params"),
        "one GPU has nobody to split with: of ZeRO-3 only the offload of weights is new",
    ),
    _row(
        ("offload_gradients",),
        lambda c: c.offloads("gradients") and c.values["sharding"] in ("ddp", "zero-1"),
        "gradients stay whole until all GPUs have summed them",
    ),
    _row(
        ("offload_gradients",),
        lambda c: c.offloads("gradients") and c.fsdp,
        "FSDP2's offload moves gradients anyway",
    ),
    _row(
        ("offload_params",),
        lambda c: c.job.method == "full" and c.offloads("params") and not c.offloads("optimizer"),
        "in full training the optimizer's states are larger than the weights, and go first",
    ),
)

_COPIES = (
    _row(("fsdp_replicas",), lambda c: c.values["fsdp_replicas"] != 1 and not c.fsdp, "only FSDP2 shards copies"),
)

TRAINING_EXCLUSIONS = (
    *(*_MASTERS, *_QUANTISED_BASES, *_ADAPTERS, *_NESTED),
    *(*_AUTOCAST, *_ADAM_8BIT, *_ADAFACTOR, *_OFFLOADING, *_COPIES),
)

SAMPLING_EXCLUSIONS = (
    _row(
        ("group_offload_stream",),
        lambda c: bool(c.values["group_offload_stream"]) and c.values["group_offload"] == "none",
        "without group_offload there is no next group to fetch",
    ),
    _row(
        ("vae",),
        lambda c: c.values["group_offload"] != "none" and c.values["vae"] == "swapped",
        "with group_offload the model has left already when the VAE comes",
    ),
)


def exclusions(job: Job, fixed: Collection[str]) -> tuple[Combination[SearchCandidate], ...]:
    """The rows that a search for this job applies, where the user typed the `fixed` fields."""
    rows = SAMPLING_EXCLUSIONS if job.method == "sample" else TRAINING_EXCLUSIONS
    return tuple(row for row in rows if not any(field in fixed for field in row.fields))
