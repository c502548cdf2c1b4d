"""Scans folders of videos and images with captions, and assigns them to the buckets of a plan. Imports no torch.

Captions are in `metadata.jsonl` or `metadata.csv` (`file_name`, `text`; one row per file, paths relative to the
folder: the convention of Hugging Face's image and video folders) or, without either, in a `.txt` beside each file; a
`dataset.toml` may specify otherwise. For models that edit images, a third column `reference_file_name` names the
original image; for models that are controlled by a video, `control_file_name` names that video.
All faults are found before anything is loaded, and are reported with a reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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
"""The most kinds of faults that a message names; the rest is only counted."""

MOST_OF_A_KIND = 3
"""The most files that it names for one kind."""

AT_ONCE = 256
"""Files handed to the threads at a time; those that wait take memory."""

TELL_SECONDS = 0.25


def _silent(**_: object) -> None:
    """Reports no progress."""


class Scan(NamedTuple):
    """The contents of a folder: usable clips, sorted by name, and the faults of all others."""

    clips: tuple[Clip, ...]
    faults: tuple[Fault, ...]
    unused: tuple[str, ...] = ()
    """`.txt` files without a clip of the same name"""
    unread: tuple[str, ...] = ()
    """videos and images of a type that is not read"""


@dataclass(frozen=True)
class Dataset:
    """The samples of a plan, ordered by source and file name; the files that were left out; and notes for the user."""

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
    """The samples of all sources for a plan's job. Raises a VplanError that lists the faults (the first few by name)
    unless ``skip_bad``, and always if no sample is usable.

    Each sample has one of the plan's shapes, so none can need more memory than was planned: longer clips are cut and
    larger pictures shrunk. ``tell`` is called now and then with what is being scanned (``scanning``) and the number of
    files (``done`` of ``all``).
    """
    return in_buckets(usable(sources, profile, job, tell), profile, job, skip_bad=skip_bad)


def usable(
    sources: Sequence[DataSource], profile: ModelProfile, job: Job, tell: Callable[..., None] = _silent
) -> list[tuple[DataSource, Scan]]:
    """The usable files of each source, whatever the job's shapes, and the faults of the others."""
    needs_sound = bool(profile.inputs.get("sound"))
    found = []
    for source in sources:
        folder_scan = _with_companions(scan(source, captioned=not needs_sound, tell=tell), profile, job)
        found.append((source, _with_sound(folder_scan, profile) if needs_sound else folder_scan))
    return found


def in_buckets(
    scans: Sequence[tuple[DataSource, Scan]], profile: ModelProfile, job: Job, *, skip_bad: bool = False
) -> Dataset:
    """The samples of scanned sources; see `read`."""
    samples: list[Sample] = []
    faults: list[Fault] = []
    notes: list[str] = []
    for source, scan in scans:
        assigned = assign(scan.clips, profile, job, source)
        opening = f"{Path(source.folder).name}/" if len(scans) > 1 else ""
        samples += [
            sample._replace(clip=sample.clip._replace(name=opening + sample.clip.name)) for sample in assigned.samples
        ]
        faults += [fault._replace(name=opening + fault.name) for fault in sorted((*scan.faults, *assigned.unfit))]
        also = (*assigned.notes, *_unused(scan.unused), *_unread(scan.unread))
        notes += [f"{opening} {note}".lstrip() for note in also]
    if faults and not (skip_bad and samples):
        raise refused(faults, len(samples) + len(faults))
    return Dataset(tuple(samples), tuple(faults), tuple(notes))


def _unused(texts: Sequence[str]) -> Iterator[str]:
    """A note about `.txt` files without a clip: their names may be misspelt, or the clip is of an unsupported type."""
    if texts:
        some = ", ".join(map(printable, texts[:MAX_NAMED])) + (", and others" if len(texts) > MAX_NAMED else "")
        yield f"without a video or image of their name: {plural(len(texts), 'caption')} ({some})"


def _unread(names: Sequence[str]) -> Iterator[str]:
    """A note about videos and images of a type that is not read, as phones and cameras write them."""
    if names:
        some = ", ".join(map(printable, names[:MAX_NAMED])) + (", and others" if len(names) > MAX_NAMED else "")
        yield f"left out, as their type is not read: {plural(len(names), 'file')} ({some}); convert them to mp4 or jpg"


def _with_companions(folder_scan: Scan, profile: ModelProfile, job: Job) -> Scan:
    """Keeps only clips with a reference image or control video, if the model needs one; the others become faults."""
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
    """Keeps only clips with sound; the others become faults."""
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
    """A VplanError, returned, that names the first faults and counts the others. ``total``: number of all samples."""
    named, rest = by_kind(faults)
    first_faults = "; ".join(named)
    more = f"; and {rest} more" if rest else ""
    ways = [*dict.fromkeys(fault.fix for fault in faults if fault.fix), "correct or remove them"]
    ways += ["leave them out with --skip-bad"] if len(faults) < total else []
    fix = ", or ".join(ways)
    return VplanError(f"{len(faults)} of {total} samples cannot be used: {first_faults}{more}", fix)


def by_kind(faults: Sequence[Fault]) -> tuple[list[str], int]:
    """The faults in words, one text for each of the first kinds of them; and how many are of other kinds. A folder of
    phone clips has many files of few kinds: without captions, or broken."""
    kinds: dict[str, list[str]] = {}
    for fault in faults:
        kinds.setdefault(fault.reason, []).append(fault.name)
    named = []
    for reason, names in list(kinds.items())[:MAX_NAMED]:
        more = f" and {len(names) - MOST_OF_A_KIND} more" if len(names) > MOST_OF_A_KIND else ""
        named.append(f"{', '.join(names[:MOST_OF_A_KIND])}{more}: {reason}")
    return named, sum(map(len, list(kinds.values())[MAX_NAMED:]))


def scan(source: DataSource, *, captioned: bool = True, tell: Callable[..., None] = _silent) -> Scan:
    """Scans a source's folder, reading only captions, headers and first frames. The result is sorted by name.

    Without ``captioned``, clips need no caption. Raises a VplanError if the folder does not exist or is empty, or if
    its metadata cannot be read at all.
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
        if folder.unread:
            fault += f" that are read, only {printable(folder.unread[0])} and its like"
        raise VplanError(fault, f"put some there ({suffixes}), with captions")
    faults = captions.faults
    usable: list[Clip] = []
    captioned_names = sorted(captions.texts)
    with ThreadPoolExecutor() as pool:
        for first in range(0, len(captioned_names), AT_ONCE):
            progress("files of", first)
            at_once = captioned_names[first : first + AT_ONCE]
            for look in pool.map(lambda name: _look(folder, name, captions), at_once):
                if isinstance(look, Clip):
                    usable.append(look)
                else:
                    faults.append(look)
    return Scan(tuple(usable), tuple(sorted(faults)), tuple(captions.unused), tuple(folder.unread))


class _Progress:
    """Reports the progress of a scan, at most once per `TELL_SECONDS`."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell, self._last = tell, time.monotonic()

    def __call__(self, what: str, done: int, title: str, of: int) -> None:
        if time.monotonic() - self._last > TELL_SECONDS:
            self._tell(scanning=f"{what} {title}", done=done, all=of)
            self._last = time.monotonic()


def _look(folder: Folder, name: str, captions: Captions) -> Clip | Fault:
    """Reads the header of one file and checks the companion files that its row names."""
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
