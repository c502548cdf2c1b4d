"""Python imports this by itself when it starts: loads the observer, then the `sitecustomize` that it stands before."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_ENTRY = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "vplan_observer"
"""The observer's name in the command's Python, where there may be another `trainers`."""


def _start_observer() -> None:
    folder = os.path.dirname(_ENTRY)
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)
    importlib.import_module(f"{_PACKAGE}.observer").start()


def _run_the_next() -> None:
    """The `sitecustomize` that Python would have imported without ours."""
    others = [place for place in sys.path if os.path.abspath(place or os.curdir) != _ENTRY]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("VPLAN_GPU_FOLDER"):
    _start_observer()
_run_the_next()
