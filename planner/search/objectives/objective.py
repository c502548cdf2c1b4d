"""What a search may vary instead of the strategy: the length of the clip, the batch, the size, the LoRA's rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.search.question import Question
from planner.spec.job import MAX_FRAMES, Job

MOST_SAMPLES = 1_000
Value = int | tuple[int, int]


class Objective(NamedTuple):
    """One number of a job that can be maximised: its possible values in rising order, and how to read and set it."""

    name: str
    fields: tuple[str, ...]
    values: Sequence[Value]
    read: Callable[[Job], Value]
    put: Callable[[Job, Value], Job]

    def below(self, job: Job) -> Sequence[Value]:
        """The possible values below the job's own, in rising order."""
        own = self.size(self.read(job))
        count = next((index for index, value in enumerate(self.values) if self.size(value) >= own), len(self.values))
        return self.values[:count]

    @staticmethod
    def size(value: Value) -> int:
        """The number by which values are ordered: the value itself, or the pixels of a (height, width)."""
        return value if isinstance(value, int) else value[0] * value[1]


def frames(model: ModelProfile) -> Objective:
    """The objective of the longest clip: frame counts that the model takes."""
    rules = model.shape
    step = rules.frame_step
    first = rules.cut(rules.min_frames + step - 1)
    # Latent frames of a clip; a single one would be an image.
    longest = model.shape.max_frames if model.shape.window else MAX_FRAMES
    last = longest if model.kind == "video" else 1
    return Objective("frames", ("frames",), range(first, last + 1, step), lambda job: job.frames, _put("frames"))


def batch(model: ModelProfile) -> Objective:
    """The objective of the largest batch: samples per GPU."""
    values = model.shape.batches or range(1, MOST_SAMPLES + 1)
    return Objective("batch", ("batch_size",), values, lambda job: job.batch_size, _put("batch_size"))


def resolution(model: ModelProfile) -> Objective:
    """The objective of the largest resolution: the (height, width) that the model lists, one of each area."""
    areas = {height * width: (height, width) for height, width in reversed(model.shape.resolutions)}
    return _resolution([areas[area] for area in sorted(areas)])


def smaller_sizes(model: ModelProfile, job: Job) -> Objective:
    """The listed sizes, upright for a job that is, and three quarters and half of its own where the model takes
    others."""
    multiple, upright = model.shape.size_multiple, job.height > job.width
    listed = sorted(model.shape.resolutions, key=lambda size: (size[0] > size[1]) == upright)
    areas = {height * width: (height, width) for height, width in listed}
    for share in () if model.shape.only_listed else (0.75, 0.5):
        sides = [max(1, round(side * share / multiple)) * multiple for side in (job.height, job.width)]
        areas.setdefault(sides[0] * sides[1], (sides[0], sides[1]))
    return _resolution([areas[area] for area in sorted(areas)])


def rank(model: ModelProfile) -> Objective:
    """The objective of the largest LoRA rank: powers of two from 4 to 128."""
    return Objective("lora_rank", ("lora_rank",), (4, 8, 16, 32, 64, 128), lambda job: job.lora_rank, _put("lora_rank"))


PREFERRED: dict[str, Callable[[ModelProfile], Objective]] = {"frames": frames, "batch": batch, "resolution": resolution}


def chosen_objective(question: Question, prefer: str) -> Objective | None:
    """What a search is to make largest, of `PREFERRED`; None for "speed".

    `--frames max` asks for frames whatever is preferred. Raises a VplanError where that would change what was typed.
    """
    prefer = "frames" if question.frames_max else prefer
    if prefer == "speed":
        return None
    if prefer == "frames" and question.model.kind == "image":
        fault = f"{question.model.title} makes images, so there is no longest clip"
        raise VplanError(fault, "use --prefer batch or --prefer resolution")
    objective = PREFERRED[prefer](question.model)
    typed = [field for field in objective.fields if field in question.fixed]
    if typed and not question.frames_max:
        fault = f"--prefer {prefer} would change options you set: {', '.join(typed)}"
        raise VplanError(fault, f"leave out --{typed[0]}")
    return objective


def words(value: Value) -> str | int:
    """A value as an option takes it: a number, or height x width."""
    return value if isinstance(value, int) else f"{value[0]}x{value[1]}"


def _resolution(sizes: Sequence[tuple[int, int]]) -> Objective:
    def put(job: Job, value: Value) -> Job:
        assert isinstance(value, tuple)
        return job.replace(height=value[0], width=value[1])

    return Objective("resolution", ("height", "width"), sizes, lambda job: (job.height, job.width), put)


def _put(field: str) -> Callable[[Job, Value], Job]:
    return lambda job, value: job.replace(**{field: value})
