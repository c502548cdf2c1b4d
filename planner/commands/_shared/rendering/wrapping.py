"""Lines of the terminal that are broken where a reader may break them: between options, never inside a command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from planner.units import plural

if TYPE_CHECKING:
    from rich.console import Console

MOST_LINES = 3
"""Lines of a paragraph."""
INDENT = " " * 6
"""Before what continues the line of a plan or of a command."""
_WORD = re.compile(r"`[^`]*`\S*|\S+")


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """A text in lines; what stands in backquotes is to be typed, and stays in one line. ``indent``: of the further
    lines."""
    lines: list[str] = []
    start = re.match(r"\s*", text)
    line = start[0] if start else ""
    bare = True
    for word in _WORD.findall(text):
        if not bare and len(line) + 1 + len(word) > width:
            lines.append(line)
            line, bare = indent, True
        line += word if bare else f" {word}"
        bare = False
    return [*lines, line]


def print_notes(console: Console, heading: str, notes: Iterable[str], style: str = "dim") -> None:
    """Notes behind a heading, in a paragraph. Where that would be long, the longest notes stand above it, each alone:
    they tell more than what is usual."""
    together, alone = list(notes), list[str]()
    while len(lines := wrapped(f"{heading}: {'; '.join(together)}", console.width)) > MOST_LINES and together[1:]:
        alone.append(max(together, key=len))
        together.remove(alone[-1])
    for note in alone:
        print_lines(console, wrapped(note, console.width), style)
    print_lines(console, lines, style)


def print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Lines that are already as wide as they should be."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def listed(before: str, names: Sequence[str], width: int) -> list[str]:
    """Names behind what stands before them: as many as a paragraph holds, and how many more there are."""
    for shown in range(len(names), 0, -1):
        more = f" and {len(names) - shown} more" if shown < len(names) else ""
        lines = wrapped(before + ", ".join(names[:shown]) + more, width)
        if len(lines) <= MOST_LINES:
            return lines
    return [before + plural(len(names), "name")]


def print_command(console: Console, before: str, command: str) -> None:
    """A command in bold, continued between its options as a shell reads it."""
    print_lines(console, command_lines(before, re.split(r" (?=-)", command), console.width), "bold")


def command_lines(before: str, parts: Iterable[str], width: int) -> Iterator[str]:
    """Parts of a command behind what stands before them, in lines that a shell takes for one."""
    line, bare = before, True
    for part in parts:
        if not bare and len(line) + len(part) + 3 > width:
            yield line + " \\"
            line, bare = INDENT, True
        line += part if bare else f" {part}"
        bare = False
    yield line
