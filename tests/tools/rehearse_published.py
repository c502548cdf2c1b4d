"""Runs published rows again: the trainer's own code at its commit, unmodified, on a virtual GPU.

    python -m tests.tools.rehearse_published FOLDER ROW... [--until before_validation] [--denoising-steps 4] [-o FOLDER]

FOLDER keeps a folder a trainer, of its Python, source, data and logs; what is there already is taken. It needs the
network the first time, for the source and the packages, and a C compiler. A row is appended as soon as its run is over,
and rows that the file has are left out. The counters are those that the trainer itself prints; where it prints none,
those of the rehearsal.

One denoising step of a validation takes what every other takes, so that a few can stand for the 50 of a pipeline's
default. Compare with a run of all of them before rows are kept; the row says how many there were.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import profiles
from planner.errors import VplanError
from planner.evidence.jsonl import append_row, rows_by_id
from planner.evidence.published import Row, shipped_rows
from planner.units import GIB
from tests.tools.published_runs.cogvideo import COGVIDEO
from tests.tools.published_runs.cogvideox_factory import COGVIDEOX_FACTORY
from tests.tools.published_runs.diffsynth import DIFFSYNTH
from tests.tools.published_runs.finetrainers import FINETRAINERS
from tests.tools.published_runs.latentsync import LATENTSYNC
from tests.tools.published_runs.musubi_tuner import MUSUBI_TUNER
from tests.tools.published_runs.simpletuner import SIMPLETUNER
from tests.tools.published_runs.trainer import RUN, TRAINING, Folders, PublishedTrainer

TRAINERS = {
    "cvxf-": COGVIDEOX_FACTORY,
    "cvxt-": COGVIDEOX_FACTORY,
    "ft-": FINETRAINERS,
    "ds-": DIFFSYNTH,
    "mt-": MUSUBI_TUNER,
    "cvx-": COGVIDEO,
    "ls-": LATENTSYNC,
    "stm-": SIMPLETUNER,
}
"""Start of the ids of its rows -> a trainer."""

OUT = profiles.REHEARSALS / "published"
ONLINE = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
"""`load_lora_weights` refuses a folder of its own offline (diffusers 0.31, lora_base.py). The network is off anyway."""
TRAINING_PHASES = ("first_step", "train", "optimizer")
DENOISING_STEPS = 50
"""The default of pipelines."""
TICK_SECONDS, LIMIT_SECONDS = 0.5, 1800.0


def folders_of(trainer: PublishedTrainer, row: Row, folder: Path) -> Folders:
    """The trainer's Python, source and data, made where they are missing."""
    python, source, data = folder / "python", folder / f"source-{trainer.commit(row)[:7]}", folder / "data"
    if not python.exists():
        subprocess.run([_interpreter(trainer), "-m", "venv", str(python)], check=True)
        # A build of torch for CPUs can lie beside the index under the same version.
        environment = {**os.environ, "PIP_FIND_LINKS": "", **_variables(trainer, data)}
        pip = [str(python / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *trainer.packages], check=True, env=environment)
        subprocess.run([*pip, "--no-deps", *trainer.packages_alone], check=True, env=environment)
        if trainer.packages_built:
            wheels = folder / "wheels"
            wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
            subprocess.run([*wheel, "-w", str(wheels), *trainer.packages_built], check=True, env=environment)
            subprocess.run([*pip, "--no-deps", *map(str, wheels.glob("*.whl"))], check=True, env=environment)
    if not source.exists():
        subprocess.run(["git", "clone", "--quiet", trainer.repository, str(source)], check=True)
        subprocess.run(["git", "-C", str(source), "checkout", "--quiet", trainer.commit(row)], check=True)
    for packages in python.glob("lib/python3*/site-packages"):  # as `pip install -e` would
        (packages / "source.pth").write_text(f"{source / trainer.code}\n", encoding="utf-8")
    folders = Folders(source, python, data, folder / "output" / row.id)
    if not data.exists():
        trainer.prepare(folders)
    return folders


def _interpreter(trainer: PublishedTrainer) -> str:
    found = shutil.which(trainer.interpreter) if trainer.interpreter else sys.executable
    if found is None:
        raise VplanError(f"{trainer.name} needs {trainer.interpreter}", "install it, and put it on PATH")
    return found


def _variables(trainer: PublishedTrainer, data: Path) -> dict[str, str]:
    return {name: value.format(data=data) for name, value in trainer.environment.items()}


