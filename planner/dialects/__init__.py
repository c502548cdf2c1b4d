"""Other trainers: how each holds memory where it differs from ours. Reading and writing their commands comes here too.

A dialect's memory terms are functions on a Run, applied after our own transformations when the plan names that trainer.
"""

from __future__ import annotations

import importlib

from planner.run import Term

TRAINERS = ("diffusers",)
"""Trainers with terms of their own; every other name is priced like ours."""


def terms(trainer: str) -> tuple[Term, ...]:
    """The memory terms of a trainer."""
    if trainer not in TRAINERS:
        return ()
    found: tuple[Term, ...] = importlib.import_module(f"planner.dialects.{trainer.replace('-', '_')}").TERMS
    return found
