"""`vplan site`, built from pinned downloads and asked in headless Chromium.

What needs a browser is skipped unless VPLAN_SITE_DOWNLOADS names a folder that `vplan site --downloads` has filled.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vplan
from planner.errors import VplanError
from reports import site as builder
from tests.planner.test_browser import COMMAND
from tests.planner.test_terminal import on_a_terminal, without_colours
from tests.tools import browse_site

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOWNLOADS = os.environ.get("VPLAN_SITE_DOWNLOADS", "")
in_chromium = [
    pytest.mark.skipif(not Path(DOWNLOADS, builder.PYODIDE).is_file(), reason="VPLAN_SITE_DOWNLOADS has no Pyodide"),
    pytest.mark.skipif(browse_site.CHROMIUM is None, reason="chromium is not installed"),
]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(vplan.command("site", *words), capture_output=True, text=True, timeout=300)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = run("-o", str(tmp_path), "--force")
    assert done.returncode == 2 and "is no site of vplan's" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_download_that_is_not_as_pinned_is_refused(tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    (downloads / builder.PYODIDE).write_bytes(b"something else")
    done = run("-o", str(tmp_path / "site"), "--downloads", str(downloads))
    assert done.returncode == 1 and "is not Pyodide as it was pinned" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["downloads"]


def test_a_shared_link_has_a_picture() -> None:
    assert 'property="og:image" content="preview.png"' in builder.page_file("index.html")
    shown = builder.page_file("index.html", "https://example.org/vplan")
    assert 'property="og:image" content="https://example.org/vplan/preview.png"' in shown and "{{" not in shown
    for wrong in ("example.org", "javascript:alert(1)", "https://a b/"):
        with pytest.raises(VplanError, match="is no address of a site"):
            builder.page_file("index.html", wrong)
    assert (builder.FILES / builder.PREVIEW).read_bytes()[16:24] == (1200).to_bytes(4) + (630).to_bytes(4)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A site, and what a terminal shows while it is built."""
    folder = tmp_path_factory.mktemp("site") / "site"
    written = on_a_terminal(folder.parent, "site", "-o", str(folder), "--downloads", DOWNLOADS).decode()
    assert (folder / "manifest.json").is_file(), written
    return folder, written


@pytest.fixture(scope="module")
def site(built: tuple[Path, str]) -> Path:
    return built[0]


@in_chromium[0]
def test_how_far_a_build_is_stands_on_the_terminal(built: tuple[Path, str]) -> None:
    folder, written = built
    packs = len(json.loads((folder / "manifest.json").read_text())["packs"])
    shown = [int(share) for share in re.findall(r"tapes of each model\b[^\n\r]*?(\d+)%", without_colours(written))]
    assert packs > 50 and len(set(shown)) > 5 and shown == sorted(shown) and shown[-1] == 100


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Page]:
    pytest.importorskip("playwright")
    with browse_site.served(site) as url, browse_site.chromium() as browser:
        page = browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: complaints.append(asked.url) if "//127.0.0.1:" not in asked.url else None)
        page.goto(f"{url}#model=wan2.1-t2v-1.3b&gpu=24GB&frames=17")
        page.wait_for_selector("#shown .verdict", timeout=browse_site.FIRST_MS)
        yield page
        known = ("blob:", "data:", ELSEWHERE)
        assert [text for text in complaints if not any(word in text for word in known)] == []


ELSEWHERE = "http://127.0.0.1:9/"
_FETCH = """address => new Promise(done => {
  addEventListener("securitypolicyviolation", refusal => done(refusal.effectiveDirective));
  fetch(address).catch(() => setTimeout(() => done("tried"), 2000));
})"""


@pytest.mark.usefixtures("page")
class TestInChromium:
    pytestmark = in_chromium

    def test_typing_changes_the_answer_and_the_address(self, page: Page) -> None:
        page.fill("[name=gpu]", "2GB")
        page.wait_for_selector(".verdict.no")
        assert "gpu=2GB" in page.url and "frames=17" in page.url
        page.fill("[name=gpu]", "24GB")
        page.wait_for_selector(".verdict.fits")

    def test_it_answers_as_the_command_line_does(self, page: Page, tmp_path: Path) -> None:
        answer = browse_site.ask(page, {"model": "cogvideox-2b", "gpu": "24GB", "frames": "9"})
        words = answer["command"].split()[1:]
        environment = {**os.environ, "VPLAN_HOME": str(tmp_path)}
        typed = subprocess.run(vplan.command(*words, "--json"), capture_output=True, text=True, env=environment)
        said, printed = json.loads(answer["json"]), json.loads(typed.stdout)
        assert answer["code"] == typed.returncode == 0
        assert said | {"seconds": 0} == printed | {"seconds": 0}

    def test_what_is_pasted_is_checked_and_is_only_text(self, page: Page) -> None:
        browse_site.ask(page, {"gpu": "24GB", "paste": COMMAND})
        assert "--blocks_to_swap 2" in page.inner_text(".gone")
        browse_site.ask(
            page, {"gpu": "<img src=x onerror=document.title='lost'>", "paste": "<script>alert(1)</script>"}
        )
        assert page.locator(".verdict.error").is_visible()
        assert page.locator("#shown img, #shown script").count() == 0 and page.title() != "lost"

    def test_the_worker_can_send_nothing_elsewhere(self, page: Page) -> None:
        (worker,) = page.workers
        assert worker.evaluate(_FETCH, ELSEWHERE) == "connect-src"
