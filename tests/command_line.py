"""Runs a command line in this process, where its imports and recordings are already loaded."""

from __future__ import annotations

from click.testing import CliRunner, Result

from planner.commands import cli


def typed(*words: str, code: int = 0) -> Result:
    """The result of a command, which must end with the given exit code and without a traceback."""
    done = CliRunner().invoke(cli, words, prog_name="vplan")
    assert done.exit_code == code, done.stderr + done.stdout
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done
