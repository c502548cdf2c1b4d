"""Samples a second that `vplan train` encodes before it trains, and a digest of what it cached.

    python -m tests.benchmarks.encoding [CLIPS] [IMAGES]

Videos of 480x832 and pictures of 768x1024 are encoded by a tiny Wan at 9x64x112 and 1x64x112, so that reading them is
a good part of the work. The worker is started as training starts it, and its own start and end are left out: the
clock runs from the first caption to the last clip. The digest is the same wherever what is cached is.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

import av
import numpy
from PIL import Image

from planner.dataset.sources import sources
from planner.launch import launch
from planner.launch.supported import supported_plan
from planner.spec.job import Bucket, Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.worker_process import read_json, result_file
from tests.trainers import runs, tiny

VIDEO, PICTURE = (480, 832), (768, 1024)
FRAMES = 33


def write_data(folder: Path, clips: int, images: int) -> Path:
    """So many videos and pictures of noise in cells of 8x8, with captions."""
    folder.mkdir(parents=True)
    random = numpy.random.default_rng(0)

    def noise(height: int, width: int) -> numpy.ndarray:
        return random.integers(0, 255, (height // 8, width // 8, 3), dtype=numpy.uint8).repeat(8, 0).repeat(8, 1)

    for number in range(clips):
        with av.open(str(folder / f"clip-{number}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=16)
            (stream.height, stream.width), stream.pix_fmt = VIDEO, "yuv420p"
            picture = noise(*VIDEO)
            for frame in range(FRAMES):
                moved = numpy.ascontiguousarray(numpy.roll(picture, 3 * frame, 1))
                container.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
            container.mux(stream.encode())
        (folder / f"clip-{number}.txt").write_text(f"a cat runs {number}")
    for number in range(images):
        Image.fromarray(noise(*PICTURE)).save(folder / f"image-{number}.png")
        (folder / f"image-{number}.txt").write_text(f"a dog sits {number}")
    return folder


def digest(cache: Path) -> str:
    """The tensors' bytes of all encoded samples, by name. Headers also hold a checksum, which older caches lack."""
    whole = hashlib.sha256()
    for path in sorted(cache.glob("*/*.safetensors")):
        raw = path.read_bytes()
        whole.update(path.name.encode() + raw[8 + int.from_bytes(raw[:8], "little") :])
    return whole.hexdigest()[:16]


def main(clips: int, images: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["VPLAN_HOME"] = str(root / "home")
        name_of_model = runs.make_model(tiny.folder(root / "model", tiny.profile("wan2.1-t2v-1.3b")), "wan")
        video = Bucket(frames=9, height=64, width=112)
        shapes = (video, video.replace(frames=1))
        job = Job(model=name_of_model, frames=9, height=64, width=112, buckets=shapes)
        unsettled = Plan(job=job, strategy=Strategy.read(runs.PLAIN), machine=Machine(gpu="24GB", gpus=1))
        data = write_data(root / "data", clips, images)
        request = launch.Preparation(
            plan=supported_plan(unsettled, trained=True),
            data=str(data),
            sources=sources(data, {}),
            weights=str(root / "model"),
            entries=str(root / "out" / "cache" / "entries.jsonl"),
            device="cpu",
        )
        result = root / "out" / launch.PREPARE_FOLDER / result_file(0)
        began: float | None = None

        def tick() -> None:
            nonlocal began
            if began is None and "doing" in read_json(result):
                began = time.perf_counter()

        ended = launch.prepare(request, root / "out", tick)
        assert ended.name == "ok" and began is not None, ended
        seconds = time.perf_counter() - began
        count = clips + images
        print(
            f"{count} samples in {seconds:.1f} s: {count / seconds:.1f} a second; cached {digest(root / 'out/cache')}"
        )


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:] or ("60", "200")))
