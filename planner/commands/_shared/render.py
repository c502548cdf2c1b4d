"""The look of an answer in the terminal: how the question was understood, the verdict, the bar, the phases.

It holds at 80 columns: tables keep their numbers and wrap their words. Rich leaves colours out when nobody looks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from planner.catalog import lookup
from planner.catalog.shapes import in_words
from planner.commands._shared.verb import table, typed_line
from planner.dialects.base import cli_words
from planner.estimate.pinned_ram import HALVED
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Estimate, Plan
from planner.spec.wording import ways
from planner.units import GIB, format_gib, format_seconds, gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from planner.catalog.profiles import ModelProfile
    from planner.estimate.bucket_batches import EvenedPlan
    from planner.estimate.roofline import Span
    from planner.estimate.whole_job import WholeJob
    from planner.search.question import Question, Relaxed, Suggestion, Switch

VERDICTS = {"fits": ("fits", "bold green"), "tight": ("tight", "bold yellow"), "no": ("does not fit", "bold red")}
BAR_WIDTH = 48


def counted(machine: Machine) -> str:
    """The number of cards in words, to stand before the card's name: "2 nodes of 8 x "; empty for one card."""
    nodes = f"{machine.nodes} nodes of " if machine.nodes > 1 else ""
    return nodes + (f"{machine.gpus} x " if machine.gpus > 1 else "")


def headline(console: Console, question: Question, found: Estimate | None = None) -> None:
    """Prints the first lines of an answer: the job, card and budget, what names and sizes were taken for, and the shape
    of `found` where a search chose it."""
    gpu, job = question.gpu, question.job
    chosen = found is not None and found.job != job
    title = f"{question.model.title}, {job.method}" + (f" rank {job.lora_rank}" if job.method == "lora" else "")
    words = in_words(question.model, job).removesuffix(", batch 1").removeprefix("1 frames of ")
    shape = "" if chosen else f", {words}"
    text = f"{title}{shape}, on {counted(question.machine)}{gpu.title}: {gpu.allocatable_gib:.2f} GiB usable"
    if question.machine.reserve:
        text += f", {format_gib(question.machine.reserve)} of it kept free"
    console.print(text)
    if taken := [note for note in _assumed(question, found) if _is_reading(note)]:
        console.print("; ".join(taken), style="yellow")
    if found is not None and chosen:
        console.print(f"chosen: {in_words(question.model, found.job)}", style="bold")


def print_assumptions(console: Console, question: Question, found: Estimate | None = None) -> None:
    """Prints the defaults that were filled in (those of `found`, where a search chose some of them)."""
    if assumed := [note for note in _assumed(question, found) if not _is_reading(note)]:
        console.print(f"assumed: {'; '.join(assumed)}", style="dim")


def _assumed(question: Question, found: Estimate | None) -> tuple[str, ...]:
    return found.assumptions if found else question.assumptions


def _is_reading(note: str) -> bool:
    """Whether a note says what something typed was taken for: that stands where it is seen first."""
    return re.search(r" taken for | read as | is height x width|^as .* trains", note) is not None


def print_next(console: Console, found: Estimate, output: str | None) -> None:
    """The next command to type: keep the plan, and train it; probe it first where it is tight. Only for people: what
    is piped is the answer alone."""
    context = click.get_current_context(silent=True)
    if not console.is_terminal:
        return
    if found.verdict == "no":
        if context is None or context.info_name != "estimate":  # others say themselves what would fit
            return
        said = cli_words.command("suggest", found.job, Strategy(), found.machine)
    elif output is None:
        said = typed_line("-o", "plan.toml")
    elif found.verdict == "tight":
        said = shlex.join(["vplan", "probe", output])
    elif found.job.method == "sample":
        said = shlex.join(["vplan", "report", output])
    else:
        said = shlex.join(["vplan", "train", output]) + " --data DIR --output DIR --weights DIR"
    console.print()
    console.print(f"next: {said}", style="bold", markup=False, soft_wrap=True)


