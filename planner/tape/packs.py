"""Packs: the archives in which recordings are shipped, one for all models of an architecture, or a VAE or text encoder.

A pack replaces the folders next to it that it contains, one for each model. Its recordings have the paths that they
would have as files in those folders. A real file at such a path takes precedence, so a new recording is used at once.
Recordings of one architecture differ little and compress well together (xz; a sixth to a seventeenth of the size of
gzipped files).

A pack is a zip archive of an index for each model, of groups, and of the templates they share
(`planner.tape.template_table`). A group is the JSON texts of several recordings one after another, without the head,
which is in the index, and with a number in place of each template.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from planner.file_writing import write_file
from planner.garbage_collection import recording_cache
from planner.tape.packed_json import DAMAGES, as_text, damaged_file, unpack
from planner.tape.template_table import TemplateReader, TemplateWriter, with_templates
from planner.untrusted import read_bytes

SUFFIX, GZIPPED, PACKED = ".zip", ".gz", ".xz"
INDEX, TEMPLATES = f"index{PACKED}", f"templates{PACKED}"
FORMAT = 2
HEAD = ("model", "variant", "versions")
"""What the index has of a tape's text: a group does not change where only these do."""

GROUP_BYTES = 8 << 20
"""A group ends once it has so much text: reading the last of its recordings unpacks all, at 100 to 300 MB a second."""

AHEAD_BYTES = 1 << 18
"""The least that is unpacked at once."""

MAX_PACK_BYTES, MAX_INDEX_BYTES = 16 << 20, 1 << 20
PRESET, DICTIONARY_BYTES = 9, 32 << 20
"""Of xz; a dictionary is no larger than what is packed."""

_DATE = (1980, 1, 1, 0, 0, 0)
"""The first that an archive can have: the same recordings make the same bytes."""

T = TypeVar("T")

Recording = tuple[str, str]
"""The folder and the name of a recording."""


class _Place(NamedTuple):
    """Where a recording's text is: its group, the range in it, and the head that was cut off."""

    group: str
    start: int
    end: int
    head: Mapping[str, Any]


class Pack:
    """An open archive. The constructor raises one of `DAMAGES` if the file is not a pack."""

    def __init__(self, content: bytes) -> None:
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(content))
        except zipfile.BadZipFile as error:
            raise ValueError(f"no pack: {error}") from None
        self._places: dict[str, dict[str, _Place]] = {}

    @classmethod
    def read(cls, path: Path) -> Pack:
        """Opens a file as a pack; may also raise an OSError."""
        return cls(read_bytes(path, MAX_PACK_BYTES))

    @property
    def folders(self) -> list[str]:
        """The folders that it replaces."""
        return _folders(self._archive)

    def names(self, folder: str) -> Iterable[str]:
        """The file names of a folder's recordings; none if the pack does not contain the folder."""
        return self._recordings(folder).keys()

    def versions(self) -> list[Mapping[str, str]]:
        """The versions of the libraries that its recordings were made with."""
        heads = {id(place.head): place.head for folder in self.folders for place in self._recordings(folder).values()}
        return [head.get("versions", {}) for head in heads.values()]

    def data(self, folder: str, name: str) -> dict[str, Any]:
        """The JSON of a recording. It is shared, so it must not be changed."""
        head = self._recordings(folder)[name].head
        # A table of parameters, which no library's version changes, is of no variant.
        variant = {"variant": _stem(name)} if "versions" in head else {}
        return {**head, **variant, **self.body(folder, name, _templates(self).template)}

    def body(self, folder: str, name: str, template: Callable[[int], Any]) -> dict[str, Any]:
        """The JSON without what is in `HEAD`. ``template``: maps the number of a template to what replaces it."""
        place = self._recordings(folder)[name]
        body: dict[str, Any] = json.loads(_group(self, place.group).text(place.start, place.end))
        try:
            return with_templates(body, template)
        except (LookupError, TypeError, AttributeError, struct.error) as error:
            raise ValueError(f"{name}: {error}") from None

    def group(self, member: str) -> _Group:
        """A member of the archive, still compressed."""
        try:
            return _Group(self._archive.read(member))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"{member}: {error}") from None

    def _recordings(self, folder: str) -> Mapping[str, _Place]:
        if folder not in self._places:
            self._places[folder] = self._indexed(folder) if folder in self.folders else {}
        return self._places[folder]

    def _indexed(self, folder: str) -> dict[str, _Place]:
        try:
            index = json.loads(self.group(f"{folder}/{INDEX}").text(0, MAX_INDEX_BYTES))
            if index["format"] != FORMAT:
                raise ValueError(f"format {index['format']}, this vplan reads {FORMAT}")
            heads, groups = index["heads"], index["groups"]
            return {
                name: _Place(groups[group], start, start + length, heads[head])
                for name, group, start, length, head in index["recordings"]
            }
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"no pack: {error}") from None


