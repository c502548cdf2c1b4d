"""Commands that run without network, and do not start where the system cannot shut it off."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from planner.errors import VplanError
from planner.rehearsal import launcher
from planner.rehearsal.rehearsal import OFFLINE


def without_network(command: list[str], folder: Path, variables: Mapping[str, str]) -> list[str]:
    """The command that runs another one without network, with more environment variables. ``folder``: a new one for its
    own use. Raises a VplanError where this system has no such processes."""
    if sys.platform != "linux":
        raise VplanError("your own code runs without network, which needs Linux", "use Linux or WSL")
    folder.mkdir()
    environment = {**os.environ, **OFFLINE, **variables}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    return [sys.executable, launcher.__file__, str(folder), launcher.NO_NETWORK, *command]
