"""What a search may vary instead of the strategy: the longest clip, the largest batch, the largest size that fits.

The same bisection says, when nothing fits, which single wish to relax and to what.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import grid
from planner.errors import ContradictionError, VplanError
from planner.layout.sharding import context_parallel
from planner.search.cost import TIGHTEST
from planner.search.question import Question, Relaxed, Suggestion
from planner.search.search import Search
from planner.search.space import searched
from planner.spec.job import MAX_FRAMES, Job
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy
from planner.units import GIB

MOST_SAMPLES = 1_000
Value = int | tuple[int, int]


class Objective(NamedTuple):
    """One number of a job that can be maximised: its possible values in rising order, and how to read and set it."""

    name: str
    fields: tuple[str, ...]
    values: Sequence[Value]
    read: Callable[[Job], Value]
    put: Callable[[Job, Value], Job]

    def below(self, job: Job) -> Sequence[Value]:
        """The possible values below the job's own, in rising order."""
        own = self.size(self.read(job))
        count = next((index for index, value in enumerate(self.values) if self.size(value) >= own), len(self.values))
        return self.values[:count]

    @staticmethod
    def size(value: Value) -> int:
        """The number by which values are ordered: the value itself, or the pixels of a (height, width)."""
        return value if isinstance(value, int) else value[0] * value[1]


def frames(model: ModelProfile) -> Objective:
    """The objective of the longest clip: frame counts that the model takes."""
    rules = model.shape
    step = rules.frame_step
    first = rules.cut(rules.min_frames + step - 1)
    # Latent frames of a clip; a single one would be an image.
    longest = model.shape.max_frames if model.shape.window else MAX_FRAMES
    last = longest if model.kind == "video" else 1
    return Objective("frames", ("frames",), range(first, last + 1, step), lambda job: job.frames, _put("frames"))


def batch(model: ModelProfile) -> Objective:
    """The objective of the largest batch: samples per GPU."""
    values = model.shape.batches or range(1, MOST_SAMPLES + 1)
    return Objective("batch", ("batch_size",), values, lambda job: job.batch_size, _put("batch_size"))


def resolution(model: ModelProfile) -> Objective:
    """The objective of the largest resolution: the (height, width) that the model lists, one of each area."""
    areas = {height * width: (height, width) for height, width in reversed(model.shape.resolutions)}
    return _resolution([areas[area] for area in sorted(areas)])


def smaller_sizes(model: ModelProfile, job: Job) -> Objective:
    """The listed sizes, upright for a job that is, and three quarters and half of its own where the model takes
    others."""
    multiple, upright = model.shape.size_multiple, job.height > job.width
    listed = sorted(model.shape.resolutions, key=lambda size: (size[0] > size[1]) == upright)
    areas = {height * width: (height, width) for height, width in listed}
    for share in () if model.shape.only_listed else (0.75, 0.5):
        sides = [max(1, round(side * share / multiple)) * multiple for side in (job.height, job.width)]
        areas.setdefault(sides[0] * sides[1], (sides[0], sides[1]))
    return _resolution([areas[area] for area in sorted(areas)])


def rank(model: ModelProfile) -> Objective:
    """The objective of the largest LoRA rank: powers of two from 4 to 128."""
    return Objective("lora_rank", ("lora_rank",), (4, 8, 16, 32, 64, 128), lambda job: job.lora_rank, _put("lora_rank"))


PREFERRED: dict[str, Callable[[ModelProfile], Objective]] = {"frames": frames, "batch": batch, "resolution": resolution}


def chosen_objective(question: Question, prefer: str) -> Objective | None:
    """What a search is to make largest, of `PREFERRED`; None for "speed".

    `--frames max` asks for frames whatever is preferred. Raises a VplanError where that would change what was typed.
    """
    prefer = "frames" if question.frames_max else prefer
    if prefer == "speed":
        return None
    if prefer == "frames" and question.model.kind == "image":
        fault = f"{question.model.title} makes images, so there is no longest clip"
        raise VplanError(fault, "use --prefer batch or --prefer resolution")
    objective = PREFERRED[prefer](question.model)
    typed = [field for field in objective.fields if field in question.fixed]
    if typed and not question.frames_max:
        fault = f"--prefer {prefer} would change options you set: {', '.join(typed)}"
        raise VplanError(fault, f"leave out --{typed[0]}")
    return objective


def largest(search: Search, objective: Objective, explain: bool = True) -> Suggestion | None:
    """The largest value of an objective for which a plan fits, and the fastest plan there; None when none does."""
    job, question = search.question.job, search.question
    if job.buckets:
        raise VplanError(
            f"with buckets the shapes are given, so there is no largest {objective.name}", "leave out --buckets"
        )
    for lossy in (None,) if question.allow_lossy else (False, True):
        plan = largest_by(search, job, objective, lossy)
        if plan is not None:
            return search.suggestion(plan, explain)
    return None


def largest_by(
    search: Search, job: Job, objective: Objective, lossy: bool | None, fastest: bool = True
) -> Estimate | None:
    """The fastest plan at an objective's largest value, of lossless plans (False), lossy ones (True) or all (None).
    ``fastest``: False where only the value is asked for, and any plan there will do."""
    return _largest(search, job, objective, _takeable(search, job, objective, objective.values), lossy, fastest)