def verdict_line(found: Estimate) -> Text:
    """The verdict, the need, the budget and the basis of an estimate, in one line."""
    from rich.text import Text

    word, style = VERDICTS[found.verdict]
    line = Text(word, style)
    low, high = gib(found.low_bytes), gib(found.high_bytes)
    need = f": needs {gib(found.peak.device_bytes):.2f} GiB ({low:.1f} to {high:.1f}, {found.basis})"
    line.append(f"{need} of {gib(found.budget_bytes):.2f}", "default")
    if found.limit == "host":
        line.append("; not enough host RAM", "default")
        if found.host is not None:
            line.append(f" ({found.host.phase}: {format_gib(found.host_ram_bytes)})", "default")
    return line


def print_estimate(console: Console, found: Estimate, whole: WholeJob | None = None) -> None:
    """Prints one estimate: verdict, bar, seconds, phases and breakdown."""
    console.print(verdict_line(found))
    console.print(bar(console, found))
    console.print(f"{_step(found)}, {_ram(found)}, attention: {found.attention_kernel}")
    if whole:
        console.print(whole_words(whole), style="bold")
    if found.lossy:
        console.print(f"lossy: {', '.join(found.lossy)}", style="yellow")
    print_windows(console, found)
    console.print(f"peak: {found.peak.phase}, {found.peak.moment}")
    rows = [
        (name, *(f"{gib(value):.2f}" for value in (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)))
        for name, peak in found.phases.items()
    ]
    console.print()
    console.print(table(("phase", ">allocated GiB", ">reserved GiB", ">device GiB"), rows))
    console.print()
    parts = [(name, f"{gib(value):.2f}") for name, value in found.breakdown.__dict__.items() if value]
    console.print(table(("at the peak", ">GiB"), parts))


def _step(found: Estimate, swap_seconds: float | None = None) -> str:
    """The seconds of a step in words. ``swap_seconds``: what swapped blocks add to it."""
    step = "denoising step" if found.job.method == "sample" else "step"
    swap = "" if swap_seconds is None else f"; swap adds {format_seconds(swap_seconds)}"
    return f"{step} {format_seconds(found.step_seconds)} (estimated{swap})"


def _ram(found: Estimate) -> str:
    """The host RAM that is needed, and what may be used."""
    usable = f" of {gib(found.machine.host_ram):.1f}" if found.machine.host_ram is not None else ""
    return f"host RAM {format_gib(found.host_ram_bytes)}{usable}"


def print_windows(console: Console, found: Estimate) -> None:
    """Prints what is short on Windows and WSL: what they pin, and what is more than the card has, which is no fit."""
    if found.machine.os not in HALVED:
        return
    if found.host is not None and found.host.pinned_bytes > GIB // 10:
        pinned = format_gib(found.host.pinned_bytes)
        console.print(f"{pinned} of it pinned, and Windows pins about half of the RAM", style="dim")
    text = "what is more than the card has spills into shared memory, ten times slower: not called fitting"
    console.print(text, style="dim")


def bar(console: Console, found: Estimate) -> Text:
    """A bar of the device memory that is needed, against the budget."""
    return memory_bar(console, found.peak.device_bytes, found.budget_bytes, VERDICTS[found.verdict][1])


def memory_bar(console: Console, nbytes: int, whole: int, style: str, words: str = "of the budget") -> Text:
    """A part of some memory, as wide as all of it: one cell per 1/48."""
    from rich.text import Text

    share = nbytes / max(whole, 1)
    filled = min(BAR_WIDTH, round(share * BAR_WIDTH))
    full, empty = "█░" if console.encoding.startswith("utf") else "#."
    text = Text(full * filled + empty * (BAR_WIDTH - filled), style)
    text.append(f" {share:.0%} {words}", "default")
    return text


def print_plan(console: Console, plan: Plan, found: Estimate | None) -> None:
    """Prints how a run of a plan begins: what it trains on which card, the verdict, the bar and the options."""

    count, card = lookup.parse_gpus(plan.machine.gpu)
    many = counted(plan.machine.replace(gpus=max(count, plan.machine.gpus)))
    title = lookup.model(plan.job.model).title
    console.print(f"{title}, {plan.job.method}, on {many}{card.title}: {card.allocatable_gib:.2f} GiB usable")
    if found is not None:
        console.print(verdict_line(found))
        console.print(bar(console, found))
        console.print(f"plan: {ways(found)}", style="bold")


# ---- suggest


