"""`vplan report` as people run it: two plans on one page without torch, and the page in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_TORCH = "import sys, vplan; code = vplan.main(sys.argv[1:]); sys.exit(99 if 'torch' in sys.modules else code)"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    typed = [sys.executable, "-c", NO_TORCH, *arguments]
    return subprocess.run(typed, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name, flags in (
        ("naive", ["--gradient-checkpointing", "none"]),
        ("full", ["--gradient-checkpointing", "full"]),
    ):
        asked = ["wan2.1-t2v-1.3b", "--gpu", "24GB", "--frames", "13", *flags]
        done = run("estimate", *asked, "-o", str(folder / f"{name}.toml"))
        assert done.returncode == 0, done.stderr
    out = folder / "both.html"
    done = run("report", str(folder / "naive.toml"), str(folder / "full.toml"), "-o", str(out))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == f"wrote {out}\n"
    return out


def test_two_plans_stand_side_by_side_without_torch(shown: Path) -> None:
    text = shown.read_text(encoding="utf-8")
    assert "Side by side" in text and text.count("<article") == 2 and len(text) < 400_000
    assert "naive.toml" in text and "full.toml" in text


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_runs_the_page_without_a_complaint(shown: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--window-size=360,800"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={tmp_path}", "--dump-dom", shown.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert 'class="copy"' in done.stdout, "the page's script did not run"
    assert 'class="copy"' not in shown.read_text(encoding="utf-8")
    complaints = [line for line in done.stderr.splitlines() if re.search(r"CONSOLE|Content Security Policy", line)]
    assert complaints == []


def test_what_is_neither_a_plan_nor_a_run_is_refused_with_what_both_are(tmp_path: Path) -> None:
    for path, fault in ((tmp_path / "nowhere", "there is no"), (tmp_path, "is not the output of a run")):
        done = run("report", str(path))
        assert done.returncode == 1 and fault in done.stderr
        assert "pass plan.toml files, or the --output of a `vplan train`" in done.stderr


def test_a_page_needs_a_name_of_its_own(shown: Path) -> None:
    plan = str(shown.with_name("full.toml"))
    done = run("report", plan, "-o", plan)
    assert done.returncode == 1 and "no .html file" in done.stderr
