"""Fifty kills at random moments of training and saving lose nothing that was finished.

    python -m tests.benchmarks.kills_while_training [KILLS]

Trains a tiny Wan with a checkpoint after every second step, kills the process at random, by turns at any moment and
while it writes a checkpoint, and a tenth of the times while it writes the finished weights; looks at every checkpoint
it left (each must be whole and as it was), and goes on from the newest as `vplan train` does; then compares losses and
weights with those of a run nobody killed, bit by bit. Needs vplan[train]; two minutes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

EVERY = 2
STEPS_BETWEEN = 25
"""About as many as a process gets through before it is killed; the run is as many times as long."""
SAVING_SECONDS = 0.03
"""Longer than this, a checkpoint of this size is written."""


def main(kills: int) -> None:  # noqa: PLR0915 -- one story, with what it needs
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["VPLAN_HOME"] = str(root / "home")
        import torch

        torch.set_num_threads(1)
        from planner.launch import checkpoints
        from tests.trainers import runs

        place, output = runs.Place(root, "wan"), root / "killed"
        said = {"steps": kills * STEPS_BETWEEN, "checkpoint_every": EVERY, "keep_checkpoints": 10**5}

        def train(folder: Path) -> None:
            newest, _ = checkpoints.newest(folder, checkpoints.run_id(folder))
            told = runs.train(place.request(folder, resume=str(newest) if newest else None, **said))
            assert told["outcome"] == "ok", told

        def finished() -> dict[str, str]:
            """Every checkpoint's manifest, which has the hashes of its files; all are read."""
            found = {}
            for folder in sorted((output / checkpoints.FOLDER).glob("step-*")):
                checkpoints.check(folder, checkpoints.run_id(output))
                found[folder.name] = checkpoints.sha256(folder / checkpoints.MANIFEST)
            return found

        def losses_so_far() -> int:
            path = output / "metrics.jsonl"
            return path.read_text().count("\n") if path.exists() else 0

        def begun(folder: Path) -> set[int]:
            """What is being written in a folder, or was when an earlier process was killed: by time of change."""
            times = set()
            for path in folder.glob(".partial-*"):
                with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                    times.add(path.stat().st_ctime_ns)
            return times

        def killed(written: Path | None) -> bool:
            """Starts training and kills it: a few steps later, or while something is written into a folder, however
            fast the machine is; whether it was alive until then."""
            steps, left = losses_so_far() + random.randint(0, STEPS_BETWEEN), begun(written) if written else set()
            process = multiprocessing.get_context("fork").Process(target=train, args=(output,))
            process.start()
            while process.is_alive() and not (begun(written) - left if written else losses_so_far() >= steps):
                time.sleep(0.0005)
            time.sleep(random.uniform(0, SAVING_SECONDS))
            process.kill()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
            return process.exitcode != 0

        output.mkdir()
        (root / "alone").mkdir()
        before: dict[str, str] = {}
        hit, lost, torn, behind, remains = 0, 0, 0, 0, set[int]()
        while hit < kills and killed(output / checkpoints.FOLDER if hit % 2 else None):
            hit += 1
            after = finished()
            lost += sum(after.get(name) != manifest for name, manifest in before.items())
            torn += bool(begun(output / checkpoints.FOLDER) - remains)
            remains |= begun(output / checkpoints.FOLDER)
            behind = max(behind, losses_so_far() - EVERY * len(after))
            before = after
        train(output)
        exports, half = 0, 0
        for _ in range(kills // 10):
            exports += killed(output)
            half += (output / ".partial-final").is_dir()
            lost += sum(finished().get(name) != manifest for name, manifest in before.items())
        train(output)
        train(root / "alone")
        assert runs.losses(output) == runs.losses(root / "alone")
        wanted, found = runs.tensors(root / "alone" / "final"), runs.tensors(output / "final")
        assert wanted.keys() == found.keys() and all(torch.equal(found[key], one) for key, one in wanted.items())
        print(f"{hit} kills, {torn} in the middle of a checkpoint (never taken), {len(before)} checkpoints finished")
        print(f"{exports} more while the finished weights were written, {half} left them half-written")
        print(f"finished checkpoints lost or changed: {lost}; at most {behind} steps had to be done again")
        print(f"losses of {said['steps']} steps and the weights are those of a run nobody killed, to the last bit")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
