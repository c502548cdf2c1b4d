"""`vplan probe`: what a plan really needs, measured on this machine's GPU."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import click

from planner.catalog import card_lookup, lookup
from planner.catalog.plan_id import row_id
from planner.commands import USAGE
from planner.commands._shared.verb import DOES_NOT_FIT, DONE, Verb, examples, json_option, output_option, show, table
from planner.errors import VplanError, quoted
from planner.evidence.jsonl import append_row, rows_by_id
from planner.evidence.ledger import Ledger, default_path
from planner.evidence.measurement import ProbeRow
from planner.launch import weight_files
from planner.launch.supported import supported_plan
from planner.layout.correction import SEPARATE_PHASES
from planner.probe.probe import STEPS, TIME_LIMIT, RealRunner
from planner.schema import JsonObject
from planner.spec.plan import Plan, read_plan
from planner.terminal import echo
from planner.units import gib

if TYPE_CHECKING:
    from rich.console import Console

FAILED = 4
"""Exit code: a process we started failed for a reason other than memory."""
EXIT_CODES = {"ok": DONE, "oom": DOES_NOT_FIT, "host-oom": DOES_NOT_FIT}
"""Outcome -> exit code; FAILED for any other."""


class _How(TypedDict):
    """Fields of `RealRunner`."""

    weights: str | None
    history: str | None
    encode: bool
    device: Literal["cuda", "cpu"]


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan probe plan.toml",
        "vplan probe plan.toml --steps 10 --json",
        "vplan probe plans/*.toml -o rows.jsonl",
        "vplan probe plan.toml --runner rehearse",
    ),
)
@click.argument("paths", metavar="PLAN.toml...", nargs=-1, required=True)
@click.option(
    "--steps",
    type=click.IntRange(1, 1000),
    default=STEPS,
    show_default=True,
    metavar="N",
    help="Steady-state steps to time.",
)
@click.option(
    "--time-limit",
    type=click.IntRange(1, 86_400),
    default=int(TIME_LIMIT),
    show_default=True,
    metavar="SECONDS",
    help="Kill a probe after this many seconds.",
)
@click.option("--weights", metavar="DIR", help="Folder with the published weights.  [default: random weights]")
@click.option(
    "--gpu",
    metavar="CARD",
    help="Card to probe for, instead of the plan's own; a larger card is capped to it.",
)
@click.option(
    "--encode/--no-encode",
    help="Also run the text encoders and the VAE, as encoding the data does.  [default: no-encode]",
)
@click.option("--record-history", "history", metavar="FILE", help="Write every event of PyTorch's allocator to FILE.")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    help="cpu is for tiny models: no GPU memory is measured.  [default: cuda]",
)
@click.option(
    "--runner",
    "runner_name",
    type=click.Choice(["real", "rehearse"]),
    default="real",
    help="rehearse: use no GPU, but a virtual one, for memory alone.  [default: real]",
)
@click.option(
    "--python",
    metavar="PATH",
    help="Python with the CUDA wheel of PyTorch, for rehearse.  [default: VPLAN_CUDA_PYTHON]",
)
@output_option("the rows, one JSON object per line,", plan=False)
@json_option
def command(
    paths: tuple[str, ...],
    steps: int,
    time_limit: int,
    gpu: str | None,
    runner_name: str,
    python: str | None,
    output: str | None,
    as_json: bool,
    **how: Unpack[_How],
) -> int:
    """Run a few real training steps of a plan and measure them.

    Weights and data are random: memory and speed are the same, and nothing is downloaded. Each plan runs in fresh
    processes, one per GPU; a larger card is capped to the memory of the plan's card. Every measurement is kept, and
    estimates learn from it. Several plans run one after another; with -o, plans that already have a row in FILE are
    skipped, so the same command resumes where it stopped. With --runner rehearse the same steps run on a virtual GPU
    (see `vplan rehearse`): the rows have no seconds, and estimates learn nothing from them. Exit code 3: out of
    memory; 4: a crash, a timeout, or a non-finite loss.
    """
    weights, device = how["weights"], how["device"]
    if how["history"] and len(paths) > 1:
        raise VplanError("--record-history works for one plan only", "pass one plan", USAGE)
    if weights and not Path(weights).is_dir():
        raise VplanError(f"there is no folder {quoted(weights)}", "pass the model's folder: --weights DIR")
    plans = [(path, _for_card(read_plan(path), gpu)) for path in paths]
    for _, plan in plans if weights else ():
        weight_files.check(plan, lookup.model(plan.job.model), Path(str(weights)).expanduser(), encoders=False)
    # Check all before the first runs: a mistake in the last one should not surface after an hour.
    ids = [row_id(supported_plan(plan)) for _, plan in plans]
    known = rows_by_id(output) if output else {}
    runner = _runner(runner_name, python, how)
    ledger, rows = Ledger(default_path()), []
    for number, ((path, plan), name) in enumerate(zip(plans, ids, strict=True), start=1):
        start = f"[{number}/{len(plans)}] {path}: "
        if name in known:
            echo(f"{start}already in {output}", err=True)
            rows.append(known[name])
            continue
        echo(f"{start}running ...", err=True)
        words = ["--steps", str(steps), "--time-limit", str(time_limit), *(["--gpu", gpu] if gpu else [])]
        words += [*(["--weights", weights] if weights else []), *(["--encode"] if how["encode"] else [])]
        words += [] if runner_name == "real" else ["--runner", runner_name]
        typed = _typed(path, words, device)
        measured = replace(runner, command=typed).run(plan, steps=steps, time_limit=time_limit)
        row = measured.to_json()
        rows.append(row)
        echo(start + told_line(row), err=True)
        if measured.runner == "real":
            keep(ledger, measured)
        if output:
            append_row(output, row)
            known[name] = row
    answer = rows[0] if len(rows) == 1 else {"rows": rows}
    show(answer, as_json, lambda console: _render(console, rows, plans))
    return max(EXIT_CODES.get(row["measured"]["outcome"], FAILED) for row in rows)


def _runner(name: str, python: str | None, how: _How) -> RealRunner:
    """The runner for this machine's GPU, or for a virtual one."""
    if name == "real":
        if python is not None:
            raise VplanError("--python is for rehearsals", "add --runner rehearse, or leave it out", USAGE)
        return RealRunner(**how)
    if how["device"] == "cpu":
        raise VplanError("a rehearsal has a virtual GPU", "leave out --device cpu, or --runner rehearse", USAGE)
    from planner.rehearsal.probe_runner import RehearsalRunner, cuda_interpreter

    interpreter = cuda_interpreter(python)
    return RehearsalRunner(**how, interpreter=interpreter, say=lambda line: echo(line, err=True))


