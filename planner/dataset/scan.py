"""Folders of videos and images with captions: found, checked, and put into the buckets of a plan. Imports no torch.

Captions stand in `metadata.jsonl` or `metadata.csv` (`file_name`, `text`; one row per file, paths relative to the
folder: the convention of Hugging Face's image and video folders) or, without either, in a `.txt` beside each file; a
`dataset.toml` may say otherwise. A model that changes an image is given the one before the change in a third column,
`reference_file_name`; one that a video steers is given that in `control_file_name`.
Everything that is wrong is found before anything is loaded, and named with its reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.dataset import clips
from planner.dataset.buckets import Clip, Sample, assign
from planner.dataset.captions import CONTROL, REFERENCE, Captions, Fault, read_captions
from planner.dataset.clips import UnusableError
from planner.dataset.folder import Folder, printable
from planner.dataset.sources import DataSource
from planner.errors import VplanError
from planner.spec.job import Job
from planner.units import plural

__all__ = ["Clip", "Dataset", "Fault", "Sample", "Scan", "read", "scan"]

MAX_NAMED = 5
"""Faults that a message names; it counts the others."""

AT_ONCE = 256
"""Files that are handed to the threads that look into them; what waits takes memory."""

TELL_SECONDS = 0.25


def _silent(**_: object) -> None:
    """Nobody is told."""


class Scan(NamedTuple):
    """The contents of a folder: usable clips, sorted by name, and the faults of all others."""

    clips: tuple[Clip, ...]
    faults: tuple[Fault, ...]
    unused: tuple[str, ...] = ()
    """files with a caption and no clip of their name"""


@dataclass(frozen=True)
class Dataset:
    """The samples of a plan, by source and name of their files; what was left out; and what is worth saying of the
    rest."""

    samples: tuple[Sample, ...]
    skipped: tuple[Fault, ...]
    notes: tuple[str, ...]


def read(
    sources: Sequence[DataSource],
    profile: ModelProfile,
    job: Job,
    *,
    skip_bad: bool = False,
    tell: Callable[..., None] = _silent,
) -> Dataset:
    """The samples of all sources for a plan's job. A VplanError names every fault (the first few) unless ``skip_bad``.

    Each sample has one of the plan's own shapes, so none can need more memory than was planned: longer clips are cut
    and larger pictures shrunk. ``tell`` is called now and then with what is looked at (``scanning``), and how many
    files (``done`` of ``all``).
    """
    return in_buckets(usable(sources, profile, job, tell), profile, job, skip_bad=skip_bad)


def usable(
    sources: Sequence[DataSource], profile: ModelProfile, job: Job, tell: Callable[..., None] = _silent
) -> list[tuple[DataSource, Scan]]:
    """What a model can be trained on in each source, whatever the job's shapes, and the faults of the rest."""
    needs_sound = bool(profile.inputs.get("sound"))
    found = []
    for source in sources:
        folder_scan = _with_companions(scan(source, captioned=not needs_sound, tell=tell), profile, job)
        found.append((source, _with_sound(folder_scan, profile) if needs_sound else folder_scan))
    return found


def in_buckets(
    scans: Sequence[tuple[DataSource, Scan]], profile: ModelProfile, job: Job, *, skip_bad: bool = False
) -> Dataset:
    """The samples of sources that were looked through; see `read`."""
    samples: list[Sample] = []
    faults: list[Fault] = []
    notes: list[str] = []
    for source, found in scans:
        made, unfit, words = assign(found.clips, profile, job, source)
        opening = f"{Path(source.folder).name}/" if len(scans) > 1 else ""
        samples += [sample._replace(clip=sample.clip._replace(name=opening + sample.clip.name)) for sample in made]
        faults += [fault._replace(name=opening + fault.name) for fault in sorted((*found.faults, *unfit))]
        notes += [f"{opening} {note}".lstrip() for note in (*words, *_unused(found.unused))]
    if faults and not (skip_bad and samples):
        raise refused(faults, len(samples) + len(faults))
    return Dataset(tuple(samples), tuple(faults), tuple(notes))


def _unused(texts: Sequence[str]) -> Iterator[str]:
    """A caption that is alone may be misspelt, or beside a clip of a kind that is not read."""
    if texts:
        some = ", ".join(map(printable, texts[:MAX_NAMED])) + (", and others" if len(texts) > MAX_NAMED else "")
        yield f"without a video or image of their name: {plural(len(texts), 'caption')} ({some})"


