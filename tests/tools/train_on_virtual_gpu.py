"""`vplan train` under every strategy on a virtual GPU, killed and taken up again; its peaks beside the estimate.

    VPLAN_CUDA_PYTHON=cuda/bin/python python -m tests.tools.train_on_virtual_gpu FOLDER [STRATEGY...]

A tiny Wan with a feed-forward wide enough for DeepSpeed to split is recorded, planned and trained for eight steps, with
a checkpoint every two. One of its ranks is killed behind the second checkpoint; the same command then goes on, and its
peaks are compared. FOLDER keeps plans, runs and logs. About half a minute a strategy; `ci/cuda-python` makes the
Python, and strategies whose libraries it lacks fail by name.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import vplan
from planner.launch import checkpoints
from planner.launch.supported import supported_plan
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, write_plan
from planner.units import MIB
from tests.cuda_wheel import CUDA_PYTHON
from tests.trainers import runs

STEPS, EVERY, KILLED_BEHIND = 8, 2, 4
PHASES = {"load", "first_step", "train", "optimizer", "save"}
"""What is run: the samples are cached before, and none are made."""
PATIENCE_SECONDS = 900.0
FULL_BF16: dict[str, Any] = {"weights_dtype": "bf16", "autocast": "none", "master_weights": "none"}


class Case(NamedTuple):
    """One strategy as typed, with the job and the number of GPUs that it is tried on, and what is recorded for it."""

    strategy: dict[str, Any] = {}
    job: dict[str, Any] = {}
    gpus: int = 1
    variants: tuple[str, ...] = ()
    """recordings that `vplan record FOLDER` does not make by itself"""


def _lora(variant: str = "", gpus: int = 1, **strategy: Any) -> Case:
    return Case(strategy, gpus=gpus, variants=(variant,) if variant else ())


def _adapter(method: str, recording: str, gpus: int = 1, **strategy: Any) -> Case:
    """DoRA or LoKr; ``method``: what its recordings are called, ``recording``: and that of its step."""
    variants = (f"step-{method}-half-fp32-autocast-{recording}", f"optimizer-{method}-fp32-adamw-foreach")
    return Case(strategy, {"adapter": method[:4], **({} if method == "dora" else {"lora_rank": 16})}, gpus, variants)


def _full(gpus: int = 1, **strategy: Any) -> Case:
    """Full training in fp32, whose recordings are there."""
    return Case(strategy, {"method": "full"}, gpus)


def _full_bf16(recording: str, gpus: int = 1, **strategy: Any) -> Case:
    """Full training of bf16 weights; ``recording``: what the one of its optimizer is called."""
    variants = ("step-full-half-none-one", f"optimizer-full-half-{recording}")
    return Case({**FULL_BF16, **strategy}, {"method": "full"}, gpus, variants)


def _full_fsdp(**strategy: Any) -> Case:
    return _full(gpus=2, sharding="fsdp", **strategy)._replace(variants=("step-full-half-none-one",))


COMPUTED_IN_BF16 = "step-lora-half-half-none-one"
"""the recording of a LoRA without autocast"""

CASES = {
    "lora": _lora(),
    "lora-accumulation": _lora(gradient_accumulation=2),
    "lora-checkpointing": _lora(gradient_checkpointing="full"),
    "lora-partial-checkpointing": _lora(gradient_checkpointing="partial", checkpointed_blocks=1),
    "lora-checkpoints-to-host": _lora(gradient_checkpointing="offload"),
    "lora-swap": _lora(gradient_checkpointing="full", swap_blocks=1),
    "lora-fp8": _lora("step-lora-fp8-fp32-autocast-none-one", weights_dtype="fp8"),
    "lora-int8": _lora("step-lora-int8-fp32-autocast-none-one", weights_dtype="int8"),
    "lora-nf4": _lora("step-lora-nf4-fp32-autocast-none-one", weights_dtype="nf4"),
    "lora-ema-on-host": _lora(ema="cpu"),
    "lora-prodigy": _lora("optimizer-lora-fp32-prodigy-foreach", optimizer="prodigy"),
    "lora-ddp": _lora(gpus=2, sharding="ddp"),
    "dora-swap": _adapter("dora", "full-one", gradient_checkpointing="full", swap_blocks=1),
    "dora-ddp": _adapter("dora", "none-one", gpus=2, sharding="ddp"),
    "lokr-swap": _adapter("lokr16", "full-one", gradient_checkpointing="full", swap_blocks=1),
    "full": _full(),
    "full-fused": _full(optimizer_step="fused")._replace(variants=("optimizer-full-fp32-adamw-fused",)),
    "full-bf16-8bit": _full_bf16("adamw-8bit-foreach", optimizer="adamw-8bit"),
    "full-bf16-adafactor-in-backward": _full_bf16(
        "adafactor-backward", optimizer="adafactor", optimizer_step="backward"
    ),
    "full-bf16-optimizer-on-host": _full_bf16("adamw-foreach", offload_optimizer="cpu"),
    "full-zero-1": _full_bf16("adamw-foreach", gpus=2, master_weights="fp32", sharding="zero-1"),
    "full-zero-2": _full_bf16("adamw-foreach", gpus=2, master_weights="fp32", sharding="zero-2"),
    "full-zero-2-on-host": _full_bf16(
        "adamw-foreach", gpus=2, master_weights="fp32", sharding="zero-2", offload_optimizer="cpu"
    ),
    "full-zero-3": _full_bf16("adamw-foreach", gpus=2, master_weights="fp32", sharding="zero-3"),
    "full-zero-3-all-on-host": _full_bf16(
        "adamw-foreach", gpus=2, master_weights="fp32", sharding="zero-3", offload_optimizer="cpu", offload_params="cpu"
    ),
    "full-fsdp": _full_fsdp(),
    "full-fsdp-all-on-host": _full_fsdp(offload_params="cpu", offload_optimizer="cpu"),
    "lora-fsdp": _lora(COMPUTED_IN_BF16, gpus=2, sharding="fsdp"),
    "lora-context-parallel": _lora(COMPUTED_IN_BF16, gpus=2, context_parallel=2),
}
"""The strategies, by name."""


class Course(NamedTuple):
    """What became of one case: the steps behind which it went on, and peaks in bytes."""

    resumed: int
    rehearsed: dict[str, int]
    predicted: dict[str, int]
    losses: int
    """lines of the metrics, one a step: none is missing or there twice"""


def make_place(folder: Path) -> runs.Place:
    """The tiny model with cached samples, and its recordings. Sets VPLAN_HOME."""
    os.environ["VPLAN_HOME"] = str(folder / "home")
    place = runs.Place(folder, "wide")
    subprocess.run(vplan.command("record", str(folder / "model"), "--name", place.model), check=True)
    return place


def train(place: runs.Place, case: Case, output: Path) -> Course:
    """A run that is killed, and goes on to its end. Raises a RuntimeError where it does not."""
    for variant in case.variants:
        subprocess.run(vplan.command("record", place.model, "--variant", variant), check=True)
    plan = _plan(place, case)
    output.mkdir(parents=True)
    write_plan(plan, output / "plan.toml")
    words = [CUDA_PYTHON, "-P", *vplan.command("train", str(output / "plan.toml"))[1:], "--device", "cuda"]
    words += [
        "--data",
        str(place.root / "data"),
        "--output",
        str(output / "run"),
        "--weights",
        str(place.root / "model"),
    ]
    words += ["--steps", str(STEPS), "--checkpoint-every", str(EVERY)]
    gpu = ["--gpu", "24GB", "--gpus", str(case.gpus), "--steps", "0", "--json"]
    command = vplan.command("rehearse", *gpu, "--", *words)
    with (output / "killed.txt").open("w") as log:
        killed = subprocess.Popen(command, stdout=log, stderr=log)
        _kill_a_rank(killed, output / "run")
    with (output / "resumed.txt").open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    answer = json.loads(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{answer['error']['message'] if 'error' in answer else answer}; read {log.name}")
    assert (output / "run" / "final").is_dir()
    loads = [line for line in _lines(output / "run" / "memory.jsonl") if line["phase"] == "load"]
    counters = ("allocated_bytes", "reserved_bytes")
    estimate = vplan.estimate(plan=output / "plan.toml").to_json()
    return Course(
        loads[-1]["step"],
        {name: answer[name] for name in counters},
        {
            name: max(estimate["phases"][phase][name] for phase in PHASES & estimate["phases"].keys())
            for name in counters
        },
        len({line["step"] for line in _lines(output / "run" / "metrics.jsonl")}),
    )


def _plan(place: runs.Place, case: Case) -> Plan:
    bucket = runs.SHAPES["wide"][0]
    shape = {"frames": bucket.frames, "height": bucket.height, "width": bucket.width, "lora_rank": 4}
    job = Job.read({"model": place.model, **shape, **case.job})
    machine = Machine(gpu="24GB", gpus=case.gpus)
    return supported_plan(Plan(job=job, strategy=Strategy.read(case.strategy), machine=machine), trained=True)


def _kill_a_rank(process: subprocess.Popen[bytes], output: Path) -> None:
    """SIGKILL to the last rank once a checkpoint of some steps is whole; the command must end for that."""
    wanted = output / checkpoints.FOLDER / checkpoints.folder_name(KILLED_BEHIND)
    end = time.monotonic() + PATIENCE_SECONDS
    while not wanted.exists():
        if process.poll() is not None or time.monotonic() > end:
            process.terminate()  # killed, it would leave its ranks
            raise RuntimeError("it ended before it was killed; read killed.txt")
        time.sleep(0.005)
    told = json.loads(sorted((output / "run").glob("result-*.json"))[-1].read_text(encoding="utf-8"))
    os.kill(told["pid"], signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("strategies", nargs="*", metavar="STRATEGY", help=", ".join(CASES))
    arguments = parser.parse_args()
    if not CUDA_PYTHON:
        parser.error("VPLAN_CUDA_PYTHON names no Python with the CUDA wheel; ci/cuda-python DIR makes one")
    folder = arguments.folder.resolve()
    place = make_place(folder / "place")
    print("| strategy | GPUs | resumed at | allocated MiB: predicted | rehearsed | reserved: predicted | rehearsed |")
    for name in arguments.strategies or CASES:
        try:
            course = train(place, CASES[name], folder / name)
        except (RuntimeError, vplan.VplanError) as error:
            print(f"| {name} | failed: {error} |", flush=True)
            continue
        assert course.losses == STEPS
        peaks = [
            f"{source[counter] / MIB:.2f}"
            for counter in ("allocated_bytes", "reserved_bytes")
            for source in (course.predicted, course.rehearsed)
        ]
        print(f"| {name} | {CASES[name].gpus} | {course.resumed} | {' | '.join(peaks)} |", flush=True)


if __name__ == "__main__":
    main()
