"""Time and memory of looking through a large folder of images with captions.

    python -m tests.benchmarks.scan [FILES]

Makes a folder of so many PNGs (100,000 by default; hard links to a few, so that it takes no room) with a caption
beside each, reads it as `vplan train` does, and prints CPU and wall seconds and by how much resident memory grew.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dataset import scan
from planner.dataset.sources import DataSource
from tests.trainers import tiny

LINKS = 10_000
"""Of one file: file systems allow some 65,000."""


def write(folder: Path, count: int) -> None:
    """So many images with captions, in folders of ``LINKS``."""
    for first in range(0, count, LINKS):
        place = folder / str(first)
        place.mkdir()
        image, caption = tiny.write_image(place / f"{first:06}.png"), place / f"{first:06}.txt"
        caption.write_text("a cat")
        for number in range(first + 1, min(first + LINKS, count)):
            os.link(image, place / f"{number:06}.png")
            os.link(caption, place / f"{number:06}.txt")


def main(count: int = 100_000) -> None:
    """Prints what a scan takes."""
    profile = lookup.model("wan2.1-t2v-1.3b")
    job = job_for(profile, {"frames": 1, "height": 480, "width": 832})
    process = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), count)
        before, cpu, began = process.memory_info().rss, time.process_time(), time.perf_counter()
        dataset = scan.read([DataSource(folder=folder)], profile, job)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        grown = process.memory_info().rss - before
    print(f"{len(dataset.samples)} files: {cpu:.1f} s of CPU, {wall:.1f} s, {grown / 2**20:.0f} MiB more resident")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
