"""Files that other people wrote: read with bounds and never run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import VplanError, quoted

MAX_BYTES = 1 << 20
MAX_YAML_BYTES = 1 << 18
"""PyYAML reads about 100 KiB a second."""

MAX_KEYS = 10_000
MAX_DEPTH = 20
FORMATS = {".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".jsonc": "json"}


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
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise VplanError(f"{name} is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
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
        if kind == "toml":
            return tomllib.loads(text)
        return json.loads(text) if kind == "json" else _yaml(text, name)
    except RecursionError:
        raise VplanError(f"{quoted(name)} is nested too deeply", f"{MAX_DEPTH} levels are read") from None
    except VplanError:
        raise
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise VplanError(f"{quoted(name)} is not {title}: {reason}", "correct that line") from None


def _yaml(text: str, name: str) -> Any:
    """YAML without tags that make objects."""
    try:
        import yaml
    except ImportError:
        raise VplanError(f"reading {quoted(name)} needs PyYAML", "pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.constructor.ConstructorError as error:
        what = " ".join(str(error.problem).split())[:120]
        raise VplanError(f"{quoted(name)}: {what}", "leave tags out: plain values are read, nothing is run") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())[:120]
        raise VplanError(f"{quoted(name)} is not YAML{where}: {problem}", "correct that line") from None


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
        raise VplanError(f"{quoted(name)} is recursive or nested too deeply", f"{MAX_DEPTH} levels are read")
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key), depth + 1, name)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for at, item in enumerate(value):
            yield from _leaves(item, f"{prefix}[{at}]", depth + 1, name)
    else:
        yield prefix, value
