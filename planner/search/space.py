"""Which strategies a job allows: everything that a search may set, less what the user fixed and what contradicts.

Only what changes the answer is enumerated: strategies for which a recording and a transformation exist. How many blocks
to swap is left out, because there are as many answers as blocks: `most_swapped` says how far a search may go.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import shapeless
from planner.errors import ContradictionError
from planner.search.question import Question
from planner.spec.combinations.contradictions import contradictions
from planner.spec.combinations.search_exclusions import SearchCandidate, exclusions
from planner.spec.configuration import Configuration
from planner.spec.job import NOTES, Job, Machine, Method, Strategy
from planner.spec.rules import ResolvedStrategy, resolve


class Space:
    """The strategies that one question allows, kept for each job it is asked about."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._strategies: dict[tuple[Job, bool], dict[ResolvedStrategy, bool]] = {}
        self._baselines: dict[Job, ResolvedStrategy] = {}

    def baseline(self, job: Job) -> ResolvedStrategy:
        """The strategy with nothing switched on but what the user typed."""
        if job not in self._baselines:
            question = self.question
            self._baselines[job] = baseline(job, question.strategy, question.machine, question.fixed)
        return self._baselines[job]

    def strategies(self, job: Job, tiled: bool) -> dict[ResolvedStrategy, bool]:
        """Strategy -> whether it is lossy, of all that nothing forbids. ``tiled``: as for `strategies`."""
        if (job, tiled) not in self._strategies:
            question = self.question
            asked = job, question.strategy, question.machine, question.fixed
            allowed = strategies(*asked, tiled, question.last_resort)
            self._strategies[job, tiled] = {strategy: bool(strategy.lossy_fields(job)) for strategy in allowed}
        return self._strategies[job, tiled]

    def most_swapped(self, job: Job, strategy: ResolvedStrategy) -> int:
        """The most blocks that may be swapped under a strategy; 0 where the user typed how many, or none can be."""
        return most_swapped(job, strategy, self.question.model, self.question.fixed)


def _in_turn(*methods: Method) -> tuple[str, ...]:
    searched = {
        field: note.searched.turn
        for field, note in NOTES.items()
        if note.searched and any(note.searched.values(method) is not None for method in methods)
    }
    return tuple(sorted(searched, key=searched.__getitem__))


SEARCHED = _in_turn("lora", "full")
"""Fields a search sets, in the order in which they can be switched on one after the other."""

SAMPLED = _in_turn("sample")
"""The same where a job only samples."""


def searched(method: Method) -> tuple[str, ...]:
    """The names of the strategy fields that a search for a method sets."""
    return SAMPLED if method == "sample" else SEARCHED


def typed_only(method: Method, strategy: Strategy, fixed: Collection[str]) -> Strategy:
    """What a search starts from: the strategy without the searched fields that the user did not type himself."""
    left_out = set(searched(method)) - set(fixed)
    if "gradient_checkpointing" in left_out and "checkpointed_blocks" not in fixed:
        left_out.add("checkpointed_blocks")  # it says how many of `partial`
    return Strategy.read({name: getattr(strategy, name) for name in strategy.model_fields_set - left_out})


def baseline(job: Job, strategy: Strategy, machine: Machine, fixed: Collection[str]) -> ResolvedStrategy:
    """The strategy with nothing switched on but what the user typed."""
    return resolve(job, typed_only(job.method, strategy, fixed), machine)


def strategies(
    job: Job,
    strategy: Strategy,
    machine: Machine,
    fixed: Collection[str],
    tiled: bool = False,
    last_resort: bool = False,
) -> tuple[ResolvedStrategy, ...]:
    """Every strategy the job allows, without block swap unless it was typed, lossy ones included.

    ``tiled``: the VAE cannot encode or decode the clip as a whole on this card. ``last_resort``: with what is for where
    nothing else fits. Raises a ContradictionError where what the user fixed leaves nothing.
    """
    # What makes sense together is the same for most models and cards: an answer about all of them asks it once.
    any_card = Machine(gpu="any", gpus=machine.gpus, nodes=machine.nodes, os=machine.os)
    any_model = shapeless(job).replace(model="any")
    said = frozenset(strategy.model_fields_set)  # strategies are equal whatever of them was said
    listed = choices(any_model, strategy, said, any_card, frozenset(fixed), tiled, last_resort)
    return uncontradicted(job, machine, listed)


@functools.lru_cache(maxsize=32)
def choices(
    job: Job,
    strategy: Strategy,
    said: frozenset[str],
    machine: Machine,
    fixed: frozenset[str],
    tiled: bool,
    last_resort: bool,
) -> tuple[ResolvedStrategy, ...]:
    """Combinations of the searched fields that make sense together, as strategies; some may contradict the job, and
    some come again. ``job`` and ``machine`` are of any model and card. ``said``: the strategy's fields that are set."""
    assert said == strategy.model_fields_set
    base = typed_only(job.method, strategy, fixed)
    axes = _axes(job, machine, tiled, last_resort)
    return tuple(resolve(job, base.replace(**choice), machine) for choice in _choices(job, base, machine, fixed, axes))


def uncontradicted(job: Job, machine: Machine, listed: Collection[ResolvedStrategy]) -> tuple[ResolvedStrategy, ...]:
    """Those of the listed strategies that nothing contradicts. A ContradictionError where that leaves none of some."""
    found: dict[ResolvedStrategy, None] = {}
    refused: list[ResolvedStrategy] = []
    for candidate in listed:
        if candidate in found:
            continue
        if next(contradictions(Configuration(job, candidate, machine)), None):
            refused.append(candidate)
        else:
            found[candidate] = None
    if refused and not found:  # what speaks against all of it is the user's own, the rest comes of the search
        against = [fault for candidate in refused for fault in contradictions(Configuration(job, candidate, machine))]
        often = Counter(fix for _, fix in against).most_common(1)[0][0]
        raise ContradictionError(*next(fault for fault in against if fault[1] == often))
    return tuple(found)


