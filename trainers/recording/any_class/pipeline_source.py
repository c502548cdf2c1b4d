"""Facts about a model class from diffusers' pipelines, read from their source as syntax trees, never imported or run.

A pipeline's `__init__` has the classes of its parts and the factors by which its VAE shrinks a clip. Its `__call__` has
the default size, length and number of text tokens, and shows which arguments the model is called with, and when.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from planner.catalog.diffusers_folder import DENOISERS

PARTS = (*DENOISERS, "prior", "decoder")
"""Prefixes of the component that is trained, in pipelines."""


class PipelineFacts(NamedTuple):
    """The facts in one pipeline's source, as far as it can be read without running it."""

    name: str
    part: str
    """the name of the model's component"""
    parts: Mapping[str, str]
    """other components -> the classes in their annotations"""
    constants: Mapping[str, int]
    """attributes such as `vae_scale_factor` that `__init__` sets, with the fallback for a missing component"""
    defaults: Mapping[str, Any]
    """arguments of `__call__` that have a constant default"""
    passed: Mapping[str, str]
    """arguments that the model is called with -> the config key that must be set for it; "" if none is needed"""
    folds: bool
    """whether the model has four times the VAE's channels: a token holds 2x2 latents"""

    @property
    def predicts_velocity(self) -> bool:
        """Whether its scheduler is for flow matching."""
        return "Flow" in self.parts.get("scheduler", "")


@functools.cache
def _sources() -> tuple[tuple[Path, str], ...]:
    spec = importlib.util.find_spec("diffusers")
    assert spec is not None and spec.origin
    paths = sorted((Path(spec.origin).parent / "pipelines").glob("**/*pipeline*.py"))
    return tuple((path, path.read_text(encoding="utf-8")) for path in paths)


def pipelines_of(class_name: str) -> list[PipelineFacts]:
    """The pipelines with a component of a class, the most basic first.

    Preferred are pipelines for plain generation, not deprecated, with a VAE, and with a number of frames if the class
    name is that of a video model; then those in the folder with most plain ones; then the one named like its folder;
    then the one with the shortest name.
    """
    found: list[tuple[Path, PipelineFacts]] = []
    for path, text in _sources():
        if class_name in text:
            classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
            found += [(path.parent, facts) for node in classes if (facts := _facts(node, class_name))]
    plain = Counter(folder for folder, facts in found if not _special(facts.name))

    def order(entry: tuple[Path, PipelineFacts]) -> tuple[Any, ...]:
        folder, facts = entry
        no_length = is_video_class(class_name) and "num_frames" not in facts.defaults
        other = facts.name.lower() != f"{folder.name.replace('_', '')}pipeline"
        unusual = (_special(facts.name), folder.parent.name == "deprecated", "vae" not in facts.parts, no_length)
        return (*unusual, -plain[folder], other, len(facts.name), facts.name)

    return [facts for _, facts in sorted(found, key=order)]


def is_video_class(class_name: str) -> bool:
    """Whether the name of a class suggests that it takes several frames."""
    return bool(re.search(r"3D|Video|Motion|SpatioTemporal", class_name))


SPECIAL = ("Inpaint", "Img2Img", "Control", "Edit", "Fill", "Upscale", "Upsample", "Image2Image", "KV", "Redux")


def _special(name: str) -> bool:
    """Whether a pipeline is for something else than plain generation."""
    return any(word in name for word in SPECIAL)


def _facts(node: ast.ClassDef, class_name: str) -> PipelineFacts | None:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    init, call = methods.get("__init__"), methods.get("__call__")
    if init is None or call is None:
        return None
    arguments = [*init.args.args, *init.args.kwonlyargs]
    annotations = {item.arg: ast.unparse(item.annotation) for item in arguments if item.annotation is not None}
    part = next((name for name in annotations if class_name in _words(annotations[name])), None)
    if part is None or not part.startswith(PARTS):
        return None
    source = "\n".join(ast.unparse(item) for item in node.body if isinstance(item, ast.FunctionDef))
    return PipelineFacts(
        name=node.name,
        part=part,
        parts={name: text for name, text in annotations.items() if name != part},
        constants=dict(_constants(init)),
        defaults=dict(_defaults(call)),
        passed=_passed(call, part),
        folds=bool(re.search(r"config\.in_channels // 4\b", source)),
    )


def _words(annotation: str) -> list[str]:
    return annotation.replace("|", " ").replace("[", " ").replace("]", " ").replace(",", " ").replace("'", " ").split()


def _constants(init: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    for statement in ast.walk(init):
        if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute)):
            continue
        value = statement.value
        if isinstance(value, ast.IfExp):  # `... if getattr(self, "vae", None) else 8`
            value = value.orelse
        if isinstance(value, ast.Constant) and type(value.value) is int:
            yield statement.targets[0].attr, value.value


def _defaults(call: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    arguments = call.args.args
    for argument, default in zip(
        arguments[len(arguments) - len(call.args.defaults) :], call.args.defaults, strict=True
    ):
        if isinstance(default, ast.Constant):
            yield argument.arg, default.value


def _passed(call: ast.FunctionDef, part: str) -> dict[str, str]:
    """The keyword arguments of the first call of the model, with the config key that each depends on."""
    for node in ast.walk(call):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (f"self.{part}", part):
            pairs = ((item.arg, item.value) for item in node.keywords if item.arg)
            keys = {name: _key_of(call, value, part) for name, value in pairs if not _is_none(value)}
            if keys:
                return keys
    return {}


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _key_of(call: ast.FunctionDef, value: ast.expr, part: str) -> str:
    """The config key that decides whether a variable is set, from its assignments; "" if there is none."""
    if not isinstance(value, ast.Name):
        return _config_key(value.test, part) if isinstance(value, ast.IfExp) else ""
    tests: list[ast.expr] = []
    for node in ast.walk(call):
        if isinstance(node, ast.If) and any(_assigns(item, value.id) for item in node.body):
            tests.append(node.test)
        if isinstance(node, ast.Assign) and _assigns(node, value.id) and isinstance(node.value, ast.IfExp):
            tests.append(node.value.test)
    return next((key for test in tests if (key := _config_key(test, part))), "")


def _assigns(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == name for target in node.targets
    )


def _config_key(test: ast.expr, part: str) -> str:
    """The key of `self.transformer.config.KEY` in a condition."""
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (f"self.{part}.config", f"{part}.config"):
            return node.attr
    return ""
