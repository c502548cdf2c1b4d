"""Exports every model under ten strategies to every trainer, and reads what was written: its flags and its memory.

    python -m tests.tools.exported_grid rows.jsonl [--models a,b] [--targets a,b]
    python -m tests.tools.exported_grid rows.jsonl --summary
    python -m tests.tools.exported_grid rows.jsonl --files FOLDER   # also the files, for `own_parsers`

Each row is a model, a strategy and a target, with one outcome:

- `same`: written; every flag and key is in the trainer's record, and `check` of the files prices the same allocated and
  reserved bytes
- `bounded`: nothing is recorded of exactly this plan, so the export has no price; `check` prices what needs no less,
  and says so
- `unpriced`: of that plan nothing is estimated, by the export and by `check` alike
- `refused`: by name
- `unread`: nothing reads that target's files (accelerate's configs, slurm)
- and the faults: `flags` (an option or value that the trainer does not take), `unreadable` (`check` refuses the files),
  `other` (another price), `crash`.

Rows that the file has already are not asked again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dialects.base.script import from_file
from planner.errors import NotEstimatedError, VplanError
from planner.foreign.case import Case, read_case
from planner.foreign.check import check_case
from planner.foreign.export import Exported, export, export_targets
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Peak, Plan
from planner.spec.rules import resolve
from planner.units import format_gib

MACHINE: dict[str, Any] = {"gpu": "900GiB", "host_ram": 8 << 40}
"""So large that no plan is refused for its size: what is asked is what the files say."""

FULL = {"gradient_checkpointing": "full"}
MIXED = {**FULL, "autocast": "bf16", "adapter_dtype": "fp32"}
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "lora, checkpointed": ({"lora_rank": 16}, MIXED, 1),
    "lora, not checkpointed, rank 64": ({"lora_rank": 64}, {**MIXED, "gradient_checkpointing": "none"}, 1),
    "lora, 8-bit AdamW, accumulation": ({}, {**MIXED, "optimizer": "adamw-8bit", "gradient_accumulation": 4}, 1),
    "lora, fp8 base, batch 2": ({"batch_size": 2}, {**MIXED, "weights_dtype": "fp8"}, 1),
    "lora, 6 blocks swapped": ({}, {**MIXED, "swap_blocks": 6}, 1),
    "lora, activations offloaded": ({"lora_rank": 32}, {**MIXED, "gradient_checkpointing": "offload"}, 1),
    "lora, 2 GPUs": ({}, {**MIXED, "sharding": "ddp"}, 2),
    "full, AdamW": ({"method": "full"}, FULL, 1),
    "full, Adafactor, batch 2": ({"method": "full", "batch_size": 2}, {**FULL, "optimizer": "adafactor"}, 1),
    "full, ZeRO-2, 2 GPUs": ({"method": "full"}, {**FULL, "sharding": "zero-2"}, 2),
    "full, ZeRO-3, 2 GPUs, states on CPU": (
        {"method": "full"},
        {**FULL, "sharding": "zero-3", "offload_optimizer": "cpu"},
        2,
    ),
    "sampling": ({"method": "sample"}, {}, 1),
}
"""Name -> fields of the job, fields of the strategy, GPUs."""

FAULTS = ("flags", "unreadable", "other", "crash")


def plan_of(model: str, name: str) -> Plan:
    """A model's plan under one of `STRATEGIES`; a VplanError where that strategy is not its."""
    job_fields, strategy, gpus = STRATEGIES[name]
    profile = lookup.model(model)
    job = job_for(profile, {"method": "lora", **job_fields})
    machine = Machine(gpus=gpus, **MACHINE)
    return Plan(job=job, strategy=resolve(job, Strategy.read(strategy), machine), machine=machine)


def written(exported: Exported, folder: Path) -> Path:
    """The files of an export in a folder; the one to start."""
    for name, text in exported.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / list(exported.files)[-1]