class _Group:
    """A group's bytes, decompressed as far as they were asked for."""

    def __init__(self, packed: bytes) -> None:
        import lzma  # not above: a browser's Python has none, and gets files

        self._packed = packed
        self._damages = lzma.LZMAError, EOFError
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        self._text = bytearray()

    def text(self, start: int, end: int) -> bytes:
        """The text between two byte positions. Raises a ValueError if it is damaged before the end."""
        try:
            while len(self._text) < end and not self._decompressor.eof:
                packed, self._packed = self._packed, b""
                self._text += self._decompressor.decompress(packed, max(end - len(self._text), AHEAD_BYTES))
        except self._damages as error:
            raise ValueError(str(error)) from None
        return memoryview(self._text)[start:end].tobytes()


@functools.lru_cache(maxsize=8)
def _group(pack: Pack, name: str) -> _Group:
    """A cached group: a search reads many recordings from a few groups, and the next model's are often in the same
    ones."""
    return pack.group(name)


@functools.lru_cache(maxsize=2)
def _templates(pack: Pack) -> TemplateReader:
    return TemplateReader(pack.group(TEMPLATES).text)


@recording_cache(maxsize=1 << 16)
def _template_digest(pack: Pack, number: int) -> str:
    return _sha256(_templates(pack).template(number))


# ---- recordings by their paths


def is_stored(path: Path) -> bool:
    """Whether a recording with that path exists, as a file or in a pack."""
    return path.is_file() or path.name in _names_in(path.parent)


def stored(folder: Path) -> list[Path]:
    """The paths of all recordings in a folder, as files or in its pack, by name."""
    names = {path.name for path in folder.glob(f"*{GZIPPED}")} | set(_names_in(folder))
    return [folder / name for name in sorted(names)]


def read_recording(path: Path) -> dict[str, Any]:
    """The JSON of a recording, not to be changed. Raises one of `DAMAGES`, or a FileNotFoundError if there is none."""
    pack = None if path.is_file() else _pack_with(path)
    if pack is not None:
        return pack.data(path.parent.name, path.name)
    data: dict[str, Any] = json.loads(unpack(path))
    return data


def digest(path: Path) -> str:
    """The SHA-256 of a recording's JSON text without `HEAD`, with each template replaced by its own SHA-256. It does
    not change with library versions alone."""
    pack = None if path.is_file() else _pack_with(path)
    if pack is not None:
        return _sha256(pack.body(path.parent.name, path.name, functools.partial(_template_digest, pack)))
    body = {key: value for key, value in read_recording(path).items() if key not in HEAD}
    return _sha256(with_templates(body, _sha256))


def _sha256(data: Any) -> str:
    return hashlib.sha256(as_text(data)).hexdigest()


def written_ns(path: Path) -> int:
    """When the file or pack that contains a recording was written, in nanoseconds since the epoch."""
    pack = None if path.is_file() else _pack_of(path.parent)
    return (pack or path).stat().st_mtime_ns


def _pack_with(path: Path) -> Pack | None:
    """The pack that contains a recording."""
    pack = _pack_of(path.parent)
    opened = None if pack is None else _opened(pack)
    return opened if opened is not None and path.name in opened.names(path.parent.name) else None


def _names_in(folder: Path) -> Iterable[str]:
    pack = _pack_of(folder)
    try:
        return () if pack is None else _opened(pack).names(folder.name)
    except DAMAGES as error:
        raise damaged_file(pack or folder, error) from None


def _pack_of(folder: Path) -> Path | None:
    """The pack that contains a folder: the one with its name, or else the one with its architecture's."""
    own = folder.with_name(folder.name + SUFFIX)
    if own.is_file():
        return own
    try:
        written = folder.parent.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    return _packs_in(folder.parent, written).get(folder.name)


@functools.lru_cache(maxsize=32)
def _packs_in(place: Path, written_ns: int) -> dict[str, Path]:
    """Folder -> the pack next to it that contains it."""
    packs: dict[str, Path] = {}
    for pack in sorted(place.glob(f"*{SUFFIX}")):
        try:
            with zipfile.ZipFile(pack) as archive:
                packs |= dict.fromkeys(_folders(archive), pack)
        except (OSError, zipfile.BadZipFile) as error:
            raise damaged_file(pack, error) from None
    return packs


def _folders(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(f"/{INDEX}") for name in archive.namelist() if name.endswith(f"/{INDEX}")]


