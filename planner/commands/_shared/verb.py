"""What all commands share: help in sections, examples, and the answer on stdout as text or as one JSON object."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from planner.errors import VplanError, quoted
from planner.terminal import console, echo

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from planner.foreign.rehearsed_command import CheckedRehearsal
    from planner.rehearsal.answer import RehearsalAnswer
    from planner.spec.plan import Plan

Function = TypeVar("Function", bound=Callable[..., Any])

DONE = 0
DOES_NOT_FIT = 3
DOES_NOT_START = 5

PAGE_HEAD = 4096
"""Characters at the start of a page within which its generator is named."""

PIPED_WIDTH = 1_000
"""Columns of a table written to a file or pipe: wide enough for every row to take one line."""


SCHEMA = 1
"""Version of all JSON answers: increased when a key changes its name or its meaning."""

LONG = ("Strategy", "Training")
"""Help sections with an option per field, which only `--help-all` lists."""

PATH_WORDS = ("FILE", "DIR", "FOLDER", "OUTPUT", ".toml", ".json")
"""Placeholders of values that shells complete as paths."""

_ALL, _FORCE = "vplan.help_all", "vplan.force"
"""Keys of click's context under which eager options leave their values."""


class PathText(click.types.StringParamType):
    """A text that shells complete as a path."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Leaves completion to the shell."""
        return [CompletionItem(incomplete, type="file")]


class Verb(click.Command):
    """A command whose help shows its options in sections (an option's `section`, by default "Options"); long sections
    only with `--help-all`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.type is click.STRING and any(word in (parameter.metavar or "") for word in PATH_WORDS):
                parameter.type = PathText()
        if any(_section(parameter) in LONG for parameter in self.params):
            self.params.append(
                click.Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help="Show this message with every option.",
                )
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As in click, but the error for an option without its value has the command's context, so it can name the
        command."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options by section, in the order in which the sections first appear."""
        sections: dict[str, list[click.Parameter]] = {}
        for parameter in self.get_params(ctx):
            sections.setdefault(_section(parameter), []).append(parameter)
        for name, parameters in sections.items():
            with formatter.section(name):
                if name in LONG and not ctx.meta.get(_ALL):
                    some = ", ".join(parameter.opts[0] for parameter in parameters[:3])
                    formatter.write_text(f"{len(parameters)} options ({some}, ...): see --help-all")
                    continue
                rows = (parameter.get_help_record(ctx) for parameter in parameters)
                formatter.write_dl([row for row in rows if row and row[1]])  # an argument is told of in the usage line


def _section(parameter: click.Parameter) -> str:
    return str(getattr(parameter, "section", "Options"))


