"""`vplan calibrate` and `--gpu auto`: what is measured of the card that is here, kept, applied and shared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.catalog import card_lookup
from planner.catalog.plan_id import row_id
from planner.commands import cli
from planner.errors import VplanError
from planner.estimate.roofline import COPY_EFFICIENCY, attention_efficiency, efficiency
from planner.estimate.work import Attention
from planner.evidence import calibration
from planner.evidence.calibration import Calibration, Rates, calibrated
from planner.evidence.ledger import Ledger, default_path
from planner.evidence.measurement import ProbeRow
from planner.probe.grid import plans
from planner.probe.probe import measure_device
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Environment, Measured, Plan, write_plan
from planner.units import GIB, MIB
from tests.planner.drivers import RTX_4090, Computer

NAME = "NVIDIA GeForce RTX 4090"
RATES = Rates(
    matmul_flops_per_second=150e12, attention_forward_flops_per_second=110e12,
    attention_backward_flops_per_second=90e12, copy_bytes_per_second=900e9, to_device_bytes_per_second=24e9,
    to_host_bytes_per_second=25e9,
)  # fmt: skip
FOUND = Calibration(
    gpu=NAME, driver="580.1", torch="2.13.0", diffusers="0.42.1", time="2026-11-21T12:00:00+00:00",
    total_bytes=round(23.6 * GIB), context_bytes=400 * MIB, kernels={"matmul": 50 * MIB, "norm": 0},
    workspaces={"matmul": 8 * MIB}, rates=RATES, launch_seconds=25e-6,
)  # fmt: skip
JOB = Job(model="wan2.1-t2v-1.3b", frames=17, height=480, width=832)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def on_a_4090(computer: Computer) -> Computer:
    """A computer with one card, of which a desktop holds 1 GiB, and torch 2.13.0."""
    computer.has_cards({**RTX_4090, "v2": {**RTX_4090["v2"], "used": GIB}})
    computer.has_packages(torch="2.13.0", diffusers="0.42.1")
    computer.has_ram(total=64 * GIB, available=40 * GIB)
    return computer


def asked(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli, ["estimate", "wan2.1-t2v-1.3b", *words, "--json"])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.usefixtures("on_a_4090")
def test_the_card_that_is_here_is_planned_for_as_it_is_now() -> None:
    found = asked("--gpu", "auto")
    listed = card_lookup.gpu("rtx4090")
    assert found["machine"]["gpu"] == "rtx4090"
    assert found["machine"]["host_ram"] == 40 * GIB
    assert found["budget_bytes"] == listed.allocatable_bytes - GIB - round(0.3 * GIB)
    assert asked("--gpu", "auto", "--reserve", "2GiB")["budget_bytes"] == listed.allocatable_bytes - 3 * GIB
    assert any("in use by other processes" in words for words in found["assumptions"])


@pytest.mark.usefixtures("on_a_4090")
def test_the_card_that_is_here_is_the_default() -> None:
    assert asked() == asked("--gpu", "auto")
    suggest = ["suggest", "sdxl", "--gradient-checkpointing", "full", "--json"]
    assert json.loads(CliRunner().invoke(cli, suggest).stdout)["plan"]["machine"]["gpu"] == "rtx4090"
    classes = json.loads(CliRunner().invoke(cli, [*suggest, "--gpu", "all"]).stdout)["classes"]
    assert [row["gpu"] for row in classes] == [group.name for group in card_lookup.gpu_classes()]


def test_the_torch_that_is_here_is_planned_for(on_a_4090: Computer) -> None:
    plain = ("--gpu", "auto", "--gradient-checkpointing", "none", "--frames", "17")
    peaks = {}
    for torch in ("2.13.0", "2.11.0+cu130"):
        on_a_4090.has_packages(torch=torch)
        found = asked(*plain)
        assert found["machine"]["torch"] == torch[:4]
        assert f"torch {torch[:4]} (installed)" in found["assumptions"]
        peaks[torch] = found["phases"]["train"]["allocated_bytes"]
        assert asked(*plain, "--torch", "2.12")["phases"]["train"]["allocated_bytes"] == peaks["2.13.0"]
    assert peaks["2.11.0+cu130"] < 0.95 * peaks["2.13.0"]


def test_the_torch_of_a_plan_is_that_of_its_own_computer(on_a_4090: Computer, tmp_path: Path) -> None:
    on_a_4090.has_packages(torch="2.11.0")
    plan = tmp_path / "plan.toml"
    machine = Machine(gpu="24GB", torch="2.13")
    write_plan(Plan(job=JOB, strategy=Strategy(), machine=machine), plan)

    def torch(*words: str) -> str | None:
        answer = json.loads(CliRunner().invoke(cli, ["estimate", str(plan), *words, "--json"]).stdout)
        found: str | None = answer["machine"]["torch"]
        return found

    assert torch() == "2.13"
    assert torch("--gpu", "auto") == "2.11"
    assert torch("--gpu", "48GB") is None
    assert torch("--gpu", "48GB", "--torch", "2.12") == "2.12"


def test_a_card_nobody_knows_is_its_memory(on_a_4090: Computer) -> None:
    on_a_4090.has_cards({**RTX_4090, "Name": "NVIDIA Something"})
    assert asked("--gpu", "auto")["machine"]["gpu"] == "23.5GiB"


def test_without_nvml_auto_says_what_to_type() -> None:
    error = asked("--gpu", "auto")["error"]
    assert "--gpu auto found no card" in error["message"]
    assert error["fix"] == "pass one: --gpu 24GB"


def test_what_was_calibrated_takes_the_place_of_what_is_listed(on_a_4090: Computer) -> None:
    before = asked("--gpu", "auto")
    calibration.write(FOUND)
    after = asked("--gpu", "auto")
    assert after["breakdown"]["context"] == 450 * MIB != before["breakdown"]["context"]
    assert after["budget_bytes"] == round(23.6 * GIB) - GIB - round(0.3 * GIB)
    assert after["step_seconds"] != before["step_seconds"]
    assert any("as calibrated 2026-11-21" in words for words in after["assumptions"])
    assert asked("--gpu", "rtx4090")["breakdown"]["context"] == before["breakdown"]["context"]
    on_a_4090.has_packages(torch="2.14.0")  # another torch: measure again
    assert asked("--gpu", "auto")["breakdown"]["context"] == before["breakdown"]["context"]


def test_kernels_run_at_the_rates_that_were_measured() -> None:
    card = calibrated(card_lookup.gpu("rtx4090"), FOUND)
    assert card.bf16_tflops * efficiency(card, "matmul") == pytest.approx(150)
    sampled = JOB.replace(method="sample")
    reached = attention_efficiency(card, Strategy(autocast="bf16"), sampled, Attention())
    assert card.bf16_tflops * reached[1] == pytest.approx(110)
    assert COPY_EFFICIENCY * card.bandwidth_gbs == pytest.approx(900)
    assert card.link_gbs == 24


def test_what_nvml_did_not_tell_stays_as_listed() -> None:
    card = card_lookup.gpu("rtx4090")
    silent = FOUND.replace(context_bytes=None, total_bytes=None)
    assert calibrated(card, silent).context_bytes == card.context_bytes
    assert calibrated(card, FOUND.replace(kernels={"matmul": None})).context_bytes == card.context_bytes
    assert calibrated(card, silent).allocatable_bytes == card.allocatable_bytes


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2}', "[" * 100_000])
@pytest.mark.usefixtures("on_a_4090")
def test_a_damaged_calibration_is_named(text: str) -> None:
    path = calibration.write(FOUND)
    assert calibration.read(NAME, "580.1", "2.13.0") == FOUND
    assert calibration.read(NAME, "580.1", "2.13.1") is None
    path.write_text(text)
    with pytest.raises(VplanError, match=path.name):
        calibration.read(NAME, "580.1", "2.13.0")
    assert asked("--gpu", "auto")["basis"] == "recorded"  # what is listed will do


# ---- the grid, and the command


def test_the_grid_is_what_may_run() -> None:
    grid = {name: list(plans("wan2.1-t2v-1.3b", card_lookup.gpu(name))) for name in ("8GB", "80GB")}
    assert {(plan.job.frames, plan.strategy.gradient_checkpointing) for plan in grid["80GB"]} == {
        (frames, mode) for frames in (1, 17, 49) for mode in ("full", "none")
    }
    assert 0 < len(grid["8GB"]) < 6
    assert [plan.job.frames for plan in plans("flux.1-dev", card_lookup.gpu("80GB"))] == [1, 1]


PEAKS = {"allocated_bytes": 5 * GIB, "reserved_bytes": 5 * GIB, "device_bytes": 6 * GIB, "retries": 0}
PROBED = {
    "outcome": "ok", "gpu": NAME, "driver": "580.1", "attention_kernel": "flash", "step_seconds": [1.0, 1.0],
    "phases": dict.fromkeys(("load", "first_step", "step"), PEAKS),
}  # fmt: skip


def row(**details: Any) -> ProbeRow:
    plan = Plan(job=JOB, strategy=Strategy(gradient_checkpointing="full"), machine=Machine(gpu="rtx4090"))
    env = Environment(
        gpu=NAME, driver="580.1", torch="2.13.0", diffusers="0.42.1", attention_kernel="flash",
        command="vplan probe /home/me/secret.toml", time="now",
    )  # fmt: skip
    measured = Measured(
        outcome="ok", phase="train", allocated_bytes=5 * GIB, reserved_bytes=5 * GIB, device_bytes=6 * GIB
    )
    told = {"phases": {"load": {}, "first_step": {}, "step": {}}, "log": "/home/me/log.txt", **details}
    return ProbeRow(
        id=row_id(plan), job=plan.job, strategy=plan.strategy, machine=plan.machine, measured=measured, env=env,
        details=told,
    )  # fmt: skip


@pytest.mark.usefixtures("on_a_4090")
def test_the_command_keeps_shows_and_shares(worker: Callable[[str], None], tmp_path: Path) -> None:
    """Its processes are real, and tell what a card would."""
    told = {"calibrate": {"outcome": "ok", **FOUND.to_json()}, "probe": PROBED}
    worker(f"tell(**{told}[sys.argv[-2]])")
    ledger = Ledger(default_path())
    ledger.append(row(config={"num_layers": 2}))  # of a model that was shrunk: nobody else's business
    ledger.append(row().replace(env=row().env.replace(driver="560.0")))
    done = CliRunner().invoke(cli, ["calibrate", "--share", str(tmp_path / "shared.jsonl"), "--json"])
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["calibration"]["context_bytes"]) == (0, 400 * MIB)
    kept = Calibration.read(json.loads(Path(answer["path"]).read_text()))
    assert kept.replace(time=FOUND.time) == FOUND
    probed = len(list(plans("wan2.1-t2v-1.3b", card_lookup.gpu("rtx4090"))))
    assert len(ledger.rows()) == 2 + probed == 2 + len(answer["probes"]) == 2 + answer["shared"]
    assert answer["corrections"]["wan2.1-t2v-1.3b"][0].startswith(f"corrected by {probed + 1} measurements")
    text = (tmp_path / "shared.jsonl").read_text()
    assert "/home/me" not in text
    assert json.loads(text.splitlines()[0])["details"]["calibration"]["outside_bytes"] == 450 * MIB
    done = CliRunner().invoke(cli, ["calibrate", "--no-probes"])
    assert "matmul in bf16" in done.stdout and "150 TFLOP/s" in done.stdout and "450 MiB" in done.stdout
    assert re.search(r"CPU time of an operator +25 us +32 us", done.stdout)


def test_without_a_gpu_it_says_what_it_needs_and_what_works() -> None:
    done = CliRunner().invoke(cli, ["calibrate"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: calibrate needs a GPU; NVML reports: ")
    assert "vplan estimate" in done.stderr and "--device cpu" in done.stderr


def test_a_worker_that_dies_is_exit_4_with_its_last_words(worker: Callable[[str], None]) -> None:
    worker("raise ImportError('libcudnn is gone')")
    with pytest.raises(VplanError, match="calibrating failed: exit code 1: ImportError: libcudnn is gone") as failure:
        measure_device("cuda")
    assert failure.value.exit_code == 4
    worker("time.sleep(60)")
    with pytest.raises(VplanError, match="stopped at its time limit"):
        measure_device("cuda", time_limit=0.5)


# ---- accuracy, before and after


@pytest.mark.usefixtures("on_a_4090")
def test_accuracy_shows_what_learning_changes() -> None:
    """Three lengths that all take 4 % more than recordings say, in a file and in the user's own ledger. No row of the
    model is bundled."""
    from planner.estimate.estimate import estimate
    from planner.layout.recordings import load_facts

    ledger = Ledger(default_path())
    for frames in (17, 33, 49):
        job = JOB.replace(model="wan2.1-i2v-14b-480p", frames=frames)
        plan = Plan(job=job, strategy=Strategy(gradient_checkpointing="none"), machine=Machine(gpu="rtx4090"))
        configuration = Configuration.of(job, plan.strategy, plan.machine)
        found = estimate(configuration, load_facts(configuration))
        peak, context = found.phases["train"], found.breakdown.context
        measured = Measured(
            outcome="ok", phase="train", allocated_bytes=round(1.04 * peak.allocated_bytes),
            reserved_bytes=round(1.04 * peak.reserved_bytes), device_bytes=round(1.04 * peak.reserved_bytes) + context,
        )  # fmt: skip
        ledger.append(row().replace(id=row_id(plan), job=job, strategy=plan.strategy, measured=measured))
    ledger.append(row(config={"num_layers": 2}))
    for words in (["--only", "wan2.1-i2v-14b-480p-lora"], [str(ledger.path)]):
        done = CliRunner().invoke(cli, ["accuracy", *words, "--json"])
        listed = json.loads(done.stdout)
        learnt = listed["learned"]
        before, after = (learnt[side]["reserved"] for side in ("before", "after"))
        assert (before["n"], after["n"]) == (3, 3)
        assert before["mean_abs_pct"] == pytest.approx(100 * 0.04 / 1.04, abs=0.01)
        assert after["mean_abs_pct"] < 0.1
        widths = [learnt[side]["coverage"]["median_width_pct"] for side in ("before", "after")]
        assert widths[1] < widths[0]
    done = CliRunner().invoke(cli, ["accuracy", str(ledger.path)])
    assert "learned from the others" in done.stdout and "our own trainer, estimates from recordings" in done.stdout
    assert "was calibrated" in CliRunner().invoke(cli, ["accuracy", str(ledger.path), "--calibrated"]).stderr
    calibration.write(FOUND)  # less context than is listed
    known = json.loads(CliRunner().invoke(cli, ["accuracy", str(ledger.path), "--calibrated", "--json"]).stdout)
    assert known["summary"]["device"]["mean_abs_pct"] > listed["summary"]["device"]["mean_abs_pct"]
    assert known["summary"]["reserved"] == listed["summary"]["reserved"]
    done = CliRunner().invoke(cli, ["accuracy", "--only", "cvxf-001", "--json"])
    assert json.loads(done.stdout)["learned"]["before"]["reserved"]["n"] == 0


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("wan2.1-t2v-1.3b", {1, 17, 49}), ("framepack", {33}), ("latentsync-1.6-stage1", {1, 16})],
)
def test_clips_that_are_measured_are_as_long_as_the_model_takes(name: str, lengths: set[int]) -> None:
    """FramePack takes 33 frames or more, LatentSync 16 or fewer."""
    assert {plan.job.frames for plan in plans(name, card_lookup.gpu("h200"))} == lengths
