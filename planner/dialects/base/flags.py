"""Other trainers' flags and config keys, as data: read in their sources at a commit and kept in profiles/trainers/.

A command line is parsed by argparse itself, set up from the data, so that `--a=b`, numbers of values, choices and
abbreviations are as that trainer takes them. Nothing of a command runs, and no file that it names is opened.
"""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import argparse
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

from pydantic import Field

import profiles
from planner.errors import VplanError, nearest, quoted
from planner.schema import Record

Scalar = str | int | float | bool
Text = Annotated[str, Field(min_length=1, max_length=1_000)]


class Flag(Record):
    """One flag of a trainer's script, or one key of its config file."""

    name: Text
    """with its dashes (`--num_frames`), or as a path of keys (`model.dtype`, `directory[].path`)"""
    aliases: tuple[str, ...] = ()
    type: Literal["int", "float", "str", "bool", "path", "list", "dict", "any"] = "str"
    action: str = "store"
    """argparse's: store, store_true, append, ..."""
    nargs: str | int | None = None
    choices: tuple[Scalar | None, ...] | None = None
    default: Any = None
    required: bool = False
    gone: str | None = None
    """for a flag that was taken away: when, and what says the same now"""

    def fault(self, value: object) -> str:
        """Why a config key cannot have this value, in words; empty when it can. Types `any` and unknown ones take
        everything."""
        kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
        accepted = kinds.get(self.type)
        if self.choices and value not in self.choices:
            return f"is none of {', '.join(map(str, self.choices))}"
        if not accepted or isinstance(value, (accepted, list | dict)):
            return ""
        return f"is no {self.type}"


class Parsed(NamedTuple):
    """The flags of a command line or the keys of a config file, parsed for one script."""

    values: dict[str, Any]
    """flag -> value, of those that were given; a repeated flag's last value, as argparse does it"""
    unknown: tuple[str, ...]
    """flags that this script has not, and words that belong to none"""
    removed: dict[str, str]
    """flags that it had once -> since when, and what instead"""
    refused: dict[str, str] = {}
    """those of `unknown` that end the script before it starts -> why, with the flag that may be meant"""


