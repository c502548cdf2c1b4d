"""The questions whose answers are kept, and how one is asked: in its own process, with nothing of this machine.

`questions.toml` has them by their first words: under `["estimate --json"]`, the line `fp8 = "sdxl --weights-dtype fp8"`
is `vplan estimate --json sdxl --weights-dtype fp8`, named estimate/fp8. A word `@name` stands for a text of `[texts]`,
and a word that names something in `inputs/` brings that file or folder along.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
INPUTS = HERE / "inputs"

EXCEPTED = frozenset({"seconds"})
"""Fields of JSON answers that are never compared, wherever they stand: what differs from one run to the next."""

EXCEPTED_TABLE = re.compile(r'(aria-label="Versions">).*?(</table>)', re.DOTALL)
"""The table of a report's page that says what is installed here, and when the page was made."""

Answer = dict[str, Any]
"""`exit`; `json` or `text`, what stdout held; `errors`, stderr where stdout is empty; `files`, what was written."""


@dataclass(frozen=True)
class Question:
    """One command line, without the `vplan` in front."""

    name: str
    words: tuple[str, ...]

    @property
    def verb(self) -> str:
        """Whose answers it is kept with."""
        return self.words[0]


def questions() -> list[Question]:
    """All of them, in the order of the file."""
    said = tomllib.loads((HERE / "questions.toml").read_text(encoding="utf-8"))
    texts = {f"@{name}": shlex.split(text) for name, text in said.pop("texts").items()}
    found = []
    for start, lines in said.items():
        first = start.split()
        for name, line in lines.items():
            words = [part for word in shlex.split(line) for part in texts.get(word, [word])]
            found.append(Question(f"{first[0]}/{name}", (*first, *words)))
    return found


def ask(question: Question) -> Answer:
    """The answer, the excepted fields left out, and paths of this machine by what they are."""
    with tempfile.TemporaryDirectory() as outer:
        folder, home = Path(outer).resolve() / "folder", Path(outer).resolve() / "home"
        folder.mkdir()
        given = {word.partition("/")[0] for word in question.words}
        for path in INPUTS.iterdir():
            if path.name in given:
                copy = shutil.copytree if path.is_dir() else shutil.copyfile
                copy(path, folder / path.name)
        before = texts_in(folder)
        environment = {
            "PATH": os.defpath,
            "HOME": str(home),
            "VPLAN_HOME": str(home / "vplan"),
            "TMPDIR": outer,
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "random"),
            "PYTHONUTF8": "1",
        }
        done = subprocess.run(
            [sys.executable, str(ROOT / "vplan.py"), *question.words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        written = {name: text for name, text in texts_in(folder).items() if before.get(name) != text}

    def general(text: str) -> str:
        """A text with the paths of this machine named by what they are."""
        places = {sys.executable: "<python>", str(folder): "<folder>", str(home): "<home>", str(ROOT): "<vplan>"}
        for place, what in places.items():
            text = text.replace(place, what)
        return text

    answer: Answer = {"exit": done.returncode}
    said = general(done.stdout)
    try:
        answer["json"] = json.loads(said)
    except ValueError:
        answer["text"] = said.split("\n")
    if not done.stdout:
        answer["errors"] = general(done.stderr).split("\n")
    if written:
        answer["files"] = {name: lines(name, general(text)) for name, text in written.items()}
    return {name: without_excepted(value) for name, value in answer.items()}


def texts_in(folder: Path) -> dict[str, str]:
    """What the files of a folder hold, by their paths in it; hidden ones are nobody's answer."""
    paths = [path for path in folder.rglob("[!.]*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def lines(name: str, text: str) -> list[str]:
    """A written file line by line; a page tag by tag, without its excepted table."""
    if name.endswith(".html"):
        text = EXCEPTED_TABLE.sub(r"\1(excepted)\2", text).replace("><", ">\n<")
    return text.split("\n")


def without_excepted(found: Any) -> Any:
    """An answer, or a part of one, in which the excepted fields are there and say nothing."""
    if isinstance(found, dict):
        return {name: "(excepted)" if name in EXCEPTED else without_excepted(value) for name, value in found.items()}
    return [without_excepted(value) for value in found] if isinstance(found, list) else found
