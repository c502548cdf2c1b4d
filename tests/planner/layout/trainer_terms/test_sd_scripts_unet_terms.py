"""planner/layout/trainer_terms/sd_scripts/unet.py: what blocks before the first adapter keep, counted by hand."""

from __future__ import annotations

from pathlib import Path

from planner import dialects
from planner.catalog.shapes import grid
from planner.dialects.base.script import from_file
from planner.foreign.case import settle
from planner.layout.inputs import load_facts
from planner.layout.pipeline import lay_out
from planner.layout.run import Run

FLAGS = (
    "--train_batch_size 1 --network_module networks.lora --mixed_precision bf16 --cache_latents --sdpa --network_dim 16"
)
NAME = "kept for the latents' gradient"


def run_of(folder: Path, script: str, *flags: str) -> Run:
    words = ["accelerate launch", script, "--pretrained_model_name_or_path model", FLAGS, *flags]
    (folder / "train.sh").write_text(" ".join([*words, "--network_train_unet_only"]))
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    case = settle(dialect, given, {}, {"gpu": "80GB"})
    facts = load_facts(case.configuration, case.model, case.gpu)
    return lay_out(case.configuration, facts, grid(case.model, case.job), case.trainer)


def kept(run: Run) -> list[int]:
    return [run.sizes[event] for event in run.step.ops if event >= 0 and run.program.op[event] == NAME]


def test_blocks_before_the_first_adapter_keep_what_their_backward_reads(tmp_path: Path) -> None:
    """SDXL's first block has two residual blocks of 320 channels at 128x128 and no attention. Each has two norms, which
    keep their input and output in fp32, and two convolutions, which keep theirs in 16 bits."""
    run = run_of(tmp_path, "sdxl_train_network.py", "--resolution 1024,1024")
    positions = 320 * 128 * 128
    sizes = kept(run)
    assert sizes.count(4 * positions) == 2 * 4
    assert sizes.count(2 * positions) >= 2 * 2
    assert sum(sizes) < (8 * 4 + 8 * 2) * positions
    freed = [~event for event in run.step.ops if event < 0 and run.program.op[~event] == NAME]
    assert len(freed) == len(sizes)


def test_checkpoints_keep_the_blocks_input_alone(tmp_path: Path) -> None:
    assert not kept(run_of(tmp_path, "sdxl_train_network.py", "--resolution 1024,1024 --gradient_checkpointing"))


def test_a_first_block_with_attention_has_adapters_itself(tmp_path: Path) -> None:
    assert not kept(run_of(tmp_path, "train_network.py", "--resolution 512,512"))