def _show_all(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


def starting_with(known: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """The names that start with the word to complete."""
    return [CompletionItem(name) for name in known if name.startswith(incomplete.lower())]


class FiniteRange(click.FloatRange):
    """A number in a range. Click also accepts nan, which compares false with any limit, and inf in an open range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as a finite number within the range; click's usage error otherwise."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found} is not in the range {self._describe_range()}.", param, ctx)
        return found


def examples(*lines: str) -> str:
    """The epilog of a help page with example command lines, which click does not wrap."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def json_option(function: Function) -> Function:
    """A decorator that adds the option `--json`; the command gets `as_json: bool`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(function)


def markdown_option(page: str) -> Callable[[Function], Function]:
    """Adds `--markdown`; the command gets `as_markdown: bool`. `page`: the documentation page that it prints."""
    text = f"Print {page} of the docs: every bundled entry, with sources."
    return click.option("--markdown", "as_markdown", is_flag=True, help=text)


def output_option(what: str, *, plan: bool = True) -> Callable[[Function], Function]:
    """Adds `-o/--output FILE`, and for a plan `--force`; the command gets `output: str | None`. `what`: the content of
    the file, for the help text."""
    written = f"Write {what} to FILE."
    if not plan:
        return click.option("-o", "--output", metavar="FILE", help=written)

    def decorate(function: Function) -> Function:
        return click.option("-o", "--output", metavar="FILE", callback=_plan_file, help=written)(force_option(function))

    return decorate


def force_option(function: Function) -> Function:
    """Adds `--force`, which `_plan_file` and `page_file` read."""
    return click.option(
        "--force",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=lambda context, _option, said: context.meta.update({_FORCE: said}),
        help="Overwrite a file that vplan did not write.",
    )(function)


def _plan_file(context: click.Context, _option: click.Parameter, path: str | None) -> str | None:
    """Validates a file for a plan: one that every command recognises as a plan, or a device such as /dev/stdout, or a
    folder for the files of another trainer."""
    if path is not None and context.params.get("trainer") and not path.endswith(".toml"):
        return path
    if path is not None and not path.endswith(".toml") and (os.path.isfile(path) or not os.path.lexists(path)):
        fix = "use the ending .toml, as in plan.toml: it tells a plan from a model"
        raise VplanError(f"the plan {quoted(path)} is not a .toml file", fix)
    return _ours(context, path, "plan", _is_plan)


def forced() -> bool:
    """Whether the running command has `--force`."""
    return bool(click.get_current_context().meta.get(_FORCE))


def page_file(context: click.Context, _option: click.Parameter, path: str | None) -> str | None:
    """Validates a file for a report; the report itself refuses other endings."""
    if path is not None and not path.endswith(".html"):
        return path
    return _ours(context, path, "report", _is_page)


def _ours(context: click.Context, path: str | None, what: str, known: Callable[[str], bool]) -> str | None:
    """Returns the path. Raises a VplanError if a file there was not written by us."""
    if path is None or context.meta.get(_FORCE) or not os.path.isfile(path) or not os.path.getsize(path) or known(path):
        return path
    forces = any(parameter.name == "force" for parameter in context.command.params)
    fix = "choose another file" + (", or add --force to overwrite it" if forces else "")
    raise VplanError(f"{quoted(path, 200)} exists and is no {what} of vplan's", fix)


def _is_plan(path: str) -> bool:
    from planner.spec.plan import is_plan  # imported here: verbs that write no plan start faster

    return is_plan(path)


def _is_page(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return '<meta name="generator" content="vplan">' in file.read(PAGE_HEAD)
    except (OSError, ValueError):
        return False


def save_plan(plan: Plan, path: str) -> None:
    """Writes a plan and reports it on stderr."""
    from planner.spec.plan import write_plan

    write_plan(plan, path)
    echo(f"wrote {path}", err=True)


def report_option(function: Function) -> Function:
    """Adds `--report FILE.html`; the command gets `report: str | None`, for `write_report`."""
    return click.option("--report", metavar="FILE.html", callback=page_file, help="Write an HTML report to FILE.html.")(
        function
    )


class TypedCommand(NamedTuple):
    """The command line as typed, and the caller that waits for its answer; click's ``obj``."""

    words: tuple[str, ...] = ()
    early: Callable[[dict[str, Any]], object] | None = None
    """called with the first part of a JSON answer that takes long; used by the page of `vplan site`"""


def typed_command() -> TypedCommand:
    """The running command line; an empty one outside of a command."""
    context = click.get_current_context(silent=True)
    return (context.find_root().obj if context else None) or TypedCommand()


def typed_line(*more: str) -> str:
    """The command line as typed, with ``more`` words appended, quoted for a shell."""
    return shlex.join(["vplan", *typed_command().words, *more])


def write_report(path: str, plans: Sequence[tuple[str, Plan]] = (), **more: Any) -> None:
    """Writes a page and reports it on stderr; the arguments are those of `reports.write`. The page names this command
    as the one to make it again.

    Imported here because most answers need no templates.
    """
    import reports
    from planner.tune.storage import without_password

    with stoppable(lambda: f"{path} is unchanged"):
        reports.write(path, plans, command=without_password(typed_line()), **more)
    echo(f"wrote {path}", err=True)


def check_report(path: str) -> None:
    """Raises a VplanError for a name that no report can have, before a long computation starts."""
    from reports import page

    page.check_name(path)


def write_rehearsal(path: str, answer: RehearsalAnswer, checked: CheckedRehearsal | None) -> None:
    """Writes the page of a rehearsal and reports it on stderr."""
    import reports

    reports.write_rehearsal(path, answer, checked, command=typed_line())
    echo(f"wrote {path}", err=True)


def show(answer: dict[str, Any], as_json: bool, render: Callable[[Console], None]) -> None:
    """Prints the answer on stdout: as JSON, or by `render`."""
    if as_json:
        # NaN and Infinity are not JSON; commands must use null.
        echo(json.dumps({"schema": SCHEMA, **answer}, indent=2, allow_nan=False))
    else:
        render(answer_console())


def answer_console() -> Console:
    """The console for answers: as wide as the terminal or COLUMNS; in a pipe without COLUMNS, wide enough that nothing
    wraps."""
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH
    return console(width=wide)


@contextlib.contextmanager
def stoppable(kept: Callable[[], str]) -> Iterator[None]:
    """A context for long work that Ctrl-C may end: on KeyboardInterrupt it prints "stopped:" and the result of ``kept``
    on stderr, and re-raises."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"\nstopped: {kept()}", err=True)
        raise


def talk() -> Console:
    """The console for everything but the answer: stderr, as wide as an answer."""
    wide = None if sys.stderr.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH
    return console(stderr=True, width=wide)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A plain table; a column whose name starts with `>` is right-aligned, for numbers."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        name = column.removeprefix(">")
        found.add_column(name, justify="right" if column != name else "left", no_wrap=column != name)
    for row in rows:
        found.add_row(*map(str, row))
    return found


def verdict_exit_code(verdict: str, *, strict: bool = False) -> int:
    """0 when the plan fits (also for `tight` unless `strict`), 3 when it does not."""
    fits = verdict == "fits" or (verdict == "tight" and not strict)
    return DONE if fits else DOES_NOT_FIT
