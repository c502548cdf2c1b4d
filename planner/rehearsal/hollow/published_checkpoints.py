"""Checkpoints in the layouts of those who published them: names and shapes from `profiles/checkpoints/*.toml`."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import functools
import itertools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import profiles
from planner.rehearsal.hollow.tensor_files import TensorEntry
from planner.schema import Flag, Record
from planner.spec.job import FloatDtype

FOLDER = Path(profiles.__file__).parent / "checkpoints"
REPOSITORIES = "repositories.toml"

Shape = tuple[int | str, ...]
"""Sizes as numbers, or as products of named sizes: `6*width`."""
Tensors = dict[str, Shape]
"""Name to shape. `blocks.{0-last}.norm{1,2}.weight` stands for many names: ranges and numbers, in braces."""


class CheckpointVariant(Record):
    """One published checkpoint of a layout."""

    files: tuple[str, ...] = ()
    """file names by which it is known"""
    parts: tuple[str, ...] = ()
    """which of the layout's parts it has beside `tensors`"""
    sizes: dict[str, int] = {}
    md5: str = ""
    """of the names and shapes in the published file, where somebody has recorded it"""


class CheckpointLayout(Record):
    """One file of `profiles/checkpoints`: tensors that several checkpoints share."""

    title: str
    sources: tuple[str, ...]
    dtype: FloatDtype
    is_transformers: Flag = False
    """the names are those that transformers publishes the encoder with"""
    checkpoints: dict[str, CheckpointVariant]
    tensors: Tensors
    parts: dict[str, Tensors] = {}


class PublishedCheckpoint(NamedTuple):
    """A checkpoint by its name."""

    name: str
    layout: CheckpointLayout
    variant: CheckpointVariant

    def tensors(self, dtype: str | None = None) -> list[TensorEntry]:
        """All tensors, of `dtype`, else of the published file's."""
        tables = [self.layout.tensors, *(self.layout.parts[part] for part in self.variant.parts)]
        return [
            TensorEntry(name, dtype or self.layout.dtype, shape)
            for table in tables
            for name, shape in _expanded(table, self.variant.sizes)
        ]


def _expanded(table: Mapping[str, Shape], sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for pattern, shape in table.items():
        numbers = tuple(_product(size, sizes) for size in shape)
        # re.split with a group: text, braces' content, text, ...
        pieces = re.split(r"\{([^{}]+)\}", pattern)
        choices = [_numbers(piece, sizes) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        for choice in itertools.product(*choices):
            yield "".join(choice), numbers


def _product(size: int | str, sizes: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else math.prod(_number(factor, sizes) for factor in size.split("*"))


def _numbers(text: str, sizes: Mapping[str, int]) -> list[str]:
    """`0-2,5` is 0, 1, 2 and 5; an end may be the name of a size."""
    ends = [[_number(end, sizes) for end in part.split("-")] for part in text.split(",")]
    return [str(number) for end in ends for number in range(end[0], end[-1] + 1)]


def _number(text: str, sizes: Mapping[str, int]) -> int:
    return sizes[text] if text in sizes else int(text)


@functools.cache
def published_checkpoints() -> dict[str, PublishedCheckpoint]:
    """All that we know, by name."""
    layouts = [
        CheckpointLayout.read(_toml(path), where=f"profile {path.name} is damaged")
        for path in sorted(FOLDER.glob("*.toml"))
        if path.name != REPOSITORIES
    ]
    return {
        name: PublishedCheckpoint(name, layout, variant)
        for layout in layouts
        for name, variant in layout.checkpoints.items()
    }


def checkpoint_of_file(name: str) -> PublishedCheckpoint | None:
    """The checkpoint that is published under a file name."""
    known = published_checkpoints().values()
    return next((checkpoint for checkpoint in known if name in checkpoint.variant.files), None)


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
