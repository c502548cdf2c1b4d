"""Packs: all recordings of one model, VAE or text encoder in one archive, as vplan ships them.

`NAME.zip` stands for the folder `NAME` beside it. Its recordings have the paths that they would have as files of that
folder, and a file that lies there is taken first: what is recorded anew answers at once. Recordings of a model differ
little, so those of one kind are compressed together (xz; a quarter of what they take as a gzipped file each).

A pack is a zip archive of groups and of their index, each compressed. A group is the recordings' JSON texts one after
the other, without the head that the index has.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from planner.file_writing import write_file
from planner.garbage_collection import recording_cache
from planner.tape.packed_json import DAMAGES, as_text, damaged_file, unpack
from planner.untrusted import read_bytes

SUFFIX, GZIPPED, PACKED = ".zip", ".gz", ".xz"
INDEX = f"index{PACKED}"
FORMAT = 1
HEAD = ("model", "variant", "versions")
"""What the index has of a tape's text: a group does not change where only these do."""

GROUP_BYTES = 8 << 20
"""A group ends once it has so much text: reading the last of its recordings unpacks all, at 100 to 300 MB a second."""

AHEAD_BYTES = 1 << 18
"""The least that is unpacked at once."""

MAX_PACK_BYTES, MAX_INDEX_BYTES = 16 << 20, 1 << 20
PRESET, DICTIONARY_BYTES = 9, 2 * GROUP_BYTES
"""Of xz."""

_DATE = (1980, 1, 1, 0, 0, 0)
"""The first that an archive can have: the same recordings make the same bytes."""


class _Place(NamedTuple):
    """Where a recording's text is: its group, from where to where, and the head that it lacks."""

    group: str
    start: int
    end: int
    head: Mapping[str, Any]


