"""Settings that the scripts of diffusers, ai-toolkit, DiffSynth-Studio, VideoX-Fun and EasyAnimate raise an error for:
the reading names each, and nothing of what they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.foreign.export import export
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Plan

SD = "train_dreambooth.py --pretrained_model_name_or_path CompVis/stable-diffusion-v1-4 --resolution 512 "
FLUX = "train_dreambooth_lora_flux.py --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev "
KLEIN = "train_dreambooth_lora_flux2_klein.py --pretrained_model_name_or_path black-forest-labs/FLUX.2-klein-base-4B "
SDXL = "train_dreambooth_lora_sdxl.py --pretrained_model_name_or_path stabilityai/stable-diffusion-xl-base-1.0 "
WAN = "scripts/wan2.1/train_lora.py --pretrained_model_name_or_path Wan2.1-T2V-14B --report_to wandb "
HUNYUAN = "scripts/hunyuanvideo/train_lora.py --pretrained_model_name_or_path hunyuanvideo-community/HunyuanVideo "
EASY = (
    "scripts/train_lora.py --pretrained_model_name_or_path easyanimate-v5.1-12b --train_mode inpaint --report_to wandb "
)
FILES = "Tongyi-MAI/Z-Image:transformer/*.safetensors", "Tongyi-MAI/Z-Image:text_encoder/*.safetensors"
Z_IMAGE = "examples/z_image/model_training/train.py --lora_base_model dit --lora_rank 16 --height 512 --width 512 "
Z_IMAGE += f'--model_id_with_origin_paths "{",".join(FILES)},Tongyi-MAI/Z-Image:vae/*.safetensors" '
LOADER = "--enable_text_encoder_in_dataloader"
WHOLE = SD + "--train_text_encoder --gradient_accumulation_steps 4 "
CLASSES = "--with_prior_preservation --class_data_dir a "
PRECISION = "--mixed_precision bf16 "


def refused_by(folder: Path, words: str, gpus: int = 1) -> list[str]:
    (folder / "train.sh").write_text(f"accelerate launch --num_processes {gpus} {words}\n")
    (folder / "nf4.json").write_text('{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}')
    return [each.flag for each in translate(*dialects.read_script(from_file(folder / "train.sh"))).refused]


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (FLUX + "--report_to wandb --hub_token hf_a", "--hub_token"),
        (FLUX + "--with_prior_preservation --class_prompt dog", "--with_prior_preservation"),
        (SD + CLASSES, "--with_prior_preservation"),
        (FLUX + "--dataset_name a --instance_data_dir b", "--instance_data_dir"),
        (KLEIN + PRECISION + "--do_fp8_training --bnb_quantization_config_path nf4.json", "--do_fp8_training"),
        (FLUX + "--enable_npu_flash_attention", "--enable_npu_flash_attention"),
        (SDXL + "--do_edm_style_training --snr_gamma 5", "--snr_gamma"),
        (SD + "--train_text_encoder --pre_compute_text_embeddings", "--pre_compute_text_embeddings"),
        (WAN + "--hub_token hf_a", "--hub_token"),
        (EASY + "--hub_token hf_a", "--hub_token"),
        (HUNYUAN + LOADER, LOADER),
        (Z_IMAGE + f'--quant_options "{FILES[1]}:torchao_fp8_w8a8"', "--quant_options"),
        (Z_IMAGE + "--quant_options bitsandbytes_nf4", "--quant_options"),
        (Z_IMAGE + f'--quant_options "{FILES[0]}:bitsandbytes_nf4" --offload_models "{FILES[0]}"', "--offload_models"),
    ],
)
def test_what_a_script_raises_an_error_for_is_said(words: str, flag: str, tmp_path: Path) -> None:
    assert refused_by(tmp_path, words) == [flag]


@pytest.mark.parametrize(
    "words",
    [
        FLUX + "--report_to tensorboard --hub_token hf_a",
        FLUX + "--report_to wandb",
        FLUX + CLASSES + "--class_prompt dog",
        FLUX + "--class_data_dir a",
        FLUX + "--dataset_name a",
        KLEIN + PRECISION + "--bnb_quantization_config_path nf4.json",
        SDXL + "--snr_gamma 5",
        SD + "--train_text_encoder",
        WHOLE,
        WAN,
        EASY,
        HUNYUAN,
        WAN + LOADER,
        Z_IMAGE + f'--quant_options "{FILES[0]}:bitsandbytes_nf4/all_x_embedder;" --offload_models "{FILES[1]}"',
        Z_IMAGE + f'--quant_options "{FILES[1]}:torchao_fp8_w8a16"',
        Z_IMAGE + f'--quant_options "{FILES[1]}:" --offload_models "{FILES[1]}"',
    ],
)
def test_what_it_takes_is_not(words: str, tmp_path: Path) -> None:
    assert refused_by(tmp_path, words) == []


def test_gradients_are_not_accumulated_beside_a_text_encoder_on_several_gpus(tmp_path: Path) -> None:
    assert refused_by(tmp_path, WHOLE, gpus=2) == ["--gradient_accumulation_steps"]
    assert refused_by(tmp_path, WHOLE.replace("steps 4", "steps 1"), gpus=2) == []
    lora = FLUX + "--train_text_encoder --gradient_accumulation_steps 4"
    assert refused_by(tmp_path, lora, gpus=2) == []


CONFIG = """job: extension
config:
  name: a
  process:
    - type: sd_trainer
      network: {{type: lora, linear: 16}}
      datasets: [{datasets}]
      train: {{dtype: bf16{train}}}
      model: {{name_or_path: {path}, arch: {arch}{model}}}
      sample: {{width: 512, height: 512{sample}}}
