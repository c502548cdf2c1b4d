"""Seventy questions of newcomers, each answered in the first ten lines of one command at 80 columns: `questions.md`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from planner.commands import cli

LINES, COLUMNS = 10, 80

PAGE = Path(__file__).with_name("questions.md")

RANGE = re.compile(r"\{([\d.]+)\.\.([\d.]+)\}")


class Asked(NamedTuple):
    """One question: its number, the command that asks it, and the facts of the answer."""

    number: int
    command: str
    says: list[str]
    never: list[str]


def questions() -> list[Asked]:
    """The questions of the page."""
    found = []
    for part in re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        (command,) = re.findall(r"^\$ vplan (.*)$", part, re.MULTILINE)
        facts = {
            word: [fact for line in re.findall(rf"^{word} (.*)$", part, re.MULTILINE) for fact in _quoted(line)]
            for word in ("says", "never")
        }
        found.append(Asked(int(part.partition(".")[0]), command, facts["says"], facts["never"]))
    return found


def _quoted(line: str) -> list[str]:
    return re.findall(r"`([^`]+)`", line)


def is_said(fact: str, lines: list[str]) -> bool:
    """Whether a fact is in the lines, ignoring line breaks; `^` matches the start of any line."""
    ranges = [(float(low), float(high)) for low, high in RANGE.findall(fact)]
    parts = RANGE.split(fact)[::3]
    pattern = "".join(
        part + (f"(?P<n{at}>\\d+(?:\\.\\d+)?)" if at < len(ranges) else "") for at, part in enumerate(parts)
    )
    anchored = pattern.startswith("^")
    text = " ".join(" ".join(lines).split())
    starts = [" ".join(" ".join(lines[at:]).split()) for at in range(len(lines))] if anchored else [text]
    for start in starts:
        for match in re.finditer(pattern, start):
            numbers = [(match[f"n{at}"], bounds) for at, bounds in enumerate(ranges)]
            if all(low <= float(number) <= high for number, (low, high) in numbers if number is not None):
                return True
    return False


def test_there_are_seventy_questions() -> None:
    assert [asked.number for asked in questions()] == list(range(1, 71))
    assert all(asked.says for asked in questions())


@pytest.mark.parametrize("asked", questions(), ids=lambda asked: f"{asked.number:02}")
def test_a_question_is_answered_in_ten_lines(asked: Asked) -> None:
    done = CliRunner().invoke(cli, shlex.split(asked.command), env={"COLUMNS": str(COLUMNS)})
    assert done.exit_code in (0, 1, 3), done.output
    lines = done.output.splitlines()[:LINES]
    missing = [fact for fact in asked.says if not is_said(fact, lines)]
    wrong = [fact for fact in asked.never if is_said(fact, lines)]
    assert not missing and not wrong, "\n".join([f"$ vplan {asked.command}", *lines, f"{missing=} {wrong=}"])
