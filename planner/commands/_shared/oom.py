"""`vplan check --error`: what a pasted out-of-memory message says, and which tensor of a job asked for the memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner import dialects
from planner.dialects.base.script import Script
from planner.errors import VplanError
from planner.estimate.estimate import replay
from planner.foreign.case import read_case
from planner.foreign.oom_cause import Explanation, explain
from planner.foreign.oom_formats import ON_HOST, find
from planner.foreign.oom_message import LONGEST, parse_oom_message
from planner.layout.recordings import load_facts
from planner.units import GIB
from planner.untrusted import read_text


def _piped() -> str:
    return sys.stdin.buffer.read(LONGEST).decode("utf-8", "replace")


def _message(text: str) -> str:
    """The text of a message: from stdin, from a file, or as typed. A typed one is not the name of a file and has
    several words, or is a known error itself, such as `Killed`."""
    if text == "-":
        return _piped()
    typed = not os.path.isfile(text) and (len(text.split()) > 1 or find(text) is not None)
    return text if typed else read_text(Path(text), LONGEST)


def explained(text: str, script: Script | None, fields: Mapping[str, Any], machine: Mapping[str, Any]) -> Explanation:
    """The explanation of an out-of-memory message, of a file with one, or of standard input (`-`).

    With a script it also names the script's tensor that did not fit, on the given card or else on one with the capacity
    that the message states. Raises a VplanError when there is neither.
    """
    message = parse_oom_message(_message(text))
    alone = explain(message)
    if script is None or alone.cause in ON_HOST or message.requested_bytes is None:
        return alone
    if not machine.get("gpu"):
        if message.capacity_bytes is None:
            raise VplanError("the message does not state the card's capacity, and no card is given", "add --gpu 80GB")
        machine = {**machine, "gpu": f"{message.capacity_bytes / GIB:.2f}GiB"}
    dialect, given = dialects.read_script(script)
    case = read_case(dialect, given, fields, machine)
    configuration = case.configuration
    _, played = replay(configuration, load_facts(configuration, case.model, case.gpu), case.trainer)
    return explain(message, played)
