"""Kills of `vplan train` at random moments lose no finished checkpoint and change no loss.

    python -m tests.benchmarks.kills.while_training [KILLS]

Trains a tiny Wan, a LoRA and then in full, with a checkpoint after every second step of which two are kept. The
command or its worker is killed by turns at any moment, while a checkpoint is written, while an old one is pruned or
removed, and while the finished weights are written. After each kill the newest checkpoint must be whole and no older
than before, and the same command goes on. In the end losses and weights are those of a run nobody killed, bit by bit.
Needs vplan[train]; a quarter of a minute a kill.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

EVERY, KEEP = 2, 2
STEPS_BETWEEN = 12
"""About as many as a process gets through before it is killed."""
MOMENTS = {"any": 0.03, "writing": 0.01, "removing": 0.003}
"""What a kill is aimed at, and within how many seconds behind its beginning it comes."""


def main(kills: int) -> None:
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"VPLAN_HOME": str(Path(name) / "home"), "OMP_NUM_THREADS": "1"}
        from tests.trainers import runs

        place = runs.Place(Path(name), "wan")
        for method in ("lora", "full"):
            Trial(place, method, kills // 2).run()


class Trial:
    """One run that is killed so often, beside one that is not."""

    def __init__(self, place: Any, method: str, kills: int) -> None:
        from planner.spec.plan import write_plan

        self.method, self.kills = method, kills
        self.root = Path(place.root) / method
        self.root.mkdir()
        write_plan(place.plan(method=method), self.root / "plan.toml")
        self.steps = (kills + 2) * STEPS_BETWEEN
        self.data, self.output, self.alone = place.root / "data", self.root / "killed", self.root / "alone"
        self.found: Counter[str] = Counter()

    def words(self, output: Path) -> list[str]:
        plan, rate = str(self.root / "plan.toml"), "1e-2" if self.method == "lora" else "1e-4"
        typed = {"--data": self.data, "--output": output, "--device": "cpu", "--steps": self.steps}
        typed |= {"--checkpoint-every": EVERY, "--keep-checkpoints": KEEP, "--learning-rate": rate}
        return ["train", plan, *(str(word) for pair in typed.items() for word in pair)]

    def run(self) -> None:
        """Kills it, goes on to the end, kills what writes the finished weights, and compares."""
        from planner.launch import checkpoints
        from tests.benchmarks.kills.killing import ended, killed
        from tests.trainers import runs

        before = 0
        for number in range(self.kills):
            aim = list(MOMENTS)[number % len(MOMENTS)]
            victim = killed(self.words(self.output), self.moment(aim), MOMENTS[aim])
            assert victim, "it came to its end: there are too few steps"
            self.found[victim] += 1
            before = self.look(before)
        ended(self.words(self.output))
        for _ in range(max(1, self.kills // 8)):
            shutil.rmtree(self.output / "final", ignore_errors=True)
            at = (self.output / ".partial-final").is_dir
            self.found["while the finished weights were written"] += bool(killed(self.words(self.output), at, 0.01))
            self.look(self.steps)
        ended(self.words(self.output))
        ended(self.words(self.alone))
        assert runs.losses(self.output) == runs.losses(self.alone) and len(runs.losses(self.alone)) == self.steps
        wanted, found = (runs.tensors(folder / "final") for folder in (self.alone, self.output))
        import torch

        assert wanted.keys() == found.keys() and all(torch.equal(found[key], one) for key, one in wanted.items())
        whole, faults = checkpoints.newest(self.output, checkpoints.run_id(self.output))
        assert whole is not None and checkpoints.step_of(whole) == self.steps and not faults
        print(f"{self.method}: {dict(self.found)}")
        print(f"no finished checkpoint was lost; {self.steps} losses and the weights are those of a run nobody killed")

    def moment(self, aim: str) -> Any:
        """Whether what a kill is aimed at has begun, since now."""
        folder = self.output / "checkpoints"
        steps, left, names = self.lines() + random.randint(0, STEPS_BETWEEN), self.partial(), self.names()

        def begun() -> bool:
            if aim == "writing":
                return bool(self.partial() - left)
            if aim == "removing":  # behind the renaming of a third one
                return bool(self.names() - names) and len(list(folder.glob("step-*"))) > KEEP
            return self.lines() >= steps

        return begun

    def names(self) -> set[str]:
        return {path.name for path in (self.output / "checkpoints").glob("step-*")}

    def partial(self) -> set[int]:
        """What is half written, by the time of its change."""
        times = set()
        for path in (self.output / "checkpoints").glob(".partial-*"):
            with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                times.add(path.stat().st_ctime_ns)
        return times

    def lines(self) -> int:
        path = self.output / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def look(self, before: int) -> int:
        """The steps of the newest checkpoint: whole, no older than before, and at most those between two more are gone;
        counts what the kill left half done."""
        from planner.launch import checkpoints

        folder = self.output / "checkpoints"
        newest, faults = checkpoints.newest(self.output, checkpoints.run_id(self.output))
        steps = checkpoints.step_of(newest) if newest else 0
        assert not faults and steps >= before, (faults, steps, before)
        assert self.lines() - steps <= 2 * EVERY, "a finished checkpoint is gone"  # one may be on its way, in a thread
        pruned = [path for path in folder.glob("step-*") if checkpoints.read_manifest(path).get(checkpoints.PRUNED)]
        half = [path for path in pruned if any(path.rglob("rank-*"))]
        kept = [path for path in folder.glob("step-*") if path not in pruned]
        self.found["in the middle of a checkpoint"] += bool(list(folder.glob(".partial-*")))
        self.found["while old ones were removed"] += bool(half or len(kept) > KEEP or list(folder.glob(".removed-*")))
        return steps


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 48)
