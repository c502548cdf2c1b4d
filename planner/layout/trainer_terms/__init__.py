"""How other trainers hold memory where they differ from ours: one file a trainer, each a tuple of terms on a Run.

A file's ``TERMS`` are applied after our own transformations and ``encoders_whole``, in order, when a plan names that
trainer. Its ``BY_VERSION`` has what comes behind them where a plan names ``trainer@version``: an older version that
measurements are of, another script of the trainer, or a setting that no field of a plan says. Its ``FIRST`` come before
ours, which look at what they set. ``CHANGES_SAMPLES = True`` says that terms change what is allocated inside a sample's
denoising or decode. A trainer without a file here is priced like ours.
"""

from __future__ import annotations

import importlib

from planner.layout.run import Transform
from planner.layout.trainer_terms.shared import encoders_whole

NAMES = (
    "ai-toolkit",
    "cogvideo",
    "diffsynth",
    "diffusers",
    "diffusion-pipe",
    "easyanimate",
    "latentsync",
    "ltx-trainer",
    "musubi-tuner",
    "nemo",
    "onetrainer",
    "sd-scripts",
    "simpletuner",
    "videox-fun",
)
"""Trainers with a file here."""


def terms(trainer: str) -> tuple[Transform, ...]:
    """The memory terms of a trainer as it is today or, written ``trainer@version``, as that version was."""
    name, _, version = trainer.partition("@")
    if name not in NAMES:
        return ()
    today: tuple[Transform, ...] = importlib.import_module(_module_of(name)).TERMS
    return (encoders_whole, *today, *versions(name).get(version, ()))


def first_terms(trainer: str) -> tuple[Transform, ...]:
    """The terms of a trainer that our own transformations look at, and that are applied before them."""
    name = trainer.partition("@")[0]
    if name not in NAMES:
        return ()
    first: tuple[Transform, ...] = getattr(importlib.import_module(_module_of(name)), "FIRST", ())
    return first


def change_samples(trainer: str) -> bool:
    """Whether a trainer's terms change what is allocated inside the denoising or the decode of a sample."""
    name = trainer.partition("@")[0]
    return name in NAMES and getattr(importlib.import_module(_module_of(name)), "CHANGES_SAMPLES", False)


def _module_of(name: str) -> str:
    return f"{__name__}.{name.replace('-', '_')}"


def versions(name: str) -> dict[str, tuple[Transform, ...]]:
    """What comes behind a trainer's terms, by version; empty for a trainer that has no versions."""
    if name not in NAMES:
        return {}
    module = importlib.import_module(_module_of(name))
    more: dict[str, tuple[Transform, ...]] = getattr(module, "BY_VERSION", {})
    return more
