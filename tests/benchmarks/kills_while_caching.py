"""Fifty kills at random moments of caching lose nothing that was finished.

    python -m tests.benchmarks.kills_while_caching [KILLS]

Caches a folder of short clips with a tiny Wan, kills the process at random, looks at every file it left, and goes on
until all is cached; then compares each file with those of a run nobody killed. Needs vplan[train]; five minutes.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.trainers import tiny
from tests.trainers.data.caching import run, setting

CLIPS = 200
LONGEST_SECONDS = 4.0


def finished(folder: Path) -> dict[str, int]:
    """Files that have their name, each of which must load, with the time they were written."""
    found = {}
    for path in sorted(folder.glob("*/*.safetensors")):
        load_file(path)
        found[path.name] = path.stat().st_mtime_ns
    return found


def main(kills: int) -> None:
    torch.set_num_threads(1)
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = tiny.folder(root / "model", tiny.profile("wan2.1-t2v-1.3b"))
        clips = tiny.write_clips(root / "clips", CLIPS, height=64, width=64)
        one, lost, hit, torn = setting(model, root / "cache"), 0, 0, set[Path]()
        before: dict[str, int] = {}
        for _ in range(kills):
            process = multiprocessing.get_context("fork").Process(target=run, args=(clips, one))
            process.start()
            time.sleep(random.uniform(0, LONGEST_SECONDS))
            process.kill()
            process.join()
            hit += process.exitcode != 0
            after = finished(root / "cache")
            lost += sum(after.get(file) != stamp for file, stamp in before.items())
            torn |= set((root / "cache").glob("*/*.part"))
            before = after
        entries = run(clips, one)
        alone = run(clips, setting(model, root / "alone"))
        for ours, theirs in zip(entries, alone, strict=True):
            torch.testing.assert_close(load_file(ours.path), load_file(theirs.path), rtol=0, atol=0)
        print(
            f"{hit} kills, {len(torn)} left half-written files behind (never taken), {len(before)} files were finished"
        )
        print(f"finished samples lost or made again: {lost}; all {len(entries)} are those of a run nobody killed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
