"""The house can be walked: rooms are small, a file's name says one thing, and so does a class's."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import vplan

ROOT = Path(vplan.HOME)
PACKAGES = ("planner", "profiles", "reports", "trainers")
MOST_FILES = 20
"""In one folder, beside its `__init__.py`."""

VERBS = "planner/commands"
"""Its files have the names of verbs, which rooms bear too: `vplan probe` is what asks `planner.probe`."""

ALIKE = {"planner/dialects": {"settings.py", "models.py", "files.py"}}
"""Each trainer's package has the same files."""


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (ROOT / folder).rglob("*.py")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_a_folder_holds_at_most_twenty_files() -> None:
    files = Counter(relative(path.parent) for path in sources(*PACKAGES, "tests") if path.name != "__init__.py")
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}


def test_a_file_name_occurs_once_in_a_package() -> None:
    places: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sources(package):
            place = relative(path)
            alike = any(place.startswith(folder) and path.name in names for folder, names in ALIKE.items())
            if path.name != "__init__.py" and relative(path.parent) != VERBS and not alike:
                places[package, path.name].append(place)
    assert [found for found in places.values() if len(found) > 1] == []


def test_a_public_class_name_occurs_once() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(relative(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


ARCHITECTURE = ROOT / "docs/architecture.md"
PLACES = (
    ".",
    "planner",
    "planner/commands",
    "planner/dialects",
    "planner/layout",
    "planner/rehearsal",
    "profiles",
    "trainers",
)
"""Folders that the paths of the page begin in."""


def test_every_place_that_the_architecture_page_names_is_there() -> None:
    named = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)*/(?:[\w.-]+)?)`", ARCHITECTURE.read_text(encoding="utf-8")))
    assert "planner/spec/job.py" in named
    made_up = {"profiles/model_lists/TRAINER.toml", "trainers/NAME.py"}
    paths = {name: [ROOT / place / f"{name}{ending}" for place in PLACES for ending in ("", ".py")] for name in named}
    assert {name for name, places in paths.items() if not any(map(Path.exists, places))} == made_up


def test_every_folder_of_tests_is_one_of_the_source() -> None:
    of_all = {"benchmarks", "contract", "e2e", "golden", "tools", "trials"}
    for path in sources("tests"):
        parts = path.relative_to(ROOT / "tests").parts[:-1]
        if parts and parts[0] not in of_all and path.name.startswith("test_"):
            assert (ROOT / Path(*parts)).is_dir(), relative(path)
