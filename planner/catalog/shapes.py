"""Which clips a model takes, shapes as people type them, and the integers a tape counts in."""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.catalog.components import samples_per_call
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError, quoted
from planner.spec.combinations.combination import ModelSummary, first_refusal
from planner.spec.combinations.model_limits import BLOCK_LIMITS, JOB_LIMITS, BlockCounts, ModelJob
from planner.spec.job import MAX_FRAMES, MAX_SIDE, Bucket, Job, Strategy, ValidationShape
from planner.units import check_count, parse_count


def check_shape(model: ModelProfile, frames: int, height: int, width: int) -> None:
    """Raises a VplanError for frames or sizes the model cannot take; the fix names the nearest that work."""
    check_count(frames, "--frames", at_most=MAX_FRAMES)
    check_count(height, "--height", at_most=MAX_SIDE)
    check_count(width, "--width", at_most=MAX_SIDE)
    _check_frames(model, frames)
    if model.shape.only_listed and (height, width) not in model.shape.resolutions:
        listed = " or ".join(f"--height {high} --width {wide}" for high, wide in model.shape.resolutions)
        raise VplanError(f"{model.title} does not support clips of {height}x{width} (height x width)", f"use {listed}")
    square = model.shape.filled_up
    if square and height != width and height * width > square[0] * square[1]:
        fault = f"{model.title} takes no image of {height}x{width}: one that is not square has at most the pixels of"
        side = max(height, width)
        raise VplanError(f"{fault} {square[0]}x{square[1]}", f"use a smaller one, or --height {side} --width {side}")
    multiple = model.shape.size_multiple
    wrong = {name: side for name, side in (("height", height), ("width", width)) if side % multiple}
    if wrong:
        sizes = " and ".join(f"{name} {side}" for name, side in wrong.items())
        fault = f"is not a multiple of {multiple}" if len(wrong) == 1 else f"are not multiples of {multiple}"
        fix = "use " + " and ".join(f"--{name} {_around(side, multiple)}" for name, side in wrong.items())
        raise VplanError(f"{sizes} {fault}, as {model.title} requires", fix)


def _check_frames(model: ModelProfile, frames: int) -> None:
    rules = model.shape
    if model.kind == "image" and frames != 1:
        raise VplanError(f"{model.title} makes images, not {frames} frames", "use --frames 1, or choose a video model")
    if rules.cut(frames) != frames:
        fix = f"use --frames {_around(frames - rules.frame_rest, rules.frame_step, rules.frame_rest)}"
        raise VplanError(f"frames {frames} is not {rules.frame_rule}, as {model.title} requires", fix)
    if rules.window and frames > rules.max_frames:
        raise VplanError(f"frames {frames} is more than {model.title} takes", f"use --frames {rules.max_frames}")
    if frames < rules.min_frames:
        raise VplanError(f"frames {frames} is too few for {model.title}", f"use --frames {rules.min_frames} or more")


