"""One flag per field of Job, Machine and Strategy. Name, values and help all come from the record.

A flag only converts its text to the field's type. Whether the value is valid is up to the record.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from planner.catalog import card_lookup
from planner.commands._shared.verb import Function, starting_with
from planner.errors import VplanError, quoted
from planner.schema import choices, field_docs
from planner.spec.job import MAX_FRAMES, Bucket, Job, Machine, Strategy, ValidationShape
from planner.spec.training import TrainingSettings
from planner.units import parse_count

AUTO_BUCKETS = "auto"
"""`--buckets auto` asks for the shapes of the data."""

MAX = "max"
"""`--frames max` requests the longest clip that fits."""

_LONGEST_METAVAR = 26
"""Characters. A longer list of values goes into the help text, where it wraps."""

_docs = functools.cache(field_docs)


class FieldOption(click.Option):
    """The flag of one field. Its help text is read from the record's source, only when help is printed."""

    def __init__(self, names: Sequence[str], record: type[BaseModel], shows_default: bool) -> None:
        (field,) = names
        self.record, self.field = record, field
        self.section = getattr(record, "section", record.__name__)
        self.shows_default = shows_default
        flag = field.replace("_", "-")
        if bool in set(_leaves(record, field)):
            super().__init__([f"--{flag}/--no-{flag}", field], default=None)
        else:
            super().__init__(
                [f"--{flag}", field],
                callback=lambda _context, _option, text: None if text is None else _reader(record, field)(text),
            )

    @functools.cached_property
    def values(self) -> tuple[str, ...]:
        """The field's values if it has a closed list, else empty."""
        return choices(self.record, self.field)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes values of a closed list, or names of models and cards."""
        if self.field == "gpu":
            return complete_card(ctx, self, incomplete)
        if self.field == "model":
            return complete_model(ctx, self, incomplete)
        return starting_with(self.values, incomplete)

    def make_metavar(self, ctx: click.Context) -> str:
        """The placeholder for the value in the help: the list of values if it is short."""
        if self.is_flag:
            return super().make_metavar(ctx)
        if self.values and self.field not in _METAVARS:
            joined = "|".join(self.values)
            return joined if len(joined) <= _LONGEST_METAVAR else "NAME"
        leaves = set(_leaves(self.record, self.field))
        return _METAVARS.get(self.field, "X" if float in leaves else "N" if int in leaves else "TEXT")

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The option's flags and help text, for click's help page: the field's documentation, values and default."""
        words = [_docs(self.record).get(self.field, "")]
        if self.values and self.make_metavar(ctx) == "NAME":
            words.append(f"[one of: {', '.join(self.values)}]")
        default = self.record.model_fields[self.field].get_default()
        if self.shows_default and isinstance(default, str | int | float) and not isinstance(default, bool):
            words.append(f"[default: {default}]")
        self.help = "  ".join(words)
        return super().get_help_record(ctx)