def print_suggestion(console: Console, question: Question, found: Suggestion, whole: WholeJob | None = None) -> None:
    """Prints the chosen plan, why it was chosen, the runners-up, and what to do when nothing fits. What is asked first
    stands first: the verdict, what to switch on, how long a step takes, and the host RAM."""
    plan = found.plan
    headline(console, question, plan)
    console.print(verdict_line(plan))
    if plan.verdict == "no":
        _print_relaxed(console, found)
    console.print(bar(console, plan))
    console.print(f"plan: {ways(plan)}", style="bold", soft_wrap=False)
    if flags := typed_out(found.switches):
        console.print(f"      {flags}")
    swap = next((switch.step_seconds for switch in found.switches if switch.field == "swap_blocks"), None)
    console.print(f"{_step(plan, swap)}, {_ram(plan)}")
    if whole:
        console.print(whole_words(whole), style="bold")
    print_windows(console, plan)
    print_data(console, question.model)
    if plan.lossy:
        kept = next((other for other in found.alternatives if not other.lossy), None)
        without = f"; without: {ways(kept)} ({_need(kept)})" if kept else ""
        console.print(f"lossy: {', '.join(plan.lossy)}{without}", style="yellow")
    for word in dict.fromkeys(VERDICTS[other.verdict][0] for other in found.smaller_cards):
        alike = [other for other in found.smaller_cards if VERDICTS[other.verdict][0] == word]
        cards = ", ".join(f"{other.machine.gpu} ({gib(other.budget_bytes):.1f} GiB)" for other in alike)
        console.print(f"{word} on smaller cards of this class: {cards}", style="yellow")
    for wish in found.relaxed if plan.verdict != "no" else ():
        console.print(_other_kind(wish), style="yellow")
    console.print(f"peak: {plan.peak.phase}, {plan.peak.moment}")
    print_assumptions(console, question, plan)
    told = [switch for switch in found.switches if switch.device_bytes or abs(switch.step_seconds) > 1e-9]
    if told:
        console.print()
        console.print(table(("effect of each option", ">GiB", ">s/step"), map(_switch_row, told)))
        for switch in (switch for switch in told if switch.field == "swap_blocks"):
            console.print(_swap_note(question, plan, switch), style="dim")
    if found.alternatives:
        console.print()
        console.print(runners_up(found.alternatives))


def runners_up(plans: Iterable[Estimate]) -> Table:
    """A table with one line for each plan that was not chosen."""
    return table(("runners-up", "verdict", ">GiB", ">s/step", ">host RAM GiB"), map(_plan_row, plans))


def typed_out(switches: Iterable[Switch]) -> str:
    """The options that give `vplan estimate` the same plan, as one string."""
    return " ".join(_flag(switch) for switch in switches)


def _flag(switch: Switch) -> str:
    name = switch.field.replace("_", "-")
    if isinstance(switch.after, bool):
        return f"--{name}" if switch.after else f"--no-{name}"
    return f"--{name} {switch.after}"


def _print_relaxed(console: Console, found: Suggestion) -> None:
    plan, relax = found.plan, found.relaxed
    console.print(f"this is the smallest plan found{_short_of(plan, relax)}")
    if not relax:
        console.print("no single change makes it fit", style="bold")
        for line in _beyond(found):
            console.print(f"  {line}")
        return
    console.print("to make it fit, change one of:", style="bold")
    for wish in relax:
        lossy = f" (lossy: {', '.join(wish.plan.lossy)})" if wish.plan.lossy else ""
        count = wish.plan.strategy.checkpointed_blocks if wish.field == "gradient_checkpointing" else None
        blocks = f" --checkpointed-blocks {count}" if count else ""
        shared = f" ({wish.after} GPUs share a sample)" if wish.field == "context_parallel" else ""
        console.print(f"  --{_flag_name(wish)} {wish.after}{blocks} instead of {wish.before}{lossy}{shared}")


