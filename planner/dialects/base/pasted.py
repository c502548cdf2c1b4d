"""Commands as they are pasted from elsewhere than a POSIX shell: notebooks, cmd.exe, PowerShell."""

from __future__ import annotations

import json
import re

from planner.errors import VplanError, quoted

_MAGIC = (
    (re.compile(r"^[ \t]*!+[ \t]*(?=\S)", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*%%(?:bash|sh|shell|script)\b.*$", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*%cd[ \t]+", re.MULTILINE), "cd "),
    (re.compile(r"^[ \t]*%env[ \t]+(\w+)[ \t=]+", re.MULTILINE), r"export \1="),
)
"""What IPython adds to a shell's line or takes for one (its magics `%cd`, `%env`, `%%bash`)."""

_WINDOWS = re.compile(r"(?:^|[\s\"'=])(?:[A-Za-z]:\\|\.{1,2}\\)\w|\w\\[\w.-]+\.(?:py|exe|bat|toml|json|yaml)\b")
"""A path with backslashes."""

_BACKSLASH = re.compile(r"(?<=[\w.:)-])\\+(?=[\w.(-])")
_SET = (
    (re.compile(r"^[ \t]*set[ \t]+\"?(\w+)=([^\"\n]*)\"?[ \t]*$", re.MULTILINE | re.IGNORECASE), r'export \1="\2"'),
    (re.compile(r"^[ \t]*\$env:(\w+)[ \t]*=[ \t]*", re.MULTILINE | re.IGNORECASE), r"export \1="),
    (re.compile(r"^[ \t]*&[ \t]+(?=\S)", re.MULTILINE), ""),
)
"""Assignments of cmd.exe and PowerShell, and PowerShell's call operator."""

_POWERSHELL = re.compile(r"^[ \t]*\$([A-Za-z_]\w*)[ \t]*=[ \t]*(?=\S)", re.MULTILINE)
"""An assignment of PowerShell: a POSIX shell would run what the variable holds, with `=` for an argument."""
_ARRAY = re.compile(r"(?<==)@\(([^()]*)\)")
_SPLAT = re.compile(r"(?<=\s)@([A-Za-z_]\w*)\b")

_CARET = re.compile(r"(?<=\S)\^[ \t]*\r?\n")


def as_posix(text: str) -> str:
    """The text as a POSIX shell would have it: without IPython's marks, with Windows' assignments as exports, and with
    slashes in paths where it has paths with backslashes."""
    for pattern, instead in (*_MAGIC, *_SET):
        text = pattern.sub(instead, text)
    if _POWERSHELL.search(text):
        text = _POWERSHELL.sub(r"\1=", text)
        text = _ARRAY.sub(lambda array: "(" + re.sub(r"""(?<=["'])[ \t]*,""", " ", array[1]) + ")", text)
        text = _SPLAT.sub(r'"${\1[@]}"', text)
    text = _CARET.sub(" ^\n", text)
    return _BACKSLASH.sub("/", text) if _WINDOWS.search(text) else text


def notebook_commands(text: str, name: str) -> str:
    """The shell commands of a notebook: cells of `%%bash`, and lines that begin with `!` or a magic like it. Raises a
    VplanError for what is no notebook."""
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise VplanError(
            f"{quoted(name)} is not a notebook", "pass the command, or the notebook as Jupyter saves it"
        ) from None
    found: list[str] = []
    for source in sources:
        if re.match(r"\s*%%(?:bash|sh|shell|script)\b", source):
            found.append(source)
            continue
        goes_on = False
        for line in source.split("\n"):
            if goes_on or re.match(r"\s*(?:!|%cd\b|%env\b)", line):
                found.append(line)
                goes_on = line.rstrip().endswith("\\")
    return "\n".join(found)