def rehearse(
    trainer: PublishedTrainer, row: Row, folder: Path, last: str, denoising_steps: int | None
) -> dict[str, object]:
    """One row's run up to the moment `last`, as a row of `profiles/rehearsals/published`. Raises VplanError where it
    ended early."""
    folders = folders_of(trainer, row, folder)
    if any(trainer.sampler):
        trainer.set_denoising_steps(folders, denoising_steps or DENOISING_STEPS)
    command = trainer.command(row, folders)
    log = folder / "logs" / f"{row.id}.txt"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    variables = " ".join(f"{name}={value}" for name, value in {**ONLINE, **_variables(trainer, folders.data)}.items())
    quiet = ["sh", "-c", f'{variables} exec "$@" >"$0" 2>&1', str(log), *command]
    vplan = [sys.executable, "-m", "vplan", "rehearse", "--gpu", f"{row.machine.gpus}x{row.machine.gpu}", "--json"]
    vplan += [word for weights in trainer.hollow(row) for word in ("--hollow", weights)]
    vplan += ["--steps", str(trainer.steps), "--python", str(folders.python / "bin" / "python"), "--", *quiet]
    answer = log.with_suffix(".json")
    with answer.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(vplan, cwd=folders.source, stdout=out)
        peaks = _peaks_when_over(process, answer) if trainer.steps else _until(process, trainer, log, last)
    if not peaks:
        raise VplanError(f"{row.id} ended early", f"read {log}")
    shown = [word.replace(str(folder), "FOLDER") for word in command]
    return {
        "id": row.id,
        "runner": "rehearse",
        "trainer": {"repository": trainer.repository, "commit": trainer.commit(row)},
        "command": shown,
        **({"denoising_steps": denoising_steps} if denoising_steps else {}),
        "env": {"gpu": f"virtual {row.machine.gpu}", **_versions(trainer, folders)},
        "rehearsed_gib": {
            name: peaks[moment][counter]
            for name, (moment, counter) in trainer.published(row).items()
            if moment in peaks
        },
        "gib": peaks,
    }


Peaks = dict[str, dict[str, float]]
"""GiB by moment and counter."""


def _until(process: subprocess.Popen[bytes], trainer: PublishedTrainer, log: Path, last: str) -> Peaks | None:
    """Wait until the log has the counters of the moment `last`, then end the run. None where it ended before."""
    start, before = time.monotonic(), None
    while process.poll() is None and time.monotonic() - start < LIMIT_SECONDS:
        time.sleep(TICK_SECONDS)
        peaks = trainer.peaks(log.read_text(encoding="utf-8", errors="replace") if log.exists() else "")
        if peaks.get(last) and peaks == before:  # all of them are written
            process.terminate()
            process.wait()
            return peaks
        before = peaks
    process.terminate()
    process.wait()
    return None


def _peaks_when_over(process: subprocess.Popen[bytes], answer: Path) -> Peaks | None:
    """The rehearsal's own counters, of the fullest rank, once its steps are done. None where it failed."""
    if process.wait(LIMIT_SECONDS) != 0:
        return None
    found = json.loads(answer.read_text(encoding="utf-8"))
    counters = ("allocated", "reserved", "device")
    peaks = {RUN: {name: round(found[f"{name}_bytes"] / GIB, 3) for name in counters}}
    phases = [rank["phases"][name] for rank in found["ranks"] for name in TRAINING_PHASES if name in rank["phases"]]
    if phases:
        peaks[TRAINING] = {name: round(max(phase[f"{name}_bytes"] for phase in phases) / GIB, 3) for name in counters}
    return peaks


def _versions(trainer: PublishedTrainer, folders: Folders) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    python = str(folders.python / "bin" / "python")
    found = subprocess.run([python, "-c", code, *trainer.versions], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", nargs="+", metavar="ROW")
    parser.add_argument("--until", metavar="MOMENT", help="end the runs behind these counters")
    parser.add_argument("--denoising-steps", type=int, help="of a validation, instead of the pipeline's 50")
    parser.add_argument("-o", "--output", type=Path, default=OUT, help="folder of the files of rows, one a trainer")
    arguments = parser.parse_args()
    rows = {row.id: row for row in shipped_rows()}
    arguments.output.mkdir(exist_ok=True)
    for name in arguments.rows:
        trainer = next((trainer for start, trainer in TRAINERS.items() if name.startswith(start)), None)
        if trainer is None:
            print(f"{name}: no trainer is known for it", flush=True)
            continue
        file = f"{trainer.name.replace('-', '_')}"
        output, folder = arguments.output / f"{file}.jsonl", arguments.folder.resolve() / file
        if output.exists() and name in rows_by_id(output):
            print(f"{name}: is there", flush=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        try:
            row = rehearse(trainer, rows[name], folder, arguments.until or trainer.last, arguments.denoising_steps)
        except VplanError as error:
            print(f"{name}: {error.message}; {error.fix}", flush=True)
            continue
        append_row(output, row)
        print(f"{name}: {row['gib']}", flush=True)


if __name__ == "__main__":
    main()
