"""The one error type for what a user got wrong. Anything else that goes wrong is a bug and shows its traceback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class VplanError(ValueError):
    """A wrong input: one line that names the fault, one that says what to type instead.

    `exit_code` is the command's (docs/commands.md): 1 wrong input, 3 does not fit, 4 a process we started failed.
    """

    def __init__(self, message: str, fix: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """What it takes to raise it in another process."""
        return type(self), (self.message, self.fix, self.exit_code)


class ContradictionError(VplanError):
    """Raised when options contradict each other."""


class NotEstimatedError(VplanError):
    """A strategy that is not estimated, or that a model does not take: another of a search may be."""


class NotRecordedError(NotEstimatedError):
    """There is no recording that answers a question: another strategy, model or shape may have one."""


class NoParametersError(NotRecordedError):
    """There is no table of a model's parameters: to read some trainers' commands takes one."""

    def __init__(self, model: str) -> None:
        super().__init__(f"no table of {model}'s parameters", f"record it: vplan record {model} --variant parameters")
        self.model = model

    def __reduce__(self) -> tuple[Any, ...]:
        """As for `VplanError`."""
        return type(self), (self.model,)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; empty when none is at all like it."""
    # A pasted wall of text cannot be a typo of a short name, and difflib is quadratic in its length.
    text = name.lower()[:100]
    import difflib  # only for what is misspelt

    asked = difflib.SequenceMatcher(b=text)
    scores: dict[str, float] = {}
    for candidate in known:
        asked.set_seq1(candidate.lower())
        # Two letters the wrong way round are a slip of the fingers, and difflib sees no more in them than in any two.
        turned = sorted(candidate.lower()) == sorted(text)
        scores[candidate] = 1.0 if turned else asked.ratio()
    # Beside a clear winner (one letter wrong) the merely similar names are noise. What is less alike than 0.6, the bar
    # of difflib's own `get_close_matches`, is another word.
    bar = max(0.6, max(scores.values(), default=0.0) - 0.15)
    return sorted((found for found in scores if scores[found] >= bar), key=lambda found: -scores[found])[:count]


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A fix naming the nearest known names, or `otherwise` when nothing is near."""
    close = nearest(name, known)
    return "did you mean " + " or ".join(close) + "?" if close else otherwise


def quoted(value: object, limit: int = 60) -> str:
    """A value as it may stand in a one-line message: quoted, without line breaks, cut when long."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 4] + "..." + text[-1]
