"""planner/dialects/sd_scripts: what settings of sd-scripts' commands for FLUX mean, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import check_case

COMMAND = (
    "accelerate launch flux_train_network.py --pretrained_model_name_or_path flux1-dev.safetensors --clip_l c --ae a "
    "--t5xxl t --mixed_precision bf16 --cache_latents --cache_text_encoder_outputs "
)
FULL = COMMAND.replace("_network.py", ".py")


def translated(folder: Path, words: str) -> Translation:
    (folder / "train.sh").write_text(words)
    return translate(*dialects.read_script(from_file(folder / "train.sh")))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (COMMAND, {"text_tokens": None, "compile": "none", "optimizer": "adamw"}),
        (COMMAND + "--t5xxl_max_token_length 256", {"text_tokens": 256}),
        (COMMAND + "--torch_compile", {"compile": "full"}),
        (COMMAND + "--use_lion_optimizer", {"optimizer": "lion"}),
        (FULL + "--fused_backward_pass --optimizer_type Adafactor", {"optimizer_step": "backward"}),
        (COMMAND + "--fused_backward_pass --optimizer_type Adafactor", {"optimizer_step": "foreach"}),
        (COMMAND + "--vae_batch_size 1", {"vae": "cached"}),
        (COMMAND + "--network_weights a.safetensors --dim_from_weights --network_dim 32", {"lora_rank": 32}),
    ],
)
def test_settings_become_fields(words: str, fields: dict[str, Any], tmp_path: Path) -> None:
    found = translated(tmp_path, words)
    together = found.job | found.strategy
    assert {name: together[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--network_module networks.oft_flux", "'networks.oft_flux' is not priced"),
        ("--network_module lycoris.kohya", "'lycoris.kohya' is not priced"),
        ("--network_args train_t5xxl=True", "T5-XXL is trained"),
        ("--network_args img_attn_dim=64 split_qkv=True", "img_attn_dim is not priced"),
        ("--network_train_text_encoder_only", "text_encoder_only is not priced"),
        ("--vae_batch_size 4", "each image that is encoded at once takes as much"),
        ("--network_weights a.safetensors --dim_from_weights", "not priced without --network_dim"),
    ],
)
def test_what_is_not_priced_is_refused_by_name(words: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=why):
        translated(tmp_path, COMMAND + words)


def test_what_is_not_estimated_is_said(tmp_path: Path) -> None:
    def has(words: str, text: str) -> bool:
        return any(text in note for note in translated(tmp_path, COMMAND + words).notes)

    assert has("", "adapters on CLIP-L")
    assert not has("--network_train_unet_only", "adapters on CLIP-L")
    assert has("--network_args train_blocks=single", "train_blocks: some blocks have no adapters")
    assert not has("--network_args train_blocks=all split_qkv=False", "adapters where")
    assert has("--network_args split_qkv=True", "three adapters of the same rank")
    assert has("--model_type chroma --apply_t5_attn_mask", "--apply_t5_attn_mask: no mask is made")
    assert has("--text_encoder_batch_size 16", "--text_encoder_batch_size is not estimated")
    assert not has("--text_encoder_batch_size 1", "--text_encoder_batch_size")


def trained_bytes(folder: Path, words: str) -> int:
    """What a step of FLUX.1 at 1024 pixels holds at most."""
    (folder / "train.sh").write_text(COMMAND + "--network_train_unet_only --resolution 1024 " + words)
    case = read_case(*dialects.read_script(from_file(folder / "train.sh")), {}, {"gpu": "h200"})
    return check_case(case, search=False).outcome.estimate.phases["train"].allocated_bytes


TOKENS = 64 * 64 + 512
OF_NUMBERS = 2 * 24 * TOKENS**2
"""A mask for 24 heads in 16 bits: 972 MiB, seen on a virtual RTX 4090 and H100 (torch 2.13.0)."""


def test_a_mask_of_the_prompt_is_one_for_every_head_of_each_block(tmp_path: Path) -> None:
    checkpointed = "--gradient_checkpointing "
    plain, masked = (trained_bytes(tmp_path, checkpointed + mask) for mask in ("", "--apply_t5_attn_mask"))
    assert masked - plain == OF_NUMBERS
    plain, masked = (trained_bytes(tmp_path, mask) for mask in ("", "--apply_t5_attn_mask"))
    assert masked - plain == 57 * OF_NUMBERS
