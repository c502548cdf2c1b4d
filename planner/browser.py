"""What the page of `vplan site` asks: a question in, its answer out, both JSON. Runs in the reader's browser.

The answer is that of the command line, asked in the same process, with the sentences that the page shows. The page
holds no wording of its own about a plan.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner import dialects
from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import in_words
from planner.commands import cli
from planner.commands._shared.oom import explained
from planner.commands._shared.rendering.render_fixes import MOST_FIXES
from planner.commands._shared.rendering.verdict_words import AS, VERDICTS, card_words
from planner.commands._shared.verb import verdict_exit_code
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.errors import NoParametersError, VplanError
from planner.foreign.export import export
from planner.foreign.oom_cause import render
from planner.foreign.trainer_search import trainer_of
from planner.garbage_collection import forget_recordings, without_garbage_collection
from planner.schema import Record
from planner.spec.plan import Estimate, Plan
from planner.spec.wording import ways
from planner.units import format_gib, format_seconds, gib

PASTED = "pasted"
"""The name of the file that holds what was pasted, without its ending."""

ERROR = f"{PASTED}.log"
WORTH_GIB = 0.5
"""Host RAM that a change must add or save to be told."""
LONGEST = 10**6
"""Characters of a paste."""

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError", re.IGNORECASE)
_YAML = re.compile(r"(---|[\w.\"'-]+\s*:)(\s|$)")
_PYTHON = re.compile(r"(import|from) \w")

Shown = dict[str, Any]


class PageQuestion(Record):
    """The form of the page, as typed; empty is left to vplan's defaults."""

    model: str = ""
    gpu: str = ""
    host_ram: str = ""
    frames: str = ""
    resolution: str = ""
    method: str = ""
    trainer: str = ""
    """a target of `vplan export`; empty: our own trainer"""
    steps: str = ""
    paste: str = ""
    """another trainer's command or file, or an out-of-memory message; the form is not looked at then, but the card,
    the RAM and, with `fill`, what else a command may leave open"""
    fill: bool = False

    def words(self) -> list[str]:
        """The command line that asks this. What was pasted is in the file that it names."""
        machine = {"gpu": self.gpu, "host-ram": self.host_ram}
        if self.paste.strip():
            file = _kind(self.paste)
            if file == ERROR:
                return ["check", "--error", file]
            return ["check", *_flags({**machine, **(self._told() if self.fill else {})}), file]
        options = {"frames": self.frames, "resolution": self.resolution, "method": self.method, **machine}
        return ["suggest", *_flags({"model": self.model, **options, "for": self.trainer, "steps": self.steps})]

    def _told(self) -> dict[str, str]:
        height, _, width = self.resolution.partition("x")
        return {"model": self.model, "frames": self.frames, "height": height.strip(), "width": width.strip()}

    def tapes_of(self) -> str:
        """The model whose tapes the answer needs; empty where it needs none, or where the answer will be an error."""
        if self.words()[-1] == ERROR:
            return ""
        try:
            if not self.paste.strip():
                return lookup.model(self.model).name
            dialect, given = dialects.read_script(from_file(self._kept()))
            told = {name: value for name, value in self._told().items() if value and self.fill}
            reading = translate(dialect, replace(given, settings={**given.settings, **told}))
            return lookup.model(reading.job["model"]).name
        except NoParametersError as error:  # the layers that it names are found in the tapes
            return error.model
        except VplanError:
            return ""

    def _kept(self) -> Path:
        path = Path(self.words()[-1])
        path.write_text(self.paste[:LONGEST], encoding="utf-8")
        return path


def tapes_of(question: str) -> str:
    """See `PageQuestion.tapes_of`."""
    return PageQuestion.read(json.loads(question)).tapes_of()


_answered_about = ""
"""The model of the last question: what is kept of its recordings is of use for the next one about it alone."""


