"""No code asks what a model is called: what it is stands in its profile, and a new one of a known class is one file.

Read statically: a literal that is a name of a family, a model, a class of diffusers or transformers, or the beginning
of one that is compared with it. What a folder of code may say of a model is listed below, with the reason.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import profiles
import vplan

ROOT = Path(vplan.HOME)

ALLOWED = {
    "trainers/families/": "a family's own file names its encoders and its pipeline",
    "planner/dialects/": "a trainer's words for models; comparisons are not allowed there either, but these",
    "planner/layout/trainer_terms/__init__.py": "trainers that are called like the model they were written for",
    "planner/layout/trainer_terms/sd_scripts/unet.py": "sd-scripts' versions are called after what they train",
    "planner/evidence/published.py": "defaults of publishers' scripts, by trainer and model of their rows",
    "planner/catalog/diffusers_folder.py": "`unet` is what diffusers calls a folder",
    "planner/commands/_shared/request.py": "an example in a message",
    "planner/launch/demo.py": "the pipeline that the demo's is made after",
    "planner/probe/grid.py": "the model that is calibrated with where nobody names one",
    "trainers/measuring/launches.py": "the model whose operators are timed",
    "trainers/recording/trainer_code/ltx_trainer.py": "its repository is called like the model's",
}
"""Where a name may stand as a literal, by how its path begins."""

COMPARED = {
    "planner/dialects/musubi_tuner/": "scripts are called wan_train_network.py and the like",
    "planner/dialects/sd_scripts_unet/": "a script for each of two models, called after them",
    "planner/dialects/sd_scripts_hunyuan/": "a key of its config is called after the encoder whose file it names",
    "planner/dialects/sd_scripts_anima/": "likewise",
    "planner/dialects/diffusers_pipeline/": "a script's calls of any class that begins with Autoencoder",
}
"""Where a name may be compared with a trainer's own word."""

FAMILY_READ = {
    "trainers/families/__init__.py": "the file that trains a family is called like it",
    "trainers/data/cache.py": "part of what a cached sample is kept under",
    "planner/evidence/accuracy.py": "errors are shown by family",
    "planner/probe/grid_schedule.py": "a grid's rows are spread over families",
    "planner/dialects/diffsynth/names.py": "a table of the trainer's folders",
    "planner/commands/record.py": "models of a family share a pack of tapes",
}
"""Where a profile's family is read at all."""

WORDS = {"clip", "image", "video", "dev", "edit", "large", "medium", "turbo", "base", "distilled", "text", "full"}
WORDS |= {"bf16", "fp8", "nf4"}
"""Parts of models' names that say other things as well."""


def known() -> set[str]:
    """Names of families, models, their parts and the classes of all of these."""
    found: set[str] = set()
    for name in profiles.model_names():
        profile = tomllib.loads(profiles.model_path(name).read_text(encoding="utf-8"))
        found |= {profile["name"], *profile["aliases"], profile["family"], profile["diffusers_class"]}
        found |= {profile["vae"]["class"], *(part["class"] for part in profile["text_encoders"])}
        found |= {part["name"] for part in profile["text_encoders"]}
    return found


NAMES = known()
PARTS = {part for name in NAMES for part in re.split(r"[-/_]", name) if len(part) > 2} - WORDS
EITHER = NAMES | PARTS


def sources() -> Iterator[tuple[str, ast.Module]]:
    """(path, syntax tree) of all code, without documentation strings."""
    for path in (
        ROOT / "vplan.py",
        *(file for room in ("planner", "reports", "trainers") for file in (ROOT / room).rglob("*.py")),
    ):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [
                    line
                    for line in node.body
                    if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                ] or [ast.Pass()]
        yield path.relative_to(ROOT).as_posix(), tree


@functools.cache
def all_sources() -> list[tuple[str, ast.Module]]:
    return list(sources())


def texts(node: ast.AST | None) -> Iterator[str]:
    """The literals of an operand: one text, or those in a tuple, list or set."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for part in node.elts:
            yield from texts(part)


def allowed(path: str, places: dict[str, str]) -> bool:
    return path.startswith(tuple(places))


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every literal that is a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            yield node.lineno, str(node.value)


BEGINNINGS = ("startswith", "removeprefix", "partition", "rpartition", "split")


def comparisons(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every literal that is compared and is a name, a part of one or its beginning."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Compare):
            found = [text for side in (node.left, *node.comparators) for text in texts(side)]
            found = [text for text in found if text in EITHER]
        elif isinstance(node, ast.match_case):
            found = [text for part in ast.walk(node.pattern) for text in texts(part) if text in EITHER]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BEGINNINGS:
            given = [text for argument in node.args for text in texts(argument) if len(text) > 2]
            found = [text for text in given if any(name.startswith(text) for name in NAMES)]
        yield from ((node.lineno, text) for text in found if hasattr(node, "lineno"))


@functools.cache
def all_literals() -> list[tuple[str, int, str]]:
    return [(path, line, text) for path, tree in all_sources() for line, text in literals(tree)]


@functools.cache
def all_comparisons() -> list[tuple[str, int, str]]:
    return [(path, line, text) for path, tree in all_sources() for line, text in comparisons(tree)]


def test_no_literal_is_a_name() -> None:
    assert [found for found in all_literals() if not allowed(found[0], ALLOWED)] == []


def test_nothing_is_compared_with_a_name() -> None:
    assert [found for found in all_comparisons() if not allowed(found[0], COMPARED)] == []


def test_a_profiles_family_is_read_in_few_places() -> None:
    reading = {
        path
        for path, tree in all_sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "family" and not own_family(node)
    }
    assert reading == set(FAMILY_READ)


def own_family(node: ast.Attribute) -> bool:
    """Whether it is no profile's: what trains a model, and a row's in a table of errors."""
    return isinstance(node.value, ast.Name) and node.value.id in (
        "self",
        "training",
        "work",
        "entry",
        "families",
        "runs",
    )


def test_every_place_that_may_does() -> None:
    for place in ALLOWED:
        assert any(path.startswith(place) for path, _, _ in all_literals()), place
    for place in COMPARED:
        assert any(path.startswith(place) for path, _, _ in all_comparisons()), place


def test_a_planted_fault_is_found() -> None:
    planted = ast.parse(
        'if model.family in ("wan", "flux"): pass\n'
        'if model.name.startswith("cogvideo"): pass\n'
        'if "i2v" in model.name: pass\n'
        'SIZES = {"AutoencoderKLWan": 3}\n'
    )
    assert [text for _, text in comparisons(planted)] == ["wan", "flux", "cogvideo", "i2v"]
    assert {text for _, text in literals(planted)} == {"wan", "flux", "AutoencoderKLWan"}
