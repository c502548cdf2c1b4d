"""The page that says how a grid is run: its packages are all that is needed, and its words exist."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from planner.commands import calibrate

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "grid.md").read_text(encoding="utf-8")
LINES = (ROOT / "ci" / "requirements-grid.txt").read_text().splitlines()
LISTED = {line for line in LINES if line and not line.startswith("#")}
STEPPED = ("accelerate", "diffusers", "peft", "transformers")
"""What a step of ours needs beside torch."""
WITHOUT = {"hf-xet", "jinja2"}
"""For downloads alone; torch brings the other."""


def needed(names: set[str]) -> set[str]:
    """All packages that some need, themselves included, by what is installed here."""
    found: set[str] = set()
    left = {canonicalize_name(name) for name in names}
    while left:
        name = left.pop()
        found.add(name)
        asked = [Requirement(line) for line in metadata.requires(name) or ()]
        names_of = {
            canonicalize_name(each.name) for each in asked if not each.marker or each.marker.evaluate({"extra": ""})
        }
        left |= names_of - found
    return found


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="nothing to train with is installed")
def test_the_list_is_complete_without_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = {Requirement(line).name for line in project["dependencies"]}
    beside = needed({"torch"})
    assert needed({*own, *STEPPED}) - beside - WITHOUT <= LISTED
    assert not LISTED & {"torch", "triton"} and not any(name.startswith("nvidia-c") for name in LISTED)


def test_the_page_s_words_exist() -> None:
    known = {name for parameter in calibrate.command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    typed = re.findall(r"vplan(?:\.py)? calibrate([^\n]*)", PAGE)
    assert len(typed) >= 5
    assert {word for words in typed for word in re.findall(r"--[a-z-]+|(?<= )-o", words)} <= known
    assert all((ROOT / "docs" / target).exists() for target in re.findall(r"\]\((\.\./[^)]+)\)", PAGE))