def answers(question: str, early: Callable[[str], object] = lambda answer: None) -> Iterator[str]:
    """The answers to a `PageQuestion`, the last one complete: of a command, first the verdict, for changes that make it
    fit take longer. ``early``: called with the plan of a suggestion before it is explained. Each is JSON: `command` (to
    type), `code` (its exit code), `json` (what it prints with --json, to the letter), `shown` (what the page shows) and
    `more`, whether another one follows.

    Of each model in turn all is forgotten that was read about the one before: from 2 GiB of memory on, which some 90
    models and cards took together, Pyodide hands over strings from the wrong place.
    """
    global _answered_about
    asked = PageQuestion.read(json.loads(question))
    if (model := asked.tapes_of()) and model != _answered_about:
        forget_recordings()
        _answered_about = model
    words = asked.words()
    if asked.paste.strip():
        asked._kept()
    if words[0] == "check" and words[-1] != ERROR:
        first = _answer(asked, [words[0], "--no-fixes", *words[1:]])
        more = first["shown"]["verdict"] != "error"
        yield json.dumps({**first, "more": more})
        if not more:
            return

    def tell(request: dict[str, Any]) -> None:
        code = verdict_exit_code(request["plan"]["verdict"])
        early(json.dumps({**_found(words, code, json.dumps(request), _suggested(asked, request)), "more": True}))

    yield json.dumps({**_answer(asked, words, tell), "more": False})


def _answer(
    asked: PageQuestion, words: list[str], early: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, Any]:
    printed = io.StringIO()
    with without_garbage_collection(), contextlib.redirect_stdout(printed):
        code = cli.main([*words, "--json"], prog_name="vplan", standalone_mode=False, early=early)
    said = json.loads(printed.getvalue())
    if said.keys() == {"schema", "error"}:
        shown = _refused(said["error"])
    elif words[-1] == ERROR:
        shown = _explained()
    else:
        shown = _suggested(asked, said) if words[0] == "suggest" else _checked(asked, said)
    return _found(words, code, printed.getvalue(), shown)


def _found(words: list[str], code: int, printed: str, shown: Shown) -> dict[str, Any]:
    return {"command": shlex.join(["vplan", *words]), "code": code, "json": printed, "shown": shown}


# ---- what the page shows


def _hours(whole: dict[str, Any]) -> tuple[str, str]:
    """How long a job takes, and of what that is told."""
    hours = sorted({f"{whole['hours']:.1f}", f"{whole['hours_high']:.1f}"}, key=float)
    what = "Steps alone" if whole["parts"].keys() == {"training"} else "Whole run"
    return what, f"{whole['steps']} steps: {' to '.join(hours)} hours (estimated)"


def _suggested(asked: PageQuestion, request: dict[str, Any]) -> Shown:
    plan = Estimate.read(request["plan"])
    shown = _judged(plan)
    shown["facts"].insert(0, ("Smallest plan found" if plan.verdict == "no" else "Switch on", ways(plan)))
    if plan.lossy:
        shown["facts"].append(("Gives up quality", _worded(plan.lossy)))
    if whole := request.get("whole_job"):
        shown["facts"].insert(1, _hours(whole))
    rows = [
        (_named(switch), f"{gib(switch['device_bytes']):+.2f}", f"{switch['step_seconds']:+.2f}")
        for switch in request["switches"]
        if switch["device_bytes"] or abs(switch["step_seconds"]) > 1e-9
    ]
    shown["table"] = {"head": ["What each option did", "GiB", "s/step"], "rows": rows} if rows else None
    shown["changes"] = [
        {
            "title": "This would fit" + (f" (gives up quality: {_worded(wish['lossy'])})" if wish["lossy"] else ""),
            "lines": [f"{_worded([wish['field']])} {wish['to']} instead of {wish['from']}"],
        }
        for wish in (request["relax"] if plan.verdict == "no" else ())
    ]
    shown["facts"] += _beyond(request)
    shown["copies"] = [] if plan.verdict == "no" else _to_copy(asked, plan, shown["notes"])
    return shown


def _beyond(request: dict[str, Any]) -> list[tuple[str, str]]:
    """Where no single change is enough: how far all together reach, and the card that the plan fits."""
    facts = []
    if "least" in request:
        least = Estimate.read(request["least"])
        need = f"{VERDICTS[least.verdict][0]}, {gib(least.peak.device_bytes):.1f} GiB"
        facts.append(("All made smaller", f"{_job(least)}: {need}"))
    if larger := request.get("larger_card"):
        facts.append(("Large enough", f"a card of {larger['gpu']}"))
    return facts