def _with_companions(folder_scan: Scan, profile: ModelProfile, job: Job) -> Scan:
    """Clips that have the image that the model changes, or the video that steers it, where it takes one."""
    changes = bool(job.references or profile.shape.references)
    if not (changes or profile.inputs.get("control_channels")):
        return folder_scan
    column, why = (REFERENCE, "edits an image") if changes else (CONTROL, "is controlled by a video")
    has = {clip.name for clip in folder_scan.clips if (clip.reference if changes else clip.control)}
    faults = [
        Fault(printable(clip.name), f"no {column} in its row: {profile.title} {why}") for clip in folder_scan.clips
    ]
    faults = [fault for clip, fault in zip(folder_scan.clips, faults, strict=True) if clip.name not in has]
    clips_with = tuple(clip for clip in folder_scan.clips if clip.name in has)
    return folder_scan._replace(clips=clips_with, faults=tuple(sorted((*folder_scan.faults, *faults))))


def _with_sound(folder_scan: Scan, profile: ModelProfile) -> Scan:
    """Clips that can be heard."""
    usable, faults = [], list(folder_scan.faults)
    for clip in folder_scan.clips:
        try:
            if not clips.has_sound(clip.path):
                raise UnusableError(f"no sound in it, which {profile.title} is conditioned on")
            usable.append(clip)
        except UnusableError as error:
            faults.append(Fault(printable(clip.name), str(error)))
    return Scan(tuple(usable), tuple(sorted(faults)))


def refused(faults: list[Fault], total: int) -> VplanError:
    """The VplanError that names the first faults and counts the others. ``total``: all samples; not raised here."""
    first_faults = "; ".join(map(str, faults[:MAX_NAMED]))
    more = f"; and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
    ways = [*dict.fromkeys(fault.fix for fault in faults if fault.fix), "correct or remove them"]
    ways += ["leave them out with --skip-bad"] if len(faults) < total else []
    fix = ", or ".join(ways)
    return VplanError(f"{len(faults)} of {total} samples cannot be used: {first_faults}{more}", fix)


def scan(source: DataSource, *, captioned: bool = True, tell: Callable[..., None] = _silent) -> Scan:
    """What is in a source's folder, reading captions, headers and first frames only. Deterministic: by name.

    Without ``captioned`` a clip needs no caption. A VplanError for a folder that is none, is empty, or whose metadata
    cannot be read at all.
    """
    folder = Folder(Path(source.folder))
    names = list(folder.media())
    progress = partial(_Progress(tell), title=printable(folder.root.name)[:16], of=len(names))
    if not captioned:
        captions = Captions(dict.fromkeys(names, ""), {}, [])
    else:
        captions = read_captions(folder, names, source, partial(progress, "captions of"))
    reason, fix = "a link to another folder, which is not followed", "list where it leads as a [[source]] of its own"
    captions.faults.extend(Fault(f"{printable(name)}/", reason, fix) for name in folder.links_outside)
    if not names and not captions.texts and not captions.faults:
        suffixes = ", ".join((*clips.VIDEOS, *clips.IMAGES))
        fault = f"there are no videos or images in {source.folder}"
        raise VplanError(fault, f"put some there ({suffixes}), with captions")
    faults = captions.faults
    usable: list[Clip] = []
    waiting = iter(sorted(captions.texts))
    with ThreadPoolExecutor() as pool:
        while some := list(islice(waiting, AT_ONCE)):
            progress("files of", len(usable))
            for look in pool.map(lambda name: _look(folder, name, captions), some):
                if isinstance(look, Clip):
                    usable.append(look)
                else:
                    faults.append(look)
    return Scan(tuple(usable), tuple(sorted(faults)), tuple(captions.unused))


class _Progress:
    """Tells how far a scan is, not too often."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell, self._last = tell, time.monotonic()

    def __call__(self, what: str, done: int, title: str, of: int) -> None:
        if time.monotonic() - self._last > TELL_SECONDS:
            self._tell(scanning=f"{what} {title}", done=done, all=of)
            self._last = time.monotonic()


def _look(folder: Folder, name: str, captions: Captions) -> Clip | Fault:
    """One file by its header, and those that its row names beside it."""
    try:
        path = folder.inside(name)
        clip = Clip(path, name, captions.texts[name], *clips.probe(path))
    except UnusableError as error:
        return Fault(printable(name), str(error))
    for column, companion in captions.companions.get(name, {}).items():
        role = "reference" if column == REFERENCE else "control"
        try:
            if not companion.lower().endswith(clips.IMAGES if column == REFERENCE else (*clips.VIDEOS, *clips.IMAGES)):
                raise UnusableError(f"not named like {'an image' if column == REFERENCE else 'a video'}")
            frames = clips.probe(folder.inside(companion)).frames
            if column == CONTROL and frames < clip.frames:
                raise UnusableError(f"has {frames} frames, and the clip {clip.frames}")
        except UnusableError as error:
            return Fault(printable(name), f"its {role} {printable(companion)}: {error}")
        path = folder.root / companion
        clip = clip._replace(reference=path) if column == REFERENCE else clip._replace(control=path)
    return clip
