"""What the tables say that training takes is what its families can encode."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import profiles
from planner.catalog import lookup
from trainers import families


@pytest.mark.parametrize("name", profiles.model_names())
def test_the_tables_say_what_cannot_be_encoded(name: str) -> None:
    profile = lookup.model(name)
    family = families.family(profile)
    encodes = bool(family.clip_turns()) and (bool(family.text_turns()) or not family.captioned)
    reads = profile.shape.references <= int(family.reads_reference)
    assert (profile.train_data == "files") is (encodes and reads)
