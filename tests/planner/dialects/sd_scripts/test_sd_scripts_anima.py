"""planner/dialects/sd_scripts_anima: what sd-scripts' commands for Anima mean, and what its code holds beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.estimate.estimate import assess
from planner.foreign.case import read_case
from planner.foreign.pricing import Pricing

COMMAND = (
    "accelerate launch --num_processes 1 anima_train_network.py --pretrained_model_name_or_path a.safetensors "
    "--qwen3 q.safetensors --vae v.safetensors --network_train_unet_only --network_module networks.lora_anima "
    "--mixed_precision bf16 --cache_text_encoder_outputs --cache_latents "
)
"""Of docs/anima_train_network.md."""
CONDITIONER = 2 * 134_663_680
KEPT = 24 * 6 * 512 * 1024 * 2


def command(folder: Path, words: str) -> Translation:
    (folder / "train.sh").write_text(COMMAND + words)
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    assert dialect.name == "sd-scripts@anima"
    return translate(dialect, given)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", {"model": "anima", "method": "lora", "lora_rank": 4, "weights_dtype": "bf16", "autocast": "bf16"}),
        ("", {"lora_targets": ("to_k", "to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")}),
        ("--fp8_base", {"weights_dtype": "bf16"}),
        ("--full_bf16 --network_dim 16", {"adapter_dtype": "bf16", "lora_rank": 16}),
        ("--gradient_checkpointing", {"gradient_checkpointing": "full"}),
        ("--unsloth_offload_checkpointing", {"gradient_checkpointing": "offload"}),
        ("--gradient_checkpointing --blocks_to_swap 26", {"swap_blocks": 26}),
        ("--attn_mode flash", {"attention": "flash"}),
        ("--t5_max_token_length 256", {"text_tokens": 256}),
        ("--resolution 1040,1000", {"height": 992, "width": 1040}),
    ],
)
def test_settings_become_fields(words: str, fields: dict[str, Any], tmp_path: Path) -> None:
    found = command(tmp_path, words)
    together = found.job | found.strategy
    assert {name: together[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--blocks_to_swap 27", "more than 26"),
        ("--gradient_checkpointing --cpu_offload_checkpointing", "ends in the second block"),
        ("--unsloth_offload_checkpointing --blocks_to_swap 4", "stops beside"),
        ("--network_module networks.lora", "is not priced"),
        ("--network_args train_llm_adapter=True", "adapters on other layers"),
        ("--attn_mode sageattn", "it cannot train"),
    ],
)
def test_what_the_script_stops_at_or_is_not_priced_is_refused(words: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=fault):
        command(tmp_path, words)


def test_a_config_alone_is_known_by_the_encoder_it_names(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('qwen3 = "q.safetensors"\nnetwork_module = "networks.lora_anima"\n')
    dialect, _ = dialects.read_script(from_file(tmp_path / "a.toml"))
    assert dialect.name == "sd-scripts@anima"


def test_what_does_nothing_is_said(tmp_path: Path) -> None:
    found = command(tmp_path, "--fp8_base --vae_chunk_size 64 --vae_disable_cache")
    assert [remark.flag for remark in found.ineffective] == ["--fp8_base"]
    assert any("--vae_chunk_size is not priced" in note for note in found.notes)
    assert any("7 % less" in note for note in found.notes)


@pytest.mark.parametrize("words", ["", "--gradient_checkpointing"])
def test_the_conditioner_is_in_the_model_and_autograd_keeps_of_it(words: str, tmp_path: Path) -> None:
    """Beside a model without it: its weights from loading on, and behind checkpoints what it made of the prompt."""
    (tmp_path / "train.sh").write_text(COMMAND + words)
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    case = read_case(dialect, given, {}, {"gpu": "80GB"})
    facts = Pricing(case).facts(case.configuration)
    without = facts._replace(model=facts.model.replace(traits=facts.model.traits.replace(trainers={})))
    theirs, bare = (assess(case.configuration, each, case.trainer).estimate for each in (facts, without))
    for phase, more in (("load", CONDITIONER), ("train", CONDITIONER + (KEPT if words else 0))):
        assert theirs.phases[phase].allocated_bytes - bare.phases[phase].allocated_bytes == more
