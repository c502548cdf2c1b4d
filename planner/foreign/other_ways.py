"""Other ways out, where no option of its trainer makes a command fit: shorter clips and smaller sizes
(`planner.foreign.smaller_shapes`), a larger card, more host RAM, or a LoRA instead of full training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from planner.catalog import card_lookup
from planner.errors import VplanError
from planner.foreign.check import Checked
from planner.foreign.pricing import CheckedEstimate, Pricing
from planner.foreign.smaller_shapes import shapes
from planner.foreign.trainer_search import fitting_for
from planner.search.question import Question
from planner.search.suggester import Suggester
from planner.spec.job import Job, Strategy
from planner.spec.plan import Estimate
from planner.units import GIB


def with_other_ways(checked: Checked) -> Checked:
    """The answer with what is left to do where no option is enough."""
    if checked.fixes or checked.outcome.estimate.verdict == "fits":
        return checked
    smaller = tuple(shapes(checked.together)) if checked.together else ()
    larger, ram = larger_card(checked), more_ram(checked)
    return replace(checked, smaller=smaller, larger_card=larger, more_ram=ram, as_lora=as_lora(checked))


def as_lora(checked: Checked) -> tuple[str, Estimate] | None:
    """A LoRA of the same model at the same size that fits the card, by the same trainer, else by ours; with the words
    that ask for it. None of what is one already, or where none fits."""
    case, job = checked.case, checked.case.job
    if job.method != "full" or job.buckets or case.machine.world > 1:
        return None
    wanted = Job(model=job.model, method="lora", frames=job.frames, height=job.height, width=job.width)
    question = Question(wanted, Strategy(), case.machine, case.model, case.gpu)
    frames = f"--frames {job.frames} " if case.model.kind == "video" else ""
    size = f"{frames}--resolution {job.height}x{job.width}"
    searches: dict[str, Callable[[], Estimate | None]] = {
        f" --for {case.dialect.name}": lambda: fitting_for(question, case.dialect.name),
        "": lambda: _fitting(question),
    }
    for words, search in searches.items():
        with contextlib.suppress(VplanError):  # that trainer does not, or nothing writes its files
            plan = search()
            if plan is not None and plan.verdict == "fits":
                return f"vplan suggest {job.model} --gpu {case.machine.gpu} {size}{words}", plan
    return None


def _fitting(question: Question) -> Estimate | None:
    suggester = Suggester()
    found = suggester.best(suggester.search(question), explain=False)
    return found.plan if found else None


def more_ram(checked: Checked) -> int | None:
    """The host RAM, bytes, in whole GiB, with which the command fits as it is; None where that is not what is short."""
    estimate = checked.outcome.estimate
    if estimate.limit != "host":
        return None
    needed = -(-estimate.host_ram_bytes // GIB) * GIB
    case = replace(checked.case, machine=checked.case.machine.replace(host_ram=needed))
    return needed if Pricing(case).outcome(case).estimate.verdict == "fits" else None


def larger_card(checked: Checked) -> CheckedEstimate | None:
    """The command as it is on the smallest class of card that it fits; None where the card is not what is short, or it
    fits none."""
    estimate = checked.outcome.estimate
    if estimate.limit != "gpu" or checked.case.gpu.unified:
        return None
    read = checked.together.pricing if checked.together else None
    for group in card_lookup.gpu_classes():
        card = card_lookup.gpu(group.name)
        if card.unified or card.allocatable_bytes <= estimate.budget_bytes:
            continue
        case = replace(checked.case, gpu=card, machine=checked.case.machine.replace(gpu=group.name, unified=False))
        pricing = Pricing(case, read)
        if pricing.may_be("fits", case) and (outcome := pricing.outcome(case)).estimate.verdict == "fits":
            return outcome
    return None
