"""What newcomers ask, through the real command line, and what the first screen says."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from click.testing import CliRunner

from planner.commands import cli

HERE = {"COLUMNS": "100", "VPLAN_HOME": os.devnull}


def said(line: str, code: int = 0, columns: int = 100) -> str:
    """What a command line prints, stdout and stderr, as one line a paragraph."""
    done = CliRunner().invoke(cli, line.split(), env={**HERE, "COLUMNS": str(columns)})
    assert done.exit_code == code, done.output
    return done.output


def prose(line: str, code: int = 0) -> str:
    """The same with its line breaks taken out."""
    return " ".join(said(line, code).split())


def answer(line: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(f"{line} --json", code))
    return found


# ---- host RAM


@pytest.mark.parametrize(
    "question", ["suggest wan2.2-t2v-a14b --gpu rtx5070ti", "suggest wan2.1-vace-14b --gpu 4090 --host-ram 32GiB"]
)
def test_host_ram_that_would_do_stands_first_and_does(question: str) -> None:
    first = answer(question, 3)["relax"][0]
    assert first["field"] == "host_ram" and first["lossy"]
    richer = answer(f"{re.sub(' --host-ram .*', '', question)} --host-ram {first['to']}")
    assert richer["plan"]["verdict"] == "fits"
    page = prose(question, 3)
    assert "not enough host RAM for a smaller one" in page
    assert f"change one of: --host-ram {first['to']} instead of" in page


def test_host_ram_is_not_offered_where_it_changes_nothing() -> None:
    question = "suggest wan2.2-animate-14b --gpu 4090"
    assert [wish["field"] for wish in answer(question, 3)["relax"]] == ["frames", "resolution"]
    assert "not enough GPU memory" in prose(question, 3)
    assert answer(f"{question} --host-ram 512GiB", 3)["plan"]["limit"] == "gpu"


def test_the_table_of_cards_says_what_more_host_ram_would_do() -> None:
    rows = {row["gpu"]: row for row in answer("suggest wan2.2-t2v-a14b --host-ram 32GiB")["classes"]}
    found = re.fullmatch(r"no with 32 GiB of host RAM; fits with (\d+) \(lossy\)", rows["16GB"]["reason"])
    assert found and rows["12GB"]["reason"].startswith("needs at least")
    answer(f"suggest wan2.2-t2v-a14b --gpu 16GB --host-ram {found[1]}GiB")
