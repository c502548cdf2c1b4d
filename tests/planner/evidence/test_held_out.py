"""Both halves of a grid's rows: which is which, what their errors amount to, and that nothing is learned from one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from planner.catalog import card_lookup
from planner.evidence.accuracy import Prediction, compare
from planner.evidence.from_ledger import measurements_of
from planner.evidence.held_out import halves, seconds_error_pct, spearman
from planner.evidence.measurement import ProbeRow, in_held_out_half
from planner.evidence.published import read_rows
from planner.spec.configuration import Configuration
from planner.spec.plan import PhasePeak, Verdict
from planner.units import GIB
from tests.planner.drivers import RTX_4090, Computer

JOB = {"model": "sd1.5", "frames": 1, "height": 512, "width": 512}
ENV = dict.fromkeys(("driver", "diffusers", "attention_kernel", "command", "time"), "x")
ENV |= {"gpu": "NVIDIA GeForce RTX 4090", "torch": "2.13.0"}
HELD, OTHER = ([f"row-{n}" for n in range(60) if in_held_out_half(f"row-{n}") is half] for half in (True, False))


def row(name: str, *, outcome: str = "ok", seconds: float | None = 2.0, **changes: Any) -> dict[str, Any]:
    """10 GiB on all counters."""
    counters = dict.fromkeys(("allocated_bytes", "reserved_bytes", "device_bytes"), 10 * GIB)
    return {
        "id": name,
        "job": JOB,
        "strategy": {"gradient_checkpointing": "full"},
        "machine": {"gpu": "rtx4090", "host_ram": 64 * GIB},
        "measured": {"outcome": outcome, "phase": "train", **counters, "step_seconds": seconds},
        "env": ENV,
        "grid": "one-gpu",
        "details": {"phases": {"load": {}, "first_step": {}, "step": {}}},
        **changes,
    }


def told(folder: Path, rows: list[dict[str, Any]], *predicted: float, verdict: Verdict = "fits") -> Any:
    """Rows beside predicted GiB, and as many seconds, one for each row."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    sizes = itertools.cycle(predicted)

    def predict(configuration: Configuration, trainer: str) -> Prediction:
        size = next(sizes)
        peaks = (round(size * GIB),) * 3
        return Prediction(
            allocated_bytes=peaks[0], reserved_bytes=peaks[1], device_bytes=peaks[2], verdict=verdict, basis="recorded",
            step_seconds=size,
        )  # fmt: skip

    return compare(read_rows(path)[0], predict, lambda *_: 0)


def test_each_half_has_its_own_numbers(tmp_path: Path) -> None:
    classic = {"strategy": {"expandable_segments": False}}
    rows = [row(HELD[0]), row(HELD[1], **classic), row(OTHER[0]), row(OTHER[1], grid=None), row(HELD[2], grid=None)]
    found = halves(told(tmp_path, rows, 11.0, 12.0, 9.0, 10.0, 10.0))
    assert set(found) == {"measured"}
    held, other = found["measured"]["held_out"], found["measured"]["other"]
    assert (held["rows"], other["rows"], found["measured"]["all"]["rows"]) == (2, 3, 5)
    assert held["device"]["mean_abs_pct"] == pytest.approx(15) and held["device"]["max_abs_pct"] == pytest.approx(20)
    assert held["reserved_expandable"]["n"] == 1 and held["reserved"]["n"] == 2
    assert other["allocated"]["mean_abs_pct"] == pytest.approx(10 / 3)
    assert held["step_seconds"]["mean_pct"] == pytest.approx(475)  # 11 and 12 s said, 2 s taken


def test_verdicts_against_outcomes(tmp_path: Path) -> None:
    rows = [row(HELD[0], outcome="oom", seconds=None), row(HELD[1]), row(OTHER[0], outcome="host-oom", seconds=None)]
    found = halves(told(tmp_path, rows, 10.0))["measured"]
    assert found["held_out"]["verdict"] == {"n": 2, "fits": 2, "tight": 0, "no": 0, "under": 1, "false_refusal": 0}
    assert found["other"]["verdict"]["under"] == 1
    refused = halves(told(tmp_path, rows, 10.0, verdict="no"))["measured"]["held_out"]["verdict"]
    assert (refused["under"], refused["false_refusal"]) == (0, 1)
    assert found["held_out"]["device"]["n"] == found["held_out"]["step_seconds"]["n"] == 1  # what ran out has no peak


