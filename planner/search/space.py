"""Which strategies a job allows: everything that a search may set, less what the user fixed and what contradicts.

Only what changes the answer is enumerated: strategies for which a recording and a transformation exist. How many blocks
to swap is left out, because there are as many answers as blocks: `most_swapped` says how far a search may go.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator

from planner.catalog.profiles import ModelProfile
from planner.errors import ContradictionError
from planner.spec.job import QUANTISED, SPLIT, Job, Machine, Method, Strategy
from planner.spec.rules import contradictions, resolve
from planner.tape.variants import HALF

BASES = ("int8", "fp8", "nf4")
"""Formats a search may store a frozen base in, each recorded under autocast with an fp32 adapter."""

SEARCHED = (
    "vae_tiling",
    "gradient_checkpointing",
    "sharding",
    "weights_dtype",
    "autocast",
    "adapter_dtype",
    "master_weights",
    "optimizer",
    "optimizer_step",
    "offload_optimizer",
    "offload_gradients",
    "offload_params",
    "inactive_expert",
    "swap_blocks",
)
"""Fields a search sets, in the order in which they can be switched on one after the other."""


SAMPLED = ("vae_tiling", "vae", "group_offload", "group_offload_stream")
"""The same where a job only samples."""


def searched(method: Method) -> tuple[str, ...]:
    """The fields that a search for a method sets."""
    return SAMPLED if method == "sample" else SEARCHED


def typed_only(method: Method, strategy: Strategy, fixed: Collection[str]) -> Strategy:
    """What a search starts from: the strategy without the searched fields that the user did not type himself."""
    left_out = set(searched(method)) - set(fixed)
    if "gradient_checkpointing" in left_out and "checkpointed_blocks" not in fixed:
        left_out.add("checkpointed_blocks")  # it says how many of `partial`
    return Strategy.read({name: getattr(strategy, name) for name in strategy.model_fields_set - left_out})


def baseline(job: Job, strategy: Strategy, machine: Machine, fixed: Collection[str]) -> Strategy:
    """The strategy with nothing switched on but what the user typed."""
    return resolve(job, typed_only(job.method, strategy, fixed), machine)


def strategies(
    job: Job, strategy: Strategy, machine: Machine, fixed: Collection[str], tiled: bool = False
) -> tuple[Strategy, ...]:
    """Every strategy the job allows, without block swap unless it was typed, lossy ones included.

    ``tiled``: the VAE cannot encode the clip as a whole on this card. Raises a ContradictionError where what the user
    fixed leaves nothing.
    """
    base = typed_only(job.method, strategy, fixed)
    choices = (resolve(job, base.replace(**choice), machine) for choice in _choices(job, base, machine, fixed, tiled))
    found: dict[Strategy, None] = {}
    refused: list[Strategy] = []
    for candidate in choices:
        if next(contradictions(job, candidate, machine), None):
            refused.append(candidate)
        else:
            found[candidate] = None
    if refused and not found:  # what speaks against all of it is the user's own, the rest comes of the search
        against = [fault for candidate in refused for fault in contradictions(job, candidate, machine)]
        often = Counter(fix for _, fix in against).most_common(1)[0][0]
        raise ContradictionError(*next(fault for fault in against if fault[1] == often))
    return tuple(found)


def most_swapped(job: Job, strategy: Strategy, model: ModelProfile, fixed: Collection[str]) -> int:
    """The most blocks that a search may swap under a strategy; 0 when the user said how many, or nothing may swap."""
    if "swap_blocks" in fixed or job.method != "lora" or strategy.gradient_checkpointing == "none":
        return 0
    if job.experts == "both" and strategy.inactive_expert == "gpu":
        return 0
    if strategy.sharding in ("zero-3", "fsdp") or strategy.compile == "cudagraphs" or model.traits.stages:
        return 0
    if strategy.gradient_checkpointing == "partial":
        return min(model.blocks - 1, strategy.checkpointed_blocks or 0)
    return model.blocks - 1


def switched(before: Strategy, after: Strategy) -> tuple[str, ...]:
    """The searched fields in which two strategies differ, in the order in which they can be switched."""
    fields = dict.fromkeys((*SEARCHED, *SAMPLED))
    return tuple(field for field in fields if getattr(before, field) != getattr(after, field))


def effort(before: Strategy, after: Strategy) -> int:
    """How much is switched on: one for each field, one more for each that leans on host RAM, so that of two plans as
    fast as each other the plainer one wins. By leaf there are hundreds of groups to wait for, by block some dozens."""
    fields, heavier = switched(before, after), ("offload", "cpu", "leaf")
    return len(fields) + sum(getattr(after, field) in heavier or field == "swap_blocks" for field in fields)


def _choices(
    job: Job, base: Strategy, machine: Machine, fixed: Collection[str], tiled: bool
) -> Iterator[dict[str, object]]:
    """Combinations of the searched fields that make sense together, as fields to replace."""
    if job.method == "sample":
        yield from _sampling_choices(base, fixed)
        return
    axes: dict[str, tuple[object, ...]] = {
        "vae_tiling": (tiled,),
        "weights_dtype": ("fp32", "bf16") if job.method == "full" else (base.weights(job.method), *BASES),
        "autocast": ("bf16", "none"),
        "adapter_dtype": ("fp32", "bf16") if job.method == "lora" else (base.adapter_dtype,),
        "master_weights": ("none", "fp32"),
        "gradient_checkpointing": ("none", "full", "offload"),
        "optimizer": ("adamw", "adamw-8bit"),
        "optimizer_step": ("foreach", "fused"),
        "sharding": _shardings(job, machine),
        **_offloads(job),
    }
    if job.experts == "both":
        axes["inactive_expert"] = ("gpu", "cpu") if job.method == "lora" else ("gpu",)
    axes.update({field: (getattr(base, field),) for field in axes if field in fixed})
    for values in itertools.product(*axes.values()):
        choice = dict(zip(axes, values, strict=True))
        if _sensible(job, choice, machine, fixed):
            yield choice


def _sampling_choices(base: Strategy, fixed: Collection[str]) -> Iterator[dict[str, object]]:
    """Ways to sample: tiles or not, the VAE beside the model or in its place, the model's weights in turn."""
    axes: dict[str, tuple[object, ...]] = {
        "vae_tiling": (False, True),
        "vae": ("cached", "swapped"),
        "group_offload": ("none", "block", "leaf"),
        "group_offload_stream": (False, True),
    }
    axes.update({field: (getattr(base, field),) for field in axes if field in fixed})
    for values in itertools.product(*axes.values()):
        choice = dict(zip(axes, values, strict=True))
        offloads = choice["group_offload"] != "none"
        if choice["group_offload_stream"] and not offloads and "group_offload_stream" not in fixed:
            continue
        if offloads and choice["vae"] == "swapped" and "vae" not in fixed:
            continue  # the model has left already
        yield choice