def _to_copy(asked: PageQuestion, plan: Estimate, notes: list[str]) -> list[dict[str, str]]:
    """The files and the command that train the plan."""
    if not asked.trainer:
        keep = shlex.join(["vplan", *asked.words(), "-o", "plan.toml"])
        return [{"title": "Commands", "text": f"{keep}\nvplan train plan.toml --data DIR --output DIR --weights DIR"}]
    try:
        made = export(Plan.of(plan, trainer=trainer_of(asked.trainer, plan.job.model)), asked.trainer)
    except VplanError as error:
        notes.append(f"no files for {asked.trainer}: {error}")
        return []
    files = [{"title": name, "text": text} for name, text in reversed(made.files.items())]
    return [{"title": "Command", "text": made.start}, *files]


def _checked(asked: PageQuestion, request: dict[str, Any]) -> Shown:
    found = Estimate.read(request["estimate"])
    shown = _judged(found)
    word = "Ends in" if found.verdict == "no" else "Decided in"
    shown["facts"] = [
        ("Read as", f"a command or file of {request['trainer']}"),
        (word, f"{request['phase']}: {request['moment']}"),
        *([_hours(request["whole_job"])] if "whole_job" in request else []),
        *(fact for fact in shown["facts"] if fact[0] != "Peak"),
    ]
    enough = [("Smallest change" if at == 0 else "Or", fix) for at, fix in enumerate(request["fixes"][:MOST_FIXES])]
    enough += [(f"{fix['cost'].capitalize()} fit", fix) for fix in request["smaller"]]
    if found.verdict != "no" and not request["fixes"]:
        enough = []
    shown["changes"] = [
        {
            "title": title,
            "lines": fix["change"],
            "effect": _effect(found, Estimate.read(fix["estimate"]), fix),
            "marked": marked(asked.paste, fix["change"]),
        }
        for title, fix in enough
    ]
    if least := request["least"]:
        need = format_gib(Estimate.read(least["estimate"]).peak.device_bytes)
        shown["notes"].insert(0, f"no option of this trainer makes it fit; the least it reaches is {need}")
    ways = request.get("not_priced", [])
    shown["notes"] += [f"not priced, and may need less: {way['written']} ({way['why']})" for way in ways]
    remarks = [("has no effect here", request["ineffective"]), ("no longer exists", request["gone"])]
    shown["notes"] += [f"{what}: {each['flag']} ({each['why']})" for what, many in remarks for each in many]
    shown["notes"] += [f"unknown option of this script: {flag}" for flag in request["unknown"]]
    peaks = [(name, peak.allocated_bytes, peak.device_bytes) for name, peak in found.phases.items()]
    rows = [(name, f"{gib(allocated):.2f}", f"{gib(device):.2f}") for name, allocated, device in peaks]
    shown["table"] = {"head": ["Phase", "allocated GiB", "device GiB"], "rows": rows}
    return shown


def _explained() -> Shown:
    first, *rest = render(explained(ERROR, None, {}, {}))
    return {"verdict": "no", "sentence": first, "facts": [], "text": "\n".join(rest)}


def _refused(error: dict[str, str]) -> Shown:
    notes = [error["fix"]] if error["fix"] else []
    return {"verdict": "error", "sentence": error["message"], "facts": [], "notes": notes}


