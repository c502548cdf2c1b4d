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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import profiles
import vplan
from planner.catalog import lookup
from tests.planner.test_browser import COMMAND, CONFIG, MESSAGE
from tests.tools import browse_site

FIRST = {"model": "wan2.1-t2v-1.3b", "gpu": "24GB", "method": "lora", "steps": "2000"}
TRAINERS = ("musubi-tuner", "ai-toolkit", "diffusion-pipe", "diffusers")
_TIME = re.compile(r'^  "seconds": [\d.e-]+', re.MULTILINE)
"""How long an answer took: alone at the top of it, for estimated seconds lie deeper."""


def questions() -> Iterator[dict[str, str]]:
    """Forms, the most different ones first."""
    names = profiles.model_names()
    cards = itertools.cycle(("24GB", "16GB", "80GB", "rtx4090", "12GB", "2x24GB", "h100-80gb", "48GB"))
    for name in names:
        yield {"model": name, "gpu": next(cards), "method": "lora", "steps": "1000"}
    for paste, card in itertools.product((COMMAND, CONFIG, MESSAGE), ("16GB", "24GB", "80GB")):
        yield {"gpu": card, "paste": paste}
    for name, trainer in zip(names, itertools.cycle(TRAINERS), strict=False):
        yield {"model": name, "gpu": next(cards), "trainer": trainer, "host_ram": "64GiB"}
    for name in names:
        yield {"model": name, "gpu": next(cards), "method": "full", "host_ram": "128GiB"}
    for name, part in itertools.product(names, (1, 2, 3)):
        shape = lookup.model(name).shape
        length = 1 + shape.frame_step * round(shape.default_frames * part / 4 / shape.frame_step)
        height, width = shape.resolutions[-1]
        size = {"resolution": f"{height}x{width}"}
        frames = {"frames": str(length)} if shape.frame_step > 1 else {}
        yield {"model": name, "gpu": next(cards), "method": "lora", **frames, **size}


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
    differ, seconds = [], []
    codes: Counter[int] = Counter()
    until = time.monotonic() + 60 * minutes
    with browse_site.chromium() as browser, tempfile.TemporaryDirectory() as folder:
        page = browser.new_page()
        page.goto(f"{url}#{browse_site.address(FIRST)}")
        page.wait_for_selector("#shown .verdict", timeout=browse_site.FIRST_MS)
        for form in itertools.islice(questions(), most):
            if time.monotonic() > until:
                break
            answer = browse_site.ask(page, form)
            codes[answer["code"]] += 1
            seconds.append(answer["seconds"])
            code, printed = typed(answer["command"], form, folder)
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
