"""The commands of a shell script, as words: quoting, comments, continued lines, variables, arrays, `for` and `eval`.

No shell runs and nothing is executed or looked up outside the text: a variable is what the text itself assigned before,
`$(...)` and what else only a shell could say stay as they are written.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple

from planner.errors import VplanError

LONGEST = 65_536
"""Characters of one word once its variables are in: `A=$A$A` doubles with every line."""
MOST = 1 << 20
"""Characters of one command: `A=(${A[@]} ${A[@]})` doubles too."""

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
_VARIABLE = re.compile(rf"\$(?:({NAME})|\{{({NAME})(\[[@*]\])?(?::?-([^}}]*))?\}})")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)(\w+)\1(.*)")
"""Where a text given to a command begins: none of its lines, up to the end word, is a command."""
_PLACEHOLDER = re.compile(
    r"'[^']*'|\"(?:\\.|[^\"\\])*\"|(?:^|(?<=\s))#.*|(?<!<)(<[A-Za-z](?:[\w ./|-]*\w)?>)(?![\w>&])", re.MULTILINE
)
"""What is quoted and comments, which are passed over; else group 1, `<path_to_model>`, which a shell takes for two
redirections."""
_PART = re.compile(r"(?:\$\((?:[^()]|\([^()]*\))*\)|\S)+")
"""One of the words that an unquoted variable's value is split into: what only a shell could say is one."""
ARGUMENTS = frozenset({"$@", "$*", "${@}", "${*}"})
"""Words for what a script is given, which is nothing."""
_ASSIGNS = frozenset({"export", "declare", "typeset", "local", "readonly"})

_KEYWORDS = frozenset({"if", "then", "else", "elif", "fi", "do", "done", "while", "until", "{", "}", "!", "time"})
_BETWEEN = frozenset({";", "\n", "&", "|", "&&", "||", ";;"})


class UnclosedError(VplanError):
    """Raised for a quote or a bracket that is never closed."""


class Piece(NamedTuple):
    """A stretch of a word: its text, and the quote around it ("" outside quotes)."""

    text: str
    quote: str


Word = list[Piece]


@dataclass
class Variables:
    """The variables that the script has assigned so far."""

    values: dict[str, list[str]] = field(default_factory=dict)
    """name -> its words: one, or as many as its array has"""
    unset: set[str] = field(default_factory=set)
    """names that were used and never assigned"""
    loops: dict[str, int] = field(default_factory=dict)
    """variables of loops over several values -> how many"""


class Line(NamedTuple):
    """One simple command: its words and the variables assigned in front of it."""

    words: tuple[str, ...]
    environment: dict[str, str]


def commands(text: str, variables: Variables | None = None) -> tuple[list[Line], Variables]:
    """Every simple command of a script in order, and what the script assigned. ``variables``: those assigned before it.

    Raises a VplanError for a quote or a bracket that is never closed, and for a placeholder.
    """
    variables = variables or Variables()
    plain = _without_here_documents(text.replace("\r\n", "\n"))
    if placeholders := tuple(dict.fromkeys(filter(None, _PLACEHOLDER.findall(plain)))):
        several = len(placeholders) > 1
        fault = f"the command has {'placeholders' if several else 'a placeholder'}: {', '.join(placeholders)}"
        raise VplanError(fault, f"put your own {'values in their places' if several else 'value in its place'}")
    return list(_commands(plain, variables)), variables


def _commands(text: str, variables: Variables, evaluated: bool = False) -> Iterator[Line]:
    """The simple commands of a text, which may assign variables. What `eval` is given is read as commands too, once:
    an `eval` in it stays as it is written."""
    current: list[Word] = []
    skipped: list[bool] = []  # of each `if` that is open
    for token in [*_tokens(text), "\n"]:
        if isinstance(token, list):
            current.append(token)
        elif token in _BETWEEN and current and _is_skipped(current, variables, skipped):
            current = []
        elif token in _BETWEEN:
            line = _command(current, variables)
            if line is not None and line.words[0] == "eval" and not evaluated:
                yield from _commands(" ".join(line.words[1:]), variables, evaluated=True)
            elif line is not None:
                yield line
            current = []


def _is_skipped(words: list[Word], variables: Variables, skipped: list[bool]) -> bool:
    """Whether a command is in a branch that numbers rule out, as `if [ "${SWAP:-0}" -gt 0 ]` does; every other branch
    is read. ``skipped``: takes each `if`, and what is known of its branch."""
    keyword = _plain(words[0])
    if keyword == "if":
        skipped.append(False if any(skipped) else _is_false(words[1:], variables))
    elif keyword in ("else", "elif") and skipped:
        skipped[-1] = False
    elif keyword == "fi" and skipped:
        skipped.pop()
    return any(skipped)


_COMPARES = {"-gt": gt, "-ge": ge, "-lt": lt, "-le": le}
_COMPARES |= {"-eq": eq, "-ne": ne}


