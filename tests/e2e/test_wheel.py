"""The built wheel, installed alone and run in an empty folder: it has everything needed, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vplan

ROOT = Path(vplan.HOME)
SHIPPED = [*vplan.PACKAGES, "vplan.py", "pyproject.toml", "README.md", "LICENSE"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the checkout stays clean; tests are in it next to the code, as in the
    repository."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    (source / "tests").mkdir(parents=True)
    (source / "tests" / "__init__.py").touch()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    # The suite's own environment has the build backend (extra `test`): no network.
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*build, str(source)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only the wheel installed; its dependencies come from the suite's environment."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True)
    return target


def run(arguments: list[str], target: Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_contents(wheel: Path) -> None:
    """Only our five top-level names, all Python files of the packages, and their data."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {*vplan.PACKAGES, "vplan.py"}
    data = [path for suffix in ("toml", "jsonl", "zip") for path in (ROOT / "profiles").rglob(f"*.{suffix}")]
    for name in ("templates", "site/files"):
        data += [path for path in (ROOT / "reports" / name).rglob("*") if path.is_file()]
    data += list((ROOT / "planner" / "rehearsal" / "virtual_gpu").iterdir())
    code = [path for package in vplan.PACKAGES for path in (ROOT / package).rglob("*.py")]
    expected = {path.relative_to(ROOT).as_posix() for path in data + code}
    assert "profiles/gpus.toml" in expected
    assert sorted(expected - names) == []
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = run([sys.executable, "-c", "import vplan; print(vplan.__file__)"], installed, tmp_path)
    assert where.strip() == str(installed / "vplan.py")
    answer = json.loads(run([sys.executable, "-m", "vplan", "gpus", "--json"], installed, tmp_path))
    assert any(card["name"] == "rtx4090" for card in answer["gpus"])


def test_console_script(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "vplan"
    assert json.loads(run([sys.executable, str(script), "models", "--json"], installed, tmp_path))["models"]
    assert run([sys.executable, str(script), "--version"], installed, tmp_path) == f"vplan {vplan.__version__}\n"
