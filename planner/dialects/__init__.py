"""Other trainers' words: how their commands and config files are read, and how ours are written for them.

One package per trainer. Its ``settings.DIALECT`` (`planner.dialects.base.dialect`) is the table of bindings between its
words and ours (`planner.dialects.base.bindings`). How these trainers hold memory is in `planner.layout.trainer_terms`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from planner.errors import VplanError, did_you_mean, quoted

if TYPE_CHECKING:
    from planner.dialects.base.dialect import Dialect, Invocation
    from planner.dialects.base.script import Script

TRAINERS = (
    "accelerate",
    "ai-toolkit",
    "diffsynth",
    "diffusers",
    "diffusers-pipeline",
    "diffusion-pipe",
    "easyanimate",
    "latentsync",
    "musubi-tuner",
    "sd-scripts",
    "videox-fun",
)
"""Trainers whose words we know."""


FORMER = ("diffsynth-2025",)
"""Trainers' former scripts, whose commands are still pasted; their terms are those of ``trainer@version``."""


FURTHER = ("sd-scripts-unet", "sd-scripts-hunyuan", "onetrainer", "simpletuner", "cogvideo")
"""Read and not written: further scripts of a trainer, under terms of their own (``trainer@version``), and trainers."""


UNREAD = {
    "simpletuner": "SimpleTuner",
    "--parallel_backend": "finetrainers",
    "OneTrainer": "OneTrainer",
    "--config-path": "OneTrainer",
    "axolotl": "axolotl",
}
"""Marks of trainers that people use and we do not read, so that the refusal can name them."""


UNREAD_CONFIGS: tuple[tuple[str, frozenset[str]], ...] = (
    ("FlyMyAI's lora-trainer", frozenset({"data_config", "pretrained_model_name_or_path"})),
    ("CogVideo's SAT finetuning", frozenset({"args", "model", "data"})),
    ("CogVideo's SAT finetuning", frozenset({"args", "deepspeed"})),
    ("ltx-trainer", frozenset({"training_strategy", "model", "lora"})),
    ("LTX-Video-Trainer", frozenset({"conditioning", "flow_matching", "acceleration"})),
    ("musubi-tuner, whose config needs its command", frozenset({"dit", "network_module"})),
)
"""Config files of trainers that we do not read: keys of the first level that together only this one has
(flymyai-lora-trainer train_configs, CogVideo finetune/configs, LTX-Video-Trainer configs)."""


@functools.cache
def all_dialects() -> dict[str, Dialect]:
    """All dialects, former versions of trainers included, by name."""
    table: tuple[Dialect, ...] = tuple(module(name).DIALECT for name in (*TRAINERS, *FORMER, *FURTHER))
    return {dialect.name: dialect for dialect in table}


def dialect(name: str) -> Dialect:
    """The dialect of a trainer by name; `trainer@version` gives the trainer's. Raises a VplanError that lists the
    supported ones."""
    table = all_dialects()
    name = name if name in table else name.partition("@")[0]
    if name not in table:
        listed = "supported trainers: " + ", ".join(table)
        raise VplanError(f"trainer {name} is not supported", did_you_mean(name, table, listed))
    return table[name]


def _configs(script: Script) -> Iterator[tuple[str, frozenset[str]]]:
    """The config that was given, or those that its commands name: what to call it, and its keys of the first level."""
    yield script.name, frozenset(script.config or ())
    for program in script.programs:
        if program.script.endswith("scripts/train.py"):  # a name of many; the others say whose they are
            for word in program.arguments[:1]:
                if word.endswith((".yaml", ".yml")):
                    yield quoted(word), frozenset(script.document(word) or ())


def read_script(script: Script) -> tuple[Dialect, Invocation]:
    """The dialect whose script, config or Python file this is, and its settings. Raises a VplanError that lists the
    supported trainers when it is none of theirs."""
    import profiles
    from planner.dialects.base import flags

    for name, keys in _configs(script):
        title = next((title for title, own in UNREAD_CONFIGS if own <= keys), "")
        if title:
            fault = f"{name} belongs to {title}, which is not supported"
            raise VplanError(
                fault, "pass the command that starts the training, or one of `vplan check --help`'s trainers"
            )
    readers = [dialect for dialect in all_dialects().values() if dialect.read_script is not None]
    for reader in readers:
        assert reader.read_script is not None
        invocation = reader.read_script(script)
        if invocation is not None:
            return reader, invocation
    scripts = ", ".join(dict.fromkeys(program.script for program in script.programs)) or script.name
    text = " ".join([scripts, *(word for program in script.programs for word in program.arguments)])
    title = next((title for mark, title in UNREAD.items() if mark in text), "")
    for reader in readers if not title else ():  # a mark says whose it is; `train.py` is the name of many
        for program in script.programs:
            entry_point = flags.find(reader.name, program.script) if reader.name in profiles.trainer_names() else None
            folder = program.script.rpartition("/")[0]
            if (
                entry_point is not None
                and program.script.endswith(entry_point.path)
                and not (entry_point.path == "train.py" and folder)
            ):
                fault = f"{entry_point.path} of {reader.title} is not supported"
                raise VplanError(fault, f"supported scripts: {', '.join(reader.scripts)}")
    named = scripts if len(scripts) <= 200 else quoted(scripts)
    fault = (
        f"{named} belongs to {title}, which is not supported"
        if title
        else f"{named} does not belong to a supported trainer"
    )
    raise VplanError(fault, f"supported: {', '.join(reader.title for reader in readers)}")


def module(name: str) -> ModuleType:
    """A trainer's settings: its ``DIALECT``, and where it writes files what each of their lines carries."""
    return importlib.import_module(f"planner.dialects.{name.replace('-', '_')}.settings")
