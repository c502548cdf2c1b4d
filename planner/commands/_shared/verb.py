"""What every command shares: help in sections, examples, the answer on stdout as text or as one JSON object."""

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
"""Characters of a page in which it says who made it."""

PIPED_WIDTH = 1_000
"""Columns of a table that goes to a file or another program: a line a row, whatever it holds."""


SCHEMA = 1
"""Of every JSON answer: a number that grows when a key changes its name or its meaning."""

LONG = ("Strategy", "Training")
"""Sections that only `--help-all` lists: an option for each field."""

PATH_WORDS = ("FILE", "DIR", "FOLDER", "OUTPUT", ".toml", ".json")
"""What a value is called that a shell completes as a path."""

_ALL, _FORCE = "vplan.help_all", "vplan.force"
"""What eager options leave in a context for others."""


class PathText(click.types.StringParamType):
    """A text that shells complete as a path."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Leaves it to the shell."""
        return [CompletionItem(incomplete, type="file")]


class Verb(click.Command):
    """A command whose help shows its options in sections (an option's `section`, else "Options"), the long ones only
    under `--help-all`."""

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
        """As click does it. Of an option without its value click does not say of which command it is."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options by section, in the order the sections first appear."""
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
                formatter.write_dl([row for row in rows if row])


def _section(parameter: click.Parameter) -> str:
    return str(getattr(parameter, "section", "Options"))


def _show_all(context: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


def starting_with(known: Iterable[str], incomplete: str) -> list[CompletionItem]:
    """The names that a shell may complete a word to."""
    return [CompletionItem(name) for name in known if name.startswith(incomplete.lower())]


class FiniteRange(click.FloatRange):
    """A number in a range. Click lets nan through any, which is neither smaller nor larger, and inf where no end is."""

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
    """Adds `--markdown`; the command gets `as_markdown: bool`. `page` is the page of the docs it prints."""
    text = f"Print {page} of the docs: every bundled entry, with sources."
    return click.option("--markdown", "as_markdown", is_flag=True, help=text)


def output_option(what: str, *, plan: bool = True) -> Callable[[Function], Function]:
    """Adds `-o/--output FILE`, and of a plan `--force`; the command gets `output: str | None`. `what` says what the
    file will hold."""
    written = f"Write {what} to FILE."
    if not plan:
        return click.option("-o", "--output", metavar="FILE", help=written)

    def decorate(function: Function) -> Function:
        return click.option("-o", "--output", metavar="FILE", callback=_plan_file, help=written)(force_option(function))

    return decorate


def force_option(function: Function) -> Function:
    """Adds `--force`, which `_plan_file` and `page_file` look for."""
    return click.option(
        "--force",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=lambda context, _option, said: context.meta.update({_FORCE: said}),
        help="Overwrite a file that vplan did not write.",
    )(function)


def _plan_file(context: click.Context, _option: click.Parameter, path: str | None) -> str | None:
    """A file that every command would know for a plan; or what is no file, as /dev/stdout; or the folder for the files
    of another trainer."""
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
    """A file that a report may be written to; what has another ending is the report's own to refuse."""
    if path is not None and not path.endswith(".html"):
        return path
    return _ours(context, path, "report", _is_page)


def _ours(context: click.Context, path: str | None, what: str, known: Callable[[str], bool]) -> str | None:
    """The path, unless it holds what somebody else wrote."""
    if path is None or context.meta.get(_FORCE) or not os.path.isfile(path) or not os.path.getsize(path) or known(path):
        return path
    forces = any(parameter.name == "force" for parameter in context.command.params)
    fix = "choose another file" + (", or add --force to overwrite it" if forces else "")
    raise VplanError(f"{quoted(path, 200)} exists and is no {what} of vplan's", fix)


def _is_plan(path: str) -> bool:
    from planner.spec.plan import is_plan  # the verbs that write none start faster without

    return is_plan(path)


def _is_page(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return '<meta name="generator" content="vplan">' in file.read(PAGE_HEAD)
    except (OSError, ValueError):
        return False


def save_plan(plan: Plan, path: str) -> None:
    """Writes a plan and says so on stderr."""
    from planner.spec.plan import write_plan

    write_plan(plan, path)
    echo(f"wrote {path}", err=True)


def report_option(function: Function) -> Function:
    """Adds `--report FILE.html`; the command gets `report: str | None`, for `write_report`."""
    return click.option("--report", metavar="FILE.html", callback=page_file, help="Write an HTML report to FILE.html.")(
        function
    )


class TypedCommand(NamedTuple):
    """A command line as it was typed, and who waits for its answer: click's ``obj``."""

    words: tuple[str, ...] = ()
    early: Callable[[dict[str, Any]], object] | None = None
    """called with the first part of a JSON answer that takes long: in the page of `vplan site`"""


def typed_command() -> TypedCommand:
    """The command line that runs now; an empty one where none does."""
    context = click.get_current_context(silent=True)
    return (context.find_root().obj if context else None) or TypedCommand()


def typed_line(*more: str) -> str:
    """The command line as typed, with more words at its end, quoted for a shell."""
    return shlex.join(["vplan", *typed_command().words, *more])


def write_report(path: str, plans: Sequence[tuple[str, Plan]] = (), **more: Any) -> None:
    """Write a page and say so on stderr; the arguments are those of `reports.write`. This very command makes it again.

    Imported when it is asked for: most answers need no templates.
    """
    import reports
    from planner.tune.storage import without_password

    with stoppable(lambda: f"{path} is unchanged"):
        reports.write(path, plans, command=without_password(typed_line()), **more)
    echo(f"wrote {path}", err=True)


def check_report(path: str) -> None:
    """Raises a VplanError for a name that no report can have, before anything long begins."""
    from reports import page

    page.check_name(path)


def write_rehearsal(path: str, answer: RehearsalAnswer, checked: CheckedRehearsal | None) -> None:
    """Write the page of a rehearsal and say so on stderr."""
    import reports

    reports.write_rehearsal(path, answer, checked, command=typed_line())
    echo(f"wrote {path}", err=True)


def show(answer: dict[str, Any], as_json: bool, render: Callable[[Console], None]) -> None:
    """Prints the answer on stdout: as JSON, or as `render` prints it."""
    if as_json:
        # NaN and Infinity are not JSON; a command that has no number says null.
        echo(json.dumps({"schema": SCHEMA, **answer}, indent=2, allow_nan=False))
    else:
        render(answer_console())


def answer_console() -> Console:
    """The console for answers: as wide as the terminal or as COLUMNS says; in a pipe without COLUMNS, wide enough that
    nothing wraps."""
    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else PIPED_WIDTH
    return console(width=wide)


@contextlib.contextmanager
def stoppable(kept: Callable[[], str]) -> Iterator[None]:
    """A context for long work that Ctrl-C may end: on KeyboardInterrupt it prints "stopped:" with what ``kept`` returns
    on stderr, and raises it again."""
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
    """A plain table; a column whose name starts with `>` is of numbers, right-aligned."""
    from rich.table import Table

    found = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        name = column.removeprefix(">")
        found.add_column(name, justify="right" if column != name else "left", no_wrap=column != name)
    for row in rows:
        found.add_row(*map(str, row))
    return found


def verdict_exit_code(verdict: str, *, strict: bool = False) -> int:
    """0 when it fits (`tight` too, unless `strict`), 3 when it does not."""
    fits = verdict == "fits" or (verdict == "tight" and not strict)
    return DONE if fits else DOES_NOT_FIT