def _judged(estimate: Estimate) -> Shown:
    """The verdict as a sentence, the bar and the facts of an estimate."""
    need, low, high, budget = map(
        gib, (estimate.peak.device_bytes, estimate.low_bytes, estimate.high_bytes, estimate.budget_bytes)
    )
    word = VERDICTS[estimate.verdict][0].capitalize()
    why = " There is not enough host RAM." if estimate.limit == "host" else ""
    card = card_lookup.parse_gpus(estimate.machine.gpu)[1]
    priced_as = card.title.partition(AS)[2]
    usable = "" if estimate.machine.host_ram is None else f" of {format_gib(estimate.machine.host_ram)}"
    return {
        "verdict": estimate.verdict,
        "sentence": f"{word}: needs {need:.1f} GiB ({low:.1f} to {high:.1f}) of {budget:.1f} GiB usable.{why}",
        "job": f"{_job(estimate)}, on {card_words(estimate.machine, card)}"
        + (f" (as {priced_as})" if priced_as else ""),
        "bar": {"need": need, "low": low, "high": high, "budget": budget},
        "facts": [
            ("Step", f"{format_seconds(estimate.step_seconds)} (estimated)"),
            ("Host RAM", format_gib(estimate.host_ram_bytes) + usable),
            ("Peak", f"{estimate.peak.phase}: {estimate.peak.moment}"),
        ],
        "notes": [*estimate.assumptions, f"basis: {estimate.basis}"],
    }


def _job(estimate: Estimate) -> str:
    job, model = estimate.job, lookup.model(estimate.job.model)
    return f"{model.title}, {job.trains}{job.adapter_size}, {in_words(model, job)}"


def _worded(fields: Iterable[str]) -> str:
    return ", ".join(field.replace("_", " ") for field in fields)


def _named(switch: dict[str, Any]) -> str:
    return f"{_worded([switch['field']])}: {switch['from']} to {switch['to']}"


def _effect(before: Estimate, after: Estimate, fix: dict[str, Any]) -> str:
    low, high = gib(after.low_bytes), gib(after.high_bytes)
    seconds = f"{after.step_seconds - before.step_seconds:+.2f} s/step"
    ram = gib(after.host_ram_bytes - before.host_ram_bytes)
    seconds += f", host RAM {ram:+.1f} GiB" if abs(ram) >= WORTH_GIB else ""
    kind = "gives up quality" if fix["lossy"] else "lossless"
    need = f"{gib(after.peak.device_bytes):.1f} GiB ({low:.1f} to {high:.1f})"
    return f"{VERDICTS[after.verdict][0]}, {need}, {seconds}, {kind}" + (f": {fix['cost']}" if fix["cost"] else "")


# ---- what was pasted


def _kind(text: str) -> str:
    """The name of the file for a paste, whose ending says what it is."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    first = lines[0] if lines else ""
    if first.lstrip().startswith("{"):
        return f"{PASTED}.json"
    if _YAML.match(first) and not _OUT_OF_MEMORY.search(first):
        return f"{PASTED}.yaml"
    if _PYTHON.match(first):
        return f"{PASTED}.py"
    with contextlib.suppress(tomllib.TOMLDecodeError, RecursionError):
        if tomllib.loads(text[:LONGEST]):
            return f"{PASTED}.toml"
    return ERROR if _OUT_OF_MEMORY.search(text) else f"{PASTED}.sh"


def marked(text: str, change: list[str]) -> list[tuple[str, str]]:
    """The lines of a paste under a change, each with its mark: "-" gone, "+" new, " " as it was."""
    lines = [(" ", line) for line in text.rstrip("\n").splitlines()]
    for part in (piece for each in change for piece in re.split(r"\s(?=--|config\.)", each)):
        name = re.match(r"--?[\w-]+|[\w.\[\]-]+(?=\s*[=:])", part)
        if name is None:
            lines.append(("+", part))
            continue
        is_flag = part.startswith("-")
        key = name[0] if is_flag else name[0].rpartition(".")[2]
        pattern = rf"(?<![\w-]){re.escape(key)}" + (r"(?![\w-])([ =]+[^-\s\\][^\s\\]*)?" if is_flag else r"\s*[=:].*$")
        for at, (mark, line) in enumerate(lines):
            if mark != "-" and re.search(pattern, line):
                new = (part if is_flag else key + part[name.end() :]).replace("\\", r"\\")
                lines[at : at + 1] = [("-", line)] * (mark == " ") + [("+", re.sub(pattern, new, line))]
                break
        else:
            lines.append(("+", f"  {part}" if is_flag else part))
    return lines


def _flags(options: dict[str, str]) -> list[str]:
    """Options with a value as words. A value is never taken for an option: it stands behind `=`."""
    return [f"--{name}={value.strip()}" for name, value in options.items() if value.strip()]
