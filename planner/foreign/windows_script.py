"""A shell script of ours as a batch file of Windows' cmd.exe, where no bash is to be had.

Only what our own scripts are made of: comments, ``set -e``, exports, and commands over several lines. Quotes and
percent signs as Microsoft documents them: https://learn.microsoft.com/windows-server/administration/windows-commands/cmd
and https://learn.microsoft.com/cpp/c-language/parsing-c-command-line-arguments.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping

BASH, BATCH = ".sh", ".bat"

_MEANS_SOMETHING = frozenset("&|<>^()%!=,;'`")
"""Characters that end a word of cmd.exe, or are its own, outside of quotes."""

ALL_ARGUMENTS = "$@", "%*"
"""In bash, and in cmd.exe."""


def with_batch_files(files: Mapping[str, str]) -> dict[str, str]:
    """The files with a batch file in place of each shell script."""
    renamed: dict[str, str] = {}
    for name, text in files.items():
        if name.endswith(BASH):
            own = name.removesuffix(BASH) + BATCH
            renamed[own] = batch_file(text.replace(f"bash {name}", own))
        else:
            renamed[name] = text
    return renamed


def batch_file(script: str) -> str:
    """The batch file of a shell script: it stops at the first command that fails. Lines end as on Windows."""
    lines = ["@echo off"]
    goes_on = False
    for line in script.splitlines():
        if line.startswith("#!") or line.strip() in ("set -e", ""):
            continue
        if line.startswith("#"):
            lines.append(f"rem{line[1:]}")
            continue
        more = line.endswith("\\")
        words = shlex.split(line.removesuffix("\\"), comments=True)
        if words[0] == "export":
            lines += [f'set "{_plain(assignment)}"' for assignment in words[1:]]
            continue
        indent = "  " if goes_on else ""
        lines.append(indent + " ".join(map(_quoted, words)) + (" ^" if more else " || exit /b 1"))
        goes_on = more
    return "\r\n".join(lines) + "\r\n"


def _quoted(word: str) -> str:
    if word == ALL_ARGUMENTS[0]:
        return ALL_ARGUMENTS[1]
    quoted = subprocess.list2cmdline([word])
    if not quoted.startswith('"') and _MEANS_SOMETHING & set(word):
        quoted = f'"{quoted}"'
    return _plain(quoted)


def _plain(text: str) -> str:
    """Text in which no variable is looked for."""
    return text.replace("%", "%%")
