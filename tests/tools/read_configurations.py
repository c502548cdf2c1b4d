"""Counts which of the example commands and configs in trainers' own repositories `vplan check` reads.

    python -m tests.tools.read_configurations FOLDER [-v]

FOLDER holds clones, bare or not, by the names in `REPOSITORIES`; what is not there is left out. A file is *read* when
it becomes a case that is recorded, *refused* when one line says why not, *wrong* when it is read as another trainer's.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from planner import dialects
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import settle


class Repository(NamedTuple):
    """Where a trainer's examples are, and whose dialects may read them."""

    folder: str
    patterns: tuple[str, ...]
    dialects: tuple[str, ...]


REPOSITORIES = (
    Repository("bmaltais+kohya_ss", ("presets/*.json",), ("sd-scripts",)),
    Repository("Nerogar+OneTrainer", ("training_presets/*.json",), ("onetrainer",)),
    Repository("bghira+SimpleTuner", ("simpletuner/examples/*/config.json",), ("simpletuner",)),
    Repository("ostris+ai-toolkit", ("config/examples/*.yaml", "config/examples/*.yml"), ("ai-toolkit",)),
    Repository("tdrussell+diffusion-pipe", ("examples/*.toml",), ("diffusion-pipe",)),
    Repository("modelscope+DiffSynth-Studio", ("examples/*/model_training/*.sh",), ("diffsynth",)),
    Repository("aigc-apps+VideoX-Fun", ("scripts/*train*.sh",), ("videox-fun",)),
    Repository("aigc-apps+EasyAnimate", ("scripts/*train*.sh",), ("easyanimate", "videox-fun")),
    Repository("a-r-r-o-w+finetrainers", ("examples/training/*.sh",), ("diffusers",)),
    Repository("a-r-r-o-w+cogvideox-factory", ("*train*.sh",), ("diffusers",)),
    Repository("bytedance+LatentSync", ("configs/unet/*.yaml",), ("latentsync",)),
)


def outcome(path: Path, allowed: tuple[str, ...]) -> tuple[str, str]:
    """(read, refused or wrong; why)."""
    try:
        dialect, given = dialects.read_script(from_file(path))
        if dialect.name.partition("@")[0] not in allowed:
            return "wrong", f"read as {dialect.name}"
        case = settle(dialect, given, {}, {"gpu": "80GB"})
    except VplanError as error:
        return "refused", error.message
    return "read", f"{case.job.model} {case.job.method}"


def _git(folder: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=True).stdout


def examples(git: Path, repository: Repository, folder: Path) -> list[Path]:
    """The examples of a clone, written out with all that they may name, without the rest of the repository's code."""
    listed = subprocess.run(
        ["git", "-C", str(git), "ls-tree", "-r", "HEAD", "--name-only"], capture_output=True, text=True
    )
    names = listed.stdout.splitlines()
    for name in names:
        if name.endswith((".sh", ".json", ".toml", ".yaml", ".yml")):
            shown = subprocess.run(["git", "-C", str(git), "show", f"HEAD:{name}"], capture_output=True)
            if shown.returncode == 0:  # a clone without its largest files lacks some
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(shown.stdout)
    chosen = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in repository.patterns)]
    return [folder / name for name in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for every file")
    options = parser.parse_args()
    print("| repository | commit | examples | read | refused by name | wrong |\n|---|---|---|---|---|---|")
    totals: Counter[str] = Counter()
    for repository in REPOSITORIES:
        git = options.folder / repository.folder
        git = git / "repo" if (git / "repo").is_dir() else git
        if not git.is_dir():
            continue
        commit = _git(git, "rev-parse", "--short=8", "HEAD").decode().strip()
        with tempfile.TemporaryDirectory() as folder:
            found = {path: outcome(path, repository.dialects) for path in examples(git, repository, Path(folder))}
            if options.verbose:
                for path, (kind, why) in found.items():
                    print(f"{kind:8} {path.relative_to(folder)}: {why}")
        counts = Counter(kind for kind, _ in found.values())
        totals.update(counts)
        cells = (len(found), counts["read"], counts["refused"], counts["wrong"])
        name = repository.folder.replace("+", "/", 1)
        print(f"| {name} | {commit} | {' | '.join(map(str, cells))} |", flush=True)
    print(f"| all | | {totals.total()} | {totals['read']} | {totals['refused']} | {totals['wrong']} |")


if __name__ == "__main__":
    main()
