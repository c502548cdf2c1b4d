"""Whether the command line still answers some 400 questions as it did: the answers are kept in `answers/`.

    python -m tests.golden.check [NAME ...] [--prose]
    python -m tests.golden.check [NAME ...] --write

NAME is a question's (estimate/flux.1-dev) or the beginning of some (suggest, check/sd-scripts); without one all are
asked, which takes some four minutes. Prints how each answer differs from the kept one; the exit code is whether any
does. `--prose` lets sentences be worded anew: names, values, numbers and flags must still be the same. `--write` keeps
the answers of today. Needs vplan[train], for the questions to `vplan tune`.

What is asked is in questions.toml; which fields are never compared, in questions.py.
"""

from __future__ import annotations

import argparse
import difflib
import json
import lzma
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.golden.questions import HERE, Answer, Question, ask, questions, without_excepted

ANSWERS = HERE / "answers"
FACT = re.compile(r"\d|^--?[a-z]|[_/=]|\w\.\w")
"""What makes a word of a text more than prose: a digit, a flag, or the look of a name, a path or a setting."""


def main() -> int:
    """Asks, and prints what differs or keeps what was said."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.check")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="keep the answers of today")
    parser.add_argument("--prose", action="store_true", help="let sentences be worded anew")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="questions asked at a time (2)")
    said = parser.parse_args()
    asked = [question for question in questions() if chosen(question.name, said.names)]
    if not asked:
        parser.error(f"no question begins with {' or '.join(said.names)}")
    started = time.monotonic()
    kept = {verb: read(verb) for verb in {question.verb for question in asked}}
    with ThreadPoolExecutor(said.processes) as pool:
        answers = zip(asked, pool.map(ask, asked), strict=True)
        differ = [question.name for question, answer in answers if tell(question, answer, kept, said)]
    gone = [name for name in sorted(set().union(*kept.values())) if name not in {question.name for question in asked}]
    gone = [] if said.names else gone
    if said.write:
        for verb, found in kept.items():
            write(verb, {name: answer for name, answer in found.items() if name not in gone})
    elif gone:
        print(f"kept, and not asked any more: {', '.join(gone)}")
    what = "written anew" if said.write else "differ"
    print(f"{len(asked)} questions in {time.monotonic() - started:.0f} s, {len(differ)} {what}: {' '.join(differ)}")
    return int(bool(differ or gone) and not said.write)


def chosen(name: str, names: list[str]) -> bool:
    """Whether a question was asked for: by its name, by its beginning, or as all are."""
    return not names or any(name.startswith(begin) for begin in names)


def tell(question: Question, answer: Answer, kept: dict[str, dict[str, Answer]], said: argparse.Namespace) -> bool:
    """Whether an answer differs from the kept one. Prints how, or takes its place among them."""
    before = kept[question.verb].get(question.name, {})
    if said.write:
        kept[question.verb][question.name] = answer
        return before != answer
    found = list(differences(question.name, before, answer, prose=said.prose))
    if found:
        print("\n".join(found), end="\n\n", flush=True)
    return bool(found)


def differences(name: str, before: Answer, now: Answer, *, prose: bool = False) -> Iterator[str]:
    """The lines of a unified diff; none where the two are alike."""
    before = without_excepted(before)  # of those that were no exception when it was kept
    if prose:
        before, now = without_prose(before), without_prose(now)
    if before == now:
        return iter(())
    old, new = (json.dumps(page, indent=1, sort_keys=True, ensure_ascii=False).split("\n") for page in (before, now))
    return difflib.unified_diff(old, new, f"{name} (kept)", f"{name} (now)", lineterm="")


def without_prose(answer: Answer) -> Answer:
    """An answer without its sentences: strings of JSON with a space in them, and of texts what is only words."""
    found: Answer = {"exit": answer.get("exit")}
    for name in {"text", "errors"} & answer.keys():
        found[name] = facts("\n".join(answer[name]))
    if "json" in answer:
        found["json"] = without_sentences(answer["json"])
    if "files" in answer:
        found["files"] = {name: facts("\n".join(lines)) for name, lines in answer["files"].items()}
    return found


def without_sentences(value: Any) -> Any:
    """A JSON value whose sentences say nothing; of those with flags in them (a command, a change) the facts stay."""
    if isinstance(value, dict):
        return {name: without_sentences(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_sentences(inner) for inner in value]
    if isinstance(value, str) and " " in value:
        return facts(value) if "--" in value else "(a sentence)"
    return value


def facts(text: str) -> list[str]:
    """The words of a text that are more than prose, in its order."""
    words = (word.strip(".,;:()`'\"") for word in text.split())
    return [word for word in words if FACT.search(word)]


def read(verb: str) -> dict[str, Answer]:
    """The kept answers of a verb, by the names of their questions."""
    path = ANSWERS / f"{verb}.json.xz"
    found: dict[str, Answer] = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    return found


def write(verb: str, answers: dict[str, Answer]) -> None:
    """Keep a verb's answers; a file that holds them already is left as it is, whoever packed it."""
    if answers != read(verb):
        ANSWERS.mkdir(exist_ok=True)
        text = json.dumps(answers, sort_keys=True, ensure_ascii=False)
        (ANSWERS / f"{verb}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    sys.exit(main())
