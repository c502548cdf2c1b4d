"""How much longer kernels take in a step than their roofline: the source of planner.estimate.roofline's ``IN_A_STEP``.

    python -m tests.tools.step_times.kernels

Takes the steps that a GPU ran under torch's profiler (``operators`` in profiles/measurements/own) and fits, kind by
kind, seconds = a times the roofline + b times the operators, by least squares of relative errors. Left out, by name:
steps of several shapes, of which one was profiled; with checkpoints in host RAM, whose copies are among the kernels;
and of UNets, the only ones with convolutions. Prints a, b and the errors, and those of all kernels of a step. Seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import profiles
from planner.catalog.shapes import grid
from planner.estimate import roofline
from planner.estimate.work import KERNELS, Kind, Work, step_work
from planner.evidence.jsonl import rows_by_id
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

KINDS = ("attention", "matmul", "pointwise")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_addmm_activation")


class Profiled(NamedTuple):
    """One profiled step's forward and backward."""

    id: str
    roofline: Mapping[str, float]
    """kind -> seconds of its kernels by themselves"""
    seconds: Mapping[str, float]
    """kind -> measured"""
    operators: Mapping[str, int]
    """kind -> how many, of those that the row lists"""
    launches: int
    """that the tape counts"""
    told: float
    """what an estimate says of all of them, seconds"""


def main() -> None:
    steps = [step for step in map(profiled, measured()) if step is not None]
    print(f"{len(steps)} steps")
    for kind in KINDS:
        seconds = np.array([step.seconds[kind] for step in steps])
        parts = [[step.roofline[kind], 1e-6 * step.operators[kind]] for step in steps]
        for columns, text in ((1, "of the roofline"), (2, "of the roofline, and us an operator")):
            shares = np.array(parts)[:, :columns] / seconds[:, None]
            fitted = np.linalg.lstsq(shares, np.ones(len(steps)), rcond=None)[0]
            errors = 100 * np.abs(shares @ fitted - 1)
            print(f"{kind:10} {fitted.round(2)} {text}: errors {errors.mean():.1f} %, at most {errors.max():.1f}")
    products = [step.operators["matmul"] / step.launches for step in steps]
    print(f"matrix products: {min(products):.2f} to {max(products):.2f} of the kernels")
    uniform, told = (
        [100 * (predicted / sum(step.seconds.values()) - 1) for step, predicted in zip(steps, all_of, strict=True)]
        for all_of in (
            [sum(step.roofline.values()) / roofline.ROOFLINE_USUAL for step in steps],
            [step.told for step in steps],
        )
    )
    for step, before, after in zip(steps, uniform, told, strict=True):
        print(f"{step.id:44} all kernels {after:+.1f} % (alike for all kinds {before:+.1f})")
    print(f"mean {np.abs(told).mean():.1f} % ({np.abs(uniform).mean():.1f})")


def measured() -> Iterator[dict[str, Any]]:
    """The rows that have the seconds of their operators."""
    for path in sorted((profiles.MEASUREMENTS / "own").glob("*.jsonl")):
        for row in rows_by_id(path).values():
            if row["details"].get("operators"):
                yield row


def profiled(row: Mapping[str, Any]) -> Profiled | None:
    """A row's step beside its roofline; None, and a line that says why, for one that is left out."""
    configuration = Configuration.of(
        Job.model_validate(row["job"]), Strategy.model_validate(row["strategy"]), Machine.model_validate(row["machine"])
    )
    facts = load_facts(configuration)
    work = step_work(lay_out(configuration, facts, grid(facts.model, configuration.job), "vplan"))
    alone = dict.fromkeys(KINDS, 0.0)
    for (kind, half), amount in work.passes.items():
        if kind != KERNELS and amount != Work(0, 0):
            alone[kind] = alone.get(kind, 0.0) + by_itself(configuration, facts.gpu, (kind, half), amount, work)
    why = ""
    if configuration.job.buckets:
        why = "several shapes"
    elif configuration.strategy.gradient_checkpointing == "offload":
        why = "copies among its kernels"
    elif alone.get("convolution", 0.0) > 0.01 * sum(alone.values()):
        why = "a UNet"
    if why:
        print(f"left out: {row['id']} ({why})")
        return None
    seconds, operators = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    passes = [row["details"]["operators"][passes] for passes in ("forward", "backward")]
    for listed in passes:
        for name, (count, taken) in listed["operators"].items():
            seconds[kind_of(name)] += taken
            operators[kind_of(name)] += count
    # What a row does not list, each below a thousandth of its pass, is taken for pointwise.
    seconds["pointwise"] += sum(listed["seconds"] for listed in passes) - sum(seconds.values())
    attention = roofline.attention_efficiency(facts.gpu, configuration.strategy, configuration.job, work.attention)
    told = roofline._kernel_seconds(
        work.passes, facts.gpu, configuration.strategy, attention, work.attention.over_pairs
    )
    launches = sum(amount.flops for (kind, _), amount in work.passes.items() if kind == KERNELS)
    return Profiled(row["id"], {kind: alone[kind] for kind in KINDS}, seconds, operators, launches, told)


def by_itself(configuration: Configuration, gpu: Any, kind: Kind, amount: Work, work: Any) -> float:
    """Seconds of kernels of a kind by themselves."""
    strategy = configuration.strategy
    attention = roofline.attention_efficiency(gpu, strategy, configuration.job, work.attention)
    reached = attention[kind[1]] if kind[0] == "attention" else roofline.efficiency(gpu, *kind)
    rate = roofline.peak_flops(gpu, strategy, *kind) * reached
    return max(amount.flops / rate, amount.nbytes / (roofline.COPY_EFFICIENCY * gpu.bandwidth_gbs * 1e9))


def kind_of(operator: str) -> str:
    """The kind of an operator by its name in a profile."""
    name = operator.strip().removeprefix("aten::")
    if name in PRODUCTS:
        return "matmul"
    return "attention" if "attention" in name else "pointwise"


if __name__ == "__main__":
    main()
