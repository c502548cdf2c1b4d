"""The shipped grid, the order in which it is measured, and a campaign on a machine that is not there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import profiles
from planner.catalog import card_lookup, lookup
from planner.catalog.plan_id import row_id
from planner.catalog.shapes import grid
from planner.commands import cli
from planner.commands._shared.grid_campaign import Campaign, GridOptions, Where
from planner.errors import VplanError
from planner.estimate.estimate import estimate
from planner.estimate.roofline import step_seconds
from planner.estimate.traffic import traffic
from planner.estimate.work import step_work
from planner.evidence.ledger import Ledger
from planner.evidence.measurement import ProbeRow, held_out, in_held_out_half
from planner.garbage_collection import without_garbage_collection
from planner.launch.supported import supported_plan
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.probe import grid_file
from planner.probe.grid_file import GridEntry, read_grid
from planner.probe.grid_schedule import START_SECONDS, Candidate, candidate, measuring_order
from planner.probe.probe import RealRunner
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.units import GIB, MIB

MACHINE = Machine(gpu="h100-80gb")
SHIPPED = read_grid(profiles.GRIDS / "one-gpu.toml")
ALL_MODELS = read_grid(profiles.GRIDS / "all-models.toml")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))


# ---- the shipped grid


@pytest.fixture(scope="module")
def priced() -> list[Candidate]:
    """Every plan, completed and laid out from its tapes: all of an estimate but the replay of its allocator."""
    with without_garbage_collection():
        return [_priced(entry) for entry in SHIPPED]


def _priced(entry: GridEntry) -> Candidate:
    plan = supported_plan(Plan(job=entry.job, strategy=entry.strategy, machine=MACHINE))
    configuration = Configuration.of(plan.job, plan.strategy, MACHINE)
    known = load_facts(configuration)
    run = lay_out(configuration, known, grid(known.model, plan.job, plan.job.shapes[-1]))
    step = step_seconds(configuration, step_work(run), known.gpu, traffic(run))
    seconds = START_SECONDS * (2 if entry.encode else 1) + 8 * (step.total + step.high) / 2
    return Candidate(entry=entry, plan=plan, name=f"{row_id(plan)} {entry.cap}", seconds=seconds)


def test_every_plan_of_the_shipped_grid_has_its_tapes(priced: list[Candidate]) -> None:
    assert len({each.name for each in priced}) == len(priced) >= 60
    families = {lookup.model(entry.job.model).family for entry in SHIPPED}
    assert families >= {"wan", "cogvideox", "ltx", "hunyuan-video", "flux", "sd3", "unet", "qwen-image"}
    assert {entry.job.model for entry in SHIPPED} >= {
        "wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "cogvideox-2b", "cogvideox-5b", "ltx-video-2b", "hunyuan-video",
        "flux.1-dev", "sd3.5-medium", "sdxl", "qwen-image",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("gradient_checkpointing", {"none", "partial", "full", "offload"}),
        ("optimizer", {"adamw", "adamw-8bit", "adafactor"}),
        ("optimizer_step", {"foreach", "fused", "loop", "backward"}),
        ("expandable_segments", {True, False}),
        ("swap_blocks", {0, 20}),
        ("sharding", {"none", "zero-1", "zero-2", "zero-3", "fsdp"}),
        ("offload_optimizer", {"none", "cpu"}),
        ("validation_mode", {"off", "on", "offload"}),
        ("vae_tiling", {True, False}),
        ("weights_dtype", {None, "bf16", "fp8", "nf4"}),
    ],
)
def test_the_shipped_grid_has_every_technique(field: str, values: set[object]) -> None:
    assert values <= {getattr(entry.strategy, field) for entry in SHIPPED}


def test_the_shipped_grid_has_shapes_and_caps() -> None:
    assert {entry.job.method for entry in SHIPPED} == {"lora", "full"}
    assert {entry.job.batch_size for entry in SHIPPED} >= {1, 2, 3, 4}
    assert {entry.job.frames for entry in SHIPPED} >= {1, 17, 49, 81}
    caps = [entry.cap for entry in SHIPPED]
    assert caps.count("under") == caps.count("over") == 5
    assert len({lookup.model(entry.job.model).family for entry in SHIPPED if entry.encode}) >= 8
    ways: dict[Job, int] = {}
    for entry in SHIPPED:
        ways[entry.job] = ways.get(entry.job, 0) + (entry.cap is None)
    assert sum(count >= 3 for count in ways.values()) >= 8  # jobs whose order of speed can be judged


def test_ten_minutes_cover_the_families_and_half_an_hour_25_plans(priced: list[Candidate]) -> None:
    ordered, ends, now = measuring_order(priced), [], 0.0
    for each in ordered:
        now += each.seconds
        ends.append(now)
    assert sorted(each.name for each in ordered) == sorted(each.name for each in priced)
    early = {lookup.model(each.entry.job.model).family for each, end in zip(ordered, ends, strict=True) if end < 600}
    assert len(early) >= len({lookup.model(entry.job.model).family for entry in SHIPPED}) - 1
    assert sum(end < 1800 for end in ends) >= 25
    assert ordered[-1].seconds == max(each.seconds for each in priced)  # the long Wan 14B
    again = measuring_order(priced[1:], [priced[0].entry])  # what was measured already tells little more
    assert again[0].entry.job.model != priced[0].entry.job.model


def test_caps_are_where_the_verdict_changes() -> None:
    capped = {entry.cap: entry for entry in SHIPPED if entry.cap and entry.job.model == "ltx-video-2b"}
    verdicts = {}
    for cap, entry in capped.items():
        found = candidate(entry, MACHINE)
        assert found.skip is None and found.plan.machine.reserve > 30 * GIB
        configuration = Configuration.of(entry.job, found.plan.strategy, found.plan.machine)
        verdicts[cap] = estimate(configuration, load_facts(configuration)).verdict
    assert verdicts == {"under": "no", "over": "fits"}
    small = candidate(capped["over"], Machine(gpu="24GB"))
    assert small.skip and "does not cap a card of" in small.skip


def test_what_cannot_run_says_why() -> None:
    job = Job(model="sd1.5", frames=1, height=512, width=512)
    whole = GridEntry(job=job, strategy=Strategy(gradient_checkpointing="none"))
    assert candidate(whole, MACHINE).skip is None
    assert "GiB of host RAM" in (candidate(whole, MACHINE, GIB).skip or "")
    assert "and the card gives 2.0" in (candidate(whole, Machine(gpu="2GiB")).skip or "")
    assert "on the CPU" in (candidate(whole, MACHINE, on_cpu=True).skip or "")
    assert "text_encoder resident" in (
        candidate(GridEntry(job=job, strategy=Strategy(text_encoder="resident")), MACHINE).skip or ""
    )
    tiny = {"config": {"layers_per_block": 1}}
    assert candidate(GridEntry(job=job, strategy=Strategy(), **tiny), MACHINE, on_cpu=True).seconds == START_SECONDS
    assert "nothing can be capped" in (
        candidate(GridEntry(job=job, strategy=Strategy(), cap="under", **tiny), MACHINE).skip or ""
    )


# ---- a file


SD = "schema = 1\n[[jobs]]\nmodel = 'sd1.5'\nframes = 1\nheight = 64\nwidth = 64\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "schema 1"),
        ("schema = 1", "has 0 plans"),
        ("schema = 1\nplans = []", "a grid has no 'plans'"),
        ("schema = 1\njobs = 3", "job 1 is not a table"),
        ("schema = ", "not TOML"),
        ("schema = 1\n[[jobs]]\nmodel = 'sd1.5'", "frames is missing"),
        (SD, "has no list of plans"),
        (SD + "plans = [{swap = 1}]", "no field 'swap'"),
        (SD + "plans = [{cap = 'a'}]", "cap 'a' is not known"),
        (SD + "plans = [{}]\nconfig = 3", "config 3 is wrong"),
    ],
)
def test_a_fault_in_a_grid_is_one_line(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(VplanError, match=r"grid\.toml") as failure:
        read_grid(path)
    assert fault in failure.value.message and failure.value.fix


def test_every_model_is_in_the_grid_of_all_and_techniques_meet_many() -> None:
    in_grid = {entry.job.model for entry in ALL_MODELS}
    assert set(profiles.model_names()) == in_grid
    assert len(ALL_MODELS) >= 400 and len({entry.title for entry in ALL_MODELS}) == len(ALL_MODELS)
    shares = [entry.cap_share for entry in ALL_MODELS if entry.cap_share is not None]
    assert len(shares) >= 60 and all(0.97 <= share <= 1.03 for share in shares)
    assert min(shares) < 1 < max(shares)
    for technique in ("fp8", "nf4", "int8"):
        assert len({entry.job.model for entry in ALL_MODELS if entry.strategy.weights_dtype == technique}) >= 5
    sharded = {(entry.strategy.sharding, entry.gpus) for entry in ALL_MODELS if entry.gpus > 1}
    assert {("zero-1", 2), ("zero-2", 4), ("zero-3", 4), ("fsdp", 2), ("fsdp", 4), ("ddp", 2)} <= sharded


def test_a_plan_gets_that_share_of_its_peak() -> None:
    entry = next(entry for entry in ALL_MODELS if entry.job.model == "sd1.5" and entry.cap_share)
    assert entry.cap_share is not None and "of its peak" in entry.title
    capped = candidate(entry, MACHINE)
    whole = candidate(entry.replace(cap_share=None), MACHINE)
    budget = card_lookup.gpu("h100-80gb").allocatable_bytes - capped.plan.machine.reserve
    peak = max(peak.device_bytes for peak in whole.phases.values())
    assert abs(budget - entry.cap_share * peak) <= MIB and capped.skip is None
    assert capped.name != whole.name


def test_a_plan_for_more_cards_than_there_are_is_left_out() -> None:
    entry = next(entry for entry in ALL_MODELS if entry.gpus == 2)
    assert candidate(entry, MACHINE).skip == "it is for 2 GPUs, and this machine has 1"
    two = candidate(entry, MACHINE.replace(gpus=2))
    assert two.skip is None and two.plan.machine.gpus == 2


def test_a_grid_that_is_not_there_or_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VplanError, match="cannot read the grid") as failure:
        read_grid(tmp_path / "none.toml")
    assert "one-gpu" in failure.value.fix
    monkeypatch.setattr(grid_file, "LARGEST_BYTES", 10)
    (tmp_path / "grid.toml").write_text("schema = 1\n" * 10)
    with pytest.raises(VplanError, match="it has more than"):
        read_grid(tmp_path / "grid.toml")


# ---- measuring it

TWO = """
schema = 1
[[jobs]]
model = "sd1.5"
frames = 1
height = 256
width = 256
plans = [{ gradient_checkpointing = "none" }, { gradient_checkpointing = "full" }, { text_encoder = "resident" }]
"""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    (tmp_path / "two.toml").write_text(TWO)
    yield str(tmp_path / "two.toml"), tmp_path / "rows.jsonl"


def measured(grid: str, rows: Path, *words: str) -> dict[str, Any]:
    line = ["calibrate", "--grid", grid, "-o", str(rows), "--runner", "simulate", "--gpu", "4090", "--json", *words]
    done = CliRunner().invoke(cli, line)
    answer: dict[str, Any] = json.loads(done.stdout)
    return {**answer, "code": done.exit_code, "talk": done.stderr}


def test_a_campaign_goes_on_where_it_stopped(files: tuple[str, Path]) -> None:
    grid, rows = files
    dry = measured(grid, rows, "--dry-run")
    assert (len(dry["left"]), dry["probes"], rows.exists()) == (2, [], False)
    first = measured(grid, rows)
    assert (first["code"], len(first["probes"]), first["known"], first["left"]) == (0, 2, 0, [])
    assert [entry["why"] for entry in first["refused"]] == [
        "text_encoder resident is not supported by vplan's training step yet, so it cannot be measured"
    ]
    assert "[1/2] sd1.5 lora 256x256: gradient-checkpointing none: about " in first["talk"]
    lines = rows.read_text().splitlines()
    rows.write_text(lines[0] + "\n" + lines[1][:200])  # as a kill in the middle of a write leaves it
    second = measured(grid, rows)
    assert (len(second["probes"]), second["known"]) == (1, 1)
    assert rows.read_text().splitlines()[0] == lines[0]
    found = Ledger(rows).rows()
    assert len(found) == 2 and all(row.grid == "two" and row.runner == "simulate" for row in found)
    assert all("wall_seconds" in row.details for row in found)
    assert measured(grid, rows)["known"] == 2
    assert not (rows.parent / "home" / "ledger.jsonl").exists()  # a simulated machine is nobody's

    told = json.loads(CliRunner().invoke(cli, ["accuracy", str(rows), "--json"]).stdout)
    assert set(told["halves"]) == {"simulated"} and told["halves"]["simulated"]["all"]["rows"] == 2
    shown = CliRunner().invoke(cli, ["accuracy", str(rows)]).stdout
    assert "its accuracy is not reported" in shown and "a simulated machine: a rehearsal" in shown


def test_time_crashes_and_words(files: tuple[str, Path]) -> None:
    grid, rows = files
    short = measured(grid, rows, "--max-minutes", "0.1")  # no plan is that quick
    assert (short["probes"], len(short["left"])) == ([], 2)
    measured(grid, rows)
    crashed = [json.loads(line) for line in rows.read_text().splitlines()]
    crashed[0]["measured"] = {"outcome": "crash"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in crashed))
    assert measured(grid, rows)["known"] == 2
    assert len(measured(grid, rows, "--retry")["probes"]) == 1
    for words, fault in (
        (["--grid", grid], "--grid needs an output file"),
        (["--grid", grid, "-o", "rows.jsonl", "sd1.5"], "MODEL cannot be used with --grid"),
        (["--grid", grid, "-o", "rows.jsonl", "--no-probes"], "--probes cannot be used with --grid"),
        (["--grid", "on-gpu", "-o", "rows.jsonl"], "or a bundled grid: all-models, every-model, fp8-checkpoints"),
        (["--grid", grid, "-o", "no/rows.jsonl"], "there is no folder"),
        (["--max-minutes", "3"], "--max-minutes needs --grid"),
        (["--grid", grid, "-o", "rows.jsonl", "--gpu", "4090"], "for simulated runs"),
    ):
        done = CliRunner().invoke(cli, ["calibrate", *words])
        assert done.exit_code in (1, 2) and fault in done.stderr
    twice = Path(grid).with_name("twice.toml")
    twice.write_text(TWO.replace("plans = [", 'plans = [{ gradient_checkpointing = "none" },'))
    assert "two plans of the grid are the same" in measured(str(twice), rows)["error"]["message"]


def test_halves_are_of_a_grid_s_rows_alone() -> None:
    names = [f"wan-lora-{number}" for number in range(400)]
    assert 150 < sum(map(in_held_out_half, names)) < 250
    assert in_held_out_half("wan-lora-0") is in_held_out_half("wan-lora-0")
    job = Job(model="sd1.5", frames=1, height=256, width=256)
    env = dict.fromkeys(("gpu", "driver", "torch", "diffusers", "attention_kernel", "command", "time"), "x")
    for name in names[:20]:
        said = {
            "id": name,
            "job": job,
            "strategy": Strategy(),
            "machine": MACHINE,
            "measured": {"outcome": "ok"},
            "env": env,
        }
        assert not held_out(ProbeRow.read(said))
        assert held_out(ProbeRow.read({**said, "grid": "one-gpu"})) == in_held_out_half(name)


def test_what_is_off_is_recorded(files: tuple[str, Path], worker: Callable[[str], None]) -> None:
    """Its processes are real, and tell of a first plan that takes 2 % more than is estimated."""
    grid, rows = files
    machine = Machine(gpu="rtx4090")
    peaks = {}
    for entry in read_grid(grid)[:2]:
        mode, share = entry.strategy.gradient_checkpointing, 1.02 if not peaks else 1.005
        expected = candidate(entry, machine).phases["train"].to_json()
        peaks[mode] = {**{name: round(share * nbytes) for name, nbytes in expected.items()}, "retries": 0}
    worker(
        "request = json.loads((folder / 'request.json').read_text())\n"
        f"peak = {peaks}[request['plan']['strategy']['gradient_checkpointing']]\n"
        "if request['history']: Path(request['history']).touch()\n"
        "tell(outcome='ok', gpu='NVIDIA GeForce RTX 4090', phases={'train': peak}, step_seconds=[1.0])"
    )
    options = GridOptions(
        grid=grid, output=str(rows), max_minutes=None, dry_run=False, retry=False, histories=str(rows.parent),
        time_limit=60,
    )  # fmt: skip
    campaign = Campaign(options, Where(RealRunner(), machine, None, "cuda"))
    campaign.plan()
    campaign.run()
    assert len(campaign.rows) == len(Ledger(rows).rows()) == 2
    (off,) = [row.id for row in campaign.rows if row.strategy.gradient_checkpointing == "none"]
    assert [path.name for path in rows.parent.glob("*.json")] == [f"{off}.json"]
    with pytest.raises(VplanError, match="there is no folder"):
        dataclasses.replace(options, histories=str(rows.parent / "none")).check()