def _opened(pack: Path) -> Pack:
    try:
        return _opened_as_written(pack, pack.stat().st_mtime_ns)
    except DAMAGES as error:
        raise damaged_file(pack, error) from None


@functools.lru_cache(maxsize=256)
def _opened_as_written(pack: Path, written_ns: int) -> Pack:
    return Pack.read(pack)


# ---- writing


def pack_folders(folders: Mapping[Path, str]) -> list[Path]:
    """Moves the recordings in folders into packs, replacing those with the same names, and removes the files and
    folders. Returns the packs that were written.

    ``folders``: folder -> the name of its pack, next to it. A folder that a pack contains already stays in that pack.
    """
    by_pack: dict[Path, list[Path]] = {}
    for folder, name in folders.items():
        if any(folder.glob(f"*{GZIPPED}")):
            by_pack.setdefault(_pack_of(folder) or folder.with_name(name + SUFFIX), []).append(folder)
    for pack, anew in by_pack.items():
        known = [pack.with_name(name) for name in _opened(pack).folders] if pack.is_file() else []
        paths = [path for folder in {*known, *anew} for path in stored(folder)]
        write_file(pack, packed({(path.parent.name, path.name): path for path in paths}, read_recording))
        for folder in anew:
            for path in folder.glob(f"*{GZIPPED}"):
                path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
    return list(by_pack)


def packed(recordings: Mapping[Recording, T], read: Callable[[T], Mapping[str, Any]]) -> bytes:
    """The archive of recordings, by the folders and names that they would have as files; deterministic. A tape's name
    is its variant's. ``read``: returns the JSON of one recording; called for one after another."""
    templates = TemplateWriter()
    indexes: dict[str, dict[str, Any]] = {}
    groups: dict[str, bytearray] = {}
    for kind, names in itertools.groupby(sorted(recordings, key=_order), lambda recording: _kind(recording[1])):
        group = ""
        for folder, name in names:
            if not group or len(groups[group]) > GROUP_BYTES:
                group = f"{kind}{f'-{len(groups)}' if group else ''}{PACKED}"
                groups[group] = bytearray()
            index = indexes.setdefault(folder, {"format": FORMAT, "heads": [], "groups": [], "recordings": []})
            head, text = _divided(name, read(recordings[folder, name]), templates)
            place = [
                name,
                _number(group, index["groups"]),
                len(groups[group]),
                len(text),
                _number(head, index["heads"]),
            ]
            index["recordings"].append(place)
            groups[group] += text
    # Text has no alignment to four bytes, which is what `lp` and `pb` are about; and columns of bytes have none.
    members = {f"{folder}/{INDEX}": _compressed(as_text(index), 4) for folder, index in indexes.items()}
    members |= {name: _compressed(bytes(content), 4) for name, content in groups.items()}
    members[TEMPLATES] = _compressed(templates.table(), 3)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name, _DATE), content, zipfile.ZIP_STORED)  # with a checksum
    return stream.getvalue()


def _divided(name: str, data: Mapping[str, Any], templates: TemplateWriter) -> tuple[dict[str, Any], bytes]:
    """The head of a recording, and the text of the rest with numbers for templates."""
    head = {key: data[key] for key in HEAD if key in data}
    assert head.pop("variant", _stem(name)) == _stem(name), name
    body = {key: value for key, value in data.items() if key not in HEAD}
    return head, as_text(with_templates(body, templates.number))


def _number(value: Any, table: list[Any]) -> int:
    """The index of a value in a table; it is appended if it is not there."""
    if value not in table:
        table.append(value)
    return table.index(value)


def _compressed(content: bytes, literal_context: int) -> bytes:
    import lzma

    size = min(DICTIONARY_BYTES, max(len(content), 1 << 12))
    usual = {"id": lzma.FILTER_LZMA2, "preset": PRESET | lzma.PRESET_EXTREME, "dict_size": size}
    filters = [{**usual, "lc": literal_context, "lp": 0, "pb": 0}]
    return lzma.compress(content, check=lzma.CHECK_NONE, filters=filters)


def _kind(name: str) -> str:
    """The first two words of a variant's name, such as step-lora."""
    return "-".join(_stem(name).split("-")[:2])


def _order(recording: Recording) -> tuple[str, bool, bool, int, str, str]:
    """The order within a group. What most questions read comes first: no quantised base, one sample, a short name. The
    recordings of one variant of different models, which are much alike, follow each other."""
    folder, name = recording
    words = _stem(name).split("-")
    return _kind(name), "half" not in words, "many" in words, len(words), name, folder


def _stem(name: str) -> str:
    return name.removesuffix(GZIPPED).removesuffix(".json")
