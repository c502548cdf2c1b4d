"""Runs a probe's very worker processes on virtual cards: what a plan takes, where there is no GPU to measure it on."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from planner.catalog import card_lookup
from planner.catalog.card_profiles import GpuProfile
from planner.errors import VplanError
from planner.evidence.measurement import REHEARSED, ProbeRow, Setup
from planner.launch import launch
from planner.probe.fork_server import ForkServer
from planner.probe.probe import RealRunner, probe
from planner.probe.worker_python import WorkerPython
from planner.rehearsal.cards import read_table
from planner.rehearsal.compiler import libraries_for
from planner.rehearsal.interpreter import Interpreter, interpreter_of
from planner.rehearsal.ram_guard import RamGuard, spare_ram
from planner.rehearsal.rehearsal import Rehearsal, environment_with_cards
from planner.spec.plan import VIRTUAL, Plan

VARIABLE = "VPLAN_CUDA_PYTHON"
"""Environment variable that names a Python with PyTorch's CUDA wheel."""

OWN_PACKAGES = ("click", "numpy", "psutil", "pydantic", "pynvml", "rich")
"""What vplan's own code needs in a worker process."""

_QUESTION = """
import importlib.metadata, importlib.util, json, sys
versions = {}
for name in ("torch", "diffusers"):
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
modules = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None]
print(json.dumps({"versions": versions, "modules": modules}))
"""
_SECONDS = 60.0

STEADY_STEPS = 1
"""Nothing is timed, and each steady step allocates what the one before did."""


def cuda_interpreter(path: str | None = None) -> Interpreter:
    """The Python with PyTorch's CUDA wheel: ``path``, else the one that VPLAN_CUDA_PYTHON names, else this one.

    Raises VplanError where it has no such wheel, or lacks vplan's own packages.
    """
    chosen = path or os.environ.get(VARIABLE) or sys.executable
    interpreter = interpreter_of([chosen])
    if interpreter.cuda is None:
        torch = f"torch {interpreter.torch} without CUDA" if interpreter.torch else "no torch"
        fix = f"pass a Python that has it: --python PATH, or set {VARIABLE} (docs/rehearsal.md says how to make one)"
        raise VplanError(f"a rehearsal needs PyTorch's CUDA wheel, and {chosen} has {torch}", fix)
    missing = [name for name in OWN_PACKAGES if name not in _packages(interpreter.path).modules]
    if missing:
        fix = f"install vplan there: {chosen} -m pip install 'vplan[train]'"
        raise VplanError(f"{chosen} lacks packages that vplan needs: {', '.join(missing)}", fix)
    return interpreter


@dataclass(frozen=True)
class _Packages:
    modules: frozenset[str]
    versions: Mapping[str, str]


@functools.cache
def _packages(path: str) -> _Packages:
    """What a Python has of the packages that probes need."""
    libraries = {name for names in launch.LIBRARIES.values() for name in names}
    names = sorted({*OWN_PACKAGES, *libraries, "torch", "diffusers", "peft", "accelerate", "deepspeed"})
    command = [path, "-c", _QUESTION, *names]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    facts = json.loads(answer.splitlines()[-1])
    return _Packages(frozenset(facts["modules"]), facts["versions"])


@dataclass(frozen=True, kw_only=True)
class _VirtualPython(WorkerPython):
    """The Python with the CUDA wheel, on virtual cards."""

    interpreter: Interpreter
    variables: Mapping[str, str]

    @property
    def is_virtual(self) -> bool:
        return True

    @property
    def path(self) -> str:
        return self.interpreter.path

    def has(self, module: str) -> bool:
        return module in _packages(self.path).modules

    def version(self, package: str) -> str | None:
        return _packages(self.path).versions.get(package)

    def environment(self, device: str) -> dict[str, str]:
        own = {name: value for name, value in self.variables.items() if not name.startswith(launch.FOREIGN)}
        return own | launch.settings(device)

    @property
    def torch_release(self) -> str | None:
        return torch_release(self.interpreter)


def torch_release(interpreter: Interpreter) -> str | None:
    """The release of an interpreter's torch, `2.13`; None without torch."""
    return ".".join(interpreter.torch.split("+")[0].split(".")[:2]) if interpreter.torch else None


@dataclass(frozen=True, kw_only=True)
class RehearsalRunner(RealRunner):
    """A `planner.probe.runner.Runner` whose GPUs are virtual ones of the plan's card.

    Its rows have true allocated and reserved bytes, device bytes with the listed context, and no seconds.
    """

    interpreter: Interpreter
    """with PyTorch's CUDA wheel"""
    server: ForkServer | None = None
    """starts the processes faster; without it each imports torch anew"""
    say: Callable[[str], None] = field(default=lambda line: None, repr=False)
    """is told what takes long"""

    @property
    def name(self) -> str:
        return REHEARSED

    def has(self, module: str) -> bool:
        """Whether its Python can import a module of that name."""
        return module in _packages(self.interpreter.path).modules

    def setup(self, card: GpuProfile) -> Setup:
        """On what its rows of a card are taken, as they say it."""
        versions = _packages(self.interpreter.path).versions
        name = f"{VIRTUAL} NVIDIA {card.title}"
        return Setup(name, VIRTUAL, versions.get("torch", "unknown"), versions.get("diffusers", "unknown"))

    def run(self, plan: Plan, *, steps: int, time_limit: float, encode: bool = False) -> ProbeRow:
        libraries = libraries_for(self.interpreter, say=self.say)
        card = card_lookup.parse_gpus(plan.machine.gpu)[1]
        rehearsal = Rehearsal((), card, plan.machine.gpus, steps=0, time_limit=time_limit, host_ram=None)
        with tempfile.TemporaryDirectory(prefix="vplan-", ignore_cleanup_errors=True) as place:
            folder = Path(place)
            (folder / "tmp").mkdir()
            variables = environment_with_cards(rehearsal, folder, libraries)
            python = _VirtualPython(interpreter=self.interpreter, variables=variables, server=self.server)
            runner = replace(self, python=python)
            steps = min(steps, STEADY_STEPS)
            with RamGuard(spare_ram()):
                row = probe(plan, runner, steps=steps, time_limit=time_limit, encode=encode or self.encode)
            device_bytes = max(read_table(folder).card_peaks)
        # As the cards counted: a probe samples NVML, and can miss a short peak.
        return row.replace(measured=row.measured.replace(device_bytes=device_bytes or None))
