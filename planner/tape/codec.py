"""The JSON of tape files, from and to `planner.tape.format.Tape`: one array of numbers per event.

An array holds an event's fields in order, and its length says which event it is. The header, the tables and the
sections are checked as they are read; the events where they are first laid out, see `planner.tape.templates`. A damaged
file is refused in one line either way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import SchemaValidator, from_json
from pydantic_core import core_schema as schema

from planner.errors import VplanError
from planner.garbage_collection import without_garbage_collection
from planner.tape.format import (
    ATOMS,
    DAMAGED_FIX,
    FORMAT,
    HEAD,
    KINDS,
    READABLE,
    TAIL,
    BlockRun,
    Growing,
    Monomial,
    OperatorWork,
    Section,
    Tape,
    Template,
    counted_back,
)
from planner.tape.packed_json import DAMAGES, damaged_file
from planner.tape.packs import read_recording

GROW = "grow"
"""First item of a `Growing` size in the file, where a `Monomial` has its coefficient."""

MAX_BLOCKS = 10_000
"""More blocks than any model has; a limit, because a piece is laid out block by block."""

MAX_FACTOR = 1 << 48
"""The largest coefficient of a size: 256 TiB."""

MAX_EXPONENT = 8

_INT, _TEXT, _ANY = schema.int_schema(strict=True), schema.str_schema(strict=True), schema.any_schema()
_TEXTS, _INTS = schema.list_schema(_TEXT), schema.list_schema(_INT)
_BLOCKS = schema.int_schema(strict=True, ge=1, le=MAX_BLOCKS)


def _table(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Any:
    fields = {name: schema.typed_dict_field(value) for name, value in required.items()}
    fields |= {name: schema.typed_dict_field(value, required=False) for name, value in (optional or {}).items()}
    return schema.typed_dict_schema(fields)


_TEMPLATE = _table({"events": schema.list_schema(_ANY), "work": schema.list_schema(_INTS)})
_SECTION = _table(
    {"pass": _TEXT, "run": schema.nullable_schema(_INT), "templates": schema.list_schema(_TEMPLATE, min_length=1)},
    {"step": _INT, "block": _INT, "order": _INTS},
)
_BODY = _table(
    {
        "atoms": _TEXTS,
        "sizes": schema.list_schema(schema.list_schema(_ANY, min_length=2)),
        "runs": schema.list_schema(_table({"list": _TEXT, "start": _INT, "count": _BLOCKS, "recorded": _BLOCKS})),
        "names": _TEXTS,
        "ops": _TEXTS,
        "pieces": schema.dict_schema(_TEXT, schema.list_schema(_SECTION)),
    }
)
_FILE = SchemaValidator(
    _table(
        {
            "format": _INT,
            "model": _TEXT,
            "variant": _TEXT,
            "versions": schema.dict_schema(_TEXT, _TEXT),
            "regime": schema.dict_schema(_TEXT, _INT),
            "sums": schema.dict_schema(_TEXT, schema.tuple_schema([_INT, _TEXTS])),
            "tape": _BODY,
        },
        {
            "operators": _TEXTS,
            "rounded": schema.dict_schema(_TEXT, schema.tuple_schema([_TEXT, schema.int_schema(strict=True, gt=0)])),
            "tile": _INTS,
        },
    )
)
"""Schema of the file, except for events and sizes."""

_FAULTS = (ValueError, TypeError, KeyError, IndexError)
"""Exceptions of parsing a text that is not a tape; pydantic's errors are ValueErrors."""


def read_tape(path: Path) -> Tape:
    """Reads the tape at a path, in a file of its own or in a pack. Raises a VplanError with the path if it is damaged,
    or with the format if that is unknown."""
    try:
        return _parsed(lambda: read_recording(path))
    except VplanError:
        raise
    except (*DAMAGES, *_FAULTS) as error:
        raise damaged_file(path, error) from None


def parse_tape(text: str | bytes) -> Tape:
    """Parses the JSON text of a tape file. Raises a VplanError if it is not a tape."""
    try:
        return _parsed(lambda: from_json(text))
    except VplanError:
        raise
    except _FAULTS as error:
        raise VplanError(f"this is no tape ({type(error).__name__})", DAMAGED_FIX) from None


def tape_json(tape: Tape) -> dict[str, Any]:
    """A tape as JSON values: the arrays and tables that its file holds (docs/tape-format.md)."""
    return {
        "format": FORMAT,
        "model": tape.model,
        "variant": tape.variant,
        "versions": dict(tape.versions),
        "regime": dict(tape.regime),
        "sums": {name: [constant, list(products)] for name, (constant, products) in tape.sums.items()},
        **({"rounded": {name: list(length) for name, length in tape.rounded.items()}} if tape.rounded else {}),
        "operators": list(tape.operators),
        **({"tile": list(tape.tile)} if tape.tile is not None else {}),
        "tape": {
            "atoms": list(tape.atoms),
            "runs": [
                {"list": run.module_list, "start": run.start, "recorded": run.recorded, "count": run.count}
                for run in tape.runs
            ],
            "names": list(tape.names),
            "ops": list(tape.ops),
            "pieces": {name: list(map(_section_json, sections)) for name, sections in tape.pieces.items()},
            "sizes": list(map(_size_json, tape.sizes)),
        },
    }


