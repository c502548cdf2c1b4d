"""Config files as text, with a comment behind each line that a Plan field decides."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from planner.dialects.base.bindings import Binding, Fields, Settings, When, is_edit
from planner.dialects.base.dialect import Dialect
from planner.errors import VplanError
from planner.spec.job import Job, Strategy

Comments = Mapping[str, str]
"""key, tables joined with dots -> what stands behind its line"""


FieldsBySetting = Mapping[str, tuple[str, ...]]
"""setting -> fields"""


def tree(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The settings of one file as tables: `config:model.dtype` -> {"model": {"dtype": ...}}; `datasets[0].x` is the
    first of a list of tables."""
    document: dict[str, Any] = {}
    for name, value in settings.items():
        if not name.startswith(prefix):
            continue
        *path, last = name.removeprefix(prefix).split(".")
        inner = document
        for table in path:
            if table.endswith("[0]"):
                inner = inner.setdefault(table.removesuffix("[0]"), [{}])[0]
            else:
                inner = inner.setdefault(table, {})
        inner[last] = value
    return document


def fields_by_setting(
    dialect: Dialect, settings: Settings, listed: FieldsBySetting | None = None, fields: Fields | None = None
) -> dict[str, tuple[str, ...]]:
    """Setting -> the Plan fields that it carries, as `job.frames`, of those settings that were written.

    `listed`: what a dialect says of settings whose binding has several fields. `fields`: the plan's, from which the
    settings were written; a binding may write more than it lists.
    """
    carries = {}
    for entry in dialect.entries:
        binding = entry.binding if isinstance(entry, When) else entry
        applies = fields is not None and not (isinstance(entry, When) and fields[entry.field] not in entry.values)
        written = binding.to_settings(fields) if applies and fields is not None else {}
        for setting in dict.fromkeys([*binding.settings, *written]):
            if setting in settings and not is_edit(setting):
                carried_fields = (listed or {}).get(setting) or _carries(binding, setting, settings)
                carries[setting] = tuple(_whose(field) for field in carried_fields)
    return carries


def _carries(binding: Binding, setting: str, settings: Settings) -> tuple[str, ...]:
    """The fields of a binding that would be others without this setting; all of them if none would be."""
    if len(binding.fields) == 1:
        return binding.fields
    others = {name: value for name, value in settings.items() if name != setting}
    try:
        now, without = binding.to_fields(settings), binding.to_fields(others)
    except (VplanError, KeyError):  # the setting cannot be left out
        return binding.fields
    return tuple(field for field in binding.fields if now[field] != without[field]) or binding.fields


def _whose(field: str) -> str:
    record = "job" if field in Job.model_fields else "strategy" if field in Strategy.model_fields else "machine"
    return f"{record}.{field}"


def comments(fields: Mapping[str, tuple[str, ...]], prefix: str) -> dict[str, str]:
    """The comments of one file: key -> the Plan fields that it carries. ``prefix``: that file's settings."""
    return {
        name.removeprefix(prefix).replace("[0]", ""): ", ".join(carried)
        for name, carried in fields.items()
        if name.startswith(prefix)
    }


_UNREADABLE = re.compile("[^ -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""PyYAML's reader refuses these, or takes them for ends of lines."""


def yaml(value: Mapping[str, Any], comments: Comments, head: str) -> str:
    """The text of a YAML file, with scalars as in JSON, which YAML 1.2 and PyYAML read alike. ``comments``: behind
    keys; ``head``: comment lines at the top."""
    return "".join(f"# {line}\n" for line in head.splitlines()) + "\n".join(_yaml(value, comments, "", "")) + "\n"


def _yaml(value: Mapping[str, Any], comments: Comments, path: str, indent: str) -> Iterator[str]:
    for key, inner in value.items():
        key_path = f"{path}.{key}" if path else key
        behind = f"  # {comments[key_path]}" if key_path in comments else ""
        if isinstance(inner, Mapping):
            yield f"{indent}{key}:{behind}"
            yield from _yaml(inner, comments, key_path, indent + "  ")
        elif isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            yield f"{indent}{key}:{behind}"
            for item in inner:
                lines = list(_yaml(item, comments, key_path, indent + "    "))
                yield f"{indent}  - {lines[0].lstrip()}"
                yield from lines[1:]
        else:
            yield f"{indent}{key}: {_scalar(inner)}{behind}"


def _scalar(value: Any) -> str:
    """JSON, with exponents that PyYAML takes for numbers too (YAML 1.1 wants a point in `1.0e-4`), and what it does not
    read as it stands written as it does."""
    text = _UNREADABLE.sub(lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text


def toml(value: Mapping[str, Any], comments: Comments, head: str) -> str:
    """The text of a TOML file: plain keys first, then the tables. ``comments``: behind keys; ``head``: comment lines at
    the top."""
    return "".join(f"# {line}\n" for line in head.splitlines()) + "\n".join(_toml(value, comments, "")) + "\n"


def _toml(value: Mapping[str, Any], comments: Comments, path: str) -> Iterator[str]:
    import tomli_w  # only writers need it

    tables: list[tuple[str, str, Any]] = []
    for key, inner in value.items():
        key_path = f"{path}.{key}" if path else key
        if isinstance(inner, Mapping):
            tables.append((f"[{key_path}]", key_path, inner))
        elif isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            tables += [(f"[[{key_path}]]", key_path, item) for item in inner]
        else:
            name = tomli_w.dumps({key: 0}).partition(" = ")[0]
            yield f"{name} = {_toml_value(inner)}" + (f"  # {comments[key_path]}" if key_path in comments else "")
    for title, key_path, inner in tables:
        yield ""
        yield title
        yield from _toml(inner, comments, key_path)


def _toml_value(value: Any) -> str:
    import tomli_w

    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
