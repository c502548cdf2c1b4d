"""What one model cannot take: more blocks than it has, reference images, experts. Shapes it cannot take have numbers in
their fixes and are in `planner.catalog.shapes`."""

from __future__ import annotations

from typing import NamedTuple

from planner.spec.combinations.combination import Combination, ModelSummary
from planner.spec.job import Job, Strategy


class ModelJob(NamedTuple):
    """A job with the summary of the model that it names: the subject of rows about frames, sizes and references."""

    model: ModelSummary
    job: Job


class BlockCounts(NamedTuple):
    """A strategy that counts blocks (swapped, checkpointed), with the summary of the model that has them."""

    model: ModelSummary
    strategy: Strategy

    @property
    def most_swapped(self) -> int:
        """The most blocks that may leave the GPU: one must stay."""
        return self.model.blocks - 1


JOB_LIMITS: tuple[Combination[ModelJob], ...] = (
    Combination(
        "model cannot",
        lambda s: s.job.references > 0 and not (s.model.references or s.model.takes_references),
        "{0.model.title} does not take reference images",
        "leave out --references",
    ),
    Combination(
        "model cannot",
        lambda s: s.model.references > 0 and not s.job.references and "references" in s.job.model_fields_set,
        "{0.model.title} changes an image it is given, and references 0 provides none",
        "write --references {0.model.references} or more, or leave it out",
    ),
    Combination(
        "model cannot",
        lambda s: s.job.experts is not None and s.model.experts == 1,
        "{0.model.title} is one model, has no experts",
        "leave out --experts",
    ),
)

BLOCK_LIMITS: tuple[Combination[BlockCounts], ...] = (
    Combination(
        "model cannot",
        lambda s: s.strategy.swap_blocks >= s.model.blocks,
        "swap_blocks {0.strategy.swap_blocks} of the {0.model.blocks} blocks of {0.model.title}",
        "write --swap-blocks {0.most_swapped} at most",
    ),
    Combination(
        "model cannot",
        lambda s: (s.strategy.checkpointed_blocks or 0) > s.model.blocks,
        "checkpointed_blocks {0.strategy.checkpointed_blocks} of {0.model.blocks} blocks",
        "write --checkpointed-blocks {0.model.blocks} at most, or --gradient-checkpointing full",
    ),
)
