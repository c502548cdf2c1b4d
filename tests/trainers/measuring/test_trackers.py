"""What a run tells trackers: a tracker that fails is no end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from trainers.measuring.trackers import Trackers


class ServiceError(Exception):
    """As wandb's and comet's own errors: of no built-in kind."""


class Service(GeneralTracker):
    """A tracker that takes so many calls, and then its service is gone."""

    name, requires_logging_directory = "service", False

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.seen = calls, list[Any]()

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self._count({"step": step, **values})

    def finish(self) -> None:
        self._count("finish")

    def _count(self, seen: Any) -> None:
        if len(self.seen) == self.calls:
            raise ServiceError("402 payment required")
        self.seen.append(seen)


def tracked(service: Service) -> list[dict[str, Any]]:
    """Three steps and the end, told to a service; what the run was told of it."""
    accelerator = Accelerator(cpu=True, log_with=service)
    accelerator.init_trackers("vplan")
    told: list[dict[str, Any]] = []
    trackers = Trackers(accelerator, lambda **facts: told.append(facts))
    for step in (1, 2, 3):
        trackers.log({"loss": 0.5, "shapes": [[1, 2]], "experts": "high"}, step)
    trackers.samples(3, [Path("a.png")], ["a cat"])  # of a tracker that shows no pictures: nothing
    trackers.end()
    return told


def test_numbers_and_words_are_logged_and_the_end_is_told() -> None:
    service = Service(10)
    assert not tracked(service)
    assert service.seen == [*({"step": step, "loss": 0.5, "experts": "high"} for step in (1, 2, 3)), "finish"]


@pytest.mark.parametrize(("calls", "where"), [(1, "step 2"), (3, "the end")])
def test_a_service_that_fails_is_left_out_and_said_once(calls: int, where: str) -> None:
    service = Service(calls)
    assert tracked(service) == [{"tracker_fault": f"tracking ended at {where}: ServiceError: 402 payment required"}]
    assert len(service.seen) == calls
