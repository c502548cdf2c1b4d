"""`vplan record` without a worker: what its worker does, done here. A process takes seconds to import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from planner.errors import VplanError
from planner.launch.recorders import Order, Within
from trainers import record


class InProcess:
    """Stands in for `planner.launch.recorders.Recorders`."""

    def __init__(self, jobs: int, within: Within | None = None) -> None:
        self.jobs = jobs
        self.within = within

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None: ...

    def answers(self, orders: Sequence[Order]) -> Iterator[tuple[int, dict[str, Any]]]:
        for position, order in enumerate(orders):
            answer = json.loads(json.dumps(record.answer(json.loads(json.dumps(order.to_json())))))
            if answer["outcome"] == "refused":
                raise VplanError(answer["message"], answer["fix"], answer["exit_code"])
            yield position, answer