def _is_false(words: list[Word], variables: Variables) -> bool:
    """Whether a test is a comparison of two numbers that does not hold."""
    if len(words) != 5 or _plain(words[0]) not in ("[", "[["):
        return False
    one, how, other = ("".join(_expand(word, variables, split=False)) for word in words[1:4])
    known = how in _COMPARES and one.isdecimal() and other.isdecimal() and len(one) < 10 and len(other) < 10
    return known and not _COMPARES[how](int(one), int(other))


_CONTINUED = re.compile(r"[ \t][\^`][ \t]*\n")
"""How cmd.exe and PowerShell go on in the next line."""

_ARRAY = re.compile(r"\w\+?=\([^)]*$")
"""The first of an array's lines, which a shell reads to its bracket without a backslash."""


def join_continued_lines(text: str) -> tuple[str, bool]:
    """The text with its lines of flags behind the command that they are of, where no backslash says so: as commands
    are printed to be read, and as they are typed on Windows. And whether a shell would have ended one before."""
    text = _CONTINUED.sub(" \\\n", text.replace("\r\n", "\n"))
    lines = text.split("\n")
    joins = array = False
    for at in range(1, len(lines)):
        before, line = lines[at - 1], lines[at].lstrip()
        array = ")" not in before and (array or bool(_ARRAY.search(before)))
        if not re.match("--[a-z]", line) or not before.strip() or before.lstrip().startswith("#"):
            continue
        if not before.endswith("\\"):
            lines[at - 1], joins = f"{_without_comment(before)} \\", joins or not array
    return "\n".join(lines), joins


def _without_comment(line: str) -> str:
    """A line without the comment at its end and the mark before it that was to continue the line."""
    for found in re.finditer(r"[ \t]#", line):
        before = line[: found.start()]
        if before.count('"') % 2 == before.count("'") % 2 == 0:
            line = before
            break
    return re.sub(r"[ \t]+[\^`\\]$", "", line.rstrip())


def _without_here_documents(text: str) -> str:
    """The script without its here-documents; one that is never closed stays."""
    lines = text.split("\n")
    ends: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        ends.setdefault(line.strip(" \t"), []).append(at)
    remaining: list[str] = []
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if here := _HERE_DOCUMENT.search(line):
            closing = ends.get(here[2], [])
            # Places of possible ends are looked up, not searched line by line: a text of nothing but openings would
            # take quadratic time.
            place = bisect_left(closing, at)
            if place < len(closing):
                line, at = line[: here.start()] + here[3], closing[place] + 1
        remaining.append(line)
    return "\n".join(remaining)


def _expanded(words: Iterable[Word], variables: Variables) -> list[str]:
    """All words with their variables in them; a VplanError where arrays multiply them without end."""
    expanded: list[str] = []
    length = 0
    for word in words:
        expanded += (more := _expand(word, variables))
        length += sum(map(len, more)) + len(more)
        if length > MOST:
            raise VplanError("a command grows beyond 1 MiB", "write it out")
    return expanded


def _command(words: list[Word], variables: Variables) -> Line | None:
    """Carry out the assignments of one command and expand its words; None when nothing is left of it."""
    # Branches are not chosen, but for what numbers rule out: the commands of all are read, in their order.
    while words and _plain(words[0]) in _KEYWORDS:
        words = words[1:]
    if len(words) > 3 and [_plain(words[at]) for at in (0, 2)] == ["for", "in"]:
        _first_of_loop(_text(words[1]), words[3:], variables)
        return None
    front: dict[str, list[str]] = {}
    while words and _assign(words[0], variables, front):
        words = words[1:]
    if words and _plain(words[0]) in _ASSIGNS:
        for word in words[1:]:
            _assign(word, variables, variables.values)
        words = []
    if not words:
        variables.values |= front
        return None
    expanded = _expanded(words, variables)
    return Line(tuple(expanded), {name: " ".join(value) for name, value in front.items()}) if expanded else None


def _first_of_loop(name: str, words: list[Word], variables: Variables) -> None:
    """A loop's variable has its first value: one run of it is read."""
    values = _expanded(words, variables)
    if len(values) > 1:
        variables.loops[name] = len(values)
    variables.values[name] = values[:1]


def _plain(word: Word) -> str:
    """A word that is one piece without quotes; of any other nothing."""
    return word[0].text if len(word) == 1 and not word[0].quote else ""


def _text(word: Word) -> str:
    return "".join(piece.text for piece in word)


def _assign(word: Word, variables: Variables, into: dict[str, list[str]]) -> bool:
    """Whether a word is an assignment; it is made."""
    assignment = _ASSIGNMENT.match(word[0].text) if word and not word[0].quote else None
    if assignment is None:
        return False
    name, more = assignment.groups()
    rest = [Piece(word[0].text[assignment.end() :], ""), *word[1:]]
    before = variables.values.get(name, [])
    if len(rest) == 2 and not rest[0].text and not rest[1].quote and rest[1].text.startswith("("):
        items = _expanded((token for token in _tokens(rest[1].text[1:-1]) if isinstance(token, list)), variables)
        into[name] = [*before, *items] if more else items
    else:
        value = " ".join(_expand(rest, variables, split=False)) if _text(rest) else ""
        into[name] = [("".join(before) if more else "") + value]
    return True


