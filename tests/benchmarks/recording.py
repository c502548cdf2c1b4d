"""How long a model takes that nobody has seen before: a 14B Wan of other sizes, recorded by `vplan record`.

    python -m tests.benchmarks.recording [MODEL ...]

Prints wall and CPU seconds of the first command, which records one method and mode (LoRA, checkpointed) from nothing,
and of a second one, which records all others that people need first, a tape of the step and of the optimizer at a time.
MODEL: bundled models to change the sizes of, in the 14B's place. Needs vplan[train] and a machine that does nothing
else; two minutes. Ends with exit code 1 when the first takes over 30 s, or a further tape over 8 s.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import vplan
from planner.catalog import lookup
from planner.catalog.user_data import VARIABLE

FIRST, FURTHER = 30.0, 8.0
"""seconds allowed on two cores"""

ONE = "step-lora-half-fp32-autocast-full-one"
MODEL = "wan2.1-t2v-14b"
CHANGED = {"num_layers": 2, "num_attention_heads": 2, "ffn_dim": 512}
"""What is added to a config's numbers, where it has them: another architecture, of about the same size."""


class Taken(NamedTuple):
    """What one command took, and how many tapes it wrote."""

    wall: float
    cpu: float
    tapes: int


def never_seen(name: str) -> dict[str, Any]:
    """The config of a bundled model with other sizes."""
    profile = lookup.model(name)
    changed = {key: profile.config[key] + more for key, more in CHANGED.items() if key in profile.config}
    return {"_class_name": profile.diffusers_class, **profile.config, **changed}


def timed(home: str, *words: str) -> Taken:
    """Runs `vplan record`."""
    environment = {**os.environ, VARIABLE: home}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        vplan.command("record", *words, "--json"), env=environment, check=False, capture_output=True, text=True
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Taken(wall, cpu, len(json.loads(done.stdout)["tapes"]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recording", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[MODEL])
    slow = False
    for name in parser.parse_args().models:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.json")
            config.write_text(json.dumps(never_seen(name)))
            words = (str(config), "--name", "never-seen")
            first = timed(f"{folder}/home", *words, "--variant", ONE)
            others = timed(f"{folder}/home", *words)
        each = others.wall / others.tapes
        print(f"{name}, other sizes: first method and mode {first.wall:.1f} s ({first.cpu:.1f} CPU s)")
        further = f"{others.tapes} further tapes {others.wall:.1f} s ({others.cpu:.1f} CPU s)"
        print(f"{further}: {each:.1f} s each", flush=True)
        slow |= first.wall > FIRST or each > FURTHER
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