def test_the_order_of_speed_is_judged_job_by_job(tmp_path: Path) -> None:
    ways = [row(name, seconds=seconds) for name, seconds in zip(HELD, (1.0, 2.0, 3.0, 4.0), strict=False)]
    others = [row(name, seconds=1.0, job={**JOB, "batch_size": 2}) for name in HELD[4:6]]  # two say nothing
    found = halves(told(tmp_path, [*ways, *others], 1.0, 2.0, 4.0, 3.0, 1.0, 2.0))["measured"]["held_out"]["order"]
    assert found == {"jobs": 1, "mean_spearman": pytest.approx(0.8), "min_spearman": pytest.approx(0.8)}
    assert seconds_error_pct(told(tmp_path, [row(HELD[0])], 1.5)[0]) == pytest.approx(-25)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 1), (2, 2), (2, 3), (4, 4)], 0.9486832980505138),  # as scipy.stats.spearmanr
        ([(1, 1), (2, 2)], None),
        ([(1, 5), (2, 5), (3, 5)], None),
    ],
)
def test_rank_correlation(pairs: list[tuple[float, float]], expected: float | None) -> None:
    assert spearman(pairs) == (None if expected is None else pytest.approx(expected))


def test_simulated_and_shrunk_rows_claim_nothing(tmp_path: Path) -> None:
    rows = [row(HELD[0], runner="simulate"), row(HELD[1], env={**ENV, "gpu": "cpu"})]
    rows.append(row(OTHER[0], details={"config": {"layers_per_block": 1}}))
    compared = told(tmp_path, rows, 10.0)
    assert set(halves(compared)) == {"simulated"} and halves(compared)["simulated"]["all"]["rows"] == 1
    assert (
        sum("says nothing about a GPU" in (entry.unsupported or "") for entry in compared if entry.judges is False) == 6
    )


def test_a_probe_that_encodes_nothing_is_not_refused_for_it(tmp_path: Path) -> None:
    def predict(configuration: Configuration, trainer: str) -> Prediction:
        small, large = (PhasePeak(**dict.fromkeys(PhasePeak.model_fields, size * GIB)) for size in (10, 30))
        return Prediction(
            allocated_bytes=30 * GIB, reserved_bytes=30 * GIB, device_bytes=30 * GIB, verdict="no", basis="recorded",
            budget_bytes=20 * GIB, phases={"encode": large, "train": small},
        )  # fmt: skip

    path = tmp_path / "rows.jsonl"
    for phases, verdict, device in (("load", "fits", 10.0), ("encode", "no", 30.0)):
        path.write_text(json.dumps(row(HELD[0], details={"phases": {"step": {}, phases: {}}})) + "\n")
        (*_, found) = compare(read_rows(path)[0], predict, lambda *_: 0)
        assert (found.verdict, found.predicted_gib) == (verdict, device)


def test_nothing_is_learned_from_the_half_that_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computer: Computer
) -> None:
    monkeypatch.setenv("VPLAN_HOME", str(tmp_path))
    computer.has_cards(RTX_4090, driver="x")
    computer.has_packages(torch="2.13.0", diffusers="x")

    def runs(*names: str, grid: str | None = "one-gpu") -> int:
        known = [ProbeRow.read(row(name, grid=grid)) for name in names]
        found = measurements_of("sd1.5", card_lookup.gpu("rtx4090"), probes=known)
        assert set(found.proofs) == set(names)  # what became of the very plan may be told
        return found.correction.runs

    assert runs(*HELD[:3]) == 0
    assert runs(*HELD[:3], OTHER[0]) == 1
    assert runs(*HELD[:3], grid=None) == 3  # the user's own probes
