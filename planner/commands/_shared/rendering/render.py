"""One answer in the terminal: the verdict in a line, the bar, the plan, then the rest.

Fits 80 columns: tables keep their numbers and wrap their words, and commands to type are broken between options. Rich
omits colours when the output is not a terminal.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import in_words
from planner.commands._shared.rendering.render_job import seconds_words, whole_words
from planner.commands._shared.rendering.render_relaxed import flag_words, other_kind, print_relaxed
from planner.commands._shared.rendering.verdict_words import AS, VERDICTS, card_words, count_words, need_words
from planner.commands._shared.rendering.wrapping import INDENT, command_lines, print_command, print_notes
from planner.commands._shared.verb import table, typed_line
from planner.dialects.base import cli_words
from planner.estimate.pinned_ram import HALVED
from planner.estimate.working_set import headline
from planner.spec.job import Strategy
from planner.spec.plan import Estimate, Plan
from planner.spec.rules import resolve
from planner.spec.wording import ways
from planner.units import GIB, format_gib, format_seconds, gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from planner.catalog.card_profiles import GpuProfile
    from planner.catalog.profiles import ModelProfile
    from planner.estimate.whole_job import WholeJob
    from planner.search.question import Question, Suggestion, Switch

BAR_WIDTH = 48
NUMBERED = 32
"""Cells of a bar whose numbers stand beside it, in 80 columns."""


def print_answer(console: Console, question: Question, estimate: Estimate) -> None:
    """Prints the first two lines of an answer: the verdict on the question as it was understood, and the bar."""
    words = in_words(question.model, estimate.job).removesuffix(", batch 1")
    print_verdict(console, estimate, f"{_trained(question.model.title, estimate)}, {words}", question.gpu)
    if taken := [note for note in estimate.assumptions if _is_reading(note)]:
        console.print("; ".join(taken), style="yellow")


def _trained(title: str, estimate: Estimate) -> str:
    job = estimate.job
    return f"{title}, {job.trains}{job.adapter_size}"


def print_verdict(console: Console, estimate: Estimate, what: str, card: GpuProfile) -> None:
    """Prints the verdict on a job and a card in one line, and the bar. ``what``: the job in words."""
    from rich.text import Text

    word, style = VERDICTS[estimate.verdict]
    line = Text(word, style)
    reserve = estimate.machine.reserve
    kept = f", {format_gib(reserve)} of it kept free" if reserve else ""
    line.append(f": {what}, on {card_words(estimate.machine, card)}{kept}", "default")
    console.print(line)
    console.print(bar(console, estimate))
    if said := headline(estimate.assumptions):
        console.print(said, style=style)
    if estimate.limit == "host":
        where = f" ({estimate.host.phase}: {format_gib(estimate.host_ram_bytes)})" if estimate.host is not None else ""
        console.print(f"not enough host RAM{where}", style=style)


def print_assumptions(console: Console, question: Question, estimate: Estimate | None = None) -> None:
    """Prints the defaults that were taken (those of ``estimate``, if a search chose some)."""
    assumed = _assumed(question, estimate)
    notes = [note for note in assumed if not _is_reading(note) and note != headline(assumed)]
    if AS in question.gpu.title:
        notes.insert(0, question.gpu.title.replace(AS, " as "))
    if notes:
        print_notes(console, "assumed", notes)


def _assumed(question: Question, estimate: Estimate | None) -> tuple[str, ...]:
    return estimate.assumptions if estimate else question.assumptions


def _is_reading(note: str) -> bool:
    """Whether a note says how something typed was interpreted; such notes are printed first."""
    return re.search(r" taken for | read as | is height x width|^as .* trains", note) is not None


def print_next(console: Console, estimate: Estimate, output: str | None) -> None:
    """Prints the next command to type: save the plan and train it; if it is tight, probe it first. Only on a terminal:
    pipes get only the answer."""
    context = click.get_current_context(silent=True)
    if not console.is_terminal or not estimate.timed:
        return
    if estimate.verdict == "no":
        if context is None or context.info_name != "estimate":  # other commands print what would fit
            return
        said = cli_words.command(
            "suggest", estimate.job, resolve(estimate.job, Strategy(), estimate.machine), estimate.machine
        )
    elif output is None:
        said = typed_line("-o", "plan.toml")
    elif estimate.verdict == "tight":
        said = shlex.join(["vplan", "probe", output])
    elif estimate.job.method == "sample":
        said = shlex.join(["vplan", "report", output])
    else:
        said = shlex.join(["vplan", "train", output]) + " --data DIR --output DIR --weights DIR"
    console.print()
    print_command(console, "next: ", said)


def print_estimate(console: Console, estimate: Estimate, whole: WholeJob | None = None) -> None:
    """Prints one estimate below its verdict and bar: options, seconds, phases and breakdown."""
    console.print(f"plan: {ways(estimate)}", style="bold")
    console.print(f"{_step(estimate)}{_ram(estimate)}, attention: {estimate.attention_kernel}")
    if whole:
        console.print(whole_words(whole), style="bold")
    if estimate.lossy:
        console.print(f"lossy: {', '.join(estimate.lossy)}", style="yellow")
    print_windows(console, estimate)
    console.print(f"peak: {estimate.peak.phase}, {estimate.peak.moment}")
    rows = [
        (name, *(f"{gib(value):.2f}" for value in (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)))
        for name, peak in estimate.phases.items()
    ]
    console.print()
    console.print(table(("phase", ">allocated GiB", ">reserved GiB", ">device GiB"), rows))
    console.print()
    parts = [(name, f"{gib(value):.2f}") for name, value in estimate.breakdown.__dict__.items() if value]
    console.print(table(("at the peak", ">GiB"), parts))


def _step(estimate: Estimate, swap_seconds: float | None = None) -> str:
    """The seconds of a step in words, to precede more text; empty if they are unknown. ``swap_seconds``: time added by
    block swap."""
    if not estimate.timed:
        return ""
    step = "denoising step" if estimate.job.method == "sample" else "step"
    swap = "" if swap_seconds is None else f"; swap adds {format_seconds(swap_seconds)}"
    return f"{step} {format_seconds(estimate.step_seconds)} (estimated{swap}), "


def _ram(estimate: Estimate) -> str:
    """The needed and the available host RAM."""
    usable = f" of {gib(estimate.machine.host_ram):.1f}" if estimate.machine.host_ram is not None else ""
    return f"host RAM {format_gib(estimate.host_ram_bytes)}{usable}"


def print_windows(console: Console, estimate: Estimate) -> None:
    """Prints what is short on Windows and WSL: pinned memory, and memory beyond the card's, which Windows would not
    refuse but page to host RAM."""
    if estimate.machine.os not in HALVED:
        return
    if estimate.host is not None and estimate.host.pinned_bytes > GIB // 10:
        pinned = format_gib(estimate.host.pinned_bytes)
        console.print(f"{pinned} of it pinned, and Windows pins about half of the RAM", style="dim")
    mapped = estimate.host.mapped_bytes if estimate.host is not None else 0
    if mapped and mapped + estimate.host_ram_bytes > (estimate.machine.host_ram or 0):
        whole, files = format_gib(mapped + estimate.host_ram_bytes), format_gib(mapped)
        text = f"RAM and page file must be {whole} together: Windows counts {files} of mapped weight files too"
        if text not in " ".join(estimate.assumptions):
            console.print(text, style="dim")
    text = "what is more than the card has spills into shared memory, ten times slower: not called fitting"
    console.print(text, style="dim")


def bar(console: Console, estimate: Estimate) -> Text:
    """A bar of the needed device memory against the budget, with both and the range in numbers. For a measured plan, it
    shows the measurement."""
    nbytes = min(max(estimate.peak.device_bytes, estimate.low_bytes), estimate.high_bytes)
    need = f"{gib(nbytes):.2f} of {gib(estimate.budget_bytes):.2f} GiB"
    words = f"{need} ({gib(estimate.low_bytes):.1f} to {gib(estimate.high_bytes):.1f}, {estimate.basis})"
    return _bar(console, nbytes, estimate.budget_bytes, VERDICTS[estimate.verdict][1], words, NUMBERED)


def used_bar(console: Console, nbytes: int, whole: int) -> Text:
    """A bar of the device memory that a run used against the available memory, with both in numbers."""
    words = f"{gib(nbytes):.2f} of {gib(whole):.2f} GiB used"
    return _bar(console, nbytes, whole, "bold green", words, BAR_WIDTH)


def share_bar(console: Console, part: int, whole: int, style: str, words: str = "of the budget") -> Text:
    """A bar for a part of a whole, of memory or of a run; one cell is 1/48 of the whole."""
    return _bar(console, part, whole, style, f"{part / max(whole, 1):.0%} {words}", BAR_WIDTH)


def _bar(console: Console, nbytes: int, whole: int, style: str, words: str, width: int) -> Text:
    from rich.text import Text

    full, empty, beyond = "█░▒" if console.encoding.startswith("utf") else "#.!"
    if nbytes <= whole:
        filled = round(nbytes / max(whole, 1) * width)
        text = Text(full * filled + empty * (width - filled), style)
    else:  # the bar is as wide as the need: available memory, then the excess
        there = round(whole / nbytes * width)
        text = Text(full * there + beyond * (width - there), style)
    text.append(f" {words}", "default")
    return text


def print_plan(console: Console, plan: Plan, estimate: Estimate | None) -> None:
    """Prints the start of a plan's run: what it trains on which card, the verdict, the bar and the options."""

    count, card = card_lookup.parse_gpus(plan.machine.gpu)
    model = lookup.model(plan.job.model)
    if estimate is None:
        many = count_words(plan.machine.replace(gpus=max(count, plan.machine.gpus)))
        console.print(f"{model.title}, {plan.job.method}, on {many}{card.title}: {card.allocatable_gib:.2f} GiB usable")
        return
    words = in_words(model, estimate.job).removesuffix(", batch 1")
    print_verdict(console, estimate, f"{_trained(model.title, estimate)}, {words}", card)
    console.print(f"plan: {ways(estimate)}", style="bold")


