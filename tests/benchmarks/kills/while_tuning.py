"""Kills of `vplan tune` at random moments of a search lose nothing that was measured.

    python -m tests.benchmarks.kills.while_tuning [KILLS]

Starts a search of three probes on a simulated machine, kills the command at random, and gives it again; when a search
comes to its end, a new one begins. After every kill each row that was in the ledger must be there unchanged, and at
each end none was measured twice and the plan is the undisturbed one's. Needs vplan[train]; some five seconds a kill.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vplan
from tests.benchmarks.kills.killing import ended

WORDS = ("tune", "cogvideox-2b", "--gpu", "9GiB", "--host-ram", "32GiB", "--batch-size", "2", "--frames", "9",
         "--height", "240", "--width", "352", "--runner", "simulate", "--seed", "4", "--json")  # fmt: skip


def rows(home: Path) -> list[str]:
    """The lines of the ledger that are whole; a kill may leave a part of one."""
    path = home / "simulated.jsonl"
    found = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [line for line in found if line.endswith("}")]


def killed(within: float) -> bool:
    """Whether the command was alive at a random moment, and killed."""
    process = subprocess.Popen(vplan.command(*WORDS), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(random.uniform(0, within))
    process.kill()
    return process.wait() != 0


def main(kills: int) -> None:
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        os.environ["VPLAN_HOME"] = str(Path(name) / "alone")
        began = time.monotonic()
        alone = _answer(ended(WORDS))
        longest = time.monotonic() - began
        hit = searches = most = 0
        while hit < kills:
            home = Path(name) / str(searches)
            os.environ["VPLAN_HOME"] = str(home)
            searches += 1
            before: list[str] = []
            while hit < kills and killed(longest):
                hit += 1
                after = rows(home)
                assert after[: len(before)] == before, "a row that was measured is gone or another"
                before, most = after, max(most, len(after))
            found = _answer(ended(WORDS))
            assert rows(home)[: len(before)] == before
            ids = [json.loads(row)["id"] for row in rows(home)]
            assert len(ids) == len({*ids}), "a plan was measured twice"
            assert {*ids} == {row["id"] for row in found["probes"]}, "a study does not know all rows"
            assert found["plan"]["strategy"] == alone["plan"]["strategy"], "another plan than undisturbed"
    assert most, "no row was there when it was killed"
    print(f"{hit} kills in {searches} searches of {len(alone['probes'])} probes: no row lost or changed, none measured")
    print("twice, none unknown to its study at its end, and every search ended at the plan of the undisturbed one")


def _answer(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
