"""A folder of videos and images with captions: found, checked, and put into the buckets of a plan. Imports no torch.

Captions stand in `metadata.jsonl` or `metadata.csv` (`file_name`, `text`; one row per file, paths relative to the
folder: the convention of Hugging Face's image and video folders) or, without either, in a `.txt` beside each file.
A model that changes an image is given the one before the change in a third column, `reference_file_name`; one that a
video steers is given that in `control_file_name`.
Everything that is wrong is found before anything is loaded, and named with its reason.
"""

from __future__ import annotations

import csv
import json
import os
import unicodedata
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from planner.catalog.diffusers_folder import allowed_roots
from planner.catalog.profiles import ModelProfile
from planner.dataset import clips
from planner.dataset.buckets import Clip, FrameSampling, Sample, assign
from planner.dataset.clips import UnusableError
from planner.errors import VplanError, quoted
from planner.spec.job import Job

__all__ = ["Clip", "Dataset", "Fault", "FrameSampling", "Sample", "Scan", "read", "scan"]

METADATA = ("metadata.jsonl", "metadata.csv")
REFERENCE, CONTROL = "reference_file_name", "control_file_name"
"""Columns with the image that a sample was made from, and with the video that steers it (Hugging Face's folders read
columns called so as files)."""

MAX_CAPTION = 10_000
"""Characters. Encoders read a few hundred words; more is a file that is no caption."""
MAX_NAMED = 5
"""Faults that a message names; it counts the others."""


