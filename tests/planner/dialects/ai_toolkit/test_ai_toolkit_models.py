"""Which model an ai-toolkit config trains, by its architecture with a version, its repository, or a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.foreign.case import read_case
from planner.foreign.check import check_case
from planner.foreign.export import export, write_files
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve
from planner.units import GIB

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


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("name_or_path: Tongyi-MAI/Z-Image-Turbo, arch: 'zimage:turbo'", "z-image-turbo"),
        ("name_or_path: Tongyi-MAI/Z-Image-Turbo, arch: zimage", "z-image-turbo"),
        ("name_or_path: /models/mine, arch: 'zimage:turbo'", "z-image-turbo"),
        ("name_or_path: /models/mine, arch: zimage", "z-image"),
        ("name_or_path: Tongyi-MAI/Z-Image, arch: zimage", "z-image"),
        ("name_or_path: black-forest-labs/FLUX.1-schnell, is_flux: true", "flux.1-schnell"),
        ("name_or_path: black-forest-labs/FLUX.1-schnell, arch: flux", "flux.1-schnell"),
        ("name_or_path: /models/mine, arch: flux", "flux.1-dev"),
        ("name_or_path: /models/mine, arch: flex1", "flux.1-dev"),
        ("name_or_path: krea/Krea-2-Turbo, arch: 'krea2:turbo'", "krea-2"),
        ("name_or_path: ostris/Z-Image-De-Turbo, arch: 'zimage:deturbo'", "z-image"),
    ],
)
def test_a_version_of_an_architecture_is_a_model(words: str, model: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG % words)
    assert translate(*dialects.read_script(from_file(path))).job["model"] == model


@pytest.mark.parametrize(
    ("model", "is_distilled"),
    [
        *(("z-image-turbo", True), ("z-image", False), ("flux.1-schnell", True)),
        *(("krea-2", False), ("flux.2-klein-4b", False), ("flux.2-klein-9b", False)),
    ],
)
def test_a_written_config_of_a_distilled_model_names_its_training_adapter(
    model: str, is_distilled: bool, tmp_path: Path
) -> None:
    job, machine = Job(model=model, frames=1, height=1024, width=1024), Machine(gpu="h200-141gb", host_ram=1 << 39)
    strategy = Strategy.read({"gradient_checkpointing": "full", "autocast": "none", "weights_dtype": "bf16"})
    plan = Plan(job=job, strategy=resolve(job, strategy, machine), machine=machine)
    write_files(export(plan, "ai-toolkit", take_nearest=True), tmp_path, force=False)
    path = tmp_path / "config.yaml"
    assert translate(*dialects.read_script(from_file(path))).job["model"] == model
    assert ("assistant_lora_path" in path.read_text()) == is_distilled


@pytest.mark.parametrize(
    "words",
    [
        "name_or_path: krea/Krea-2-Raw, arch: krea2",
        "name_or_path: black-forest-labs/FLUX.2-klein-base-4B, arch: flux2_klein_4b",
        "name_or_path: black-forest-labs/FLUX.2-klein-base-9B, arch: flux2_klein_9b, quantize: true",
    ],
)
def test_models_that_came_last_are_priced_without_autocast_too(words: str, tmp_path: Path) -> None:
    """In 16 bits there was no answer of them: recorded were steps under autocast alone."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG % words)
    found = check_case(read_case(*dialects.read_script(from_file(file)), {}, {"gpu": "80GB"}), search=False)
    assert found.case.strategy.autocast == "none"
    assert found.outcome.estimate.verdict == "fits"


def test_a_quantised_language_model_has_a_head_of_its_own(tmp_path: Path) -> None:
    """Its own code, rehearsed, has 6.33 GiB allocated while it encodes; without the head it was 4.49."""
    file = tmp_path / "config.yaml"
    words = (
        "name_or_path: black-forest-labs/FLUX.2-klein-base-4B, arch: flux2_klein_4b, quantize: true, quantize_te: true"
    )
    cached = CONFIG.replace("[1024]}", "[1024], cache_latents_to_disk: true}")
    file.write_text(cached.replace("dtype: bf16}", "dtype: bf16, cache_text_embeddings: true}") % words)
    found = check_case(read_case(*dialects.read_script(from_file(file)), {}, {"gpu": "80GB"}), search=False)
    encode = found.outcome.estimate.phases["encode"].allocated_bytes
    assert encode / GIB == pytest.approx(6.33, rel=0.02)


@pytest.mark.parametrize(("path", "tokens"), [("FLUX.1-schnell", 512), ("FLUX.1-dev", None)])
def test_prompts_of_schnell_are_filled_up_as_those_of_dev_are(path: str, tokens: int | None, tmp_path: Path) -> None:
    """It was made for 256 tokens, which vplan, SimpleTuner and kohya-ss's scripts give it (toolkit/train_tools.py)."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG % f"name_or_path: black-forest-labs/{path}, arch: flux")
    assert translate(*dialects.read_script(from_file(file))).job["text_tokens"] == tokens


@pytest.mark.parametrize(("more", "is_said"), [("", False), (", model_kwargs: {edit: true}", True)])
def test_control_images_of_krea_are_said(more: str, is_said: bool, tmp_path: Path) -> None:
    """The UI's krea2:o_edit: clean latents beside the sample's (diffusion_models/krea2/krea2.py)."""
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG % f"name_or_path: krea/Krea-2-Raw, arch: 'krea2:o_edit'{more}")
    notes = translate(*dialects.read_script(from_file(file))).notes
    assert any("model_kwargs.edit" in note for note in notes) == is_said