def outcome(exported: Exported, start: Path) -> tuple[str, str]:
    """(outcome, words) of the files that were written."""
    reader = dialects.all_dialects().get(exported.trainer)
    if reader is None or reader.read_script is None:
        return "unread", ""
    before = exported.plan.estimate
    try:
        dialect, invocation = dialects.read_script(from_file(start))
        if not dialect.name.startswith(exported.trainer):
            return "unreadable", f"read as {dialect.name}"
        if odd := (*invocation.unknown, *(each.flag for each in invocation.removed)):
            return "flags", ", ".join(odd)
        case = read_case(dialect, invocation, {}, dict(MACHINE))
        after = check_case(case, search=False).outcome.estimate
    except NotEstimatedError as error:
        return ("unreadable" if before else "unpriced"), error.message
    except VplanError as error:
        return "unreadable", error.message
    if before is None:
        named = [note for note in case.notes if "is not recorded: estimated with" in note]
        return ("bounded", named[0]) if named else ("other", "not recorded when exported, priced when read")
    one, two = before.peak, after.peak
    if (one.allocated_bytes, one.reserved_bytes) == (two.allocated_bytes, two.reserved_bytes):
        return "same", ""
    return "other", _difference(exported, case, two)


def _difference(exported: Exported, case: Case, read: Peak) -> str:
    """The prices, and the fields that were read otherwise than written."""
    plan, ours, theirs = exported.plan, exported.plan.configuration.strategy, case.configuration.strategy
    assert plan.estimate is not None
    pairs = [(name, getattr(plan.job, name), getattr(case.job, name)) for name in Job.model_fields]
    pairs += [(name, getattr(ours, name), getattr(theirs, name)) for name in Strategy.model_fields]
    fields = [f"{name} {wrote!r} read as {back!r}" for name, wrote, back in pairs if wrote != back]
    wrote = plan.estimate.peak
    allocated = f"allocated {format_gib(wrote.allocated_bytes)} -> {format_gib(read.allocated_bytes)}"
    reserved = f"reserved {format_gib(wrote.reserved_bytes)} -> {format_gib(read.reserved_bytes)}"
    return "; ".join([allocated, reserved, f"terms of {case.trainer}", *fields])


def ask(model: str, strategy: str, target: str, keep: Path | None = None) -> tuple[str, str]:
    """(outcome, words) of one plan for one target."""
    try:
        exported = export(plan_of(model, strategy), target, take_nearest=True)
    except VplanError as error:
        return "refused", error.message
    except Exception:  # noqa: BLE001 - whatever it is, it is the finding
        return "crash", traceback.format_exc(limit=-3)
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep / target / model / strategy.replace(" ", "_").replace(",", "") if keep else Path(temporary)
        try:
            return outcome(exported, written(exported, folder))
        except Exception:  # noqa: BLE001
            return "crash", traceback.format_exc(limit=-3)


def questions(models: tuple[str, ...], names: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Model, strategy and target of all questions."""
    return ((model, strategy, name) for model in models for strategy in STRATEGIES for name in names)


def summary(rows: list[dict[str, str]]) -> str:
    """The table by target, and every fault once."""
    kinds = ("same", "bounded", "unpriced", "unread", "refused", *FAULTS)
    lines = [f"| target | asked | {' | '.join(kinds)} |", "|---" * (len(kinds) + 2) + "|"]
    for target in (*sorted({row["target"] for row in rows}), "all"):
        counts = Counter(row["outcome"] for row in rows if target in (row["target"], "all"))
        lines.append(f"| {target} | {counts.total()} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    faults = Counter((row["target"], row["outcome"], row["words"]) for row in rows if row["outcome"] in FAULTS)
    lines += [f"{count} x {' '.join(fault)}" for fault, count in faults.most_common()]
    return "\n".join(lines)


def main() -> int:
    """Asks what the file has not; 1 where a row is a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--models", default="")
    parser.add_argument("--targets", default="")
    parser.add_argument("--files", type=Path)
    parser.add_argument("--summary", action="store_true", help="ask nothing")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    if not options.summary:
        models = tuple(filter(None, options.models.split(","))) or tuple(lookup.model_names())
        names = tuple(filter(None, options.targets.split(","))) or export_targets()
        asked = {(row["model"], row["strategy"], row["target"]) for row in rows}
        with options.rows.open("a") as out:
            for question in questions(models, names):
                if question in asked:
                    continue
                kind, words = ask(*question, options.files)
                row = dict(zip(("model", "strategy", "target"), question, strict=True), outcome=kind, words=words)
                rows.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
    print(summary(rows))
    return int(any(row["outcome"] in FAULTS for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