# ---- suggest


def print_suggestion(
    console: Console, question: Question, suggestion: Suggestion, whole: WholeJob | None = None
) -> None:
    """Prints the chosen plan, why it was chosen, the runners-up, and what to do when nothing fits. The most important
    comes first: the verdict, what to switch on, the seconds of a step, and the host RAM."""
    plan = suggestion.plan
    print_answer(console, question, plan)
    if plan.verdict == "no":
        print_relaxed(console, suggestion)
    console.print(f"plan: {ways(plan)}", style="bold")
    print_flags(console, suggestion.switches)
    swap = next((switch.step_seconds for switch in suggestion.switches if switch.field == "swap_blocks"), None)
    console.print(f"{_step(plan, swap)}{_ram(plan)}")
    if whole:
        console.print(whole_words(whole), style="bold")
    print_windows(console, plan)
    print_data(console, question.model)
    if plan.lossy:
        kept = next((other for other in suggestion.alternatives if not other.lossy), None)
        without = f"; without: {ways(kept)} ({need_words(kept)})" if kept else ""
        console.print(f"lossy: {', '.join(plan.lossy)}{without}", style="yellow")
    for word in dict.fromkeys(VERDICTS[other.verdict][0] for other in suggestion.smaller_cards):
        alike = [other for other in suggestion.smaller_cards if VERDICTS[other.verdict][0] == word]
        cards = ", ".join(f"{other.machine.gpu} ({gib(other.budget_bytes):.1f} GiB)" for other in alike)
        console.print(f"{word} on smaller cards of this class: {cards}", style="yellow")
    for wish in suggestion.relaxed if plan.verdict != "no" else ():
        console.print(other_kind(wish), style="yellow")
    console.print(f"peak: {plan.peak.phase}, {plan.peak.moment}")
    print_assumptions(console, question, plan)
    told = [switch for switch in suggestion.switches if switch.device_bytes or abs(switch.step_seconds) > 1e-9]
    if told:
        console.print()
        columns, rows = ("effect of each option", ">GiB", ">s/step"), [_switch_row(switch) for switch in told]
        console.print(table(columns, rows) if plan.timed else table(columns[:-1], [row[:-1] for row in rows]))
        for switch in (switch for switch in told if switch.field == "swap_blocks"):
            console.print(_swap_note(question, plan, switch), style="dim")
    if suggestion.alternatives:
        console.print()
        console.print(runners_up(suggestion.alternatives))


