"""A sample of `tests/tools/exported_grid.py`: what is written has the trainer's own options alone, and its price."""

from __future__ import annotations

import random

import pytest

from planner.catalog import lookup
from planner.foreign.export import export_targets
from tests.tools.exported_grid import FAULTS, STRATEGIES, ask

MODELS_OF_EACH = 2
STRATEGIES_OF_EACH = (3, len(STRATEGIES))
"""As many are drawn for a model, then all: what a trainer of one model trains may not be among those at first."""


@pytest.mark.parametrize("target", export_targets())
def test_what_is_written_is_read_back_at_the_same_price(target: str) -> None:
    drawn = random.Random(target)
    for count in STRATEGIES_OF_EACH:
        written = 0
        for model in drawn.sample(lookup.model_names(), len(lookup.model_names())):
            answers = {strategy: ask(model, strategy, target) for strategy in drawn.sample(list(STRATEGIES), count)}
            wrong = {strategy: words for strategy, (kind, words) in answers.items() if kind in FAULTS}
            assert not wrong, (model, wrong)
            written += any(kind != "refused" for kind, _ in answers.values())
            if written == MODELS_OF_EACH:
                break
        if written:
            return
    pytest.fail(f"no model of {target} was written")
