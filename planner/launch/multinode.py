"""Multi-node training: how the launchers on several computers coordinate through the output folder that they share.

The first node publishes each attempt, the others read it, and every node reports how its own ranks ended. A launcher
increments a counter in a file while it is alive. When one stops or reports a failure, the attempt ends on all nodes:
ranks that wait for a dead node would otherwise wait for torch's timeout (10 minutes under NCCL, 30 under gloo).

Each call uses a new subfolder, so files that an earlier call left are never mistaken for current ones.
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
"""A node without a heartbeat for this long counts as gone, so that all others end within a minute."""
WORST = ("refused", "oom", "host-oom", "nan", "gone", "crash", "stopped")
"""Outcomes, the most informative about the cause first: an error in one rank makes the others crash."""


class ElsewhereError(Exception):
    """Another computer's part of an attempt has failed; `outcome` is what it reported."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


class Pulse:
    """Watches whether another computer's counter still advances. Timed by our own clock, as theirs may be wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = self._read()
        self._since = time.monotonic()
        self.beats = 0

    def look(self) -> float:
        """Seconds since the counter was last seen to change, or since it was first read."""
        now = self._read()
        if now and now != self._last:  # an old folder that is being removed is no heartbeat
            self._last, self._since = now, time.monotonic()
            self.beats += 1
        return time.monotonic() - self._since

    def _read(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return self.path.read_text(encoding="ascii", errors="replace")
        return ""


class Peers:
    """This computer's link to the other nodes, from before the first attempt to the end of the run."""

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
        """Waits for the folder of the first computer's current call: one whose counter advances while we watch."""
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
        """Increments the counter in place: over NFS a replaced file may become visible late."""
        count = 0
        with contextlib.suppress(FileNotFoundError), self._pulse(self.rank).open("w", encoding="ascii") as file:
            while True:
                count += 1
                file.seek(0)
                file.write(f"{count:012d}")
                file.flush()
                if self._stopped.wait(BEAT_SECONDS):
                    return

    # ---- attempts

    def publish(self, attempt: int, request: RunRequest) -> None:
        """Writes the request that all computers run as this attempt; called on the first one."""
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
        """The message with which the first computer ended the run; empty when there is none."""
        return str(read_json(self.folder / END).get("message", ""))

    # ---- outcomes

    def run(self, attempt: int, request: RunRequest, nodes: Nodes, tick: Callable[[], None]) -> Outcome:
        """Runs one attempt until our ranks end or another computer's fail; returns the joint outcome of all nodes."""

        def both() -> None:
            tick()
            self.watch(attempt)

        try:
            own = run(request, nodes, both)
        except ElsewhereError as error:  # our ranks were ended; they may have reported the cause before
            own = outcome(run_folder(Path(request.output), nodes), Ended(None))
            if own.name in ("ok", "crash"):
                own = error.outcome if error.outcome.name == "gone" else Outcome("ended")
        return self.joint_outcome(attempt, own)

    def watch(self, attempt: int) -> None:
        """Raises an ElsewhereError when another computer has failed or gone silent; cheap enough for every tick."""
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
        """Reports how this computer's ranks ended, and returns the most informative outcome of all nodes (`WORST`).

        If nodes crashed, all their messages are quoted: most only saw that another node was gone.
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
