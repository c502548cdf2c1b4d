"""What is worth what in a search: how much a strategy gives up, and how much slower is slower."""

from __future__ import annotations

import math

from planner.spec.job import Job, Strategy

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
