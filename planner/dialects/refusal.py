"""What was given to `vplan check` and is no command or config that a dialect reads: what it is, and what to give
instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import profiles
from planner.catalog.names import other_models
from planner.dialects import other_scripts
from planner.dialects.base import flags
from planner.dialects.base.script import PythonCommand, Script
from planner.errors import VplanError, quoted

if TYPE_CHECKING:
    from planner.dialects.base.dialect import Dialect

REHEARSE = "`vplan rehearse --gpu 24GB -- COMMAND` measures any training command without a GPU"
PASS_COMMAND = "pass the command that starts the training, or one of `vplan check --help`'s trainers"


class TrainerSign(NamedTuple):
    """Words that together only the commands of one trainer have, which is not read, or not by its commands."""

    title: str
    words: frozenset[str]
    """parts of the path of its script, or options"""
    instead: str = ""
    """what of it is read"""


SIGNS = (
    TrainerSign("SimpleTuner", frozenset({"simpletuner"}), "its config.json"),
    TrainerSign("OneTrainer", frozenset({"OneTrainer"}), "its config, a JSON file"),
    TrainerSign("OneTrainer", frozenset({"--config-path"}), "its config, a JSON file"),
    # finetrainers/args.py at f476c37; CogVideo's train.py says --model_path.
    TrainerSign("finetrainers", frozenset({"--parallel_backend"})),
    TrainerSign("finetrainers", frozenset({"--model_name", "--pretrained_model_name_or_path"})),
    TrainerSign("finetrainers", frozenset({"--model_name", "--dataset_config"})),
    TrainerSign("axolotl", frozenset({"axolotl"})),
)
"""Trainers that people use and whose commands are not read, so that the refusal can name them."""


class ModelScript(NamedTuple):
    """A script of a trainer that is read, for a model that has no profile."""

    trainer: str
    model: str
    """as `profiles/other_models.toml` names it"""
    nearest: str
    """ours that is most like it"""


MODEL_SCRIPTS = {
    "hidream_o1_train_network.py": ModelScript("musubi-tuner", "hidream-o1", "hidream-i1"),
    "hidream_o1_train.py": ModelScript("musubi-tuner", "hidream-o1", "hidream-i1"),
}
"""Its name -> what it trains (musubi-tuner docs/hidream_o1.md at 30c658c)."""


class UnpricedScript(NamedTuple):
    """A script of a trainer that is read, for a model that has a profile, whose own code of it is not priced."""

    trainer: str
    title: str
    why: str
    model: str
    """ours, or the first of several"""


UNPRICED_SCRIPTS = {
    # kandinsky5_train_network.py ``call_dit`` and ``load_transformer``, kandinsky5/models/attention.py ``sdpa``
    "kandinsky5_train_network.py": UnpricedScript(
        "musubi-tuner",
        "Kandinsky 5.0 Video",
        "it repeats the prompt for each latent frame, copies queries, keys and values for attention, and has an fp8 of "
        "its own",
        "kandinsky-5.0-t2v-lite",
    ),
    # frame_pack/hunyuan_video_packed.py ``gradient_checkpointing_method``, ``LayerNormFramePack``
    "fpack_train_network.py": UnpricedScript(
        "musubi-tuner",
        "FramePack",
        "it checkpoints what stands around its blocks too, and has norms of its own",
        "framepack",
    ),
}
"""Its name -> what it trains, and what diffusers' model, which is recorded, does not do (musubi-tuner at 30c658c)."""


UNREAD_CONFIGS: tuple[tuple[str, frozenset[str]], ...] = (
    ("FlyMyAI's lora-trainer", frozenset({"data_config", "pretrained_model_name_or_path"})),
    ("CogVideo's SAT finetuning", frozenset({"args", "model", "data"})),
    ("CogVideo's SAT finetuning", frozenset({"args", "deepspeed"})),
    ("LTX-Video-Trainer", frozenset({"conditioning", "flow_matching", "acceleration"})),
    ("musubi-tuner, whose config needs its command", frozenset({"dit", "network_module"})),
)
"""Config files of trainers that we do not read: keys of the first level that together only this one has
(flymyai-lora-trainer train_configs, CogVideo finetune/configs, LTX-Video-Trainer configs)."""