def _beyond(found: Suggestion) -> Iterator[str]:
    """How far a job reaches that no single change makes fit: in a smaller shape, and on a larger card."""
    if (least := found.least) is not None:
        before, after = found.plan.job, least.job
        size, old = f"{after.height}x{after.width}", f"{before.height}x{before.width}"
        smaller = [
            *([f"--resolution {size}"] if size != old else []),
            *([f"--frames {after.frames}"] if after.frames != before.frames else []),
            *([f"--batch-size {after.batch_size}"] if after.batch_size != before.batch_size else []),
        ]
        lossy = f" (lossy: {', '.join(least.lossy)})" if least.lossy else ""
        does = "still needs" if least.verdict == "no" else f"together: {VERDICTS[least.verdict][0]},"
        ram = f" and {gib(least.host_ram_bytes):.1f} GiB of host RAM" if least.limit == "host" else ""
        yield f"{' '.join(smaller)} {does} {gib(least.peak.device_bytes):.1f} GiB{ram}{lossy}"
    if (larger := found.larger_card) is not None:
        more = larger.machine.host_ram if larger.machine.host_ram != found.plan.machine.host_ram else None
        yield f"unchanged it fits --gpu {larger.machine.gpu}{f' --host-ram {more // GIB}GiB' if more else ''}"


def _other_kind(wish: Relaxed) -> str:
    """What a plan of the other kind reaches, lossy or not, in a line."""
    if wish.field == "gpus":
        return f"lossless on one GPU (--gpus 1): {ways(wish.plan)} ({_need(wish.plan)})"
    most = f"{wish.after} frames" if wish.field == "frames" else f"{wish.field} {wish.after}"
    flag = "--allow lossy" if wish.plan.lossy else f"--{_flag_name(wish)} {wish.after}"
    kind = "lossy" if wish.plan.lossy else "lossless"
    return f"{kind} up to {most} ({flag}): {ways(wish.plan)} ({_need(wish.plan)})"


def _flag_name(wish: Relaxed) -> str:
    return wish.field.replace("_", "-").replace("batch", "batch-size")


def _short_of(plan: Estimate, relax: Sequence[Relaxed]) -> str:
    """What a plan that does not fit lacks: host RAM too, where with more of it another plan fits the card."""
    ram = plan.machine.host_ram
    if plan.limit == "host":
        return "; not enough host RAM"
    if ram is not None and any(wish.field == "host_ram" for wish in relax):
        return f" with {format_gib(ram)} of host RAM; not enough host RAM for a smaller one"
    short = " and host RAM" if ram is not None and plan.host_ram_bytes > ram else ""
    return f"; not enough GPU memory{short}"


HIDDEN = 0.01
"""Share of a step's seconds below which what swap costs is said to be hidden."""


def _swap_note(question: Question, plan: Estimate, switch: Switch) -> str:
    """Over which link swapped blocks come, and whether the step waits for them."""
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


def _plan_row(found: Estimate) -> tuple[str, ...]:
    lossy = f" (lossy: {', '.join(found.lossy)})" if found.lossy else ""
    return (
        ways(found) + lossy,
        VERDICTS[found.verdict][0],
        f"{gib(found.peak.device_bytes):.2f}",
        _seconds(found.step_seconds),
        f"{gib(found.host_ram_bytes):.1f}",
    )


def _need(found: Estimate) -> str:
    return f"{VERDICTS[found.verdict][0]}, {gib(found.peak.device_bytes):.1f} GiB"


class TableRow:
    """One line of an answer for many models or many cards: a plan, or the reason why there is none."""

    def __init__(
        self, name: str, plan: Estimate | None, reason: str, considered: int, whole: WholeJob | None = None
    ) -> None:
        self.name = name
        self.plan = plan
        self.reason = reason
        self.considered = considered
        self.whole = whole

    def to_json(self, kind: str) -> dict[str, object]:
        """The line as `vplan suggest --json` prints it. ``kind``: "models" or "cards"."""
        plan = self.plan.to_json() if self.plan else None
        whole = {"whole_job": self.whole.to_json()} if self.whole else {}
        return {"model" if kind == "models" else "gpu": self.name, "plan": plan, "reason": self.reason or None, **whole}


def print_data(console: Console, model: ModelProfile) -> None:
    """Prints what `vplan train` lacks to read a model's samples from files, if anything."""
    if model.traits.not_encoded:
        fault = f"{model.name}: `vplan train` cannot encode {model.traits.not_encoded} yet"
        console.print(f"{fault}, and takes encoded samples only", style="yellow")


