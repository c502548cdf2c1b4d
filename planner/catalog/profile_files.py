"""Reads the files of `profiles`: a file of ours that is damaged is named."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import VplanError
from planner.schema import Record

AnyRecord = TypeVar("AnyRecord", bound=Record)
LONGEST_NAME = 200
"""Characters. Most file systems refuse names much longer than this, each with an error of its own."""


def read_toml(path: Path) -> dict[str, Any]:
    """A bundled file's tables, or a VplanError that names the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise VplanError(f"profile {path.name} is missing", "reinstall vplan") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise VplanError(f"profile {path.name} is damaged: {error}", "reinstall vplan") from None


def read_record(path: Path, record: type[AnyRecord]) -> AnyRecord:
    """A bundled file as its record; anything wrong in it is named with the file."""
    return record.read(read_toml(path), where=f"profile {path.name} is damaged")
