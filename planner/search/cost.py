"""What is worth what in a search: how much a strategy gives up, how much slower is slower, and the order of both."""

from __future__ import annotations

import heapq
import itertools
import math

from planner.search.checkpoint_count import CheckpointCount
from planner.search.policy import Policy
from planner.search.pruning import Pruning
from planner.search.screening import QuickEstimate
from planner.search.space import effort
from planner.spec.job import Job, Strategy
from planner.spec.rules import ResolvedStrategy

SAME_SPEED = 0.005
"""Seconds that differ by less than this share are no reason to switch anything on: predictions are not that good."""

FOUR_BITS = ("nf4", "int4")

TIGHTEST = 3
"""How many of the tightest strategies anybody asks for."""

TIGHTER = 0.97
"""A runner-up, or a rung of a ladder, needs less than this share of the memory that all before it need."""

WORTH_LOSS = 1.05
"""The tightest plan of all is a lossy one only when every lossless one needs this much more."""

WORTH_SPEED = 2.0
"""Among lossy plans one more lossy field must make the step this much faster: an optimizer in host RAM gives up nothing
more than one of 8 bits saves, and can take eight times as long."""

WORTH_PART = 0.015
"""Checkpointing a part of the blocks must save this share of a step: it takes all the memory that there is. With the
rounding to `SAME_SPEED` an answer is within 2 % of the fastest plan (`python -m tests.benchmarks.optimality`)."""


def loss(job: Job, strategy: Strategy) -> int:
    """How many lossy fields a strategy has for this job. 4-bit weights count twice, and checkpoints in 8 bits three
    times: bases and states of 8 bits are what people train with, and of checkpoints so nobody has published results for
    these models."""
    rounded = 2 * (strategy.gradient_checkpointing == "fp8")
    return len(strategy.lossy_fields(job)) + (strategy.weights(job.method) in FOUR_BITS) + rounded


def slowness(seconds: float, fastest: float, lost: int = 0) -> int:
    """How much slower than the fastest a step is, counted in steps that matter; ``lost``, what the strategy gives up,
    is added in the same unit. Lower is better."""
    return round((math.log(seconds / fastest) + lost * math.log(WORTH_SPEED)) / SAME_SPEED)


class SpeedQueue:
    """Strategies of one shape, the fastest first; of equally fast ones the one with the fewest switches, then the one
    with the least memory. Each is there with its quick estimate, or without one by a lower bound of its seconds."""

    def __init__(
        self,
        job: Job,
        verdict: str,
        start: ResolvedStrategy,
        by_loss: bool,
        fastest: float,
        policy: Policy,
        pruning: Pruning,
        checkpoint_count: CheckpointCount,
    ) -> None:
        """``start``: the strategy from which switches are counted. ``by_loss``: whether one that loses more precision
        counts as slower. ``fastest``: the lowest bound, around which steps of speed are taken."""
        self.job, self.verdict, self.start = job, verdict, start
        self.by_loss, self.fastest = by_loss, fastest
        self.policy, self.pruning, self.checkpoint_count = policy, pruning, checkpoint_count
        self._ties = itertools.count()
        self._heap: list[tuple[tuple[int, int, int], int, ResolvedStrategy, QuickEstimate | None]] = []

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, strategy: ResolvedStrategy, seconds: float, quick: QuickEstimate | None) -> None:
        """Adds a strategy by its seconds. Without a quick estimate they and all else are a lower bound, so that what
        comes first with one is the best."""
        worth = 1 + WORTH_PART if self.checkpoint_count.is_open(strategy) else 1
        speed = slowness(worth * seconds, self.fastest, self.policy.loss(self.job, strategy) if self.by_loss else 0)
        swaps = quick is None and self.pruning.weights_force_swap(self.job, strategy, self.verdict)
        work = effort(self.start, strategy.replace(swap_blocks=1) if swaps else strategy)
        memory = quick.device_bytes if quick else 0
        heapq.heappush(self._heap, ((speed, work, memory), next(self._ties), strategy, quick))

    def pop(self) -> tuple[ResolvedStrategy, QuickEstimate | None]:
        """Takes the first strategy."""
        _, _, strategy, quick = heapq.heappop(self._heap)
        return strategy, quick
