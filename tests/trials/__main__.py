"""Runs trials until their time is up and says what was found; exit code 1 for any finding.

Each trial runs in a fork with bounds of its own. A finding is a traceback, code of the input that ran, more than 10 s
of CPU or 2 GB, or an exit code that no command has or that does not go with what was said. `--only N` runs trial N of
a seed alone, to see what it does.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from planner.commands import cli
from tests.trials.inputs import CANARY, KINDS, write
from tests.trials.stored import HOME

CPU_SECONDS, MEMORY_BYTES = 10, 2 << 30
WALL_SECONDS = 120
CODES = (0, 1, 2, 3, 4)
CRASHED = 70
OWN_CODES = ("preflight", "check", "export")
"""Verbs that say in a report, not in an error, why they end with 1."""


def trial(seed: int, number: int, say: bool = False) -> tuple[str, str]:
    """The kind of a seed's trial, and what was found; "" for nothing."""
    draw = random.Random(f"{seed} {number}")
    kind = list(KINDS)[number % len(KINDS)]
    words, contents = KINDS[kind](draw)
    with tempfile.TemporaryDirectory(prefix="vplan-trial-") as place:
        folder = Path(place)
        write(folder, contents)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _run(folder, words)
        status = _wait(child)
        said = (folder / ".said").read_text(encoding="utf-8", errors="replace")
        if say:
            print(words, "\n", said, sep="")
        found = ""
        if (folder / CANARY).exists():
            found = "code ran"
        elif os.WIFSIGNALED(status):
            found = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        elif os.WEXITSTATUS(status) not in CODES:
            found = f"exit code {os.WEXITSTATUS(status)}: {said.strip().splitlines()[-1][:200] if said.strip() else ''}"
        elif "Traceback (most recent call last)" in said:
            found = "traceback in what it says"
        elif wrong := wrong_code(os.WEXITSTATUS(status), words, said):
            found = wrong
        return kind, f"{found}: {' '.join(map(repr, words))[:200]}" if found else ""


def wrong_code(code: int, words: list[str], said: str) -> str:
    """What is wrong with an exit code beside what was said: an error and no error's code, or the other way round."""
    is_json, has_error = "--json" in words, any(line.startswith("error: ") for line in said.splitlines())
    if has_error and code not in (1, 2, 4):
        return f"exit code {code} with an error"
    if code in (1, 2, 4) and not has_error and not is_json and "Usage:" not in said and words[0] not in OWN_CODES:
        return f"exit code {code} without a word"
    return ""


def _wait(child: int) -> int:
    end = time.monotonic() + WALL_SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def _run(folder: Path, words: list[str]) -> None:
    """In the fork: the command, with its output in a file; never returns."""
    os.setpgid(0, 0)
    os.chdir(folder)
    if (folder / HOME).exists():
        os.environ["VPLAN_HOME"] = str(folder / HOME)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT), (2, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        os.dup2(os.open("/dev/null" if not number else ".said", mode | (os.O_APPEND if number else 0)), number)
    code = CRASHED
    try:
        code = cli.main(words, prog_name="vplan", standalone_mode=False)
        sys.stdout.flush()
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """Runs the trials that the command line asks for; 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, default=10**9, help="at most so many")
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    os.environ["VPLAN_HOME"] = tempfile.mkdtemp(prefix="vplan-trials-")
    if asked.only is not None:
        print(*trial(asked.seed, asked.only, say=True), sep=": ")
        return 0
    end, number, tries, findings = time.monotonic() + 60 * asked.minutes, 0, Counter[str](), 0
    while time.monotonic() < end and number < asked.trials:
        kind, found = trial(asked.seed, number)
        tries[kind] += 1
        if found:
            findings += 1
            print(f"trial {number} of seed {asked.seed} ({kind}): {found}", flush=True)
        number += 1
    kinds = ", ".join(f"{count} {kind}" for kind, count in tries.items())
    print(f"seed {asked.seed}: {number} trials, {findings} findings; {kinds}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