def most_swapped(job: Job, strategy: Strategy, model: ModelProfile, fixed: Collection[str]) -> int:
    """The most blocks that a search may swap under a strategy; 0 when the user said how many, or nothing may swap."""
    if "swap_blocks" in fixed or strategy.gradient_checkpointing == "none":
        return 0
    if job.method == "sample" or (job.method == "full" and strategy.optimizer_step != "backward"):
        return 0
    if strategy.sharding in ("zero-3", "fsdp") or strategy.compile == "cudagraphs" or model.traits.stages:
        return 0
    if strategy.gradient_checkpointing == "partial":  # blocks that a search checkpoints in part are not swapped
        return min(model.blocks - 1, strategy.checkpointed_blocks or 0) if "gradient_checkpointing" in fixed else 0
    return model.blocks - 1


def switched(before: Strategy, after: Strategy) -> tuple[str, ...]:
    """The searched fields in which two strategies differ, in the order in which they can be switched."""
    fields = dict.fromkeys((*SEARCHED, *SAMPLED))
    return tuple(field for field in fields if getattr(before, field) != getattr(after, field))


def at_the_end(strategy: ResolvedStrategy) -> ResolvedStrategy:
    """The strategy that stands for all that step behind backward, which need the same outside of the step itself."""
    return strategy if strategy.optimizer_step == "backward" else strategy.replace(optimizer_step="foreach")


def effort(before: Strategy, after: Strategy) -> int:
    """How much is switched on: one for each field, one more for each that leans on host RAM, so that of two plans as
    fast as each other the plainer one wins. By leaf there are hundreds of groups to wait for, by block some dozens."""
    fields, heavier = switched(before, after), ("offload", "cpu", "leaf")
    return len(fields) + sum(getattr(after, field) in heavier or field == "swap_blocks" for field in fields)


def _choices(
    job: Job, base: Strategy, machine: Machine, fixed: Collection[str], axes: dict[str, tuple[object, ...]]
) -> Iterator[dict[str, object]]:
    """Combinations of the searched fields that make sense together, as fields to replace. ``axes``: as for `_axes`."""
    excluded = [row.applies for row in exclusions(job, fixed)]
    if base.compute_dtype == "fp16":
        axes.update(_in_fp16(job, axes))
    axes.update({field: (getattr(base, field),) for field in axes if field in fixed})
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        choice = SearchCandidate(job, machine, values)
        for applies in excluded:  # plain loops: there are thousands of combinations
            if applies(choice):
                break
        else:
            yield values


def _axes(job: Job, machine: Machine, tiled: bool, last_resort: bool) -> dict[str, tuple[object, ...]]:
    """Field -> the values to try, where nothing is typed. How many blocks are swapped is not among them."""
    by_question: dict[str, tuple[object, ...]] = {
        "vae_tiling": (tiled,),
        "sharding": _shardings(job, machine),
        "fsdp_replicas": _replicas(machine),
    }
    if job.experts == "both":
        by_question["inactive_expert"] = ("gpu", "cpu") if job.method == "lora" else ("gpu",)
    fields = searched(job.method)
    axes: dict[str, tuple[object, ...]] = {}
    for field in (*(one for one in _OUTERMOST if one in fields), *(one for one in fields if one not in _OUTERMOST)):
        mark = NOTES[field].searched
        values = (mark.values(job.method, last_resort) if mark else None) or by_question.get(field, ())
        if values:
            axes[field] = values
    return axes


def _in_fp16(job: Job, axes: Mapping[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """The axes of dtypes where 16 bits are fp16. What is trained stays in fp32, or its gradients could not be scaled
    (`planner.spec.fp16`)."""
    trained = "weights_dtype" if job.method == "full" else "adapter_dtype"
    return {
        field: tuple(
            "fp16" if value == "bf16" else value for value in axes[field] if (field, value) != (trained, "bf16")
        )
        for field in ("weights_dtype", "adapter_dtype", "autocast")
        if field in axes
    }


_OUTERMOST = (
    "vae_tiling",
    "weights_dtype",
    "autocast",
    "adapter_dtype",
    "master_weights",
    "gradient_checkpointing",
    "optimizer",
    "optimizer_step",
)
"""The fields that vary slowest in the enumeration. Of plans that are equally good the one enumerated first wins, so the
order is part of the answer."""


def _shardings(job: Job, machine: Machine) -> tuple[str, ...]:
    """What may be split. The states of an adapter are too small to be worth it; its frozen base is not (zero-3). Of
    two experts nothing is, see `planner.layout.unpriced.refuse_unpriced`."""
    if machine.world == 1:
        return ("none", "zero-3") if job.method == "full" and job.experts != "both" else ("none",)
    if job.experts == "both":
        return ("ddp",)
    return ("ddp", "zero-3", "fsdp") if job.method == "lora" else ("ddp", "zero-1", "zero-2", "zero-3", "fsdp")


def _replicas(machine: Machine) -> tuple[int, ...]:
    """How many copies FSDP2 may shard: one, or so many that each has whole nodes. Inside a node all links are alike,
    and a second copy only takes memory."""
    return tuple(count for count in range(1, machine.nodes + 1) if machine.nodes % count == 0)
