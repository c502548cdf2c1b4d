"""`vplan mcp`: suggest, estimate, check, export and report as tools of a Model Context Protocol server.

Each call runs the command line in a separate process with `--json`, so an agent gets the same answer as a person.
Callers are not trusted: they can only set options of a question, files must be in one folder, nothing is overwritten
unless requested, and the size and time of a call and its answer are limited.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

import vplan
from planner.commands._shared.verb import DONE, Verb, examples
from planner.errors import VplanError, quoted
from planner.spec.job import Job, Machine, Strategy

SECONDS = 300
"""Longest time of a call: a table of all models takes some seconds, on a busy computer a minute."""

LONGEST_ANSWER = 100_000
"""Most characters of an answer; a longer one is shortened, or refused."""

LONGEST_WORD = 32_768
"""Most characters of one value in a call; a complete log should be passed as a file."""

MOST_WORDS = 1_000

QUESTION = frozenset(
    {"allow", "epochs", "images", "prefer", "price", "resolution", "steps", "validation_steps", "zero_stage"}.union(
        *(record.model_fields for record in (Job, Strategy, Machine))
    )
) - {"model", "gpu", "links"}
"""Options that a call may set: those of a question, without any that name a file."""

CHECKED = (frozenset(Machine.model_fields) | {"frames", "height", "width", "text_tokens"}) - {"gpu", "links"}

CONFIGS = (".toml", ".yaml", ".yml", ".json", ".sh", ".bat", ".py", ".cfg", ".txt", ".log")
"""Endings of files that `check` reads when a command names them."""

Option = str | int | float | bool
Answer = dict[str, Any]

INSTRUCTIONS = """vplan predicts, without a GPU, whether fine-tuning a video or image diffusion model fits a card.
suggest finds a way that fits; estimate prices one; check reads another trainer's command; export and report write
files into the server's folder. verdict is fits, tight or no; bytes are whole numbers; a lossy plan says so."""


