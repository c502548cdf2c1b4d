"""Several computers that train together: how their launchers agree, through the output folder that all of them share.

The first one says what is tried, the others take it from there, and each tells how its own ranks ended. While it lives
a launcher counts up in a file. One that stops, or tells of a failure, ends the attempt on all of them: ranks that wait
for a computer that is gone would wait for torch's time limit (10 minutes under NCCL, 30 under gloo).

Files of one call lie in a folder of their own, so nothing an earlier one left is taken for news.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from planner.errors import VplanError
from planner.launch.launch import Nodes, Outcome, RunRequest, outcome, run, run_folder
from planner.worker_process import Ended, read_json, write_json

FOLDER, CURRENT, END = "nodes", "current.json", "end.json"
BEAT_SECONDS = 2.0
LOOK_SECONDS = 1.0
SILENT_SECONDS = 45.0
"""Without a sign of life a computer is gone: all others end within a minute."""
WORST = ("refused", "oom", "host-oom", "nan", "gone", "crash", "stopped")
"""Outcomes by how much they say of the cause: what one rank ran into makes the others crash."""


class ElsewhereError(Exception):
    """Another computer's part of an attempt has failed; `outcome` is what it told."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


class Pulse:
    """Watches whether another computer's counter still advances, by our own clock: theirs may be wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = self._read()
        self._since = time.monotonic()
        self.beats = 0

    def look(self) -> float:
        """Seconds since it was last seen to change, or since we first looked."""
        now = self._read()
        if now and now != self._last:  # a folder of before that is being removed is no sign of life
            self._last, self._since = now, time.monotonic()
            self.beats += 1
        return time.monotonic() - self._since

    def _read(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.path.read_text(encoding="ascii", errors="replace")
        return ""


class Peers:
    """This computer among the others, from before the first attempt to the end."""

    def __init__(self, output: Path, rank: int, count: int) -> None:
        self.root, self.rank, self.count = output / FOLDER, rank, count
        self.folder = self.root
        self._pulses: dict[int, Pulse] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="vplan-peers", daemon=True)
        self._looked = 0.0

    def __enter__(self) -> Self:
        if self.rank == 0:
            shutil.rmtree(self.root, ignore_errors=True)
            name = secrets.token_hex(8)
            self.folder = self.root / name
            self.folder.mkdir(parents=True)
            write_json(self.root / CURRENT, {"name": name})
        else:
            self.folder = self._join()
        self._thread.start()
        self._pulses = {rank: Pulse(self._pulse(rank)) for rank in range(self.count) if rank != self.rank}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if self.rank == 0 and self.folder.is_dir():
            reason = value.message if isinstance(value, VplanError) else "" if value is None else "it was stopped"
            write_json(self.folder / END, {"message": reason})

    def _join(self) -> Path:
        """The folder of the first computer's present call: one whose count goes on while we look."""
        pulses: dict[str, Pulse] = {}
        while True:
            name = str(read_json(self.root / CURRENT).get("name", ""))
            if name.isalnum():
                pulse = pulses.setdefault(name, Pulse(self.root / name / "pulse-0"))
                pulse.look()
                if pulse.beats:
                    return self.root / name
            time.sleep(LOOK_SECONDS / 2)

    def _pulse(self, rank: int) -> Path:
        return self.folder / f"pulse-{rank}"

    def _beat(self) -> None:
        """Counts up in place: a file that is replaced may be seen late over NFS."""
        count = 0
        with contextlib.suppress(FileNotFoundError), self._pulse(self.rank).open("w", encoding="ascii") as file:
            while True:
                count += 1
                file.seek(0)
                file.write(f"{count:012d}")
                file.flush()
                if self._stopped.wait(BEAT_SECONDS):
                    return

    # ---- what is tried

    def publish(self, attempt: int, request: RunRequest) -> None:
        """Writes, on the first computer, the request that all computers run as this attempt."""
        write_json(self.folder / f"attempt-{attempt}.json", request.to_json())

    def request(self, attempt: int) -> RunRequest | None:
        """Waits for the request that the first computer published for this attempt; None when it has ended the run.
        Raises a VplanError when it stops responding."""
        path = self.folder / f"attempt-{attempt}.json"
        while not path.exists():
            if (self.folder / END).exists():
                return None
            if self._pulses[0].look() > SILENT_SECONDS:
                raise VplanError("the first node stopped responding", "run the command again on all nodes", 4)
            time.sleep(LOOK_SECONDS / 2)
        return RunRequest.read(read_json(path), path.name)

    def end_message(self) -> str:
        """Why the first computer ended the run, in words; empty when it does not say."""
        return str(read_json(self.folder / END).get("message", ""))

    # ---- how it ended

    def run(self, attempt: int, request: RunRequest, nodes: Nodes, tick: Callable[[], None]) -> Outcome:
        """One attempt: our ranks to their end, or until another computer's fail; returns how it ended for all."""

        def both() -> None:
            tick()
            self.watch(attempt)

        try:
            own = run(request, nodes, both)
        except ElsewhereError as error:  # ours have been ended; they may have told the cause before
            own = outcome(run_folder(Path(request.output), nodes), Ended(None))
            if own.name in ("ok", "crash"):
                own = error.outcome if error.outcome.name == "gone" else Outcome("ended")
        return self.joint_outcome(attempt, own)

    def watch(self, attempt: int) -> None:
        """Raises an ElsewhereError when another computer has failed or fallen silent; cheap enough for every tick."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for rank, pulse in self._pulses.items():
            result = self._told(rank, attempt)
            if result and result.name not in ("ok", "stopped"):
                raise ElsewhereError(result)
            silent = pulse.look()
            if not result and pulse.beats and silent > SILENT_SECONDS:
                raise ElsewhereError(_gone(rank))

    def joint_outcome(self, attempt: int, own: Outcome) -> Outcome:
        """Tells how this computer's ranks ended, and returns how all did: what says most of the cause.

        Ranks that crashed, each on its computer, are all quoted: most only saw that another was gone.
        """
        write_json(self._result(self.rank, attempt), own._asdict())
        outcomes = {self.rank: own, **self._others(attempt)}
        failed = [one for name in WORST for one in outcomes.values() if one.name == name]
        if not failed or failed[0].name != "crash":
            return failed[0] if failed else own
        each = {f"node {rank}: {one.message}" for rank, one in sorted(outcomes.items()) if one.name == "crash"}
        return failed[0]._replace(message="; ".join(sorted(each)))

    def _others(self, attempt: int) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        for rank, pulse in self._pulses.items():
            while not (result := self._told(rank, attempt)):
                if pulse.look() > SILENT_SECONDS:
                    result = _gone(rank)
                    break
                time.sleep(LOOK_SECONDS / 4)
            outcomes[rank] = result
        return outcomes

    def _result(self, rank: int, attempt: int) -> Path:
        return self.folder / f"outcome-{rank}-{attempt}.json"

    def _told(self, rank: int, attempt: int) -> Outcome | None:
        result: dict[str, Any] = read_json(self._result(rank, attempt))
        return Outcome(**result) if result else None


def _gone(rank: int) -> Outcome:
    message = f"node {rank} stopped responding, and the ranks of the others were stopped"
    return Outcome("gone", message, "check what happened to it, and run the command again on all nodes", 4)