def print_rows(console: Console, first: str, kind: str, rows: Sequence[TableRow]) -> None:
    """Prints a first line, what the rows come to, then a table with one line for each model or card."""
    console.print(first)
    console.print(_models_that_fit(rows) if kind == "models" else _smallest_card(rows), style="bold")
    if kind == "classes":
        print_best(console, rows)
    console.print()
    name = "model" if kind == "models" else "card"
    narrow = console.width < NARROW
    data = ("data",) if kind == "models" else ()
    whole = whole_columns(rows, narrow)
    shape = ">clip" if any(row.plan and row.plan.job.frames > 1 for row in rows) else ">image"
    shapes = {_shape(row.plan.job) for row in rows if row.plan}
    apart = len(shapes) > 1 or not (narrow and whole)
    found = table((name, *([shape] if apart else []), "verdict", ">GiB", ">s/step", *whole, *data, "with"), [])
    found.columns[0].no_wrap, found.columns[0].min_width = True, max(len(row.name) for row in rows)  # to be typed
    for row in rows:
        named, clip, *cells, last = _row(row)
        cells += whole_cells(row.whole, whole)
        found.add_row(
            named, *([clip] if apart else []), *cells, *([lookup.model(row.name).train_data] if data else []), last
        )
    console.print(found)
    for profile in (lookup.model(row.name) for row in rows if data):
        print_data(console, profile)
    notes = {note: None for row in rows if row.plan for note in row.plan.assumptions if "longer" in note}
    for note in notes:
        names = ", ".join(row.name for row in rows if row.plan and note in row.plan.assumptions)
        console.print(f"{names}: {note}", style="dim")


def _row(row: TableRow) -> tuple[str | Text, ...]:
    from rich.text import Text

    if row.plan is None:
        return row.name, "-", Text("no", VERDICTS["no"][1]), "-", "-", row.reason
    found, clip = row.plan, _shape(row.plan.job)
    word = Text(found.verdict, VERDICTS[found.verdict][1])
    need = f"{gib(found.peak.device_bytes):.1f}"
    lossy = " (lossy)" if found.lossy else ""
    return row.name, clip, word, need, _seconds(found.step_seconds), ways(found) + lossy


NARROW = 100
"""Columns below which a table of whole jobs leaves out what can be read elsewhere."""


def _shape(job: Job) -> str:
    length = f"{job.frames}x" if job.frames > 1 else ""
    return f"{length}{job.height}x{job.width}" + (f" x{job.batch_size}" if job.batch_size > 1 else "")


def _models_that_fit(rows: Sequence[TableRow]) -> str:
    """Which models of a table fit, lossless and lossy, and how many do not."""
    fits = [row for row in rows if row.plan and row.plan.verdict == "fits"]
    kinds = {
        "": [row.name for row in fits if row.plan and not row.plan.lossy],
        "lossy: ": [row.name for row in fits if row.plan and row.plan.lossy],
        "tight: ": [row.name for row in rows if row.plan and row.plan.verdict == "tight"],
    }
    words = [f"{kind}{', '.join(names)}" for kind, names in kinds.items() if names]
    return f"{len(fits)} of {len(rows)} models fit" + (f": {'; '.join(words)}" if words else "")


def _smallest_card(rows: Sequence[TableRow]) -> str:
    """The smallest card of a table that fits, those below it that are tight, and the smallest without loss."""
    fits = [row for row in rows if row.plan and row.plan.verdict == "fits"]
    if not fits:
        return "no card fits it"
    least = fits[0]
    assert least.plan is not None
    below = [row.name for row in rows[: rows.index(least)] if row.plan]
    tight = f" ({', '.join(below)}: tight)" if below else ""
    lossless = next((row.name for row in fits if row.plan and not row.plan.lossy), None)
    kind = " (lossy)" if least.plan.lossy else ""
    text = f"smallest card that fits: {least.name}{kind}{tight}"
    if lossless == least.name:
        return text
    return f"{text}; lossless: {lossless or 'none'}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"


# ---- whole jobs