def complete_card(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions: cards and their classes, also after a count (`2xrtx40`)."""
    count, name = re.fullmatch(r"(\d+x|)(.*)", incomplete).groups()  # type: ignore[union-attr]  # matches anything
    names = [*(group.name for group in card_lookup.gpu_classes()), *card_lookup.gpu_names()]
    return [CompletionItem(f"{count}{item.value}") for item in starting_with(names, name)]


def complete_model(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions: models by name."""
    from planner.catalog import lookup  # `vplan gpus` starts faster without what models are

    return starting_with(lookup.model_names(), incomplete)


def complete_target(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completions: models by name, and plan files and folders."""
    folder, _, _ = incomplete.rpartition("/")
    found = sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).glob("*"))
    prefix = f"{folder}/" if "/" in incomplete else ""
    paths = [f"{prefix}{path.name}" + ("/" if path.is_dir() else "") for path in found if not path.name.startswith(".")]
    plans = [CompletionItem(path) for path in paths if path.endswith((".toml", "/")) and path.startswith(incomplete)]
    return [*complete_model(context, parameter, incomplete), *plans]


def field_options(
    record: type[BaseModel], *, without: tuple[str, ...] = (), show_defaults: bool = True
) -> Callable[[Function], Function]:
    """Adds a flag for every field of `record`; the command gets each by its field's name, None when not typed."""
    fields = [field for field in record.model_fields if field not in without]

    def decorate(function: Function) -> Function:
        # Click puts the option added last first.
        for field in reversed(fields):
            function = click.option(field, cls=FieldOption, record=record, shows_default=show_defaults)(function)
        return function

    return decorate


def _annotations(record: type[BaseModel], field: str) -> Iterator[Any]:
    """A field's annotation and everything inside it, constraints included."""
    found: list[Any] = [record.model_fields[field].annotation, *record.model_fields[field].metadata]
    while found:
        annotation = found.pop()
        yield annotation
        found.extend(annotation.metadata if isinstance(annotation, FieldInfo) else typing.get_args(annotation))


def _leaves(record: type[BaseModel], field: str) -> Iterator[type]:
    return (found for found in _annotations(record, field) if isinstance(found, type))


def _reader(record: type[BaseModel], field: str) -> Callable[[str], Any]:
    """The function that converts the flag's text to the field's type."""
    flag = "--" + field.replace("_", "-")
    leaves = set(_leaves(record, field))
    if field in _SPECIAL:
        return functools.partial(_SPECIAL[field], flag=flag)
    if any(typing.get_origin(found) is tuple for found in _annotations(record, field)):
        return _names
    if float in leaves:
        return functools.partial(_number, flag=flag)
    if _METAVARS.get(field) == "SIZE":
        return _size
    if int in leaves:
        limits = list(_annotations(record, field))
        lowest = max((found.ge for found in limits if hasattr(found, "ge")), default=0)
        highest = min((found.le for found in limits if hasattr(found, "le")), default=10**6)
        return functools.partial(parse_count, what=flag, at_least=lowest, at_most=highest)
    if known := choices(record, field):
        return functools.partial(_choice, field=field, known=known)
    return str.strip


_OTHER_WORDS = {
    ("method", "qlora"): "a LoRA over a base in 4 bits; --method lora --weights-dtype nf4",
    ("method", "dora"): "a kind of adapter; --method lora --adapter dora",
    ("method", "lokr"): "a kind of adapter; --method lora --adapter lokr",
    ("method", "finetune"): "not the name of it here; --method full",
    ("method", "fullfinetune"): "not the name of it here; --method full",
}
"""(field, a value that people type without its dashes) -> what it is, and what to type."""


def _choice(text: str, field: str, known: tuple[str, ...]) -> str:
    """A value of a closed list, as it is written there: `AdamW_8bit` is `adamw-8bit`. Others are refused when the
    record is read. Raises a VplanError for a word that is said in two options here."""
    key = _key(text)
    if means := _OTHER_WORDS.get((field, key)):
        what, _, fix = means.partition("; ")
        raise VplanError(f"{field} {quoted(text)} is {what}", f"pass {fix}")
    return next((value for value in known if _key(value) == key), text.strip())


def _key(text: str) -> str:
    return re.sub(r"[-_\s]", "", text.lower())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _size(text: str) -> str:
    """A size as its record reads it. RAM is sold in GiB, so `64` and `64G` mean 64GiB."""
    return re.sub(r"(?i)^\s*(\d+(?:\.\d+)?)\s*g?\s*$", r"\1GiB", text).strip()


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise VplanError(f"{flag} {quoted(text)} is not a number", "write one as 0.05") from None


_SECONDS = re.compile(r"\d+(?:\.\d+)?\s*s(?:ec(?:ond)?s?)?", re.IGNORECASE)


def _frames(text: str, flag: str) -> int | str:
    if _SECONDS.fullmatch(text.strip()):
        fix = "write the number of frames: seconds times the model's rate, and one (5 s at 16 a second: 81)"
        raise VplanError(f"{flag} {quoted(text)} is a time", fix)
    return MAX if text.strip().lower() == MAX else parse_count(text, flag, at_most=MAX_FRAMES)


def _shape(text: str, flag: str, example: str, most: int) -> list[int]:
    parts = text.strip().lower().split("x")
    if not 3 <= len(parts) <= most:
        raise VplanError(f"{flag} {quoted(text)} is not a shape", f"write frames x height x width, as {example}")
    return [parse_count(part, flag) for part in parts]


def _buckets(text: str, flag: str) -> tuple[Bucket, ...] | str:
    """`81x480x832,1x720x1280x4`: frames, height, width, and the batch size if it differs from the job's; or `auto`."""
    if text.strip().lower() == AUTO_BUCKETS:
        return AUTO_BUCKETS
    shapes = [_shape(part, flag, "81x480x832,1x720x1280x4", 4) for part in text.split(",") if part.strip()]
    names = ("frames", "height", "width", "batch_size")
    return tuple(Bucket.read(dict(zip(names, shape, strict=False)), flag) for shape in shapes)


def _validation(text: str, flag: str) -> ValidationShape:
    """`81x480x832`, or `81x480x832,no-cfg` for a sample without guidance."""
    shape, comma, rest = text.partition(",")
    if comma and rest.strip().lower() != "no-cfg":
        raise VplanError(f"{flag} {quoted(text)} ends in something else than no-cfg", "write one as 81x480x832,no-cfg")
    frames, height, width = _shape(shape, flag, "81x480x832", 3)
    return ValidationShape.read({"frames": frames, "height": height, "width": width, "cfg": not comma}, flag)


def _betas(text: str, flag: str) -> tuple[float, ...]:
    return tuple(_number(part, flag) for part in text.split(","))


def _timestep_shift(text: str, flag: str) -> float | str:
    return "resolution" if text.strip().lower() == "resolution" else _number(text, flag)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "frames": _frames,
    "buckets": _buckets,
    "validation": _validation,
    "betas": _betas,
    "timestep_shift": _timestep_shift,
}

_METAVARS = {
    "betas": "X,X",
    "buckets": "auto|FxHxW[xB],...",
    "frames": "N|max",
    "gpu": "CARD",
    "host_ram": "SIZE",
    "lora_init": "NAME|FILE",
    "lora_targets": "NAME,...",
    "model": "MODEL",
    "reserve": "SIZE",
    "timestep_shift": "X|resolution",
    "torch": "VERSION",
    "trainable": "PATTERN,...",
    "validation": "FxHxW[,no-cfg]",
}


def job_options(function: Function) -> Function:
    """Adds the options for what to train: a flag per Job field, `--images`, and `--resolution` (a text whose meaning
    depends on the model)."""
    resolution = _in_section(Job, "--resolution", metavar="480p|HxW", help="height and width by name, or as 480x832")
    images = _in_section(Job, "--images", is_flag=True, default=None, help="train on images: --frames 1")
    return field_options(Job)(images(resolution(function)))


def machine_options(function: Function) -> Function:
    """A decorator that adds one option for every field of Machine but `links`, which only a plan file can hold."""
    return field_options(Machine, without=("links",))(function)


def training_options(function: Function) -> Function:
    """A decorator that adds an option for every field of TrainingSettings."""
    return field_options(TrainingSettings)(function)


def strategy_options(*, searched: bool) -> Callable[[Function], Function]:
    """Adds the options for how to make it fit: a flag per Strategy field, and `--zero-stage`. ``searched``: the command
    chooses the fields that were not typed, so the help must not state defaults."""

    def decorate(function: Function) -> Function:
        stage = _in_section(
            Strategy,
            "--zero-stage",
            metavar="0|1|2|3",
            callback=lambda _context, _option, text: (
                None if text is None else parse_count(text, "--zero-stage", at_least=0, at_most=3)
            ),
            help="short for --sharding zero-N; 0 is DeepSpeed's own word for none (ddp on several GPUs)",
        )
        return field_options(Strategy, show_defaults=not searched)(stage(function))

    return decorate


def _in_section(record: type[BaseModel], flag: str, **attributes: Any) -> Callable[[Function], Function]:
    class InSection(click.Option):
        section = record.__name__

    return click.option(flag, cls=InSection, **attributes)
