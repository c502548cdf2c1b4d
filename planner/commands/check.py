"""`vplan check`: reads another trainer's command or file without running it, and says where it runs out of memory and
what to change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planner import dialects
from planner.catalog import card_lookup
from planner.catalog.shapes import in_words
from planner.commands import USAGE
from planner.commands._shared.data_options import asked_steps, whole_job_of
from planner.commands._shared.oom import explained
from planner.commands._shared.options import field_options
from planner.commands._shared.rendering.render import print_verdict, print_windows
from planner.commands._shared.rendering.render_fixes import (
    MOST_FIXES,
    fix_lines,
    print_as_lora,
    print_fixes,
    print_helps,
    print_larger_card,
    print_least,
    print_more_ram,
    print_not_priced,
    print_smaller,
    print_unpriced,
    print_unrecorded,
)
from planner.commands._shared.rendering.render_job import whole_words
from planner.commands._shared.rendering.wrapping import print_lines, wrapped
from planner.commands._shared.verb import (
    DOES_NOT_START,
    DONE,
    PathText,
    Verb,
    examples,
    json_option,
    output_option,
    report_option,
    save_plan,
    show,
    table,
    verdict_exit_code,
    write_report,
)
from planner.dialects.base.dialect import MOST_STEPS
from planner.dialects.base.script import OUT_OF_MEMORY, NoCommandError, Script, from_file, from_words
from planner.errors import VplanError, quoted
from planner.estimate.whole_job import WholeJob
from planner.foreign.case import read_case
from planner.foreign.check import Checked, check_case
from planner.foreign.oom_cause import render
from planner.foreign.other_ways import with_other_ways
from planner.spec.job import Machine
from planner.spec.plan import Plan
from planner.units import format_gib, format_seconds, gib
from planner.untrusted import read_text

if TYPE_CHECKING:
    from rich.console import Console

TOLD = ("model", "frames", "height", "width", "text_tokens")
"""Options that add to or override what the command says."""

MOST_NAMED = 3
"""Most files of a folder that an error names."""

SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".bat", ".cmd", ".ps1", ".ipynb", ".txt", ".md")

FILES = (*SCRIPTS, ".toml", ".yaml", ".yml", ".json", ".py")

ON_WINDOWS = "taken for Windows, by its paths or its shell (else --os linux or wsl); a desktop needs --reserve 1GiB"

READ_WITH = tuple(ending for ending in FILES if ending != ".py")
"""File endings whose values may name further files; a Python file is followed by arguments instead."""


@click.command(
    cls=Verb,
    epilog=examples(
        "vplan check --gpu 80GB -- accelerate launch train.py --num_frames 81 ...",
        "vplan check train.sh --gpu 4x4090",
        "vplan check infer.py --gpu 24GB --json",
        "vplan check train.sh dataset.toml --gpu 24GB",
        "vplan check --error train.log train.sh",
    ),
)
@click.argument(
    "words",
    nargs=-1,
    metavar="FILE [FILE...] | -- COMMAND...",
    type=click.UNPROCESSED,
    shell_complete=PathText().shell_complete,
)
@click.option("--from-file", "path", metavar="FILE", help="File with the command; same as FILE.")
@click.option("--error", metavar="FILE|TEXT", help="An out-of-memory message, or a log with one (- for stdin): explain "
              "it, and find its tensor in the command, if there is one.")  # fmt: skip
@click.option("--model", metavar="NAME", help="Model, if the command does not name it.")
@click.option("--frames", type=int, metavar="N", help="Frames per clip, instead of the command's.")
@click.option("--height", type=int, metavar="N", help="Height of a sample in pixels, instead of the command's.")
@click.option("--width", type=int, metavar="N", help="Width of a sample in pixels, instead of the command's.")
@click.option("--text-tokens", type=click.IntRange(1), metavar="N",
              help="Tokens of a prompt, instead of the command's.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1, MOST_STEPS), metavar="N",
              help="Tell hours of so many optimizer steps, instead of the command's.")  # fmt: skip
@click.option("--price", multiple=True, metavar="X", help="Price of a GPU for an hour.")
@click.option("--no-fixes", is_flag=True, help="Only print the verdict; do not search for fixes.")
@click.option("--strict", is_flag=True, help="Exit with code 3 if the verdict is tight.")
@field_options(Machine, without=("links", "unified"), show_defaults=False)
@output_option("the command as a plan")
@report_option
@json_option
def command(
    words: tuple[str, ...], path: str | None, error: str | None, output: str | None, as_json: bool, **said: Any
) -> int:
    """Check whether another trainer's command runs out of memory, in which phase, and what to change.

    Pass the command after `--`, or a file: a shell script, a trainer's TOML, YAML or JSON, or a Python file. It is
    read as text and never run. The files that it names are looked for beside it and here, or passed behind it.
    """
    strict, report = said.pop("strict"), said.pop("report")
    if not error and (log := _log(words, path)):
        error, words, path = log, (), None
    if error:
        script = None if not words and path is None else _script(words, path)
        told = {name: said.pop(name) for name in TOLD}
        for name in ("no_fixes", "steps", "price"):
            said.pop(name)
        why = explained(error, script, told, said)
        show(why.to_json(), as_json, lambda console: console.print("\n".join(render(why)), markup=False))
        return 0
    steps, prices = said.pop("steps"), said.pop("price")
    found = checked({"words": words, "path": path, **said})
    plan = Plan.of(found.outcome.estimate, trainer=found.case.trainer)
    whole = _whole_job(found, steps, prices)
    if output:
        save_plan(plan, output)
    if report:
        changes = fix_lines(found.outcome.estimate, found.fixes[:MOST_FIXES])
        write_report(report, [(output or "plan.toml", plan)], changes=changes)
    answer = found.to_json() | ({"whole_job": whole.to_json()} if whole else {})
    show(answer, as_json, lambda console: print_checked(console, found, whole))
    code = verdict_exit_code(found.outcome.estimate.verdict, strict=strict)
    return code or (DOES_NOT_START if found.case.refused else DONE)


def _whole_job(found: Checked, typed: int | None, prices: tuple[str, ...]) -> WholeJob | None:
    """The whole job of a run that fits: with the typed number of steps, else the command's."""
    case, estimate = found.case, found.outcome.estimate
    has_hours = case.job.method != "sample" and estimate.timed
    steps = case.dialect.optimizer_steps(case.invocation.settings) if has_hours else None
    return whole_job_of(asked_steps(typed or steps, prices), estimate, case.trainer)