class Tools:
    """The server's tools: each method is a tool, and its docstring is the description that agents read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()

    def suggest(
        self,
        model: str | None = None,
        gpu: str | None = None,
        options: dict[str, Option] | None = None,
        trainer: str | None = None,
        save: str | None = None,
        overwrite: bool = False,
    ) -> Answer:
        """Find the fastest way to train a model on a card: {"plan", "alternatives", "switches", "relax", ...}.

        Without gpu one row per class of card, without model one per model. options: fields of the command line with
        underscores, such as {"frames": 81, "resolution": "480x832", "host_ram": "64GiB", "os": "windows", "method":
        "full", "steps": 2000, "allow": "lossy"}. trainer: search what that trainer can express (musubi-tuner, ...).
        save: a file in the server's folder, such as plan.toml, for the plan.
        """
        words = [*_asked(model, gpu, options, QUESTION)]
        words += [f"--for={_value('trainer', trainer)}"] if trainer else []
        return self._ask("suggest", [*words, *self._output(save, ".toml", overwrite)])

    def estimate(self, model: str, gpu: str, options: dict[str, Option] | None = None) -> Answer:
        """Price one way of training: peaks by phase, breakdown, host RAM, seconds per step. options as in suggest."""
        return self._ask("estimate", _asked(model, gpu, options, QUESTION))

    def check(
        self,
        command: list[str] | None = None,
        gpu: str | None = None,
        file: str | None = None,
        error: str | None = None,
        options: dict[str, Option] | None = None,
    ) -> Answer:
        """Whether another trainer's command runs out of memory, and the smallest change that fits.

        command: its words, read and never run; or file: a script or config in the server's folder. error: the text of
        an out-of-memory message to explain, with or without the command. options: frames, height, width,
        text_tokens, host_ram, os.
        """
        words = _asked(None, gpu, options, CHECKED)
        words += ["--error=-"] if error else []  # via stdin: as an argument it could be taken for a file name
        words += [f"--from-file={self._inside(file, here=True)}"] if file else []
        typed = [_value("command", word) for word in command or ()]
        if len(typed) > MOST_WORDS:
            raise VplanError(f"a command of {len(typed)} words", f"pass at most {MOST_WORDS}")
        for word in typed:
            self._readable(word.partition("=")[2] or word)
        told = _value("error", error) if error else ""
        return self._ask("check", [*words, *(["--", *typed] if typed else [])], told)

    def export(self, plan: str, trainer: str, into: str, nearest: bool = False, overwrite: bool = False) -> Answer:
        """Write a saved plan as another trainer's files into a folder: {"files", "start", ...}. nearest: take the
        nearest plan that this trainer can express."""
        words = [self._inside(plan, here=True), f"--to={_value('trainer', trainer)}", f"--output={self._inside(into)}"]
        flags = [flag for flag, said in (("--nearest", nearest), ("--force", overwrite)) if said]
        return self._ask("export", [*words, *flags])

    def report(self, plans: list[str], page: str, overwrite: bool = False) -> Answer:
        """Write an HTML page about saved plans, side by side: {"page"}."""
        if not 1 <= len(plans) <= 8:
            raise VplanError(f"{len(plans)} plans", "pass one to eight")
        files = [self._inside(plan, here=True) for plan in plans]
        self._run(["report", *files, *self._output(page, ".html", overwrite)])
        return {"schema": 1, "page": page}

    def _output(self, name: str | None, suffix: str, overwrite: bool) -> list[str]:
        """The options that write a file, which must not exist yet unless it may be overwritten."""
        if name is None:
            return []
        path = self._inside(name)
        if not path.endswith(suffix):
            raise VplanError(f"{quoted(name)} does not end in {suffix}", f"name it NAME{suffix}")
        if os.path.lexists(path) and not overwrite:
            raise VplanError(f"{quoted(name)} is there already", "choose another name, or pass overwrite")
        return [f"--output={path}", *(["--force"] if overwrite else [])]

    def _inside(self, name: str, here: bool = False) -> str:
        """A path in the server's folder. Raises a VplanError if it leads outside, also through a link, or if it must
        exist (``here``) and does not."""
        path = (self.folder / _value("path", name)).resolve()
        if not path.is_relative_to(self.folder):
            raise VplanError(f"{quoted(name)} is not in the server's folder", "pass a path below it")
        if here and not path.is_file():
            raise VplanError(f"there is no file {quoted(name)} in the server's folder", "save it there first")
        return str(path)

    def _readable(self, word: str) -> None:
        """Raises a VplanError for a word that names a file which would be read and is outside the server's folder."""
        if word.lower().endswith(CONFIGS) and (self.folder / word).exists():
            self._inside(word)

    def _ask(self, verb: str, words: list[str], stdin: str = "") -> Answer:
        """The JSON object that a command prints, shortened if it is long. ``stdin``: what the command
        reads there."""
        text = self._run([verb, "--json", *words], stdin)
        found: Answer = json.loads(text)
        if "error" in found and isinstance(found["error"], dict) and "fix" in found["error"]:
            raise VplanError(found["error"]["message"], found["error"]["fix"])
        for rows in ("models", "classes"):
            found |= {rows: [_short_row(row) for row in found[rows]]} if rows in found else {}
        if len(json.dumps(found)) > LONGEST_ANSWER:
            raise VplanError("the answer is too long", "ask about one model on one card")
        return found

    def _run(self, words: list[str], stdin: str = "") -> str:
        """Runs one of our command lines and returns its stdout. Raises a VplanError if it prints nothing or takes too
        long."""
        try:
            done = subprocess.run(
                vplan.command(*words),
                cwd=self.folder,
                input=stdin.encode("utf-8", "replace"),
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise VplanError(f"no answer within {SECONDS} s", "ask about one model on one card") from None
        said = done.stdout.decode("utf-8", "replace")
        if not said.strip() and done.returncode:
            fault = done.stderr.decode("utf-8", "replace").removeprefix("error: ").strip()
            raise VplanError(fault[:2_000] or f"exit code {done.returncode}", "")
        return said


def _asked(
    model: str | None, gpu: str | None, options: Mapping[str, Option] | None, allowed: frozenset[str]
) -> list[str]:
    """A question as options of the command line, each written --name=value, so that a value cannot be read as another
    option."""
    said: dict[str, Option | None] = {"model": model, "gpu": gpu or None}
    if model is not None and (os.path.isabs(model) or ".." in Path(model).parts or model.startswith("~")):
        raise VplanError(f"model {quoted(model)} is a path", "name a model that vplan knows, or a Hugging Face id")
    for name in options or {}:
        if name not in allowed:
            raise VplanError(f"no option {quoted(name)}", f"use {', '.join(sorted(allowed))}")
    said |= options or {}
    words = []
    for name, value in said.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={_value(name, str(value))}")
    return words


def _value(name: str, value: str | None) -> str:
    """A value as text for a command line. Raises a VplanError for one that cannot be passed."""
    if not value or len(value) > LONGEST_WORD or "\0" in value:
        raise VplanError(f"no usable value for {name}", f"pass 1 to {LONGEST_WORD} characters, and no NUL")
    return value


def _short_row(row: Answer) -> Answer:
    """A row of a table with only the main fields of its plan."""
    plan = row["plan"]
    if plan is None:
        return row
    strategy = {name: value for name, value in plan["strategy"].items() if value is not None}
    kept = {name: plan[name] for name in ("verdict", "host_ram_bytes", "step_seconds", "lossy", "budget_bytes")}
    return {**row, "plan": {"job": plan["job"], "strategy": strategy, **kept, "peak": plan["peak"]}}


def _told(tool: Callable[..., Answer], error_type: type[Exception]) -> Callable[..., Answer]:
    """Turns VplanErrors of a tool into errors of the protocol, with their fix."""
    import functools

    @functools.wraps(tool)
    def call(**values: Any) -> Answer:
        try:
            return tool(**values)
        except VplanError as error:
            raise error_type(f"{error.message}; {error.fix}".rstrip("; ")) from None

    return call


@click.command(cls=Verb, epilog=examples("vplan mcp", "vplan mcp --folder plans"))
@click.option(
    "--folder",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("."),
    help="Where plans, pages and exported files may lie.  [default: .]",
)
def command(folder: Path) -> int:
    """Serve suggest, estimate, check, export and report to agents.

    Speaks the Model Context Protocol over stdin and stdout, until stdin ends. Files are read and written below --folder
    alone, and none is overwritten unless a call says so. Needs pip install 'vplan[mcp]'.
    """
    if importlib.util.find_spec("mcp") is None:
        raise VplanError("the MCP server needs mcp: not installed", "pip install 'vplan[mcp]'")
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    import planner

    tools = Tools(folder)
    server = MCPServer("vplan", instructions=INSTRUCTIONS, version=planner.__version__, log_level="ERROR")
    for tool in (tools.suggest, tools.estimate, tools.check, tools.export, tools.report):
        server.add_tool(_told(tool, ToolError), name=tool.__name__)
    server.run("stdio")
    return DONE
