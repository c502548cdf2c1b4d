"""The base of every record: frozen, closed, and with one-line errors that name the nearest thing we know."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from planner.errors import VplanError, did_you_mean, nearest, quoted
from planner.units import MAX_BYTES, parse_bytes


def _size(value: object) -> object:
    """Lets a hand-written file say `"64GiB"` where the record holds bytes."""
    return parse_bytes(value) if isinstance(value, str) else value


# Strict, because `frames = true` and `frames = "81"` are mistakes. The ceilings catch slips of the keyboard (10**12).
Count = Annotated[int, Field(strict=True, ge=1, le=100_000)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=100_000)]
PositiveInt = Annotated[int, Field(strict=True, gt=0)]
Bytes = Annotated[int, BeforeValidator(_size), Field(strict=True, ge=0, le=MAX_BYTES)]
Text = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]

JsonObject = dict[str, Any]
"""An object that is printed as JSON and has no record of its own."""


class Refused(NamedTuple):
    """An annotation of a closed list: values that are known so that they can be refused by name. No list shows them."""

    values: frozenset[str]


class Record(BaseModel):
    """A frozen record with a closed set of fields. `read` is the way in for data that a person or a file gave."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True, defer_build=True)

    __slots__ = ("_hash",)

    def __hash__(self) -> int:
        """Of its fields, worked out once: a search looks strategies up a hundred thousand times."""
        try:
            known: int = object.__getattribute__(self, "_hash")
        except AttributeError:
            known = hash((type(self), *self.__dict__.values()))
            object.__setattr__(self, "_hash", known)
        return known

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str = "") -> Self:
        """The record of `data`, or a VplanError naming the first fault; `where` opens its message (a file's name)."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise _explain(cls, error, where) from None

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed, validated (pydantic's own `model_copy` does not validate).

        What was left at its default stays so: `planner.spec.rules.resolve` asks what the user said.
        """
        return self.read({**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values, under the names in docs/json.md."""
        return self.model_dump(mode="json", by_alias=True)


def choices(record: type[BaseModel], field: str) -> tuple[str, ...]:
    """The closed list of a field's values, in the order of preference of its declaration; empty when it is open.

    Without those that are always refused."""
    hidden = refused_values(record, field)
    found = [record.model_fields[field].annotation]
    while found:
        annotation = found.pop()
        if typing.get_origin(annotation) is typing.Literal:
            return tuple(str(value) for value in typing.get_args(annotation) if value not in hidden)
        found.extend(typing.get_args(annotation))
    return ()


def refused_values(record: type[BaseModel], field: str) -> frozenset[str]:
    """Values of a field's closed list that are always refused."""
    marks = (mark for mark in record.model_fields[field].metadata if isinstance(mark, Refused))
    return next(marks, Refused(frozenset())).values


def field_docs(record: type[BaseModel]) -> dict[str, str]:
    """The string under each field, as one line. Read from the source when help is asked for, not at every start."""
    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def _owner(record: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The record class that holds the last name of an error's location; None when the way there is not plain."""
    for name in location[:-1]:
        if isinstance(name, int):
            continue
        by_alias = {field.alias or key: field for key, field in record.model_fields.items()}
        found: list[Any] = [by_alias[name].annotation] if name in by_alias else []
        while found and not (isinstance(found[-1], type) and issubclass(found[-1], BaseModel)):
            found[-1:] = typing.get_args(found[-1])
        if not found:
            return None
        record = found[-1]
    return record


def _explain(record: type[BaseModel], error: ValidationError, where: str) -> VplanError:
    """The first fault of a validation, in one line of plain words with what to type instead."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    if fault["type"] == "missing":  # what is called much alike beside it is what is missed
        *place, missed = fault["loc"]
        beside = (one for one in faults if one["type"] == "extra_forbidden" and [*one["loc"][:-1]] == place)
        fault = next((one for one in beside if nearest(str(one["loc"][-1]), [str(missed)])), fault)
    location, kind, context = fault["loc"], fault["type"], fault.get("ctx", {})
    owner = _owner(record, location)
    name = ".".join(str(part) for part in location)
    opening = f"{where}: " if where else ""
    cause = context.get("error")
    if isinstance(cause, VplanError):
        return VplanError(f"{opening}{name} {cause.message}".replace("  ", " ").lstrip(), cause.fix)
    if kind == "extra_forbidden" and owner:
        known = [field.alias or key for key, field in owner.model_fields.items()]
        fix = did_you_mean(str(location[-1]), known, "the fields are " + ", ".join(known))
        return VplanError(f"{opening}{owner.__name__.lower()} has no field {quoted(location[-1])}", fix)
    if kind == "missing":
        return VplanError(f"{opening}{name} is missing", f"add {location[-1]}")
    if kind == "literal_error" and owner and location[-1] in owner.model_fields:
        known = list(choices(owner, str(location[-1])))
        fix = did_you_mean(str(fault["input"]), known, "write one of " + ", ".join(known))
        return VplanError(f"{opening}{name} {quoted(fault['input'])} is not known", fix)
    bound = {"less_than_equal": ("large", "le", "at most"), "greater_than_equal": ("small", "ge", "at least")}.get(kind)
    if bound:
        size, limit, side = bound
        return VplanError(f"{opening}{name} {quoted(fault['input'])} is too {size}", f"write {context[limit]} {side}")
    wanted = fault["msg"][0].lower() + fault["msg"][1:]
    return VplanError(f"{opening}{name} {quoted(fault['input'])} is wrong", wanted.removeprefix("input "))
