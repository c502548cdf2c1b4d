"""The terminal: the one way text gets there. What other people wrote (names, keys, paths, logs) is shown as text and
never steers it: no title, no colour, no line written over, no text turned around."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


_LINE_END = re.compile(r" +\n")


def plain(text: str) -> str:
    """Text in which a character that is nothing to look at is written out, an escape as `\\x1b`. Blanks and line ends
    stay."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(letter: str) -> str:
    if letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs":
        return letter
    return letter.encode("unicode_escape").decode()


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Writes a line to stdout, or to stderr."""
    import click  # not for whoever only imports this

    click.echo(plain(text), err=err, nl=nl)


def console(*, stderr: bool = False, width: int | None = None, **more: Any) -> Console:
    """A console whose texts are neither markup nor emoji nor anything else that steers the terminal. ``more``: rich's
    own, as ``file`` and ``record``."""
    from rich.console import Console

    class Plain(Console):
        """Leaves the end of a pipe to `planner.commands`, which ends every command the same way. No line ends in a
        blank, as rich's wrapped lines and rows of tables do."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            held: list[Segment] = []  # the latest that may end in blanks, and blanks behind it
            for segment in super().render(renderable, options):
                if not segment.control and not segment.text.isprintable():
                    segment = segment._replace(text=_LINE_END.sub("\n", plain(segment.text)))
                if segment.text.startswith("\n"):
                    held = [each._replace(text=each.text.rstrip(" ")) for each in held]
                if segment.text.strip(" ") or segment.control:
                    yield from held
                    held = []
                if segment.control:
                    yield segment
                else:
                    held.append(segment)
            yield from held

        def on_broken_pipe(self) -> None:
            raise

    options: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    return Plain(stderr=stderr, width=width, **options, **more)
