"""How fast `vplan site` answers in Chromium, how much it loads, and whether it says what the command line says.

    python -m tests.benchmarks.site_page SITE [--questions 200] [--cold 3] [--minutes 60] [--journal FILE.jsonl]

SITE: a folder that `vplan site -o SITE` wrote, of these very sources. Needs playwright and Chromium. VPLAN_HOME is set
to an empty folder, for the page knows no measurements of yours. With --journal each comparison is a line of that file,
and those that stand there for this build of the site are not made again: a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import profiles
import vplan
from planner.catalog import card_lookup, lookup
from planner.foreign.export import SLURM, export_targets
from tests.planner.test_browser import COMMAND, CONFIG, MESSAGE
from tests.tools import browse_site

FIRST = {"model": "wan2.1-t2v-1.3b", "gpu": "24GB", "method": "lora", "steps": "2000"}
INPUTS = Path(__file__).parents[1] / "golden" / "inputs"
_TIME = re.compile(r'^  "seconds": [\d.e-]+', re.MULTILINE)
"""How long an answer took: alone at the top of it, for estimated seconds lie deeper."""


def questions() -> Iterator[dict[str, str]]:
    """Forms and what is pasted, in turns: the first 200 have every model, card and trainer, and every pasted file."""
    names = profiles.model_names()
    cards = itertools.cycle(("2x24GB", *(group.name for group in card_lookup.gpu_classes()), *card_lookup.gpu_names()))
    trainers = itertools.cycle(name for name in export_targets() if name != SLURM)
    kinds = (
        ({"model": name, "method": "lora", "steps": "1000"} for name in _rotated(names, 0)),
        ({"paste": text} for text in pasted()),
        ({"model": name, "trainer": next(trainers), "host_ram": "64GiB"} for name in _rotated(names, 1)),
        ({"model": name, "method": "full", "host_ram": "128GiB"} for name in _rotated(names, 2)),
        ({"model": name, "method": "lora", **_clip(name)} for name in _rotated(names, 3)),
    )
    for turn in itertools.zip_longest(*kinds):
        yield from ({"gpu": next(cards), **form} for form in turn if form)


def pasted() -> list[str]:
    """Commands, configs and messages of every trainer, as people paste them."""
    files = sorted(path for path in INPUTS.iterdir() if path.suffix in (".sh", ".yaml", ".log"))
    return [COMMAND, CONFIG, MESSAGE, *(path.read_text() for path in files)]


def _rotated(names: Sequence[str], quarter: int) -> list[str]:
    """The names from a quarter on, so that each kind of question begins with others."""
    start = quarter * len(names) // 4
    return [*names[start:], *names[:start]]


def _clip(name: str) -> dict[str, str]:
    """Another size than a model's usual one, and half the length of its usual clip."""
    shape = lookup.model(name).shape
    length = 1 + shape.frame_step * round(shape.default_frames / 2 / shape.frame_step)
    height, width = shape.resolutions[-1]
    frames = {"frames": str(length)} if shape.frame_step > 1 else {}
    return {"resolution": f"{height}x{width}", **frames}


def cold(url: str, times: int) -> dict[str, Any]:
    """Seconds and bytes from an empty cache to the first answer."""
    seconds, loaded = [], {}
    for _ in range(times):
        with browse_site.chromium() as browser:
            page = browser.new_page()
            loaded = {}
            page.context.on("response", lambda got, to=loaded: to.update({got.url: got.headers.get("content-length")}))
            began = time.perf_counter()
            page.goto(f"{url}#{browse_site.address(FIRST)}")
            page.wait_for_selector("#shown .verdict", timeout=browse_site.FIRST_MS)
            seconds.append(time.perf_counter() - began)
    elsewhere = [address for address in loaded if not address.startswith((url, "blob:", "data:"))]
    nbytes = {address.rpartition("/")[2] or "index.html": int(size or 0) for address, size in loaded.items()}
    return {"seconds": seconds, "bytes": sum(nbytes.values()), "files": nbytes, "elsewhere": elsewhere}


