"""What a page says of a plan in sentences: the next commands, and what to change where it does not fit."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from pathlib import Path

import pytest

import reports
from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.estimate.estimate import estimate
from planner.layout.recordings import load_facts
from planner.search.question import Switch
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Plan
from planner.units import GIB
from reports import data, page, sentences
from tests.reports.test_report import plan, told  # fixtures

__all__ = ["plan", "told"]
MODEL = lookup.model("wan2.1-t2v-1.3b")


def planned(gpu: str, trainer: str = "vplan", method: str = "lora") -> Plan:
    job = job_for(MODEL, {"model": MODEL.name, "frames": 33, "method": method})
    configuration = Configuration.of(job, Strategy(), Machine(gpu=gpu, host_ram=32 * GIB))
    return Plan.of(estimate(configuration, load_facts(configuration)), trainer=trainer)


def commands(of: Plan) -> tuple[str, str, str]:
    assert of.estimate is not None
    next_command = sentences.next_command("p.toml", of, of.estimate)
    return next_command, sentences.after_command("p.toml", of, of.estimate), sentences.measure_note("p.toml", of)[0]


def test_a_plan_that_fits_is_written_and_trained() -> None:
    first, then, measured = commands(planned("80GB"))
    assert first.startswith("vplan estimate wan2.1-t2v-1.3b ") and first.endswith(" -o p.toml")
    assert then == "vplan train p.toml --data DIR --weights DIR --output DIR" and measured == "vplan probe p.toml"


def test_another_trainers_plan_stays_with_that_trainer() -> None:
    first, then, measured = commands(planned("8GB", "musubi-tuner"))
    assert first.startswith("vplan suggest ") and first.endswith(" --for musubi-tuner") and then == ""
    assert measured == "vplan rehearse --gpu 8GB -- COMMAND"
    assert commands(planned("80GB", "musubi-tuner"))[1] == "vplan export p.toml --to musubi-tuner -o DIR"


def test_a_plan_that_samples_is_not_trained() -> None:
    sampling = planned("80GB", method="sample")
    assert sampling.estimate is not None and sampling.estimate.verdict == "fits" and commands(sampling)[1] == ""


def test_the_page_tells_what_to_change(told: data.PlanData) -> None:
    bare = page.render(page.Page("one", (told,)))
    assert "To make it fit" not in bare
    changed = dataclasses.replace(told, changes=(("--blocks_to_swap 32", "fits, 21.7 GiB"),))
    shown = page.render(page.Page("one", (changed,)))
    words = unescape(re.sub(r"<[^>]+>", "", shown[shown.index("To make it fit") :][:400]))
    assert words.startswith("To make it fit:--blocks_to_swap 32fits, 21.7 GiB")


def test_changes_reach_the_page_from_a_plan(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    reports.write(out, [("p.toml", planned("8GB"))], changes=[("--frames 9", "instead of 33")], created="now")
    assert "instead of 33" in out.read_text(encoding="utf-8")


def test_options_that_did_nothing_are_left_out(told: data.PlanData) -> None:
    idle = Switch("autocast", "bf16", "none", 0, 0.0)
    shown = page.render(page.Page("one", (dataclasses.replace(told, switches=(*told.switches, idle)),)))
    assert told.switches and page._switch_words(told.switches[0]) in shown and page._switch_words(idle) not in shown


def test_no_line_of_a_command_ends_in_dashes() -> None:
    assert page._command("vplan a --gpu 24GB <x>") == 'vplan a <span class="flag">--gpu</span> 24GB &lt;x&gt;'


def test_the_maps_cell_of_the_plan_says_what_the_plan_says(told: data.PlanData) -> None:
    (own,) = [cell for row in told.capacity.cells for cell in row if page._is_own(cell, told)]
    assert own.rung is not None and own.verdict == told.estimate.verdict
    assert own.device_bytes == told.estimate.peak.device_bytes
    assert told.cell_seconds[own.shape] == pytest.approx(told.estimate.step_seconds)
    assert told.cell_commands[own.shape] == told.command