def other_kind(search: Search, plan: Estimate, objective: Objective, fastest: bool = True) -> Iterator[Relaxed]:
    """The most of an objective for plans of the other kind: without loss where the plan is lossy, else with loss, where
    that is more. Nothing where the shapes are given, or no such plan fits. ``fastest``: as for `largest_by`."""
    job, best = plan.job, objective.size(objective.read(plan.job))
    if job.buckets or search.needs_tiles(job):
        return
    values = [
        value
        for value in objective.values
        if (objective.size(value) < best if plan.lossy else objective.size(value) > best)
    ]
    takeable = _takeable(search, job, objective, values)
    if not plan.lossy and takeable:  # what is the tightest one value further is the tightest at the plan's own
        job = objective.put(job, takeable[0])
    other = _largest(search, job, objective, takeable, not plan.lossy, fastest)
    if other is not None:
        before, after = objective.read(plan.job), objective.read(other.job)
        yield Relaxed(objective.name, _as_text(before), _as_text(after), other)


def relaxed(search: Search, job: Job) -> tuple[Relaxed, ...]:
    """For a job that nothing fits: every single wish whose relaxing is enough, with the most that is left of it.

    Host RAM and GPUs that share a sample stand first, because they keep the clip as it was asked for.
    """
    model, answers = search.question.model, [*more_ram(search, job), *shared_samples(search, job)]
    objectives = [frames(model), smaller_sizes(model, job), batch(model)]
    objectives += [rank(model)] if job.trains in ("lora", "dora") else []
    for objective in objectives if not job.buckets else ():
        values = _takeable(search, job, objective, objective.below(job))
        plans = (_largest_by_any_plan(search, job, objective, values, lossy) for lossy in (False, True))
        if plan := next((plan for plan in plans if plan), None):
            before, after = objective.read(job), objective.read(plan.job)
            answers.append(Relaxed(objective.name, _as_text(before), _as_text(after), plan))
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
        values = _takeable(search, smallest, objective, objective.below(smallest))
        smallest = objective.put(smallest, values[0]) if values else smallest
    clips = frames(model)
    shorter = _takeable(search, smallest, clips, clips.below(smallest))
    for lossy in (False, True):
        if plan := _largest_by_any_plan(search, smallest, clips, shorter, lossy):
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
            for anchor in _anchors(shared, [job], _kind(shared, job)):
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


def _takeable(search: Search, job: Job, objective: Objective, values: Sequence[Value]) -> Sequence[Value]:
    """Those that are recorded, and at which the GPUs that share a clip can divide it."""
    model, parts = search.question.model, search.question.strategy.context_parallel
    if parts > 1:
        values = [
            value for value in values if context_parallel.divides(model, grid(model, objective.put(job, value)), parts)
        ]
    if objective.name == "batch" and model.shape.batches:
        values = [value for value in values if search.is_recorded(objective.put(job, value))]
    return values


def _largest(
    search: Search, job: Job, objective: Objective, values: Sequence[Value], lossy: bool | None, fastest: bool = True
) -> Estimate | None:
    """The fastest plan at the largest value that fits: bisected on what is allocated, believed only when replayed.
    Where any will do, the tightest are asked first, and all others only where none of these fits."""
    smallest = [objective.put(job, value) for value in values[:1]]
    anchors = _anchors(search, list(dict.fromkeys([*smallest, job])), lossy, *smallest)
    too_large: dict[ResolvedStrategy, int] | None = None if fastest else {}
    refused: list[int] = []
    for index in _may_fit(search, job, objective, values, anchors, too_large):
        there = objective.put(job, values[index])
        first = [one for one in anchors if index < too_large.get(one, len(values))] if too_large is not None else []
        plan = next(_fitting(search, there, first), None)
        if plan := plan or next(search.by_speed(there, lossy), None):
            skipped = values[index + 1 : max(refused, default=0)]
            return _larger(search, job, objective, skipped, lossy, () if fastest else anchors) or plan
        refused.append(index)
    return None


def _fitting(search: Search, job: Job, anchors: Sequence[ResolvedStrategy]) -> Iterator[Estimate]:
    """The plans of strategies with as many swapped blocks as the host's RAM holds, of those that may fit and do."""
    for strategy in anchors:
        most = search.most_in_ram(job, strategy)
        if not search.pruning.never_fits(job, strategy, "fits") and search.feasibility.may_reach(
            search.quick_estimate(job, most)
        ):
            plan = search.try_estimate(job, most)
            if plan is not None and search.policy.reaches(plan, "fits"):
                yield plan


