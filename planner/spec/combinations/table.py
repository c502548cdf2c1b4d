"""Which combinations of job, strategy, machine and model may run: one table, with a reason and a fix for each row.

`TABLE` holds every row. Its kinds, and who asks for them:

| kind | rows | asked by |
|---|---|---|
| contradiction | `contradictions` | `contradictions.refuse_contradictions` |
| model cannot | `model_limits` | `planner.catalog.shapes` |
| not estimated | `estimate_gaps` | `planner.layout.unpriced.refuse_unpriced` |
| our trainer cannot | `trainer_gaps` | `planner.launch.supported.supported_plan` |
| not worth searching | `search_exclusions` | `planner.search.space.strategies` |

Within a kind the order of the rows is the order in which faults are reported, and of most kinds only the first is.
What one field alone decides (values that our trainer lacks, values without memory terms) stands at the field itself, in
`planner.spec.job`. What another trainer has no word for is in its dialect.
"""

from __future__ import annotations

from typing import Any

from planner.spec.combinations.combination import Combination
from planner.spec.combinations.contradictions import CONTRADICTIONS
from planner.spec.combinations.estimate_gaps import ESTIMATE_GAPS
from planner.spec.combinations.model_limits import BLOCK_LIMITS, JOB_LIMITS
from planner.spec.combinations.search_exclusions import SAMPLING_EXCLUSIONS, TRAINING_EXCLUSIONS
from planner.spec.combinations.trainer_gaps import TRAINER_GAPS

TABLE: tuple[Combination[Any], ...] = (
    *CONTRADICTIONS,
    *JOB_LIMITS,
    *BLOCK_LIMITS,
    *ESTIMATE_GAPS,
    *TRAINER_GAPS,
    *TRAINING_EXCLUSIONS,
    *SAMPLING_EXCLUSIONS,
)