OF_A_PLAN = frozenset({"schema", "job", "strategy", "machine"})
"""Keys of the first level that every plan has (`planner.spec.plan`)."""

ALIKE = 0.8
"""Share of a config's keys that a file of a trainer has, at which it is said to be such a file."""


def other_model(script: Script) -> VplanError | None:
    """The refusal of a trainer's script for a model that has no profile, or whose code of it is not priced; None for
    any other."""
    for program in script.programs:
        name = PurePosixPath(program.script).name
        if unpriced := UNPRICED_SCRIPTS.get(name):
            fault = f"{name} is {unpriced.trainer}'s, whose own code of {unpriced.title} is not priced: {unpriced.why}"
            ours = f"`vplan suggest {unpriced.model} --gpu 24GB` answers for vplan's own trainer"
            return VplanError(fault, f"{REHEARSE}; {ours}")
        if (own := MODEL_SCRIPTS.get(name)) is None or (model := other_models.find(own.model)) is None:
            continue
        fault = f"{name} is {own.trainer}'s, for {model.title}, which has no profile: {model.missing}"
        near = f"the nearest that has one is {own.nearest}: `vplan suggest {own.nearest} --gpu 24GB`"
        return VplanError(fault, f"{near}; docs/trainers.md lists the models of {own.trainer} that do")
    return None


def unread_config(script: Script) -> VplanError | None:
    """The refusal of a config of a trainer that is not read, given or named by a command; None for any other."""
    for name, keys in _configs(script):
        title = next((title for title, own in UNREAD_CONFIGS if own <= keys), "")
        if title:
            return VplanError(f"{name} belongs to {title}, which is not supported", PASS_COMMAND)
    return None


def _configs(script: Script) -> Iterator[tuple[str, frozenset[str]]]:
    """The config that was given, or those that its commands name: what to call it, and its keys of the first level."""
    yield script.name, frozenset(script.config or ())
    for program in script.programs:
        if program.script.endswith("scripts/train.py"):  # a name of many; the others say whose they are
            for word in program.arguments[:1]:
                if word.endswith((".yaml", ".yml")):
                    yield quoted(word), frozenset(script.document(word) or ())


def refusal(script: Script, readers: Sequence[Dialect]) -> VplanError:
    """The error for what none of the dialects reads: it says what was given, as far as that can be seen."""
    if script.config is not None:
        return _of_config(script, script.config, readers)
    names = ", ".join(dict.fromkeys(program.script for program in script.programs)) or script.name
    named = names if len(names) <= 200 else quoted(names)
    words = [word for program in script.programs for word in program.arguments]
    for sign in SIGNS:
        if all(_has(word_of_it, names, words) for word_of_it in sign.words):
            if sign.instead:
                fault = f"{named} belongs to {sign.title}, whose commands are not read"
                return VplanError(fault, f"pass {sign.instead}")
            return VplanError(f"{named} belongs to {sign.title}, which is not supported", _trainers(readers))
    if found := _other_script(script, readers):
        return found
    if script.programs and not any(program.launcher for program in script.programs):
        fix = "pass the command that starts the training: `vplan check --gpu 24GB -- accelerate launch train.py ...`"
        return VplanError(f"{named} starts no Python script", fix)
    return VplanError(f"{named} does not belong to a supported trainer", f"{_trainers(readers)}; {REHEARSE}")


def _has(sign: str, names: str, words: Sequence[str]) -> bool:
    """Whether a sign is in a command: an option, or a part of a path or word."""
    if sign.startswith("--"):
        return any(word.partition("=")[0] == sign for word in words)
    return sign in " ".join([names, *words])


def _trainers(readers: Sequence[Dialect]) -> str:
    """The trainers that are read, each once: the brackets of a title say which of its scripts."""
    titles = (reader.title.partition(" (")[0] for reader in readers)
    return f"supported: {', '.join(dict.fromkeys(titles))}"


# ---- scripts


