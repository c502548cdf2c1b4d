"""Host RAM that the ranks of one node hold together instead of once each.

Our trainer's ranks map one copy of the swapped blocks of a frozen base (trainers/memory/shared_ram.py), because DDP and
context parallelism leave them alike. Other trainers have a copy in every process: musubi-tuner 30c658c and OneTrainer
pin blocks as each process loaded them. Windows and macOS have no anonymous files; whether WSL pins one in several
processes was never tried, so it counts as one copy per process there.
"""

from __future__ import annotations

from planner.layout import experts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import SPLIT


def copies_of_swapped_blocks(configuration: Configuration, trainer: str) -> int:
    """How many copies of the swapped blocks one node holds while it trains: one if the ranks share them, else one per
    GPU. Weights that train differ from rank to rank while a step runs, so each keeps its own."""
    job, strategy, machine = configuration.job, configuration.strategy, configuration.machine
    shares = machine.os == "linux" and job.method == "lora" and strategy.sharding not in SPLIT
    return 1 if trainer == "vplan" and shares else machine.gpus


def bytes_held_once(run: Run, blocks: int, idle: int) -> int:
    """How many bytes less one node holds because its ranks share some. Of one rank: ``blocks``, the swapped blocks of
    the running model, and ``idle``, the idle expert, whose swapped blocks are shared too."""
    spared = run.machine.gpus - copies_of_swapped_blocks(run.configuration, run.trainer)
    return spared * (blocks + (experts.idle_swapped(run) if idle else 0)) if blocks else 0
