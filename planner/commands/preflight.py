"""`vplan preflight`: whether a plan can start on this machine as it is now."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner.commands import USAGE
from planner.commands._shared.data_options import data_options, typed_settings
from planner.commands._shared.rendering.render import print_plan, share_bar
from planner.commands._shared.rendering.wrapping import print_lines, wrapped
from planner.commands._shared.verb import DONE, SCHEMA, Verb, examples, json_option, show, table
from planner.dataset.sources import sources
from planner.errors import VplanError
from planner.preflight.gpu_wait import parse_wait
from planner.preflight.preflight import PreflightOptions, PreflightReport, preflight, ready
from planner.spec.plan import read_plan
from planner.terminal import echo
from planner.units import gib

if TYPE_CHECKING:
    from rich.console import Console

    from planner.spec.plan import Plan

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "dim", "ok": "green"}


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan preflight plan.toml && sbatch job.sh",
        "vplan preflight plan.toml --data clips --output run --wait 10m",
        "vplan preflight plan.toml --probe --json",
    ),
)
@click.argument("path", metavar="PLAN.toml", required=False)
@click.option("--plan", "named", metavar="FILE", help="Same as PLAN.toml.")
@data_options(required=False)
@click.option("--output", metavar="DIR", help="Output folder of the run.  [default: current folder]")
@click.option(
    "--keep-checkpoints",
    type=click.IntRange(1, 10**5),
    default=2,
    show_default=True,
    metavar="N",
    help="Checkpoints the run will keep for resuming.",
)
@click.option(
    "--wait", default="0", metavar="TIME", help="Wait up to this long for memory to become free: 90s, 10m, 2h."
)
@click.option("--probe/--no-probe", default=False, help="Run a few real steps if all other checks pass.")
@click.option("--skip-bad/--no-skip-bad", default=False, help="Skip unusable clips.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu: skip the GPU checks.  [default: cuda]"
)
@click.option(
    "--login-node/--no-login-node",
    default=None,
    help="Check what a machine without the GPUs can check.  [default: where sbatch, qsub or bsub is, and no GPU]",
)
@json_option
def command(path: str | None, named: str | None, as_json: bool, **said: Any) -> int:
    """Check whether a plan can start on this machine now, and what prevents it.

    Checks the free memory of each card and which processes hold the rest, host RAM and its limits, disk space, the
    versions the plan was measured with, and the data. Exit code 0: it can start; 1: something is wrong; 3: it does not
    fit; 4: a probe failed.

    On a login node it checks the plan, the disk, the versions and the data. `vplan train` makes all checks again when
    the job starts: `vplan train plan.toml ... --slurm job.sh` writes such a job.
    """
    if (path is None) == (named is None):
        raise VplanError("pass one plan", "as vplan preflight plan.toml", USAGE)
    plan = ready(read_plan(path or named or ""))
    data, output = (Path(said[name]).expanduser() if said[name] else None for name in ("data", "output"))
    asked = PreflightOptions(
        device=said["device"],
        sources=sources(data, typed_settings(said)) if data else (),
        output=output,
        keep_checkpoints=said["keep_checkpoints"],
        wait_seconds=parse_wait(said["wait"]),
        skip_bad=said["skip_bad"],
        probe=said["probe"],
        login_node=said["login_node"],
    )
    report = preflight(plan, asked, lambda text: echo(text, err=True))
    answer, fault = report.to_json(), report.fault
    if as_json and fault:
        echo(json.dumps({"schema": SCHEMA, "error": {"message": fault.what, "fix": fault.fix}, **answer}, indent=2))
        return fault.exit_code
    show(answer, as_json, lambda console: _render(console, report, plan, path or named or ""))
    if fault:
        raise VplanError(fault.what, fault.fix, fault.exit_code)
    return DONE


def _render(console: Console, report: PreflightReport, plan: Plan, path: str) -> None:
    print_plan(console, plan, None)
    _print_verdict(console, report)
    if report.need and report.need.phases:
        free = [card["free_bytes"] for card in report.gpus if card["free_bytes"] is not None]
        rows = [
            (phase, f"{gib(nbytes):.2f}", *([f"{gib(min(free)):.2f}"] if free else []))
            for phase, nbytes in report.need.phases.items()
        ]
        console.print(table(("phase", ">needs GiB", *([">free GiB"] if free else [])), rows))
        console.print("")
    for one in report.checks:
        level, *lines = wrapped(f"{one.level}: {one.name}: {one.what}", console.width, "  ")
        console.print(f"{one.level}:", style=STYLES[one.level], end="")
        print_lines(console, [level.removeprefix(f"{one.level}:"), *lines])
        if one.fix and one.level in ("warning", "note"):
            print_lines(console, wrapped(f"  fix: {one.fix}", console.width, " " * 4))
    if not report.fault and console.is_terminal:
        verb = "report" if plan.job.method == "sample" else "train"
        more = "" if verb == "report" else " --data DIR --output DIR --weights DIR"
        more += " --slurm job.sh" if more and report.login_node else ""
        console.print()
        console.print(f"next: {shlex.join(['vplan', verb, path])}{more}", style="bold", markup=False, soft_wrap=True)


def _print_verdict(console: Console, report: PreflightReport) -> None:
    """Prints whether the plan can start, and what it needs of the GPU next to what is free."""
    from rich.text import Text

    style = "bold red" if report.fault else "bold green"
    good = "it can be submitted" if report.login_node else "it can start"
    line = Text("it cannot start" if report.fault else good, style)
    need, found = report.need, report.estimate
    free = [card["free_bytes"] for card in report.gpus if card["free_bytes"] is not None]
    whole = min(free) if free else found.budget_bytes if found else None
    if need is None or whole is None:
        console.print(line)
        return
    peak = max(need.phases.values(), default=need.high_bytes)
    words = "of what is free" if free else "of the budget"
    sure = f"{gib(need.low_bytes):.1f} to {gib(need.high_bytes):.1f}, {need.basis}"
    line.append(f": needs {gib(peak):.2f} GiB ({sure}) of {gib(whole):.2f}{' free' if free else ''}", "default")
    console.print(line)
    console.print(share_bar(console, peak, whole, style, words))
    console.print()
