"""How many control images ai-toolkit's models are given beside a sample, in its datasets' words."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.foreign.export import export, write_files
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve

CONFIG = """job: extension
config:
  name: a
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16}
      datasets: [{folder_path: /data, %s}]
      train: {batch_size: 1, optimizer: adamw8bit, dtype: bf16}
      model: {%s}
"""
PLUS = "name_or_path: Qwen/Qwen-Image-Edit-2509, arch: qwen_image_edit_plus"
PLUS_2511 = "name_or_path: Qwen/Qwen-Image-Edit-2511, arch: 'qwen_image_edit_plus:2511'"
EDIT = "name_or_path: Qwen/Qwen-Image-Edit, arch: qwen_image_edit"
FLUX_2 = "name_or_path: black-forest-labs/FLUX.2-dev, arch: flux2"
MATCHED = f"{PLUS}, model_kwargs: {{match_target_res: true}}"


@pytest.mark.parametrize(
    ("model", "data", "references"),
    [
        (PLUS, "resolution: [512, 1024], control_path: [/a, /b, /c]", 3),
        (PLUS_2511, "resolution: [1024], control_path: [/a, /b]", 2),
        (PLUS, "resolution: [1024], control_path_1: /a, control_path_3: /c", 2),
        (PLUS, "resolution: [1024], control_path: /a", 1),
        (PLUS, "resolution: [512], control_path: [/a, /b]", 8),
        (PLUS, "resolution: [768], control_path: /a", 2),
        (MATCHED, "resolution: [512], control_path: [/a, /b]", 2),
        (PLUS, "resolution: [512]", None),
        (EDIT, "resolution: [512], control_path: [/a, /b]", None),
        (FLUX_2, "resolution: [1024], control_path: [/a, /b]", 2),
        (FLUX_2, "resolution: [1024]", None),
    ],
)
def test_every_control_image_of_a_sample_is_a_reference(
    model: str, data: str, references: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG % (data, model))
    read = translate(*dialects.read_script(from_file(path)))
    assert read.job["references"] == references
    told = f"control images are priced as {references} of the sample's size"
    assert (told in read.notes) == (references is not None)
    assert not any("control_path" in note for note in read.notes)


@pytest.mark.parametrize(("references", "side"), [(1, 1024), (3, 1024), (2, 512)])
@pytest.mark.parametrize("model", ["qwen-image-edit-2511", "flux.2-dev"])
def test_an_export_is_read_back_with_as_many_references(model: str, references: int, side: int, tmp_path: Path) -> None:
    job = Job(model=model, frames=1, references=references, height=side, width=side)
    machine = Machine(gpu="h200-141gb", host_ram=1 << 39)
    strategy = Strategy.read({"gradient_checkpointing": "full", "autocast": "none", "weights_dtype": "bf16"})
    plan = Plan(job=job, strategy=resolve(job, strategy, machine), machine=machine)
    write_files(export(plan, "ai-toolkit", take_nearest=True), tmp_path, force=False)
    read = translate(*dialects.read_script(from_file(tmp_path / "config.yaml")))
    assert read.job["references"] == references and read.job["height"] == side
