"""Which transformers and UNets of diffusers `vplan record` takes by their class alone: one line for each.

    python -m tests.tools.record_every_class [CLASS...] [--record] [--json FILE]
    VPLAN_CUDA_PYTHON=cuda/bin/python python -m tests.tools.record_every_class [CLASS...] --rehearse --json FILE
    python -m tests.tools.record_every_class --json FILE --docs docs/your-own-model.md

Each class is built from its own defaults, with seven blocks where there would be more, on the meta device; the profile
is found out as `vplan record` does it (`trainers.recording.any_class`). With ``--record`` LoRA and full training are
recorded, checkpointed and not, and every tape is held to a direct recording at full depth and another shape: a line
then has the largest difference of both allocated peaks. FILE keeps a row of JSON for each class as it is done; classes
that have one are not tried again. About 5 s of one core a class, half a minute with ``--record``.

With ``--rehearse`` a step of LoRA and one of full training of the classes that FILE has as recorded run on a virtual
GPU, and the difference of their allocated peaks from those of the tapes is added to their rows. ``--docs`` leaves the
page's lines of classes that FILE has no row of as they are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from planner.catalog import lookup, user_data
from planner.catalog.diffusers_folder import Source
from planner.catalog.forward_call import ForwardCall
from planner.catalog.own_inputs import OwnInputs
from planner.errors import VplanError
from planner.evidence.jsonl import append_row
from planner.probe.fork_server import ForkServer
from planner.rehearsal.probe_runner import RehearsalRunner, cuda_interpreter
from planner.tape.codec import tape_json
from planner.tape.packed_json import write_packed
from planner.tape.variants.precision import Precision
from planner.tape.variants.variant import StepVariant
from tests.benchmarks.held_out import Case, directly, from_tape
from tests.tools.class_rehearsal import rehearsed_steps
from trainers.recording import tapes
from trainers.recording.any_class.derive import derive, model_classes
from trainers.recording.own import REFUSALS

BLOCKS = tapes.RECORDED_BLOCKS + 1
"""More than a tape holds of each list, so that blocks are left out and put in again."""
NAME = "any-class-under-test"


def _two_levels(kind: str) -> dict[str, Any]:
    """A UNet of two levels with a block each, one of them with attention."""
    return {
        "block_out_channels": [320, 640],
        "down_block_types": [f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"],
        "up_block_types": [f"UpBlock{kind}", f"CrossAttnUpBlock{kind}"],
        "layers_per_block": 1,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "CosmosTransformer3DModel": {"concat_padding_mask": False},  # else it needs torchvision
    "DreamLiteTransformer2DModel": {"in_channels": 320},
    "EasyAnimateTransformer3DModel": {"in_channels": 16, "out_channels": 16, "patch_size": 2, "mmdit_layers": BLOCKS},
    "HiDreamImageTransformer2DModel": {"patch_size": 2, "caption_channels": [4096, 4096], "llama_layers": [0] * 14},
    "HunyuanVideoFramepackTransformer3DModel": {
        "has_clean_x_embedder": True,
        "has_image_proj": True,
        "image_proj_dim": 1152,
    },
    "I2VGenXLUNet": _two_levels("3D"),
    "UNet2DConditionModel": _two_levels("2D"),
    "UNet3DConditionModel": _two_levels("3D"),
    "UNetMotionModel": {**_two_levels("Motion"), "motion_num_attention_heads": 8},
    "UNetSpatioTemporalConditionModel": {**_two_levels("SpatioTemporal"), "num_attention_heads": [5, 10]},
    # Its blocks are joined in pairs: an even number.
    "HunyuanDiT2DModel": {"hidden_size": 1408, "in_channels": 4, "patch_size": 2, "num_layers": BLOCKS + 1},
    "LatteTransformer3DModel": {
        "attention_head_dim": 72,
        "caption_channels": 4096,
        "cross_attention_dim": 1152,
        "in_channels": 4,
        "norm_elementwise_affine": False,
        "norm_type": "ada_norm_single",
        "out_channels": 8,
        "patch_size": 2,
    },
    "StableCascadeUNet": {  # its prior's widths (huggingface.co/stabilityai/stable-cascade-prior, prior/config.json)
        "clip_image_in_channels": 768,
        "clip_text_in_channels": 1280,
        "clip_text_pooled_in_channels": 1280,
        "down_num_layers_per_block": [1, 1],
        "up_num_layers_per_block": [1, 1],
        "down_blocks_repeat_mappers": [1, 1],
        "up_blocks_repeat_mappers": [1, 1],
    },
    "UNet1DModel": {"extra_in_channels": 64},
    "WanAnimateTransformer3DModel": {"num_layers": 10},  # a face adapter behind each fifth: a multiple of five
    "WanVACETransformer3DModel": {"vace_layers": [0, 2, 4, 6]},
    "LuminaNextDiT2DModel": {"num_kv_heads": 8},
    "OmniGenTransformer2DModel": {"rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}},
    "Transformer2DModel": {"in_channels": 320},
    "TransformerTemporalModel": {"in_channels": 320},
}
"""Keys without which a class cannot be built from its own defaults, and smaller UNets, as none of their levels can be
left out of a recording."""
START, END = "<!-- classes -->", "<!-- end of classes -->"


def shallow(model_class: Any) -> dict[str, Any]:
    """The class's defaults that ask for more than `BLOCKS` blocks, at `BLOCKS`."""
    parameters = inspect.signature(model_class.__init__).parameters
    counts = {
        name: entry.default
        for name, entry in parameters.items()
        if name.startswith(("num_", "n_", "depth")) and any(word in name for word in ("layers", "blocks", "depth"))
    }
    return {name: BLOCKS for name, default in counts.items() if type(default) is int and default > BLOCKS}


