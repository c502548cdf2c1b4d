"""Fifty kills at random moments of scanning and encoding lose nothing that was finished.

    python -m tests.benchmarks.kills_while_caching [KILLS]

Caches a folder of short clips with a tiny Wan, kills the process at random, by turns while it looks through the folder
and while it encodes; looks at every file it left, and goes on until all is cached; then compares each file with those
of a run nobody killed. Needs vplan[train]; five minutes.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.trainers import tiny
from tests.trainers.data.caching import dataset, setting
from trainers.data import cache

CLIPS = 200
SCANNING, ENCODING, DONE = "scanning", "encoding", "done"
SCAN_SECONDS = 0.4


def finished(folder: Path) -> dict[str, int]:
    """Files that have their name, each of which must load, with the time they were written."""
    found = {}
    for path in sorted(folder.glob("*/*.safetensors")):
        load_file(path)
        found[path.name] = path.stat().st_mtime_ns
    return found


def written(folder: Path) -> int:
    """How many files are finished."""
    return sum(1 for _ in folder.glob("*/*.safetensors"))


def run(clips: Path, one: cache.Setting, at: Any = None) -> list[cache.Entry]:
    """Scans and encodes as the worker does; `at`: where it says which of the two it is doing."""

    def say(moment: str) -> None:
        if at is not None:
            at.value = moment.encode()

    say(SCANNING)
    found = dataset(clips, one)
    say(ENCODING)
    entries = cache.cached(found, one)
    say(DONE)
    return entries


def main(kills: int) -> None:
    torch.set_num_threads(1)
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = tiny.folder(root / "model", tiny.profile("wan2.1-t2v-1.3b"))
        clips = tiny.write_clips(root / "clips", CLIPS, height=64, width=64)
        one, lost, torn = setting(model, root / "cache"), 0, set[Path]()
        hit = Counter[str]()
        before: dict[str, int] = {}
        for number in range(kills):
            at = multiprocessing.Array("c", 16)
            process = multiprocessing.get_context("fork").Process(target=run, args=(clips, one, at))
            process.start()
            aimed_at = (SCANNING, ENCODING)[number % 2]
            while at.value.decode() not in (aimed_at, DONE):
                time.sleep(0.001)
            more = random.randint(0, 2 * CLIPS // kills) if aimed_at == ENCODING else 0  # however fast the machine is
            while at.value.decode() != DONE and written(root / "cache") < len(before) + more:
                time.sleep(0.001)
            time.sleep(random.uniform(0, SCAN_SECONDS if aimed_at == SCANNING else SCAN_SECONDS / 10))
            moment = at.value.decode()
            process.kill()
            process.join()
            hit[moment] += process.exitcode != 0
            after = finished(root / "cache")
            lost += sum(after.get(file) != stamp for file, stamp in before.items())
            torn |= set((root / "cache").glob("*/*.part"))
            before = after
        entries = run(clips, one)
        alone = run(clips, setting(model, root / "alone"))
        for ours, theirs in zip(entries, alone, strict=True):
            torch.testing.assert_close(load_file(ours.path), load_file(theirs.path), rtol=0, atol=0)
        print(f"kills: {dict(hit)}; half-written files left behind (never taken): {len(torn)}; finished: {len(before)}")
        print(f"finished samples lost or made again: {lost}; all {len(entries)} are those of a run nobody killed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