class Fault(NamedTuple):
    """A file (or a row of the metadata) that cannot be trained on, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Scan(NamedTuple):
    """The contents of a folder: usable clips, sorted by name, and the faults of all others."""

    clips: tuple[Clip, ...]
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Dataset:
    """The samples of a plan, by name of their files; what was left out; and what is worth saying of the rest."""

    samples: tuple[Sample, ...]
    skipped: tuple[Fault, ...]
    notes: tuple[str, ...]


def read(folder: Path, profile: ModelProfile, job: Job, reading: FrameSampling | None = None) -> Dataset:
    """The folder's samples for a plan's job. A VplanError names every fault (the first few) unless `skip_bad`.

    Each sample has one of the plan's own shapes, so none can need more memory than was planned: longer clips are cut
    and larger pictures shrunk. With `sizes = "native"` nothing is shrunk, and what is larger than the plan is a fault.
    """
    reading = reading or FrameSampling()
    needs_sound = bool(profile.inputs.get("sound"))
    folder_scan = _with_companions(scan(folder, captioned=not needs_sound), profile, job)
    if needs_sound:
        folder_scan = _with_sound(folder_scan, profile)
    samples, unfit, notes = assign(folder_scan.clips, profile, job, reading)
    faults = sorted((*folder_scan.faults, *(Fault(*fault) for fault in unfit)))
    if faults and not (reading.skip_bad and samples):
        raise refused(faults, len(samples) + len(faults))
    return Dataset(samples, tuple(faults), notes)


def _with_companions(folder_scan: Scan, profile: ModelProfile, job: Job) -> Scan:
    """Clips that have the image that the model changes, or the video that steers it, where it takes one."""
    changes = bool(job.references or profile.shape.references)
    if not (changes or profile.inputs.get("control_channels")):
        return folder_scan
    column, why = (REFERENCE, "edits an image") if changes else (CONTROL, "is controlled by a video")
    has = {clip.name for clip in folder_scan.clips if (clip.reference if changes else clip.control)}
    faults = [
        Fault(_printable(clip.name), f"no {column} in its row: {profile.title} {why}") for clip in folder_scan.clips
    ]
    faults = [fault for clip, fault in zip(folder_scan.clips, faults, strict=True) if clip.name not in has]
    return Scan(
        tuple(clip for clip in folder_scan.clips if clip.name in has), tuple(sorted((*folder_scan.faults, *faults)))
    )


def _with_sound(folder_scan: Scan, profile: ModelProfile) -> Scan:
    """Clips that can be heard."""
    usable, faults = [], list(folder_scan.faults)
    for clip in folder_scan.clips:
        try:
            if not clips.has_sound(clip.path):
                raise UnusableError(f"no sound in it, which {profile.title} is conditioned on")
            usable.append(clip)
        except UnusableError as error:
            faults.append(Fault(_printable(clip.name), str(error)))
    return Scan(tuple(usable), tuple(sorted(faults)))


def refused(faults: list[Fault], total: int) -> VplanError:
    """The VplanError that names the first faults and counts the others. ``total``: all samples; not raised here."""
    first_faults = "; ".join(map(str, faults[:MAX_NAMED]))
    more = f"; and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
    fix = "correct or remove them" + (", or leave them out with --skip-bad" if len(faults) < total else "")
    return VplanError(f"{len(faults)} of {total} samples cannot be used: {first_faults}{more}", fix)


def scan(folder: Path, *, captioned: bool = True) -> Scan:
    """What is in a folder, reading captions, headers and first frames only. Deterministic: by name.

    Without ``captioned`` a clip needs no caption. A VplanError for a folder that is none, is empty, or whose metadata
    cannot be read at all.
    """
    try:
        root = folder.resolve(strict=True)
        names = list(_media(root))
    except OSError as error:
        fix = "choose a readable folder of videos or images"
        raise VplanError(f"cannot read {quoted(str(folder))}: {error.strerror}", fix) from None
    tables = [name for name in METADATA if (root / name).is_file()]
    if len(tables) > 1:
        raise VplanError(f"{folder} has both {' and '.join(METADATA)}", "keep the one that holds the captions")
    if not names and not tables:
        suffixes = ", ".join((*clips.VIDEOS, *clips.IMAGES))
        raise VplanError(f"there are no videos or images in {folder}", f"put some there ({suffixes}), with captions")
    companions: dict[str, dict[str, str]] = {}
    faults: list[Fault] = []
    if not captioned:
        captions, tables = dict.fromkeys(names, ""), []
    else:
        captions, faults = _from_table(root, tables[0], companions) if tables else _from_texts(root, names)
    if tables:
        in_table = {
            *captions,
            *(name for names in companions.values() for name in names.values()),
            *(fault.name for fault in faults),
        }
        without = [name for name in names if name not in in_table and _printable(name) not in in_table]
        faults += [Fault(_printable(name), f"caption missing: no row in {tables[0]}") for name in without]
    with ThreadPoolExecutor() as pool:
        looks = list(
            pool.map(lambda name: _look(root, name, captions[name], companions.get(name, {})), sorted(captions))
        )
    faults += [look for look in looks if isinstance(look, Fault)]
    return Scan(tuple(look for look in looks if isinstance(look, Clip)), tuple(sorted(faults)))


def _media(root: Path) -> Iterator[str]:
    """Paths under the folder, with slashes, of what is called like a video or image. Hidden ones are passed over."""

    def refuse(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and _is_media(name):
                yield (Path(place) / name).relative_to(root).as_posix()


def _is_media(name: str) -> bool:
    return name.lower().endswith((*clips.VIDEOS, *clips.IMAGES))


def _look(root: Path, name: str, caption: str, companions: dict[str, str]) -> Clip | Fault:
    """One file by its header, and those that its row names beside it."""
    try:
        path = _inside(root, name)
        clip = Clip(path, name, caption, *clips.probe(path))
    except UnusableError as error:
        return Fault(_printable(name), str(error))
    for column, companion in companions.items():
        role = "reference" if column == REFERENCE else "control"
        try:
            if not companion.lower().endswith(clips.IMAGES if column == REFERENCE else (*clips.VIDEOS, *clips.IMAGES)):
                raise UnusableError(f"not named like {'an image' if column == REFERENCE else 'a video'}")
            frames = clips.probe(_inside(root, companion)).frames
            if column == CONTROL and frames < clip.frames:
                raise UnusableError(f"has {frames} frames, and the clip {clip.frames}")
        except UnusableError as error:
            return Fault(_printable(name), f"its {role} {_printable(companion)}: {error}")
        path = root / companion
        clip = clip._replace(reference=path) if column == REFERENCE else clip._replace(control=path)
    return clip


def _inside(root: Path, name: str) -> Path:
    """The file of a name that lies in the folder and leads nowhere else; an UnusableError says what is wrong.

    A dataset in a Hugging Face cache is links to its blobs, which are as good as its own files.
    """
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        raise UnusableError("the name has line breaks, control characters or undecodable bytes")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or name.startswith("\\"):
        raise UnusableError("the name is an absolute path")
    if ".." in PurePosixPath(name).parts or ".." in PureWindowsPath(name).parts:
        raise UnusableError("the name points outside the folder (..)")
    try:
        real = Path(os.path.realpath(root / name, strict=True))
    except OSError as error:
        raise UnusableError(f"cannot be read ({error.strerror})") from None
    if not any(real.is_relative_to(allowed) for allowed in allowed_roots(root)):
        raise UnusableError("a link that points outside the folder")
    if not real.is_file():
        raise UnusableError("not a file")
    if not os.access(real, os.R_OK):
        raise UnusableError("cannot be read (Permission denied)")
    return root / name


def _from_texts(root: Path, names: Iterable[str]) -> tuple[dict[str, str], list[Fault]]:
    """Captions of the `.txt` files beside the clips."""
    captions, faults = {}, []
    for name in names:
        caption_file = PurePosixPath(name).with_suffix(".txt").as_posix()
        try:
            _inside(root, name)
            if not os.path.lexists(root / caption_file):
                raise UnusableError("caption missing: no .txt of its name")
            captions[name] = _text_of(_inside(root, caption_file))
        except UnusableError as error:
            faults.append(Fault(_printable(name), str(error)))
    return captions, faults


def _text_of(file: Path) -> str:
    """The caption in a file of its own."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(4 * MAX_CAPTION + 1)
        return _caption(raw.decode("utf-8-sig") if len(raw) <= 4 * MAX_CAPTION else "." * (MAX_CAPTION + 1))
    except UnicodeDecodeError:
        raise UnusableError("its caption is not UTF-8 text") from None
    except OSError as error:
        raise UnusableError(f"its caption cannot be read ({error.strerror})") from None