def source(class_name: str) -> Source:
    """A model of a class as a folder would have it."""
    import diffusers

    config = {**shallow(getattr(diffusers, class_name)), **CONFIGS.get(class_name, {})}
    return Source("/nowhere/config.json", NAME, class_name, config)


def row(class_name: str, record: bool) -> dict[str, Any]:
    """What came of one class."""
    import diffusers

    start = time.process_time()
    shutil.rmtree(user_data.tapes() / NAME, ignore_errors=True)  # of the class before
    described = bool(OwnInputs.of_class(class_name).inputs)
    told = {"class": class_name, "diffusers": diffusers.__version__, "described": described}
    try:
        profile = derive(source(class_name), NAME, OwnInputs()).profile
        call = ForwardCall.read(profile.inputs)
        told |= {"outcome": "described", "forward": call.forward, "checkpoints": profile.traits.checkpoints}
        if record:
            user_data.write_profile(NAME, profile.to_json())
            tapes.full_run_lengths.cache_clear()
            told |= {"outcome": "recorded", "error_pct": {name: round(error, 4) for name, error in _errors()}}
    except VplanError as error:
        told |= {"outcome": "refused", "reason": error.message, "fix": error.fix}
    except REFUSALS as error:  # what a user would see as a refusal of the recording: its traceback is for us
        traceback.print_exc()
        told |= {"outcome": "failed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {**told, "seconds": round(time.process_time() - start, 1)}


def with_rehearsal(found: dict[str, Any], runner: RehearsalRunner) -> dict[str, Any]:
    """A row with what a virtual GPU says of its class: the differences of allocated peaks in percent, or a reason."""
    start = time.process_time()
    shutil.rmtree(user_data.tapes() / NAME, ignore_errors=True)
    try:
        user_data.write_profile(NAME, derive(source(found["class"]), NAME, OwnInputs()).profile.to_json())
        tapes.full_run_lengths.cache_clear()
        steps = list(rehearsed_steps(lookup.model(NAME), runner))
        found = {**found, "rehearsed_pct": {step.variant: round(step.error_pct, 4) for step in steps}}
    except VplanError as error:
        found = {**found, "not_rehearsed": error.message}
    except RuntimeError as error:
        found = {**found, "not_rehearsed": str(error)}
    return {**found, "rehearsal_seconds": round(time.process_time() - start, 1)}


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


CLOSE_PCT = 0.5
"""By how much an allocated peak may differ from the recording at full depth, and from the virtual GPU's."""


class Line(NamedTuple):
    """A line of the table in docs/your-own-model.md, in the words that it has there."""

    outcome: str
    full_depth: str
    rehearsal: str

    @classmethod
    def of(cls, row: Mapping[str, Any], before: Line | None) -> Line:
        """A row's line; ``before``: the page's, for what the row does not say because it was not tried again."""
        outcome, rehearsal = row.get("reason", "").replace("|", "/"), before.rehearsal if before else ""
        if "rehearsed_pct" in row:
            rehearsal = f"{_worst(row['rehearsed_pct']):.2f} %"
        if row["outcome"] == "recorded" and "error_pct" not in row:
            assert before, "a class that was only rehearsed was recorded before"
            return before._replace(rehearsal=rehearsal)
        if row["outcome"] == "recorded":
            outcome = KNOWN if row["described"] else FOUND
            outcome += "" if row["checkpoints"] else "; has no checkpointing"
            return cls(outcome, f"{_worst(row['error_pct']):.2f} %", rehearsal)
        if row["outcome"] == "described":
            outcome = f"{FOUND}, not recorded"
        elif row["outcome"] == "failed":
            outcome = f"fails: {outcome}"
        return cls(outcome, "", "")


KNOWN, FOUND = "arguments known", "arguments found"


def lines_of(text: str) -> dict[str, Line]:
    """The table's lines by class, from the page."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|(.*)\|(.*)\|$", text, re.MULTILINE)
    return {name: Line(*(cell.strip() for cell in cells)) for name, *cells in rows}


def page(lines: Mapping[str, Line], diffusers: str, total: int) -> str:
    """The table of docs/your-own-model.md; ``total`` classes there are in a version of diffusers."""
    recorded = [line for line in lines.values() if line.full_depth]
    exact = sum(line.full_depth == "0.00 %" for line in recorded)
    close = sum(float(line.full_depth.split()[0]) <= CLOSE_PCT for line in recorded)
    alone = sum(line.outcome.startswith(FOUND) for line in recorded)
    rehearsed = [float(line.rehearsal.split()[0]) for line in recorded if line.rehearsal]
    near = sum(error <= CLOSE_PCT for error in rehearsed)
    text = [
        f"diffusers {diffusers} exports {total} transformers and UNets. {len(lines)} were tried, by their",
        f"defaults with {BLOCKS} blocks of each kind, without a family and without a file. {len(recorded)} record LoRA",
        f"and full training, checkpointed and not where the class can: {alone} by dry runs alone, the others with",
        f"arguments that vplan knows of the class. The allocated peaks of {close} are within {CLOSE_PCT} % of a",
        f"recording at full depth and another shape, those of {exact} to 0.00 %. Steps of LoRA and of full training",
        f"were run on a virtual GPU too of {len(rehearsed)}, of which {near} within {CLOSE_PCT} % allocated.",
        "",
        "| class | outcome | from full depth | from the virtual GPU |",
        "|---|---|---|---|",
    ]
    text += [f"| `{name}` | {' | '.join(line)} |" for name, line in sorted(lines.items())]
    return "\n".join(text)


def _worst(errors: Mapping[str, float]) -> float:
    """The largest of some differences in percent."""
    return max(map(abs, errors.values()))


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    """The latest row of each class in a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["class"]: row for row in rows}