class Pack:
    """An archive, opened to be read. Raises one of `DAMAGES` where it is none."""

    def __init__(self, content: bytes) -> None:
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(content))
            index = json.loads(self.group(INDEX).text(0, MAX_INDEX_BYTES))
            if index["format"] != FORMAT:
                raise ValueError(f"format {index['format']}, this vplan reads {FORMAT}")
            heads = index["heads"]
            self.versions: list[Mapping[str, str]] = [head.get("versions", {}) for head in heads]
            """of the libraries that its recordings were made with"""
            self._places = {}
            for group, recordings in index["groups"].items():
                start = 0
                for name, length, head in recordings:
                    self._places[name] = _Place(group, start, start + length, heads[head])
                    start += length
        except (zipfile.BadZipFile, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"no pack: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Pack:
        """Of a file, which may also raise an OSError."""
        return cls(read_bytes(path, MAX_PACK_BYTES))

    @property
    def names(self) -> Iterable[str]:
        """The names of its recordings, as those of files."""
        return self._places.keys()

    def text(self, name: str) -> bytes:
        """The JSON text of a recording. A table of parameters, which no library's version changes, is of no variant."""
        head = self._places[name].head
        text = as_text({**head, "variant": _stem(name)} if "versions" in head else head)
        return text[:-1] + b"," + self.body(name)[1:]

    def body(self, name: str) -> bytes:
        """The same without what is in `HEAD`."""
        place = self._places[name]
        return _group(self, place.group).text(place.start, place.end)

    def group(self, member: str) -> _Group:
        """A member of the archive, as yet packed."""
        try:
            return _Group(self._archive.read(member))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{member}: {error}") from None


class _Group:
    """Texts that are unpacked as far as they are asked for."""

    def __init__(self, packed: bytes) -> None:
        import lzma  # not above: a browser's Python has none, and gets files

        self._packed = packed
        self._damages = lzma.LZMAError, EOFError
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        self._text = bytearray()

    def text(self, start: int, end: int) -> bytes:
        """What is from one byte to another; a ValueError where it is damaged before."""
        try:
            while len(self._text) < end and not self._decompressor.eof:
                packed, self._packed = self._packed, b""
                self._text += self._decompressor.decompress(packed, max(end - len(self._text), AHEAD_BYTES))
        except self._damages as error:
            raise ValueError(str(error)) from None
        return bytes(self._text[start:end])


@recording_cache(maxsize=8)
def _group(pack: Pack, name: str) -> _Group:
    """Kept, as a search reads many recordings of a few groups."""
    return pack.group(name)


# ---- recordings by their paths


def is_stored(path: Path) -> bool:
    """Whether there is a recording of that path, as a file or in a pack."""
    return path.is_file() or path.name in _names_in(_pack_of(path.parent))


def stored(folder: Path) -> list[Path]:
    """The paths of all recordings of a folder, as files or in its pack, by name."""
    names = {path.name for path in folder.glob(f"*{GZIPPED}")} | set(_names_in(_pack_of(folder)))
    return [folder / name for name in sorted(names)]


def stored_below(folder: Path) -> list[Path]:
    """The same of a folder and of all folders in it."""
    packed = {path.with_name(path.name.removesuffix(SUFFIX)) for path in folder.rglob(f"*{SUFFIX}")}
    folders = {path.parent for path in folder.rglob(f"*{GZIPPED}")} | packed
    return [path for each in sorted(folders) for path in stored(each)]


def read_text(path: Path) -> bytes:
    """The JSON text of a recording. Raises one of `DAMAGES`, a FileNotFoundError where there is none."""
    pack = _pack_of(path.parent)
    if not path.is_file() and path.name in _names_in(pack):
        return _opened(pack, pack.stat().st_mtime_ns).text(path.name)
    return unpack(path)


def digest(path: Path) -> str:
    """The SHA-256 of a recording's JSON text without what is in `HEAD`: other versions alone do not change it."""
    pack = _pack_of(path.parent)
    if path.is_file():
        body = as_text({key: value for key, value in json.loads(unpack(path)).items() if key not in HEAD})
    else:
        body = _opened(pack, pack.stat().st_mtime_ns).body(path.name)
    return hashlib.sha256(body).hexdigest()


def written_ns(path: Path) -> int:
    """When the file, or the pack, that has a recording was written, in nanoseconds of the clock."""
    return (path if path.is_file() else _pack_of(path.parent)).stat().st_mtime_ns


def _pack_of(folder: Path) -> Path:
    return folder.with_name(folder.name + SUFFIX)


def _names_in(pack: Path) -> Iterable[str]:
    try:
        written = pack.stat().st_mtime_ns
    except FileNotFoundError:
        return ()
    return _opened(pack, written).names


@functools.lru_cache(maxsize=256)
def _opened(pack: Path, written_ns: int) -> Pack:
    try:
        return Pack.read(pack)
    except DAMAGES as error:
        raise damaged_file(pack, error) from None


# ---- writing


def pack_folder(folder: Path) -> Path | None:
    """Puts the recordings that lie in a folder into its pack, in place of those of the same names, and removes them and
    the folder; returns the pack. None where nothing lies there."""
    files = sorted(folder.glob(f"*{GZIPPED}"))
    if not files:
        return None
    pack = _pack_of(folder)
    write_file(pack, packed({path.name: read_text(path) for path in stored(folder)}))
    for path in files:
        path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return pack


def packed(texts: Mapping[str, bytes]) -> bytes:
    """The archive of recordings' JSON texts, by the names that they would have as files; the same for the same texts.
    A tape's name is its variant's."""
    import lzma

    # Text has no alignment to four bytes, which is what `lp` and `pb` are about.
    usual = {"id": lzma.FILTER_LZMA2, "preset": PRESET | lzma.PRESET_EXTREME, "dict_size": DICTIONARY_BYTES}
    filters = [{**usual, "lc": 4, "lp": 0, "pb": 0}]
    heads: list[dict[str, Any]] = []
    contents: dict[str, list[tuple[str, int, int]]] = {}
    bodies: dict[str, bytes] = {}
    for kind, names in itertools.groupby(sorted(texts, key=_order), _kind):
        group = ""
        for name in names:
            if not group or len(bodies[group]) > GROUP_BYTES:
                group = f"{kind}{f'-{len(bodies)}' if group else ''}{PACKED}"
                bodies[group], contents[group] = b"", []
            data = json.loads(texts[name])
            head = {key: data.pop(key) for key in HEAD if key in data}
            assert head.pop("variant", _stem(name)) == _stem(name), name
            heads += [head] if head not in heads else []
            text = as_text(data)
            contents[group].append((name, len(text), heads.index(head)))
            bodies[group] += text
    bodies[INDEX] = as_text({"format": FORMAT, "heads": heads, "groups": contents})
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, body in bodies.items():
            text = lzma.compress(body, check=lzma.CHECK_NONE, filters=filters)
            archive.writestr(zipfile.ZipInfo(name, _DATE), text, zipfile.ZIP_STORED)  # with a checksum
    return stream.getvalue()


def _kind(name: str) -> str:
    """The first two words of a variant's name, as in step-lora."""
    return "-".join(_stem(name).split("-")[:2])


def _order(name: str) -> tuple[str, bool, bool, int, str]:
    """What most questions read comes first in a group: no quantised base, one sample, a short name."""
    words = _stem(name).split("-")
    return _kind(name), "half" not in words, "many" in words, len(words), name


def _stem(name: str) -> str:
    return name.removesuffix(GZIPPED).removesuffix(".json")
