"""A record's hash is kept with it, and is that of its fields, however it came about."""

from __future__ import annotations

import copy
import pickle

from planner.spec.job import Machine, Strategy


def test_equal_records_have_equal_hashes() -> None:
    one = Strategy.read({"swap_blocks": 3})
    before = hash(one)
    others = (Strategy().replace(swap_blocks=3), copy.copy(one), pickle.loads(pickle.dumps(one)))
    assert all(other == one and hash(other) == before == hash(one) for other in others)
    assert hash(one.model_copy(update={"swap_blocks": 4})) == hash(Strategy().replace(swap_blocks=4)) != before
    assert hash(Machine(gpu="24GB")) != hash(Machine(gpu="12GB"))
