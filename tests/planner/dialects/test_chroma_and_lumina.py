"""Chroma and Lumina Image 2.0 in the words of the trainers that have them, and what of theirs is not priced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy

CHROMA = lookup.model("chroma1-hd")
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
 "data_backend_config": "x.json", "optimizer": "adamw_bf16", "gradient_checkpointing": false}"""


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
        ("a.toml", PIPE, "diffusion-pipe", "chroma1-hd", "latents and prompts are cached"),
        ("a.toml", LUMINA_PIPE, "diffusion-pipe", "lumina-image-2.0", "own code of Lumina Image 2.0 is priced as"),
        ("a.yaml", OSTRIS, "ai-toolkit", "chroma1-hd", "resolutions are areas"),
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


@pytest.mark.parametrize("mode", ["none", "full"])
def test_masks_for_every_head_are_in_the_estimate(mode: str) -> None:
    """B = 1, 24 heads, S = 4096 + 512: 8 bytes of a pair as they are made, then one, and two that attention makes in
    each block, which stay until its backward."""
    job = job_for(CHROMA, {"model": CHROMA.name, "frames": 1, "height": 1024, "width": 1024})
    configuration = Configuration.of(job, Strategy(gradient_checkpointing=mode), Machine(gpu="h200"))
    known, where = load_facts(configuration), grid(CHROMA, job)
    ours, theirs = (lay_out(configuration, known, where, name) for name in ("vplan", "diffusion-pipe"))
    pairs = 24 * (4096 + 512) ** 2
    masks = Counter(theirs.sizes[at] for at, op in enumerate(theirs.program.op) if "mask" in op and "every" in op)
    assert "mask for every head" not in ours.program.op and masks[pairs] == 1
    assert masks[2 * pairs] == (CHROMA.blocks if mode == "none" else 2 * CHROMA.blocks)
    held, most = 0, 0
    for event in theirs.step.ops:
        name = theirs.program.op[event if event >= 0 else ~event]
        held += theirs.sizes[event if event >= 0 else ~event] * (1 if event >= 0 else -1) * ("every head" in name)
        most = max(most, held)
    assert held == 0 and most == pairs * (1 + 2 * (CHROMA.blocks if mode == "none" else 1))


def test_a_batch_of_several_has_its_masks_in_the_estimate(tmp_path: Path) -> None:
    *_, said = notes(tmp_path, "a.json", SIMPLETUNER.replace('size": 1', 'size": 2'))
    assert "masks" not in said


def test_a_type_of_model_that_the_script_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="sd9"):
        notes(tmp_path, "a.sh", FLUX_SCRIPT.replace("chroma", "sd9"))