def _rehearse(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rehearses the classes that are recorded and have not been, and appends their rows."""
    interpreter = cuda_interpreter()
    with ForkServer(interpreter.path) as server:
        runner = RehearsalRunner(interpreter=interpreter, server=server)
        for found in rows:
            if found["outcome"] == "recorded" and not {"rehearsed_pct", "not_rehearsed"} & set(found):
                told = with_rehearsal(found, runner)
                print(told["class"], told.get("rehearsed_pct", told.get("not_rehearsed")), flush=True)
                append_row(path, told)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.record_every_class", description=__doc__.split("\n")[0]
    )
    parser.add_argument("classes", nargs="*", metavar="CLASS")
    parser.add_argument("--record", action="store_true", help="record, and compare with full depth")
    parser.add_argument("--rehearse", action="store_true", help="compare recorded classes with a virtual GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows that are kept")
    parser.add_argument("--docs", type=Path, metavar="FILE", help=f"write the table into a page, behind {START!r}")
    asked = parser.parse_args()
    if asked.docs:
        latest = _rows(asked.json)
        text = asked.docs.read_text(encoding="utf-8")
        before, rest = text.split(START)
        after = rest.split(END)[1]
        there = lines_of(rest.split(END)[0])
        lines = {**there, **{name: Line.of(row, there.get(name)) for name, row in latest.items()}}
        written = page(lines, importlib.metadata.version("diffusers"), len(model_classes()))
        asked.docs.write_text(f"{before}{START}\n{written}\n{END}{after}", encoding="utf-8")
        return 0
    rows = _rows(asked.json) if asked.json and asked.json.is_file() else {}
    with tempfile.TemporaryDirectory() as home:
        os.environ[user_data.VARIABLE] = home
        if asked.rehearse:
            _rehearse([found for name, found in rows.items() if name in (asked.classes or rows)], asked.json)
            return 0
        for class_name in asked.classes or sorted(model_classes()):
            if class_name in rows:
                continue
            found = row(class_name, asked.record)
            errors = found.get("error_pct", {})
            worst = f"{_worst(errors):.4f} %" if errors else ""
            print(
                f"{class_name:42} {found['outcome']:10} {worst:9} {found['seconds']:6.1f} s {found.get('reason', '')}"
            )
            if asked.json:
                append_row(asked.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
