"""The site of `vplan site` in headless Chromium: served, opened, and asked through its address.

Needs the package playwright, and Chromium of the system.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import vplan

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FIRST_MS = 180_000
"""A cold load on a busy machine."""

ANSWER_MS = 400_000
"""The longest `check` of a pasted command, many times over."""

_ASK = """([address, most]) => new Promise(done => {
  const section = document.getElementById("answer");
  const began = performance.now();
  setTimeout(() => done({ seconds: most / 1000 }), most);
  const watching = new MutationObserver(() => {
    if (section.getAttribute("aria-busy") !== "false") return;
    watching.disconnect();
    done({ ...document.getElementById("shown").answer, seconds: (performance.now() - began) / 1000 });
  });
  watching.observe(section, { attributes: true, attributeFilter: ["aria-busy"] });
  location.hash = address;
})"""


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a site while `vplan site --serve` shows it."""
    words = vplan.command("site", "-o", str(site), "--serve", "--port", "0")
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in what a shell starts with &
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=heard)
    assert process.stdout is not None
    match = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
    assert match is not None
    try:
        yield match[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser with nothing in its cache."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def address(form: Mapping[str, str]) -> str:
    """What stands behind the # for a form."""
    return urlencode(form)


def opened(browser: Browser, url: str, form: Mapping[str, str]) -> Page:
    """A page that shows the answer to a form. What it complains of is printed."""
    page = browser.new_page()
    page.on("console", lambda message: print("console:", message.text, flush=True))
    page.on("pageerror", lambda error: print("page:", error, flush=True))
    page.on("crash", lambda _: print("the page crashed", flush=True))
    page.goto(f"{url}#{address(form)}")
    page.wait_for_selector("#shown .verdict", timeout=FIRST_MS)
    return page


def answered(page: Page, form: Mapping[str, str]) -> dict[str, Any]:
    """The answer of an open page to another form: `command`, `code`, `json`, and the `seconds` from asked to shown; of
    a planner that failed, or is not done after `ANSWER_MS`, `failure` instead of the first three."""
    answer: dict[str, Any] = page.evaluate(_ASK, [address(form), ANSWER_MS])
    said = "; ".join(page.inner_text(part) for part in ("#status", "#shown"))
    return answer if "command" in answer else {"failure": said, "seconds": answer["seconds"]}


def ask(page: Page, form: Mapping[str, str]) -> dict[str, Any]:
    """The answer as in `answered`, of a planner that did not fail."""
    answer = answered(page, form)
    assert "command" in answer, answer["failure"]
    return answer
