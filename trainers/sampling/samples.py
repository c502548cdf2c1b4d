"""The validation samples of a run: which ones, when, their files, and what happens if one cannot be made.

The first rank makes them while the others wait, from the current weights or their average if the plan keeps one. If
weights are sharded over ranks (ZeRO-3, FSDP2), all ranks denoise together. Nothing of a sample stays on the GPU. An
error in making one does not end training, unless it happens on a single rank while all denoise together.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy
import torch
import torch.distributed as dist
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

from planner.catalog.diffusers_folder import read_config
from planner.catalog.profiles import ModelProfile
from planner.dataset import clips
from planner.dataset.buckets import model_fps
from planner.dataset.scan import Dataset
from planner.errors import VplanError
from planner.launch import checkpoints
from planner.launch.launch import SAMPLES, Preparation, RunRequest
from planner.launch.validation import about
from planner.worker_process import read_json, write_json
from trainers import families
from trainers.data import parts
from trainers.data.cache import CacheBuild, EncodingTask
from trainers.data.entries import read_entries
from trainers.memory.out_of_memory import out_of_memory
from trainers.parallel.local_engine import LocalEngine
from trainers.sampling import pipelines, validate
from trainers.step.step import DTYPES

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    TypeError, ValueError, VplanError, SafetensorError, av.error.FFmpegError,
)  # fmt: skip
"""What a pipeline or a codec may raise; these do not end training."""

CODECS = ("libx264", "mpeg4")
"""In order of preference; PyAV always has the second, but not every browser plays it."""

SCHEDULER = "scheduler/scheduler_config.json"


class PreparedSample(NamedTuple):
    """One sample to be made, as `prepare` lists it. All fields but ``name`` are paths in the cache."""

    name: str
    """the prompt, or where it comes from"""
    text: str
    empty: str
    """the empty caption"""
    image: str | None = None
    """the first frame of a clip, or the frames of a control video"""
    clip: str | None = None
    """cached tensors of that clip, such as latents"""


# ---- before training


def prepare(request: Preparation, setting: EncodingTask, dataset: Dataset | None) -> None:
    """Encodes the prompts of a run and lists its samples, with the images that image-to-video samples begin with.

    Without prompts, the caption of the first clip is used. ``dataset``: None if the data is an existing cache.
    """
    pipelines.sampler_of(families.family(setting.profile).for_job(setting.job), setting.profile)
    assert request.validation is not None
    work = CacheBuild(setting)
    first_caption = [] if dataset is None else [dataset.samples[0].clip.caption]
    captions = list(request.prompts) or first_caption
    keys = {work.text_key(caption): caption for caption in ("", *captions)}
    work.encode("prompts", work.text_turns, keys)
    texts = [(caption, work.store.path(work.text_key(caption))) for caption in captions]
    if not texts:
        texts = [("the first sample's caption", read_entries(Path(request.entries))[0].text)]
    empty = str(work.store.path(work.text_key("")))
    prepared = [
        PreparedSample(name, str(text), empty, *_first_frame(work, dataset, number))
        for number, (name, text) in enumerate(texts)
    ]
    listing = {"about": about(request), "samples": [sample._asdict() for sample in prepared]}
    write_json(Path(request.validation), listing)


def _first_frame(work: CacheBuild, dataset: Dataset | None, number: int) -> tuple[str | None, str | None]:
    """Paths of the image and the cached clip that sample ``number`` begins with, taken from the data's clips in turn;
    (None, None) for a family whose samples do not begin with an image."""
    profile, job = work.setting.profile, work.setting.job
    sampler = pipelines.sampler_of(work.family.for_job(job), profile)
    if not (sampler.image or sampler.clip):
        return None, None
    if dataset is None:
        fault = f"samples of {profile.name} begin with a frame of a clip, but --data has none, only the cache"
        raise VplanError(fault, "pass the folder with the clips, or leave out --validation-mode")
    clip_sample = dataset.samples[number % len(dataset.samples)]
    shape = pipelines.shape_of(job)
    companions = work.companions(clip_sample)
    source = companions.get("control", companions.get("reference", clip_sample.clip.path))
    indices = clip_sample.indices[:1]
    if "reference" in companions:
        indices = (0,)
    elif sampler.clip:
        indices = clip_sample.indices[: shape.frames]
        if len(indices) < shape.frames:
            name = clip_sample.clip.name
            fault = f"samples of {shape.frames} frames need a control video as long, and {name} is shorter"
            raise VplanError(fault, f"use a validation shape of at most {len(indices)} frames")
    frames = clips.frames(source, indices, shape.height, shape.width)
    key = work.clip_keys(Dataset((clip_sample,), (), ()))[0]
    path = work.store.folder / f"given-{shape.frames}x{shape.height}x{shape.width}-{key[:16]}.png"
    write_image(numpy.concatenate(frames), path)
    return str(path), str(work.store.path(key))


# ---- while training


class Samples:
    """Makes the validation samples of one run and writes them on its first rank."""

    def __init__(self, request: RunRequest, profile: ModelProfile, device: torch.device, rank: int) -> None:
        assert request.validation is not None
        self.request, self.validation, self.profile, self.device, self.rank = (
            request, request.validation, profile, device, rank,
        )  # fmt: skip
        self.folder = Path(request.output) / SAMPLES
        self.prepared = [PreparedSample(**entry) for entry in read_json(Path(self.validation.prompts))["samples"]]

    def due(self, step: int) -> bool:
        """Whether samples are made after `step` optimizer steps: at regular intervals, and at the end."""
        every = self.validation.every
        return step == self.request.steps or bool(every and step and step % every == 0)

    def missing(self, step: int) -> bool:
        """Whether samples are due but do not exist, for example because the run was killed while making them. Only the
        first rank looks, because others may see a file in a shared folder later. All ranks must call it together."""
        return self.due(step) and self._any_rank(
            f"missing after step {step}", self.rank == 0 and not self._path(step, len(self.prepared) - 1).is_file()
        )

    def make(
        self,
        engine: LocalEngine,
        step: int,
        tell: Callable[[dict[str, Any]], None],
        phase: validate.Phase = contextlib.nullcontext,
    ) -> None:
        """Makes the samples after ``step`` optimizer steps; gradients must be freed. ``tell`` is called with lines of
        metrics, and ``phase`` gives the context for each part.

        All ranks must call it together. If a sample cannot be made, the last line has a note with the reason.
        """
        if self.rank == 0 or engine.gathers:
            began = time.perf_counter()
            files, note = self._make(engine, step, tell, phase)
            line = {"step": step, "samples": files, "prompts": [sample.name for sample in self.prepared[: len(files)]]}
            times = {"unix_seconds": round(time.time(), 3), "seconds": round(time.perf_counter() - began, 6)}
            tell({**line, "note": note, **times})
        self._wait(step)

    def _make(
        self, engine: LocalEngine, step: int, tell: Callable[[dict[str, Any]], None], phase: validate.Phase
    ) -> tuple[list[str], str | None]:
        """The files that were made, and the reason if some are missing.

        If all ranks denoise together and one fails alone, the others would wait for it forever, so that ends the run,
        like an error in a step. Before denoising the ranks agree whether to continue; after it the first one is alone.
        """
        files: list[str] = []
        for number, sample in enumerate(self.prepared):
            turn = _Turn(self, engine, _turn_name(number, step), phase) if engine.gathers else None
            try:
                tell({"step": step, "validating": number + 1, "of": len(self.prepared)})
                frames = validate.sample(
                    engine.plain, self.profile, self.request.plan.job, self.request.plan.strategy, self.device,
                    self._inputs(sample, number), *((turn.phase, turn.split) if turn else (phase,)),
                )  # fmt: skip
                if self.rank == 0:
                    path = self._path(step, number)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write(frames, path, float(model_fps(self.profile) or 1))
                    files.append(path.name)
            except (*FAILURES, torch._dynamo.exc.FailOnRecompileLimitHit) as error:  # the last is no RuntimeError
                if turn and turn.together:  # the others wait in a gather for weights that this rank would not send
                    raise
                if turn:
                    turn.give_up(_turn_name(number + 1, step) if number + 1 < len(self.prepared) else None)
                return files, _reason(error)
        return files, None

    def _path(self, step: int, number: int) -> Path:
        kind = "mp4" if pipelines.shape_of(self.request.plan.job).frames > 1 else "png"
        return self.folder / f"step-{step:08d}-{number}.{kind}"

    def _inputs(self, sample: PreparedSample, number: int) -> pipelines.SampleInputs:
        """A sample's inputs, read from the cache and the model's folder."""
        root = parts.locate(self.request.weights, ["vae", "scheduler"])
        vae = self.profile.vae.class_name
        parts.check(root, "vae", vae)
        config = read_config(root / SCHEDULER, root) if (root / SCHEDULER).is_file() else None
        kind = families.family(self.profile).for_job(self.request.plan.job)
        embeds = pipelines.sampler_of(kind, self.profile).embeds
        dtype = DTYPES[self.request.plan.strategy.vae_dtype]
        return pipelines.SampleInputs(
            prompt=load_file(sample.text),
            empty=load_file(sample.empty),
            frames=self._frames_of(sample.image) if sample.image else None,
            embeds=load_file(sample.clip)[embeds] if sample.clip and embeds else None,
            vae=lambda: parts.load(root, "vae", vae, dtype),
            scheduler=config,
            steps=self.validation.steps,
            guidance=self.validation.guidance,
            seed=self.validation.seed + number,
        )

    def _frames_of(self, path: str) -> list[Image.Image]:
        """The frames of an image that `_first_frame` wrote, in which they are stacked vertically."""
        height = pipelines.shape_of(self.request.plan.job).height
        with Image.open(path) as image:
            strip = image.convert("RGB")
        return [strip.crop((0, top, strip.width, top + height)) for top in range(0, strip.height, height)]

    def _wait(self, step: int) -> None:
        """Makes all ranks wait for the first one."""
        self._any_rank(f"sampled after step {step}", False)

    def _any_rank(self, question: str, vote: bool) -> bool:
        """Whether any rank votes yes on a question. Every rank must ask each question exactly once.

        Uses the store because the wait may be long: a collective would time out after
        `trainers.parallel.start.TIMEOUT`.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return vote
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{question}/{self.rank}", str(int(vote)))
        keys = [f"{question}/{rank}" for rank in range(dist.get_world_size())]
        store.wait(keys, timedelta(days=30))
        return b"1" in [store.get(key) for key in keys]


