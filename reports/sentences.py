"""What a page says of a plan in sentences, and which command comes next."""

from __future__ import annotations

import shlex

from planner.catalog.card_profiles import GpuProfile
from planner.dialects.base import cli_words
from planner.foreign.export import export_targets
from planner.spec.job import Strategy
from planner.spec.plan import Estimate, Plan
from planner.spec.rules import resolve
from planner.units import gib

VERDICTS = {"fits": "fits", "tight": "is tight", "no": "does not fit"}


def verdict(title: str, gpu: GpuProfile, answer: Estimate) -> str:
    """The verdict on the plan in one sentence: what is trained, on which card, and what it needs."""
    job = answer.job
    shape = f"{job.frames} x {job.height} x {job.width}" if job.frames > 1 else f"{job.height} x {job.width}"
    count = f"{answer.machine.world} x " if answer.machine.world > 1 else ""
    card, is_class, priced_as = gpu.title.partition(", as ")
    if is_class:
        several = answer.machine.world > 1
        card = f"{card}s ({priced_as})" if several else f"{'an' if card.startswith('8') else 'a'} {card} ({priced_as})"
    activity = {"lora": "LoRA training", "full": "full fine-tuning", "sample": "sampling"}[job.method]
    batch = f", batch {job.batch_size}" if job.batch_size > 1 else ""
    need = f"it needs {gib(answer.peak.device_bytes):.1f} of {gib(answer.budget_bytes):.1f} GiB"
    if answer.limit == "host":
        need += f", but {gib(answer.host_ram_bytes):.1f} GiB of host RAM"
    word = VERDICTS[answer.verdict]
    return f"{title}, {activity} at {shape}{batch}, {word} on {count}{card}: {need}."


def title(model: str, answer: Estimate) -> str:
    """What is trained, in a few words."""
    job = answer.job
    words = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr", "full": "full", "sample": "sampling"}
    method = words[job.trains] + job.adapter_size
    shape = f"{job.frames} frames of {job.height}x{job.width}" if job.frames > 1 else f"{job.height}x{job.width}"
    return f"{model}, {method}, {shape}" + (f", batch {job.batch_size}" if job.batch_size > 1 else "")


def next_command(name: str, plan: Plan, answer: Estimate) -> str:
    """The command that writes this plan for whoever has only the page; or, where it does not fit, that looks for one
    that does."""
    if answer.verdict == "no":
        unforced = resolve(plan.job, Strategy(), plan.machine)
        return cli_words.command("suggest", plan.job, unforced, plan.machine, name) + _as_trained(plan)
    asked = cli_words.command("estimate", plan.job, plan.strategy, plan.machine, name)
    return asked if asked == shlex.join(["vplan", "estimate", name]) else f"{asked} -o {shlex.quote(name)}"


def after_command(name: str, plan: Plan, answer: Estimate) -> str:
    """What to do with the plan's file: probe it where it is tight, else export or train it. Empty of a plan that does
    not fit, and of one that only samples."""
    if answer.verdict == "no" or plan.job.method == "sample":
        return ""
    if plan.trainer != "vplan":
        trainer = _target(plan)
        return shlex.join(["vplan", "export", name, "--to", trainer, "-o", "DIR"]) if trainer else ""
    if answer.verdict == "tight":
        return shlex.join(["vplan", "probe", name])
    return shlex.join(["vplan", "train", name]) + " --data DIR --weights DIR --output DIR"


def understood(gpu: GpuProfile, answer: Estimate) -> str:
    """The budget of device memory and host RAM, in words."""
    text = f"{gpu.title} gives a process {gpu.allocatable_gib:.2f} GiB"
    if answer.machine.reserve:
        text += f", of which {gib(answer.machine.reserve):.2f} GiB are kept free"
    ram = answer.machine.host_ram
    return text + (f"; host RAM {gib(ram):.0f} GiB" if ram else "") + "."


def measure_note(name: str, plan: Plan) -> tuple[str, str]:
    """What measures a plan that nobody measured yet: a command, and what it does."""
    if plan.trainer == "vplan":
        return shlex.join(["vplan", "probe", name]), "runs a few real steps and measures them"
    machine = shlex.quote(plan.machine.gpu)
    return f"vplan rehearse --gpu {machine} -- COMMAND", "counts the memory of the trainer's own command, without a GPU"


def _as_trained(plan: Plan) -> str:
    """The option that searches what another trainer can do; empty where there is none for it, and for our own."""
    trainer = _target(plan)
    return f" --for {shlex.quote(trainer)}" if trainer else ""


def _target(plan: Plan) -> str:
    """The name of a plan's trainer for `--for` and `--to`; empty for our own, and where there is none."""
    trainer = plan.trainer.partition("@")[0]
    return trainer if trainer != "vplan" and trainer in export_targets() else ""
