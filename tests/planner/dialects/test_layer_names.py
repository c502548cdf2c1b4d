"""Adapters on layers that a command or a config names: whose names they are, and how they are matched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.dialects.base.layer_names import chosen_layers, in_wan
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import Case, read_case
from planner.foreign.pricing import Pricing
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.units import GIB

WAN = "--pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B --config_path config/wan2.1/wan_civitai.yaml"
FLUX = "--pretrained_model_name_or_path black-forest-labs/FLUX.1-dev"


def case(folder: Path, name: str, text: str) -> Case:
    (folder / name).write_text(text)
    dialect, given = dialects.read_script(from_file(folder / name))
    return read_case(dialect, given, {}, {"gpu": "80GB"})


def videox(folder: Path, script: str, words: str) -> tuple[str, ...] | None:
    command = f"accelerate launch --mixed_precision=bf16 scripts/{script}/train_lora.py --train_batch_size 1 {words}"
    found = case(folder, "train.sh", command)
    assert found.strategy.adapter_dtype == "bf16"
    return found.job.lora_targets


def test_wan_has_names_of_its_own() -> None:
    assert in_wan("blocks.0.attn1.to_out.0") == "blocks.0.self_attn.o"
    assert in_wan("blocks.12.attn2.add_k_proj") == "blocks.12.cross_attn.k_img"
    assert in_wan("blocks.3.ffn.net.0.proj") == "blocks.3.ffn.0"
    assert in_wan("condition_embedder.text_embedder.linear_1") == "condition_embedder.text_embedder.linear_1"


def test_videox_fun_names_ends_for_peft_and_parts_without(tmp_path: Path) -> None:
    names = "--target_name q,k,v,ffn.0,ffn.2"
    ends = videox(tmp_path, "wan2.1", f"{WAN} --use_peft_lora {names}")
    attention = [f"attn{number}.to_{letter}" for number in (1, 2) for letter in "kqv"]
    assert ends == (*attention, "ffn.net.0.proj", "ffn.net.2")
    # "k" is in "blocks"
    assert videox(tmp_path, "wan2.1", f"{WAN} {names}") == lookup.model("wan2.1-t2v-1.3b").lora.wide
    assert videox(tmp_path, "wan2.1", f"{WAN} --use_peft_lora --target_name q,k,v,o") is None
    every = videox(tmp_path, "wan2.1", WAN)
    assert every is not None and "ffn.net.2" in every and "proj_out" in every
    some = videox(tmp_path, "wan2.1", f"{WAN} {names} --lora_skip_name ffn,cross_attn")
    assert some == ("attn1.to_k", "attn1.to_out.0", "attn1.to_q", "attn1.to_v")


def test_names_that_no_layer_has_are_passed_over_as_in_peft(tmp_path: Path) -> None:
    found = videox(tmp_path, "flux", f"{FLUX} --use_peft_lora --target_name to_q,to_k,to_v,ff.0,ff.2")
    assert found == ("attn.to_k", "attn.to_q", "attn.to_v")


@pytest.mark.parametrize("model", ["wan2.1-t2v-14b", "flux.1-dev", "z-image", "hunyuan-video", "qwen-image"])
@pytest.mark.parametrize("wide", [False, True])
def test_what_is_written_for_videox_fun_is_read_back(model: str, wide: bool) -> None:
    dialect, profile = dialects.dialect("videox-fun"), lookup.model(model)
    targets = profile.lora.wide if wide and profile.lora.wide else None
    binding = next(each for each in dialect.bindings if "lora_targets" in each.fields)
    script = next(each for each in dialect.bindings if "script" in each.settings)
    model_words = next(each for each in dialect.bindings if "model" in each.fields)
    fields: dict[str, Any] = {"method": "lora", "model": model, "lora_targets": targets}
    written = {**binding.to_settings(fields), **script.to_settings(fields), **model_words.to_settings(fields)}
    assert written["--use_peft_lora"] is True
    assert binding.to_fields(written)["lora_targets"] == targets


def onetrainer(**changes: object) -> str:
    preset = {"training_method": "LORA", "base_model_name": "x", "resolution": "512", "model_type": "FLUX_DEV_1"}
    preset |= {f"text_encoder{number}": {"train": False} for number in ("", "_2", "_3", "_4")}
    return json.dumps(preset | {"train_dtype": "BFLOAT_16", "transformer": {"weight_dtype": "BFLOAT_16"}} | changes)


def test_layer_filter_of_onetrainer_is_words_or_expressions(tmp_path: Path) -> None:
    def targets(**changes: object) -> tuple[str, ...] | None:
        return case(tmp_path, "preset.json", onetrainer(**changes)).job.lora_targets

    assert set(targets(layer_filter="attn.to_q, proj_mlp") or ()) == {"attn.to_q", "proj_mlp"}
    expression = targets(layer_filter=r"^transformer_blocks\.\d\.attn\.to_[qk]$", layer_filter_regex=True)
    assert expression is not None and len(expression) == 20
    assert "transformer_blocks.9.attn.to_k" in expression
    with pytest.raises(VplanError, match="layer_filter"):
        targets(layer_filter="(", layer_filter_regex=True)


def test_prompts_of_onetrainer_are_as_long_as_it_cuts_them(tmp_path: Path) -> None:
    def tokens(**changes: object) -> int | None:
        return case(tmp_path, "preset.json", onetrainer(**changes)).job.text_tokens

    assert tokens() == 77
    assert tokens(text_encoder_2_sequence_length=256) == 256
    assert tokens(text_encoder_2_sequence_length=None) is None
    assert tokens(model_type="STABLE_DIFFUSION_3") == 154
    with pytest.raises(VplanError, match="text_encoder_2_sequence_length"):
        tokens(text_encoder_2_sequence_length="many")


def test_ai_toolkit_trains_the_layers_that_two_lists_leave(tmp_path: Path) -> None:
    def targets(arch: str, **kwargs: list[str]) -> tuple[str, ...] | None:
        process = {"type": "sd_trainer", "model": {"arch": arch, "name_or_path": "x"}}
        process |= {"network": {"type": "lora", "network_kwargs": kwargs}, "train": {"dtype": "bf16"}}
        text = json.dumps({"job": "extension", "config": {"name": "a", "process": [process]}})
        return case(tmp_path, "train.json", text).job.lora_targets

    two = [f"transformer.single_transformer_blocks.{number}.proj_out" for number in (7, 20)]
    only = targets("flux", only_if_contains=two)
    assert set(only or ()) == {"single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"}
    assert targets("flux", only_if_contains=["single_transformer_blocks$$7$$proj_out"]) == (
        "single_transformer_blocks.7.proj_out",
    ), "as its adapters are called"
    with pytest.raises(VplanError, match=r"leave no layer of FLUX.1 dev to train: 'only_if_contains nonsense'"):
        targets("flux", only_if_contains=["nonsense"])
    left = targets("qwen_image", ignore_if_contains=["img_mod", "txt_mod"])
    assert left == lookup.model("qwen-image").lora.wide


LAST_BEN = """job: extension
config:
  name: x
  process:
    - type: sd_trainer
      network: {type: lora, linear: 128, %s}
      datasets: [{folder_path: x, resolution: [1024], cache_latents_to_disk: true}]
      train: {dtype: bf16, optimizer: adamw8bit, gradient_checkpointing: true, cache_text_embeddings: true}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true, quantize: true, low_vram: true}
