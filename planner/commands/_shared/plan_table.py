"""The answer of `vplan suggest` to a question without a card or a model: a plan for each card class or model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from planner.catalog import card_lookup, lookup
from planner.commands._shared.data_options import AskedLength, whole_job_of
from planner.commands._shared.rendering import render_rows
from planner.commands._shared.rendering.verdict_words import AS, card_words
from planner.commands._shared.request import TypedQuestion
from planner.errors import VplanError
from planner.estimate.whole_job import WholeJob
from planner.parallel import spread
from planner.search.question import Question
from planner.search.suggester import Suggester, assumptions, shortage
from planner.spec.job import Machine
from planner.spec.plan import Estimate
from planner.units import format_gib


@dataclass(frozen=True)
class PlanTable:
    """A table with one line per model or class of card, computed on several cores: each process has a table of its
    own."""

    asked: TypedQuestion
    prefer: str
    allow_lossy: bool
    several: tuple[str, ...] = ()
    """the models to answer for, if the typed name matches more than one"""
    length: AskedLength | None = None
    trainer: str = ""
    """another trainer, whose memory terms apply"""

    @functools.cached_property
    def suggester(self) -> Suggester:
        """Of this process alone, so that a table can be sent to others before its first line."""
        return Suggester(self.asked.trainer, self.prefer)

    def models(self) -> list[render_rows.TableRow]:
        """A line for every model that can train on clips of this length."""
        images_too = self.asked.job.get("frames") in (None, 1) and self.prefer != "frames"
        known = lookup.model_names()
        names = self.several or [name for name in known if images_too or lookup.model(name).kind == "video"]
        rows, refusals = [], []
        for name, found in zip(names, spread(_row_maker, (self,), names, "models"), strict=True):
            if isinstance(found, VplanError):
                refusals.append(found)
                found = render_rows.TableRow(name, None, found.message, 0)
            rows.append(found)
        if refusals and len(refusals) == len(rows):
            raise refusals[0]
        return rows

    def classes(self) -> list[render_rows.TableRow]:
        """A line for every class of card."""
        rows = []
        for found in spread(_row_maker, (self,), [group.name for group in card_lookup.gpu_classes()], "cards"):
            if isinstance(found, VplanError):
                raise found
            rows.append(found)
        return rows

    def row(self, name: str) -> render_rows.TableRow | VplanError:
        """The line for one model, or for the typed model on one class of card; or the reason why there is no plan."""
        try:
            if self.asked.model is None or self.several:
                return self._row(name, self.asked.to_question(model=name))
            return self._row(name, self.asked.to_question(gpu=name))
        except VplanError as error:
            return error

    def first_line(self) -> str:
        """One sentence about how the question was understood."""
        asked = self.asked
        if asked.model is None or self.several:
            count, card = card_lookup.parse_gpus(asked.gpu or "")
            cards = card_words(Machine(gpu=card.name, gpus=count), card)
            priced_as = f"{AS}{card.title.partition(AS)[2]}" if AS in card.title else ""
            models = f"{asked.model!r} may mean {len(self.several)} models" if self.several else "all known models"
            trained = f", as {self.trainer} trains," if self.trainer else ","
            return f"{models}, {asked.job.get('method', 'lora')}{trained} on {cards}{priced_as}: " + (
                f"{card.allocatable_gib:.2f} GiB usable"
            )
        return f"{lookup.model(asked.model).title}, {asked.job.get('method', 'lora')}, on every card class"

    def _row(self, name: str, question: Question) -> render_rows.TableRow:
        if self.trainer:
            return self._row_as_trained(name, question._replace(allow_lossy=self.allow_lossy))
        search, suggestion = self.suggester.fitting(question._replace(allow_lossy=self.allow_lossy))
        plan = suggestion.plan if suggestion else search.tightest(question.job)
        if plan is None or plan.verdict == "no":
            reason = shortage(search, plan) if plan else search.missing.message if search.missing else ""
            return render_rows.TableRow(name, None, reason, search.considered)
        plan = plan.replace(assumptions=assumptions(question, plan))
        whole = whole_job_found(self.length, self.suggester, plan)
        return render_rows.TableRow(name, plan, "", search.considered, whole)

    def _row_as_trained(self, name: str, question: Question) -> render_rows.TableRow:
        """The line for a model in another trainer."""
        from planner.foreign.trainer_search import suggest_for, trainer_of

        plan = suggest_for(question, self.trainer, self.prefer)[1].plan
        if plan.verdict == "no":
            ram = f"{format_gib(plan.host_ram_bytes)} of host RAM"
            least = ram if plan.limit == "host" else format_gib(plan.peak.device_bytes)
            return render_rows.TableRow(name, None, f"needs at least {least}", 0)
        whole = whole_job_of(self.length, plan, trainer_of(self.trainer, plan.job.model))
        return render_rows.TableRow(name, plan, "", 0, whole)


def _row_maker(table: PlanTable) -> Callable[[str], render_rows.TableRow | VplanError]:
    return table.row


def whole_job_found(length: AskedLength | None, suggester: Suggester, plan: Estimate) -> WholeJob | None:
    """The whole job of a plan, if a length was given and the plan runs."""
    if length is None or plan.verdict == "no":
        return None
    screen = suggester.screen
    return length.of(plan, screen.facts(plan.configuration), suggester.trainer, screen.run_cache.lay_out)
