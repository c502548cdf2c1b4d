"""planner/layout/trainer_terms/sd_scripts: what blocks before the first adapter keep, counted by hand, and what
attention holds that is told no kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.catalog.shapes import grid
from planner.dialects.base.script import from_file
from planner.errors import NotEstimatedError
from planner.foreign.case import Case, read_case
from planner.foreign.check import check_case
from planner.foreign.pricing import Pricing
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.units import GIB

FLAGS = (
    "--train_batch_size 1 --network_module networks.lora --mixed_precision bf16 --cache_latents --sdpa --network_dim 16"
)
NAME = "kept for a gradient before adapters"


def run_of(folder: Path, script: str, *flags: str) -> Run:
    words = ["accelerate launch", script, "--pretrained_model_name_or_path model", FLAGS, *flags]
    (folder / "train.sh").write_text(" ".join([*words, "--network_train_unet_only"]))
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    case = read_case(dialect, given, {}, {"gpu": "80GB"})
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


SCORES = {"--gradient_checkpointing": (19.679, 21.915), "": (22.391, 40.475)}
"""Of kohya's own U-Net of SDXL at 48d368f (library/sdxl_original_unet.py) on a virtual GPU, torch 2.13: one image of
1024x1024 in bf16 over fp32 weights, forward and backward; GiB allocated with ``set_use_sdpa`` and without."""


def full(folder: Path, *flags: str, gpu: str = "180GiB") -> Case:
    words = "sdxl_train.py --pretrained_model_name_or_path m --resolution 1024,1024 --train_batch_size 1"
    kept = "--mixed_precision bf16 --cache_latents --cache_text_encoder_outputs"
    (folder / "train.sh").write_text(" ".join(["accelerate launch", words, kept, *flags]))
    return read_case(*dialects.read_script(from_file(folder / "train.sh")), {}, {"gpu": gpu})


@pytest.mark.parametrize("flag", SCORES)
def test_scores_that_are_held_whole_take_what_they_do_in_its_own_code(flag: str, tmp_path: Path) -> None:
    with_kernel, whole = (
        Pricing(case).outcome(case).estimate.phases["train"].allocated_bytes
        for case in (full(tmp_path, flag, "--sdpa"), full(tmp_path, flag))
    )
    seen = SCORES[flag][1] - SCORES[flag][0]
    assert (whole - with_kernel) / GIB == pytest.approx(seen, rel=0.05)


def test_a_sample_s_scores_are_whole_too(tmp_path: Path) -> None:
    """Kohya's own U-Net of SDXL in bf16, without gradients: a sample of 1024x1024 with guidance, in one batch of two,
    takes 5.257 GiB with ``set_use_sdpa`` and 8.220 without, over weights of 4.893 and 4.923."""
    samples = ("--sample_prompts p.txt", "--sample_every_n_steps 10")
    with_kernel, whole = (
        Pricing(case).outcome(case).estimate.phases["denoise"].allocated_bytes
        for case in (full(tmp_path, "--sdpa", *samples), full(tmp_path, *samples))
    )
    assert (whole - with_kernel) / GIB == pytest.approx((8.220 - 4.923) - (5.257 - 4.893), rel=0.03)


@pytest.mark.parametrize("samples", [(), ("--sample_prompts p.txt", "--sample_every_n_steps 10")])
def test_every_stage_frees_the_scores_that_it_makes(samples: tuple[str, ...], tmp_path: Path) -> None:
    case = full(tmp_path, *samples)
    run = lay_out(case.configuration, load_facts(case.configuration, case.model, case.gpu),
                  grid(case.model, case.job), case.trainer)  # fmt: skip
    name = "attention scores"
    made = [event for event in run.step.ops if event >= 0 and run.program.op[event] == name]
    freed = [~event for event in run.step.ops if event < 0 and run.program.op[~event] == name]
    assert sorted(made) == sorted(freed)
    for _, stage in run.phases.validation:
        sample = [event for event in stage.ops if run.program.op[max(event, ~event)] == name]
        assert sorted(event for event in sample if event >= 0) == sorted(~event for event in sample if event < 0)
    largest = 10 * (64 * 64) ** 2  # scores of the finest level with attention: ten heads, each position with each
    assert max(run.sizes[event] for event in made) == 4 * largest


def test_the_first_change_is_a_kernel_for_attention(tmp_path: Path) -> None:
    for gpu in ("24GB", "48GB"):
        fixes = check_case(full(tmp_path, gpu=gpu)).fixes
        assert fixes and all(fix.change[0] == "--sdpa" for fix in fixes)
    with_kernel = check_case(full(tmp_path, "--xformers", gpu="24GB"))
    assert all("--sdpa" not in fix.change for fix in with_kernel.fixes)


def test_whole_scores_of_another_trainer_are_refused(tmp_path: Path) -> None:
    case = full(tmp_path)
    facts = load_facts(case.configuration, case.model, case.gpu)
    with pytest.raises(NotEstimatedError, match="attention math is not estimated yet"):
        lay_out(case.configuration, facts, grid(case.model, case.job), "vplan")
