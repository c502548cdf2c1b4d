"""The worker process of `vplan record`: derives profiles of people's own models, and records or compares tapes.

`planner.launch.recorders` starts it as ``vplan worker record FOLDER`` and writes orders to its standard input, a line
of JSON each. The answer to order N goes to ``FOLDER/result-N.json``, a tape to the path that its order names.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.catalog import lookup
from planner.catalog.components import Component
from planner.catalog.diffusers_folder import Source
from planner.catalog.own_inputs import OwnInputs
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError
from planner.launch.recorders import PARAMETERS, Derivation, TapeTask
from planner.tape.codec import parse_tape, tape_json
from planner.tape.format import Tape
from planner.tape.packed_json import DAMAGES, as_text, pack, write_packed
from planner.tape.packs import is_stored, read_recording
from planner.tape.variants.inventory import default_variants, requested_variants
from planner.worker_process import result_file, write_json
from trainers.recording.comparison import NOT_COMPARED, default_part, default_shape, first_difference, what_differs
from trainers.worker import lines_from_parent


def main(arguments: list[str]) -> int:
    """Answers orders into the folder named by the only argument until the parent closes the pipe."""
    folder = Path(arguments[0])
    for line in lines_from_parent():
        order = json.loads(line)
        number = order.pop("number")
        write_json(folder / result_file(number), answer(order))
    return 0


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """The answer to a `Derivation` or a `TapeTask` as JSON: its facts, or the VplanError that it ended with."""
    try:
        return {"outcome": "ok", **WORK[order.pop("work")](order)}
    except VplanError as error:
        return {"outcome": "refused", "message": error.message, "fix": error.fix, "exit_code": error.exit_code}


def _derive(order: dict[str, Any]) -> dict[str, Any]:
    """Builds the model on the meta device; a VplanError for an architecture that cannot be built."""
    from trainers.recording import own, tapes

    wanted = Derivation(Source(**order["source"]), order["name"], order["inputs"])
    derived: own.Derived
    if wanted.source.class_name in lookup.diffusers_classes() and not wanted.inputs:
        derived = own.derive(wanted.source, wanted.name)
    else:
        from trainers.recording.any_class import derive

        derived = derive.derive(wanted.source, wanted.name, OwnInputs.read(wanted.inputs))
    tapes.full_run_lengths.cache_clear()  # counted by name, and the name may mean another architecture now
    return {"profile": derived.profile.to_json(), "notes": derived.notes}


def _record(order: dict[str, Any]) -> dict[str, Any]:
    """Records one tape and writes it, or compares it."""
    from trainers.recording.op_table import CLASSIFIED

    task = TapeTask(**{**order, "path": Path(order["path"])})
    recorded = _recorded(task)
    if not task.check:
        unclassified = [name for name in recorded.get("operators", ()) if name not in CLASSIFIED]
        return _tape_answer(write_packed(recorded, task.path).stat().st_size, "", unclassified)
    if not is_stored(task.path):
        return _tape_answer(0, f"there is no {task.path}")
    stored = _read(task.path)
    old, new = ({key: value for key, value in tape.items() if key not in NOT_COMPARED} for tape in (stored, recorded))
    difference = first_difference(old, new)
    if difference and task.variant != PARAMETERS:
        difference = f"{_what_differs(task, stored, recorded)}; {difference}"
    return _tape_answer(len(pack(stored)), difference)


def _what_differs(task: TapeTask, stored: dict[str, Any], recorded: dict[str, Any]) -> str:
    """What differs between the JSON of two tapes, at the model's default shape."""
    profile, old, new = lookup.model(task.model), *(parse_tape(as_text(tape)) for tape in (stored, recorded))
    if task.component:
        return what_differs(old, new, default_part(profile, Component(task.component, task.variant)))
    return what_differs(old, new, default_shape(profile, new.regime))


def _tape_answer(nbytes: int, difference: str, unclassified: list[str] | None = None) -> dict[str, Any]:
    return {"nbytes": nbytes, "difference": difference, "unclassified": unclassified or []}


def _recorded(task: TapeTask) -> dict[str, Any]:
    """The JSON of the tape, or of the table of parameters, that a task names, recorded now."""
    from trainers.recording import tapes

    profile = lookup.model(task.model)
    if task.component:
        return tape_json(tapes.component_tape(profile, Component(task.component, task.variant)))
    if task.variant == PARAMETERS:
        return tapes.parameter_table(profile)
    variants = itertools.chain(default_variants(profile), requested_variants(profile))
    variant = next(variant for variant in variants if variant.name == task.variant)
    return tape_json(_of_own(profile, variant) if profile.is_own else tapes.record(profile, variant))


def _of_own(profile: ModelProfile, variant: Any) -> Tape:
    """Records a model whose config nobody vouches for: what its class makes of it may well fail."""
    from trainers.recording import tapes
    from trainers.recording.own import REFUSALS, refusal

    try:
        return tapes.record(profile, variant)
    except VplanError:
        raise
    except REFUSALS as error:
        whose = f" of {profile.lent_by}" if profile.lent_by else ""
        fault = f"a training step of {profile.name} cannot be run as {profile.diffusers_class}{whose}"
        raise refusal(error, fault, "complete the config, and name the pipeline's folder if there is one") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_recording(path)
    except DAMAGES as error:
        raise VplanError(f"tape {path.name} is damaged ({type(error).__name__})", "record it again") from None


WORK: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"derive": _derive, "record": _record}