def _expand(word: Word, variables: Variables, split: bool = True) -> list[str]:
    """A word with its variables in it: several words where an unquoted one holds spaces, or an array."""
    if _text(word) in ARGUMENTS and "'" not in (piece.quote for piece in word):
        return []
    words: list[str] = [""]
    quoted = bool(any(piece.quote for piece in word))
    for piece in word:
        if piece.quote == "'":
            words[-1] += piece.text
            continue
        at = 0
        for use in _VARIABLE.finditer(piece.text):
            words[-1] += piece.text[at : use.start()]
            at = use.end()
            values = _value(use, variables)
            if not piece.quote and split:
                values = [part for value in values for part in _PART.findall(value)]
            if use[3] is None and piece.quote:
                values = [" ".join(values)]
            if values:
                words[-1] += values[0]
                words += values[1:]
            if len(words) > LONGEST or len(words[-1]) > LONGEST:
                break
        words[-1] += piece.text[at:]
        if len(words) > LONGEST or any(len(part_text) > LONGEST for part_text in words):
            raise VplanError("a variable grows beyond 64 KiB", "write the command out")
    return words if quoted or words != [""] else []


def _value(use: re.Match[str], variables: Variables) -> list[str]:
    """What a variable stands for: itself, as it was written, when the text never assigned it."""
    name = use[1] or use[2]
    if name in variables.values:
        return variables.values[name]
    if use[4] is not None:
        return [use[4].strip("\"'")]
    variables.unset.add(name)
    return [use[0]]


def _tokens(text: str) -> Iterator[Word | str]:
    """Words, and what stands between commands ("\\n" included)."""
    word: Word = []
    at, end = 0, len(text)
    while at < end:
        char = text[at]
        if char == "\\":
            if text[at + 1 : at + 2] not in ("\n", ""):
                word.append(Piece(text[at + 1], "'"))
            at += 2
        elif char in "'\"":
            inside, at = _quoted(text, at)
            word.append(Piece(inside, char))
        elif char == "#" and not word:
            at = _line_end(text, at)
        elif char in " \t\n;&|<>":
            if word and not (char in "<>" and _text(word).isdigit()):  # the 2 of 2>&1
                yield word
            word = []
            at, between = _between(text, at)
            if between:
                yield between
        elif text.startswith("$(", at) or (char == "(" and word and _text(word).endswith("=")):
            start = at
            at = _closed(text, at + (char == "$"))
            word.append(Piece(text[start:at], "'" if char == "$" else ""))
        else:
            start = at
            while at < end and text[at] not in " \t\n;&|<>\\'\"" and not text.startswith("$(", at):
                if text[at] == "(" and at > start and text[at - 1] == "=":
                    break
                at += 1
            word.append(Piece(text[start:at], ""))
    if word:
        yield word


def _between(text: str, at: int) -> tuple[int, str]:
    """Position behind what separates words there, and it if it separates commands. Redirections are left out."""
    if text[at] in "<>" or text.startswith("&>", at):
        redirection = re.compile(r"&?[<>]+&?[ \t]*(?:'[^']*'|\"[^\"]*\"|[^\s;&|]*)").match(text, at)
        assert redirection is not None
        return redirection.end(), ""
    for operator in ("&&", "||", ";;"):
        if text.startswith(operator, at):
            return at + 2, operator
    return at + 1, text[at].strip(" \t")


def _quoted(text: str, at: int) -> tuple[str, int]:
    """What stands between a quote and its end, and the position behind that."""
    quote, inside, start = text[at], "", at
    at += 1
    while at < len(text):
        if text[at] == quote:
            return inside, at + 1
        if quote == '"' and text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            inside += "" if text[at + 1] == "\n" else text[at + 1]
            at += 2
            continue
        inside += text[at]
        at += 1
    line = text.count("\n", 0, start) + 1
    raise UnclosedError(f"the quote {quote} in line {line} is never closed", "close it, or leave it out")


def _closed(text: str, at: int) -> int:
    """The position behind the bracket that closes the one at `at`."""
    depth, start = 0, at
    while at < len(text):
        if text[at] in "'\"":
            _, at = _quoted(text, at)
            continue
        if text[at] == "#" and text[at - 1] in " \t\n":  # a comment within an array
            at = _line_end(text, at)
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
        if not depth:
            return at
    line = text.count("\n", 0, start) + 1
    raise UnclosedError(f"the bracket ( in line {line} is never closed", "close it, or leave it out")


def _line_end(text: str, at: int) -> int:
    newline = text.find("\n", at)
    return len(text) if newline < 0 else newline
