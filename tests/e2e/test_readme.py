"""The console output in the README and its pages is what the commands print; `python tests/e2e/test_readme.py` updates
it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from planner.commands import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("suggest.md", "other-trainers.md"))]
"""Pages with commands and their output; those in docs/stories have their own test."""
BLOCK = re.compile(r"```console\n\$ (vplan [^\n]+)\n(.*?)```", re.DOTALL)
COLUMNS = "110"


def printed(command: str) -> str:
    """What a command of a page prints on stdout, on a terminal of 110 columns without colour."""
    words = [sys.executable, str(ROOT / "vplan.py"), *shlex.split(command)[1:]]
    environment = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1", "VPLAN_HOME": str(ROOT / "nobody")}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode in (0, 3), done.stderr
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


@pytest.mark.parametrize(("command", "shown"), [block for page in PAGES for block in BLOCK.findall(page.read_text())])
def test_output_in_the_pages(command: str, shown: str) -> None:
    assert printed(command) == shown


def test_it_names_the_verbs_that_have_no_json() -> None:
    context = click.Context(cli)
    verbs = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    without = [name for name, verb in verbs.items() if verb and not any("--json" in each.opts for each in verb.params)]
    for page in ("README.md", "docs/commands.md"):
        text = (ROOT / page).read_text()
        (said,) = re.findall(r"All (?:commands )?but (.*?) take `--json`", text)
        assert re.findall(r"`(\w+)`", said) == without


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(BLOCK.sub(lambda m: f"```console\n$ {m[1]}\n{printed(m[1])}```", page.read_text()))
