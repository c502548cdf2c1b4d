"""A trainer's command, read by the list of its script's flags, and written as a shell has it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from planner.dialects.base import flags
from planner.dialects.base.bindings import Remark, Settings
from planner.dialects.base.dialect import Invocation
from planner.dialects.base.launchers import ALLOCATOR
from planner.dialects.base.script import PythonCommand
from planner.spec.plan import Plan


def parse_program(trainer: str, program: PythonCommand, launch: Settings, notes: Sequence[str] = ()) -> Invocation:
    """The invocation of a trainer's script: its flags, parsed by the trainer's own list of them, together with the
    launcher's settings. Raises a VplanError where the script would refuse them."""
    script = flags.script(trainer, program.script)
    parsed = script.parse(program.arguments)
    removed = tuple(Remark(name, why) for name, why in parsed.removed.items())
    if script.removed:
        removed = (Remark(script.path, script.removed), *removed)
    settings = {"script": script.path, **launch, **parsed.values}
    return Invocation(trainer, settings, parsed.unknown, removed, tuple(notes), refused_flags(parsed))


def refused_flags(parsed: flags.Parsed) -> tuple[Remark, ...]:
    """What ends the run before it starts, of a command line that was parsed."""
    return tuple(Remark(name, why) for name, why in parsed.refused.items())


def token_beside_wandb(settings: Settings, source: str) -> Iterator[Remark]:
    """What diffusers' examples, and scripts that were made of them, check first: a token on the command line, which
    wandb would log."""
    if settings.get("--report_to") == "wandb" and settings.get("--hub_token") is not None:
        yield Remark("--hub_token", f"refused with --report_to wandb: log in by hf auth login instead ({source})")


def command_line(settings: Settings, extra: Mapping[str, object], launcher: Iterable[str]) -> str:
    """One launchable command: the launcher, its flags, the script, its flags and `extra` that no Plan field carries."""
    flags_of = {name: value for name, value in settings.items() if name.startswith("--")}
    words = [*launcher]
    for name, value in settings.items():
        if name.startswith("launch:"):
            words.append(_flag(name.removeprefix("launch:"), value))
    lines = [" ".join([*words, str(settings["script"])])]
    lines += [_flag(name, value) for name, value in {**flags_of, **extra}.items()]
    return " \\\n  ".join(lines) + "\n"


def command_settings(settings: Settings) -> Settings:
    """The settings that appear in a command line: without the counts of GPUs and nodes, and without what the
    environment sets."""
    return {name: value for name, value in settings.items() if ":" not in name or name.startswith("launch:")}


def script_head(plan: Plan) -> str:
    """The first lines of a shell script, with PyTorch's allocator settings where the plan needs them."""
    allocator = f"export {ALLOCATOR}\n" if plan.strategy.expandable_segments else ""
    return f"#!/bin/bash\nset -e\n{allocator}"


def _flag(name: str, value: object) -> str:
    if value is True:
        return name
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([name, *(shlex.quote(str(item)) for item in values)])