def typed(command: str, form: dict[str, str], folder: str) -> tuple[int, str]:
    """The exit code and the JSON of the command line that the page names, run as a process."""
    words = shlex.split(command)[1:]
    if form.get("paste"):
        Path(folder, words[-1]).write_text(form["paste"])
    environment = {**os.environ, "VPLAN_HOME": str(Path(folder, "home"))}
    done = subprocess.run(
        vplan.command(*words, "--json"), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def compared(form: dict[str, str], answer: dict[str, Any], folder: str) -> dict[str, Any]:
    """A question, its seconds, and both exit codes; where they or the JSON differ, both texts."""
    if "failure" in answer:
        return {"form": form, "command": "", "codes": [0, -1], "same": False, **answer}
    code, printed = typed(answer["command"], form, folder)
    found = {key: answer[key] for key in ("command", "seconds")} | {"form": form, "codes": [code, answer["code"]]}
    same = (code, _TIME.sub("", printed)) == (answer["code"], _TIME.sub("", answer["json"]))
    return found | {"same": same} | ({} if same else {"printed": printed, "answered": answer["json"]})


def compare(url: str, site: Path, most: int, minutes: float, journal: Path) -> dict[str, Any]:
    """What the page answers beside what the command line prints, times left out. Each comparison is a line of the
    journal as soon as it is made."""
    forms = list(itertools.islice(questions(), most))
    build = hashlib.sha256((site / "manifest.json").read_bytes()).hexdigest()[:12]
    done = [each for each in _lines(journal) if each["build"] == build and each["form"] in forms]
    missing = [form for form in forms if form not in [each["form"] for each in done]]
    until = time.monotonic() + 60 * minutes
    waiting: deque[Future[dict[str, Any]]] = deque()

    def collect(ready: int) -> None:
        """Writes down what the command line has answered, until at most `ready` answers are left."""
        while waiting and (len(waiting) > ready or waiting[0].done()):
            found = {"build": build, **waiting.popleft().result()}
            done.append(found)
            with journal.open("a") as file:
                file.write(json.dumps(found) + "\n")
            word = "as typed" if found["same"] else "DIFFERS"
            print(f"{len(done):4} of {len(forms)}  {word}  {found['seconds']:5.1f} s  {found['command']}", flush=True)

    # The command line answers on one core while the page is at the next question on another.
    with browse_site.chromium() as browser, tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        page = browse_site.opened(browser, url, FIRST)
        for form in missing:
            if time.monotonic() > until:
                break
            answer = browse_site.answered(page, form)
            waiting.append(beside.submit(compared, form, answer, folder))
            if "failure" in answer:  # Python may have no memory left
                page.close()
                page = browse_site.opened(browser, url, FIRST)
            collect(4)
        collect(0)
    seconds = [each["seconds"] for each in done]
    return {
        "asked": len(done),
        "codes": Counter(each["codes"][0] for each in done),
        "differ": [each for each in done if not each["same"]],
        "median_seconds": statistics.median(seconds),
        "longest": max(done, key=lambda each: each["seconds"]),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def again(url: str) -> list[float]:
    """Seconds from a changed field to its answer, where the model's tapes are there."""
    with browse_site.chromium() as browser:
        page = browse_site.opened(browser, url, FIRST)
        return [browse_site.ask(page, {**FIRST, "frames": str(frames)})["seconds"] for frames in range(17, 98, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--cold", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--journal", type=Path, help="a line for each comparison; those of this build are kept")
    said = parser.parse_args()
    with browse_site.served(said.site.absolute()) as url, tempfile.TemporaryDirectory() as folder:
        if said.cold:
            first = cold(url, said.cold)
            print(f"first answer: median {_spread(first['seconds'])}, {first['bytes'] / 1e6:.1f} MB", _load())
            print(f"from elsewhere: {first['elsewhere'] or 'nothing'}")
            print(f"later answers: median {_spread(again(url))}", _load(), flush=True)
        if said.questions:
            journal = said.journal or Path(folder, "journal.jsonl")
            found = compare(url, said.site, said.questions, said.minutes, journal)
            for each in found["differ"]:
                print("differs:", each["command"] or each["failure"], "exit codes", each["codes"])
            same = found["asked"] - len(found["differ"])
            print(f"{same} of {found['asked']} as the command line, by exit code {dict(found['codes'])}", _load())
            longest = found["longest"]
            print(f"median {found['median_seconds']:.1f} s, longest {longest['seconds']:.1f} s: {longest['command']}")


def _spread(seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} times)"


def _load() -> str:
    """What else the machine does: processes that run or wait, in the last minute and the last fifteen."""
    last, _, longer = os.getloadavg()
    return f"[load {last:.1f}, {longer:.1f}; {os.cpu_count()} cores]"


if __name__ == "__main__":
    main()
