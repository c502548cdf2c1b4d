"""Measures the CPU time per operator of a training step, including the Python code around it."""

from __future__ import annotations

import time
from typing import Literal

import torch

from planner.catalog import lookup
from planner.estimate.work import KERNELS, work_of
from planner.layout.recordings import tape
from planner.spec.job import Job, Strategy
from planner.tape.format import Tape
from trainers.families import family
from trainers.step import placement, step
from trainers.step.random_weights import randomise

MODEL = "wan2.1-t2v-1.3b"
TOY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 32,
    "freq_dim": 16,
    "text_dim": 8,
    "rope_max_seq_len": 32,
}
SHAPE = {"B": 1, "F": 3, "H": 4, "W": 4, "T": 6, "R": 4, "E": 0}
STEPS = 4


def launch_seconds(device: torch.device) -> float:
    """Mean seconds per operator over forward and backward, without checkpointing."""
    passes = seconds_and_launches("none", device).values()
    return sum(seconds for seconds, _ in passes) / sum(count for _, count in passes)


def seconds_and_launches(checkpointing: Literal["none", "full"], device: torch.device) -> dict[str, tuple[float, int]]:
    """By pass: the least seconds of a few steps, and the number of operators on its tape.

    The model has all its blocks but is very narrow, so that a GPU finishes each kernel before the next is launched.
    """
    known = lookup.model(MODEL)
    profile = known.replace(config={**known.config, **TOY})
    job = Job(model=MODEL, frames=9, height=64, width=64, lora_rank=SHAPE["R"], lora_targets=known.lora.targets)
    strategy = Strategy(weights_dtype="bf16", gradient_checkpointing=checkpointing)
    model = step.build_model(profile, job, strategy)
    placement.materialise(model, device, randomise)
    trainee, kind = step.Trainee(model, step.trainable_parameters(model)), family(profile)
    batch = kind.batch(SHAPE, device, step.compute_dtype(strategy))
    taken = []
    for _ in range(STEPS):
        begin = _now(device)
        loss = step.forward(trainee, kind, batch, strategy)
        between = _now(device)
        loss.backward()
        taken.append((between - begin, _now(device) - between))
    found = tape(MODEL, f"step-lora-half-fp32-autocast-{checkpointing}-one")
    seconds = dict(zip(("forward", "backward"), map(min, zip(*taken, strict=True)), strict=True))
    return {passes: (seconds[passes], _launches(found, passes)) for passes in seconds}


def _now(device: torch.device) -> float:
    """The time in seconds once a GPU has finished all queued work; on the CPU, the CPU time of this process."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _launches(tape: Tape, passes: str) -> int:
    work = work_of(tape, "step", {**SHAPE, **tape.regime}, passes=passes)
    return sum(amount.flops for (name, _), amount in work.items() if name == KERNELS)
