"""A command typed in this process: what a new one would start with, its imports and recordings, is there already."""

from __future__ import annotations

from click.testing import CliRunner, Result

from planner.commands import cli


def typed(*words: str, code: int = 0) -> Result:
    """What the command says, which must end with the code and no traceback."""
    done = CliRunner().invoke(cli, words, prog_name="vplan")
    assert done.exit_code == code, done.stderr + done.stdout
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done
