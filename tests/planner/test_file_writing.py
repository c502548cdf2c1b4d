"""planner/file_writing: whole or not at all, no link followed, permissions kept; and who writes with it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.commands import cli
from planner.errors import VplanError
from planner.file_writing import write_file
from planner.foreign.export import Exported, write_files
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, write_plan

PLAN = Plan(
    job=Job(model="wan2.1-t2v-1.3b", frames=5, height=64, width=64), strategy=Strategy(), machine=Machine(gpu="24GB")
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> None:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_obeys_the_umask_and_an_old_one_keeps_its_permissions(tmp_path: Path) -> None:
    new, script, kept = (tmp_path / name for name in ("new", "script.sh", "kept"))
    write_file(new, "text")
    write_file(script, "text", executable=True)
    assert (mode(new), mode(script)) == (0o640, 0o750)
    kept.write_text("private")
    kept.chmod(0o600)
    write_file(kept, b"bytes")
    write_file(kept, "bytes", executable=True)
    assert (kept.read_text(), mode(kept)) == ("bytes", 0o700)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "new", "script.sh"]


def test_links_are_replaced_and_never_written_through(tmp_path: Path) -> None:
    victim, link, dangling = (tmp_path / name for name in ("victim", "link", "dangling"))
    victim.write_text("mine")
    link.symlink_to(victim)
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (link, dangling):
        write_file(path, "new")
        assert not path.is_symlink() and path.read_text() == "new"
    assert victim.read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_nothing_stays_of_what_could_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "within").touch()
    with pytest.raises(OSError, match="directory"):
        write_file(tmp_path / "folder", "text")
    kept = tmp_path / "kept"
    kept.write_text("old")
    limited = (
        "import resource, sys, pathlib, signal; from planner.file_writing import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_file(pathlib.Path(sys.argv[1]), 'x' * 5000)\nexcept OSError as e:\n    print(e.strerror)"
    )
    done = subprocess.run([sys.executable, "-c", limited, kept], capture_output=True, text=True, check=True)
    assert "large" in done.stdout
    assert kept.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "kept"]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True)
    write_file(pipe, "through")
    assert reader.communicate(timeout=30)[0] == "through"


def test_an_export_writes_through_no_planted_link_and_keeps_what_it_did_not_write(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("train.sh", ".train.sh.new"):  # the second was the name of the temporary file
        (folder / name).symlink_to(victim)
    exported = Exported("slurm", PLAN, {"train.sh": "#!/bin/bash\n"}, {})
    with pytest.raises(VplanError, match="already exists with other contents"):
        write_files(exported, folder, force=False)
    write_files(exported, folder, force=True)
    assert victim.read_text() == "mine"
    assert (folder / "train.sh").read_text() == "#!/bin/bash\n" and not (folder / "train.sh").is_symlink()
    assert mode(folder / "train.sh") & 0o111
    (folder / "train.sh").chmod(0o700)
    write_files(exported, folder, force=False)
    assert mode(folder / "train.sh") == 0o700


def test_reports_and_plans_keep_the_permissions_of_the_file_they_replace(tmp_path: Path) -> None:
    page, plan = tmp_path / "report.html", tmp_path / "plan.toml"
    for path in (page, plan):
        path.write_text("old")
        path.chmod(0o600)
    from reports import page as pages

    pages.write("<p>new</p>", page)
    write_plan(PLAN, plan)
    assert (mode(page), mode(plan)) == (0o600, 0o600)
    assert page.read_text() == "<p>new</p>" and "wan2.1" in plan.read_text()


def test_a_batch_script_replaces_its_like_alone(tmp_path: Path) -> None:
    plan, data, script = tmp_path / "plan.toml", tmp_path / "clips", tmp_path / "job.sh"
    write_plan(PLAN, plan)
    data.mkdir()
    words = ["train", str(plan), "--data", str(data), "--output", str(tmp_path / "run"), "--slurm", str(script)]
    words += ["--weights", str(tmp_path / "weights"), "--device", "cpu"]
    script.write_text("rm -rf build\n")
    done = CliRunner().invoke(cli, words, prog_name="vplan")
    assert done.exit_code == 1 and "is no batch script of vplan's" in done.output, done.output
    assert script.read_text() == "rm -rf build\n"
    script.unlink()
    for _ in range(2):
        done = CliRunner().invoke(cli, words, prog_name="vplan")
        assert done.exit_code == 0, done.output
        script.chmod(0o600)
    assert mode(script) == 0o600
