"""Where SimpleTuner finds a file that its config names, read at bc8e6ab: what begins with config/examples is one of its
packaged examples (helpers/configuration/json_file.py ``_resolve_example_path``)."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from planner.dialects.base.script import Script

EXAMPLES = PurePosixPath("config/examples")


def find(script: Script, path: str) -> Path | None:
    """The file, beside the script or above it; None where it is not here."""
    return next((file for place in _places(path) if (file := script.find(place))), None)


def _places(path: str) -> list[str]:
    """What it is looked for as: under simpletuner/examples too, or under a folder of examples by another name."""
    written = PurePosixPath(path)
    if not written.is_relative_to(EXAMPLES):
        return [path]
    own = written.relative_to(EXAMPLES)
    return [str(EXAMPLES.name / own), path, str(own)]