def print_whole_job(console: Console, found: WholeJob) -> None:
    """Prints the parts of a whole job, whose hours, energy and money stand above."""
    console.print()
    rows = [
        (name, part.number, *map(format_seconds, part.seconds)) for name, part in found.parts.items() if part.number
    ]
    console.print(table(("part", ">number", ">time", ">at most"), rows))
    if found.sample_seconds is not None:
        console.print(f"encoding not counted: {_span(found.sample_seconds)} s a sample (--data DIR)", style="dim")


def whole_words(found: WholeJob) -> str:
    """Hours, energy and money of a whole job, in a line."""
    epochs = f" ({found.epochs:.3g} epochs)" if found.epochs is not None else ""
    words = [f"{_span(found.hours)} hours", f"{_span(found.kwh)} kWh at {found.power_watts:g} W"]
    if found.money is not None:
        words.append(f"{_span(found.money)} at {found.price:g} per GPU-hour")
    return f"{found.steps} steps{epochs}: {', '.join(words)}"


def whole_columns(rows: Iterable[TableRow], narrow: bool) -> tuple[str, ...]:
    """The columns that whole jobs have in a table of them; none where there are none. ``narrow``: one beside hours."""
    found = [row.whole for row in rows if row.whole]
    if not found:
        return ()
    priced = any(whole.money for whole in found)
    if narrow:
        return (">hours", ">price") if priced else (">hours", ">kWh")
    return (">hours", ">kWh", ">price") if priced else (">hours", ">kWh")


def whole_cells(whole: WholeJob | None, columns: Sequence[str]) -> list[str]:
    """A row's cells in the columns of `whole_columns`."""
    if whole is None:
        return ["-"] * len(columns)
    cells = {">hours": whole.hours, ">kWh": whole.kwh, ">price": whole.money}
    return ["-" if (span := cells[column]) is None else _span(span) for column in columns]


def best_rows(rows: Sequence[TableRow]) -> dict[str, str | None]:
    """The names of the fastest row and of the cheapest, by money where anything has a price, else by energy."""
    found = [row for row in rows if row.whole]
    priced = [row for row in found if row.whole and row.whole.money]
    by = "money" if priced else "kwh"

    def cost(row: TableRow) -> float:
        assert row.whole is not None
        return (row.whole.money or row.whole.kwh).low

    def hours(row: TableRow) -> float:
        assert row.whole is not None
        return row.whole.hours.low

    fastest, cheapest = min(found, key=hours, default=None), min(priced or found, key=cost, default=None)
    return {
        "fastest": fastest.name if fastest else None,
        "cheapest": cheapest.name if cheapest else None,
        "cheapest_by": by if cheapest else None,
    }


def print_best(console: Console, rows: Sequence[TableRow]) -> None:
    """Prints which row is the fastest and which the cheapest."""
    best = best_rows(rows)
    by_name = {row.name: row.whole for row in rows if row.whole}
    fastest, cheapest = (by_name.get(best[word] or "") for word in ("fastest", "cheapest"))
    if not fastest or not cheapest:
        return
    console.print(f"fastest: {best['fastest']}, {_span(fastest.hours)} hours", style="bold")
    if best["cheapest_by"] == "money" and cheapest.money:
        console.print(f"cheapest: {best['cheapest']}, {_span(cheapest.money)}", style="bold")
    else:
        words = f"cheapest in energy: {best['cheapest']}, {_span(cheapest.kwh)} kWh (--price gives money)"
        console.print(words, style="bold")


def _span(span: Span) -> str:
    low, high = (_number(value) for value in span)
    return low if low == high else f"{low} to {high}"


def _number(value: float) -> str:
    """Three digits, two below a tenth."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.0995 else f"{value:.2g}"


def print_shapes(console: Console, even: EvenedPlan) -> None:
    """Prints the shapes that were proposed for the data, each with its batch size, and the flag that gives them."""
    rows = []
    for shape, seconds, _, nbytes in even.shapes:
        name = f"{shape.frames}x{shape.height}x{shape.width}"
        rows.append((name, shape.batch_size or 1, _seconds(seconds), f"{gib(nbytes):.1f}"))
    console.print()
    console.print(table(("shape of the data", ">batch", ">s/step", ">GiB alone"), rows))
    flags = ",".join(f"{name}x{batch}" for name, batch, *_ in rows)
    console.print(f"      --buckets {flags}", soft_wrap=True)
