"""What people look at: pages built from plans and measurements. Nothing here computes a number.

Commands call one function: `reports.write`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.evidence.accuracy import Comparison
    from planner.evidence.published import Row
    from planner.foreign.rehearsed_command import CheckedRehearsal
    from planner.launch.run_history import RunHistory
    from planner.rehearsal.answer import RehearsalAnswer
    from planner.spec.plan import Plan
    from reports import data

RUN_REPORT = "report.html"
"""In a run's folder."""


def write(
    path: str | Path,
    plans: Sequence[tuple[str, Plan]] = (),
    *,
    rows: Sequence[Row] = (),
    probes: Sequence[Mapping[str, Any]] = (),
    compared: Sequence[Comparison] = (),
    changes: Sequence[tuple[str, str]] = (),
    command: str = "",
    created: str | None = None,
) -> None:
    """Writes one HTML page to ``path``, which must end in .html.

    ``plans``: (name, plan), shown one after another and, when several, side by side. ``rows``: measurements to compare
    with, beside those that come with vplan. ``probes``: rows of our own as `planner.evidence.jsonl` reads them, each
    shown with its outcome. ``compared``: as `planner.evidence.accuracy.compare` gives them, for a page of their own.
    ``changes``: (what to change, what that does) that make the plan fit. ``command``: what makes this page again.
    ``created``: ISO 8601; now, when left out.
    """
    from datetime import UTC, datetime

    from planner.estimate import timeline
    from planner.evidence import accuracy, held_out
    from planner.evidence.published import shipped_rows
    from planner.garbage_collection import without_garbage_collection
    from planner.parallel import progress_bar
    from reports import data, page, share

    page.check_name(path)
    # Of a run that was printed twice, the peak of training alone.
    shipped = [row for row in shipped_rows() if row.strategy.validation_mode == "off"] if plans else []
    measured = [*shipped, *rows]
    with without_garbage_collection():
        points = timeline.POINTS // max(len(plans), 1)  # many plans on a page are told in less detail each
        with progress_bar("report", data.PARTS * len(plans)) as progress:
            plan_pages = tuple(
                data.Builder(name, plan, measured, probes, points, changes).data(share.shared, progress)
                for name, plan in plans
            )
    content = page.Page(
        title=_title(plan_pages),
        plans=plan_pages,
        compared=tuple(compared),
        summary=accuracy.summary(compared) if compared else {},
        halves=held_out.halves(compared),
        environment=data.environment(created or datetime.now(UTC).isoformat(timespec="seconds")),
        command=command,
    )
    page.write(page.render(content), path)


def write_rehearsal(
    path: str | Path,
    answer: RehearsalAnswer,
    checked: CheckedRehearsal | None,
    *,
    command: str = "",
    created: str | None = None,
) -> None:
    """Writes one HTML page about a rehearsal to ``path``, which must end in .html; the others as for `write`."""
    from datetime import UTC, datetime

    from reports import data, page
    from reports.rehearsal_data import RehearsalPage

    environment = data.environment(created or datetime.now(UTC).isoformat(timespec="seconds"))
    page.write(page.render(RehearsalPage(answer, checked, environment, command)), path)


def write_run(history: RunHistory, path: str | Path | None = None, *, created: str | None = None) -> Path:
    """Writes the page of a training run to ``path``, which must end in .html, or into its folder as `RUN_REPORT`;
    returns its path. The page shows the samples where they are."""
    from reports import page
    from reports.run_data import run_page

    path = Path(path) if path else history.output / RUN_REPORT
    page.write(page.render(run_page(history, created=created, folder=path.parent)), path)
    return path


def run_html(history: RunHistory) -> str:
    """The page of a training run that is served while it goes on, and looks for news itself."""
    from reports import page
    from reports.run_data import run_page

    return page.render(run_page(history, live=True))


def _title(plans: Sequence[data.PlanData]) -> str:
    if len(plans) == 1:
        return plans[0].title
    models = ", ".join(dict.fromkeys(plan.estimate.job.model for plan in plans))
    return f"{len(plans)} plans for {models}" if plans else "How near the estimates come"
