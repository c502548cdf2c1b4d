"""Whether a strategy can still come to a verdict, before it is replayed: what pruning, counting swapped blocks and the
search itself ask of one question.

A quick estimate leaves out fragmentation, so it is a lower bound. Each replay tells how much above it a strategy
really is, and later questions about the same strategy count that in.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.layout import margin
from planner.search.policy import Policy
from planner.search.question import Question
from planner.search.screening import QuickEstimate, Screen
from planner.spec.configuration import Configuration
from planner.spec.job import Job
from planner.spec.plan import Estimate
from planner.spec.rules import ResolvedStrategy

NEVER = 1e6
"""Times the quick estimate: where a strategy cannot be replayed, so that nothing asks for it again."""


class Feasibility:
    """The quick estimates of one question, compared with its budgets of device memory and host RAM."""

    def __init__(self, question: Question, screen: Screen, policy: Policy) -> None:
        self.question = question
        self.screen = screen
        self.policy = policy
        self.considered: set[tuple[Job, ResolvedStrategy]] = set()
        """strategies at the shapes at which they were ranked or estimated"""
        self._overheads: dict[ResolvedStrategy, float] = {}
        """`_counted` strategy -> device bytes of its replays over those of its quick estimates, the most seen"""
        self._in_part: dict[tuple[Job, ResolvedStrategy], dict[int, int]] = {}
        """job and `_counted` strategy -> checkpointed blocks, where not all are -> device bytes of the replay"""

    def quick_estimate(
        self, job: Job, strategy: ResolvedStrategy, recorded: Configuration | None = None
    ) -> QuickEstimate:
        """Memory and seconds without a replay. Raises a NotEstimatedError where there is no recording.

        ``recorded``: as for `Screen.facts`.
        """
        self.considered.add((job, strategy))
        candidate = self.question.candidate(job, strategy)
        if recorded is not None:
            self.screen.facts(candidate, recorded)
        return self.screen.quick_estimate(candidate)

    def overhead(self, strategy: ResolvedStrategy) -> float:
        """Device bytes that replays of a strategy took, over its quick estimates; 1 before the first replay."""
        return self._overheads.get(_counted(strategy), 1.0) if self._overheads else 1.0

    def expected_bytes(self, quick: QuickEstimate) -> int:
        """The device peak in bytes that a replay will probably give: the quick estimate times the strategy's overhead,
        or less where replays with other numbers of checkpointed blocks say so."""
        expected = int(quick.device_bytes * self.overhead(quick.strategy))
        replays = self._in_part.get((quick.job, _counted(quick.strategy)), {})
        if not replays or expected >= NEVER * quick.device_bytes:
            return expected
        return min(expected, max(quick.device_bytes, self._by_replays(quick, replays)))

    def _by_replays(self, quick: QuickEstimate, replays: Mapping[int, int]) -> int:
        """Device bytes on the line through the two replays with the nearest numbers of checkpointed blocks: what is
        reserved falls with each block alike, also where the allocated peak is in a phase that no block lowers. With one
        replay the line ends at the quick estimate with the most blocks."""
        count, most = quick.strategy.checkpointed_blocks, self.question.model.blocks - 1
        assert count is not None
        points = dict(replays)
        if len(points) == 1 and most not in points:
            whole = quick.strategy.replace(checkpointed_blocks=most)
            points[most] = self.quick_estimate(quick.job, whole).device_bytes
        (near, nbytes), *further = sorted(points.items(), key=lambda point: abs(point[0] - count))
        if not further:
            return nbytes
        far, other = further[0]
        return nbytes + (other - nbytes) * (count - near) // (far - near)

    def learn(self, replayed: Estimate) -> None:
        """Records how much more device memory a replay took than the quick estimate (fragmentation), for its
        strategy."""
        strategy = replayed.configuration.strategy
        overhead = replayed.peak.device_bytes / self.quick_estimate(replayed.job, strategy).device_bytes
        bare = _counted(strategy)
        self._overheads[bare] = max(overhead, self._overheads.get(bare, 1.0))
        if strategy.checkpointed_blocks is not None:
            replays = self._in_part.setdefault((replayed.job, bare), {})
            replays[strategy.checkpointed_blocks] = replayed.peak.device_bytes

    def give_up(self, strategy: ResolvedStrategy) -> None:
        """Records that a strategy cannot be replayed, so that it never fits."""
        self._overheads[_counted(strategy)] = NEVER

    def may_reach(self, quick: QuickEstimate, verdict: str = "fits") -> bool:
        """Whether a replay could come to this verdict. What a run of this very plan did decides before any number."""
        if quick.outcome is not None:
            return quick.outcome == "ran"
        shared = self.question.machine.unified or self.question.gpu.unified  # then both are of one memory
        nbytes = self.expected_bytes(quick) + (quick.host_ram_bytes if shared else 0)
        return not self.exceeds_gpu(nbytes, quick.strategy, verdict) and self.has_ram(quick)

    def share_left(self, quick: QuickEstimate) -> float:
        """About what share of the card's memory a replay would leave, or of the host's RAM where that is less;
        negative where one is short. For guesses alone: `may_reach` decides."""
        left = 1 - self.expected_bytes(quick) / self.room("fits")
        ram = self.question.machine.host_ram
        return min(left, 1 - quick.host_ram_bytes / ram) if ram else left

    def exceeds_gpu(self, device_bytes: int, strategy: ResolvedStrategy, verdict: str) -> bool:
        """Whether `device_bytes` on the GPU rule a verdict ("fits", "tight") out for a strategy."""
        return self.policy.exceeds_gpu(device_bytes, strategy, verdict)

    def room(self, verdict: str) -> float:
        """About how many bytes a plan may be expected to need on the device for a verdict."""
        budget = self.question.budget_bytes
        low, high = margin.interval(budget, sides=self.question.sides)
        return budget**2 / (high if verdict == "fits" else low)

    def exceeds_ram(self, host_bytes: int) -> bool:
        """Whether `host_bytes` are more than the host's RAM."""
        return self.policy.exceeds_ram(host_bytes)

    def has_ram(self, quick: QuickEstimate) -> bool:
        """Whether the host has the RAM that a quick estimate needs."""
        return not self.exceeds_ram(quick.host_ram_bytes)


def _counted(strategy: ResolvedStrategy) -> ResolvedStrategy:
    """What strategies have in common that differ in how many blocks they swap or checkpoint alone."""
    return strategy.replace(swap_blocks=0, checkpointed_blocks=1 if strategy.checkpointed_blocks else None)
