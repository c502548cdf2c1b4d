"""The page of a training run: what it shows, that nothing of the run becomes HTML, and that it stays small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from planner.commands import cli
from planner.commands._shared.training.run_report import ReportWriter
from planner.launch.run_history import RunHistory
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, write_plan
from reports import run_html, write_run
from tests.planner.launch.run_folders import HOSTILE, RunFolder, killed_and_resumed


def shown(folder: Path) -> str:
    history = RunHistory(folder)
    history.update()
    return write_run(history, created="now").read_text(encoding="utf-8")


def test_the_page_shows_prediction_beside_measurement(tmp_path: Path) -> None:
    html = shown(killed_and_resumed(tmp_path))
    assert "Memory is outside the predicted range in decode." in html
    assert "20.14 to 22.26" in html and "in range, -3.6%" in html and "outside, -7.7%" in html
    assert html.count('class="predicted"') > 5  # bands of phases, the estimate of seconds, the legend
    assert re.findall(r'<rect class="phase-(\w+)" x', html)[:3] == ["encode", "load", "train"]
    assert "7 steps done again" in html and html.count('class="restart"') == 1


def test_samples_stand_beside_each_other(tmp_path: Path) -> None:
    html = shown(killed_and_resumed(tmp_path))
    assert re.findall(r'<img src="(.*?)"', html) == [
        f"samples/step-{step:08d}-{prompt}.png" for prompt in (0, 1) for step in (33, 100)
    ]


def test_a_page_that_is_elsewhere_shows_the_samples_where_they_are(tmp_path: Path) -> None:
    run = killed_and_resumed(tmp_path / "my run")
    (tmp_path / "pages").mkdir()
    page = tmp_path / "pages" / "of it.html"
    done = CliRunner().invoke(cli, ["report", str(run), "-o", str(page)])
    assert done.exit_code == 0 and f"wrote {page}" in done.stderr and not (run / "report.html").exists()
    html = page.read_text()
    sources = re.findall(r'<img src="(.*?)"', html)
    assert sources[0] == "../my%20run/samples/step-00000033-0.png" and "<code>../my run/samples</code>" in html
    again = CliRunner().invoke(cli, ["report", str(run), "-o", str(page)])  # a page of ours is written anew
    assert again.exit_code == 0
    other = tmp_path / "mine.html"
    other.write_text("mine")
    kept = CliRunner().invoke(cli, ["report", str(run), "-o", str(other)])
    assert kept.exit_code == 1 and other.read_text() == "mine"
    two = CliRunner().invoke(cli, ["report", str(run), str(run)])
    assert two.exit_code == 2 and "a run has a page of its own" in two.stderr


def test_a_folder_that_is_no_run_names_what_lies_in_it(tmp_path: Path) -> None:
    run = killed_and_resumed(tmp_path / "demo" / "run")
    told = CliRunner().invoke(cli, ["report", str(tmp_path / "demo")])
    assert told.exit_code == 1 and f"pass what lies in it: `vplan report {run}`" in told.stderr
    (tmp_path / "demo" / "other.toml").write_text("a = 1\n")
    job = Job(model="wan2.1-t2v-1.3b", frames=17, height=480, width=832)
    plan = tmp_path / "demo" / "plan.toml"
    write_plan(Plan(job=job, strategy=Strategy(), machine=Machine(gpu="24GB")), plan)
    told = CliRunner().invoke(cli, ["report", str(tmp_path / "demo")])
    assert f"(beside it: {plan})" in told.stderr and "other.toml" not in told.stderr


def test_only_some_rounds_of_samples_are_on_the_page(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in range(1, 101):
        run.samples(step, "one")
    html = shown(run.write())
    steps = [int(step) for step in re.findall(r"samples/step-(\d+)-0.png", html)]
    assert len(steps) == 12 and steps[0] == 1 and steps[-1] == 100 and "12 of 100 rounds" in html


def test_nothing_of_the_run_is_html(tmp_path: Path) -> None:
    html = shown(killed_and_resumed(tmp_path))
    assert HOSTILE not in html and "<b>" not in html and "&lt;script&gt;alert" in html
    assert html.count("<script") == 5  # the numbers of four charts, and the page's own


def test_a_page_of_the_cpu_says_that_there_is_nothing_to_compare(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, device="cpu")
    run.start(0)
    run.steps(1, 5)
    html = shown(run.write())
    assert "This run is on the CPU" in html and "predicted range" not in html and 'class="predicted"' not in html
    assert "host RAM 8.00 GiB" in html


def test_a_page_stays_small(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.start(0)
    run.steps(1, 20_000)
    assert len(shown(run.write())) < 300_000


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    assert "Not running on this computer: step 0 of 1000" in shown(RunFolder(tmp_path).write())


def test_only_a_served_page_looks_for_news(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path)
    assert "data-live=" not in shown(tmp_path).replace("dataset.live", "")
    served = run_html(RunHistory(tmp_path))
    assert 'data-live="page"' in served and "file:" not in served[: served.index("<title>")]


def test_a_page_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = killed_and_resumed(tmp_path)
    writer = ReportWriter(folder)
    (folder / "run" / "result-00000.json").mkdir()  # reading it is an error of the system
    writer.write()
    assert capsys.readouterr().err.startswith(f"warning: no more report of the run: {folder}/run/result-00000.json")
    (folder / "run" / "result-00000.json").rmdir()
    writer.write()
    assert capsys.readouterr().err == "" and not (folder / "report.html").exists()
