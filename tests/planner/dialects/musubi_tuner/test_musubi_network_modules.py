"""musubi-tuner's LoKr and LoHa: the LoRA with as many numbers, and what their whole changes take."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.pricing import Pricing
from planner.units import GIB

DATA = """[general]
resolution = [416, 240]
[[datasets]]
video_directory = "videos"
target_frames = [17]
"""
COMMAND = (
    "accelerate launch src/musubi_tuner/wan_train_network.py --task t2v-1.3B --dit a.safetensors --sdpa "
    "--dataset_config data.toml --mixed_precision bf16 --gradient_checkpointing "
)
SIDE, INNER, BLOCKS = 1536, 8960, 30  # of Wan 2.1 1.3B: eight square layers of a block, and two between these sides


def translated(words: str, folder: Path) -> Translation:
    (folder / "train.sh").write_text(COMMAND + words)
    (folder / "data.toml").write_text(DATA)
    return translate(*dialects.read_script(from_file(folder / "train.sh")))


def allocated(words: str, folder: Path, data: str = DATA, checkpoints: bool = True) -> int:
    command = COMMAND if checkpoints else COMMAND.replace("--gradient_checkpointing ", "")
    (folder / "train.sh").write_text(command + words)
    (folder / "data.toml").write_text(data)
    case = read_case(*dialects.read_script(from_file(folder / "train.sh")), {}, {"gpu": "h200", "host_ram": 64 * GIB})
    return Pricing(case).outcome(case).estimate.phases["train"].allocated_bytes


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        ("--network_module networks.loha --network_dim 8", 16),
        ("--network_module networks.lokr --network_dim 10000 --network_args factor=8", 16),
        ("--network_module networks.lokr --network_dim 4", 1),
        ("--network_module networks.lora_wan --network_dim 8", 8),
    ],
)
def test_adapters_are_priced_as_the_lora_with_as_many_numbers(words: str, rank: int, tmp_path: Path) -> None:
    told = translated(words, tmp_path)
    assert told.job["lora_rank"] == rank
    assert any(f"priced as a LoRA of rank {rank}," in note for note in told.notes) == ("lora_wan" not in words)


def test_their_numbers_are_those_of_all_layers_of_a_block(tmp_path: Path) -> None:
    factor = 8
    square, wide = (SIDE // factor) ** 2, SIDE // factor * (INNER // factor)
    numbers = 8 * square + 2 * wide + 10 * factor**2
    told = translated(f"--network_module networks.lokr --network_dim 10000 --network_args factor={factor}", tmp_path)
    assert told.job["lora_rank"] == round(numbers / (8 * 2 * SIDE + 2 * (SIDE + INNER)))


def more_than_lora(words: str, folder: Path, data: str = DATA, checkpoints: bool = True) -> int:
    """What is allocated beyond a LoRA with as many numbers."""
    rank = translated(words, folder).job["lora_rank"]
    lora = f"--network_module networks.lora_wan --network_dim {rank}"
    return allocated(words, folder, data, checkpoints) - allocated(lora, folder, data, checkpoints)


LOKR, LOHA = "--network_module networks.lokr --network_dim 4", "--network_module networks.loha --network_dim 2"


def test_each_block_keeps_its_changes_in_16_bits_but_those_of_the_prompts_keys_and_values(tmp_path: Path) -> None:
    one = more_than_lora(LOKR, tmp_path)
    every = more_than_lora(LOKR, tmp_path, checkpoints=False)
    kept = 2 * (6 * SIDE * SIDE + 2 * SIDE * INNER)
    assert every - one == pytest.approx((BLOCKS - 1) * kept, rel=0.03)


def test_in_backward_the_largest_has_its_gradients(tmp_path: Path) -> None:
    """LoKr three in fp32, LoHa three in fp32 and two in 16 bits."""
    loha, lokr = more_than_lora(LOHA, tmp_path), more_than_lora(LOKR, tmp_path)
    assert loha - lokr == pytest.approx(4 * SIDE * INNER, rel=0.05)


def test_where_outputs_of_layers_are_larger_than_changes_it_is_less_than_lora(tmp_path: Path) -> None:
    """LoRA holds its adapter's output beside two multiples of it, LoKr and LoHa do not."""
    larger = DATA.replace("[17]", "[81]").replace("[416, 240]", "[832, 480]")
    for words in (LOKR, LOHA):
        assert more_than_lora(words, tmp_path) > 0
        assert more_than_lora(words, tmp_path, larger) < 0


def test_of_wans_feed_forward_left_out_nothing_counts(tmp_path: Path) -> None:
    narrow = "--network_module networks.lokr --network_dim 10000 --network_args factor=8 exclude_patterns=[r'.*ffn.*']"
    told = translated(narrow, tmp_path)
    assert told.job["lora_targets"] is None
    assert told.job["lora_rank"] == round(((SIDE // 8) ** 2 + 64) / (2 * SIDE))


def test_with_a_time_embedding_of_all_tokens_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=r"networks\.lokr with --force_v2_1_time_embedding is not priced"):
        translated("--network_module networks.lokr --force_v2_1_time_embedding", tmp_path)