def _around(value: int, step: int, offset: int = 0) -> str:
    """The nearest working values below and above, as "77 or 81"; nothing below one step (or below the offset)."""
    low = max(0, value // step * step)
    values = [low, low + step] if low > 0 or offset else [low + step]
    return " or ".join(str(number + offset) for number in values)


_EXACT = re.compile(r"([+-]?\d+)\s*([x×*])\s*([+-]?\d+)", re.IGNORECASE | re.ASCII)


def parse_resolution(model: ModelProfile, text: str) -> tuple[int, int]:
    """Height and width of `480x832` (height x width), `832*480` (width x height) or `480p` (shorter side: the model's
    usual shape of that name).

    A `*` is how Wan's `generate.py` and its README write `--size`, width first (Wan2.1 9737cba: "The area
    (width*height) of the generated video"). Others write width x height: where the model lists the size only so, it is
    read so. A `p` the model does not list becomes 16:9, or a square for image models, at the nearest sizes it takes.
    """
    fix = "use height x width, such as 480x832, or 480p"
    exact = _EXACT.fullmatch(text.strip())
    if exact:
        height, width = (parse_count(exact[side], "--resolution", at_most=MAX_SIDE) for side in (1, 3))
        listed_sizes = model.shape.resolutions
        if exact[2] == "*" or ((height, width) not in listed_sizes and (width, height) in listed_sizes):
            height, width = width, height
        check_shape(model, 1 if model.kind == "image" else model.shape.default_frames, height, width)
        return height, width
    shorter = re.fullmatch(r"([+-]?\d+)p?", text.strip(), re.IGNORECASE | re.ASCII)
    if shorter is None:
        raise VplanError(f"--resolution {quoted(text)} is not a size", fix)
    side = parse_count(shorter[1], "--resolution", at_least=16, at_most=MAX_SIDE // 2)
    listed = next((size for size in model.shape.resolutions if min(size) == side), None)
    if listed:
        return listed
    longer = side if model.kind == "image" else side * 16 / 9
    multiple = model.shape.size_multiple
    return max(1, round(side / multiple)) * multiple, max(1, round(longer / multiple)) * multiple


def how_read(text: str, height: int, width: int) -> str:
    """How a `--resolution` was read, in words, where it may have meant the other: as width x height, or a portrait."""
    exact = _EXACT.fullmatch(text.strip())
    if exact is None or height == width:
        return ""
    if exact[1] == str(width):
        return f"{text} read as width x height ({height}x{width} pixels, height x width)"
    portrait = height > width
    return f"{text} is height x width: portrait, {height} high (else --resolution {width}x{height})" if portrait else ""


def job_for(model: ModelProfile, arguments: Mapping[str, object]) -> Job:
    """The job with these fields, checked; the model's default frames, size and references fill those that are absent or
    None, and where there are buckets its own shape is the largest of them. Raises a VplanError for a shape that the
    model does not take."""
    height, width = model.shape.resolutions[0]
    usual = {"frames": model.shape.default_frames, "height": height, "width": width, "method": model.training.method}
    fields = {name: value for name, value in arguments.items() if value is not None}
    job = Job.read({"references": model.shape.references, **usual, **fields, "model": model.name})
    if job.buckets:
        largest = max(job.buckets, key=lambda shape: shape.pixels)
        job = job.replace(frames=largest.frames, height=largest.height, width=largest.width)
    check_job(model, job)
    return job


def check_job(model: ModelProfile, job: Job) -> None:
    """Raises a VplanError when the model cannot take one of the job's shapes, or has not the experts it names."""
    for shape in job.shapes:
        _check_within(model, shape, "--buckets" if job.buckets else "")
    if job.validation:
        _check_within(model, job.validation, "--validation")
    if refusal := first_refusal(JOB_LIMITS, ModelJob(model_summary(model), job)):
        raise VplanError(*refusal)


def _check_within(model: ModelProfile, shape: Bucket | ValidationShape, flag: str) -> None:
    """As `check_shape`, of a shape that another flag gives: the fix is about that flag."""
    try:
        check_shape(model, shape.frames, shape.height, shape.width)
    except VplanError as error:
        if not flag:
            raise
        raise VplanError(f"{flag}: {error.message}", f"{error.fix.replace('--', '')} in {flag}") from None


def check_blocks(model: ModelProfile, strategy: Strategy) -> None:
    """Raises a VplanError when a strategy counts more blocks than the model has. One block must stay on the GPU."""
    if refusal := first_refusal(BLOCK_LIMITS, BlockCounts(model_summary(model), strategy)):
        raise VplanError(*refusal)


def model_summary(model: ModelProfile) -> ModelSummary:
    """The facts about a model that the tables of combinations (`planner.spec.combinations`) ask for."""
    return ModelSummary(
        title=model.title,
        blocks=model.blocks,
        experts=model.experts,
        references=model.shape.references,
        takes_references=model.shape.takes_references,
        expert_boundary=model.training.boundary is not None,
        has_sound=bool(model.inputs.get("sound")),
        splits_tokens=model.traits.split is not None,
    )


def in_words(model: ModelProfile, job: Job) -> str:
    """The shape of a job: "81 frames of 480x832, batch 1", without frames for an image, of a video model too."""
    clip = f"{job.frames} frames of " if model.kind == "video" and job.frames > 1 else ""
    return f"{clip}{job.height}x{job.width}, batch {job.batch_size}"


def shapeless(job: Job) -> Job:
    """The job at the smallest shape there is, for what does not depend on the shape: which recordings answer for it,
    and what is worth trying. A search for the longest clip asks that once."""
    return job.replace(frames=1, height=1, width=1, batch_size=1, buckets=())


def grid(model: ModelProfile, job: Job, shape: Bucket | None = None) -> dict[str, int]:
    """The integers that tapes are symbolic in, for the job's own shape or one of its buckets: those of its samples, but
    for an image that the model's code fills up to a square (`planner.catalog.profiles.ShapeRules.filled_up`)."""
    shape = shape or job.shapes[0]
    square = model.shape.filled_up
    if square and shape.height != shape.width:
        shape = shape.replace(height=square[0], width=square[1])
    return sample_grid(model, job, shape)


def sample_grid(model: ModelProfile, job: Job, shape: Bucket | None = None) -> dict[str, int]:
    """The integers of the samples themselves, for the job's own shape or one of its buckets.

    B samples (twice as many where a job only samples, with guidance in one batch), F, H and W cells of the patch grid
    along latent frames, rows and columns, T text tokens, R LoRA rank, E tokens beside the clip's own and its text's:
    reference images at the clip's size, and audio. Latent frames that do not fill a cell are padded, as the models with
    temporal patches do it.
    """
    shape = shape or job.shapes[0]
    side_by_side = samples_per_call(model, job.guided) if job.method == "sample" else 1
    patch_frames, patch_height, patch_width = model.shape.patch
    rows = shape.height // (model.vae.spatial * patch_height)
    columns = shape.width // (model.vae.spatial * patch_width)
    return {
        "B": (shape.batch_size or job.batch_size) * side_by_side,
        "F": latent_frames(model, shape.frames) // patch_frames,
        "H": rows,
        "W": columns,
        "T": job.text_tokens or model.shape.text_tokens,
        "R": job.lora_rank,
        "E": (job.references or model.shape.references) * rows * columns + model.shape.audio_tokens(shape.frames),
    }


def latent_frames(model: ModelProfile, frames: int) -> int:
    """The latent frames of a clip, padded to whole cells of the patch grid."""
    cell = model.shape.patch[0]
    return -(-model.vae.coded(frames) // cell) * cell


def grids(model: ModelProfile, job: Job) -> list[dict[str, int]]:
    """The `grid` of each of the job's shapes."""
    return [grid(model, job, shape) for shape in job.shapes]