def checked(said: Mapping[str, Any]) -> Checked:
    """The answer for a command or file on a card, by the options."""
    script = _script(said["words"], said["path"])
    if not said.get("gpu"):
        raise VplanError("no card given", _card_fix(script), USAGE)
    dialect, given = dialects.read_script(script)
    _refuse_unnamed(script)
    told = {name: said[name] for name in TOLD}
    machine = {name: value for name, value in said.items() if name in Machine.model_fields}
    if script.windows and not machine.get("os"):
        machine["os"] = "windows"
        given = replace(given, notes=(ON_WINDOWS, *given.notes))
    search = not said["no_fixes"]
    found = check_case(read_case(dialect, given, told, machine), search)
    return with_other_ways(found) if search else found


def _card_fix(script: Script) -> str:
    """How to give a card: the one that the job asks Slurm for, where it says which."""
    if not (asked := script.slurm_gpus):
        return "pass --gpu 80GB, or rtx4090, 4xh100, ... (`vplan gpus` lists them)"
    try:
        card_lookup.parse_gpus(asked)
    except VplanError as error:
        return f"pass --gpu; the job asks Slurm for {asked}: {error.fix}"
    return f"pass --gpu {asked}, which the job asks Slurm for"


def _log(words: tuple[str, ...], path: str | None) -> str | None:
    """The given file, if it is the log of a run: it starts nothing and contains an out-of-memory message."""
    file = path or (words[0] if len(words) == 1 else "")
    if not os.path.isfile(file):
        return None
    try:
        _script(words, path)
    except NoCommandError:
        return file if OUT_OF_MEMORY in read_text(Path(file)) else None
    except VplanError:  # reported when it is read
        return None
    return None