"""
TWO = '["transformer.single_transformer_blocks.7.proj_out", "transformer.single_transformer_blocks.20.proj_out"]'


def test_two_layers_of_ai_toolkits_page_are_priced(tmp_path: Path) -> None:
    """README.md, Training Specific Layers. Neither is among the layers that are recorded over a base in 8 bits."""
    few = case(tmp_path, "train.yaml", LAST_BEN % f"network_kwargs: {{only_if_contains: {TWO}}}")
    assert few.job.lora_targets is not None and len(few.job.lora_targets) == 2
    run = lay_out(few.configuration, load_facts(few.configuration), grid(few.model, few.job), few.trainer)
    added = [run.sizes[at] for at, op in enumerate(run.program.op) if op == "adapters on more layers"]
    assert added == [4 * 2 * 128 * (3072 + 15360)]
    usual = case(tmp_path, "train.yaml", LAST_BEN % "linear_alpha: 128")
    ends = [Pricing(each).outcome(each).estimate.phases["save"].allocated_bytes for each in (few, usual)]
    assert ends[0] < ends[1] - 2 * GIB


def test_a_list_one_level_up_does_nothing_and_is_told_so(tmp_path: Path) -> None:
    found = case(tmp_path, "train.yaml", LAST_BEN % f"only_if_contains: {TWO}")
    assert found.job.lora_targets is None and not found.invocation.unknown
    assert ("network.only_if_contains", "it is read as network.network_kwargs.only_if_contains alone") in (
        found.translation.ineffective
    )


def test_dropout_of_adapters_is_priced_where_it_is_recorded(tmp_path: Path) -> None:
    def simpletuner(**changes: object) -> Case:
        config = {"data_backend_config": "d.json", "model_type": "lora", "resolution": 512, "model_family": "sd3"}
        config |= {"gradient_checkpointing": False, "mixed_precision": "bf16"}
        return case(tmp_path, "config.json", json.dumps(config | changes))

    found = simpletuner()
    assert found.job.lora_dropout == 0.1 and not any("dropout" in note.lower() for note in found.notes)
    without = simpletuner(base_model_precision="nf4-bnb")
    assert without.job.lora_dropout == 0.0
    assert any("LoRA dropout 0.1 is not recorded" in note for note in without.notes)


def test_layers_are_named_by_their_place_in_a_block_only_where_that_means_no_others() -> None:
    profile = lookup.model("flux.1-dev")
    both = chosen_layers(profile, lambda layer: layer.endswith("attn.to_q"))
    single = chosen_layers(profile, lambda layer: layer.startswith("single") and layer.endswith("attn.to_q"))
    assert both == ("attn.to_q",)
    assert single is not None and len(single) == 38
    assert chosen_layers(profile, lambda layer: False) is None


def test_cogvideo_trains_the_layers_that_are_named(tmp_path: Path) -> None:
    words = "--model_path THUDM/CogVideoX-5b --model_name cogvideox-t2v --training_type lora --model_type t2v"
    words += " --train_resolution 49x480x720 --mixed_precision bf16"
    words += " --output_dir o --data_root d --caption_column p --video_column v --report_to none"

    def targets(more: str) -> tuple[str, ...] | None:
        return case(tmp_path, "train.sh", f"accelerate launch train.py {words} {more}").job.lora_targets

    assert targets("") is None and targets("--target_modules to_q to_k to_v to_out.0") is None
    assert targets("--target_modules to_q ff.net.2") == ("attn1.to_q", "ff.net.2")
    with pytest.raises(VplanError, match="names no layer of cogvideox-5b"):
        targets("--target_modules qkv")