def _from_table(root: Path, table: str, companions: dict[str, dict[str, str]]) -> tuple[dict[str, str], list[Fault]]:
    """Captions of the metadata's rows; what else they name is added to ``companions``, by clip and column."""
    captions: dict[str, str] = {}
    faults: list[Fault] = []
    twice: set[str] = set()
    for line, row in _rows(_inside_or_refuse(root, table)):
        where = f"{table} line {line}"
        if not isinstance(row, dict):
            faults.append(Fault(where, "not a JSON object"))
            continue
        name, text = row.get("file_name"), row.get("text")
        if not isinstance(name, str) or not name:
            faults.append(Fault(where, "no file_name in the row"))
            continue
        name = PurePosixPath(name).as_posix()  # without ./ and //
        if name in captions or name in twice:
            twice.add(name)
            continue
        try:
            _inside(root, name)
            if not _is_media(name):
                raise UnusableError("not named like a video or image")
            if text is not None and not isinstance(text, str):
                raise UnusableError("its text is not text")
            captions[name] = _caption(text or "")
            columns = {column: row.get(column) for column in (REFERENCE, CONTROL)}
            companions[name] = {
                column: PurePosixPath(str(companion)).as_posix() for column, companion in columns.items() if companion
            }
        except UnusableError as error:
            faults.append(Fault(_printable(name), f"{error} ({where})"))
    for name in twice:
        captions.pop(name, None)
    return captions, faults + [Fault(_printable(name), f"several rows in {table}") for name in sorted(twice)]


def _inside_or_refuse(root: Path, table: str) -> Path:
    try:
        return _inside(root, table)
    except UnusableError as error:
        raise VplanError(f"{table}: {error}", "put the file itself in the folder") from None


def _rows(table: Path) -> Iterator[tuple[int, object]]:
    """(line, row) of the metadata; a row that is not JSON comes as None."""
    try:
        text = table.read_text(encoding="utf-8-sig")
        if table.suffix == ".csv":
            reader = csv.DictReader(text.splitlines(keepends=True))
            missing = {"file_name", "text"} - set(reader.fieldnames or ())
            if missing:
                raise VplanError(f"{table.name} has no column {min(missing)}", "write file_name,text in its first line")
            yield from ((reader.line_num, row) for row in reader)
            return
    except OSError as error:
        raise VplanError(f"cannot read {table.name}: {error.strerror}", "check that it is readable") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise VplanError(f"{table.name} is not a table of captions: {error}", "write it in UTF-8") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, None


def _caption(text: str) -> str:
    """A caption without the blanks around it; an UnusableError for none, or for what cannot be one."""
    if not text.strip():
        raise UnusableError("caption missing: its text is empty")
    if len(text) > MAX_CAPTION:
        raise UnusableError(f"its caption is longer than {MAX_CAPTION} characters")
    if "\0" in text:
        raise UnusableError("its caption is not text")
    return text.strip()


def _printable(name: str) -> str:
    """A name as it may stand in a one-line message."""
    return name if name.isprintable() and len(name) <= 80 else quoted(name, 80)
