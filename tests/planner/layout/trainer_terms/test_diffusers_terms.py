"""Samples of diffusers' examples, against what a rehearsal of one took."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.dialects.base.script import from_file
from planner.foreign.case import read_case
from planner.foreign.check import check_case
from planner.spec.plan import PhasePeak
from planner.units import GIB

SD3_FULL = (
    "train_dreambooth_sd3.py --pretrained_model_name_or_path stabilityai/stable-diffusion-3-medium-diffusers "
    "--mixed_precision fp16 --resolution 256 --train_batch_size 1 --gradient_accumulation_steps 4 --use_8bit_adam"
)
FLUX = (
    "train_dreambooth_lora_flux{}.py --pretrained_model_name_or_path black-forest-labs/FLUX.1-{} "
    "--mixed_precision bf16 --resolution 512 --train_batch_size 1 --gradient_checkpointing"
)


def phases_of(folder: Path, command: str) -> Mapping[str, PhasePeak]:
    (folder / "train.sh").write_text(f"accelerate launch --num_processes 1 {command}")
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    case = read_case(dialect, given, {}, {"gpu": "a100-80gb"})
    return {str(phase): peak for phase, peak in check_case(case, search=False).outcome.estimate.phases.items()}


def test_steps_after_the_first_samples_run_beside_their_text_encoders(tmp_path: Path) -> None:
    """The script of December 2024 on a virtual A100: its first steps, the samples of 1024 pixels behind its first
    epoch, and the steps behind those, allocated."""
    found = phases_of(tmp_path, f"{SD3_FULL} --validation_prompt x")
    took = {"first_step": 20.38, "denoise": 26.54, "decode": 25.45, "train": 34.79, "optimizer": 29.99}
    for phase, rehearsed in took.items():
        assert found[phase].allocated_bytes / GIB == pytest.approx(rehearsed, rel=3e-3), phase
    alone = phases_of(tmp_path, SD3_FULL)
    encoders = sum(2 * encoder.parameters for encoder in lookup.model("sd3-medium").text_encoders)
    assert found["train"].allocated_bytes - alone["train"].allocated_bytes == pytest.approx(encoders, rel=1e-2)
    assert found["first_step"].allocated_bytes == alone["first_step"].allocated_bytes


@pytest.mark.parametrize(("script", "weights", "kept"), [("_kontext", "Kontext-dev", True), ("", "dev", False)])
def test_a_script_that_deletes_its_pipeline_keeps_no_encoder(
    tmp_path: Path, script: str, weights: str, kept: bool
) -> None:
    """And where it does not, the last samples' pipeline takes the place of the earlier one."""
    command = FLUX.format(script, weights)
    sampled, alone = (phases_of(tmp_path, f"{command}{flag}") for flag in (" --validation_prompt x", ""))
    model = lookup.model("flux.1-dev")
    encoders = sum(2 * encoder.parameters for encoder in model.text_encoders)
    more = sampled["train"].allocated_bytes - alone["train"].allocated_bytes
    assert more == pytest.approx(kept * encoders, rel=1e-2, abs=1 << 20)
    two = 2 * 2 * model.parameters + (1 if kept else 2) * encoders  # FLUX.1's holds those that encoded beforehand
    assert two < sampled["denoise"].allocated_bytes < two + 3 * GIB