def _shardings(job: Job, machine: Machine) -> tuple[str, ...]:
    """What may be split. The states of an adapter are too small to be worth it; its frozen base is not (zero-3). Of
    two experts nothing is, see `planner.layout.unpriced.refuse_unpriced`."""
    if machine.world == 1:
        return ("none", "zero-3") if job.method == "full" and job.experts != "both" else ("none",)
    if job.experts == "both":
        return ("ddp",)
    return ("ddp", "zero-3", "fsdp") if job.method == "lora" else ("ddp", "zero-1", "zero-2", "zero-3", "fsdp")


def _offloads(job: Job) -> dict[str, tuple[object, ...]]:
    """What may go to host RAM. What an adapter's optimizer holds is small enough to stay."""
    either = ("none", "cpu")
    states: tuple[object, ...] = either if job.method == "full" else ("none",)
    return {"offload_optimizer": states, "offload_gradients": states, "offload_params": either}


def _sensible(job: Job, choice: dict[str, object], machine: Machine, fixed: Collection[str]) -> bool:
    """Whether a combination is worth asking about. What the user typed stays: `rules.check` judges that."""

    def free(field: str) -> bool:
        return field not in fixed

    whole = job.method == "full"
    sharding, offloaded = str(choice["sharding"]), choice["offload_optimizer"] != "none"
    deepspeed = sharding.startswith("zero")
    half = choice["weights_dtype"] in HALF and (whole or choice["adapter_dtype"] in HALF)
    # DeepSpeed trains a module in 16 bits with an fp32 master of its own; a search keeps fp32 weights elsewhere, but
    # where a part of them is trained: that is not recorded under autocast.
    masters = choice["master_weights"] == "fp32"
    if free("master_weights") and masters != deepspeed and not (masters and job.trainable):
        return False
    if deepspeed and not half and free("weights_dtype") and free("adapter_dtype"):
        return False
    quantised = choice["weights_dtype"] in QUANTISED and free("weights_dtype")
    if quantised and not _worth_quantising(choice, sharding in SPLIT, fixed):
        return False
    if choice["optimizer_step"] != "foreach" and free("optimizer_step") and offloaded:
        return False  # the kernels that step are the GPU's
    fsdp = sharding == "fsdp"
    if fsdp and free("sharding") and ((choice["offload_params"] != "none") != offloaded):
        return False  # its offload moves everything
    if free("autocast") and (choice["autocast"] == "none") != (half or fsdp):
        return False  # autocast does nothing for a model that is half precision throughout
    if choice["optimizer"] == "adamw-8bit" and free("optimizer") and (offloaded or deepspeed or fsdp):
        return False  # over a flat share it loses more, over FSDP2's it does not run, and nobody has it for the CPU
    if machine.world == 1 and sharding == "zero-3" and free("sharding") and choice["offload_params"] == "none":
        return False  # one GPU has nothing to split with: only the offload of weights is new
    if choice["offload_gradients"] != "none" and free("offload_gradients") and sharding in ("ddp", "zero-1", "fsdp"):
        return False  # whole until all GPUs have summed them; FSDP2's offload moves them anyway
    return not (choice["offload_params"] != "none" and free("offload_params") and whole and not offloaded)


def _worth_quantising(choice: dict[str, object], deepspeed: bool, fixed: Collection[str]) -> bool:
    """Whether a quantised base is worth asking about with the rest of a choice.

    DeepSpeed's is in 16 bits; and where billions of weights were rounded, rounding the adapter or its states as well
    saves megabytes.
    """
    plain = {"adapter_dtype": "fp32", "optimizer": "adamw", "optimizer_step": "foreach"}
    return not deepspeed and all(choice[field] == value for field, value in plain.items() if field not in fixed)
