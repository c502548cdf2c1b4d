"""planner/dialects/simpletuner: text encoders whose layers wait in host RAM, read, priced, advised, written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.estimate.estimate import estimate
from planner.foreign.case import Case, read_case
from planner.foreign.export import export, write_files
from planner.layout.recordings import load_facts
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve

CONFIG = {
    "model_family": "ltxvideo2",
    "model_type": "lora",
    "optimizer": "adamw_bf16",
    "train_batch_size": 2,
    "resolution": 480,
    "validation_num_video_frames": 17,
    "base_model_precision": "int8-quanto",
    "vae_enable_tiling": True,
    "data_backend_config": "x.json",
    "ramtorch": True,
}
"""simpletuner/examples/ltxvideo2-19b-t2v.peft-lora+16G at bc8e6ab."""

WAITS = {"ramtorch_text_encoder": True}


def case_of(folder: Path, changes: dict[str, Any]) -> Case:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    return read_case(*dialects.read_script(from_file(folder / "config.json")), {}, {"gpu": "24GB"})


def encoding(case: Case) -> tuple[int, int, int]:
    """(allocated, device) of encoding, and host RAM, bytes."""
    found = estimate(case.configuration, load_facts(case.configuration), case.trainer)
    return found.phases["encode"].allocated_bytes, found.peak.device_bytes, found.host_ram_bytes


def test_a_layer_of_gemma_comes_for_its_turn(tmp_path: Path) -> None:
    """documentation/quickstart/LTXVIDEO2.md has about 13 GB for 17 frames of 480 pixels, a batch of 2."""
    whole, turn = (encoding(case_of(tmp_path, changes)) for changes in ({}, WAITS))
    table, layer = 262208 * 3840, 3840 * (4 * 4096 + 3 * 15360 - 4096)
    assert whole[0] - turn[0] == pytest.approx(2 * (12187325040 - table - layer), rel=0.02)
    assert turn[1] == pytest.approx(13e9, rel=0.04)
    assert turn[2] > whole[2]


@pytest.mark.parametrize(
    ("changes", "version", "unpriced", "ineffective"),
    [
        (WAITS, "ramtorch-encoders", (), []),
        ({}, "ramtorch", (), []),
        (WAITS | {"ramtorch_text_encoder_percent": 50}, "ramtorch", ("ramtorch_text_encoder",), []),
        (WAITS | {"text_cache_disable": True}, "ramtorch-encoders", ("ramtorch_text_encoder",), []),
        (WAITS | {"ramtorch": False}, "quantised-whole", (), ["ramtorch_text_encoder"]),
        (WAITS | {"model_family": "anima", "base_model_precision": "no_change"}, "ramtorch", (), [*WAITS]),
    ],
)
def test_whose_layers_wait(
    changes: dict[str, Any], version: str, unpriced: tuple[str, ...], ineffective: list[str], tmp_path: Path
) -> None:
    found = case_of(tmp_path, changes)
    assert (found.version, found.unpriced) == (version, unpriced)
    assert [remark.flag for remark in found.translation.ineffective] == ineffective


def test_it_is_advised_where_the_model_s_own_layers_wait(tmp_path: Path) -> None:
    case = case_of(tmp_path, {})
    moves = [move for move in case.dialect.moves if move.changes == {"version": "ramtorch-encoders"}]
    assert [move.when(case.fields) for move in moves] == [True]
    assert moves[0].words_for is not None and moves[0].words_for({}) == ["ramtorch_text_encoder: true"]
    anima = case_of(tmp_path, {"model_family": "anima", "base_model_precision": "no_change"})
    assert not moves[0].when(anima.fields)


def test_it_is_written_as_it_was_read(tmp_path: Path) -> None:
    job, machine = (
        job_for(lookup.model("ltx-2"), {"method": "lora", "height": 512, "width": 512}),
        Machine(gpu="900GiB", host_ram=8 << 40),
    )
    own = {"adapter_dtype": "bf16", "optimizer_step": "loop", "gradient_checkpointing": "full", "swap_blocks": 24}
    plan = Plan(job=job, strategy=resolve(job, Strategy.read(own), machine), machine=machine)
    write_files(export(plan.replace(trainer="simpletuner@ramtorch-encoders"), "simpletuner"), tmp_path, False)
    config = json.loads((tmp_path / "config/config.json").read_text())
    assert (config["ramtorch"], config["ramtorch_text_encoder"]) == (True, True)
    assert translate(*dialects.read_script(from_file(tmp_path / "train.sh"))).version == "ramtorch-encoders"