def _script(words: tuple[str, ...], path: str | None) -> Script:
    if path and words:
        raise VplanError("both --from-file and a command given", "leave one of them out", USAGE)
    if path is None and len(words) == 1 and (words[0].lower().endswith(FILES) or os.path.isfile(words[0])):
        path = words[0]
    if path is None and len(words) > 1 and words[0].lower().endswith(READ_WITH) and all(map(os.path.isfile, words)):
        return replace(from_file(Path(words[0])), supplied=tuple(map(Path, words[1:])))
    if path is None and len(words) == 1 and os.path.isdir(words[0]):
        path = words[0]
    if path and os.path.isdir(path):
        inside: list[str] = []
        with contextlib.suppress(OSError):  # no permission to list it
            inside = sorted(name for name in os.listdir(path) if name.lower().endswith(FILES))
        fix = "pass the file that starts the training, or a trainer's config"
        if inside:
            fix = f"pass one of its files: {', '.join(os.path.join(path, name) for name in inside[:MOST_NAMED])}"
        raise VplanError(f"{quoted(path)} is a folder", fix)
    if path:
        return from_file(Path(path))
    if not words:
        raise VplanError("nothing to check", "pass a file, or the command after --", USAGE)
    return from_words(words)


def _refuse_unnamed(script: Script) -> None:
    """Raises a VplanError for a supplied file that the script does not name, since it would have no effect."""
    for file in script.unnamed():
        missing = [quoted(path) for path, place in script.named.items() if place is None]
        fix = f"not found: {', '.join(missing[:MOST_NAMED])}; pass it by that name" if missing else "leave it out"
        raise VplanError(f"{script.name} names no {quoted(file.name)}", fix)


# ---- for people


def print_checked(console: Console, found: Checked, whole: WholeJob | None = None) -> None:
    """Prints the verdict, the peak that decides it, and what to change."""
    case, estimate = found.case, found.outcome.estimate
    refused = case.refused
    for flag, why in refused:
        print_lines(console, wrapped(f"does not start: {flag} is {why}", console.width, "  "), "bold red")
    job = in_words(case.model, case.job).removesuffix(", batch 1")
    print_verdict(console, estimate, f"{case.model.title}, {case.job.method}, {job}", case.gpu)
    print_unpriced(console, case, estimate.verdict)
    console.print(f"trainer: {case.dialect.title}", markup=False)
    word = "ends in" if estimate.verdict == "no" else "decided in"
    console.print(f"{word} {found.outcome.phase}: {found.outcome.moment}", markup=False)
    console.print(
        f"step {format_seconds(estimate.step_seconds)} (estimated), host RAM {format_gib(estimate.host_ram_bytes)}"
    )
    if whole:
        console.print(whole_words(whole), style="bold", markup=False)
    print_windows(console, estimate)
    _print_fixes(console, found)
    if found.assumptions:
        console.print()
        console.print("as read:", markup=False)
    for note in found.assumptions:
        print_lines(console, wrapped(f"  {note}", console.width, "  "), "dim")
    _print_remarks(console, "no longer exists", case.invocation.removed)
    _print_remarks(console, "has no effect here", found.ineffective)
    unknown = [name for name in case.invocation.unknown if name not in {each.flag for each in refused}]
    if unknown:
        console.print(f"unknown option of this script: {', '.join(unknown)}", style="yellow", markup=False)
    console.print()
    console.print(table(("phase", ">allocated GiB", ">device GiB"), map(_phase_row, estimate.phases.items())))
    if found.today:
        console.print()
        console.print(f"current equivalent:\n{found.today}", markup=False, soft_wrap=True)


def _phase_row(entry: tuple[str, Any]) -> tuple[str, str, str]:
    name, peak = entry
    return name, f"{gib(peak.allocated_bytes):.2f}", f"{gib(peak.device_bytes):.2f}"


def _print_remarks(console: Console, what: str, remarks: Any) -> None:
    for remark in remarks:
        console.print(f"{what}: {remark.flag} ({remark.why})", style="yellow", markup=False)


def _print_fixes(console: Console, found: Checked) -> None:
    estimate = found.outcome.estimate
    if estimate.verdict == "fits" or not found.searched:
        return
    if not found.fixes:
        priced = "priced " if found.case.unpriced or found.unrecorded or found.not_priced else ""
        console.print(f"no {priced}option of this trainer makes it fit", style="bold", markup=False)
        print_least(console, found.least)
        print_unrecorded(console, found.unrecorded)
        print_smaller(console, found.smaller)
        print_as_lora(console, found.as_lora)
        print_larger_card(console, found.larger_card)
        print_more_ram(console, found.more_ram, estimate)
    print_fixes(console, estimate, found.fixes)
    print_not_priced(console, found.not_priced)
    print_helps(console, found.helps)
