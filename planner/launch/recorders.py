"""The worker processes of `vplan record` (`trainers/record.py`), one or several in parallel. Only they import torch.

Workers are reused, because importing torch and diffusers takes longer than recording a small tape. A worker takes one
order at a time, a line of JSON on its standard input, and answers it in a file in the folder that both share.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from planner.catalog.diffusers_folder import Source
from planner.errors import VplanError
from planner.launch.launch import last_words
from planner.worker_process import end_tree, read_json, result_file, start_worker, vplan_command

TICK_SECONDS = 0.05
"""Polling interval for answers."""

CHECKOUT = "VPLAN_CHECKOUT"
"""Environment variable with the folder of a trainer's code, from which its own model is recorded; or several folders,
separated as in PATH."""

SAME_EACH_TIME = {"PYTHONHASHSEED": "0"}
"""Environment variables that make recordings reproducible. transformers iterates over a set of names
(modeling_gemma3.py and modeling_gemma4_unified.py, ``set(self.config.layer_types)``). Without a fixed hash seed its
order, and with it the order in which a Gemma's two masks are made, would differ between processes."""

PARAMETERS = "parameters"
"""A task's name for the table of a model's parameters, which is next to its tapes."""


class Derivation(NamedTuple):
    """A worker's task: derive the profile of the model in a user's folder. The answer has ``profile`` (JSON) and
    ``notes``."""

    source: Source
    name: str
    """name of the new model"""
    inputs: Mapping[str, Any] = {}
    """what the user said about it (`planner.catalog.own_inputs.OwnInputs` as JSON)"""

    def to_json(self) -> dict[str, Any]:
        """The task as JSON, as the worker reads it."""
        return {"work": "derive", "source": self.source._asdict(), "name": self.name, "inputs": dict(self.inputs)}


class TapeTask(NamedTuple):
    """A worker's task: record one tape and write it to its file, or compare it with the file. The answer has ``nbytes``
    (the file's size), ``difference`` (what differs from the file, by how much its peak is off and where the first
    difference is; "" when nothing differs) and ``unclassified`` (operators that `op_table` does not list)."""

    model: str
    variant: str
    """the variant's name, or `PARAMETERS`"""
    component: str
    """the VAE or text encoder of the model to record; empty: the model itself"""
    path: Path
    check: bool
    """only compares, writes nothing"""

    @property
    def of(self) -> str:
        """What is recorded: the VAE or text encoder, else the model."""
        return self.component or self.model

    def to_json(self) -> dict[str, Any]:
        """The task as JSON, as the worker reads it."""
        return {"work": "record", **self._asdict(), "path": str(self.path)}


Order = Derivation | TapeTask
Within = Callable[[list[str], Path], list[str]]


class Recorders:
    """A pool of at most ``jobs`` recording workers. They and their children are gone when the ``with`` block ends."""

    def __init__(self, jobs: int, within: Within | None = None) -> None:
        """``within``: maps a worker's command, and a folder that it may use, to the command to start instead."""
        self._jobs = jobs
        self._within = within
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="vplan-record-"))
        except OSError as error:
            fault = f"cannot write into {tempfile.gettempdir()}: {error.strerror}"
            raise VplanError(fault, "free some space there, or set TMPDIR to a folder that has some") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            end_tree(worker.process)
        if not any(worker.crashed for worker in self._workers):  # else keep the log that the message names
            shutil.rmtree(self._folder, ignore_errors=True)

    def answers(self, orders: Sequence[Order]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (position in `orders`, answer) in the order in which the answers arrive.

        Raises the VplanError that a worker raised, or one with exit code 4 if a worker died.
        """
        waiting = deque(enumerate(orders))
        while len(self._workers) < min(self._jobs, len(orders)):
            self._workers.append(_Worker(self._folder, len(self._workers), self._within))
        busy: dict[int, _Worker] = {}
        while waiting or busy:
            for worker in self._workers:
                if waiting and worker not in busy.values():
                    position, order = waiting.popleft()
                    worker.send(next(self._numbers), order)
                    busy[position] = worker
            done = {position: answer for position, worker in busy.items() if (answer := worker.answer())}
            for position, answer in done.items():
                del busy[position]
                yield position, answer
            if not done:
                time.sleep(TICK_SECONDS)


class _Worker:
    """One process and its current order."""

    def __init__(self, folder: Path, number: int, within: Within | None) -> None:
        self._folder = folder
        self._log = folder / f"log-{number}.txt"
        self._result: Path
        self.crashed = False
        command = vplan_command("worker", "record", str(folder))
        if within is not None:
            command = within(command, folder / f"within-{number}")
        with self._log.open("wb") as log:
            self.process: subprocess.Popen[bytes] = start_worker(command, log, {**os.environ, **SAME_EACH_TIME})

    def send(self, number: int, order: Order) -> None:
        """Sends an order; the answer will be in the result file with that number."""
        self._result = self._folder / result_file(number)
        assert self.process.stdin
        line = json.dumps({"number": number, **order.to_json()}) + "\n"
        with contextlib.suppress(OSError):  # it is dead, which `answer` reports
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer; empty while the worker is busy. Raises a VplanError if the worker refused the order or died."""
        ended = self.process.poll()  # before looking for the file: it may answer and then die
        answer = read_json(self._result)
        if not answer and ended is not None:
            self.crashed = True
            how = f"signal {-ended}" if ended < 0 else f"exit code {ended}"
            raise VplanError(f"recording ended with {how}: {last_words(self._log)}", f"read {self._log}", 4)
        if answer.get("outcome") == "refused":
            raise VplanError(answer["message"], answer["fix"], answer["exit_code"])
        return answer
