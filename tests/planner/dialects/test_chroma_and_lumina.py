"""Chroma and Lumina Image 2.0 in the words of the trainers that have them, and what of theirs is not priced."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError

FLUX_SCRIPT = """accelerate launch --mixed_precision bf16 flux_train_network.py --model_type=chroma --network_dim 8 \\
  --pretrained_model_name_or_path flux1-something.safetensors --network_module networks.lora_flux \\
  --network_train_unet_only --blocks_to_swap 16 --gradient_checkpointing
"""
LUMINA_SCRIPT = """accelerate launch lumina_train_network.py --pretrained_model_name_or_path lumina-2.safetensors \\
  --gemma2 gemma-2-2b.safetensors --ae ae.safetensors --network_module=networks.lora_lumina --network_dim=8 \\
  --timestep_sampling nextdit_shift --mixed_precision bf16 --gradient_checkpointing --cache_latents
"""
LUMINA_CONFIG = """pretrained_model_name_or_path = "l.safetensors"
gemma2 = "g.safetensors"
ae = "ae.safetensors"
network_module = "networks.lora_lumina"
"""
PIPE = """dataset = "dataset.toml"
micro_batch_size_per_gpu = 1
activation_checkpointing = true
[model]
type = "chroma"
diffusers_path = "FLUX.1-dev"
transformer_path = "chroma.safetensors"
dtype = "bfloat16"
[adapter]
type = "lora"
rank = 32
[optimizer]
type = "adamw_optimi"
"""
LUMINA_PIPE = PIPE.replace('"chroma"', '"lumina_2"').replace(
    'diffusers_path = "FLUX.1-dev"', 'llm_path = "g.safetensors"\nvae_path = "v.safetensors"\nlumina_shift = true'
)
OSTRIS = """job: extension
config:
  name: a
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16}
      datasets: [{folder_path: /data, resolution: [512]}]
      train: {batch_size: 1, optimizer: adamw8bit, dtype: bf16}
      model: {name_or_path: lodestones/Chroma1-HD, arch: chroma}
"""
OSTRIS_LUMINA = OSTRIS.replace("lodestones/Chroma1-HD, arch: chroma", "Alpha-VLLM/Lumina-Image-2.0, is_lumina2: true")
OSTRIS_FLEX = OSTRIS.replace("lodestones/Chroma1-HD, arch: chroma", "ostris/Flex.1-alpha, is_flux: true")
ONETRAINER = """{"training_method": "LORA", "model_type": "CHROMA_1", "base_model_name": "lodestones/Chroma1-HD",
 "text_encoder": {"train": false}, "train_dtype": "BFLOAT_16", "transformer": {"weight_dtype": "BFLOAT_16"}}"""
SIMPLETUNER = """{"model_family": "chroma", "model_flavour": "hd", "model_type": "lora", "train_batch_size": 1,
 "data_backend_config": "x.json", "optimizer": "adamw_bf16"}"""


def notes(folder: Path, name: str, text: str) -> tuple[str, str, tuple[str, ...], str]:
    """Trainer, model, options that are not known, and all notes."""
    (folder / name).write_text(text)
    dialect, given = dialects.read_script(from_file(folder / name))
    found = translate(dialect, given)
    return dialect.name, str(found.job["model"]), given.unknown, "\n".join(found.notes)


@pytest.mark.parametrize(
    ("name", "text", "trainer", "model", "note"),
    [
        ("a.sh", FLUX_SCRIPT, "sd-scripts", "chroma1-hd", "its own code of Chroma1-HD was not compared"),
        ("a.sh", LUMINA_SCRIPT, "sd-scripts", "lumina-image-2.0", "adapters on Gemma 2 are not estimated"),
        ("a.toml", LUMINA_CONFIG, "sd-scripts", "lumina-image-2.0", "own code of Lumina Image 2.0 was not compared"),
        # B = 1, 24 heads, S = 4096 + 512: 8 bytes of a pair are 3.80 GiB
        ("a.toml", PIPE, "diffusion-pipe", "chroma1-hd", "not estimated, 3.80 GiB for a moment"),
        ("a.toml", LUMINA_PIPE, "diffusion-pipe", "lumina-image-2.0", "own code of Lumina Image 2.0 was not compared"),
        ("a.yaml", OSTRIS, "ai-toolkit", "chroma1-hd", "not estimated, 0.42 GiB for a moment"),
        ("a.yaml", OSTRIS_LUMINA, "ai-toolkit", "lumina-image-2.0", "resolutions are areas"),
        ("a.yaml", OSTRIS_FLEX, "ai-toolkit", "flex.1-alpha", "resolutions are areas"),
        ("a.json", ONETRAINER, "onetrainer", "chroma1-hd", "compared with runs of OneTrainer's own code"),
        # not checkpointed: 57 blocks, each with 2 bytes of a pair
        ("a.json", SIMPLETUNER, "simpletuner", "chroma1-hd", "not estimated, 2.25 GiB"),
        (
            "a.json",
            SIMPLETUNER.replace("chroma", "lumina2").replace("hd", "2.0"),
            "simpletuner",
            "lumina-image-2.0",
            "a square of the config's resolution",
        ),
    ],
)
def test_each_trainer_s_words(name: str, text: str, trainer: str, model: str, note: str, tmp_path: Path) -> None:
    read = notes(tmp_path, name, text)
    assert read[:3] == (trainer, model, ())
    assert note in read[3]


def test_a_batch_of_several_has_its_masks_in_the_estimate(tmp_path: Path) -> None:
    *_, said = notes(tmp_path, "a.json", SIMPLETUNER.replace('size": 1', 'size": 2'))
    assert "masks" not in said


def test_a_type_of_model_that_the_script_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="sd9"):
        notes(tmp_path, "a.sh", FLUX_SCRIPT.replace("chroma", "sd9"))
