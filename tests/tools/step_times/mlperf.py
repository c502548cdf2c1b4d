"""Reads step times of MLPerf Training's image models, into profiles/measurements/step_times/mlperf.jsonl.

    python -m tests.tools.step_times.mlperf V5.0 V5.1

V5.0 and V5.1 are clones of prishajain1/training_results_v5.0 (a fork of mlcommons') and of
mlcommons/training_results_v5.1; the rows name their commits. A row is one submission's folder on a card that the
catalog knows: the median over its runs of what they log, seconds of a step (``train_step_time``) or samples a second
(``throughput``), which are the global batch over a step. GB200 and GB300 are other cards than B200 and are not read.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).parents[3] / "profiles" / "measurements" / "step_times" / "mlperf.jsonl"


class Benchmark(NamedTuple):
    """One benchmark of a round: where its results lie, the job, and why it is not compared."""

    key: str
    folder: str
    job: dict[str, Any]
    strategy: dict[str, Any]
    left_out: str | None
    note: str
    implementation: str = "nemo"


SD2 = Benchmark(
    "sd2",
    "stable_diffusion",
    {"model": "sd2.1", "method": "full", "frames": 1, "height": 512, "width": 512},
    {"sharding": "zero-1", "text_encoder": "cached", "vae": "cached"},
    None,
    "encoded prompts and latents of SD 2's base, which is 2.1's in shape; fp16 with fp32 masters, a distributed "
    "fused Adam; the whole step is replayed as one CUDA graph (callbacks.py, run_and_time.sh "
    "CAPTURE_CUDAGRAPH_ITERS); inductor compiles the UNet (conf: inductor), but its group norms, attention and, on "
    "B200, layer norms are kernels of Apex, Transformer Engine and cuDNN, which it cannot fuse, so it is taken as it "
    "is launched; were all fused, it would be 5 to 9 points lower",
    "nemo@captured",
)
FLUX = Benchmark(
    "flux1",
    "flux1",
    {"model": "flux.1-dev", "method": "full", "frames": 1, "height": 256, "width": 256, "text_tokens": 256},
    {"sharding": "ddp", "compile": "cudagraphs", "text_encoder": "cached", "vae": "cached"},
    "multiplies in mxfp8; ours has no products in 8 bits",
    "Schnell's shape, which is dev's without the guidance's embedding; 20.3 TFLOP a sample by its own count "
    "(config_common.sh), 20.5 by ours",
)
CARDS = {"H200": "h200", "B200": "b200"}
"""What the name of a system's accelerator has in it -> card."""


def git(repository: Path, *words: str) -> str:
    """What git prints about a repository."""
    return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=True).stdout


def card_of(repository: Path, submitter: str, system: str) -> str | None:
    """The card of a submission's system; None where it is none of ours."""
    about = json.loads(git(repository, "show", f"HEAD:{submitter}/systems/{system}.json"))
    name = about["accelerator_model_name"]
    return None if "GB200" in name else next((card for word, card in CARDS.items() if word in name), None)


def rows(repository: Path, repo: str, version: str, benchmark: Benchmark) -> Iterator[dict[str, Any]]:
    """The rows of one benchmark of a round."""
    commit = git(repository, "rev-parse", "HEAD").strip()
    listed = git(repository, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    pattern = rf"[^/]+/results/[^/]+/{benchmark.folder}/result_\d+\.txt"
    files = [file for file in listed if re.fullmatch(pattern, file)]
    for folder in sorted({file.rpartition("/")[0] for file in files}):
        submitter, _, system, _ = folder.split("/")
        card = card_of(repository, submitter, system)
        if card is None:
            continue
        logs = [git(repository, "show", f"HEAD:{file}") for file in files if file.rpartition("/")[0] == folder]
        batch = int(re.findall(r'"global_batch_size", "value": (\d+)', logs[0])[0])
        steps = [float(x) for log in logs for x in re.findall(r'"train_step_time": ([\d.e-]+)', log)]
        rates = [float(x) for log in logs for x in re.findall(r'"throughput": ([\d.e-]+)', log)]
        if not steps and not rates:
            continue
        platform = re.findall(r'"submission_platform", "value": "(\d+)x', logs[0])
        nodes = int(platform[0]) if platform else 1
        yield {
            "id": f"mlperf-{version}-{benchmark.key}-{submitter}-{system}".lower(),
            "job": {**benchmark.job, "batch_size": batch // (8 * nodes)},
            "strategy": benchmark.strategy,
            "machine": {"gpu": card, "gpus": 8, "nodes": nodes},
            "step_seconds": round(statistics.median(steps) if steps else batch / statistics.median(rates), 4),
            "settings": f"{submitter}, {system}: median of {len(steps or rates)} prints of {len(logs)} runs",
            "implementation": benchmark.implementation,
            "left_out": benchmark.left_out,
            "note": benchmark.note,
            "source": {"repo": repo, "where": folder, "commit": commit},
        }


def main() -> int:
    """Writes the rows of both rounds."""
    older, newer = (Path(word) for word in sys.argv[1:3])
    found = [
        *rows(older, "prishajain1/training_results_v5.0", "5.0", SD2),
        *rows(newer, "mlcommons/training_results_v5.1", "5.1", FLUX),
    ]
    OUT.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    print(f"{len(found)} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
