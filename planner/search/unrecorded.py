"""What a search could not look at because nothing was recorded of it, where it may need less than the plan found."""

from __future__ import annotations

from planner.errors import NotEstimatedError, NotRecordedError
from planner.search.question import Unrecorded
from planner.search.search import Search
from planner.spec.combinations.contradictions import contradictions
from planner.spec.configuration import Configuration
from planner.spec.plan import Estimate

LESS_MEMORY: tuple[dict[str, object], ...] = (
    {"gradient_checkpointing": "full"},
    {"nested_checkpointing": True},
    {"adapter_inputs": "shared"},
)
"""Options that keep less on the card and each have a recording of their own: the first of every model of a user's own
that was recorded in part, the others over a base in 16 bits alone (`planner.tape.variants`, ``on_request``)."""


def unrecorded(search: Search, plan: Estimate) -> Unrecorded | None:
    """The first option that would make a plan which does not fit the card smaller, or may, and has no recording."""
    strategy, question = plan.configuration.strategy, search.question
    if plan.verdict != "no" or plan.limit != "gpu" or plan.job.method == "sample":
        return None
    for changes in LESS_MEMORY:
        ((field, value),) = changes.items()
        held = field in question.fixed or getattr(strategy, field) not in ("none", "cast", False)
        other = Configuration.of(plan.job, strategy.replace(**changes), question.machine)
        if held or next(contradictions(other), None) or not search.policy.candidates(plan.job, [other.strategy]):
            continue
        try:
            search.screen.facts(other)
        except NotRecordedError as error:
            if "vplan record" in error.fix:
                return Unrecorded(field, value, error.fix.partition(": ")[2])
        except NotEstimatedError:
            continue
    return None