def _other_script(script: Script, readers: Sequence[Dialect]) -> VplanError | None:
    """The refusal of a script that a trainer has beside those that are read."""
    for reader in readers:
        if reader.name not in profiles.trainer_names():
            continue
        for program in script.programs:
            entry_point = flags.find(reader.name, program.script)
            if entry_point is None or entry_point.format != "argparse" or not _names(program.script, entry_point.path):
                continue
            known = readable(reader.name, readers)
            if entry_point.path not in known:
                fault = f"{entry_point.path} of {reader.title} is not supported"
                return VplanError(fault, _scripts(known))
    titles = {reader.name: reader.title.partition(" (")[0] for reader in readers}
    for program in script.programs:
        if found := other_scripts.whose(program.script):
            fault = f"{program.script} of {_joined(titles[trainer] for trainer in found)} is not supported"
            return VplanError(fault, _scripts(readable(found[0], readers)) if len(found) == 1 else REHEARSE)
    return None


def _scripts(known: Sequence[str]) -> str:
    return f"supported scripts of it: {', '.join(known)}; {REHEARSE}"


def _names(typed: str, path: str) -> bool:
    """Whether a typed path names a script. `train.py` alone is the name of many, and of nobody's."""
    return typed.endswith(path) and path != "train.py"


def readable(trainer: str, readers: Sequence[Dialect]) -> tuple[str, ...]:
    """The scripts of a trainer that are read, by whichever of its dialects."""
    own = [reader for reader in readers if reader.name.partition("@")[0] == trainer]
    tried = [entry.path for entry in flags.scripts(trainer) if entry.format == "argparse" and not entry.removed]
    listed = [path for reader in own for path in reader.scripts]
    return tuple(dict.fromkeys([*listed, *(path for path in tried if any(_reads(reader, path) for reader in own))]))


def _reads(reader: Dialect, path: str) -> bool:
    """Whether a dialect takes a command of this script for its own, or refuses it in the script's words."""
    assert reader.read_script is not None
    try:
        return reader.read_script(Script("the command", (PythonCommand("python", {}, path, ()),))) is not None
    except VplanError:
        return True


# ---- configs


def _of_config(script: Script, config: dict[str, Any], readers: Sequence[Dialect]) -> VplanError:
    """The refusal of a config file: empty, a data set's, or one that only its command says more about."""
    name = script.name
    if not config:
        return VplanError(f"{name} is empty", "pass a trainer's config, or the command that starts the training")
    if config.keys() >= OF_A_PLAN:
        fix = f"`vplan estimate {name}` prices it, and `vplan train {name}` trains it"
        return VplanError(f"{name} is a plan of vplan's own, not another trainer's config", fix)
    titles = {reader.name: reader.title for reader in readers}
    trained = [entry for trainer in profiles.trainer_names() if trainer in titles for entry in flags.scripts(trainer)]
    sets = [entry for entry in trained if PurePosixPath(entry.path).stem == "dataset"]
    if whose := _whose(config, sets):
        fault = f"{name} describes a data set of {_joined(titles[trainer] for trainer in whose)}, not a training"
        return VplanError(fault, "pass the config or command that names this file")
    with_file = [entry for entry in trained if "--config_file" in entry.flags and entry.format == "argparse"]
    if whose := _whose(config, with_file):
        theirs = _joined(titles[trainer] for trainer in whose)
        fault = f"{name} has options of {theirs} and does not say of which script"
        example = f"`vplan check --gpu 24GB -- accelerate launch SCRIPT.py --config_file {name}`"
        return VplanError(fault, f"pass the command that reads it: {example}")
    return VplanError(f"{name} does not belong to a supported trainer", _trainers(readers))


def _joined(names: Iterator[str]) -> str:
    return " or ".join(names)


def _whose(config: dict[str, Any], entry_points: Sequence[flags.EntryPoint]) -> list[str]:
    """The trainers whose files are most like a config; none where no file is."""
    shares: dict[str, float] = {}
    for entry_point in entry_points:
        share = entry_point.share(config)
        shares[entry_point.trainer] = max(share, shares.get(entry_point.trainer, 0.0))
    best = max(shares.values(), default=0.0)
    return [trainer for trainer, share in shares.items() if share == best] if best >= ALIKE else []