def _larger(
    search: Search,
    job: Job,
    objective: Objective,
    skipped: Sequence[Value],
    lossy: bool | None,
    first: Sequence[ResolvedStrategy],
) -> Estimate | None:
    """The fastest plan at the largest of the values that were ruled out only by what replays of larger ones lost to
    fragmentation: each that is asked is asked by itself. Mostly the next does not fit, so steps begin at one value and
    double. ``first``: strategies of which any will do."""
    found, low, high, stride = None, 0, len(skipped), 1
    while low < high:
        index = min(low + stride, high) - 1
        alone = Search(search.question, search.screen, search.policy)
        there = objective.put(job, skipped[index])
        plan = next(_fitting(alone, there, first), None) or next(alone.by_speed(there, lossy), None)
        if plan is None:
            high, stride = index, max((index - low) // 2, 1)
        else:
            found, low, stride = plan, index + 1, 2 * stride
    return found


def _largest_by_any_plan(
    search: Search, job: Job, objective: Objective, values: Sequence[Value], lossy: bool | None
) -> Estimate | None:
    """As `_largest`, but any plan there will do: the tightest, which is the first that is asked."""
    anchors = _anchors(search, [job], lossy)
    for index in _may_fit(search, job, objective, values, anchors):
        there = objective.put(job, values[index])
        for strategy in anchors:
            plan = search.try_estimate(there, search.most_in_ram(there, strategy))
            if plan is not None and plan.verdict == "fits":
                return plan
    return None


def _may_fit(
    search: Search,
    job: Job,
    objective: Objective,
    values: Sequence[Value],
    anchors: Sequence[ResolvedStrategy],
    too_large: dict[ResolvedStrategy, int] | None = None,
) -> Iterator[int]:
    """The index of the largest value at which one of the strategies may fit; then, with what was learned there, of
    the largest below it, and so on.

    ``too_large``: strategy -> the least index at which it was found too large, and from which on it is not asked about
    again; what is found is entered. None: each is asked about at every value that is looked at.
    """
    left: dict[int, float] = {}
    order = list(anchors)

    def fits_by(index: int, strategy: ResolvedStrategy) -> bool:
        at, feasibility = objective.put(job, values[index]), search.feasibility
        if search.pruning.never_fits(at, strategy, "fits"):
            return False
        quick = search.quick_estimate(at, search.most_in_ram(at, strategy))
        left[index] = max(feasibility.share_left(quick), left.get(index, -math.inf))
        return feasibility.may_reach(quick)

    def may_fit(index: int) -> bool:
        if too_large is None:
            return any(fits_by(index, strategy) for strategy in anchors)
        for strategy in [one for one in order if index < too_large.get(one, len(values))]:
            if fits_by(index, strategy):
                order.remove(strategy)
                order.insert(0, strategy)  # it may well be the one that fits elsewhere
                return True
            too_large[strategy] = index
        return False

    low, high, step = -1, len(values), 1
    while low + step < high:  # gallop: the answer is nearer the small end
        if not may_fit(low + step):
            high = low + step
            break
        low, step = low + step, step * 2
    while (last := _last(may_fit, low, high, left)) >= 0:
        yield last
        low, high, step = last - 1, last, 1
        left.clear()  # what was learned counts from here on
        while low >= 0 and not may_fit(low):  # what is learned is some percent: the next is near
            short = int(low / (1 - left.get(low, 0.0)))  # as if memory were in proportion to the value
            low, high, step = max(-1, min(low - step, short)), low, step * 2


def _last(may_fit: Callable[[int], bool], low: int, high: int, left: Mapping[int, float]) -> int:
    """The last index at which a plan may fit, where one does at ``low`` (or that is -1), and none at ``high``.

    ``left``: what share of memory is left at an index that was asked. It falls almost evenly, so guess before halving.
    """
    halve = False
    while high - low > 1:
        middle = (low + high) // 2
        if not halve and left.get(low, -1.0) > 0 > left.get(high, 1.0):
            guess = low + int((high - low) * left[low] / (left[low] - left[high]))
            middle = min(max(guess, low + 1), high - 1)
        before = high - low
        low, high = (middle, high) if may_fit(middle) else (low, middle)
        halve = not halve and high - low > before // 2
    return low


def _anchors(
    search: Search, jobs: Sequence[Job], lossy: bool | None, smallest: Job | None = None
) -> list[ResolvedStrategy]:
    """The strategies that are the tightest at any of the shapes, without their swap: they decide whether any fits.
    ``smallest``: the smallest shape of all that will be asked about."""
    swap = search.question.strategy.swap_blocks
    if search.question.learned.proofs:  # what ran had RAM enough, whatever an estimate says
        smallest = None
    tightest = [quick for job in jobs for quick in search.tightest_first(job, lossy, smallest=smallest)[:TIGHTEST]]
    return list(dict.fromkeys(quick.strategy.replace(swap_blocks=swap) for quick in tightest))


def _resolution(sizes: Sequence[tuple[int, int]]) -> Objective:
    def put(job: Job, value: Value) -> Job:
        assert isinstance(value, tuple)
        return job.replace(height=value[0], width=value[1])

    return Objective("resolution", ("height", "width"), sizes, lambda job: (job.height, job.width), put)


def _put(field: str) -> Callable[[Job, Value], Job]:
    return lambda job, value: job.replace(**{field: value})


def _as_text(value: Value) -> str | int:
    return value if isinstance(value, int) else f"{value[0]}x{value[1]}"
