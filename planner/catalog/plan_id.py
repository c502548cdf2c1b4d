"""What makes two plans the same: the name under which a plan's measurements are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from planner.catalog import lookup
from planner.spec.plan import Plan
from planner.spec.rules import resolve


def row_id(plan: Plan, config: Mapping[str, Any] | None = None) -> str:
    """The name of a plan's row: the same for the same job, strategy and machine, whatever else the plan's file says.

    Under which torch it was taken says the row's environment, so the one that a plan was made for is no part of it.
    """
    model = lookup.model(plan.job.model).name
    records = {
        "job": plan.job.replace(model=model),
        "strategy": resolve(plan.job, plan.strategy, plan.machine),
        "machine": plan.machine.replace(torch=None),
    }
    content: dict[str, Any] = {
        part: record.model_dump(mode="json", exclude_defaults=True) for part, record in records.items()
    }
    if config:
        content["config"] = dict(config)
    import hashlib  # slow to import, and nobody without measurements asks

    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return f"{model}-{plan.job.method}-{digest}"
