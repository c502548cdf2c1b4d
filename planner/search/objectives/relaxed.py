"""Where nothing fits: each single wish whose relaxing is enough, and what is left of it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator

from planner.catalog.shapes import grid
from planner.errors import ContradictionError
from planner.layout.sharding import context_parallel
from planner.search.objectives.largest import largest_by_any_plan, takeable
from planner.search.objectives.objective import batch, frames, rank, smaller_sizes, words
from planner.search.objectives.reach import anchors
from planner.search.question import Relaxed
from planner.search.search import Search
from planner.search.space import searched
from planner.spec.job import Job
from planner.spec.plan import Estimate
from planner.units import GIB


def relaxed(search: Search, job: Job) -> tuple[Relaxed, ...]:
    """For a job that nothing fits: every single wish whose relaxing is enough, with the most that is left of it.

    Host RAM and GPUs that share a sample stand first, because they keep the clip as it was asked for.
    """
    model, answers = search.question.model, [*more_ram(search, job), *shared_samples(search, job)]
    objectives = [frames(model), smaller_sizes(model, job), batch(model)]
    objectives += [rank(model)] if job.trains in ("lora", "dora") else []
    for objective in objectives if not job.buckets else ():
        values = takeable(search, job, objective, objective.below(job))
        plans = (largest_by_any_plan(search, job, objective, values, lossy) for lossy in (False, True))
        if plan := next((plan for plan in plans if plan), None):
            before, after = objective.read(job), objective.read(plan.job)
            answers.append(Relaxed(objective.name, words(before), words(after), plan))
    if job.method == "full" and not job.trainable:
        adapters, plan = job.replace(method="lora"), None
        with contextlib.suppress(ContradictionError):  # what was typed is for full training
            plan = next(search.by_speed(adapters, False), None) or next(search.by_speed(adapters, True), None)
        if plan is not None:
            answers.append(Relaxed("method", "full", "lora", plan))
    return (*one_gpu(search, job, lossy=True), *answers, *_untyped(search, job))


def least(search: Search, job: Job) -> Estimate | None:
    """For a job that no single wish makes fit: with the smallest size and batch the longest clip that does, or else,
    with the shortest clip, the plan that needs least. None where the shapes are given, or the job is that already."""
    if job.buckets:
        return None
    model, smallest = search.question.model, job
    for objective in (smaller_sizes(model, job), batch(model)):
        values = takeable(search, smallest, objective, objective.below(smallest))
        smallest = objective.put(smallest, values[0]) if values else smallest
    clips = frames(model)
    shorter = takeable(search, smallest, clips, clips.below(smallest))
    for lossy in (False, True):
        if plan := largest_by_any_plan(search, smallest, clips, shorter, lossy):
            return plan
    smallest = clips.put(smallest, shorter[0]) if shorter else smallest
    return None if smallest == job else search.tightest(smallest)


def shared_samples(search: Search, job: Job) -> Iterator[Relaxed]:
    """The fewest GPUs that have to share each sample (context parallelism) for the job to fit without lossy options: it
    keeps the clip, and a step then has fewer samples."""
    question = search.question
    world = question.machine.world
    if question.strategy.context_parallel > 1 or "context_parallel" in question.fixed or job.buckets:
        return
    for parts in (count for count in range(2, world + 1) if not world % count):
        if not context_parallel.divides(question.model, grid(question.model, job), parts):
            continue
        strategy = question.strategy.replace(context_parallel=parts)
        shared = search.about(question._replace(strategy=strategy, fixed=question.fixed | {"context_parallel"}))
        with contextlib.suppress(ContradictionError):  # what was typed does not go with it
            for anchor in anchors(shared, [job], _kind(shared, job)):
                plan = shared.try_estimate(job, shared.most_in_ram(job, anchor))
                if plan is not None and plan.verdict == "fits":
                    yield Relaxed("context_parallel", 1, parts, plan)
                    return


def one_gpu(search: Search, job: Job, lossy: bool = False) -> Iterator[Relaxed]:
    """One GPU of several, where the job fits on one without lossy options, or ``lossy`` with some: several hold DDP's
    buckets too, and share the host's RAM."""
    question = search.question
    if question.machine.world == 1 or question.strategy.context_parallel > 1:
        return
    alone = search.about(question._replace(machine=question.machine.replace(gpus=1, nodes=1)))
    with contextlib.suppress(ContradictionError):  # what was typed splits the model
        kinds = (_kind(alone, job), True) if lossy else (_kind(alone, job),)
        plans = (next(alone.by_speed(job, kind), None) for kind in kinds)
        if plan := next((plan for plan in plans if plan), None):
            yield Relaxed("gpus", question.machine.world, 1, plan)


def more_ram(search: Search, job: Job) -> Iterator[Relaxed]:
    """The host RAM with which the job would fit as it is, in whole GiB: for the fastest lossless plan, and for a lossy
    one where that needs less."""
    question = search.question
    if question.machine.host_ram is None:
        return
    machine, least = question.machine.replace(host_ram=2**50), math.inf
    richer = search.about(question._replace(machine=machine))
    for lossy in (None,) if _kind(richer, job) is None or question.allow_lossy else (False, True):
        plan = _least_ram(search, richer, job, lossy)
        need = -(-plan.host_ram_bytes // GIB) if plan else math.inf
        if plan is not None and question.machine.host_ram < need * GIB and need < least:
            plan = plan.replace(machine=machine.replace(host_ram=need * GIB))
            yield Relaxed("host_ram", f"{question.machine.host_ram / GIB:.0f}GiB", f"{need}GiB", plan)
            least = need


def _least_ram(search: Search, richer: Search, job: Job, lossy: bool | None) -> Estimate | None:
    """The fastest plan of a kind that fits where RAM is plenty, or the tightest one where that needs less RAM; of the
    few ways to sample, the one that needs least."""
    plans = richer.by_speed(job, lossy)
    found = list(plans if job.method == "sample" else itertools.islice(plans, 1))
    tightest = search.tightest(job, lossy, flushes=False)
    if tightest is not None and tightest.limit == "host":
        there = richer.estimate(job, tightest.configuration.strategy)
        found += [there] if there.verdict == "fits" else []
    return min(found, key=lambda plan: plan.host_ram_bytes, default=None)


def _untyped(search: Search, job: Job) -> Iterator[Relaxed]:
    """Switches that the user typed and that stand in the way, each alone."""
    question = search.question
    for field in (field for field in searched(job.method) if field in question.fixed):
        freed = {field, "checkpointed_blocks"} if field == "gradient_checkpointing" else {field}
        freer = search.about(question._replace(fixed=question.fixed - freed))
        try:
            plan = next(freer.by_speed(job, _kind(freer, job)), None)
        except ContradictionError:  # the rest of what was typed allows nothing else
            continue
        if plan is not None:
            part = field == "gradient_checkpointing" and question.strategy.checkpointed_blocks is not None
            field = "checkpointed_blocks" if part and plan.strategy.checkpointed_blocks is not None else field
            yield Relaxed(field, getattr(question.strategy, field), getattr(plan.strategy, field), plan)


def _kind(search: Search, job: Job) -> bool | None:
    """Lossless plans alone (False), unless tiles make every plan lossy."""
    return None if search.needs_tiles(job) else False
