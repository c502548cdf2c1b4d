"""Logs a run to accelerate's trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class Trackers:
    """The trackers of a run. If one fails, tracking ends but the run continues: its own files have all numbers."""

    def __init__(self, accelerator: Any, tell: Callable[..., None]) -> None:
        """``accelerator``: accelerate's, with initialised trackers. ``tell``: called with the reason if tracking ends
        early (``tracker_fault``)."""
        self._accelerator, self._tell = accelerator, tell
        self._failed = False

    def log(self, line: dict[str, Any], step: int) -> None:
        """Logs the numbers and strings of a step's line."""
        values = {name: value for name, value in line.items() if isinstance(value, (int, float, str))}
        self._call(f"step {step}", lambda: self._accelerator.log(values, step=step))

    def samples(self, step: int, files: Sequence[Path], prompts: Sequence[str]) -> None:
        """Logs the samples made after a step."""
        from trainers.sampling.sample_tracking import track_samples

        self._call(f"step {step}", lambda: track_samples(self._accelerator.trackers, step, files, prompts))

    def end(self) -> None:
        """Finishes the trackers, which flushes their data, and leaves the process group."""
        for tracker in self._accelerator.trackers:
            self._call("the end", tracker.finish)
        self._accelerator.trackers.clear()
        self._accelerator.end_training()

    def _call(self, where: str, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 -- services in the network, each with errors of its own kind
            self._failed = True
            self._tell(tracker_fault=f"tracking ended at {where}: {type(error).__name__}: {str(error)[:300]}")
