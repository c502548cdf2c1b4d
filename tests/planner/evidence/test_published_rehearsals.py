"""Rehearsals of published runs beside what was printed and what is predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.errors import VplanError
from planner.evidence import published_rehearsals
from planner.evidence.published import shipped_rows
from tests.tools.published_runs.cogvideox_factory import COGVIDEOX_FACTORY
from tests.tools.published_runs.diffsynth import DIFFSYNTH
from tests.tools.published_runs.finetrainers import FINETRAINERS
from tests.tools.published_runs.trainer import Folders


def test_every_rehearsed_number_is_of_a_published_row() -> None:
    rows = {row.id for row in shipped_rows()}
    peaks = published_rehearsals.rehearsed_peaks()
    assert len(peaks) >= 60 and set(peaks) <= rows


def test_a_number_is_rehearsed_or_it_is_said_why_not() -> None:
    rows = {row.id for row in shipped_rows()}
    left = [name for reason in published_rehearsals.reasons() for name in reason.rows]
    assert len(left) == len(set(left))
    assert not published_rehearsals.rehearsed_peaks().keys() & set(left)
    assert published_rehearsals.rehearsed_peaks().keys() | set(left) == rows


def test_every_rehearsal_says_how_it_was_made() -> None:
    for path in sorted(published_rehearsals.FOLDER.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            assert row["runner"] == "rehearse" and row["env"]["gpu"].startswith("virtual ")
            assert row["env"]["torch"] and len(row["trainer"]["commit"]) == 40 and row["command"]
            assert "/tmp" not in line and "/work" not in line


LOG = """===== Memory before training =====
memory_allocated=1.5 GB
max_memory_reserved=2.25 GB
Steps: 100%|###| 2/2===== Memory before validation =====
memory_allocated=3.0 GB
"""


def test_counters_are_those_behind_their_heading() -> None:
    assert COGVIDEOX_FACTORY.peaks(LOG) == {
        "before_training": {"memory_allocated": 1.5, "max_memory_reserved": 2.25},
        "before_validation": {"memory_allocated": 3.0},
    }


def test_a_row_becomes_its_trainers_own_command() -> None:
    rows = {row.id: row for row in shipped_rows()}
    folders = Folders(Path("source"), Path("python"), Path("data"), Path("output"))
    lora = COGVIDEOX_FACTORY.command(rows["cvxf-061"], folders)
    assert {"--use_8bit", "--gradient_checkpointing", "training/cogvideox_text_to_video_lora.py"} <= {*lora}
    assert lora[lora.index("--rank") + 1] == "256" and lora[lora.index("--train_batch_size") + 1] == "4"
    full = COGVIDEOX_FACTORY.command(rows["cvxt-2b-full-b1-cpu"], folders)
    assert {"--use_cpu_offload_optimizer", "training/cogvideox_text_to_video_sft.py"} <= {*full}
    sharded = COGVIDEOX_FACTORY.command(rows["cvxf-139"], folders)
    assert {"accelerate_configs/deepspeed.yaml", "0,1", "bf16"} <= {*sharded}
    assert "--use_cpu_offload_optimizer" not in sharded
    assert COGVIDEOX_FACTORY.commit(rows["cvxf-139"]).startswith("be9d99a")


def test_one_run_gives_the_rows_of_both_its_counters() -> None:
    rows = {row.id: row for row in shipped_rows()}
    folders = Folders(Path("source"), Path("python"), Path("data"), Path("output"))
    assert FINETRAINERS.published(rows["ft-003"]).keys() == {"ft-002", "ft-003"}
    log = 'Memory after epoch 1: {"memory_allocated": 14.146, "max_memory_allocated": 15.527}'
    peaks = FINETRAINERS.peaks(log)["after_epoch"]
    assert peaks == {"memory_allocated": 14.146, "max_memory_allocated": 15.527}
    assert "--precompute_conditions" in FINETRAINERS.command(rows["ft-015"], folders)
    assert "full-finetune" not in FINETRAINERS.command(rows["ft-003"], folders)
    wan = DIFFSYNTH.command(rows["ds-001"], folders)
    assert wan[wan.index("--lora_rank") + 1] == "16" and DIFFSYNTH.steps


def test_a_damaged_file_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.jsonl").write_text('{"id": "a", "rehearsed_gib": {"a": -1}}\n', encoding="utf-8")
    monkeypatch.setattr(published_rehearsals, "FOLDER", tmp_path)
    published_rehearsals.rehearsed_peaks.cache_clear()
    try:
        with pytest.raises(VplanError, match=r"some\.jsonl: a"):
            published_rehearsals.rehearsed_peaks()
    finally:
        published_rehearsals.rehearsed_peaks.cache_clear()
