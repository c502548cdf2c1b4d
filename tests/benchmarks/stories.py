"""The five stories at half and double length, on four cards and 1, 4 and 8 GPUs.

`python tests/benchmarks/stories.py [STORY...]`

Says where a verdict gets worse with a shorter clip or a larger card, and where a printed change, made and checked
again, does not fit or has an entry that can be left out. Takes some minutes.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.stories import stories

CARDS = ("24GB", "48GB", "h100-80gb", "h200")
COUNTS = (1, 4, 8)
RANK = ("no", "tight", "fits")
QUICK = "--no-fixes"

STORIES = {
    "diffsynth": [f"{stories.DIFFSYNTH} --num_frames {frames}" for frames in (41, 81, 161)],
    "easyanimate": [stories.EASYANIMATE.replace("n_frames=49", f"n_frames={frames}") for frames in (25, 49, 97)],
    "latentsync": [stories.LATENTSYNC.replace("stage1", name) for name in ("stage1", "stage1_512")],
    "sd-scripts": [f"{stories.FLUX} --resolution {side},{side}" for side in (512, 1024, 1536)],
    "diffusers": [stories.PIPELINE.replace("num_frames=81", f"num_frames={frames}") for frames in (41, 81, 161)],
}
"""By length, the shortest first."""


def check(text: str, card: str, count: int, *options: str) -> stories.Answer:
    """A command, or a file where it is several lines."""
    counted = () if "import torch" in text else ("--gpus", str(count))
    if "\n" not in text.strip():
        return stories.check(card, text, *counted, *options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("infer.py" if "import torch" in text else "train.sh")
        path.write_text(text)
        return stories.check(card, path, *counted, *options)


def typed(change: tuple[str, ...]) -> bool:
    """Whether a change is flags; lines of code are not in the command."""
    return all(part.startswith(("--", "accelerate launch", "export ")) for part in change)


def main() -> int:
    """Prints one line per case and the faults at the end; the exit code is whether there are any."""
    faults: list[str] = []
    started, checks, changes = time.time(), 0, 0
    for name in sys.argv[1:] or STORIES:
        texts = STORIES[name]
        verdicts: dict[tuple[int, str, int], str] = {}
        for (length, text), card, count in itertools.product(enumerate(texts), CARDS, COUNTS):
            if name == "diffusers" and count > 1:
                continue
            found = check(text, card, count)
            checks += 1
            where = f"{name} length {length} on {count} x {card}"
            verdicts[length, card, count] = found.verdict
            said = f"{found.verdict} at {found.phase}, {found.device:.1f} GiB, {len(found.fixes)} changes"
            print(f"{where}: {said}", flush=True)
            for change in filter(typed, found.fixes):
                changes += 1
                again = check(stories.applied(text, change), card, count, QUICK)
                if RANK.index(again.verdict) <= RANK.index(found.verdict):
                    faults.append(f"{where}: {change} is {again.verdict}")
                for left_out in change if len(change) > 1 else ():
                    rest = tuple(part for part in change if part != left_out)
                    if check(stories.applied(text, rest), card, count, QUICK).verdict == again.verdict:
                        faults.append(f"{where}: {left_out} can be left out of {change}")
        for (length, card, count), verdict in verdicts.items():
            shorter = verdicts.get((length - 1, card, count), verdict)
            larger = verdicts.get((length, CARDS[min(CARDS.index(card) + 1, 3)], count), verdict)
            for other, what in ((shorter, "shorter"), (larger, "on a larger card")):
                if RANK.index(other) < RANK.index(verdict):
                    faults.append(f"{name} length {length} on {count} x {card} is {verdict}, {what} {other}")
    print(f"{checks} cases and {changes} changes in {time.time() - started:.0f} s; {len(faults)} faults")
    print("\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
