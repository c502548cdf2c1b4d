"""`vplan report`: two plans on one page without importing torch, and the page in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tools import browse_site

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def page(shown: Path) -> Iterator[Page]:
    """The page in a browser, with its first plan opened. Asserts that no test causes a message on the console."""
    pytest.importorskip("playwright")
    if browse_site.CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with browse_site.chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(shown.as_uri())
        page.locator("#p1 > summary").click()
        yield page
        assert complaints == []


def field(page: Page, name: str) -> str:
    return page.locator(f'#p1-step-reading [data-field="{name}"]').inner_text()


def chart(page: Page) -> Locator:
    return page.locator('[data-step="p1-step-told"]')


def view(page: Page) -> list[float]:
    shown = page.locator('[data-step="p1-step-told"] svg.plot').get_attribute("viewBox")
    assert shown is not None
    return [float(number) for number in shown.split()]


def test_the_cursor_tells_time_block_operator_and_owners(page: Page) -> None:
    assert field(page, "when") == "At the peak"
    plot = chart(page).locator("svg.plot")
    box = plot.bounding_box()
    assert box is not None
    plot.hover(position={"x": box["width"] * 0.1, "y": 150}, force=True)
    assert field(page, "when") == "Under the cursor"
    assert field(page, "place").startswith("forward") and field(page, "operator")
    assert re.fullmatch(r"about [\d.]+ m?s", field(page, "time"))
    assert "weights" in field(page, "owners")
    early = field(page, "time")
    plot.hover(position={"x": box["width"] * 0.7, "y": 150}, force=True)
    assert field(page, "place").startswith("backward") and field(page, "time") != early


def test_the_step_is_zoomed_by_wheel_drag_and_keys_and_a_click_pins(page: Page) -> None:
    plot, whole = chart(page).locator("svg.plot"), [0.0, 0.0, 10000.0, 1000.0]
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    middle = box["x"] + box["width"] / 2, box["y"] + 150
    page.mouse.move(*middle)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function("document.querySelector('#p1 svg.plot').getAttribute('viewBox') !== '0 0 10000 1000'")
    assert view(page)[2] == 8000 and view(page)[0] == pytest.approx(1000, abs=30)
    chart(page).focus()
    page.keyboard.press("0")
    assert view(page) == whole
    page.mouse.move(box["x"] + box["width"] * 0.2, middle[1])
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.4, middle[1], steps=3)
    page.mouse.up()
    assert view(page)[0] == pytest.approx(2000, abs=30) and view(page)[2] == pytest.approx(2000, abs=30)
    times = [float(text.removesuffix(" s")) for text in chart(page).locator("svg > g text").all_text_contents()]
    assert len(times) > 2 and times == sorted(times) and times[0] > 0  # the axis of what is seen
    assert page.evaluate("String(getSelection())") == ""
    page.keyboard.press("Escape")
    assert view(page) == whole
    page.mouse.click(*middle)
    assert field(page, "when") == "Pinned" and page.locator("#p1 line.pin").get_attribute("visibility") == "visible"
    page.keyboard.press("ArrowRight")
    assert field(page, "when") == "Under the cursor" and "to the pin" in field(page, "allocated")
    page.keyboard.press("Escape")
    assert page.locator("#p1 line.pin").get_attribute("visibility") == "hidden"


def test_two_plans_are_read_at_the_same_place(page: Page) -> None:
    rows = page.locator("#over-reading tbody tr")
    assert [text.split()[0] for text in rows.all_inner_texts()] == ["naive.toml", "full.toml"]
    page.locator('[data-step="over-told"]').focus()
    page.keyboard.press("Home")
    first = rows.all_inner_texts()
    page.keyboard.press("End")
    assert first != rows.all_inner_texts() and all("optimizer" in text for text in rows.all_inner_texts())


def test_a_cell_of_the_map_tells_its_plan_and_its_command(page: Page) -> None:
    panel, command = page.locator("#p1-cell"), page.locator('#p1-cell [data-field="command"]')
    assert command.is_hidden()
    page.locator("#p1 table.map tbody tr").first.locator("button").first.click()
    assert re.match(
        r"vplan estimate wan2.1-t2v-1.3b --gpu 24GB --frames 1 --height \d+ --width \d+", command.inner_text()
    )
    assert "GiB" in panel.inner_text() and "a step" in panel.inner_text()
    page.keyboard.press("ArrowRight")
    assert re.search(r" --frames (?!1 )\d+ ", command.inner_text())


def test_a_phone_shows_the_page_without_scrolling_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    try:
        sizes = page.evaluate("[document.documentElement.scrollWidth, document.querySelector('#p1').offsetHeight]")
        assert sizes[0] == 390 and sizes[1] < 4000
        cued = page.locator("#p1 .scroll.wider")
        cued.first.wait_for()
        assert cued.locator("table.map").count() == 1
    finally:
        page.set_viewport_size({"width": 1440, "height": 900})


def test_what_is_neither_a_plan_nor_a_run_is_refused_with_what_both_are(tmp_path: Path) -> None:
    for path, fault in ((tmp_path / "nowhere", "there is no"), (tmp_path, "is not the output of a run")):
        done = run("report", str(path))
        assert done.returncode == 1 and fault in done.stderr
        assert "pass plan.toml files, or the --output of a `vplan train`" in done.stderr


def test_a_page_needs_a_name_of_its_own(shown: Path) -> None:
    plan = str(shown.with_name("full.toml"))
    done = run("report", plan, "-o", plan)
    assert done.returncode == 1 and "no .html file" in done.stderr
