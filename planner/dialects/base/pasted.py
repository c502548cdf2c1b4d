"""Commands as they are pasted from elsewhere than a POSIX shell: notebooks, cmd.exe, PowerShell."""

from __future__ import annotations

import ast
import json
import re
import shlex

from planner.errors import VplanError, quoted

_MAGIC = (
    (re.compile(r"^.*\bExecuting command: (\S.*?)(?: with shell=\w+)?$", re.MULTILINE), r"\1"),
    (re.compile(r"^[ \t]*!+[ \t]*(?=\S)", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*%%(?:bash|sh|shell|script)\b.*$", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*%cd[ \t]+", re.MULTILINE), "cd "),
    (re.compile(r"^[ \t]*%env[ \t]+(\w+)[ \t=]+", re.MULTILINE), r"export \1="),
)
"""What IPython adds to a shell's line or takes for one (its magics `%cd`, `%env`, `%%bash`), and the line of kohya_ss's
log (046879b kohya_gui/class_command_executor.py)."""

_WINDOWS = re.compile(r"(?:^|[\s\"'=])(?:[A-Za-z]:\\|\.{1,2}\\)\w|\w\\[\w.-]+\.(?:py|exe|bat|toml|json|yaml)\b")
"""A path with backslashes."""

_BACKSLASH = re.compile(r"(?<=[\w.:)}-])\\+(?=[\w.(-])")
_SET = (
    (
        re.compile(r"^[ \t]*@?set[ \t]+(?:/a[ \t]+)?\"?(\w+)=([^\"\n]*?)\"?[ \t]*$", re.MULTILINE | re.IGNORECASE),
        r'export \1="\2"',
    ),
    (re.compile(r"^[ \t]*\$env:(\w+)[ \t]*=[ \t]*", re.MULTILINE | re.IGNORECASE), r"export \1="),
    (re.compile(r"^[ \t]*&[ \t]+(?=\S)", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*(?:cd[ \t]+/d|pushd|set-location|push-location)[ \t]+", re.MULTILINE | re.IGNORECASE), "cd "),
)
"""Assignments of cmd.exe and PowerShell, PowerShell's call operator, and how both change the folder."""

_CMD = re.compile(
    r"^[ \t]*(?:@?(?:echo[ \t]+off|setlocal|rem|set[ \t]+(?:/[ap][ \t]+)?\"?\w+=|pause[ \t]*$)\b|::)",
    re.MULTILINE | re.IGNORECASE,
)
"""A line of cmd.exe alone."""
_CMD_TALK = re.compile(r"^[ \t]*@?(?:rem|echo|title|color)\b.*$|^[ \t]*::.*$", re.MULTILINE | re.IGNORECASE)
"""Its comments, and what it prints: text in which a quote opens nothing."""
_CMD_HERE = re.compile(r"%(?:~dp0|cd%)[\\/]?", re.IGNORECASE)
"""The script's own folder, and the current one."""
_CMD_VARIABLE = re.compile(r"(?<!%)%([A-Za-z_]\w*)%")
_CMD_LATE_VARIABLE = re.compile(r"!([A-Za-z_]\w*)!")

_POWERSHELL = re.compile(r"^[ \t]*\$([A-Za-z_]\w*)[ \t]*=[ \t]*(?=\S)", re.MULTILINE)
"""An assignment of PowerShell: a POSIX shell would run what the variable holds, with `=` for an argument."""
_ARRAY = re.compile(r"(?<==)@\(([^()]*)\)")
_SPLAT = re.compile(r"(?<=\s)@([A-Za-z_]\w*)\b")

_CARET = re.compile(r"(?<=\S)\^[ \t]*\r?\n")


_DRIVE = re.compile(r"(?<![\w/\\])[A-Za-z]:[\\/]{1,2}[\w.]")


def is_of_windows(text: str) -> bool:
    """Whether a text is of Windows: a script of cmd.exe or PowerShell, or one that names a drive."""
    return any(pattern.search(text) for pattern in (_DRIVE, _CMD, _SET[1][0], _POWERSHELL))


def as_posix(text: str) -> str:
    """The text as a POSIX shell would have it: without IPython's marks, with Windows' assignments as exports, and with
    slashes in paths where it has paths with backslashes."""
    text = text.replace("\r\n", "\n")
    if _CMD.search(text):
        text = _from_cmd(text)
    for pattern, instead in (*_MAGIC, *_SET):
        text = pattern.sub(instead, text)
    if _POWERSHELL.search(text):
        text = _POWERSHELL.sub(r"\1=", text)
        text = _ARRAY.sub(lambda array: "(" + re.sub(r"""(?<=["'])[ \t]*,""", " ", array[1]) + ")", text)
        text = _SPLAT.sub(r'"${\1[@]}"', text)
    text = _CARET.sub(" ^\n", text)
    return _BACKSLASH.sub("/", text) if _WINDOWS.search(text) else text


def _from_cmd(text: str) -> str:
    """A script of cmd.exe without its comments and messages, its variables written as a POSIX shell writes them."""
    text = _CMD_HERE.sub("", _CMD_TALK.sub("", text))
    return _CMD_LATE_VARIABLE.sub(r"${\1}", _CMD_VARIABLE.sub(r"${\1}", text))


def notebook_commands(text: str, name: str) -> str:
    """The shell commands of a notebook: cells of `%%bash`, and lines that begin with `!` or a magic like it, with what
    cells before them assign. Raises a VplanError for what is no notebook."""
    try:
        cells = json.loads(text)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise VplanError(
            f"{quoted(name)} is not a notebook", "pass the command, or the notebook as Jupyter saves it"
        ) from None
    found: list[str] = []
    assigned: set[str] = set()
    for source in sources:
        if re.match(r"\s*%%(?:bash|sh|shell|script)\b", source):
            found.append(source)
            continue
        goes_on = False
        for line in source.split("\n"):
            if goes_on or re.match(r"\s*(?:!|%cd\b|%env\b)", line):
                found.append(_BRACED.sub(lambda use: f"${{{use[1]}}}" if use[1] in assigned else use[0], line))
                goes_on = line.rstrip().endswith("\\")
            elif assignment := _assignment(line):
                variable, value = assignment
                assigned.add(variable)
                found.append(f"export {variable}={shlex.quote(value)}")
    return "\n".join(found)


_BRACED = re.compile(r"(?<![$\w{])\{([A-Za-z_]\w*)\}")
"""A variable of Python in a line of the shell: IPython puts its value there."""
_PYTHON_ASSIGNMENT = re.compile(
    r"\s*(?:([A-Za-z_]\w*)|os\.environ\[\s*['\"](\w+)['\"]\s*\])\s*=\s*([^=\s].*?)\s*$", re.DOTALL
)


def _assignment(line: str) -> tuple[str, str] | None:
    """(name, value) of a line of Python that gives a variable, or one of the environment, a number or a string."""
    match = _PYTHON_ASSIGNMENT.match(line)
    if match is None:
        return None
    try:
        value = ast.literal_eval(match[3])
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    return (match[1] or match[2], str(value)) if isinstance(value, (str, int, float)) else None


_STARTS = re.compile(
    r"\s*(?:[$>]\s+)?(?:[A-Za-z_]\w*=\S*\s+)*"
    r"(?:\S*accelerate(?:\.exe)?\s+launch|torchrun|deepspeed|(?:\S*/)?python[\d.]*(?:\.exe)?"
    r"|uv\s+run|srun|docker\s+run)\s+\S",
    re.IGNORECASE,
)
"""A line that begins with what starts a Python program."""
_ASSIGNS = re.compile(r"\s*export\s+\w+=\S")


def commands_alone(text: str) -> str:
    """The lines of a text that start a program or export a variable, each with those that continue it: a command in a
    post has prose around it, whose apostrophes open no quote. Of a script for a shell, "" """
    if text.startswith("#!"):
        return ""
    found: list[str] = []
    goes_on = False
    for line in text.split("\n"):
        if goes_on or _STARTS.match(line) or _ASSIGNS.match(line):
            found.append(line if goes_on else line.lstrip(" \t$>"))
            goes_on = line.rstrip().endswith("\\")
    return "\n".join(found)