def _size_json(size: Monomial | Growing) -> list[Any]:
    if isinstance(size, Growing):
        return [GROW, *([part.coefficient, list(part.exponents)] for part in size)]
    rounded = [size.multiple, size.inner, list(size.inner_exponents)] if size.multiple else []
    return [size.coefficient, list(size.exponents), *rounded, *([size.above] if size.above else [])]


def _section_json(section: Section) -> dict[str, Any]:
    templates = [
        {"events": template.arrays, "work": [[*work[:4], *work.exponents] for work in template.work]}
        for template in section.templates
    ]
    where: dict[str, Any] = {"step": section.step} if section.step else {"block": section.block}
    if section.order is not None:
        where["order"] = section.order
    return {"run": section.run, "pass": section.passes, "templates": templates, **where}


def _parsed(read: Callable[[], Any]) -> Tape:
    # Nothing of what is made here is garbage, and looking for some takes as long as the reading.
    with without_garbage_collection():
        return _Reader(_FILE.validate_python(read())).tape()


class _Reader:
    """Turns a file's JSON into a Tape. Raises one of `_FAULTS` if it is not a tape."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        if data["format"] not in READABLE:
            raise VplanError(f"tape of format {data['format']}, this vplan reads {FORMAT}", "record it again")
        self.data = data
        self.body = data["tape"]
        self.width = len(self.body["atoms"])
        self.unrounded = (1, 0, [0] * self.width, 0)
        self.runs = tuple(
            BlockRun(run["list"], run["start"], run["count"], run["recorded"]) for run in self.body["runs"]
        )

    def tape(self) -> Tape:
        data, body = self.data, self.body
        rounded: dict[str, tuple[str, int]] = data.get("rounded", {})
        sums = {name: (constant, tuple(products)) for name, (constant, products) in data["sums"].items()}
        _check({*body["atoms"]} <= {*ATOMS, *rounded, *sums} and {*data["regime"]} <= {*ATOMS})
        _check({*"".join(product for product, _ in rounded.values())} <= {*ATOMS})
        _check({*"".join(itertools.chain(*(products for _, products in sums.values())))} <= {*ATOMS, *rounded})
        return Tape(
            model=data["model"],
            variant=data["variant"],
            versions=data["versions"],
            regime=data["regime"],
            atoms=tuple(body["atoms"]),
            sums=sums,
            sizes=tuple(map(self._size, body["sizes"])),
            runs=self.runs,
            names=tuple(body["names"]),
            ops=tuple(body["ops"]),
            pieces={
                name: [self._section(section, at) for at, section in enumerate(sections)]
                for name, sections in body["pieces"].items()
            },
            tile=tuple(data["tile"]) if "tile" in data else None,
            rounded=rounded,
            operators=tuple(data.get("operators", ())),
        )

    def _size(self, size: list[Any]) -> Monomial | Growing:
        if size[0] == GROW:
            _, base, slope = size
            return Growing(self._monomial(*base), self._monomial(*slope))
        return self._monomial(*size)

    def _monomial(self, coefficient: int, exponents: list[int], *rounded: Any) -> Monomial:
        multiple, inner, inner_exponents, above = (*rounded, 0) if len(rounded) == 3 else rounded or self.unrounded
        factors, powers = (coefficient, multiple, inner, above), [*exponents, *inner_exponents]
        _check(len(exponents) == len(inner_exponents) == self.width and {*map(type, (*factors, *powers))} == {int})
        _check(max(map(abs, factors)) <= MAX_FACTOR and min(above, *powers) >= 0 and multiple != 0)
        _check(max(powers, default=0) <= MAX_EXPONENT)
        if not rounded:
            return Monomial(coefficient, tuple(exponents))
        return Monomial(coefficient, tuple(exponents), multiple, inner, tuple(inner_exponents), above)

    def _section(self, data: Mapping[str, Any], at: int) -> Section:
        run, step, order = data["run"], data.get("step", 0), data.get("order")
        templates = [
            Template(template["events"], list(map(self._work, template["work"]))) for template in data["templates"]
        ]
        if self.data["format"] != FORMAT:
            templates = [template._replace(arrays=counted_back(template.arrays, at)) for template in templates]
        _check(run is None or run in range(len(self.runs)))
        if not step:
            _check(len(templates) == 1 and order is None)
            return Section(data["pass"], run, templates, block=data.get("block", 0))
        _check(step in (1, -1) and run is not None)
        count, kept = self.runs[run].count, len(templates)
        if order is not None:
            _check(len(order) == count and {*order} <= {*range(kept)})
        else:
            _check(kept == count or HEAD + 1 + TAIL <= kept <= count + 1)
        return Section(data["pass"], run, templates, step, order=order)

    def _work(self, array: list[int]) -> OperatorWork:
        kind, half, flops, nbytes, *exponents = array
        _check(len(exponents) == self.width and 0 <= kind < len(KINDS) and 0 <= half <= 1)
        return OperatorWork(kind, half, flops, nbytes, tuple(exponents))


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError
