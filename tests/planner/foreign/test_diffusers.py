"""Layers, blocks, dropout and aspect ratios of diffusers' examples, and what of their flags is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import Translation, settings_for, translate
from planner.dialects.base.script import from_file
from planner.dialects.diffusers.settings import DIALECT
from planner.errors import VplanError

SD3 = "train_dreambooth_lora_sd3.py --pretrained_model_name_or_path stabilityai/stable-diffusion-3-medium-diffusers"
FLUX_2 = "train_dreambooth_lora_flux2.py --pretrained_model_name_or_path black-forest-labs/FLUX.2-dev"
SDXL = "train_dreambooth_lora_sdxl.py --pretrained_model_name_or_path stabilityai/stable-diffusion-xl-base-1.0"


def read(folder: Path, words: str) -> Translation:
    (folder / "train.sh").write_text(f"accelerate launch --num_processes 1 {words}")
    return translate(*dialects.read_script(from_file(folder / "train.sh")))


def test_layers_are_those_that_peft_finds(tmp_path: Path) -> None:
    assert read(tmp_path, SD3).job["lora_targets"] is None
    usual = (
        "attn.add_k_proj,attn.add_q_proj,attn.add_v_proj,attn.to_add_out,attn.to_k,attn.to_out.0,attn.to_q,attn.to_v"
    )
    assert read(tmp_path, f"{SD3} --lora_layers {usual}").job["lora_targets"] is None
    assert read(tmp_path, f"{SD3} --lora_layers 'attn.to_k, attn.to_q'").job["lora_targets"] == (
        "attn.to_k",
        "attn.to_q",
    )
    blocks = read(tmp_path, f"{SD3} --lora_layers attn.to_k --lora_blocks 12,13").job["lora_targets"]
    assert blocks == ("transformer_blocks.12.attn.to_k", "transformer_blocks.13.attn.to_k")
    with pytest.raises(VplanError, match="names no layer of sd3-medium"):
        read(tmp_path, f"{SD3} --lora_layers attn.qkv")


def test_dropout_and_ratios_are_the_jobs(tmp_path: Path) -> None:
    assert read(tmp_path, f"{SD3} --lora_dropout 0.1").job["lora_dropout"] == 0.1
    shapes = "--use_aspect_ratio_buckets --aspect_ratio_buckets"
    job = read(tmp_path, f'{FLUX_2} --resolution 512 {shapes} "1024,1024; 768,1360"').job
    assert [(bucket.height, bucket.width) for bucket in job["buckets"]] == [(1024, 1024), (768, 1360)]
    job = read(tmp_path, f'{FLUX_2} --resolution 512 {shapes} "768,1360"').job
    assert (job["height"], job["width"], job["buckets"]) == (768, 1360, ())
    assert read(tmp_path, f"{FLUX_2} --resolution 512 --use_aspect_ratio_buckets").job["height"] == 512
    with pytest.raises(VplanError, match="with --use_aspect_ratio_buckets only"):
        read(tmp_path, f'{FLUX_2} --aspect_ratio_buckets "768,1360"')


def test_they_are_written_where_an_example_has_the_flag(tmp_path: Path) -> None:
    found = read(tmp_path, f'{FLUX_2} --use_aspect_ratio_buckets --aspect_ratio_buckets "1024,1024;768,1360"')
    fields = found.job | found.strategy | {"gpus": 1, "nodes": 1, "lora_targets": ("to_k",), "lora_dropout": 0.5}
    settings = settings_for(DIALECT, fields)
    assert settings["--aspect_ratio_buckets"] == "1024,1024;768,1360" and settings["--use_aspect_ratio_buckets"] is True
    assert settings["--lora_layers"] == "to_k" and settings["--lora_dropout"] == 0.5
    sdxl = read(tmp_path, SDXL)
    with pytest.raises(InexpressibleError, match="no --lora_layers"):
        settings_for(DIALECT, sdxl.job | sdxl.strategy | {"gpus": 1, "nodes": 1, "lora_targets": ("to_k",)})


def test_dora_of_sdxl_is_peft_s(tmp_path: Path) -> None:
    found = read(tmp_path, f"{SDXL} --use_dora")
    assert found.job["adapter"] == "dora" and read(tmp_path, SDXL).job["adapter"] == "lora"
    fields = found.job | found.strategy | {"gpus": 1, "nodes": 1}
    assert settings_for(DIALECT, fields)["--use_dora"] is True
    flux = read(tmp_path, FLUX_2)
    with pytest.raises(InexpressibleError, match="no --use_dora"):
        settings_for(DIALECT, flux.job | flux.strategy | {"gpus": 1, "nodes": 1, "adapter": "dora"})


@pytest.mark.parametrize("words", [f"{SD3} --upcast_before_saving", f"{SD3} --train_text_encoder"])
def test_what_an_estimate_would_be_wrong_without_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="is not priced"):
        read(tmp_path, words)


def test_gradients_that_stay_are_said(tmp_path: Path) -> None:
    words = "train_dreambooth.py --pretrained_model_name_or_path CompVis/stable-diffusion-v1-4 --resolution 512"
    assert any("--set_grads_to_none frees them" in note for note in read(tmp_path, words).notes)
    assert not any("set_grads" in note for note in read(tmp_path, f"{words} --set_grads_to_none").notes)


Z_IMAGE = "train_dreambooth_lora_z_image.py --pretrained_model_name_or_path Tongyi-MAI/Z-Image --mixed_precision bf16"


def test_a_pipeline_is_offloaded_or_put_on_the_gpu_whole_by_the_script(tmp_path: Path) -> None:
    found = read(tmp_path, f"{Z_IMAGE} --validation_prompt cat")
    assert found.strategy["validation_mode"] == "offload"
    fields = found.job | found.strategy | {"gpus": 1, "nodes": 1}
    assert settings_for(DIALECT, fields)["--validation_prompt"]
    with pytest.raises(InexpressibleError, match="offloads each of its models"):
        settings_for(DIALECT, fields | {"validation_mode": "on"})
    assert read(tmp_path, f"{SD3} --validation_prompt cat").strategy["validation_mode"] == "on"


BNB_4 = '{"load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}'


def test_a_change_keeps_what_the_version_says_already(tmp_path: Path) -> None:
    """A base in NF4 with scales in fp32: what leaves out the last sample, or the text encoder, is one part more."""
    (tmp_path / "bnb.json").write_text(BNB_4)
    words = f"{FLUX_2} --mixed_precision bf16 --gradient_checkpointing --bnb_quantization_config_path bnb.json"
    found = read(tmp_path, f"{words} --validation_prompt cat --remote_text_encoder")
    assert found.version == "nf4-scales-in-fp32-remote-te"
    (skips,) = (move for move in DIALECT.moves if move.words_for and move.words_for({}) == ["--skip_final_inference"])
    fields = found.job | found.strategy | {"version": found.version}
    assert skips.when(fields) and skips.steps(fields) == ({"version": "nf4-scales-in-fp32-in-loop-remote-te"},)
    (remote,) = (move for move in DIALECT.moves if move.words_for and move.words_for({}) == ["--remote_text_encoder"])
    assert not remote.when(fields) and remote.when(fields | {"version": "nf4-scales-in-fp32"})
    z_image = read(tmp_path, Z_IMAGE)
    assert not remote.when(z_image.job | z_image.strategy | {"version": ""})


SANA = "train_dreambooth_lora_sana.py --pretrained_model_name_or_path Efficient-Large-Model/Sana_1600M_1024px_diffusers"


def test_an_encoder_that_the_script_holds_goes_by_offload_beside_cached_latents(tmp_path: Path) -> None:
    held = read(tmp_path, f"{SANA} --cache_latents")
    assert (held.strategy["text_encoder"], held.strategy["vae"]) == ("resident", "cached")
    settings = settings_for(DIALECT, held.job | held.strategy | {"gpus": 1, "nodes": 1, "text_encoder": "cached"})
    assert settings["--offload"] is True and settings["--cache_latents"] is True
    away = read(tmp_path, f"{SANA} --cache_latents --offload")
    assert (away.strategy["text_encoder"], away.strategy["vae"]) == ("cached", "cached")


SD3_FULL = "train_dreambooth_sd3.py --pretrained_model_name_or_path stabilityai/stable-diffusion-3-medium-diffusers"


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (f"{SD3} --resolution 512 --validation_prompt x", (1024, 1024)),
        (f"{SD3} --resolution 1024 --validation_prompt x", None),
        (f"{SD3} --resolution 512", None),
        (f"{SD3_FULL} --resolution 256 --validation_prompt x", (1024, 1024)),
        ("train_text_to_image.py --pretrained_model_name_or_path stabilityai/stable-diffusion-2-1 --resolution 512 "
         "--validation_prompts x y", (768, 768)),
        ("train_cogvideox_lora.py --pretrained_model_name_or_path THUDM/CogVideoX-2b --height 256 --width 256 "
         "--max_num_frames 17 --validation_prompt x", None),
    ],
)  # fmt: skip
def test_samples_have_the_pipelines_own_size(tmp_path: Path, words: str, size: tuple[int, int] | None) -> None:
    """No script for images passes a height (58eb52c ``pipeline_args``)."""
    found = read(tmp_path, words).job["validation"]
    assert (found and (found["height"], found["width"])) == size


def test_samples_of_another_size_are_not_written(tmp_path: Path) -> None:
    found = read(tmp_path, f"{SD3} --resolution 512 --validation_prompt x")
    fields = found.job | found.strategy | {"gpus": 1, "nodes": 1}
    assert settings_for(DIALECT, fields)["--validation_prompt"]
    for shape in (None, {**fields["validation"], "height": 512}):
        with pytest.raises(InexpressibleError, match="the pipeline's own size"):
            settings_for(DIALECT, fields | {"validation": shape})
    assert settings_for(DIALECT, fields | {"height": 1024, "width": 1024, "validation": None})["--validation_prompt"]
