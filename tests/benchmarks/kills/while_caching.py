"""Kills of `vplan train` at random moments of scanning and encoding lose nothing that was finished.

    python -m tests.benchmarks.kills.while_caching [KILLS]

Begins to train on a folder of short clips with a tiny Wan pipeline; the command or its worker is killed at random, by
turns while it looks through the folder and while it encodes. Every file that it leaves must load and stay as it is; the
same command goes on until all is cached, and each file is that of a run nobody killed. Needs vplan[train]; a quarter
of a minute a kill.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, write_plan
from planner.worker_process import result_file
from tests.benchmarks.kills.killing import ended, killed

CLIPS = 120
SECONDS = 0.4


def finished(output: Path) -> dict[str, int]:
    """Files that have their name, each of which must load, with the time they were written."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted((output / "cache").glob("*/*.safetensors")):
        load_file(path)
        found[path.name] = path.stat().st_mtime_ns
    return found


def phase(output: Path) -> str:
    """What the process that encodes says that it does."""
    try:
        told = json.loads((output / "prepare" / result_file(0)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return "encoding" if "doing" in told else "scanning"


def main(kills: int) -> None:
    random.seed(0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ |= {"VPLAN_HOME": str(root / "home"), "OMP_NUM_THREADS": "1"}
        plan, clips = _made(root)

        def words(output: Path) -> list[str]:
            typed = {"--data": clips, "--output": output, "--weights": root / "model", "--device": "cpu", "--steps": 1}
            return ["train", str(plan), *(str(word) for pair in typed.items() for word in pair)]

        output, hit, victims = root / "killed", Counter[str](), Counter[str]()
        before: dict[str, int] = {}
        for number in range(kills):
            aimed_at = ("scanning", "encoding")[number % 2]
            more = random.randint(1, 2 * CLIPS // kills + 1)

            def moment(aimed_at: str = aimed_at, wanted: int = len(before) + more) -> bool:
                if aimed_at == "scanning":
                    return phase(output) == "scanning"
                return sum(1 for _ in (output / "cache").glob("*/*.safetensors")) >= wanted

            (output / "prepare" / result_file(0)).unlink(missing_ok=True)
            victim = killed(words(output), moment, SECONDS if aimed_at == "scanning" else SECONDS / 10)
            if victim is None:
                break
            victims[victim] += 1
            hit[aimed_at] += 1
            after = finished(output)
            assert all(after.get(file) == stamp for file, stamp in before.items()), "a finished sample is gone"
            before = after
        ended(words(output))
        ended(words(root / "alone"))
        after = finished(output)
        assert all(after.get(file) == stamp for file, stamp in before.items()), "a finished sample was made again"
        contents = [
            {path.name: path.read_bytes() for path in sorted((folder / "cache").glob("*/*.safetensors"))}
            for folder in (output, root / "alone")
        ]
        assert contents[0] == contents[1], "a sample is another than in a run nobody killed"
        assert not list((output / "cache").glob("*/*.part")), "something half written is left at the end"
    print(f"{sum(hit.values())} kills ({dict(hit)}; {dict(victims)}), {len(before)} samples finished before the last")
    print(f"no finished sample lost or made again; all {len(contents[0])} files are those of a run nobody killed")


def _made(root: Path) -> tuple[Path, Path]:
    """A tiny pipeline known by name, a plan for it, and clips with a caption each."""
    import diffusers

    from tests.trainers import runs, tiny

    profile = tiny.profile("wan2.1-t2v-1.3b")
    tiny.folder(root / "model", profile)
    model = diffusers.WanTransformer3DModel.from_config(profile.config)
    model.save_pretrained(root / "model" / "transformer")
    runs.keep(root / "model", "tiny-wan")
    clips = tiny.write_clips(root / "clips", CLIPS, height=64, width=64)
    job = Job.read({"model": "tiny-wan", "frames": 9, "height": 48, "width": 64, "lora_rank": 4})
    strategy = Strategy.read({"weights_dtype": "fp32", "autocast": "none", "compute_dtype": "fp32",
                              "vae_dtype": "fp32", "text_encoder_dtype": "fp32"})  # fmt: skip
    write_plan(Plan(job=job, strategy=strategy, machine=Machine(gpu="24GB")), root / "plan.toml")
    return root / "plan.toml", clips


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
