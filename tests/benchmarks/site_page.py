"""How fast `vplan site` answers in Chromium, how much it loads, and whether it says what the command line says.

    python tests/benchmarks/site_page.py SITE [--questions 200] [--cold 3] [--minutes 30] [-o FILE.json]

SITE: a folder that `vplan site -o SITE` wrote. Needs playwright and Chromium; VPLAN_HOME should name an empty folder,
for the page knows no measurements of yours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import profiles
import vplan
from planner.catalog import card_lookup, lookup
from planner.foreign.export import SLURM, targets
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
    trainers = itertools.cycle(name for name in targets() if name != SLURM)
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
    done = subprocess.run(vplan.command(*words, "--json"), cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def compare(url: str, most: int, minutes: float) -> dict[str, Any]:
    """What the page answers beside what the command line prints, times left out."""
    differ, seconds, answers = [], [], []
    codes: Counter[int] = Counter()
    until = time.monotonic() + 60 * minutes
    # The command line answers on one core while the page is at the next question on another.
    with browse_site.chromium() as browser, tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        page = browser.new_page()
        page.goto(f"{url}#{browse_site.address(FIRST)}")
        page.wait_for_selector("#shown .verdict", timeout=browse_site.FIRST_MS)
        for form in itertools.islice(questions(), most):
            if time.monotonic() > until:
                break
            answer = browse_site.ask(page, form)
            codes[answer["code"]] += 1
            seconds.append(answer["seconds"])
            answers.append((answer, beside.submit(typed, answer["command"], form, folder)))
        for answer, other in answers:
            code, printed = other.result()
            if (code, _TIME.sub("", printed)) != (answer["code"], _TIME.sub("", answer["json"])):
                differ.append({"command": answer["command"], "codes": [code, answer["code"]]})
                print("differs:", answer["command"], flush=True)
    median = statistics.median(seconds)
    return {"asked": len(seconds), "codes": codes, "differ": differ, "median_seconds": median, "seconds": seconds}


def again(url: str) -> list[float]:
    """Seconds from a changed field to its answer, where the model's tapes are there."""
    with browse_site.chromium() as browser:
        page = browser.new_page()
        page.goto(f"{url}#{browse_site.address(FIRST)}")
        page.wait_for_selector("#shown .verdict", timeout=browse_site.FIRST_MS)
        return [browse_site.ask(page, {**FIRST, "frames": str(frames)})["seconds"] for frames in range(17, 98, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--cold", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("-o", "--output", type=Path)
    said = parser.parse_args()
    with browse_site.served(said.site.absolute()) as url:
        found: dict[str, Any] = {"cold": cold(url, said.cold)} if said.cold else {}
        if said.cold:
            first = found["cold"]
            print(f"first answer: {statistics.median(first['seconds']):.1f} s, {first['bytes'] / 1e6:.1f} MB")
            print(f"from elsewhere: {first['elsewhere'] or 'nothing'}")
            found["again"] = again(url)
            print(f"later answers: median {statistics.median(found['again']):.2f} s, worst {max(found['again']):.2f}")
        if said.questions:
            found["compared"] = compared = compare(url, said.questions, said.minutes)
            same = compared["asked"] - len(compared["differ"])
            print(f"{same} of {compared['asked']} as the command line, by exit code {dict(compared['codes'])}")
            print(f"median {compared['median_seconds']:.1f} s, with the model's tapes")
    if said.output:
        said.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