class EntryPoint(NamedTuple):
    """One script of a trainer, or one kind of its config files, with all its flags or keys."""

    trainer: str
    source: str
    path: str
    commit: str
    read_at: str
    format: Literal["argparse", "toml", "yaml"]
    removed: str | None
    """for a script that is no more: since when, and what took its place"""
    flags: dict[str, Flag]
    lenient: bool = False
    """whether it parses with `parse_known_args`, to which flags that it has not are nothing"""

    def parse(self, argv: Sequence[str]) -> Parsed:
        """A command line's words behind the script's name; a VplanError where the script itself would refuse them."""
        assert self.format == "argparse"
        values, rest = _known_parser(self.trainer, self.path).parse_known_args(list(argv))
        parsed = self._parsed(values, rest)
        refused = {} if self.lenient else {name: self._refusal(name) for name in parsed.unknown if _is_typed(name)}
        return parsed._replace(refused=refused)

    def _refusal(self, name: str) -> str:
        """Why its `parse_args` ends the run. Its flags were read at a commit, and a user's may be newer."""
        live = [known for flag in self.flags.values() if not flag.gone for known in (flag.name, *flag.aliases)]
        why = f"not an option of {PurePosixPath(self.path).name} at {self.commit}"
        meant = _did_you_mean(name, live, "")
        return f"{why}: {meant}" if meant else why

    def launch(self, argv: Sequence[str]) -> tuple[Parsed, list[str]]:
        """Parses a launcher's command line: its own flags, and the script that it starts with that script's arguments.
        Raises a VplanError where the launcher would refuse them."""
        parser = _parser(self)
        parser.add_argument("script")
        parser.add_argument("words", nargs=argparse.REMAINDER)
        values, rest = parser.parse_known_args(list(argv))
        return self._parsed(values, rest), [values.script, *values.words]

    def _parsed(self, values: argparse.Namespace, rest: Sequence[str]) -> Parsed:
        present = {name: getattr(values, name) for name in self.flags if hasattr(values, name)}
        removed = {name: self.flags[name].gone or "" for name in present if self.flags[name].gone}
        live = {name: value for name, value in present.items() if name not in removed}
        return Parsed(live, tuple(_unknown(rest)), removed)

    def parse_config(self, config: Mapping[str, Any]) -> Parsed:
        """A config file's tables. Of a script with flags, keys are flags without dashes, in whatever table they stand
        (sd-scripts and musubi-tuner read their ``--config_file`` so)."""
        flat = _flags_of(config) if self.format == "argparse" else _flat(config, "")
        values: dict[str, Any] = {}
        unknown: list[str] = []
        removed: dict[str, str] = {}
        for name, value in flat:
            flag = self.flags.get(_any_index(name))
            if flag is None:
                if not self._holds(name):
                    unknown.append(name)
            elif flag.gone:
                removed[name] = flag.gone
            elif fault := flag.fault(value):
                raise VplanError(f"{name} {quoted(value)} {fault}", f"{self.trainer} takes {flag.type} there")
            else:
                values[name] = value
        return Parsed(values, tuple(unknown), removed)

    def share(self, config: Mapping[str, Any]) -> float:
        """The share of a config's keys that are this script's or file's, from 0 to 1; 0 for an empty one."""
        flat = _flags_of(config) if self.format == "argparse" else _flat(config, "")
        known = [name for name, _ in flat if _any_index(name) in self.flags or self._holds(name)]
        return len(known) / len(flat) if flat and config else 0.0

    def _holds(self, name: str) -> bool:
        """Whether a key lies inside a table that the trainer hands on whole (`optimizer.betas`)."""
        parents = _any_index(name).split(".")[:-1]
        tables = (".".join(parents[: depth + 1]) for depth in range(len(parents)))
        return any((flag := self.flags.get(table)) and flag.type == "dict" for table in tables)

    def default(self, name: str) -> Any:
        """The default value of a flag or key. Raises a VplanError for a name that this script does not have."""
        if name not in self.flags:
            fix = _did_you_mean(name, self.flags, f"{self.path} has {len(self.flags)} flags")
            raise VplanError(f"{self.path} has no {quoted(name)}", fix)
        return self.flags[name].default


class _Parser(argparse.ArgumentParser):
    """argparse that answers instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        unset = re.search(r"'\$\{?(\w+)", message)
        fix = f"${unset[1]} is not assigned: write its value" if unset else "use the flag as that script takes it"
        raise VplanError(f"{self.prog} rejects this: {message}", fix)


_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool}
_SWITCHES = {"store_true": True, "store_false": False}


@functools.lru_cache(maxsize=32)
def _known_parser(trainer: str, path: str) -> argparse.ArgumentParser:
    return _parser(next(entry_point for entry_point in scripts(trainer) if entry_point.path == path))


def _parser(script: EntryPoint) -> argparse.ArgumentParser:
    # SUPPRESS leaves out what was not typed: a default must not count as a setting.
    parser = _Parser(prog=PurePosixPath(script.path).name, add_help=False, argument_default=argparse.SUPPRESS)
    for flag in script.flags.values():
        names = (flag.name, *flag.aliases)
        settings: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS}
        if flag.action in _SWITCHES:
            parser.add_argument(*names, action="store_const", const=_SWITCHES[flag.action], **settings)
        elif flag.action == "boolean_optional":
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, **settings)
        else:
            settings["action"] = "append" if flag.action == "append" else "store"
            # Types that argparse has no check for (paths, lists) stay text, and the dialect reads them.
            settings["type"] = _TYPES.get(flag.type, str)
            if flag.choices:
                settings["choices"] = flag.choices
            if flag.nargs is not None:
                settings["nargs"] = flag.nargs
            if flag.nargs == "?":
                settings["const"] = True
            parser.add_argument(*names, **settings)
    return parser


def _did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A fix naming the flags nearest in spelling, or ``otherwise``. The dashes that all flags have are no likeness."""
    flags_by_word = {flag.lstrip("-"): flag for flag in known}
    close = nearest(name.lstrip("-"), flags_by_word)
    return "did you mean " + " or ".join(flags_by_word[word] for word in close) + "?" if close else otherwise


