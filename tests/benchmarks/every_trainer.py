"""Every known model on every class of card up to 80 GB, for every trainer that plans are exported to: a plan whose
files can be written, or one sentence why there is none.

    python -m tests.benchmarks.every_trainer rows.jsonl --minutes 30 --seed 1 --cards 8GB,24GB
    python -m tests.benchmarks.every_trainer full.jsonl --method full
    python -m tests.benchmarks.every_trainer rows.jsonl --summary

Models come in an order that the seed draws, each with all its cards and targets in another: questions about one model
share what was read for it, and any part of them is a sample. Those that the file has already are not asked again. A
row: `model card target outcome words seconds`. Outcomes: `plan` (fits or tight, and exported), `no` (nothing fits;
`words`: what would, or how far a smaller job reaches), `refused` (`words`: why), and three that are faults:
`unexported` (a plan that its own export refuses), `crash`, and `no` without a word.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import vplan
from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import in_words
from planner.foreign.export import export_targets
from planner.search.question import Suggestion
from planner.units import gib

LARGEST_GB = 80

FAULTS = ("unexported", "crash")

Key = tuple[str, str, str]


def questions(seed: int) -> list[Key]:
    """Model, card and target of all questions, in the order of the seed."""
    cards = [group.name for group in card_lookup.gpu_classes() if group.gb <= LARGEST_GB]
    drawn, asked = random.Random(seed), []
    for model in drawn.sample(lookup.model_names(), len(lookup.model_names())):
        about = [(model, card, target) for card in cards for target in sorted(export_targets())]
        asked += drawn.sample(about, len(about))
    return asked


def ask(model: str, card: str, target: str, method: str = "lora") -> dict[str, Any]:
    """The row of one question."""
    started = time.perf_counter()
    outcome, words = _answer(model, card, target, method)
    seconds = round(time.perf_counter() - started, 2)
    return {"model": model, "card": card, "target": target, "outcome": outcome, "words": words, "seconds": seconds}


def _answer(model: str, card: str, target: str, method: str) -> tuple[str, str]:
    try:
        plan = vplan.suggest(model, gpu=card, trainer=target, method=method)
    except vplan.VplanError as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return "crash", repr(error)
    if not plan.estimate or plan.estimate.verdict == "no":
        return "no", _would_fit(plan._suggestion)
    try:
        with tempfile.TemporaryDirectory() as folder:
            plan.export(target, folder)
    except vplan.VplanError as error:
        return "unexported", str(error)
    except Exception as error:  # noqa: BLE001
        return "crash", repr(error)
    return "plan", f"{plan.estimate.verdict}, {plan.strategy.weights_dtype or 'bf16'}"


def _would_fit(found: Suggestion | None) -> str:
    """What would fit, or how far a smaller job reaches; nothing where the answer is silent, which is a fault."""
    if found is None:
        return ""
    if found.relaxed:
        return "; ".join(f"--{wish.field} {wish.after}" for wish in found.relaxed)
    words = []
    if found.least is not None:
        shape = in_words(lookup.model(found.least.job.model), found.least.job)
        words.append(f"{found.least.verdict} {gib(found.least.peak.device_bytes):.1f} GiB at {shape}")
    if found.larger_card is not None:
        words.append(f"--gpu {found.larger_card.machine.gpu}")
    return "; ".join(words)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def is_fault(row: dict[str, Any]) -> bool:
    """Whether a row's answer is wrong, or says nothing."""
    return row["outcome"] in FAULTS or (row["outcome"] == "no" and not row["words"])


def summary(rows: list[dict[str, Any]]) -> str:
    """Outcomes by target, and every fault."""
    lines = [f"{len(rows)} of {len(questions(0))} questions"]
    for target in sorted({row["target"] for row in rows}):
        counts = Counter(row["outcome"] for row in rows if row["target"] == target)
        lines.append(f"{target:20}" + "  ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    lines += [" ".join(map(str, row.values())) for row in rows if is_fault(row)]
    return "\n".join(lines)


def main() -> int:
    """Asks until the time is up; 1 where a row is a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", help="targets, with commas between them")
    parser.add_argument("--cards", default="", help="classes of cards, with commas between them")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--summary", action="store_true", help="ask nothing")
    said = parser.parse_args()
    done = {(row["model"], row["card"], row["target"]) for row in read(said.rows)}
    until = time.monotonic() + 60 * said.minutes
    for key in () if said.summary else questions(said.seed):
        if key in done or (said.only and key[2] not in said.only.split(",")):
            continue
        if said.cards and key[1] not in said.cards.split(","):
            continue
        if time.monotonic() > until:
            break
        with said.rows.open("a") as file:
            file.write(json.dumps(ask(*key, said.method)) + "\n")
    rows = read(said.rows)
    print(summary(rows))
    return 1 if any(map(is_fault, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
