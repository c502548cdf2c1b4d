"""Every recording that comes with vplan."""

from __future__ import annotations

from pathlib import Path

from planner.tape.packs import Pack, stored
from profiles import TAPES


def shipped_tapes() -> list[Path]:
    """The paths of all recordings: models', VAEs' and text encoders', in packs and as files that take precedence."""
    packed = {pack.with_name(name) for pack in TAPES.rglob("*.zip") for name in Pack.read(pack).folders}
    folders = packed | {path.parent for path in TAPES.rglob("*.gz")}
    return [path for folder in sorted(folders) for path in stored(folder)]
