"""Settings that a trainer's own assertions refuse: `check` says that the command does not start, and no change that it
offers, and no plan that is exported, has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import nearest_fields
from planner.dialects.base.script import from_file
from planner.foreign.case import Case, read_case
from planner.foreign.check import check_case
from tests.command_line import typed

FLUX = """accelerate launch flux_train_network.py --pretrained_model_name_or_path flux1-dev.safetensors \\
  --network_dim 16 --network_module networks.lora_flux --mixed_precision bf16 --sdpa --resolution 1024 \\
  --gradient_checkpointing --network_train_unet_only --optimizer_type AdamW8bit --cache_latents \\
  --cache_text_encoder_outputs """
SDXL = """accelerate launch sdxl_train_network.py --pretrained_model_name_or_path sd_xl_base_1.0.safetensors \\
  --network_module networks.lora --network_dim 16 --mixed_precision bf16 --sdpa --resolution 1024 \\
  --network_train_unet_only --optimizer_type AdamW8bit --cache_latents """
LUMINA = """accelerate launch lumina_train_network.py --pretrained_model_name_or_path lumina-image-2.safetensors \\
  --network_module networks.lora_lumina --network_dim 16 --mixed_precision bf16 --sdpa --resolution 1024 \\
  --network_train_unet_only --gradient_checkpointing --cache_latents --cache_text_encoder_outputs """
WAN = """accelerate launch src/musubi_tuner/wan_train_network.py --task t2v-A14B --dit low.safetensors --fp8_base \\
  --network_module networks.lora_wan --network_dim 16 --mixed_precision bf16 --gradient_checkpointing """
BOTH = "--dit_high_noise high.safetensors --fp8_scaled --sdpa "


def case_of(folder: Path, words: str, gpu: str = "24GB") -> Case:
    (folder / "a.sh").write_text(words + "\n")
    return read_case(*dialects.read_script(from_file(folder / "a.sh")), {}, {"gpu": gpu})


@pytest.mark.parametrize(
    ("command", "flag", "words"),
    [
        (WAN + BOTH + "--offload_inactive_dit --blocks_to_swap 20", "--offload_inactive_dit", "with --blocks_to_swap"),
        (WAN.replace("--fp8_base", "") + "--sdpa --fp8_scaled", "--fp8_scaled", "without --fp8_base"),
        (WAN, "--sdpa", "missing"),
        (FLUX + "--cpu_offload_checkpointing --blocks_to_swap 18", "--cpu_offload_checkpointing", "--blocks_to_swap"),
        (FLUX + "--shuffle_caption", "--shuffle_caption", "--cache_text_encoder_outputs"),
        (FLUX + "--caption_dropout_rate 0.1", "--caption_dropout_rate", "--cache_text_encoder_outputs"),
        (SDXL + "--full_fp16", "--full_fp16", "without --mixed_precision fp16"),
        (SDXL + "--random_crop", "--random_crop", "with --cache_latents"),
        (SDXL + "--fused_backward_pass", "--fused_backward_pass", "without --optimizer_type Adafactor"),
    ],
)
def test_what_the_trainers_code_refuses_is_said(command: str, flag: str, words: str, tmp_path: Path) -> None:
    (refused,) = case_of(tmp_path, command).refused
    assert refused.flag == flag
    assert words in refused.why


def test_the_command_says_so_first_and_ends_with_5(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SDXL + "--gradient_checkpointing --full_fp16\n")
    done = typed("check", str(tmp_path / "a.sh"), "--gpu", "24GB", code=5)
    assert done.stdout.startswith("does not start: --full_fp16 is refused without --mixed_precision fp16")
    answer = json.loads(typed("check", str(tmp_path / "a.sh"), "--gpu", "24GB", "--json", code=5).stdout)
    assert [each["flag"] for each in answer["refused"]] == ["--full_fp16"]


def test_a_data_sets_file_may_say_it(tmp_path: Path) -> None:
    text = "[general]\nresolution = 1024\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\nshuffle_caption = true\n"
    (tmp_path / "data.toml").write_text(text)
    command = FLUX.replace("--resolution 1024", "--dataset_config data.toml")
    assert [each.flag for each in case_of(tmp_path, command).refused] == ["shuffle_caption"]


@pytest.mark.parametrize(
    "command",
    [
        WAN + BOTH + "--offload_inactive_dit",
        WAN + BOTH + "--blocks_to_swap 20",
        WAN + "--flash_attn --offload_inactive_dit --blocks_to_swap 20",  # one expert: nothing is inactive
        FLUX + "--cpu_offload_checkpointing",
        FLUX + "--blocks_to_swap 18",
        FLUX.replace("--cache_text_encoder_outputs", "") + "--shuffle_caption",
        SDXL + "--full_bf16",
        SDXL.replace("--cache_latents", "") + "--random_crop",
        LUMINA + "--shuffle_caption",
    ],
)
def test_what_it_takes_is_not(command: str, tmp_path: Path) -> None:
    assert case_of(tmp_path, command).refused == ()


def test_blocks_are_swapped_instead_of_what_they_clash_with(tmp_path: Path) -> None:
    found = check_case(case_of(tmp_path, FLUX + "--cpu_offload_checkpointing", "12GB"))
    swapping = [fix for fix in found.fixes if any("--blocks_to_swap" in words for words in fix.change)]
    assert swapping
    for fix in swapping:
        assert "without --cpu_offload_checkpointing" in fix.change
        assert fix.case.strategy.gradient_checkpointing == "full"


def test_both_experts_swap_and_neither_is_moved_whole(tmp_path: Path) -> None:
    found = check_case(case_of(tmp_path, WAN + BOTH + "--offload_inactive_dit", "12GB"))
    changes = [*found.fixes, *([found.least] if found.least else [])]
    swapping = [fix for fix in changes if fix.case.strategy.swap_blocks]
    assert swapping
    assert all("without --offload_inactive_dit" in fix.change for fix in swapping)


@pytest.mark.parametrize(("name", "command"), [("sd-scripts", FLUX), ("musubi-tuner", WAN + BOTH)])
def test_no_plan_for_the_trainer_has_both(name: str, command: str, tmp_path: Path) -> None:
    dialect, fields = dialects.dialect(name), case_of(tmp_path, command).fields
    both = {"swap_blocks": 20, "gradient_checkpointing": "offload"}
    if fields["inactive_expert"] == "gpu":
        both = {"swap_blocks": 20, "inactive_expert": "cpu"}
    nearest = nearest_fields(dialect, fields | both)
    assert dialect.clashing(fields | both)
    assert not dialect.clashing(nearest)
    assert nearest["swap_blocks"] == 20
