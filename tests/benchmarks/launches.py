"""CPU time of one operator in a training step, with all the Python around it: the source of planner.estimate.roofline's
launches.

    python -m tests.benchmarks.launches

Runs Wan 1.3B at full depth and toy width on one CPU thread, where the arithmetic is next to nothing, and divides the
time of forward and backward by the launches its tape counts; what a checkpoint runs again is told apart by the launches
and the time that checkpointing adds to backward. Needs vplan[train]; half a minute.
"""

from __future__ import annotations

import time
from typing import Literal

import torch

from planner.catalog import lookup
from planner.estimate.work import KERNELS, work_of
from planner.layout.inputs import tape
from planner.spec.job import Job, Strategy
from planner.tape.format import Tape
from trainers.families import family
from trainers.step import step

MODEL = "wan2.1-t2v-1.3b"
TOY = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "ffn_dim": 32,
    "freq_dim": 16,
    "text_dim": 8,
    "rope_max_seq_len": 32,
}
SHAPE = {"B": 1, "F": 3, "H": 4, "W": 4, "T": 6, "R": 4, "E": 0}
STEPS = 4


def fill(_: str, weight: torch.Tensor) -> None:
    weight.normal_(0, 0.02)


def seconds_and_launches(checkpointing: Literal["none", "full"]) -> dict[str, tuple[float, int]]:
    """The fastest forward and backward of a few steps, and the launches of each."""
    known = lookup.model(MODEL)
    profile = known.replace(config={**known.config, **TOY})
    job = Job(model=MODEL, frames=9, height=64, width=64, lora_rank=SHAPE["R"], lora_targets=known.lora.targets)
    strategy = Strategy(weights_dtype="bf16", gradient_checkpointing=checkpointing)
    model = step.build_model(profile, job, strategy)
    step.materialise(model, "cpu", fill)
    trainee, kind = step.Trainee(model, step.trainable_parameters(model)), family(profile)
    batch = kind.batch(SHAPE, "cpu", step.compute_dtype(strategy))
    taken = []
    for _ in range(STEPS):
        begin = time.process_time()
        loss = step.forward(trainee, kind, batch, strategy)
        between = time.process_time()
        loss.backward()
        taken.append((between - begin, time.process_time() - between))
    found = tape(MODEL, f"step-lora-half-fp32-autocast-{checkpointing}-one")
    seconds = dict(zip(("forward", "backward"), map(min, zip(*taken, strict=True)), strict=True))
    return {passes: (seconds[passes], launches(found, passes)) for passes in seconds}


def launches(found: Tape, passes: str) -> int:
    """The launches of one pass."""
    work = work_of(found, "step", {**SHAPE, **found.regime}, passes=passes)
    return sum(amount.flops for (name, _), amount in work.items() if name == KERNELS)


def main() -> None:
    torch.set_num_threads(1)
    none, full = seconds_and_launches("none"), seconds_and_launches("full")
    for name, passes in (("none", none), ("full", full)):
        seconds, count = (sum(side) for side in zip(*passes.values(), strict=True))
        print(f"checkpointing {name}: {1e6 * seconds / count:.0f} us an operator")
    added, more = (after - before for before, after in zip(none["backward"], full["backward"], strict=True))
    print(f"run again by a checkpoint: {1e6 * added / more:.0f} us an operator")


if __name__ == "__main__":
    main()