def _unknown(words: Sequence[str]) -> list[str]:
    """Unknown flags without their values; words that follow no flag stand for themselves."""
    names: list[str] = []
    behind_flag = False
    for word in words:
        is_flag = word.startswith("-") and not word.lstrip("-").replace(".", "").isdigit()
        if is_flag or not behind_flag:
            names.append(word.split("=", 1)[0] if is_flag else word)
        behind_flag = is_flag or behind_flag
    return names


def _is_typed(name: str) -> bool:
    """Whether an unknown word is a flag as somebody typed it: a word without dashes may be left of what was pasted, and
    `$NAME` stands for what only the shell knows."""
    return name.startswith("-") and "$" not in name


def _flags_of(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in config.items():
        leaves += _flags_of(value) if isinstance(value, Mapping) else [(f"--{key}", value)]
    return leaves


def _flat(value: Any, name: str) -> list[tuple[str, Any]]:
    """Leaves of nested tables with the way to each: `a.b`, and `a[0].b` inside a list of tables."""
    if isinstance(value, Mapping) and value:
        return [leaf for key, item in value.items() for leaf in _flat(item, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [leaf for at, item in enumerate(value) for leaf in _flat(item, f"{name}[{at}]")]
    return [(name, value)]


def _any_index(name: str) -> str:
    """`a[3].b` -> `a[].b`, as the data calls it."""
    return ".".join(part[: part.index("[")] + "[]" if part.endswith("]") else part for part in name.split("."))


class _Entry(Record):
    path: Text
    commit: Text
    read_at: Text
    format: Literal["argparse", "toml", "yaml"] = "argparse"
    removed: str | None = None
    lenient: bool = False
    files: tuple[str, ...] = ()


class _Group(Record):
    scripts: tuple[str, ...]
    flag: tuple[Flag, ...]


class _File(Record):
    trainer: Text
    source: Text
    script: tuple[_Entry, ...]
    group: tuple[_Group, ...]


@functools.cache
def scripts(trainer: str) -> tuple[EntryPoint, ...]:
    """All entry points of a trainer, from its file in `profiles/trainers/`. Raises a VplanError for an unknown trainer
    or a damaged file."""
    if trainer not in profiles.trainer_names():
        names = ", ".join(profiles.trainer_names())
        raise VplanError(f"trainer {quoted(trainer)} is not supported", f"supported: {names}")
    path = profiles.trainer_path(trainer)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise VplanError(f"profile {path.name} is damaged: {error}", "reinstall vplan") from None
    file = _File.read(data, where=f"profile {path.name} is damaged")
    entry_points = []
    for entry in file.script:
        listed = [row for group in file.group if {"*", entry.path} & set(group.scripts) for row in group.flag]
        flags = {flag.name: flag for flag in listed}
        at = (entry.path, entry.commit, entry.read_at, entry.format, entry.removed)
        entry_points.append(EntryPoint(file.trainer, file.source, *at, flags, entry.lenient))
    return tuple(entry_points)


def find(trainer: str, path: str) -> EntryPoint | None:
    """The script that a path names by its end, the longest end first (`/opt/x/scripts/train.py` is `scripts/train.py`);
    None when none does, or several do equally."""
    parts = PurePosixPath(path.replace("\\", "/")).parts
    best: list[EntryPoint] = []
    longest = 0
    for entry_point in scripts(trainer):
        tail = PurePosixPath(entry_point.path).parts
        alike = 0
        while alike < min(len(parts), len(tail)) and parts[-1 - alike] == tail[-1 - alike]:
            alike += 1
        if alike > longest:
            best, longest = [entry_point], alike
        elif alike and alike == longest:
            best.append(entry_point)
    return best[0] if len(best) == 1 else None


def script(trainer: str, path: str) -> EntryPoint:
    """The script that a path names by its end, as `find`. Raises a VplanError that lists the trainer's scripts when
    there is none."""
    entry_point = find(trainer, path)
    if entry_point is None:
        paths = ", ".join(other.path for other in scripts(trainer))
        raise VplanError(f"{trainer} script {quoted(path)} is not supported", f"supported: {paths}")
    return entry_point
