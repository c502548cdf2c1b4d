"""Files that other people wrote: read with bounds and never run."""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import VplanError, quoted

MAX_BYTES = 1 << 20
MAX_YAML_BYTES = 1 << 18
"""PyYAML reads about 100 KiB a second."""

MAX_INDEX_BYTES = 64 << 20
"""Of the list of a model's tensors; the longest published ones have a few MB."""

MAX_LINE_BYTES = 1 << 20
"""Of a row of measurements; one takes some 2 KB."""

MAX_KEYS = 10_000
MAX_DEPTH = 20
MAX_EXPANDED = 1 << 20
"""Characters and nodes of a YAML file with every alias and merge key written out."""

MAX_INTEGER_BITS = 1 << 10
"""Python prints no number of over 4,300 digits, whatever base it was read in."""

_TOML_PART = r"""(?>[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_TOML_KEY = re.compile(rf"(?m)(?:^|[\[{{,])[ \t]*+{_TOML_PART}(?:[ \t]*+\.[ \t]*+{_TOML_PART}){{{MAX_DEPTH}}}")
"""A dotted key of more parts than there are levels: tomllib keeps every start of it, so its memory is quadratic."""

FORMATS = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".jsonc": "json"}


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """A file's content. Raises an OSError where it cannot be read and a ValueError where there is more of it: what it
    claims to have is not asked, and a device has no end."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most / 1024:,.0f} KiB")
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of any length, of each at most the first `MAX_LINE_BYTES`. Raises an OSError where it cannot
    be read, and a ValueError for a device, which has no end."""
    with path.open("rb") as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is a device")
        while line := file.readline(MAX_LINE_BYTES):
            yield line
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)


def read_lines_backward(path: Path, most: int) -> Iterator[bytes]:
    """The lines of the last `most` bytes of a file, last one first. Raises an OSError where it cannot be read."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        first = max(0, end - most)
        rest = b""
        while end > first:
            start = max(first, end - MAX_LINE_BYTES)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).split(b"\n")
            yield from reversed(lines)
            end = start
        if not first:  # else it may be the end of a line
            yield rest


def json_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None where there is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a file of bounded size; one clear line for anything else."""
    name = quoted(str(path))
    try:
        if not path.is_file():
            reason = "is no file" if path.exists() else "does not exist"
            raise VplanError(f"{name} {reason}", "name a file that is there")
        if path.stat().st_size > most:
            size = path.stat().st_size / 1024
            raise VplanError(f"{name} has {size:,.0f} KiB", f"a script or config has {most // 1024} KiB at most")
        content = read_bytes(path, most)
        # Windows PowerShell's `>` writes UTF-16 with its mark.
        return content.decode("utf-16" if content.startswith(_UTF_16_MARKS) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise VplanError(f"{name} is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except VplanError:
        raise
    except ValueError as error:  # longer than it said, as files of /proc are
        raise VplanError(f"cannot read {name}: {error}", "choose another file") from None
    except OSError as error:
        raise VplanError(f"cannot read {name}: {error.strerror}", "choose another file") from None


def read_document(path: Path) -> dict[str, Any]:
    """A TOML, YAML or JSON file as tables within tables. Its ending says which it is."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise VplanError(f"{quoted(path.name)} is no TOML, YAML or JSON by its name", "name a .toml, .yaml or .json")
    text = read_text(path, MAX_YAML_BYTES if kind == "yaml" else MAX_BYTES)
    found = parse(text, kind, path.name)
    flat(found, path.name)  # refuses what is no table, too large or without end
    assert isinstance(found, dict)
    return found


def parse(text: str, kind: str, name: str) -> Any:
    """The value of a text in TOML, YAML or JSON. Raises a VplanError that names the file for a text that is not."""
    title = {"toml": "TOML", "yaml": "YAML", "json": "JSON"}[kind]
    try:
        found = {"toml": _toml, "yaml": _yaml, "json": _json}[kind](text, name)
        _check_integers(found, name)
        return found
    except RecursionError:
        raise _too_deep(name) from None
    except VplanError:
        raise
    except json.JSONDecodeError as error:
        raise not_parsed(name, title, error.msg, text, error.lineno, error.colno) from None
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        at = _TOML_POSITION.search(reason)
        line, column = (int(at[1]), int(at[2])) if at else (0, 0)
        unclosed = reason.endswith(_TOML_END)
        reason = reason.removesuffix(_TOML_END) if at is None else reason[: at.start()]
        raise not_parsed(name, title, reason, text, line, column, at_end=unclosed) from None


_TOML_POSITION = re.compile(r" \(at line (\d+), column (\d+)\)$")
_TOML_END = " (at end of document)"
"""What `tomllib` says of the place of an error."""


