"""`vplan rehearse`: runs a training command for a few steps on a virtual GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from planner.catalog import card_lookup
from planner.commands import USAGE
from planner.commands._shared.rendering.render import share_bar
from planner.commands._shared.rendering.render_fixes import print_rehearsal_check
from planner.commands._shared.rendering.render_live_memory import print_live
from planner.commands._shared.rendering.verdict_words import VERDICTS
from planner.commands._shared.verb import (
    Verb,
    check_report,
    examples,
    json_option,
    report_option,
    show,
    stoppable,
    table,
    verdict_exit_code,
    write_rehearsal,
)
from planner.errors import VplanError
from planner.terminal import echo
from planner.units import MIB, format_gib, format_seconds, gib, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from planner.foreign.rehearsed_command import CheckedRehearsal
    from planner.rehearsal.answer import RankPeaks, RehearsalAnswer

STEPS, TIME_LIMIT, MOST_GPUS = 3, 1800, 16


class _Bounds(TypedDict):
    """Limits of the run."""

    steps: int
    time_limit: int
    host_ram: str | None
    network: bool
    values: bool
    by_line: bool
    report: str | None


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan rehearse --gpu 24GB -- python train.py --config my.yaml",
        "vplan rehearse --gpu 2x4090 -- torchrun --nproc_per_node 2 train.py",
        "vplan rehearse --gpu 24GB --hollow Wan-AI/Wan2.1-T2V-14B -- python train.py",
        "vplan rehearse --gpu 24GB --hollow ae.safetensors -- python train.py",
        "vplan rehearse --gpu 24GB --hollow data -- accelerate launch train.py",
    ),
)
@click.argument("words", nargs=-1, metavar="-- COMMAND...", type=click.UNPROCESSED)
@click.option("--gpu", metavar="CARD", help="Card to run on: 24GB, rtx4090, 23.5GiB; 2x4090 is two of them.")
@click.option("--gpus", type=click.IntRange(1, MOST_GPUS), metavar="N", help="Number of cards.  [default: 1]")
@click.option(
    "--steps",
    type=click.IntRange(0, 100_000),
    default=STEPS,
    show_default=True,
    metavar="N",
    help="End after N optimizer steps; 0: run the command to its end.",
)
@click.option("--host-ram", metavar="SIZE", help="RAM that the run may take, as 64GiB.  [default: what is free here]")
@click.option(
    "--time-limit",
    type=click.IntRange(1, 86_400),
    default=TIME_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="End the command after this many seconds.",
)
@click.option("--network", is_flag=True, help="Leave the network on.  [default: off, where the system allows it]")
@click.option(
    "--values/--no-values",
    default=True,
    help="Compute small tensors, so that masks, lengths and schedules are true.  [default: values]",
)
@click.option(
    "--by-line", is_flag=True, help="Also say which lines of code hold the memory at the peak of a run that fits."
)
@report_option
@click.option(
    "--hollow",
    multiple=True,
    metavar="WEIGHTS",
    help="Stand in for what is not here: a hub repository, PATH=NAME, a folder of configs, or the data set (data). "
    "Repeatable.",
)
@click.option("--python", metavar="PATH", help="Python that the command runs, if it cannot be told from the command.")
@click.option("--strict", is_flag=True, help="Exit with code 3 if the verdict is tight.")
@json_option
def command(
    words: tuple[str, ...],
    gpu: str | None,
    gpus: int | None,
    hollow: tuple[str, ...],
    python: str | None,
    strict: bool,
    as_json: bool,
    **bounds: Unpack[_Bounds],
) -> int:
    """Run a training command on a virtual GPU, unmodified, and measure what it allocates.

    No GPU is needed, only the CUDA wheel of PyTorch and a C compiler. Everything above the CUDA libraries is real:
    PyTorch's allocator, autograd, and out-of-memory errors. Only small tensors are computed, so losses mean nothing
    and neither does the time. The code of the command runs with your rights, in the current folder. Exit code 3: it
    runs out of memory; 4: it failed for another reason.
    """
    from planner.foreign.data_layouts import data_of
    from planner.foreign.rehearsed_command import CheckedRehearsal, checked_rehearsal
    from planner.rehearsal.answer import answer_of
    from planner.rehearsal.hollow.hollow_request import DATA, parse_request
    from planner.rehearsal.interpreter import interpreter_of
    from planner.rehearsal.rehearsal import Rehearsal, run

    if not words:
        raise VplanError("nothing to rehearse", "pass the training command after --", USAGE)
    if not gpu:
        raise VplanError("no card given", "pass --gpu 24GB, or rtx4090, 2xh100, ... (`vplan gpus` lists them)", USAGE)
    count, card = card_lookup.parse_gpus(gpu)
    if count > MOST_GPUS:
        raise VplanError(f"--gpu {gpu} is more than one virtual machine has", f"use up to {MOST_GPUS} cards")
    ram = bounds["host_ram"]
    rehearsal = Rehearsal(
        command=words,
        card=card,
        gpus=gpus or count,
        steps=bounds["steps"],
        time_limit=bounds["time_limit"],
        host_ram=parse_bytes(ram, "--host-ram") if ram else None,
        network=bounds["network"],
        values=bounds["values"],
        events=bounds["by_line"] or bounds["report"] is not None,
        hollow=tuple(parse_request(text) for text in hollow if text != DATA),
        data=data_of(words, gpus or count) if DATA in hollow else None,
    )
    if bounds["report"]:
        check_report(bounds["report"])
    interpreter = interpreter_of([python] if python else words)
    echo(_warning(rehearsal.network), err=True)
    with stoppable(lambda: "nothing is left running"):
        outcome = run(rehearsal, interpreter, lambda line: echo(line, err=True))
    answer = answer_of(rehearsal, outcome, interpreter)
    checked = checked_rehearsal(answer)
    predicted = checked.to_json() if isinstance(checked, CheckedRehearsal) else None
    if bounds["report"]:
        write_rehearsal(bounds["report"], answer, checked if isinstance(checked, CheckedRehearsal) else None)
    show({**answer.to_json(), "check": predicted}, as_json, lambda console: _print(console, answer, checked))
    return verdict_exit_code(answer.verdict, strict=strict)


def _warning(network: bool) -> str:
    side = "with network" if network else "without network where this system allows it"
    return f"this runs the command's own code, in this folder, with your rights, {side}"


# ---- for people


def _print(console: Console, answer: RehearsalAnswer, checked: CheckedRehearsal | str) -> None:
    rehearsal = answer.rehearsal
    count = f"{rehearsal.gpus} x " if rehearsal.gpus > 1 else ""
    torch = f"; torch {answer.torch}" if answer.torch else ""
    budget = f"{rehearsal.card.allocatable_gib:.2f} GiB usable"
    console.print(f"on {count}{rehearsal.card.title}: {budget}{torch}", markup=False)
    console.print()
    console.print(_verdict(answer), style=VERDICTS[answer.verdict][1], markup=False)
    console.print(
        share_bar(console, answer.device_bytes, rehearsal.card.allocatable_bytes, VERDICTS[answer.verdict][1])
    )
    _print_end(console, answer)
    console.print()
    columns = ("rank", "phase", ">allocated GiB", ">reserved GiB", ">device GiB")
    if rows := [row for rank in answer.ranks for row in _rows(rank, len(answer.ranks) > 1)]:
        console.print(table(columns, rows))
        console.print()
    if answer.live and answer.live.allocated_bytes:
        print_live(console, answer.live)
    if checked:
        print_rehearsal_check(console, checked)
    outcome = answer.outcome
    pinned = f", {format_gib(outcome.pinned_bytes)} of it pinned" if outcome.pinned_bytes > 8 * MIB else ""
    console.print(f"host RAM {format_gib(outcome.host_bytes)}{pinned}; rehearsed in {format_seconds(outcome.seconds)}")
    for note in answer.assumptions:
        console.print(f"  {note}", style="dim", markup=False)


def _verdict(answer: RehearsalAnswer) -> str:
    word = VERDICTS[answer.verdict][0]
    need = f"{gib(answer.device_bytes):.2f} GiB of {answer.rehearsal.card.allocatable_gib:.2f} at the peak (rehearsed)"
    if answer.limit == "host":
        return f"{word}: not enough host RAM"
    return f"{word}: {need}"


def _print_end(console: Console, answer: RehearsalAnswer) -> None:
    if answer.limit != "gpu":
        if answer.phase:
            console.print(f"peak in {answer.phase}", markup=False)
        return
    moment = "on the virtual GPU"
    if answer.oom:
        moment = f"in {answer.oom.phase}, step {answer.oom.step}"
        moment += f", rank {answer.rank}" if len(answer.ranks) > 1 else ""
        moment += f", {answer.oom.moment}" if answer.oom.moment else ""
    console.print(f"ends {moment}: no room for {format_gib(answer.short_of_bytes)}", markup=False)
    if answer.where:
        console.print(f"  {answer.where.file}:{answer.where.line} in {answer.where.function}", markup=False)
        console.print(f"    {answer.where.source}", markup=False)
    if answer.oom and answer.oom.frames and answer.oom.frames[-1] != answer.where:
        inner = answer.oom.frames[-1]
        console.print(f"  {inner.file}:{inner.line} in {inner.function}", style="dim", markup=False)


def _rows(rank: RankPeaks, several: bool) -> list[tuple[str, ...]]:
    name = f"{rank.rank}" + (f" (cuda:{rank.device})" if several else "")
    if not rank.phases:
        return [(name, "-", "-", "-", f"{gib(rank.device_bytes):.2f}")]
    counters = ("allocated_bytes", "reserved_bytes", "device_bytes")
    return [
        (name, phase, *(f"{gib(getattr(peak, counter)):.2f}" for counter in counters))
        for phase, peak in rank.phases.items()
    ]
