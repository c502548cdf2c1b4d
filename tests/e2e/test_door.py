"""The one door: whatever folders lie about and whatever a script has imported, our packages are ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vplan

ROOT = Path(vplan.HOME)
DECOY = "raise SystemExit('a decoy was imported: ' + __file__)\n"


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A user's repository with folders called like ours; importing one ends the process."""
    for name in vplan.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(DECOY)
    return tmp_path


def run(
    arguments: list[str], cwd: Path, path: str = "", code: int = 0, stderr: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a process with PYTHONPATH=`path`; checks its exit code and, when given, what stderr contains."""
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert stderr in done.stderr
    return done


def test_decoys_in_front_are_not_imported(decoys: Path) -> None:
    """`python -m vplan` puts the working folder first, `PYTHONPATH=.` right after it: both lose to ours."""
    done = run([sys.executable, "-m", "vplan", "gpus", "--json"], decoys, path=f".{os.pathsep}{ROOT}")
    assert json.loads(done.stdout)["gpus"]


def test_decoys_do_not_reach_the_console_script(decoys: Path) -> None:
    """A console script is `from vplan import main`, from a folder of its own."""
    script = decoys / "bin" / "vplan"
    script.parent.mkdir()
    script.write_text("import sys\nfrom vplan import main\nsys.exit(main())\n")
    run([sys.executable, str(script), "gpus", "--json"], decoys, path=f".{os.pathsep}{ROOT}")


def test_a_launchers_worker_is_ours(decoys: Path, tmp_path: Path) -> None:
    """A worker started by path, as launchers do, runs our trainers although the job's folder has others."""
    source = tmp_path / "house"
    for name in ("planner", "profiles", "trainers", "reports"):
        (source / name).mkdir(parents=True)
        (source / name / "__init__.py").write_text("")
    (source / "vplan.py").write_text((ROOT / "vplan.py").read_text())
    (source / "trainers" / "echo.py").write_text("def main(arguments):\n    print(__file__, arguments)\n    return 7\n")
    worker = [sys.executable, str(source / "vplan.py"), "worker", "echo"]
    done = run([*worker, "--rank", "0"], decoys, path=".", code=7)
    assert done.stdout.split(maxsplit=1) == [str(source / "trainers" / "echo.py"), "['--rank', '0']\n"]
    run([*worker[:-1], "../echo"], decoys, path=".", code=2, stderr="no worker '../echo'")


def test_a_script_with_its_own_trainers_gets_answers(decoys: Path) -> None:
    """`import vplan` touches neither the script's modules nor its search path: the work happens in a process."""
    (decoys / "trainers" / "__init__.py").write_text("MINE = True\n")
    (decoys / "script.py").write_text(
        "import sys, trainers, vplan\n"
        "before = list(sys.path)\n"
        "try:\n"
        "    vplan.estimate('no-such-model-at-all', gpu='24GB')\n"
        "except vplan.VplanError as error:\n"
        "    print(error.exit_code, error.message)\n"
        "assert trainers.MINE and sys.path == before and 'planner' not in sys.modules\n"
    )
    done = run([sys.executable, "script.py"], decoys, path=str(ROOT))
    assert "no-such-model-at-all" in done.stdout or "estimate" in done.stdout


@pytest.mark.parametrize("words", [["gpus"], ["worker", "step"]])
def test_a_script_with_its_own_trainers_is_refused_inside(decoys: Path, words: list[str]) -> None:
    """Our code cannot run in a process that has another package of that name; it says which and where."""
    (decoys / "trainers" / "__init__.py").write_text("MINE = True\n")
    (decoys / "script.py").write_text(f"import trainers, vplan\nraise SystemExit(vplan.main({words!r}))\n")
    theirs = os.path.join(os.path.realpath(decoys), "trainers", "__init__.py")
    run([sys.executable, "script.py"], decoys, path=str(ROOT), code=1, stderr=f"'trainers' is {theirs}")


def test_refusal_is_json_when_json_was_asked(decoys: Path) -> None:
    (decoys / "script.py").write_text(
        "import sys, types, vplan\n"
        "sys.modules['reports'] = types.ModuleType('reports')\n"
        "raise SystemExit(vplan.main(['gpus', '--json']))\n"
    )
    done = run([sys.executable, "script.py"], decoys, path=str(ROOT), code=1)
    assert set(json.loads(done.stdout)["error"]) == {"message", "fix"}


def test_options_become_words() -> None:
    options = {"model": None, "frames": 81, "vae_tiling": True, "vae_slicing": False, "lora_targets": ["to_q", "to_k"]}
    assert vplan._options(options) == ["--frames=81", "--vae-tiling", "--no-vae-slicing", "--lora-targets=to_q,to_k"]