def not_parsed(
    name: str,
    title: str,
    reason: str,
    text: str,
    line: int,
    column: int = 0,
    *,
    opened: int = 0,
    at_end: bool = False,
) -> VplanError:
    """The error for a text that is not what its name says, with the place of the fault in words.

    ``line``: counted from 1, 0 where none is known. Parsers put what is missing at the end on a line behind the last
    one; here the end is said to be the place. ``opened``: the line where what is not closed begins, 0 where none is
    known.
    """
    lines = text.rstrip().count("\n") + 1
    last = text.rstrip().rpartition("\n")[2]
    reason = reason[:1].lower() + reason[1:]
    if at_end or line > lines or (line == lines and column > len(last)):
        begins = f"what begins in line {opened}" if opened else "something"
        fault = f"{quoted(name)} is not {title}: {reason} (at its end, line {lines})"
        return VplanError(fault, f"{begins} is left open, or the file is cut off: complete it")
    place = f"line {line}, column {column}" if column else f"line {line}"
    earlier = f", or what begins in line {opened}" if 0 < opened < line else ""
    fault = f"{quoted(name)} is not {title}: {reason}{f' ({place})' if line else ''}"
    return VplanError(fault, f"correct line {line}{earlier}" if line else "correct it")


def _too_deep(name: str) -> VplanError:
    return VplanError(f"{quoted(name)} is recursive or nested too deeply", f"{MAX_DEPTH} levels are read")


def _toml(text: str, name: str) -> dict[str, Any]:
    if _LONG_TOML_KEY.search(text):
        raise _too_deep(name)
    return tomllib.loads(text)


def _json(text: str, _name: str) -> Any:
    return json.loads(text)


def _yaml(text: str, name: str) -> Any:
    """YAML without tags that make objects. Its aliases are counted before any of them is followed."""
    try:
        import yaml
    except ImportError:
        raise VplanError(f"reading {quoted(name)} needs PyYAML", "pip install pyyaml") from None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded(node, {}, name) > MAX_EXPANDED:
            fault = f"{quoted(name)} is too large with its aliases written out"
            raise VplanError(fault, f"{MAX_EXPANDED:,} characters are read at most")
        return loader.construct_document(node)
    except yaml.constructor.ConstructorError as error:
        what = " ".join(str(error.problem).split())[:120]
        raise VplanError(f"{quoted(name)}: {what}", "leave tags out: plain values are read, nothing is run") from None
    except yaml.YAMLError as error:
        mark, begun = (getattr(error, name, None) for name in ("problem_mark", "context_mark"))
        problem = " ".join(str(getattr(error, "problem", None) or error).split())[:120]
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        opened = begun.line + 1 if begun else 0
        raise not_parsed(name, "YAML", problem, text, line, column, opened=opened) from None


def _expanded(node: Any, known: dict[int, int | None], name: str) -> int:
    """Characters and nodes below a YAML node, an aliased one counted wherever it is named; it is visited once.

    Merging (`<<`) copies the entries of the tables it names, so it makes no more than this.
    """
    if id(node) in known:
        size = known[id(node)]
        if size is None:  # we are within it
            raise _too_deep(name)
        return size
    known[id(node)] = None
    total = 1
    if isinstance(node.value, str):
        total += len(node.value)
    else:
        for part in node.value:
            total += sum(_expanded(each, known, name) for each in (part if isinstance(part, tuple) else (part,)))
    known[id(node)] = total
    return total


def _check_integers(value: Any, name: str) -> None:
    """Refuses a number that Python would not print. A hexadecimal one can be of any length."""
    found = [value]
    while found:
        part = found.pop()
        if isinstance(part, dict):
            found += [*part, *part.values()]
        elif isinstance(part, list):
            found.extend(part)
        elif isinstance(part, int) and part.bit_length() > MAX_INTEGER_BITS:
            raise VplanError(f"{quoted(name)} has an integer of {part.bit_length():,} bits", "correct that value")


def flat(value: Any, name: str) -> dict[str, Any]:
    """A table of tables as one: "data.num_frames", "datasets[0].resolution"."""
    if not isinstance(value, dict):
        raise VplanError(f"{quoted(name)} is no table of settings", "name a trainer's config")
    found: dict[str, Any] = {}
    for visited, (key, leaf) in enumerate(_leaves(value, "", 0, name)):
        if visited >= MAX_KEYS:
            raise VplanError(f"{quoted(name)} has more than {MAX_KEYS} keys", "name a trainer's config")
        found[key] = leaf
    return found


def _leaves(value: Any, prefix: str, depth: int, name: str) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:  # YAML can name a table within itself
        raise _too_deep(name)
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key), depth + 1, name)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{prefix}[{at}]", depth + 1, name)
    else:
        yield prefix, value
