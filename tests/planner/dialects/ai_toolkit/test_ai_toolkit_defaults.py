"""What ai-toolkit does where a config is silent (toolkit/config_modules.py at 27a03a9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError

CONFIG = """job: extension
config:
  name: a
  process:
    - type: sd_trainer
      network: {type: lora%s}
      datasets: [{folder_path: /data}]
      train: {optimizer: adamw8bit%s}
      sample: {%s}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, arch: flux%s}
"""


def read(
    folder: Path, network: str = "", train: str = ", dtype: bf16", sample: str = "", model: str = ""
) -> Translation:
    (folder / "a.yaml").write_text(CONFIG % (network, train, sample, model))
    return translate(*dialects.read_script(from_file(folder / "a.yaml")))


@pytest.mark.parametrize("model", ["", ", quantize: true"])
@pytest.mark.parametrize(
    ("train", "said"), [("", "where a config is silent"), (", dtype: float32", "fp32 is not priced")]
)
def test_a_frozen_model_in_fp32_is_no_bf16(train: str, said: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=said) as refused:
        read(tmp_path, train=train, model=model)
    assert "train.dtype: bf16" in str(refused.value.fix)


@pytest.mark.parametrize(
    ("sample", "mode"),
    [
        ("", "off"),
        ("width: 1024, prompts: []", "off"),
        ("prompts: [a], samples: []", "off"),
        ("samples: [{width: 1024}]", "off"),
        ("prompts: [a]", "on"),
        ("samples: [{prompt: a}]", "on"),
    ],
)
def test_samples_are_made_of_prompts(sample: str, mode: str, tmp_path: Path) -> None:
    reading = read(tmp_path, sample=sample)
    assert reading.strategy["validation_mode"] == mode
    assert any("no sample is made" in note for note in reading.notes) == (mode == "off")


@pytest.mark.parametrize(
    ("network", "rank"), [("", 4), (", linear: 8", 8), (", rank: 16", 16), (", linear: 8, rank: 16", 16)]
)
def test_a_rank_goes_before_linear(network: str, rank: int, tmp_path: Path) -> None:
    assert read(tmp_path, network).job["lora_rank"] == rank


@pytest.mark.parametrize(
    ("train", "passes"),
    [
        ("", 1),
        (", gradient_accumulation: 1, gradient_accumulation_steps: 4", 4),
        (", gradient_accumulation: 2", 2),
    ],
)
def test_either_setting_accumulates(train: str, passes: int, tmp_path: Path) -> None:
    assert read(tmp_path, train=f", dtype: bf16{train}").strategy["gradient_accumulation"] == passes
