"""Whether the page's longest clips are those of the command line: two models of clips and two of pictures, asked one by
one on every class of card that the page has. Prints every difference.

    python -m tests.benchmarks.longest
"""

from __future__ import annotations

import json
import sys

from click.testing import CliRunner

import vplan
from planner.commands import cli
from reports.data import Builder

MODELS = {
    "wan2.2-t2v-a14b": ("frames", "frames"),
    "sd1.5": ("batch", "batch_size"),
    "ltx-video-2b": ("frames", "frames"),
    "flux.1-dev": ("batch", "batch_size"),
}
"""Model -> what is preferred, and the job's field that tells it."""


def main() -> int:
    """1 where page and command line differ."""
    asked = wrong = 0
    for model, (most, field) in MODELS.items():
        builder = Builder("plan.toml", vplan.estimate(model, gpu="24GB").to_plan())
        shown = {
            each.card: each
            for same_ram in (True, False)
            for each in (reach.longest for reach in builder.card_reaches(same_ram))
        }
        for card, longest in shown.items():
            words = ["suggest", model, "--gpu", card, "--prefer", most, "--json"]
            found = json.loads(CliRunner().invoke(cli, words).stdout)
            length = found["plan"]["job"][field]
            more = next((wish["to"] for wish in found["relax"] if wish["lossy"]), 0)
            said = (0, length) if found["plan"]["lossy"] else (length, more)
            page = longest.lossless, longest.lossy
            asked, wrong = asked + 1, wrong + (page != said)
            print(f"{'' if page == said else 'WRONG':6}{model:18}{card:6} page {page}, command line {said}")
    print(f"{asked - wrong} of {asked} alike")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
