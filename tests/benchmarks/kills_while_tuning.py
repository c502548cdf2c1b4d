"""A hundred kills at random moments of a search lose nothing that was measured.

    python -m tests.benchmarks.kills_while_tuning [KILLS]

Starts a search of three probes on a simulated machine, kills its process at random, and goes on with the next; when a
search comes to its end, a new one begins. After every kill each row that was in the ledger must be there unchanged, and
at each end the study must know them all, none measured twice, and a plan as good. Needs vplan[train]; two minutes.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

from planner.evidence.ledger import Ledger
from tests.planner.search.searching import searched, worker


def work(folder: Path) -> None:
    searched(worker(folder))


def rows(folder: Path) -> list[str]:
    return [row.model_dump_json() for row in Ledger(folder / "ledger.jsonl").rows()]


def main(kills: int) -> None:
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "alone").mkdir()
        alone = worker(Path(name) / "alone")
        searched(alone)  # what it laid out, every process knows that is forked below
        started = time.monotonic()
        (Path(name) / "again").mkdir()
        searched(worker(Path(name) / "again"))
        longest = time.monotonic() - started
        hit = lost = twice = unknown = slower = another = searches = 0
        while hit < kills:
            folder = Path(name) / str(searches)
            folder.mkdir()
            searches += 1
            before: list[str] = []
            while True:
                process = multiprocessing.get_context("fork").Process(target=work, args=(folder,))
                process.start()
                process.join(random.uniform(0, longest))
                process.kill()
                process.join()
                after = rows(folder)
                lost += after[: len(before)] != before
                before = after
                hit += process.exitcode != 0
                print(f"{hit} kills, {len(after)} rows of search {searches}, {lost} ledgers changed", flush=True)
                if process.exitcode == 0:
                    break
            last = worker(folder)
            searched(last)
            ids = [row.id for row in last.ledger.rows()]
            twice += len(ids) - len(set(ids))
            unknown += len(set(ids) - {told.row.id for told in last.study.trials() if told.row})
            ends, undisturbed = last.tuner.best, alone.tuner.best
            assert ends is not None and undisturbed is not None
            slower += ends.measured.step_seconds > 1.05 * undisturbed.measured.step_seconds
            another += ends.strategy != undisturbed.strategy
            print(f"search {searches}: {twice} rows twice, {unknown} unknown, {another} another plan, {slower} slower")
    print(f"{hit} kills in {searches} searches: {lost} ledgers changed, {twice} rows measured twice,")
    print(f"{unknown} rows that a study did not know at its end, {another} searches that ended at another plan than")
    print(f"undisturbed, {slower} at one over 5 % slower")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
