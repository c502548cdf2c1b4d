"""CPU time of one operator in a training step, with all the Python around it: the source of planner.estimate.roofline's
launches.

    python -m tests.benchmarks.launches

Runs Wan 1.3B at full depth and toy width on one CPU thread, where the arithmetic is next to nothing
(trainers/measuring/launches.py), and divides the time of forward and backward by the launches its tape counts; what a
checkpoint runs again is told apart by the launches and the time that checkpointing adds to backward. Needs
vplan[train]; half a minute.
"""

from __future__ import annotations

import torch

from trainers.measuring.launches import seconds_and_launches


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    none, full = seconds_and_launches("none", device), seconds_and_launches("full", device)
    for name, passes in (("none", none), ("full", full)):
        seconds, count = (sum(side) for side in zip(*passes.values(), strict=True))
        print(f"checkpointing {name}: {1e6 * seconds / count:.0f} us an operator")
    added, more = (after - before for before, after in zip(none["backward"], full["backward"], strict=True))
    print(f"run again by a checkpoint: {1e6 * added / more:.0f} us an operator")


if __name__ == "__main__":
    main()
