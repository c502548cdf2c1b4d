"""The observer in a Python of its own, where a module of the test stands for torch."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from planner.rehearsal.observations import read_observed
from trainers.observer.import_hook import ImportHook
from trainers.observer.memory_peaks import _with_peaks

ENTRY = Path(__file__).parents[3] / "trainers" / "observer" / "entry"


def python(folder: Path, source: str, **environment: str) -> str:
    path = os.pathsep.join([str(ENTRY), str(folder)])
    known = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-c", source], env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_next_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own = 'mine'")
    program = "import sys, sitecustomize; print(sys.own, 'vplan_observer' in sys.modules, sitecustomize.__file__)"
    shown = python(tmp_path, program, VPLAN_GPU_FOLDER=str(tmp_path)).split()
    assert shown == ["mine", "True", str(tmp_path / "sitecustomize.py")]
    assert "torch" not in python(tmp_path, "import sys; print(*sys.modules)", VPLAN_GPU_FOLDER=str(tmp_path)).split()


def test_outside_a_rehearsal_nothing_is_watched(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VPLAN_GPU_FOLDER"}
    environment["PYTHONPATH"] = str(ENTRY)
    command = [sys.executable, "-c", "import sys; print('vplan_observer' in sys.modules)"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_module_is_told_of_once_its_code_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_module.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    hook = ImportHook()
    hook.install()
    seen: list[int] = []
    hook.after("watched_module", lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module("watched_module")
    hook.after("watched_module", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]
    sys.modules.pop("watched_module")


def test_peaks_that_a_phase_reset_are_put_back() -> None:
    def stats(peak: int, current: int) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"peak": peak, "current": current}}, "num_ooms": 0}

    assert _with_peaks(stats(5, 4), stats(9, 9)) == stats(9, 4)
    assert _with_peaks(stats(5, 4), stats(3, 9)) == stats(5, 4)
    assert _with_peaks(stats(5, 4), {}) == stats(5, 4)


def test_a_process_without_a_card_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    python(tmp_path, "import torch; torch.ones(2).sum().item()", VPLAN_GPU_FOLDER=str(tmp_path))
    assert read_observed(tmp_path) == []
    assert json.dumps([path.name for path in tmp_path.glob("observed-*")]) == "[]"


def test_deepspeed_s_adam_of_the_card_is_not_compiled(tmp_path: Path) -> None:
    folder = tmp_path / "deepspeed" / "ops" / "adam"
    folder.mkdir(parents=True)
    for package in (folder.parents[1], folder.parents[0], folder):
        (package / "__init__.py").write_text("")
    source = """
    class FusedAdamBuilder:
        def load(self):
            raise RuntimeError("CUDA_HOME does not exist")
    class FusedAdam:
        def __init__(self):
            self.multi_tensor_adam = FusedAdamBuilder().load().multi_tensor_adam
    """
    (folder / "fused_adam.py").write_text(textwrap.dedent(source))
    program = (
        "from deepspeed.ops.adam.fused_adam import FusedAdam; print(FusedAdam().multi_tensor_adam(2048, [[]], 1.0))"
    )
    assert python(tmp_path, program, VPLAN_GPU_FOLDER=str(tmp_path)) == "None\n"
