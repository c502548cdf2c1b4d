"""The report: its data against the estimates they are of, its geometry, and a page that nothing can break out of."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest

import reports
from planner.catalog import card_lookup, lookup
from planner.catalog.shapes import job_for
from planner.commands import cli
from planner.dialects.base import cli_words
from planner.errors import VplanError
from planner.estimate import step_moments
from planner.estimate.estimate import estimate
from planner.evidence.accuracy import compare
from planner.evidence.published import read_rows
from planner.layout.recordings import load_facts
from planner.search.capacity_axes import lengths, sizes
from planner.search.capacity_map import Cell
from planner.search.ladder import ladder, pareto
from planner.search.question import Question
from planner.search.screening import QuickEstimate, Screen
from planner.search.search import Search
from planner.spec.configuration import Configuration
from planner.spec.job import Bucket, Job, Machine, Strategy
from planner.spec.plan import Environment, Evidence, Measured, Plan
from planner.units import GIB
from reports import charts, data, page

MODEL = lookup.model("wan2.1-t2v-1.3b")
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = job_for(MODEL, {"model": MODEL.name, "frames": 33, "method": "lora"})
    machine = Machine(gpu="12GB", host_ram=32 * GIB)
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="full"), machine)
    found = estimate(configuration, load_facts(configuration))
    seen = Measured(outcome="ok", phase="train", device_bytes=found.peak.device_bytes + GIB, step_seconds=1.5)
    env = Environment(
        gpu="card", driver="1", torch="2", diffusers="3", attention_kernel="flash", command="vplan probe", time="then"
    )
    return Plan.of(found).replace(evidence=(Evidence(id="ran-once", measured=seen, env=env),))


@pytest.fixture(scope="module")
def told(plan: Plan) -> data.PlanData:
    return data.Builder("plan.toml", plan).data()


def shaped(job: Job, cell: Cell) -> Job:
    return job.replace(frames=cell.shape[0], height=cell.shape[1], width=cell.shape[2])


def test_phases_and_step_are_those_of_the_estimate(plan: Plan, told: data.PlanData) -> None:
    found = told.estimate
    assert [entry.phase for entry in told.phases] == list(found.phases)
    totals = {entry.phase: entry.breakdown.total for entry in told.phases}
    assert totals == {phase: peak.device_bytes for phase, peak in found.phases.items()}
    peak = next(entry for entry in told.phases if entry.phase == found.peak.phase)
    assert (peak.breakdown, peak.moment) == (found.breakdown, found.peak.moment)
    step = told.timeline
    assert sum(step.peak.parts) == found.phases["train"].allocated_bytes
    assert max(point.reserved_bytes for point in step.points) == found.phases["train"].reserved_bytes
    assert [mark.name for mark in step.marks] == ["forward", "backward", "optimizer"]
    assert [point.at for point in step.points] == sorted(point.at for point in step.points)


def test_the_map_agrees_with_estimates_at_its_edge(told: data.PlanData) -> None:
    table = told.capacity
    machine = told.estimate.machine
    edges = [
        (row[column], row[column + 1])
        for row in table.cells
        for column in range(len(row) - 1)
        if row[column].verdict != row[column + 1].verdict
    ]
    assert edges, "a map without an edge tests nothing"
    for cell in {cell.shape: cell for pair in edges[:2] for cell in pair if cell.rung is not None}.values():
        strategy = table.ladder[cell.rung].strategy.replace(vae_tiling=cell.tiled)  # type: ignore[index]
        job = shaped(told.estimate.job, cell)
        configuration = Configuration.of(job, strategy, machine)
        own = estimate(configuration, load_facts(configuration))
        assert own.verdict == cell.verdict, cell
        assert abs(own.peak.device_bytes / cell.device_bytes - 1) < 0.03, cell
    order = {"fits": 0, "tight": 1, "no": 2}
    for line in (*table.cells, *zip(*table.cells, strict=True)):
        ranks = [order[cell.verdict] for cell in line]
        assert ranks == sorted(ranks), "a longer or larger clip never fits better"


def test_the_longest_clips_rise_with_the_card_and_the_plans_own_is_an_estimate(told: data.PlanData) -> None:
    by_card = {each.longest.card: each.longest for each in told.cards}
    plain = [by_card[name].lossless for name in ("8GB", "12GB", "16GB", "24GB", "48GB", "80GB")]
    assert plain == sorted(plain) and plain[0] > 0
    own = by_card["24GB"]
    assert own.lossless_by is not None
    job, machine = told.estimate.job.replace(frames=own.lossless), Machine(gpu="24GB", host_ram=own.host_ram)
    configuration = Configuration.of(job, own.lossless_by, machine)
    found = estimate(configuration, load_facts(configuration))
    assert found.verdict != "no" and found.peak.device_bytes > 0.85 * found.budget_bytes


def test_columns_and_rows_are_shapes_the_model_takes() -> None:
    job = job_for(MODEL, {"model": MODEL.name})
    assert lengths(MODEL, job) == (1, 17, 29, 45, 61, 81, 89, 101, 117, 133, 145, 161)
    found = sizes(MODEL, job)
    assert len(found) == 8 and (480, 832) in found and (720, 1280) in found
    assert all(side % MODEL.shape.size_multiple == 0 for size in found for side in size)
    image = lookup.model("flux.1-dev")
    assert lengths(image, job_for(image, {"model": image.name}))[:3] == (1, 2, 3)


def look(strategy: Strategy, gib: int, seconds: float, ram: int = 0) -> QuickEstimate:
    job = Job(model=MODEL.name, frames=17, height=480, width=832)
    return QuickEstimate(job, strategy, gib * GIB, gib * GIB, ram, seconds, False, 0)


def test_the_front_and_the_ladder() -> None:
    job, machine = Job(model=MODEL.name, frames=17, height=480, width=832), Machine(gpu="24GB", host_ram=10)
    card = card_lookup.gpu("24GB")
    search = Search(Question(job, Strategy(), machine, MODEL, card), Screen(lambda *_: pytest.fail("no facts needed")))
    plain, full = Strategy(), Strategy(gradient_checkpointing="full")
    offload = Strategy(gradient_checkpointing="offload")
    fp8 = full.replace(weights_dtype="fp8")
    seen = [
        look(fp8, 5, 2.0),
        look(offload, 19, 2.2),
        look(full, 20, 2.1),
        look(plain, 90, 1.0),
        look(full, 1, 3, ram=11),
    ]
    assert pareto(seen) == {0, 3, 4}
    assert [rung.device_bytes // GIB for rung in ladder(search, job, seen)] == [90, 20, 19, 5, 1]  # and what lacks RAM


def test_sentences_and_the_command_that_asks_again(
    plan: Plan, told: data.PlanData, capsys: pytest.CaptureFixture[str]
) -> None:
    need, budget = told.estimate.peak.device_bytes / GIB, told.estimate.budget_bytes / GIB
    assert told.verdict.startswith("Wan2.1 T2V 1.3B, LoRA training at 33 x 480 x 832, ")
    assert told.verdict.endswith(f": it needs {need:.1f} of {budget:.1f} GiB.")
    words = shlex.split(told.command)
    assert words[:2] == ["vplan", "estimate"]
    cli.main([*words[1:], "--json"], standalone_mode=False)
    again = json.loads(capsys.readouterr().out)
    assert {part: again[part] for part in ("job", "strategy", "machine")} == {
        part: getattr(plan, part).to_json() for part in ("job", "strategy", "machine")
    }


def test_what_flags_cannot_say_is_asked_by_its_file() -> None:
    job = Job(model="m", frames=1, height=64, width=64, buckets=(Bucket(frames=1, height=64, width=64),))
    assert (
        cli_words.command("estimate", job, Strategy(), Machine(gpu="a b"), "my plan.toml")
        == "vplan estimate 'my plan.toml'"
    )


def test_evidence_is_a_probe_and_an_error(told: data.PlanData) -> None:
    (probe,) = told.probes
    assert (probe.id, probe.outcome, probe.phase, probe.planned) == ("ran-once", "ok", "train", True)
    (own,) = [entry for entry in told.compared if entry.row.id == "ran-once"]
    assert own.error_pct is not None
    assert own.error_pct == pytest.approx(-100 * GIB / (told.estimate.peak.device_bytes + GIB))


def test_rows_of_a_file_are_probes_of_the_same_model_only(plan: Plan) -> None:
    rows = [
        {"id": "a", "job": {"model": MODEL.name}, "measured": {"outcome": "oom"}, "details": {"message": "no room"}},
        {"id": "b", "job": {"model": "other"}, "measured": {"outcome": "ok"}},
        {"id": "ran-once", "job": {"model": MODEL.name}, "measured": {"outcome": "ok"}},
    ]
    assert [(probe.id, probe.outcome, probe.reason) for probe in data.probes(plan, rows)] == [
        ("ran-once", "ok", ""),
        ("a", "oom", "no room"),
    ]


# ---- geometry


def test_axes() -> None:
    assert charts.Axis(0, 50).at(10) == 20
    assert charts.Axis(1, 100, True).at(10) == pytest.approx(50)
    assert charts.Axis(0, 23).ticks() == [0, 5, 10, 15, 20]
    assert charts.Axis(3, 130, True).ticks() == [5, 10, 20, 50, 100]
    assert charts.polyline([(0, 0), (100, 50)]) == "M0 1000L1000 500"


def test_areas_are_stacked_from_what_is_outside_torch(told: data.PlanData) -> None:
    highest = charts.top(told.estimate.budget_bytes)
    found = charts.areas(told.timeline, highest)
    assert [area.name for area in found] == ["context", *told.timeline.parts]
    first = told.timeline.points[0]
    held = told.timeline.outside_bytes + first.parts[0]
    assert found[1].path.startswith(f"M0 {round(1000 * (1 - held / highest))}l") and found[1].path.endswith("V1000H0Z")
    moves = [float(move) for move in re.split("[ lM]", found[-1].path.removesuffix("V1000H0Z")) if move]
    last = told.timeline.points[-1]
    level = 1 - (told.timeline.outside_bytes + sum(last.parts)) / highest
    assert (sum(moves[::2]), sum(moves[1::2])) == (
        round(charts.LONG * last.at / told.timeline.events),
        round(1000 * level),
    )


def test_every_point_of_the_step_has_its_moment(told: data.PlanData) -> None:
    points, moments = told.timeline.points, told.moments
    assert len(moments) == len(points)
    seconds = [moment.seconds for moment in moments]
    assert seconds == sorted(seconds) and seconds[0] >= 0 and seconds[-1] <= told.estimate.step_seconds * 1.001
    peak = moments[points.index(next(point for point in points if point.at == told.timeline.peak.at))]
    assert re.match(r"(forward|recompute|backward) of blocks\.\d+$", peak.place)
    for point, moment in zip(points, moments, strict=True):
        sizes = [size for _, size in moment.owners]
        assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= sum(point.parts)
    whole = dict(zip(told.timeline.parts, points[0].parts, strict=True))["weights"]
    assert dict(moments[0].owners)["weights"] == whole


def test_hours_of_cards_are_those_of_their_plans(told: data.PlanData) -> None:
    by_card = {each.longest.card: each for each in told.cards}
    own = by_card[told.estimate.machine.gpu]
    assert own.seconds is not None and own.words
    for each in told.cards:
        reaches = max(each.longest.lossless, each.longest.lossy) >= told.estimate.job.frames
        assert (each.seconds is not None) == reaches, each


def test_steps_over_each_other_keep_their_passes_together(told: data.PlanData) -> None:
    line = told.timeline
    assert charts.aligned(line, line) == [round(charts.LONG * point.at / line.events) for point in line.points]
    later = dataclasses.replace(
        line, events=2 * line.events, marks=tuple(dataclasses.replace(mark, at=2 * mark.at) for mark in line.marks)
    )
    assert charts.aligned(line, later) == pytest.approx(charts.aligned(line, line), abs=1)


def test_cells_have_seconds_and_commands_that_price_them(told: data.PlanData) -> None:
    fitting = [cell for row in told.capacity.cells for cell in row if cell.rung is not None]
    assert {cell.shape for cell in fitting} == set(told.cell_seconds) == set(told.cell_commands)
    words = shlex.split(told.cell_commands[fitting[-1].shape])
    frames, height, width = fitting[-1].shape
    assert words[:2] == ["vplan", "estimate"]
    assert [words[words.index(flag) + 1] for flag in ("--frames", "--height", "--width")] == [
        str(frames),
        str(height),
        str(width),
    ]
    cells = page._cells(told)
    told_cell = cells["cells"][[cell.shape for row in told.capacity.cells for cell in row].index(fitting[-1].shape)]
    template, shape = told_cell["command"]
    assert cells["commands"][template].replace(page.SHAPE, shape) == told.cell_commands[fitting[-1].shape]


# ---- the page


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def hostile(told: data.PlanData) -> data.PlanData:
    """All that can come from users, hostile."""
    job = told.estimate.job.model_copy(update={"model": HOSTILE})
    found = told.estimate.model_copy(update={"job": job, "assumptions": (HOSTILE,), "lossy": (HOSTILE,)})
    shape = told.capacity.cells[0][0].shape
    return dataclasses.replace(
        told,
        name=HOSTILE,
        verdict=HOSTILE,
        understood=HOSTILE,
        command=HOSTILE,
        estimate=found,
        words=HOSTILE,
        note=HOSTILE,
        title=HOSTILE,
        next_command=HOSTILE,
        after_command=HOSTILE,
        measure_note=(HOSTILE, HOSTILE),
        changes=((HOSTILE, HOSTILE),),
        ladder=(HOSTILE,) * len(told.ladder),
        moments=tuple(step_moments.StepMoment(HOSTILE, HOSTILE, 0.0, ((HOSTILE, 1),)) for _ in told.moments),
        cell_commands={shape: HOSTILE},
        cards=tuple(reach._replace(words=HOSTILE) for reach in told.cards),
        measured={shape: (HOSTILE,)},
        timeline=dataclasses.replace(told.timeline, parts=(HOSTILE,) * len(told.timeline.parts), peak_moment=HOSTILE),
        candidates=tuple(dataclasses.replace(way, words=HOSTILE) for way in told.candidates),
        probes=tuple(dataclasses.replace(probe, id=HOSTILE, reason=HOSTILE, gpu=HOSTILE) for probe in told.probes),
    )


def test_nothing_of_users_breaks_out_of_the_page(told: data.PlanData) -> None:
    bad = hostile(told)
    shown = page.render(page.Page(HOSTILE, (bad, bad), environment=(data.Fact(HOSTILE, HOSTILE),), command=HOSTILE))
    assert HOSTILE not in shown and "<img" not in shown and "onerror=alert" in shown
    read = _Tags()
    read.feed(shown)
    names = [tag for tag, _ in read.tags]
    assert "img" not in names and names.count("script") == 6
    assert not [(tag, attributes) for tag, attributes in read.tags if any(name.startswith("on") for name in attributes)]
    for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', shown, re.DOTALL):
        assert HOSTILE in json.dumps(json.loads(text)).encode().decode("unicode_escape").replace('\\"', '"')


def test_what_loses_nothing_is_drawn_over_what_does_at_the_same_place(told: data.PlanData) -> None:
    shown = page.render(page.Page("one", (told,)))
    drawn = ["lossy" in kind for kind in re.findall(r'<circle class="dot([^"]*)" cx', shown) if "ring" not in kind]
    assert True in drawn and False in drawn and drawn == sorted(drawn, reverse=True)


def test_the_page_loads_nothing_and_runs_only_its_own_script(told: data.PlanData) -> None:
    shown = page.render(page.Page("one", (told,), environment=data.environment("now"), command="vplan report"))
    assert len(shown.encode()) < 200_000
    assert not re.search(r"https?://|@import|url\((?!#)|\bsrc=|<link", shown)
    policy = re.search(r'Security-Policy" content="([^"]*)"', shown)
    assert policy and "default-src &#39;none&#39;" in policy[1]
    for kind in ("style", "script"):
        text = re.search(rf"<{kind}>(.*?)</{kind}>", shown, re.DOTALL)
        assert text
        digest = base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()
        assert f"{kind}-src &#39;sha256-{digest}&#39;" in policy[1].replace("&#43;", "+").replace("&#34;", '"')
    read = _Tags()
    read.feed(shown)
    assert not [tag for tag, attributes in read.tags if "style" in attributes]
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = " ".join(
        str(attributes["aria-labelledby"]) for _, attributes in read.tags if "aria-labelledby" in attributes
    )
    assert set(named.split()) <= set(ids)
    for words in (told.verdict, "How to read this page", "What other cards take", "Speed against memory"):
        assert words in shown


def test_the_answers_of_several_plans_are_told_apart(told: data.PlanData) -> None:
    read = _Tags()
    read.feed(page.render(page.Page("two", tuple(dataclasses.replace(told, name=name) for name in ("a", "b")))))
    answers = [attributes["aria-label"] for tag, attributes in read.tags if "hero" in (attributes.get("class") or "")]
    assert answers == ["The answer of a", "The answer of b"]


def test_a_page_of_accuracy_alone(tmp_path: Path) -> None:
    line = {
        "id": HOSTILE,
        "job": {"model": "unheard-of", "frames": 1, "height": 64, "width": 64},
        "machine": {"gpu": "rtx4090"},
        "measured": {"outcome": "measured", "counter": "device", "low_gib": 1.0, "high_gib": 1.0},
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(line) + "\n")
    found = compare(read_rows(rows)[0], lambda *_: pytest.fail(), lambda *_: 0)
    out = tmp_path / "page.html"
    reports.write(out, compared=found, created="now")
    assert "<img" not in out.read_text() and "unheard-of" in out.read_text()
    assert list(tmp_path.glob(".*")) == []


def test_no_page_is_written_over_a_plan(tmp_path: Path, plan: Plan) -> None:
    with pytest.raises(VplanError, match=r"no \.html file"):
        reports.write(tmp_path / "plan.toml", [("plan", plan)])
    with pytest.raises(VplanError, match="cannot write report"):
        page.write("", tmp_path / "missing" / "page.html")


def test_the_map_of_a_plan_that_samples_decodes_each_clip() -> None:
    job = job_for(MODEL, {"model": MODEL.name, "method": "sample"})
    machine = Machine(gpu="24GB", host_ram=64 * GIB)
    configuration = Configuration.of(job, Strategy(), machine)
    whole = estimate(configuration, load_facts(configuration))
    builder = data.Builder("plan.toml", Plan.of(whole))
    capacity = builder.map(ladder(builder.search, job, builder.quick_estimates())).capacity
    column = [row[-1] for row in capacity.cells]
    ways = [capacity.ladder[cell.rung].strategy for cell in column if cell.rung is not None]
    assert len(set(ways)) > 1
    decoded = []
    for cell, way in zip(column, ways, strict=True):
        found = estimate(
            Configuration.of(shaped(job, cell), way, machine), load_facts(Configuration.of(job, way, machine))
        )
        assert found.verdict == cell.verdict
        assert cell.device_bytes == pytest.approx(found.peak.device_bytes, rel=0.15)
        assert found.peak.phase in ("encode", "decode") or way.vae_tiling
        decoded += [found.peak.device_bytes] if found.peak.phase == "decode" else []
    assert max(decoded) > 1.5 * whole.peak.device_bytes


def test_of_the_templates_those_that_the_page_refers_to_are_prepared() -> None:
    page._environment.cache_clear()
    page.prepare()
    compiled = {name for _, name in page._environment().cache}
    assert {"page.html", "base.html", "plan.html", "plan_charts.html", "accuracy.html", "style.css"} <= compiled
    assert not {"run.html", "run_charts.html", "rehearsal.html"} & compiled
