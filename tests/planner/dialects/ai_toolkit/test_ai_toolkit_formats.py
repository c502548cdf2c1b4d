"""What ai-toolkit makes of a model's weights and a text encoder's, by the words of its config."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.foreign.case import read_case
from planner.foreign.check import check_case

CONFIG = """job: extension
config:
  name: a
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16}
      datasets: [{folder_path: /data, resolution: [1024]}]
      train: {batch_size: 1, optimizer: adamw8bit, dtype: bf16}
      model: {%s}
"""
FLUX = "name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true, low_vram: true, quantize: true"
QWEN = "name_or_path: Qwen/Qwen-Image, arch: qwen_image, low_vram: true, quantize: true"


def read(folder: Path, model: str) -> Translation:
    (folder / "config.yaml").write_text(CONFIG % model)
    return translate(*dialects.read_script(from_file(folder / "config.yaml")))


@pytest.mark.parametrize(
    ("model", "weights", "encoder", "version"),
    [
        (FLUX, "fp8", "fp8", ""),
        (f"{FLUX}, qtype: uint4", "fp8", "nf4", "uint4"),
        (f"{FLUX}, qtype: uint4, qtype_te: qfloat8", "fp8", "nf4", "uint4"),
        (f"{FLUX}, qtype: uint6", "fp8", "fp8", "uint6"),
        (f"{FLUX}, qtype: uint8", "bf16", "bf16", ""),
        (f"{FLUX}, qtype: uint4, quantize_te: false", "fp8", "bf16", "uint4"),
        (f"{QWEN}, qtype: 'uint3|ostris/accuracy_recovery_adapters/qwen.safetensors'", "fp8", "fp8", "uint3"),
        (f"{QWEN}, qtype: uint8", "bf16", "fp8", ""),
    ],
)
def test_formats_of_a_model_and_its_text_encoder(
    model: str, weights: str, encoder: str, version: str, tmp_path: Path
) -> None:
    reading = read(tmp_path, model)
    assert (reading.strategy["weights_dtype"], reading.strategy["text_encoder_dtype"]) == (weights, encoder)
    assert reading.version == version


def test_what_is_not_read_or_not_estimated_is_said(tmp_path: Path) -> None:
    notes = read(tmp_path, f"{FLUX}, qtype: uint8").notes
    assert any("uint8 quantises nothing" in note for note in notes)
    notes = read(tmp_path, f"{FLUX}, qtype: 'uint4|x.safetensors', qtype_te: qfloat8").notes
    assert any("accuracy recovery adapter is not estimated" in note for note in notes)
    assert any("qtype_te is not read" in note for note in notes)


def test_fewer_bits_are_a_change_that_needs_no_more_host_ram(tmp_path: Path) -> None:
    """ai-toolkit ships an example of Qwen-Image for 24 GB over uint3."""
    text = CONFIG % f"{QWEN}, qtype: qfloat8"
    (tmp_path / "config.yaml").write_text(text.replace("dtype: bf16", "dtype: bf16, cache_text_embeddings: true"))
    case = read_case(*dialects.read_script(from_file(tmp_path / "config.yaml")), {}, {"gpu": "24GB"})
    found = check_case(case)
    assert found.outcome.estimate.verdict == "no"
    (fewer,) = [fix for fix in found.fixes if any("qtype" in words for words in fix.change)]
    assert fewer.change == ("config.process[0].model.qtype: uint5",) and fewer.lossy
    assert fewer.outcome.estimate.verdict == "fits"
    assert fewer.outcome.estimate.host_ram_bytes <= found.outcome.estimate.host_ram_bytes
