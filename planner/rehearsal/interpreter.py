"""The Python that a command runs, and which torch it has: asked without importing torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import VplanError, quoted

PACKAGES = (
    "torch",
    "bitsandbytes",
    "flash_attn",
    "flash_attn_2_cuda",
    "flash_attn_3",
    "xformers",
    "torchvision",
    "torchaudio",
    "torchao",
    "sageattention",
    "transformer_engine",
    "deepspeed",
)
"""Whose compiled parts are asked what they want of CUDA."""

_QUESTION = """
import importlib.metadata, importlib.util, json, sys
places = {}
for name in sys.argv[1:]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and (spec.origin or spec.submodule_search_locations):
        places[name] = list(spec.submodule_search_locations or [spec.origin])
try:
    requirements = importlib.metadata.requires("torch") or []
except importlib.metadata.PackageNotFoundError:
    requirements = []
print(json.dumps({"version": list(sys.version_info[:3]), "places": places, "requirements": requirements}))
"""
_SECONDS = 60.0
_SHEBANG_BYTES = 4096
_SCRIPT_BYTES = 2**20
_SHELLS = ("sh", "bash", "zsh", "dash")
_STARTERS = ("python", "python3", "torchrun", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Interpreter:
    """A Python and its packages."""

    path: str
    places: dict[str, tuple[Path, ...]]
    """package to its folders, or to its one file"""
    requirements: tuple[str, ...]
    """what torch requires, as pip reads it"""

    @property
    def torch(self) -> str | None:
        """The version of torch, `2.13.0+cu130`; None without torch."""
        return self._version("__version__")

    @property
    def cuda(self) -> str | None:
        """The CUDA that torch was built for, `13.0`; None for a CPU build and without torch."""
        return self._version("cuda")

    def _version(self, name: str) -> str | None:
        for place in self.places.get("torch", ()):
            if (file := place / "version.py").is_file():
                text = file.read_text(encoding="utf-8")
                match = re.search(rf"^{name}(?:\s*:[^=\n]+)?\s*=\s*'([^']+)'", text, re.MULTILINE)
                return match[1] if match else None
        return None

    def libraries(self) -> list[Path]:
        """The compiled parts of the packages, in a fixed order."""
        found: set[Path] = set()
        for places in self.places.values():
            for place in places:
                found.update([place] if place.is_file() else place.rglob("*.so*"))
        return sorted(path for path in found if path.is_file())

    def architectures(self) -> tuple[int, ...]:
        """The compute capabilities that torch's kernels were compiled for, 86 for 8.6; torch names them in one text."""
        for place in self.places.get("torch", ()):
            if (library := place / "lib" / "libtorch_python.so").is_file():
                match = re.search(rb"sm_\d+[af]?(?: (?:sm|compute)_\d+[af]?)+", library.read_bytes())
                return tuple(int(number) for number in re.findall(rb"sm_(\d+)", match[0])) if match else ()
        return ()

    def required_release(self, package: str) -> tuple[int, ...] | None:
        """The release of one of NVIDIA's packages that torch is built for; None where torch does not say.

        `nvidia-cudnn-cu13==9.20.0.48` is (9, 20, 0, 48) of `nvidia-cudnn`.
        """
        for requirement in self.requirements:
            match = re.match(rf"{package}[\w-]*\s*\(?==\s*(\d+(?:\.\d+)*)", requirement)
            if match:
                return tuple(int(part) for part in match[1].split("."))
        return None


def interpreter_of(command: Sequence[str]) -> Interpreter:
    """The Python that a command runs. It is asked for its packages, in a process of its own.

    Raises VplanError where the command is not there or no Python can be found for it.
    """
    path = find_interpreter(command)
    asked = [path, "-c", _QUESTION, *PACKAGES]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
        facts = json.loads(answer.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise VplanError(f"{quoted(path)} does not run as Python", "pass the right one: --python PATH") from None
    places = {name: tuple(map(Path, folders)) for name, folders in facts["places"].items()}
    return Interpreter(path, places, tuple(facts["requirements"]))


def find_interpreter(command: Sequence[str]) -> str:
    """The path of the Python in a command: its first word, or the one that the first word's script names.

    Where the first word is anything else (`bash train.sh`), it is the Python on the PATH.
    """
    words = _without_assignments(command)
    if not words:
        raise VplanError("no command given", "pass the training command after --", 2)
    program = shutil.which(words[0])
    if program is None:
        fix = "pass a command that this machine has, such as python train.py or torchrun train.py"
        raise VplanError(f"there is no command {quoted(words[0])}", fix)
    if _is_python(program):
        return program
    return _of_script(Path(program)) or _of_shell(words) or _of_path()


def _without_assignments(command: Sequence[str]) -> list[str]:
    """A command without the `env NAME=value` before it."""
    words = list(command)
    if words and Path(words[0]).name == "env":
        words = words[1:]
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            words = words[1:]
    return words


def _is_python(path: str) -> bool:
    return re.fullmatch(r"(python|pypy)[\d.]*(\.exe)?", Path(path).name) is not None


def _of_script(script: Path) -> str | None:
    """The Python of a script's first lines: `#!/path/python`, `#!/usr/bin/env python`, or pip's form for long paths,
    a shell line `'''exec' "/path/python" "$0" "$@"`."""
    with script.open("rb") as file:
        head = file.read(_SHEBANG_BYTES).decode("utf-8", "replace").splitlines()
    if not head or not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and Path(words[0]).name == "env":
        words = [shutil.which(word) or word for word in words[1:] if not word.startswith("-")]
    if words and _is_python(words[0]):
        return words[0]
    exec_line = re.match(r"'''exec' \"?([^\"]+?)\"? \"\$0\"", head[1]) if len(head) > 1 else None
    return exec_line[1] if exec_line else None


def _of_shell(words: Sequence[str]) -> str | None:
    """The Python that a shell's own text or script starts first, directly or by a script such as torchrun."""
    if Path(words[0]).name not in _SHELLS:
        texts = [Path(shutil.which(words[0]) or words[0])]
    elif "-c" in words[:-1]:
        return _first_python(words[list(words).index("-c") + 1])
    else:
        texts = [Path(word) for word in words[1:] if not word.startswith("-")][:1]
    for path in texts:
        if path.is_file() and path.stat().st_size <= _SCRIPT_BYTES:
            return _first_python(path.read_text(encoding="utf-8", errors="replace"))
    return None


def _first_python(text: str) -> str | None:
    for word in re.findall(r"[\w./~+-]+", text):
        program = shutil.which(str(Path(word).expanduser())) if "/" in word or word in _STARTERS else None
        if program and (_is_python(program) or _of_script(Path(program))):
            return program if _is_python(program) else _of_script(Path(program))
    return None


def _of_path() -> str:
    path = shutil.which("python") or shutil.which("python3")
    if path is None:
        raise VplanError("no Python found for this command", "pass the one it runs: --python PATH")
    return path
