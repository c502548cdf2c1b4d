"""Which transformers and UNets of diffusers `vplan record` takes by their class alone: one line for each.

    python -m tests.tools.record_every_class [CLASS...] [--record] [--json FILE]

Each class is built from its own defaults, with eight blocks where there would be more, on the meta device; the profile
is found out as `vplan record` does it (`trainers.recording.any_class`). With ``--record`` LoRA and full training are
recorded, checkpointed and not, and every tape is held to a direct recording at full depth and another shape: a line
then has the largest difference of both allocated peaks. FILE keeps a row of JSON for each class as it is done; classes
that have one are not tried again. About 10 s of one core a class, a minute with ``--record``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.catalog import lookup, user_data
from planner.catalog.diffusers_folder import Source, installed_classes
from planner.catalog.forward_call import ForwardCall
from planner.catalog.own_inputs import OwnInputs
from planner.errors import VplanError
from planner.evidence.jsonl import append_row
from planner.tape.codec import tape_json
from planner.tape.packed_json import write_packed
from planner.tape.variants import Precision, StepVariant
from tests.benchmarks.held_out import Case, directly, from_tape
from trainers.recording import tapes
from trainers.recording.any_class.derive import derive

BLOCKS = 8
"""More than a tape holds of each list, so that blocks are left out and put in again."""
NAME = "any-class-under-test"
INPUTS = Path(__file__).with_name("inputs_of_classes")
"""Files for `--inputs`, by class: what dry runs do not find out."""


def shallow(model_class: Any) -> dict[str, Any]:
    """The class's defaults that ask for more than `BLOCKS` blocks, at `BLOCKS`."""
    parameters = inspect.signature(model_class.__init__).parameters
    counts = {
        name: entry.default
        for name, entry in parameters.items()
        if name.startswith(("num_", "n_", "depth")) and any(word in name for word in ("layers", "blocks", "depth"))
    }
    return {name: BLOCKS for name, default in counts.items() if type(default) is int and default > BLOCKS}


def row(class_name: str, record: bool) -> dict[str, Any]:
    """What came of one class."""
    import diffusers

    start = time.process_time()
    file = INPUTS / f"{class_name}.toml"
    inputs = OwnInputs.from_file(file) if file.is_file() else OwnInputs()
    told = {"class": class_name, "diffusers": diffusers.__version__, "file": file.is_file()}
    try:
        source = Source("/nowhere/config.json", NAME, class_name, shallow(getattr(diffusers, class_name)))
        profile = derive(source, NAME, inputs).profile
        call = ForwardCall.read(profile.inputs)
        told |= {"outcome": "described", "forward": call.forward, "checkpoints": profile.traits.checkpoints}
        if record:
            user_data.write_profile(NAME, profile.to_json())
            tapes.full_run_lengths.cache_clear()
            told |= {"outcome": "recorded", "error_pct": {name: round(error, 4) for name, error in _errors()}}
    except VplanError as error:
        told |= {"outcome": "refused", "reason": error.message, "fix": error.fix}
    return {**told, "seconds": round(time.process_time() - start, 1)}


def _errors() -> Iterator[tuple[str, float]]:
    """(variant, difference of allocated peaks in percent) of LoRA and full, checkpointed and not."""
    profile = lookup.model(NAME)
    for method in ("lora", "full"):
        for mode in ("none", "full") if profile.traits.checkpoints else ("none",):
            variant = StepVariant(method, Precision("half", "half" if method == "lora" else "", False), mode, True)
            write_packed(
                tape_json(tapes.step_tape(profile, variant)), user_data.tapes() / NAME / f"{variant.name}.json.gz"
            )
            case = Case.of(profile, variant)
            theirs, _ = directly(case)
            yield variant.name, 100 * (from_tape(case).peak - theirs.peak) / theirs.peak


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.record_every_class", description=__doc__.split("\n")[0]
    )
    parser.add_argument("classes", nargs="*", metavar="CLASS")
    parser.add_argument("--record", action="store_true", help="record, and compare with full depth")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows that are kept")
    asked = parser.parse_args()
    done = set()
    if asked.json and asked.json.is_file():
        done = {json.loads(line)["class"] for line in asked.json.read_text().splitlines()}
    with tempfile.TemporaryDirectory() as home:
        os.environ[user_data.VARIABLE] = home
        for class_name in asked.classes or sorted(installed_classes()):
            if class_name in done:
                continue
            found = row(class_name, asked.record)
            errors = found.get("error_pct", {})
            worst = f"{max(map(abs, errors.values())):.4f} %" if errors else ""
            print(
                f"{class_name:42} {found['outcome']:10} {worst:9} {found['seconds']:6.1f} s {found.get('reason', '')}"
            )
            if asked.json:
                append_row(asked.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
