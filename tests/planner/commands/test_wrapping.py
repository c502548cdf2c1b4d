"""Where lines of the terminal break."""

from __future__ import annotations

import io
import shlex

import pytest
from rich.console import Console

from planner.commands._shared.rendering.wrapping import (
    MOST_LINES,
    command_lines,
    listed,
    print_command,
    print_notes,
    wrapped,
)


def printed(width: int, heading: str, notes: list[str]) -> list[str]:
    shown = io.StringIO()
    print_notes(Console(file=shown, width=width), heading, notes)
    return shown.getvalue().splitlines()


def test_a_command_in_backquotes_stays_in_one_line() -> None:
    lines = wrapped("  it is not here (pass it too: `vplan check a.sh PATH/b.toml`): estimated without", 40, "  ")
    assert "  `vplan check a.sh PATH/b.toml`):" in lines
    assert all(line.startswith("  ") and len(line) <= 40 for line in lines)
    assert " ".join(" ".join(lines).split()) == "it is not here (pass it too: `vplan check a.sh PATH/b.toml`): " + (
        "estimated without"
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_paragraph_is_longer_than_three_lines(width: int) -> None:
    usual = [f"assumption {number} of an answer" for number in range(6)]
    rare = "this model was distilled to few steps, which training undoes, and an adapter against that is not priced"
    lines = printed(width, "assumed", [*usual[:2], rare, *usual[2:]])
    start = next(at for at, line in enumerate(lines) if line.startswith("assumed: "))
    assert len(lines) - start <= MOST_LINES and max(map(len, lines)) <= width
    text = " ".join(lines)
    assert all(note in text for note in (*usual, rare)) and (start == 0 or text.startswith(rare))
    assert printed(400, "assumed", usual) == [f"assumed: {'; '.join(usual)}"]


def test_many_names_are_counted() -> None:
    names = [f"a-model-of-name-{number}" for number in range(40)]
    lines = listed("do not fit: ", names, 80)
    assert len(lines) == MOST_LINES and max(map(len, lines)) <= 80
    told = " ".join(lines).removeprefix("do not fit: ").partition(" and ")
    assert len(told[0].split(", ")) + int(told[2].removesuffix(" more")) == 40
    assert listed("tight: ", names[:2], 80) == ["tight: a-model-of-name-0, a-model-of-name-1"]


def test_a_shell_reads_the_lines_of_a_command_as_one() -> None:
    command = "vplan suggest easyanimate-v5.1-7b --gpu 80GB --frames 49 --height 512 --width 512 --method full --gpus 4"
    shown = io.StringIO()
    print_command(Console(file=shown, width=60), "next: ", command)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 60
    assert shlex.split(shown.getvalue().removeprefix("next: ").replace("\\\n", "")) == command.split()
    assert list(command_lines("      ", ["--a 1"], 80)) == ["      --a 1"]
