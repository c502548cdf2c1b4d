"""The entry point: our packages are imported, whatever folders exist nearby and whatever a script has imported."""

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
    """A user's repository with folders named like our packages; importing one ends the process."""
    for name in vplan.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(DECOY)
    return tmp_path


def run(
    arguments: list[str], cwd: Path, path: str = "", code: int = 0, stderr: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a process with PYTHONPATH=`path`; checks its exit code, and that stderr contains the given text."""
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert stderr in done.stderr
    return done


def test_decoys_in_front_are_not_imported(decoys: Path) -> None:
    """`python -m vplan` puts the working folder first on the path, and `PYTHONPATH=.` second; our packages still
    win."""
    done = run([sys.executable, "-m", "vplan", "gpus", "--json"], decoys, path=f".{os.pathsep}{ROOT}")
    assert json.loads(done.stdout)["gpus"]


def test_decoys_do_not_reach_the_console_script(decoys: Path) -> None:
    """A console script runs `from vplan import main` from another folder."""
    script = decoys / "bin" / "vplan"
    script.parent.mkdir()
    script.write_text("import sys\nfrom vplan import main\nsys.exit(main())\n")
    run([sys.executable, str(script), "gpus", "--json"], decoys, path=f".{os.pathsep}{ROOT}")


def test_a_launchers_worker_is_ours(decoys: Path, tmp_path: Path) -> None:
    """A worker started by path, as launchers do, runs our trainers even if the job's folder has a package of that
    name."""
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
    """The API works in the script's own process, next to folders named like our packages: it changes neither its
    modules nor its search path, and does not import torch."""
    (decoys / "trainers" / "__init__.py").write_text("MINE = True\n")
    (decoys / "script.py").write_text(
        "import sys, trainers, vplan\n"
        "before = list(sys.path)\n"
        "assert 'planner' not in sys.modules\n"
        "plan = vplan.suggest('wan2.1-t2v-1.3b', gpu='24GB', frames=9)\n"
        "plan.report('page.html')\n"
        "assert trainers.MINE and sys.path == before and 'torch' not in sys.modules\n"
        "print(plan.estimate.verdict)\n"
    )
    assert run([sys.executable, "script.py"], decoys, path=str(ROOT)).stdout == "fits\n"
    assert "<html" in (decoys / "page.html").read_text()[:200]


def test_a_script_with_a_planner_of_its_own_is_told_so(decoys: Path) -> None:
    (decoys / "planner" / "__init__.py").write_text("")
    (decoys / "script.py").write_text(
        "import sys, planner, vplan\n"
        "before = list(sys.path)\n"
        "try:\n"
        "    vplan.estimate('wan2.1-t2v-1.3b', gpu='24GB')\n"
        "except vplan.VplanError as error:\n"
        "    print(error.exit_code, error.fix)\n"
        "assert sys.path == before\n"
    )
    done = run([sys.executable, "script.py"], decoys, path=str(ROOT))
    assert done.stdout.startswith("1 ") and "vplan.command('suggest'" in done.stdout


def test_import_is_light_and_dir_is_the_api() -> None:
    names = [*vplan.__all__, "__version__"]
    assert dir(vplan) == sorted(names)
    source = "import sys, vplan; print(set(sys.modules), dir(vplan), sep='|')"
    done = run([sys.executable, "-S", "-c", source], ROOT)
    loaded, _, listed = done.stdout.strip().partition("|")
    assert "'json'" in loaded and listed == str(sorted(names))
    assert not {f"'{name}'" for name in ("planner", "click", "pydantic", "rich", "subprocess", "numpy")} & set(
        loaded.strip("{}").split(", ")
    )
    public = [name for name in vars(vplan) if not name.startswith("_") and callable(getattr(vplan, name))]
    assert set(public) - set(names) <= {"command", "main", "Sequence", "Any"}


def test_answers_are_typed_and_the_command_lines_own(tmp_path: Path) -> None:
    plan = vplan.suggest("wan2.1-t2v-14b", gpu="rtx4090", frames=33)
    words = ["suggest", "wan2.1-t2v-14b", "--gpu", "rtx4090", "--frames", "33"]
    said = json.loads(run(vplan.command(*words, "--json"), tmp_path).stdout)
    assert plan.estimate is not None and plan.estimate.to_json() == said["plan"]
    assert [switch.to_json() for switch in plan.switches] == said["switches"]
    assert [each.to_json() for each in plan.alternatives] == said["alternatives"]
    assert {each.peak.device_bytes for each in plan.ladder} <= {each.peak.device_bytes for each in plan.alternatives}
    assert plan.fits and (plan.job.frames, plan.machine.gpu) == (33, "rtx4090")
    environment = {**os.environ, "COLUMNS": "100"}
    printed = subprocess.run(vplan.command(*words), env=environment, capture_output=True, text=True, check=True).stdout
    assert str(plan).splitlines() == [line.rstrip() for line in printed.splitlines()]
    assert repr(plan).startswith("<vplan: wan2.1-t2v-14b lora on rtx4090 fits: ")
    page = plan._repr_html_()
    assert page.startswith("<pre") and "GeForce RTX 4090" in page and "font-weight: bold" in page

    plan.save(tmp_path / "plan.toml")
    read = vplan.read_plan(tmp_path / "plan.toml")
    assert (read.job, read.strategy, read.ladder) == (plan.job, plan.strategy, plan.ladder)
    assert "GeForce RTX 4090" in str(read) and read.alternatives == ()
    vplan.report([plan, read], tmp_path / "both.html")
    assert (tmp_path / "both.html").stat().st_size > 10_000

    found = vplan.estimate(plan=tmp_path / "plan.toml")
    assert found.peak == plan.estimate.peak and found.verdict == "fits" and "at the peak" in str(found)
    assert found.to_plan().job == plan.job


def test_check_and_export_answer_in_objects(tmp_path: Path) -> None:
    plan = vplan.suggest("wan2.1-t2v-1.3b", gpu="24GB", frames=33, gradient_checkpointing="full")
    done = plan.export("diffusion-pipe", tmp_path / "out", nearest=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(done.files)
    (tmp_path / "out" / next(iter(done.files))).write_text("mine")
    with pytest.raises(vplan.VplanError, match="force"):
        vplan.export(plan, "diffusion-pipe", tmp_path / "out", nearest=True)
    command = "accelerate launch train_dreambooth_lora_flux.py --pretrained_model_name_or_path x/FLUX.1-dev"
    command += " --mixed_precision bf16"
    checked = vplan.check(command, gpu="48GB")
    assert checked.verdict == "no" and checked.phase == checked.to_json()["phase"]
    assert checked.fixes and checked.fixes[0].outcome.estimate.verdict != "no"
    assert vplan.check(command.split(), gpu="48GB").to_json() == checked.to_json()
    (tmp_path / "train.sh").write_text(command)
    assert vplan.check(tmp_path / "train.sh", gpu="48GB").estimate.peak == checked.estimate.peak
    assert "FLUX.1" in checked._repr_html_() and "does not fit" in str(checked)


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        ({"frames": 80}, "frames 80 is not 4n+1", "77 or 81"),
        ({"framez": 81}, "no such option --framez", "did you mean --frames"),
        ({"optimizer": "adamv"}, "adamv", "adamw"),
        ({"output": "plan.toml"}, "does not take output", "save(FILE)"),
        ({"swap_blocks": 10, "gradient_checkpointing": "maybe"}, "maybe", "none"),
    ],
)
def test_a_wrong_option_raises_with_the_fix(options: dict[str, object], message: str, fix: str) -> None:
    with pytest.raises(vplan.VplanError) as refused:
        vplan.suggest("wan2.1-t2v-1.3b", gpu="24GB", **options)
    assert message in refused.value.message and fix in refused.value.fix
    assert str(refused.value) == f"{refused.value.message}; {refused.value.fix}"


def test_what_an_answer_refuses_is_the_same_error(tmp_path: Path) -> None:
    found = vplan.estimate("wan2.1-t2v-1.3b", gpu="24GB", frames=9)
    for call in (
        lambda: found.save(tmp_path / "no" / "plan.toml"),
        lambda: found.report(tmp_path / "page.pdf"),
        lambda: found.to_plan().export("no-such-trainer", tmp_path),
        lambda: vplan.read_plan(tmp_path / "none.toml"),
        lambda: vplan.check("python train.py", gpu="24GB"),
    ):
        with pytest.raises(vplan.VplanError) as refused:
            call()
        assert refused.value.fix


@pytest.mark.parametrize("words", [["gpus"], ["worker", "step"]])
def test_a_script_with_its_own_trainers_is_refused_inside(decoys: Path, words: list[str]) -> None:
    """Our code cannot run in a process with another package of that name; the error names the package and its file."""
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
