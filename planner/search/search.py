"""Finds the best strategy for a job by estimates alone: lossless before lossy, then the fastest that fits.

Only a replay of the allocator decides for certain whether a plan fits, and it takes the most time. So strategies are
taken in the order of a cheap lower bound of their seconds; what a quick estimate lets through is replayed; and the
first replay that fits is the answer, because nothing later in the queue can be faster. Pure, given a function that
finds facts.

Read `Search.best`, `Search.by_speed` and `Search.tightest`; the rest is what they are made of.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from planner.catalog.shapes import grid
from planner.errors import NotEstimatedError
from planner.estimate.estimate import Assessment, assess
from planner.layout import margin
from planner.search.checkpoint_count import CheckpointCount
from planner.search.cost import TIGHTER, TIGHTEST, WORTH_LOSS
from planner.search.feasibility import Feasibility
from planner.search.policy import EstimatePolicy, Policy
from planner.search.pruning import Pruning
from planner.search.question import Question, Suggestion, Switch
from planner.search.screening import QuickEstimate, Screen
from planner.search.space import Space, at_the_end, switched
from planner.search.speed_order import Infeasible, SpeedQueue
from planner.search.swap_count import SwapCount
from planner.spec.configuration import Configuration
from planner.spec.job import Job
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy

RUNNERS_UP = 3


class Search:
    """One search. What was estimated and replayed is kept for the next question about the same job.

    ``policy``: what is a candidate and what counts as fitting; by default estimates alone decide.
    """

    def __init__(self, question: Question, screen: Screen, policy: Policy | None = None) -> None:
        self.question = question
        self.screen = screen
        self.policy = policy or EstimatePolicy(question)
        self.space = Space(question)
        self.feasibility = Feasibility(question, screen, self.policy)
        self.pruning = Pruning(self.feasibility, self.space)
        self.swap_count = SwapCount(self.feasibility, self.pruning)
        self.checkpoint_count = CheckpointCount(self.feasibility, self.pruning)
        self.missing: NotEstimatedError | None = None
        """Why the first strategy that could not be estimated could not."""
        self.chosen: Assessment | None = None
        """The plan of the last `best`, with its replay."""
        self._latest: Assessment | None = None
        self._estimates: dict[tuple[Job, ResolvedStrategy], Estimate] = {}
        self._tiled: dict[Job, bool] = {}

    def about(self, question: Question) -> Search:
        """A search for another question, with the same policy."""
        return Search(question, self.screen, self.policy.about(question))

    @property
    def considered(self) -> int:
        """How many pairs of strategy and shape were ranked or estimated."""
        return len(self.feasibility.considered)

    def best(self, job: Job, explain: bool = True) -> Suggestion | None:
        """The best plan for a job of exactly this shape; None if nothing fits, not even tightly."""
        for verdict in ("fits", "tight"):
            for lossy in (None,) if self.question.allow_lossy else (False, True):
                if plan := next(self.by_speed(job, lossy, verdict), None):
                    self.chosen = self._latest
                    return self.suggestion(plan, explain)
        return None

    def suggestion(self, plan: Estimate, explain: bool = True) -> Suggestion:
        """A plan as an answer. If it is to be explained, with the runners-up and the effect of its switches."""
        if not explain:
            return Suggestion(plan, (), (), self.considered)
        others, switches = self.runners_up(plan), self.switches(plan)
        return Suggestion(plan, others, switches, self.considered)

    # ---- one shape

    def candidates(self, job: Job, lossy: bool | None = None) -> list[ResolvedStrategy]:
        """The strategies that have recordings: lossless ones (False), lossy ones (True) or all (None)."""
        recorded, tiled = [], self.needs_tiles(job)
        for strategy in self.policy.strategies(job, list(self.space.strategies(job, tiled))):
            if lossy in (None, bool(strategy.lossy_fields(job))):
                try:
                    self.screen.facts(self.question.candidate(job, strategy))
                    recorded.append(strategy)
                except NotEstimatedError as error:
                    self.missing = self.missing or error
        self.feasibility.considered.update((job, strategy) for strategy in self._without_copies(recorded))
        # What a policy cannot have must not stand for its twin.
        return self._without_copies(list(self.policy.candidates(job, recorded)))

    def _without_copies(self, recorded: list[ResolvedStrategy]) -> list[ResolvedStrategy]:
        """Strategies without those whose adapters copy their inputs although they need not: the step is the same, with
        operators and tensors that nobody needs."""
        shared = {one.replace(adapter_inputs="cast") for one in recorded if one.adapter_inputs == "shared"}
        return [one for one in recorded if one not in shared]

    def is_recorded(self, job: Job) -> bool:
        """Whether recordings of the searched strategies cover the job's shape."""
        first = self.candidates(job)[:1]
        tapes = [self.screen.facts(self.question.candidate(job, strategy)).step for strategy in first]
        where = grid(self.question.model, job)
        return bool(tapes) and all(where[name] == fixed for name, fixed in tapes[0].regime.items())

    def needs_tiles(self, job: Job) -> bool:
        """Whether the VAE needs more than the card has to cache the whole clip, or to decode a whole validation
        sample."""
        question = self.question
        if job.method == "sample":  # its VAE decodes, with tiles or without: both are candidates
            return False
        if job not in self._tiled:
            needs_tiles = False
            # Asked of any that is allowed, and not where what is typed contradicts itself.
            any_plain = next(iter(self.space.strategies(job, False)))
            with contextlib.suppress(NotEstimatedError):  # of another precision, say: `candidates` notes why
                needs_tiles = self.screen.exceeds_encoding(question.candidate(job, any_plain), self._above_budget)
            self._tiled[job] = needs_tiles
        return self._tiled[job]

    def _above_budget(self, device_bytes: int) -> bool:
        """Whether so many bytes may exceed the card's budget, at the upper end of the margin."""
        return margin.interval(device_bytes, sides=self.question.sides)[1] > self.question.budget_bytes

    def by_speed(
        self, job: Job, lossy: bool | None, verdict: str = "fits", below: Callable[[], float] = lambda: math.inf
    ) -> Iterator[Estimate]:
        """Plans with at least this verdict, fastest first; of equally fast ones, the one with the fewest switches
        first.

        ``below``: device bytes that quick estimates must stay below; the limit may change after each plan.
        """
        candidates = self.candidates(job, lossy)
        floors = [(one, self.screen.floor_seconds(self.question.candidate(job, one))) for one in candidates]
        for part in self.checkpoint_count.candidates(job, candidates):
            with contextlib.suppress(NotEstimatedError):  # without checkpointing it is not recorded
                floors.append((part, self.checkpoint_count.floor_seconds(job, part)))
        fastest = min((seconds for _, seconds in floors), default=0.0)
        start = self.space.baseline(job)
        queue = SpeedQueue(job, verdict, start, bool(lossy), fastest, self.policy, self.pruning, self.checkpoint_count)
        for candidate, seconds in floors:
            queue.push(candidate, seconds, None)
        failed: set[ResolvedStrategy] = set()  # replayed, and short of the verdict
        most_swapped: dict[ResolvedStrategy, int] = {}  # -> the swapped blocks of a replay that fell short
        infeasible = Infeasible(self.feasibility, self.swap_count, job, verdict)
        # A strategy comes first by its bound, then by its quick estimate; and again, with more swapped blocks, where a
        # replay taught that the quick estimate promised too much.
        while queue:
            strategy, quick = queue.pop()
            if quick is not None and (quick.strategy in most_swapped or self.feasibility.may_reach(quick, verdict)):
                if quick.device_bytes >= below() or not self.policy.is_open(job, quick.strategy):
                    continue
                plan = self.try_estimate(job, quick.strategy)
                if plan is not None and self.policy.reaches(plan, verdict):
                    yield self._fewest_replayed(job, plan, most_swapped.get(quick.strategy), verdict)
                    continue
                failed.add(quick.strategy)
            try:
                following = self._following(job, strategy, verdict, below, infeasible, most_swapped)
            except NotEstimatedError as error:  # known from what it needs once it is laid out
                self.missing = self.missing or error
                continue
            if isinstance(following, QuickEstimate):
                if following.strategy not in failed:
                    queue.push(following.strategy, following.step_seconds, following)
            elif following is not None:  # with fewer checkpointed blocks it does not fit
                queue.push(following, self.checkpoint_count.floor_seconds(job, following), None)

    def _following(
        self,
        job: Job,
        strategy: ResolvedStrategy,
        verdict: str,
        below: Callable[[], float],
        infeasible: Infeasible,
        most_swapped: dict[ResolvedStrategy, int],
    ) -> QuickEstimate | ResolvedStrategy | None:
        """What to ask next of a strategy whose bound, or whose last replay, is known: its quick estimate with the
        fewest swapped or checkpointed blocks that may reach the verdict, or the strategy with more of its blocks
        checkpointed. None where none of it can reach the verdict below the limit. Raises a NotEstimatedError.

        ``infeasible``, ``most_swapped``: as in `by_speed`, which it adds to.
        """
        bare = strategy.replace(swap_blocks=self.space.baseline(job).swap_blocks)
        if self.checkpoint_count.is_open(bare):
            if self.checkpoint_count.needs_at_least(below(), job, bare, verdict):
                return None
            return self.checkpoint_count.narrow(job, bare, verdict)
        if (
            bare in infeasible
            or self.pruning.never_fits(job, bare, verdict)
            or self.pruning.floor_bytes(job, bare) >= below()
            or self.swap_count.needs_at_least(below(), job, bare, verdict)
        ):
            return None
        fewest = self.swap_count.fewest(job, bare, verdict)
        if fewest is not None:
            return fewest
        infeasible.add(bare)
        most = self.swap_count.most_despite_replays(job, bare, verdict)
        if most is not None:
            most_swapped.setdefault(most.strategy, strategy.swap_blocks)
        return most

    def _fewest_replayed(self, job: Job, plan: Estimate, low: int | None, verdict: str) -> Estimate:
        """The plan with the fewest swapped blocks, but more than ``low``, that reaches the verdict in a replay; the
        plan itself if ``low`` is None."""
        latest = self._latest
        while low is not None and plan.configuration.strategy.swap_blocks - low > 1:
            middle = (plan.configuration.strategy.swap_blocks + low) // 2
            fewer = plan.configuration.strategy.replace(swap_blocks=middle)
            other = self.try_estimate(job, fewer) if self.policy.is_open(job, fewer) else None
            if other is not None and self.policy.reaches(other, verdict):
                plan, latest = other, self._latest
            else:
                low = middle
        self._latest = latest
        return plan

    def quick_estimate(self, job: Job, strategy: ResolvedStrategy) -> QuickEstimate:
        """Memory and step seconds of a strategy for a job, without a replay."""
        return self.feasibility.quick_estimate(job, strategy)

    def most_in_ram(self, job: Job, strategy: ResolvedStrategy) -> ResolvedStrategy:
        """The strategy with the most swapped blocks that it allows and the host RAM holds."""
        return self.swap_count.most_in_ram(job, strategy)

    def estimate(self, job: Job, strategy: ResolvedStrategy) -> Estimate:
        """The full estimate, replayed once; later questions learn from its fragmentation."""
        key = (job, strategy)
        if key not in self._estimates:
            self._estimates[key] = self.fresh_estimate(job, strategy)
            self.feasibility.learn(self._estimates[key])
        return self._estimates[key]

    def fresh_estimate(self, job: Job, strategy: ResolvedStrategy, cached: bool = True) -> Estimate:
        """The full estimate, replayed each time; later questions learn nothing from it. ``cached``: as in `assess`."""
        self._latest = self._assess(job, strategy, cached)
        return self._latest.estimate

    def _assess(self, job: Job, strategy: ResolvedStrategy, cached: bool = True, flushes: bool = False) -> Assessment:
        """`assess` of one candidate. Searches leave cache flushes out; only `tightest` asks for them."""
        screen, candidate = self.screen, self.question.candidate(job, strategy)
        lay_out = screen.run_cache.lay_out
        return assess(candidate, screen.facts(candidate), screen.trainer, lay_out, cached, flushes=flushes)

    def try_estimate(self, job: Job, strategy: ResolvedStrategy) -> Estimate | None:
        """The full estimate; None if there is no recording for it."""
        try:
            return self.estimate(job, strategy)
        except NotEstimatedError as error:
            self.missing = self.missing or error
            self.feasibility.give_up(strategy)
            return None

    # ---- what an answer says beside its plan

    def tightest(self, job: Job, lossy: bool | None = None, flushes: bool = True) -> Estimate | None:
        """The plan that needs least of what is short, when nothing fits. It is lossy only if that helps. It is `tight`
        if it runs because PyTorch empties its cache, unless ``flushes`` is False."""
        tightest = self.tightest_first(job, lossy, 1)
        if lossy is None:
            least = tightest[0].device_bytes if tightest else 0

            def worse(quick: QuickEstimate) -> tuple[bool, bool]:
                lossy = bool(quick.strategy.lossy_fields(job))
                return not self.feasibility.has_ram(quick), lossy or quick.device_bytes > least * WORTH_LOSS

            tightest.sort(key=worse)
        for quick in tightest:
            if plan := self.try_estimate(job, quick.strategy):
                if flushes and (plan.verdict, plan.limit) == ("no", "gpu"):
                    plan = self._assess(job, quick.strategy, flushes=True).estimate
                return plan
        return None

    def tightest_first(
        self, job: Job, lossy: bool | None = None, count: int = TIGHTEST, smallest: Job | None = None
    ) -> list[QuickEstimate]:
        """Quick estimates with as many blocks swapped as allowed; the one that needs least comes first.

        Left out are kinds of optimizer step if they change nothing, and what cannot be among the first ``count``. If
        the job at its ``smallest`` shape is given, what lacks host RAM even there is left out too.
        """
        floors = {strategy: self.pruning.floor_bytes(job, strategy) for strategy in self.candidates(job, lossy)}
        place = {strategy: index for index, strategy in enumerate(floors)}
        places: dict[QuickEstimate, int] = {}
        in_optimizer: dict[ResolvedStrategy, bool] = {}
        least: list[int] = []
        short: list[ResolvedStrategy] = []
        beyond = WORTH_LOSS if lossy is None else 1.0  # where both kinds are asked for, a lossless one may stand ahead
        # By rising lower bound, so that it can end early; `short` grows meanwhile and comes last.
        for strategy in itertools.chain(sorted(floors, key=floors.__getitem__), short):
            if len(least) >= count and (strategy in short or floors[strategy] > beyond * least[count - 1]):
                break
            if strategy not in short and self.pruning.short_of_ram(job, strategy):
                if smallest is None or not self.pruning.short_of_ram(smallest, strategy):
                    short.append(strategy)
                continue
            family = at_the_end(strategy)
            if in_optimizer.get(family, True):
                quick = self._try_quick_estimate(job, self.most_in_ram(job, strategy))
                if quick is None:
                    continue
                places[quick], in_optimizer[family] = place[strategy], quick.in_optimizer
                if self.feasibility.has_ram(quick):
                    bisect.insort(least, self.feasibility.expected_bytes(quick))

        def tight(quick: QuickEstimate) -> tuple[bool, int, int, int]:
            """Of equally tight ones the first that was a candidate, or what lacks least RAM."""
            lacks = not self.feasibility.has_ram(quick)
            ram = quick.host_ram_bytes if lacks else 0
            return lacks, self.feasibility.expected_bytes(quick), ram, places[quick]

        return sorted(places, key=tight)

    def runners_up(self, plan: Estimate) -> tuple[Estimate, ...]:
        """The next plans by falling speed, each needing less memory than the one before; if the plan is lossy, also the
        best lossless one."""
        others: list[Estimate] = []
        lowest = self._quick_estimate_of(plan).device_bytes

        def tighter() -> float:
            return lowest * TIGHTER

        kinds = None if plan.lossy or self.question.allow_lossy else False
        for other in self.by_speed(plan.job, kinds, plan.verdict, below=tighter):
            if other.strategy == plan.strategy:
                continue
            others.append(other)
            lowest = self._quick_estimate_of(other).device_bytes
            if len(others) == RUNNERS_UP:
                break
        if not others:  # the last rung of a ladder: everything moved that can be
            last = self.tightest(plan.job, kinds)
            fits = last is not None and last.verdict in ("fits", plan.verdict)
            if last and fits and self._quick_estimate_of(last).device_bytes < tighter():
                others.append(last)
        if plan.lossy and all(other.lossy for other in others):
            lossless = self.best_lossless(plan.job)
            others[:0] = [lossless] if lossless else []
        return tuple(others)

    def best_lossless(self, job: Job) -> Estimate | None:
        """The fastest lossless plan that fits, or else the fastest tight one, or else the one that needs least memory;
        None if there is no lossless strategy."""
        for verdict in ("fits", "tight"):
            if plan := next(self.by_speed(job, False, verdict), None):
                return plan
        return self.tightest(job, False)

    def switches(self, plan: Estimate) -> tuple[Switch, ...]:
        """What each step from the baseline to the plan saved and cost, in an order in which each step is allowed. Steps
        that cost time and save nothing at their place, because the peak is still elsewhere, come last.

        Based on quick estimates, so changes in fragmentation are left out.
        """
        order = switched(self.space.baseline(plan.job), plan.strategy)
        found = self._switches(plan, order)
        late = [each.field for each in found if each.device_bytes >= 0 and each.step_seconds > 0]
        again = [*(field for field in order if field not in late), *(field for field in order if field in late)]
        return found if again == list(order) else self._switches(plan, again)

    def _switches(self, plan: Estimate, order: Sequence[str]) -> tuple[Switch, ...]:
        job, state, count = plan.job, self.space.baseline(plan.job), plan.configuration.strategy.checkpointed_blocks
        last = self._try_quick_estimate(job, state) or self._quick_estimate_of(plan)
        switches = []
        for field in order:
            before, after = getattr(state, field), getattr(plan.strategy, field)
            changes = {field: after}
            if field == "gradient_checkpointing":  # which is how many blocks, if not all
                changes["checkpointed_blocks"] = count
            state = state.replace(**changes)
            # Half-way to another engine the number formats are still the old ones: recorded is what the engine makes
            # of them. A step on the way may have no recording at all; the next one then counts for both.
            recorded = Configuration.of(job, state, self.question.machine)
            now = self._try_quick_estimate(job, state, recorded) or last
            saved = now.device_bytes - last.device_bytes
            switches.append(Switch(field, before, after, saved, now.step_seconds - last.step_seconds))
            if field == "gradient_checkpointing" and count is not None:
                switches.append(Switch("checkpointed_blocks", 0, count, 0, 0.0))
            last = now
        return tuple(switches)

    def _quick_estimate_of(self, plan: Estimate) -> QuickEstimate:
        return self.quick_estimate(plan.job, plan.configuration.strategy)

    def _try_quick_estimate(
        self, job: Job, strategy: ResolvedStrategy, recorded: Configuration | None = None
    ) -> QuickEstimate | None:
        """The quick estimate of a strategy that may have no recordings; None without them, or if it is refused.
        ``recorded``: as in `Screen.facts`."""
        try:
            return self.feasibility.quick_estimate(job, strategy, recorded)
        except NotEstimatedError as error:
            self.missing = self.missing or error
            return None