class _Turn:
    """The state of one sample of a sharded model, on this rank."""

    def __init__(self, samples: Samples, engine: LocalEngine, name: str, phase: validate.Phase) -> None:
        self.samples, self.name, self.around = samples, name, phase
        self.begun = self.ended = self.together = False
        """whether this rank has asked the others; whether one of them cannot continue; whether all are denoising"""
        self.split = validate.Split(samples.rank == 0, engine.release, self.begin)

    def begin(self) -> None:
        """Called before the first call of the model. Raises a RuntimeError if another rank cannot continue."""
        self.begun = True
        self.ended = self.samples._any_rank(self.name, False)
        if self.ended:
            raise RuntimeError("another rank could not continue")
        self.together = True

    def give_up(self, following: str | None) -> None:
        """Tells the other ranks that this one makes no more samples, at the next question they will ask, if any."""
        question = following if self.begun else self.name
        if question and not self.ended:
            self.samples._any_rank(question, True)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The context of a part; while decoding, the first rank is alone."""
        self.together = name != "decode"
        with self.around(name):
            yield


def _turn_name(number: int, step: int) -> str:
    return f"sample {number} after step {step}"


def _reason(error: BaseException) -> str:
    """The reason of a failure, in one line."""
    short = {"oom": "the GPU ran out of memory", "host-oom": "the host ran out of memory"}
    memory = short.get(out_of_memory(error) or "")
    reason = error.message if isinstance(error, VplanError) else f"{type(error).__name__}: {error}"
    return memory or " ".join(reason.split())[:300]


# ---- files


def write(frames: numpy.ndarray[Any, Any], path: Path, fps: float) -> None:
    """Writes frames (F, H, W, 3) between 0 and 1 as a video, or only the first as an image if the path ends in
    ``.png``."""
    pixels = (frames * 255).round().clip(0, 255).astype(numpy.uint8)
    if path.suffix == ".png":
        write_image(pixels[0], path)
    else:
        write_video(pixels, path, fps)


def write_image(pixels: clips.Pixels, path: Path) -> None:
    """Writes pixels (H, W, 3) as an image file, atomically."""
    partial = _partial_path(path)
    Image.fromarray(pixels).save(partial)
    _finish(partial, path)


def write_video(pixels: clips.Pixels, path: Path, fps: float) -> None:
    """Writes pixels (F, H, W, 3) as a video file of `fps` frames per second, atomically."""
    partial = _partial_path(path)
    codec = next(name for name in CODECS if name in av.codecs_available)
    with av.open(str(partial), "w") as container:
        stream = container.add_stream(codec, rate=round(fps))
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = pixels.shape[1], pixels.shape[2], "yuv420p"
        for picture in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(numpy.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())
    _finish(partial, path)


def _partial_path(path: Path) -> Path:
    return path.with_name(f".partial-{path.name}")


def _finish(partial: Path, path: Path) -> None:
    checkpoints.sync(partial)
    os.replace(partial, path)
