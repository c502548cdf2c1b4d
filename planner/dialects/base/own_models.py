"""Notes on models that a trainer builds or feeds in a way of its own, and that are priced as diffusers' all the
same."""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields

SHORT_PROMPT = 64
"""Tokens of a short caption, at which the low end is priced of a trainer that does not fill prompts up."""


def own_model_notes(trainer: str, fields: Fields) -> Iterator[str]:
    """What is to be said of a trainer's own code of a model; nothing where it trains diffusers', or its own is
    priced."""
    model = lookup.model(fields["model"])
    if model.trained_with(trainer, "own-model"):
        yield f"its own code of {model.title} is priced as diffusers': no run of it was compared"
