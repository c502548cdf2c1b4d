"""Counts which of the example commands and configs in trainers' own repositories `vplan check` reads.

    python -m tests.tools.read_configurations FOLDER [-v]

FOLDER holds clones, bare or not, by the names in `REPOSITORIES`; what is not there is left out. A file is *read* when
it becomes a case that is recorded, *refused* when one line says why not, *wrong* when it is read as another trainer's.
Of a page (`.md`) each block of code that starts a training is one example.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from planner import dialects
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case


class Repository(NamedTuple):
    """Where a trainer's examples are, and whose dialects may read them."""

    folder: str
    patterns: tuple[str, ...]
    dialects: tuple[str, ...]
    model: str = ""
    """the trainer's own model, where its configs leave the file of the weights to be filled in"""


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
    Repository("Lightricks+LTX-2", ("packages/ltx-trainer/configs/*_lora*.yaml",), ("ltx-trainer",), "ltx-2.3"),
    Repository("zai-org+CogVideo", ("finetune/*.sh",), ("cogvideo",)),
    Repository("kohya-ss+musubi-tuner", ("docs/*.md", "README.md"), ("musubi-tuner",)),
    Repository(
        "kohya-ss+sd-scripts",
        ("docs/*.md", "README.md"),
        ("sd-scripts",),
    ),
    Repository("huggingface+diffusers", ("examples/dreambooth/*.md", "examples/text_to_image/*.md",
                                         "examples/cogvideo/*.md"), ("diffusers",)),
)  # fmt: skip

TRAINING = re.compile(r"^[^#\n]*\b(launch|python3?|torchrun|deepspeed)\b[^#]*?\S*train\S*\.py", re.MULTILINE)
FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
LANGUAGES = ("", "bash", "sh", "shell", "console")


CAUSES = (
    ("no training", r"describes a data set|is not (JSON|YAML|TOML)|starts no Python script"),
    (
        "model",
        r"cannot tell the model|model_family .* is not known|'s model '|which model|"
        r"model\.(arch|type|name_or_path)",
    ),
    ("part", r"parts beside|[Cc]ontrolnet|adapter is not supported|motion_module"),
    ("script", r"belongs? to|\.py('| of|,).* is not supported|\.py of .* is not supported"),
    ("option", r""),
)
"""Cause of a refusal -> what its line has: no training is started there, a model or a script that is not known, a part
beside the model that trains, an option or a recipe that is not priced or not recorded."""


def cause(why: str) -> str:
    """The cause of a refusal."""
    return next(name for name, pattern in CAUSES if re.search(pattern, why))


def outcome(path: Path, allowed: tuple[str, ...], model: str = "") -> tuple[str, str]:
    """(read, refused or wrong; why)."""
    try:
        dialect, given = dialects.read_script(from_file(path))
        if dialect.name.partition("@")[0] not in allowed:
            return "wrong", f"read as {dialect.name}"
        case = read_case(dialect, given, {"model": model or None}, {"gpu": "80GB"})
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
    pages = [name for name in chosen if name.endswith(".md")]
    files = [folder / name for name in chosen if name not in pages]
    return files + [
        path for name in pages for path in blocks(_git(git, "show", f"HEAD:{name}").decode(), folder / name)
    ]


def blocks(text: str, page: Path) -> list[Path]:
    """The blocks of code of a page that start a training, each once, as shell scripts in its folder."""
    shell = [match[2] for match in FENCE.finditer(text) if match[1].strip().lower() in LANGUAGES]
    found = dict.fromkeys(textwrap.dedent(block) for block in shell if TRAINING.search(block))
    page.parent.mkdir(parents=True, exist_ok=True)
    paths = [page.with_name(f"{page.stem}-{at}.sh") for at, _ in enumerate(found, 1)]
    for path, block in zip(paths, found, strict=True):
        path.write_text(block, encoding="utf-8")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for every file")
    options = parser.parse_args()
    causes = [name for name, _ in CAUSES]
    print(f"| repository | commit | examples | read | refused: {' | '.join(causes)} | wrong |")
    print("|---" * (len(causes) + 5) + "|")
    totals: Counter[str] = Counter()
    for repository in REPOSITORIES:
        git = options.folder / repository.folder
        git = git / "repo" if (git / "repo").is_dir() else git
        if not git.is_dir():
            continue
        commit = _git(git, "rev-parse", "--short=8", "HEAD").decode().strip()
        with tempfile.TemporaryDirectory() as folder:
            paths = examples(git, repository, Path(folder))
            found = {path: outcome(path, repository.dialects, repository.model) for path in paths}
            if options.verbose:
                for path, (kind, why) in found.items():
                    print(f"{kind:8} {cause(why) if kind == 'refused' else '':11} {path.relative_to(folder)}: {why}")
        counts = Counter(cause(why) if kind == "refused" else kind for kind, why in found.values())
        totals.update(counts)
        cells = (len(found), *(counts[name] for name in ("read", *causes, "wrong")))
        name = repository.folder.replace("+", "/", 1)
        print(f"| {name} | {commit} | {' | '.join(map(str, cells))} |", flush=True)
    cells = (totals.total(), *(totals[name] for name in ("read", *causes, "wrong")))
    print(f"| all | | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
