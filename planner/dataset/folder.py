"""The files in a dataset's folder: found by name, and never outside of it."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from planner.catalog.diffusers_folder import allowed_roots
from planner.dataset import clips
from planner.dataset.clips import UnusableError
from planner.errors import VplanError, quoted

UNREAD = (
    *(".heic", ".heif", ".avif", ".jxl", ".jp2", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".psd"),
    *(".3gp", ".mts", ".m2ts", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv"),
)
"""Endings of images and videos that are not read."""


class Folder:
    """An existing folder. Raises a VplanError for one that does not exist or cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            self.root = path.resolve(strict=True)
        except OSError as error:
            raise _unreadable(path, error) from None
        self._allowed = tuple(f"{str(root).rstrip('/')}/" for root in allowed_roots(self.root))
        self._real: dict[str, str] = {}
        """subfolder -> real path, a cache: most files share a folder with many others"""
        self.texts: list[str] = []
        """paths of the `.txt` files that `media` found"""
        self.unread: list[str] = []
        """paths of the videos and images that it found and that are of a type which is not read"""
        self.links_outside: list[str] = []
        """paths of folders that it skipped because they are links to folders elsewhere"""

    def media(self) -> Iterator[str]:
        """Yields paths relative to the folder, with forward slashes, of files named like videos or images. Hidden ones
        are skipped."""
        self.texts, self.unread, self.links_outside = [], [], []

        def refuse(error: OSError) -> None:
            raise error

        try:
            for place, folders, files in os.walk(self.root, onerror=refuse):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                relative = Path(place).relative_to(self.root).as_posix()
                opening = "" if relative == "." else f"{relative}/"
                self.links_outside += [opening + name for name in folders if self._leads_outside(place, name)]
                for name in sorted(files):
                    if name.startswith("."):
                        continue
                    if is_media(name):
                        yield opening + name
                    elif name.endswith(".txt"):
                        self.texts.append(opening + name)
                    elif name.lower().endswith(UNREAD):
                        self.unread.append(opening + name)
        except OSError as error:
            raise _unreadable(self.root, error) from None

    def _leads_outside(self, place: str, name: str) -> bool:
        path = os.path.join(place, name)
        return os.path.islink(path) and not f"{os.path.realpath(path)}/".startswith(self._allowed)

    def inside(self, name: str) -> Path:
        """The path of a file in the folder. Raises an UnusableError if it is missing or unreadable, or is outside.

        Datasets in a Hugging Face cache consist of links to the cache's blobs; these are allowed.
        """
        if not name.isprintable() and any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
            raise UnusableError("the name has line breaks, control characters or undecodable bytes")
        if name.startswith(("/", "\\")) or (":" in name and PureWindowsPath(name).drive):
            raise UnusableError("the name is an absolute path")
        if ".." in name and (".." in PurePosixPath(name).parts or ".." in PureWindowsPath(name).parts):
            raise UnusableError("the name points outside the folder (..)")
        path = f"{self.root}/{name}"
        place, _, last = path.rpartition("/")
        try:
            if place not in self._real:
                self._real[place] = os.path.realpath(place, strict=True)
            real = f"{self._real[place]}/{last}"
            status = os.lstat(real)
            if stat.S_ISLNK(status.st_mode):
                real = os.path.realpath(real, strict=True)
                status = os.stat(real)
        except OSError as error:
            raise UnusableError(f"cannot be read ({error.strerror})") from None
        if not real.startswith(self._allowed):
            raise UnusableError("a link that points outside the folder")
        if not stat.S_ISREG(status.st_mode):
            raise UnusableError("not a file")
        if not os.access(real, os.R_OK):
            raise UnusableError("cannot be read (Permission denied)")
        return Path(path)


def is_media(name: str) -> bool:
    """Whether a file is named like a video or image."""
    return name.lower().endswith((*clips.VIDEOS, *clips.IMAGES))


def printable(name: str) -> str:
    """A name made safe for a one-line message: quoted if it is long or not printable."""
    return name if name.isprintable() and len(name) <= 80 else quoted(name, 80)


def _unreadable(path: Path, error: OSError) -> VplanError:
    fix = "choose a readable folder of videos or images"
    return VplanError(f"cannot read {quoted(str(path))}: {error.strerror}", fix)
