"""The best strategy for a job by estimate alone: lossless before lossy, then the fastest that fits.

Strategies come by rising seconds, which cost little to know; what seems to fit is replayed, and only then believed.
Pure, given a getter of facts.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from planner.catalog.shapes import grid
from planner.errors import NotEstimatedError
from planner.estimate.estimate import Assessment, assess
from planner.layout import margin
from planner.search.cost import TIGHTEST, WORTH_LOSS, loss, slowness
from planner.search.pruning import Hopeless, Known
from planner.search.question import Question, Suggestion, Switch
from planner.search.screening import Look, Screen
from planner.search.space import effort, naive, strategies, switched
from planner.search.swap_count import Swaps
from planner.spec.job import SPLIT, Job, Strategy
from planner.spec.plan import Estimate

RUNNERS_UP = 3

NEVER = 1e6
"""Times what a look says: where a strategy cannot be replayed."""


class Search:
    """One search: what was looked at and replayed is kept for the next question about the same job."""

    def __init__(self, question: Question, screen: Screen) -> None:
        self.question = question
        self.screen = screen
        self.known = Known(self)
        self.swaps = Swaps(self)
        self.missing: NotEstimatedError | None = None
        """Why the first strategy that could not be looked at could not."""
        self._considered: set[tuple[Job, Strategy]] = set()
        self.chosen: Assessment | None = None
        """The plan of the last `best`, with its replay."""
        self._latest: Assessment | None = None
        self._strategies: dict[tuple[Job, bool], dict[Strategy, bool]] = {}
        self._estimates: dict[tuple[Job, Strategy], Estimate] = {}
        self._tiled: dict[Job, bool] = {}
        self._lost: dict[Strategy, float] = {}
        """Strategy without swap -> device bytes over those of its look, where a replay told."""

    @property
    def sides(self) -> margin.Sides:
        """How sure estimates are here."""
        return self.question.learned.correction.sides

    @property
    def considered(self) -> int:
        """How many strategies at how many shapes were ranked or looked at."""
        return len(self._considered)

    def best(self, job: Job, explain: bool = True) -> Suggestion | None:
        """The best plan for a job of just this shape; None when nothing fits, not even tightly."""
        for verdict in ("fits", "tight"):
            for lossy in (None,) if self.question.allow_lossy else (False, True):
                if found := next(self.by_speed(job, lossy, verdict), None):
                    self.chosen = self._latest
                    return self.explained(found) if explain else self.bare(found)
        return None

    def bare(self, plan: Estimate) -> Suggestion:
        """A plan without its story."""
        return Suggestion(plan, (), (), self.considered)

    def explained(self, plan: Estimate) -> Suggestion:
        """A plan with what its switches did and the runners-up."""
        others, switches = self.runners_up(plan), self.switches(plan)
        return Suggestion(plan, others, switches, self.considered)

    # ---- one shape

    def candidates(self, job: Job, lossy: bool | None = None) -> list[Strategy]:
        """The strategies that have recordings: lossless ones (False), lossy ones (True) or all (None)."""
        found = []
        for strategy, gives_up in self._possible(job, self.needs_tiles(job)).items():
            if lossy in (None, gives_up):
                try:
                    self.screen.facts(job, strategy, self.question.machine)
                    found.append(strategy)
                except NotEstimatedError as error:
                    self.missing = self.missing or error
        self._considered.update((job, strategy) for strategy in found)
        return found

    def is_recorded(self, job: Job) -> bool:
        """Whether the recordings of what is searched hold for the job's shape."""
        tapes = [self.screen.facts(job, each, self.question.machine).step for each in self.candidates(job)[:1]]
        where = grid(self.question.model, job)
        return bool(tapes) and all(where[name] == fixed for name, fixed in tapes[0].regime.items())

    def _possible(self, job: Job, tiled: bool) -> dict[Strategy, bool]:
        """Strategy -> whether it is lossy, of all that nothing forbids."""
        if (job, tiled) not in self._strategies:
            asked = self.question.strategy, self.question.machine, self.question.fixed
            self._strategies[job, tiled] = {s: bool(s.lossy_fields(job)) for s in strategies(job, *asked, tiled)}
        return self._strategies[job, tiled]

    def needs_tiles(self, job: Job) -> bool:
        """Whether the clip, cached whole by the VAE, would need more than the card gives."""
        question = self.question
        if job.method == "sample":  # its VAE decodes, with tiles or without: both are candidates
            return False
        if job not in self._tiled:
            needed = 0  # asked of any that is allowed, and not where what is typed contradicts itself
            any_plain = next(iter(self._possible(job, False)))
            with contextlib.suppress(NotEstimatedError):  # of another precision, say: candidates tell
                needed = self.screen.encoding_bytes(job, any_plain, question.machine)
            self._tiled[job] = margin.interval(needed, sides=self.sides)[1] > question.budget_bytes
        return self._tiled[job]

    def by_speed(
        self,
        job: Job,
        lossy: bool | None,
        verdict: str = "fits",
        wanted: Callable[[Look], bool] = lambda look: True,
        below: Callable[[], float] = lambda: math.inf,
    ) -> Iterator[Estimate]:
        """Plans with at least this verdict, the fastest first; among equally fast ones the least switched.

        ``below``: device bytes that their looks must stay below, which may change behind each plan.
        """
        start = naive(job, self.question.strategy, self.question.machine, self.question.fixed)
        tie = itertools.count()
        tried: set[Strategy] = set()
        hopeless = Hopeless(self, job, verdict)
        queue: list[tuple[tuple[float, ...], int, Strategy, Look | None]] = []

        def push(strategy: Strategy, seconds: float, look: Look | None) -> None:
            # Before a look everything in here is a lower bound, so what comes first after one is the best.
            # What splits trains in other number formats than the rest, so its speed is no reason to change engines:
            # memory is.
            engine = float(strategy.sharding in SPLIT)
            speed = slowness(seconds, fastest, loss(job, strategy) if lossy else 0)
            memory = look.device_bytes if look else 0
            swaps = look is None and self.known.weights_force_swap(job, strategy, verdict)
            work = effort(start, strategy.replace(swap_blocks=1) if swaps else strategy)
            heapq.heappush(queue, ((engine, speed, work, memory), next(tie), strategy, look))

        machine = self.question.machine
        floors = [(each, self.screen.floor_seconds(job, each, machine)) for each in self.candidates(job, lossy)]
        fastest = min((seconds for _, seconds in floors), default=0.0)  # steps of speed are around it, not on its edge
        for strategy, seconds in floors:
            push(strategy, seconds, None)
        while queue:
            _, _, strategy, look = heapq.heappop(queue)
            if look is not None and self.seems(look, verdict):
                if look.device_bytes >= below() or not wanted(look):
                    continue
                found = self.priced(job, look.strategy)
                if found is not None and self.reaches(found, verdict):
                    yield found
                    continue
                tried.add(look.strategy)
            bare = strategy.replace(swap_blocks=start.swap_blocks)
            if (
                bare in hopeless
                or self.known.never_fits(job, bare, verdict)
                or self.swaps.no_smaller(job, bare, verdict, below())
            ):
                continue
            try:
                look = self.swaps.roomiest(job, bare, verdict)
            except NotEstimatedError as error:  # told by what it needs once it is laid out
                self.missing = self.missing or error
                continue
            if look is None:
                hopeless.add(bare)
            elif look.strategy not in tried:
                push(look.strategy, look.step_seconds, look)

    def look(self, job: Job, strategy: Strategy) -> Look:
        """A look at a strategy."""
        self._considered.add((job, strategy))
        return self.screen.look(job, strategy, self.question.machine)

    def device_bytes(self, look: Look) -> int:
        """The device peak to expect."""
        return int(look.device_bytes * self.ratio(look.strategy))

    def ratio(self, strategy: Strategy) -> float:
        """What replays of a strategy were seen to take, as a share of their looks."""
        return self._lost.get(strategy.replace(swap_blocks=0), 1.0)

    def seems(self, look: Look, verdict: str = "fits") -> bool:
        """Whether a replay could come to this verdict."""
        if look.told is not None:
            return look.told == "ran"
        return not self.over(self.device_bytes(look), look.strategy, verdict) and self.has_ram(look)

    def over(self, device_bytes: int, strategy: Strategy, verdict: str) -> bool:
        """Whether so many bytes on the GPU rule a verdict out."""
        low, high = margin.interval(device_bytes, strategy.compile != "none", self.sides)
        return (high if verdict == "fits" else low) > self.question.budget_bytes

    def has_ram(self, look: Look) -> bool:
        """Whether the host has the RAM."""
        return not self.lacks(look.host_ram_bytes)

    def lacks(self, host_bytes: int) -> bool:
        """Whether so many bytes are more than the host's RAM."""
        return host_bytes > (self.question.machine.host_ram or math.inf)

    def most_in_ram(self, job: Job, strategy: Strategy) -> Strategy:
        """The strategy with the most blocks swapped that it allows and the host's RAM holds."""
        return self.swaps.most_in_ram(job, strategy)

    def reaches(self, found: Estimate, verdict: str) -> bool:
        """Whether an estimate is at least as good as the verdict."""
        return found.verdict == "fits" or found.verdict == verdict

    def settled(self, job: Job, strategy: Strategy) -> Estimate:
        """The full estimate, replayed once."""
        key = (job, strategy)
        if key not in self._estimates:
            found = self._estimates[key] = self.judged(job, strategy)
            ratio = found.peak.device_bytes / self.look(job, strategy).device_bytes
            bare = strategy.replace(swap_blocks=0)
            self._lost[bare] = max(ratio, self._lost.get(bare, 1.0))
        return self._estimates[key]

    def judged(self, job: Job, strategy: Strategy, cached: bool = True) -> Estimate:
        """The full estimate, replayed each time, from which no later question learns. ``cached``: as for `assess`."""
        screen, known = self.screen, (job, strategy, self.question.machine)
        self._latest = assess(*known, screen.facts(*known), screen.trainer, screen.lay_out, cached)
        return self._latest.estimate

    # ---- what is told about a plan

    def tightest(self, job: Job, lossy: bool | None = None) -> Estimate | None:
        """The plan that needs least of what is short, when nothing fits. Lossy only where that helps."""
        looks = self.tightest_looks(job, lossy, 1)
        if lossy is None:
            least = looks[0].device_bytes if looks else 0

            def worse(look: Look) -> tuple[bool, bool]:
                lossy = bool(look.strategy.lossy_fields(job))
                return not self.has_ram(look), lossy or look.device_bytes > least * WORTH_LOSS

            looks.sort(key=worse)
        priced = (self.priced(job, look.strategy) for look in looks)
        return next((found for found in priced if found), None)

    def tightest_looks(self, job: Job, lossy: bool | None = None, count: int = TIGHTEST) -> list[Look]:
        """Looks at strategies with all blocks swapped that may be, the one that needs least first.

        Left out are ways of stepping where they change nothing, and what cannot be among the first ``count``.
        """
        floors = {each: self.known.floor_bytes(job, each) for each in self.candidates(job, lossy)}
        place = {each: at for at, each in enumerate(floors)}
        found: dict[Look, int] = {}
        in_optimizer: dict[Strategy, bool] = {}
        least: list[int] = []
        short: list[Strategy] = []
        for strategy in itertools.chain(sorted(floors, key=floors.__getitem__), short):
            if len(least) >= count and (strategy in short or floors[strategy] > WORTH_LOSS * least[count - 1]):
                break
            if strategy not in short and self.known.lacks_ram(job, strategy):  # after the others, if there are too few
                short.append(strategy)
                continue
            alike = strategy.replace(optimizer_step="foreach")
            if in_optimizer.get(alike, True):
                look = self._seen(job, self.most_in_ram(job, strategy))
                if look is None:
                    continue
                found[look], in_optimizer[alike] = place[strategy], look.in_optimizer
                if self.has_ram(look):
                    bisect.insort(least, self.device_bytes(look))

        def tight(look: Look) -> tuple[bool, int, int, int]:
            """Of equally tight ones the first that was a candidate, or what lacks least RAM."""
            lacks = not self.has_ram(look)
            return lacks, self.device_bytes(look), look.host_ram_bytes if lacks else 0, found[look]

        return sorted(found, key=tight)

    def runners_up(self, plan: Estimate) -> tuple[Estimate, ...]:
        """The next plans by falling speed, each needing less memory than the one before; and when the plan is lossy,
        the best one that is not."""
        found: list[Estimate] = []
        lowest = self.look(plan.job, plan.strategy).device_bytes

        def tighter() -> float:
            return lowest * 0.97

        kinds = None if plan.lossy or self.question.allow_lossy else False
        for other in self.by_speed(plan.job, kinds, plan.verdict, below=tighter):
            if other.strategy == plan.strategy:
                continue
            found.append(other)
            lowest = self.look(other.job, other.strategy).device_bytes
            if len(found) == RUNNERS_UP:
                break
        if not found:  # the last rung of a ladder: everything moved that can be
            last = self.tightest(plan.job, kinds)
            fits = last is not None and last.verdict in ("fits", plan.verdict)
            if last and fits and self.look(last.job, last.strategy).device_bytes < tighter():
                found.append(last)
        if plan.lossy and all(other.lossy for other in found):
            other_kind = self.best_lossless(plan.job)
            found[:0] = [other_kind] if other_kind else []
        return tuple(found)

    def best_lossless(self, job: Job) -> Estimate | None:
        """The fastest lossless plan, else the one that needs least."""
        for verdict in ("fits", "tight"):
            if found := next(self.by_speed(job, False, verdict), None):
                return found
        return self.tightest(job, False)

    def switches(self, plan: Estimate) -> tuple[Switch, ...]:
        """What each step from the naive setting to the plan saved and cost, in an order in which each is allowed.

        By looks: what fragmentation takes or gives on the way is left out.
        """
        question = self.question
        state = naive(plan.job, question.strategy, question.machine, question.fixed)
        last = self._seen(plan.job, state) or self.look(plan.job, plan.strategy)
        found = []
        for field in switched(state, plan.strategy):
            before, after = getattr(state, field), getattr(plan.strategy, field)
            state = state.replace(**{field: after})
            # A step on the way may have no recording of its own; the next one then counts for both.
            now = self._seen(plan.job, state) or last
            saved = now.device_bytes - last.device_bytes
            found.append(Switch(field, before, after, saved, now.step_seconds - last.step_seconds))
            last = now
        return tuple(found)

    def _seen(self, job: Job, strategy: Strategy) -> Look | None:
        """A look at a strategy that nobody checked for recordings; None where there are none, or it is refused."""
        try:
            return self.look(job, strategy)
        except NotEstimatedError as error:
            self.missing = self.missing or error
            return None

    def priced(self, job: Job, strategy: Strategy) -> Estimate | None:
        """The full estimate, or None where there is no recording for it."""
        try:
            return self.settled(job, strategy)
        except NotEstimatedError as error:
            self.missing = self.missing or error
            self._lost[strategy.replace(swap_blocks=0)] = NEVER
            return None