def keep(ledger: Ledger, row: ProbeRow) -> None:
    """Adds a row to the ledger. If that fails, it is only a warning, since the measurement is still an answer."""
    try:
        ledger.append(row)
    except VplanError as error:
        echo(f"warning: {error}", err=True)


def _for_card(plan: Plan, gpu: str | None) -> Plan:
    """The plan moved to another card, without its estimate and evidence, which apply to its own card only."""
    if gpu is None:
        return plan
    count, card = card_lookup.parse_gpus(gpu)
    machine = plan.machine.replace(gpu=card.name, unified=card.unified)
    if count > 1:
        machine = machine.replace(gpus=count)
    return Plan(job=plan.job, strategy=plan.strategy, machine=machine, trainer=plan.trainer)


def _typed(path: str, options: list[str], device: str) -> str:
    """The command that measures this one row again."""
    words = ["vplan", "probe", Path(path).name, *options]
    return shlex.join([*words, *(["--device", device] if device != "cuda" else [])])


def told_line(row: JsonObject) -> str:
    """One row of measurements as a short line."""
    seen, details = row["measured"], row["details"]
    words = [seen["outcome"]]
    if seen["device_bytes"] is not None:
        words.append(f"{gib(seen['device_bytes']):.2f} GiB on the device")
    if seen["step_seconds"] is not None:
        words.append(f"{seen['step_seconds']:.2f} s/step")
    if seen["outcome"] != "ok" and seen["phase"]:
        words.append(f"in {seen['phase']}")
    words += [str(details[key]) for key in ("message", "log") if key in details]
    return ", ".join(words)


def _render(console: Console, rows: list[JsonObject], plans: list[tuple[str, Plan]]) -> None:
    columns = ("plan", "outcome", "peak", ">allocated", ">reserved", ">device", ">estimated", ">s/step")
    console.print(table(columns, [_cells(row, *plan) for row, plan in zip(rows, plans, strict=True)]))
    console.print("memory in GiB", style="dim")
    for row in rows:
        if left := row["details"].get("left_bytes"):
            console.print(f"{row['id']}: {gib(left):.2f} GiB not released: see `nvidia-smi`", style="dim")
        for missing in row["details"].get("missing", ()):
            console.print(f"{row['id']}: not measured: {missing}", style="dim")


def _cells(row: JsonObject, path: str, plan: Plan) -> list[str]:
    seen = row["measured"]
    sizes = [seen["allocated_bytes"], seen["reserved_bytes"], seen["device_bytes"], estimated_bytes(row, plan)]
    seconds = seen["step_seconds"]
    return [
        Path(path).stem,
        seen["outcome"],
        seen["phase"] or "-",
        *("-" if size is None else f"{gib(size):.2f}" for size in sizes),
        "-" if seconds is None else f"{seconds:.2f}",
    ]


def estimated_bytes(row: JsonObject, plan: Plan) -> int | None:
    """The plan's own estimated device peak over the phases that ran, as a probe may skip encoding; None without an
    estimate."""
    if plan.estimate is None:
        return None
    skipped = SEPARATE_PHASES - set(row["details"].get("phases", ()))
    return max((peak.device_bytes for name, peak in plan.estimate.phases.items() if name not in skipped), default=None)