def runners_up(plans: Iterable[Estimate]) -> Table:
    """A table with one line for each plan that was not chosen."""
    return table(("runners-up", "verdict", ">GiB", ">s/step", ">RAM GiB"), map(_plan_row, plans))


def print_flags(console: Console, switches: Iterable[Switch]) -> None:
    """Prints the options that give `vplan estimate` the same plan, broken between options as a shell reads them."""
    flags = [flag_words(switch.field, switch.after) for switch in switches]
    for line in command_lines(INDENT, flags, console.width) if flags else ():
        console.print(line, markup=False, soft_wrap=True)


HIDDEN = 0.01
"""Share of a step's seconds below which the cost of block swap is called hidden."""


def _swap_note(question: Question, plan: Estimate, switch: Switch) -> str:
    """Over which link swapped blocks are copied, and whether the step waits for them."""
    links = plan.machine.links
    own = links.host_gbs if links else None
    pcie = re.fullmatch(r"pcie(\d)x(\d+)", question.gpu.link)
    name = f"PCIe {pcie[1]}.0 x{pcie[2]}" if pcie and own is None else "the host link"
    link = f"{name} ({own or question.gpu.link_gbs:g} GB/s)"
    if switch.step_seconds < HIDDEN * plan.step_seconds:
        return f"swapped blocks come over {link} while others compute, and hide behind them: a slower link would show"
    return f"swapped blocks come over {link}, and the step waits for them: a faster link would help"


def _switch_row(switch: Switch) -> tuple[str, str, str]:
    words = f"{switch.field} {switch.before} to {switch.after}"
    return words, f"{gib(switch.device_bytes):+.2f}", f"{switch.step_seconds:+.2f}"


def _plan_row(estimate: Estimate) -> tuple[str, ...]:
    lossy = " (lossy)" if estimate.lossy else ""
    return (
        ways(estimate) + lossy,
        VERDICTS[estimate.verdict][0],
        f"{gib(estimate.peak.device_bytes):.2f}",
        seconds_words(estimate.step_seconds) if estimate.timed else "-",
        f"{gib(estimate.host_ram_bytes):.1f}",
    )


def print_data(console: Console, *models: ModelProfile) -> None:
    """Prints the packages that `vplan train` lacks to read data from files, if any: one line per set of models with the
    same."""
    lacking: dict[str, list[str]] = {}
    for model in models:
        if model.traits.not_encoded:
            lacking.setdefault(model.traits.not_encoded, []).append(model.name)
    for data, names in lacking.items():
        fault = f"{', '.join(names)}: `vplan train` cannot encode {data} yet"
        console.print(f"{fault}, and takes encoded samples only", style="yellow")
