"""The command line: one module per verb, imported only when that verb runs, and one way to end.

Commands raise a VplanError for a user's mistake and return their exit code (None is 0). Only this module prints errors.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

import planner
from planner.commands._shared.flag_aliases import likely_options
from planner.commands._shared.verb import TypedCommand
from planner.errors import VplanError, did_you_mean, quoted
from planner.terminal import echo

VERBS = {
    "suggest": "Find the fastest way to train that fits a card.",
    "estimate": "Estimate one configuration, phase by phase.",
    "rehearse": "Run a training command on a virtual GPU.",
    "tune": "Find the best plan by measuring on the GPU.",
    "probe": "Run a few steps of a plan and measure them.",
    "preflight": "Check whether a plan can start on this machine now.",
    "train": "Train a plan or a model, from clips to finished weights.",
    "watch": "Follow a training run, its memory beside the prediction.",
    "check": "Check another trainer's command for out-of-memory errors.",
    "export": "Write a plan as another trainer's files.",
    "report": "Write an HTML report about a plan or a run.",
    "site": "Build a static site that plans in the reader's browser.",
    "models": "List the known models, their sizes and usual shapes.",
    "gpus": "List the known cards and their usable memory.",
    "record": "Record a model of your own, or the bundled tapes again.",
    "calibrate": "Measure this machine's GPU to improve its estimates.",
    "accuracy": "Compare estimates with measurements.",
    "doctor": "Report what this machine has and lacks for training.",
    "mcp": "Serve these answers to agents (Model Context Protocol).",
    "demo": "Write a tiny model and clips, to try training on a CPU.",
}
"""Verb -> its line in the help, in the order in which people need them. `planner/commands/VERB.py` has its
`command`."""

USAGE = 2
"""Exit code of a usage error: an unknown option or command, a missing argument."""

INTERRUPTED = 130
"""128 + SIGINT, the shells' convention."""

REFUSED_BY_SYSTEM = (errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)
"""Error numbers of checking whether a path exists: no valid file name, or a folder without permission to enter."""

UNWRITTEN = 1
"""Exit code when the answer could not be written: the disk is full, the reader has gone (`| head -1`), or there is no
stdout."""


class Verbs(click.Group):
    """A group that lists its verbs without importing them, and ends every command the same way."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all verbs, in the order of VERBS."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the module of a verb and returns its command; None for an unknown verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"planner.commands.{cmd_name}").command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes verbs from VERBS, and the group's own options."""
        verbs = [CompletionItem(name, help=line) for name, line in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the verb. The error for an unknown one names the nearest."""
        if not args[0].startswith("-") and args[0] not in VERBS:
            raise VplanError(f"no such command {args[0]!r}", did_you_mean(args[0], VERBS, "see `vplan --help`"), USAGE)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the verbs' help lines from VERBS: importing all of them would take a second."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        early: Callable[[dict[str, Any]], object] | None = None,
        **extra: Any,
    ) -> Any:
        """Runs one command line; returns the exit code, or ends the process with it in click's standalone mode.
        ``early``: as for `TypedCommand`."""
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] == ["help"]:  # as git and others have it
            words = [*words[1:2], "--help"]
        try:
            if sys.stdout is None:  # `>&-`
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            extra["obj"] = TypedCommand(tuple(words), early)
            code = self._run(words, prog_name or "vplan", complete_var, extra)
            sys.stdout.flush()
        except OSError as error:
            if error.filename is not None:  # a file that no command handles: a bug
                raise
            code = _unwritten(error)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, words: list[str], prog_name: str, complete_var: str | None, extra: dict[str, Any]) -> int:
        """Runs a command line, reports its error if any, and returns the exit code."""
        try:
            result = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
            return result if isinstance(result, int) else 0
        except VplanError as error:
            return _report(error, words)
        except OSError as error:
            if error.errno not in REFUSED_BY_SYSTEM or error.filename is None:
                raise
            fault = f"cannot open {quoted(os.fsdecode(error.filename))}: {error.strerror}"
            return _report(VplanError(fault, "check its name and permissions"), words)
        except click.Abort as abort:
            return getattr(abort.__cause__, "exit_code", INTERRUPTED)  # Ctrl-C, or `planner.signals.Termination`
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            return error.exit_code
        except click.ClickException as error:
            return _report(as_ours(error), words)


def as_ours(error: click.ClickException) -> VplanError:
    """Translates a click error: exit code 1 for a bad value, 2 for a usage error."""
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    see = f"see `{context.command_path} --help`" if context else "see `vplan --help`"
    if isinstance(error, click.NoSuchOption):
        known = [name for parameter in context.command.params for name in parameter.opts] if context else []
        close = likely_options(error.option_name, known)
        fix = f"did you mean {' or '.join(close)}? ({see})" if close else see
        return VplanError(f"no such option {error.option_name}", fix, USAGE)
    if extra := re.fullmatch(r"got unexpected extra argument \((.+)\)", message):
        return VplanError(message, f"did you mean --gpu {extra[1]}? ({see})" if _is_card(extra[1]) else see, USAGE)
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter):
        return VplanError(message, see)
    return VplanError(message, see, USAGE)


def _is_card(word: str) -> bool:
    """Whether a word can only be a card, or several."""
    from planner.catalog.card_lookup import parse_gpus  # other commands start without what cards are

    try:
        parse_gpus(word)
    except VplanError:
        return False
    return True


def _report(error: VplanError, words: list[str]) -> int:
    """Reports an error: as a JSON object on stdout with --json, else as two lines on stderr."""
    own_words = words[: words.index("--")] if "--" in words else words
    if "--json" in own_words:
        echo(json.dumps({"schema": 1, "error": {"message": error.message, "fix": error.fix}}))
    else:
        with contextlib.suppress(OSError):  # the exit code remains if stderr cannot be written
            echo(f"error: {error.message}", err=True)
            if error.fix:
                echo(f"fix: {error.fix}", err=True)
    return error.exit_code


def _unwritten(error: OSError) -> int:
    """Ends a command whose answer could not be written: silently if its reader has gone, else with one line."""
    if sys.stdout is not None:  # else flushing its buffer at exit would fail again
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if not isinstance(error, BrokenPipeError):
        with contextlib.suppress(OSError):
            echo(f"error: cannot write the answer: {error.strerror}", err=True)
    return UNWRITTEN


def _version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked:
        echo(f"vplan {planner.__version__}")
        context.exit()


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n  vplan suggest --gpu 24GB --frames 81\n  vplan suggest wan2.1-t2v-14b --gpu 4090 --json",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def cli() -> None:
    """Predict whether fine-tuning a diffusion model fits the GPU, and what to change if not."""
