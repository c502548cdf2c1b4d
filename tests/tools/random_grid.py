"""Plans drawn at random, as a grid that nobody chose: a test of the estimator on plans that it was not mended with.

    python -m tests.tools.random_grid SEED COUNT > profiles/grids/random.toml

Each plan has a model, a method, a shape, and some fields of a strategy, all drawn evenly from what a probe can run. A
draw is kept if vplan's trainer takes the plan, a recording has it, and it fits an H100 and `HOST_RAM`. No draw is
dropped for what its estimate says otherwise, and none for being near to another.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import tomli_w

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.probe.grid_file import GridEntry
from planner.probe.grid_schedule import candidate
from planner.spec.job import Job, Machine, Strategy
from planner.units import GIB

HOST_RAM = 8 * GIB
"""A rehearsal keeps offloaded and swapped memory in the RAM of the machine that it runs on."""

MOST_FIELDS = 4
"""Fields of a strategy that one plan sets."""

MOST_FRAMES = 49

CHOICES: dict[str, tuple[Any, ...]] = {
    "weights_dtype": ("fp32", "bf16", "fp8", "int8", "nf4"),
    "adapter_dtype": ("fp32", "bf16"),
    "master_weights": ("none", "fp32"),
    "autocast": ("none", "bf16"),
    "gradient_checkpointing": ("none", "full", "offload", "partial"),
    "optimizer": ("adamw", "adamw-8bit", "adafactor", "lion", "came", "muon"),
    "optimizer_step": ("foreach", "fused", "loop", "backward"),
    "gradient_accumulation": (1, 2),
    "ema": ("none", "gpu", "cpu"),
    "sharding": ("none", "ddp", "fsdp", "zero-1", "zero-2"),
    "swap_blocks": tuple(range(1, 20)),
    "expandable_segments": (True, False),
    "validation_mode": ("off", "on", "offload"),
}
"""What is drawn from. Left out is what a rehearsal cannot show: optimizers in host RAM, whose states are real there;
Prodigy, whose first step depends on values; compiled blocks."""


def draw(dice: random.Random) -> GridEntry:
    """One plan; a VplanError where it contradicts itself."""
    profile = lookup.model(dice.choice(lookup.model_names()))
    job = _job(profile, dice)
    fields = dice.sample(sorted(CHOICES), dice.randint(1, MOST_FIELDS))
    ways = {name: dice.choice(CHOICES[name]) for name in fields}
    if ways.get("gradient_checkpointing") == "partial":
        ways["checkpointed_blocks"] = dice.randint(1, profile.blocks)
    gpus = dice.choice((2, 4)) if ways.get("sharding", "none") != "none" else 1
    return GridEntry(job=job, strategy=Strategy.read(ways, "plan"), gpus=gpus)


def _job(profile: ModelProfile, dice: random.Random) -> Job:
    shapes = profile.shape
    most = min(shapes.max_frames, MOST_FRAMES)
    frames = dice.choice(range(shapes.min_frames, most + 1, shapes.frame_step)) if most > shapes.min_frames else most
    height, width = dice.choice(shapes.resolutions)
    if not shapes.only_listed:  # some size between half of a usual one and all of it
        share = dice.uniform(0.5, 1.0)
        cell = shapes.size_multiple
        height, width = (max(1, round(share * side / cell)) * cell for side in (height, width))
    said = {
        "model": profile.name,
        "method": dice.choice(("lora", "lora", "full")),
        "frames": frames,
        "height": height,
        "width": width,
        "batch_size": dice.choice((1, 1, 2, 3)),
    }
    if said["method"] == "lora":
        said["lora_rank"] = dice.choice((4, 16, 64, 128))
    return lookup.job_for(profile, said)


def plans(seed: int, count: int) -> tuple[list[GridEntry], int]:
    """So many plans that can run, and the draws that it took."""
    dice, kept, draws = random.Random(seed), list[GridEntry](), 0
    machine = Machine(gpu="h100", gpus=4)
    while len(kept) < count:
        draws += 1
        try:
            entry = draw(dice)
        except VplanError:
            continue
        if candidate(entry, machine, HOST_RAM).skip is None:
            kept.append(entry)
    return kept, draws


def main(seed: int, count: int) -> None:
    """Prints the grid."""
    kept, draws = plans(seed, count)
    jobs = []
    for entry in kept:
        ways = entry.strategy.model_dump(mode="json", exclude_unset=True)
        job = {"model": entry.job.model, **entry.job.model_dump(mode="json", exclude_defaults=True)}
        jobs.append({**job, "plans": [{**ways, **({"gpus": entry.gpus} if entry.gpus > 1 else {})}]})
    print(f"# {count} plans drawn at random (seed {seed}, {draws} draws), for rehearsals:")
    print(f"#     python -m tests.tools.random_grid {seed} {count} > profiles/grids/random.toml")
    print(tomli_w.dumps({"schema": 1, "jobs": jobs}), end="")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
