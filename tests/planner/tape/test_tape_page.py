"""docs/tape-format.md: its example is a tape, and laid out it is what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from planner.tape.codec import parse_tape
from planner.tape.format import CATEGORIES, KINDS
from planner.tape.program import Program

PAGE = Path(__file__).parents[3] / "docs" / "tape-format.md"
GRID = {"B": 1, "F": 2, "H": 3, "W": 5, "T": 7, "R": 16, "E": 0}


def code(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def laid_out() -> Iterator[str]:
    tape, program = parse_tape(code("json")), Program()
    stages = [program.unfold(tape, piece) for piece in ("load", "step")]
    sizes = program.bytes_of(GRID)
    names = {buffer: name for tensors in program.named.values() for name, buffer in tensors.items()}
    for moment, events in (stretch for stage in stages for stretch in stage.stretches):
        where = f"{moment.module_list}.{moment.block}" if moment.module_list else "-"
        for event in events:
            line = f"{moment.passes:8}  {where:8}  "
            if event < 0:
                yield f"{line}frees     {~event}"
                continue
            what = f"allocates {event}  {program.category[event]:10}  {sizes[event]:4} bytes"
            yield f"{line}{what}  {program.op[event]:5}  {names.get(event, '')}".rstrip()


def test_the_pages_example_is_laid_out_as_it_says() -> None:
    assert list(laid_out()) == code("text").splitlines()


def test_the_page_lists_the_categories_and_kinds_by_their_numbers() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert ", ".join(f"{number} {name}" for number, name in enumerate(CATEGORIES)) in text
    assert ", ".join(f"{number} {name}" for number, name in enumerate(KINDS[:-1])) in text
