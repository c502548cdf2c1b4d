"""Bindings that many dialects have, and what others are made of: our defaults, names of models, tables of words."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.catalog import lookup
from planner.dialects.base.bindings import Choice, Fixed, InexpressibleError, Settings, UnsupportedValue, Value
from planner.errors import VplanError, did_you_mean, nearest, quoted
from planner.spec.job import Job, Strategy

GPUS = Value("gpus", "gpus", 1, int)
NODES = Value("nodes", "nodes", 1, int)
EXPANDABLE = Choice("expandable_segments", {False: {}, True: {"env:expandable_segments": True}})
"""torch.cuda: off unless PYTORCH_CUDA_ALLOC_CONF asks for it."""


def our_defaults(*fields: str, why: str = "") -> list[Fixed]:
    """Bindings for fields that a trainer has no setting for and leaves at our defaults."""
    bindings = []
    for field in fields:
        if field == "references":  # how many a model takes; the data has them
            bindings.append(Fixed(field, None, why))
            continue
        record = Job if field in Job.model_fields else Strategy
        bindings.append(Fixed(field, record.model_fields[field].get_default(), why))
    return bindings


@functools.cache
def _known_models() -> dict[str, str]:
    """Last part of every name and alias, in lower case -> our name; of other weights of a model's shape too."""
    models = [lookup.model(name) for name in lookup.model_names()]
    names = {alike: model.name for model in models for alike in model.traits.same_shape}
    for model in models:
        for alias in (model.name, *model.aliases):
            names.setdefault(alias.lower().rpartition("/")[2], model.name)
    for model in models:
        for alike in () if model.is_own else model.traits.distilled:
            names.setdefault(alike, model.name)
    return names


def find_model(*texts: object) -> str | None:
    """The model whose name or alias occurs in one of these paths, repository ids or file names; the longest match wins.
    None when there is none."""
    for text in texts:
        parts = re.split(r"[\\/:,;\"'\[\]\s*]+", str(text or "").lower())
        stems = [stem for part in parts for stem in (part, re.sub(r"\.(safetensors|ckpt|pth|pt|gguf)$", "", part))]
        matches = [stem for stem in stems if stem in _known_models()]
        if matches:
            return _known_models()[max(matches, key=len)]
    return None


FORMAT_WORDS = r"(?:-(?:bf16|fp16|fp32|fp8|e4m3fn|e5m2|scaled|mixed|fp8mixed|fp8scaled))+$"
"""What stands behind a model's name in the files of ComfyUI and others (qwen_image_edit_fp8_e4m3fn.safetensors)."""


def find_checkpoint(path: object) -> str | None:
    """The model whose name or alias a file has, whatever parts its words, and with a number format behind it."""
    stem = re.split(r"[\\/]", str(path or "").lower())[-1]
    words = re.sub(r"[-_. ]+", "-", re.sub(r"\.(safetensors|ckpt|pth|pt|gguf)$", "", stem))
    return _known_files().get(re.sub(FORMAT_WORDS, "", words))


@functools.cache
def _known_files() -> dict[str, str]:
    """`_known_models`, with one mark between words."""
    return {re.sub(r"[-_. ]+", "-", name): model for name, model in _known_models().items()}


def require_model(settings: Settings, *names: str, known: Sequence[str] = ()) -> str:
    """The model that the settings `names` give, or `model` where it is set. Raises a VplanError when none of them names
    a known one. ``known``: all that the trainer is priced with, where they are few."""
    if "model" in settings:  # said to us, because the command does not tell
        return str(settings["model"])
    model = find_model(*(settings.get(name) for name in names))
    if model is None:
        typed = {name: name.removeprefix("config:") for name in names}
        values = ", ".join(f"{typed[name]} {quoted(settings[name])}" for name in names if settings.get(name))
        fault = f"cannot tell the model from {values or ' or '.join(typed.values())}"
        if known:
            raise VplanError(fault, f"add --model {' or --model '.join(known)}: no other is priced with this trainer")
        stem = str(next((settings[name] for name in names if settings.get(name)), "")).partition(":")[0]
        close = nearest(stem.rpartition("/")[2], lookup.model_names())
        like = f", as {' or '.join(close)} if it has that shape" if close else " (`vplan models` lists them)"
        raise VplanError(fault, f"add --model NAME{like}")
    return model


def one_of(table: Mapping[str, Any], setting: str) -> Callable[[Any], Any]:
    """A reader for a setting whose values are words, in any case. It raises a VplanError that names the nearest
    word."""
    lower = {key.lower(): value for key, value in table.items()}

    def read(value: Any) -> Any:
        text = str(value).lower()
        if text not in lower:
            fix = did_you_mean(text, lower, "we know " + ", ".join(table))
            raise VplanError(f"{setting} {quoted(value)} is not known", fix)
        return lower[text]

    return read


def word_for(table: Mapping[str, Any], field: str, instead: Any, why: str = "it has no setting for that") -> Any:
    """A writer that gives the first word of the table for a value. It raises an InexpressibleError, with `instead`, for
    a value that is not in it."""
    words: dict[Any, str] = {}
    for word, value in table.items():
        words.setdefault(value, word)

    def write(value: Any) -> str:
        if value not in words:
            raise InexpressibleError(UnsupportedValue(field, value, instead, why))
        return words[value]

    return write
