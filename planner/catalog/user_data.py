"""Where the user's own models are kept: profiles and tapes in one folder, laid out like the bundled ones.

`VPLAN_HOME` names the folder; else it is the platform's folder for a program's data (`~/.config/vplan` on Linux).
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from planner.errors import VplanError, quoted
from planner.file_writing import write_file
from planner.untrusted import read_bytes

VARIABLE = "VPLAN_HOME"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}", re.ASCII)
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.ASCII)
"""Names that Windows gives to devices, whatever stands behind the point."""


def folder() -> Path:
    """The user's data folder: that of the environment variable `VARIABLE`, else the platform's config folder. It need
    not exist yet."""
    place = os.environ.get(VARIABLE)
    if place:
        return Path(place).expanduser().absolute()
    on_linux = sys.platform == "linux"  # in a variable, or mypy takes the rest for unreachable
    if on_linux:  # what platformdirs says there, without its import: every command asks
        configured = Path(os.environ.get("XDG_CONFIG_HOME", "").strip())
        return (configured if configured.is_absolute() else Path.home() / ".config") / "vplan"
    import platformdirs

    return Path(platformdirs.user_config_dir("vplan", appauthor=False, roaming=True))


def tapes() -> Path:
    """The folder of the user's own tapes, with one folder per model. It need not exist yet."""
    return folder() / "tapes"


def model_path(name: str) -> Path:
    """The JSON file that describes the user's model of that name. It need not exist."""
    return folder() / "models" / f"{name}.json"


def model_names() -> tuple[str, ...]:
    """Names of the user's own models, alphabetical. Files that no `vplan record` wrote are passed over."""
    names = (path.name.removesuffix(".json") for path in (folder() / "models").glob("*.json"))
    return tuple(sorted(name for name in names if is_name(name)))


def is_name(text: str) -> bool:
    """Whether a text can name a model: a file name on every system, and never a path, a plan or a config."""
    return bool(
        _NAME.fullmatch(text)
        and ".." not in text
        and not text.endswith((".", ".toml", ".json"))
        and not _RESERVED.fullmatch(text)
    )


def check_name(text: str, option: str = "--name") -> str:
    """The name in lower case, or a VplanError when it is no safe file name."""
    name = text.lower()
    if not is_name(name):
        fix = "use letters, digits, periods, dashes and underscores, such as --name my-model"
        raise VplanError(f"{option} {quoted(text)} is not a safe file name", fix)
    return name


def name_for(folder_name: str) -> str:
    """A name for a model made from a folder's name: lower case, with dashes for characters that a name cannot have."""
    return re.sub(r"[^a-z0-9._-]+", "-", folder_name.lower()).strip("-._")[:100]


def read_profile(name: str) -> dict[str, Any] | None:
    """The stored profile of the user's model of that name; None when there is none. Raises a VplanError for a damaged
    file."""
    path = model_path(name)
    try:
        profile = json.loads(read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        fault = f"your own profile {path.name} is damaged ({type(error).__name__})"
        raise VplanError(fault, f"remove it and record the model again: {path}") from None
    if not isinstance(profile, dict):
        raise VplanError(f"your own profile {path.name} is damaged", f"remove it and record the model again: {path}")
    return profile


def write_profile(name: str, profile: dict[str, Any]) -> Path:
    """Keep a model, whole or not at all. Tapes of another profile of that name are removed first."""
    path = model_path(name)
    text = json.dumps(profile, indent=1, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            # In this order, so that whenever we are killed no tape lies beside a profile it was not recorded from.
            for tape in (tapes() / name).glob("*.json.gz"):
                tape.unlink()
            write_file(path, text)
    except OSError as error:
        fix = f"free some space there, or set {VARIABLE} to a writable folder"
        raise VplanError(f"cannot write {path}: {error.strerror}", fix) from None
    return path


def forget(name: str) -> None:
    """Remove a profile that has no tapes: nothing could be estimated with it."""
    if not any((tapes() / name).glob("*.json.gz")):
        model_path(name).unlink(missing_ok=True)
