"""Training and probing on several CPU ranks: what one rank runs, and how tests start it."""

from __future__ import annotations

import functools
from typing import Any

from tests.contract import ranks
from tests.trainers import runs

Told = dict[str, Any]


def train(request: dict[str, Any], world: int = ranks.WORLD) -> list[Told]:
    """Runs a training request on new ranks; returns what each told."""
    launched = world > 1 or request["plan"]["strategy"]["sharding"] != "none"
    return ranks.run(functools.partial(_train, request), world, launched)


def probe(folder: str, world: int = ranks.WORLD) -> list[Told]:
    """Runs the probe's worker on the request in a folder, on new ranks; returns the exit code of each."""
    return ranks.run(functools.partial(_probe, folder), world)


def _train(request: dict[str, Any]) -> Told:
    from planner.launch.launch import RunRequest

    return runs.train(RunRequest.read(request))


def _probe(folder: str) -> Told:
    from trainers import probe

    probe.end_with_parent = lambda: None  # nobody holds the other end of a test's standard input
    return {"code": probe.main([folder])}
