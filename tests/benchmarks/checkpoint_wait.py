"""How long a step waits for a checkpoint: copied and written meanwhile, against written before the next step.

    python -m tests.benchmarks.checkpoint_wait [MILLIONS]

Full training of a Wan of about so many million parameters (100) on the CPU, a checkpoint after each of a few steps.
The same checkpoints are written both ways, in turn, by the trainer's own writer; "waits" is what it does without room
in host RAM, which is what every checkpoint did before. Prints how long the step waited each time, how long until the
checkpoint counted, and the bytes. On the CPU the copy is one within RAM.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROUNDS = 3


def main(millions: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["VPLAN_HOME"] = str(root / "home")
        import torch

        torch.set_num_threads(1)
        from tests.trainers import runs
        from trainers.parallel import checkpoint
        from trainers.train import TrainingRun

        width = 12 * round((millions * 1e6 / 2 / 16) ** 0.5 / 12)  # two blocks of some 16 squares of the width
        runs.WIDE.update({"num_attention_heads": width // 12, "attention_head_dim": 12, "ffn_dim": 4 * width})
        place = runs.Place(root, "wide")
        plan = place.plan(method="full")
        run = TrainingRun(place.request(root / "run", plan, steps=10**5, learning_rate=1e-6), runs.ReportInMemory())
        waited: dict[str, list[float]] = {"copies": [], "waits": []}
        counted: dict[str, list[float]] = {"copies": [], "waits": []}
        for number in range(2 * ROUNDS):
            run._step(number)
            way = "waits" if number % 2 else "copies"
            with mock.patch.object(checkpoint, "has_room", lambda *_, way=way: way == "copies"):
                began = time.perf_counter()
                run._save()
                waited[way].append(time.perf_counter() - began)
                run.checkpoints.wait()
                counted[way].append(time.perf_counter() - began)
        newest = max((root / "run" / "checkpoints").iterdir())
        nbytes = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        run.loader.close()
        run.watch.close()
    for way in waited:
        spread = ", ".join(f"{seconds:.2f}" for seconds in waited[way])
        print(
            f"{way}: the step waited {statistics.median(waited[way]):.2f} s ({spread}), the checkpoint of "
            f"{nbytes / 1e9:.2f} GB counted after {statistics.median(counted[way]):.2f} s (medians of {ROUNDS})"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
