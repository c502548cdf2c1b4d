"""The generated pages about models, cards and trainers are current; `python tests/e2e/test_docs.py` writes them.

And links between pages lead to existing files and headings, which splitting or renaming a page can break.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"models": "models", "gpus": "gpus", "export": "trainers"}
"""Verb -> the page it prints."""


def printed(verb: str) -> str:
    """What `vplan VERB --markdown` prints."""
    words = [sys.executable, str(ROOT / "vplan.py"), verb, "--markdown"]
    return subprocess.run(words, capture_output=True, check=True).stdout.decode()


@pytest.mark.parametrize("verb", PAGES)
def test_the_page_is_what_we_know(verb: str) -> None:
    page = (ROOT / "docs" / f"{PAGES[verb]}.md").read_text(encoding="utf-8")
    assert page == printed(verb)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    columns = [line.replace("\\|", "").count("|") for line in rows]
    starts = [index for index, line in enumerate(rows) if line.startswith("|---")]
    for start, end in zip(starts, [*starts[1:], len(rows) + 1], strict=True):
        assert len(set(columns[start - 1 : end - 1])) == 1  # every row of a table has its columns


LINK = re.compile(r"\]\(([^)\s]+)\)")
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "accuracy").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


if __name__ == "__main__":
    for verb in PAGES:
        (ROOT / "docs" / f"{PAGES[verb]}.md").write_text(printed(verb), encoding="utf-8")