"""
FLUX_MODEL = ("black-forest-labs/FLUX.1-dev", "flux")
KONTEXT = ("black-forest-labs/FLUX.1-Kontext-dev", "flux_kontext")
EDIT_PLUS = ("Qwen/Qwen-Image-Edit-2511", "qwen_image_edit_plus:2511")
FROM_IMAGE = ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "wan21_i2v")
EDIT = ("Qwen/Qwen-Image-Edit", "qwen_image_edit")
RECOVERY = "quantize: true, qtype: 'uint4|ostris/a/b.safetensors'"
ASSISTANT = "assistant_lora_path: a.safetensors"
CACHED = "{folder_path: a, cache_text_embeddings: true}"
BATCHES = "folder_path: a, batch_size: 2"


def refused_by_config(
    folder: Path,
    train: str = "",
    model: str = "",
    datasets: str = "{folder_path: a}",
    sample: str = "",
    of: tuple[str, str] = FLUX_MODEL,
) -> list[str]:
    train, model, sample = (f", {words}" if words else "" for words in (train, model, sample))
    words = {"datasets": datasets, "train": train, "model": model, "sample": sample}
    (folder / "a.yaml").write_text(CONFIG.format(path=of[0], arch=of[1], **words))
    return [each.flag for each in translate(*dialects.read_script(from_file(folder / "a.yaml"))).refused]


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ({"train": "gradient_accumulation: 2, gradient_accumulation_steps: 4"}, "train.gradient_accumulation"),
        ({"train": "unload_text_encoder: true", "of": EDIT}, "train.unload_text_encoder"),
        ({"model": "attn_masking: true"}, "model.attn_masking"),
        ({"train": "bypass_guidance_embedding: true, do_guidance_loss: true"}, "train.do_guidance_loss"),
        ({"train": "do_guidance_loss: true", "model": "use_flux_cfg: true"}, "train.do_guidance_loss"),
        ({"model": f"{RECOVERY}, {ASSISTANT}"}, "model.assistant_lora_path"),
        ({"datasets": CACHED + ", {folder_path: b}"}, "datasets[].cache_text_embeddings"),
        ({"datasets": "{folder_path: a}, {folder_path: b, buckets: false}"}, "datasets[].buckets"),
        ({"datasets": "{" + BATCHES + ", buckets: false}"}, "datasets[].batch_size"),
        ({"sample": "prompts: [smile]", "of": KONTEXT}, "sample.prompts"),
        ({"sample": "samples: [{prompt: a, ctrl_img: a.png}, {prompt: b}]", "of": EDIT_PLUS}, "sample.prompts"),
        ({"sample": "prompts: [a cat]", "of": FROM_IMAGE}, "sample.prompts"),
        ({"model": ASSISTANT, "of": FROM_IMAGE}, "model.assistant_lora_path"),
    ],
)
def test_what_ai_toolkit_raises_an_error_for_is_said(words: dict[str, str], flag: str, tmp_path: Path) -> None:
    assert refused_by_config(tmp_path, **words) == [flag]  # type: ignore[arg-type]  # a model is two words


@pytest.mark.parametrize(
    "words",
    [
        {"train": "gradient_accumulation: 2, gradient_accumulation_steps: 1"},
        {"train": "gradient_accumulation_steps: 4"},
        {"train": "unload_text_encoder: true"},
        {"train": "cache_text_embeddings: true", "of": EDIT},
        {"model": "attn_masking: true, is_flux: true"},
        {"train": "bypass_guidance_embedding: true"},
        {"train": "do_guidance_loss: true"},
        {"model": RECOVERY},
        {"model": ASSISTANT},
        {"datasets": CACHED + ", " + CACHED},
        {"train": "cache_text_embeddings: true", "datasets": CACHED + ", {folder_path: b}"},
        {"datasets": "{folder_path: a}, {folder_path: b, buckets: false, is_reg: true}"},
        {"datasets": "{" + BATCHES + "}"},
        {"sample": "prompts: [smile]"},
        {"of": FROM_IMAGE},
        {"sample": "prompts: []", "of": KONTEXT},
        {"sample": "prompts: ['smile --ctrl_img a.png']", "of": KONTEXT},
        {"sample": "samples: [{prompt: a, ctrl_img_1: a.png}]", "of": EDIT_PLUS},
        {"sample": "prompts: [smile]", "train": "skip_first_sample: true", "of": KONTEXT},
        {"sample": "prompts: [smile]", "train": "disable_sampling: true", "of": KONTEXT},
    ],
)
def test_what_ai_toolkit_takes_is_not(words: dict[str, str], tmp_path: Path) -> None:
    assert refused_by_config(tmp_path, **words) == []  # type: ignore[arg-type]  # a model is two words


@pytest.mark.parametrize("model", ["flux.1-kontext-dev", "wan2.1-i2v-14b-480p", "qwen-image-edit-2511", "z-image"])
def test_an_export_samples_from_an_image_where_the_model_does(model: str, tmp_path: Path) -> None:
    strategy = Strategy.read({"validation_mode": "on", "gradient_checkpointing": "full"})
    plan = Plan(job=job_for(lookup.model(model), {}), strategy=strategy, machine=Machine(gpu="80GB"))
    for name, text in export(plan, "ai-toolkit", take_nearest=True).files.items():
        (tmp_path / name).write_text(text)
    reading = translate(*dialects.read_script(from_file(tmp_path / "train.sh")))
    assert reading.refused == ()
    assert reading.strategy["validation_mode"] == "on"
    assert ("ctrl_img: " in (tmp_path / "config.yaml").read_text()) == (model != "z-image")
