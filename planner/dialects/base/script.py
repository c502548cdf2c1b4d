"""The input of `vplan check` as a `Script`: a command, or a file that contains one, as programs with their launchers.

`from_words` and `from_file` are the entry points. Nothing is run. Files that the command names are looked for next to
it and in the current folder, and are read only as data.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from planner.dialects.base.pasted import as_posix, commands_alone, is_of_windows, notebook_commands
from planner.dialects.base.shell import Line, UnclosedError, Variables, commands, join_continued_lines
from planner.dialects.base.wrappers import UnclearError, inner_command, unwrapped
from planner.errors import VplanError, quoted
from planner.untrusted import FORMATS, not_parsed, read_document, read_text

MOST_COMMANDS = 2_000
DEEPEST = 3
"""`bash -c` in one another that are read."""
OUT_OF_MEMORY = "out of memory"
"""What every message of a card that ran out has (PyTorch, CUDA, HIP)."""

SWITCHES = frozenset({
    *("--use_deepspeed", "--use_fsdp", "--multi_gpu", "--cpu", "--tpu", "--mps", "--quiet", "-q", "--debug"),
    *("--use_megatron_lm", "--no_python", "--same_network", "--module", "-m", "--standalone", "--run_path"),
    *("--no_local_rank", "--force_multi", "--save_pid", "--bind_cores_to_rank", "--use_xpu", "--enable_cpu_affinity"),
    *("--use_parallelism_config", "-u", "-B", "-O"),
})  # fmt: skip
"""Launcher flags without a value (accelerate commands/launch.py, torch/distributed/run.py, deepspeed
launcher/runner.py)."""

LAUNCHERS = {
    "accelerate": ("launch",),
    "torchrun": (),
    "deepspeed": (),
}
INSTALLED = {
    ("simpletuner", "train"): ("accelerate", "simpletuner/train.py"),
    ("run-cmd.sh", "train"): ("python", "scripts/train.py"),
}
"""Commands of a trainer's own that start a script of its own, and by what (SimpleTuner bc8e6ab
simpletuner/cli/train.py; OneTrainer 23df3832 run-cmd.sh)."""

_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_DISTRIBUTED = ("torch.distributed.run", "torch.distributed.launch")


class NoCommandError(VplanError):
    """Raised for a text that starts no Python script. It may be the log of one."""


@dataclass(frozen=True)
class PythonCommand:
    """A command that runs a Python script, directly or through a launcher."""

    launcher: str
    """accelerate, torchrun, deepspeed or python; "" for what is none of them"""
    launch: dict[str, Any]
    """the launcher's own flags, `-` in names written `_`: "--num_processes" -> "4"; True without a value"""
    script: str
    """as written, a module as a path: scripts/train_unet.py"""
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    """what was exported or assigned for it"""

    @property
    def nodes(self) -> int | None:
        """The number of computers, where the launcher's flags give it, else None. Raises a VplanError for a value that
        is no count."""
        return _count(self.launch, *NODES)

    @property
    def gpus(self) -> int | None:
        """The number of processes on each node, where the launcher's flags give it, else None. Raises a VplanError for
        a value that is no count."""
        per_node = _count(self.launch, "--nproc_per_node", "--num_gpus")
        if per_node is None and (total := _count(self.launch, "--num_processes")):
            per_node = max(1, total // (self.nodes or 1))
        if per_node is None:  # accelerate's --gpu_ids 0,1; deepspeed's --include localhost:0,1
            listed = self.launch.get("--gpu_ids") or str(self.launch.get("--include", "")).partition(":")[2]
            per_node = len(listed.split(",")) if re.fullmatch(r"\d+(,\d+)*", str(listed)) else None
        if per_node is None and not self.uncounted.keys() & PROCESSES and self.launcher in ("python", "torchrun"):
            return 1  # torch/distributed/run.py: --nproc-per-node 1
        return per_node

    @property
    def uncounted(self) -> dict[str, str]:
        """The launcher's flags whose value is a count that only the machine or its shell knows, and why."""
        said = {name: str(self.launch.get(name, "")) for name in (*PROCESSES, *NODES)}
        cards = "counts the machine's cards"
        return {
            name: cards if text in COUNTED or CARDS.fullmatch(text) else f"is {text}, which is not known here"
            for name, text in said.items()
            if _is_uncounted(text)
        }

    @property
    def visible(self) -> int | None:
        """The number of GPUs in CUDA_VISIBLE_DEVICES; None when it is not set, or not to a plain list."""
        listed = [part for part in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
        return len(listed) if listed and all("$" not in part for part in listed) else None


CARDS = re.compile(
    r"\$\(\s*(?:(?:nvidia-smi|rocm-smi)\s[^|]*\|(?:\s*grep\s[^|]*\|)?\s*wc\s+-l|python3?\s.*device_count\(\).*)\s*\)",
    re.DOTALL,
)
"""What a shell puts the number of cards in the place of."""
COUNTED = ("gpu", "auto")
"""What torchrun counts the cards for (torch/distributed/run.py ``determine_local_world_size``)."""
PROCESSES = ("--nproc_per_node", "--num_gpus", "--num_processes")
NODES = ("--num_machines", "--nnodes", "--num_nodes")


def _is_uncounted(text: str) -> bool:
    return text in COUNTED or "$" in text


def _count(launch: dict[str, Any], *names: str) -> int | None:
    for name in names:
        text = str(launch.get(name, ""))
        if _is_uncounted(text):
            return None
        if text:
            match = re.fullmatch(r"(?:\d+:)?(\d{1,5})", text)  # torchrun's --nnodes 1:4
            if match is None or not int(match[1]):
                raise VplanError(f"{name} {quoted(text)} is not a count", "use a number of processes")
            return int(match[1])
    return None


@dataclass(frozen=True)
class Script:
    """A command, script, config or Python file that was given to `vplan check`."""

    name: str
    """the file's name, or "the command" """
    programs: tuple[PythonCommand, ...] = ()
    config: dict[str, Any] | None = None
    """of a config file that was given instead of a command: tables within tables"""
    tree: ast.Module | None = None
    """of a Python file"""
    folder: Path | None = None
    """where the file lies"""
    notes: tuple[str, ...] = ()
    windows: bool = False
    """whether it is written for Windows itself"""
    slurm_gpus: str = ""
    """what it asks Slurm for as a job, with the number: 4xa100"""
    supplied: tuple[Path, ...] = ()
    """files that were given beside it: each stands for the one of that name that the script names, wherever it lies"""
    named: dict[str, Path | None] = field(default_factory=dict, compare=False)
    """the files that were looked for, and where each is"""

    def find(self, path: str) -> Path | None:
        """A file that the script names: one that was supplied, else looked for beside the script and in the current
        folder; None when it is in neither."""
        self.named[path] = found = self._supplied(path) or self._beside(path)
        return found

    def missing(self, path: str) -> str:
        """That a file is not here, with how to supply it."""
        if self.folder is None:
            how = f"with the command in a file, pass both: `vplan check FILE PATH/{_name(path)}`"
        else:
            how = f"pass it too: `vplan check {self.name} PATH/{_name(path)}`"
        return f"{quoted(path)} is not here ({how})"

    def unnamed(self) -> list[Path]:
        """The files that were supplied and that nothing looked for."""
        return [file for file in self.supplied if file not in self.named.values()]

    def _supplied(self, path: str) -> Path | None:
        """The supplied file of that name, and of several the one whose folders are most alike."""

        def alike(file: Path) -> int:
            pairs = zip(reversed(file.parts), reversed(PurePosixPath(path.replace("\\", "/")).parts), strict=False)
            return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

        best = max(self.supplied, key=alike, default=None)
        return best if best and alike(best) else None

    def _beside(self, path: str) -> Path | None:
        if "\0" in path or "$" in path:
            return None
        # Scripts are started from the trainer's root, which is often above their own folder.
        folders = [Path(), *([self.folder, *self.folder.parents[:3]] if self.folder else [])]
        try:
            return next((file for folder in folders if (file := folder / path).is_file()), None)
        except OSError:  # a name no file can have
            return None

    def document(self, path: str) -> dict[str, Any] | None:
        """The tables of a config file that the script names; None when the file is not found. Raises a VplanError for a
        file that cannot be read."""
        file = self.find(path)
        return read_document(file) if file else None


def _name(path: str) -> str:
    return PurePosixPath(path.replace("\\", "/")).name or path


def from_words(words: Sequence[str]) -> Script:
    """A command that the shell has split already, so `$NAME` in it is literal text. A command in a single pair of
    quotes is split here."""
    if len(words) == 1 and len(words[0].split()) > 1:
        return _from_text("the command", words[0], None)
    if inner_command(unwrapped(words, {})[0]) is not None:
        return _from_text("the command", shlex.join(words), None)
    program = _program(tuple(words), {}) or PythonCommand("", {}, words[0], tuple(words[1:]))
    return Script("the command", (program,), windows=is_of_windows(" ".join(words)))


def from_file(path: Path) -> Script:
    """A shell script, a config (TOML, YAML, JSON) or a Python file, recognised by its name's ending."""
    suffix = path.suffix.lower()
    folder = path.resolve().parent
    if suffix in FORMATS:
        document = read_document(path)
        return Script(path.name, config=document, folder=folder, windows=is_of_windows(_strings(document)))
    text = read_text(path)
    if suffix == ".py":
        return Script(path.name, tree=_tree(text, path.name), folder=folder)
    if suffix == ".ipynb":
        text = notebook_commands(text, path.name)
    return _from_text(path.name, text, folder)


def _strings(value: object) -> str:
    """All strings of a document, a line each."""
    if isinstance(value, dict):
        value = list(value.values())
    return "\n".join(map(_strings, value)) if isinstance(value, list) else value if isinstance(value, str) else ""


def _from_text(name: str, text: str, folder: Path | None) -> Script:
    windows, slurm_gpus = is_of_windows(text), _slurm_gpus(text)
    text, loose = join_continued_lines(as_posix(text))
    try:
        script = _of_commands(name, text)
    except (UnclosedError, NoCommandError):
        alone = "" if OUT_OF_MEMORY in text else commands_alone(text)
        if not alone:
            raise
        script = _of_commands(name, alone)
        script = replace(script, notes=("a command among other text: the text is left out", *script.notes))
    notes = (*((ENDED,) if loose else ()), *script.notes)
    return replace(script, folder=folder, windows=windows, slurm_gpus=slurm_gpus, notes=notes)


_SLURM = re.compile(
    r"^#SBATCH\s+(?:.*\s)?--(?:gres[= ]gpu:|gpus(?:-per-node)?[= ])([a-z][\w.-]*)(?::(\d+))?",
    re.MULTILINE | re.IGNORECASE,
)


def _slurm_gpus(text: str) -> str:
    match = _SLURM.search(text)
    return f"{match[2] or 1}x{match[1]}" if match else ""


ENDED = "lines that begin with -- are read with the command above; a shell needs a \\ at the end of the line before"


def _of_commands(name: str, text: str) -> Script:
    """The programs that a text's commands start. Raises a NoCommandError if they start none."""
    lines, variables = commands(text)
    unclear: list[UnclearError] = []
    lines = list(_unfolded(lines, variables, unclear))
    if len(lines) > MOST_COMMANDS:
        raise VplanError(f"{quoted(name)} has {len(lines)} commands", f"{MOST_COMMANDS} are read at most")
    exported = {name: " ".join(value) for name, value in variables.values.items()}
    programs: list[PythonCommand] = []
    here = PurePosixPath()
    for line in lines:
        if line.words[0] == "cd" and len(line.words) == 2 and "$" not in line.words[1]:
            here = here / line.words[1]
        elif program := _program(line.words, exported | line.environment):
            programs.append(replace(program, script=_under(here, program.script)))
    if not programs:
        fix = "pass the script or command that starts the training"
        if not text.strip():
            raise NoCommandError(f"{quoted(name)} is empty", fix)
        if unclear:
            raise unclear[-1]
        if OUT_OF_MEMORY in text:
            fix = f"a log with PyTorch's out-of-memory message is explained by `vplan check --error {name}`"
        raise NoCommandError(f"{quoted(name)} starts no Python script", fix)
    return Script(name, tuple(programs), notes=tuple(_notes(name, lines, programs, variables)))


def _notes(name: str, lines: Iterable[Line], programs: Iterable[PythonCommand], variables: Variables) -> Iterator[str]:
    said = " ".join(word for program in programs for word in program.arguments)
    names = {used for used in variables.unset if f"${used}" in said or f"${{{used}}}" in said}
    if names:
        yield f"${', $'.join(sorted(names))} not assigned in {name}: taken as written"
    cut = " ".join(" ".join(line.words) for line in lines if line.words[0].startswith("--"))
    if cut:
        yield f"left out, as a shell ends the command at the comment above it: {quoted(cut, 100)}"
    loops = ", ".join(f"the first of {count} values of ${each}" for each, count in variables.loops.items())
    if loops:
        yield f"of its loops one run is read, with {loops}"


def _unfolded(
    lines: Iterable[Line], variables: Variables, unclear: list[UnclearError], depth: int = 0
) -> Iterator[Line]:
    """The commands, with those inside `bash -c` in their places, after whatever starts it. ``unclear``: collects notes
    about commands that are left out because it is not clear where the started command begins."""
    for line in lines:
        try:
            rest, environment = unwrapped(line.words, line.environment)
        except UnclearError as error:
            unclear.append(error)
            continue
        inner = inner_command(rest)
        if inner is None or depth == DEEPEST:
            yield line
            continue
        inside, _ = commands(inner, variables)
        for each in _unfolded(inside, variables, unclear, depth + 1):
            yield each._replace(environment=environment | each.environment)


def _under(folder: PurePosixPath, script: str) -> str:
    """A script's path below the folder that the commands before it changed to."""
    inside = "/".join(part for part in folder.parts if part not in ("..", "/"))
    plain = script.removeprefix("./")
    return f"{inside}/{plain}" if inside and not script.startswith(("/", "..", "$")) and ":" not in script else script


def _tree(text: str, name: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise not_parsed(name, "valid Python", error.msg, text, error.lineno or 0) from None
    except (RecursionError, MemoryError, ValueError) as error:
        fault = f"{quoted(name)} is not valid Python: {str(error) or 'it is nested too deeply'}"
        raise VplanError(fault, "pass the file that is run") from None


def _program(words: tuple[str, ...], environment: dict[str, str]) -> PythonCommand | None:
    """The program that a command runs; None for a command that runs no Python."""
    rest, environment = unwrapped(words, environment)
    if not rest:
        return None
    name = re.sub(r"\.exe$", "", rest.pop(0).replace("\\", "/").rpartition("/")[2], flags=re.IGNORECASE)
    if name in LAUNCHERS:
        verb = list(LAUNCHERS[name])
        if rest[: len(verb)] != verb:
            return None
        return _launched(name, rest[len(verb) :], environment)
    if (name, *rest[:1]) in INSTALLED:
        launcher, script = INSTALLED[name, rest[0]]
        return PythonCommand(launcher, {}, script, tuple(rest[1:]), environment)
    if not _PYTHON.fullmatch(name):
        return None if not name.endswith(".py") else PythonCommand("python", {}, name, tuple(rest), environment)
    return _launched("python", rest, environment)


def _launched(launcher: str, words: list[str], environment: dict[str, str]) -> PythonCommand | None:
    """A launcher's flags, followed by the script and its arguments."""
    launch: dict[str, Any] = {}
    module, at = False, 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        name = name if not name.startswith("--") else "--" + name[2:].replace("-", "_")
        at += 1
        if name in ("-m", "--module"):
            module = True
        elif equals:
            launch[name] = value
        elif name in SWITCHES:
            launch[name] = True
        elif launcher == "python":  # -c and its like: no script
            return None
        else:
            launch[name] = words[at] if at < len(words) else ""
            at += 1
    if at >= len(words):
        return None
    script, rest = words[at].replace("\\", "/"), words[at + 1 :]
    if launcher == "python" and module and script in _DISTRIBUTED:
        return _launched("torchrun", rest, environment)
    if launcher == "python" and module and script in ("accelerate.commands.launch", "deepspeed.launcher.runner"):
        return _launched(script.partition(".")[0], rest, environment)
    path = script.replace(".", "/") + ".py" if module else script
    return PythonCommand(launcher, launch, path, tuple(rest), environment)
