"""Block swap as each trainer counts it: which blocks leave, how many it takes, and what its own code holds then."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.swapped_stacks import split_of, splits
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.block_swap import setting, swapped
from planner.dialects.base.dialect import nearest_fields, settings_for
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import Case, read_case
from planner.foreign.export import export
from planner.foreign.pricing import Pricing
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.units import GIB

FLUX = """accelerate launch --mixed_precision bf16 flux_train_network.py --network_dim 16 --fp8_base --sdpa \\
  --pretrained_model_name_or_path flux1-dev.safetensors --network_module networks.lora_flux --gradient_checkpointing \\
  --resolution 1024 --cache_latents --cache_text_encoder_outputs """


def case_of(folder: Path, words: str, gpu: str = "24GB") -> Case:
    (folder / "a.sh").write_text(FLUX + words + "\n")
    return read_case(*dialects.read_script(from_file(folder / "a.sh")), {}, {"gpu": gpu})


@pytest.mark.parametrize(
    ("trainer", "model", "blocks", "split"),
    [
        ("sd-scripts", "flux.1-dev", 16, (8, 16)),
        ("sd-scripts", "flux.1-dev", 35, (17, 36)),
        ("musubi-tuner", "flux.1-kontext-dev", 34, (17, 35)),
        ("musubi-tuner", "hunyuan-video", 20, (10, 21)),
        ("musubi-tuner", "hunyuan-video", 38, (19, 39)),
        ("diffusion-pipe", "hunyuan-video", 36, (18, 37)),
        ("diffusion-pipe", "flux.1-dev", 7, (3, 9)),
        # swap_ratio 6: round(29 / 4) is 7, one more than leaves 2 of 8; then 42 + 2
        ("musubi-tuner", "flux.2-dev", 29, (6, 44)),
        ("musubi-tuner", "flux.2-dev", 1, (0, 1)),
        ("musubi-tuner", "z-image", 28, (0, 0, 28)),
        ("diffusion-pipe", "wan2.1-t2v-14b", 38, (38,)),
    ],
)
def test_each_stack_gives_as_many_blocks_as_the_trainers_own_code_says(
    trainer: str, model: str, blocks: int, split: tuple[int, ...]
) -> None:
    assert splits(trainer, lookup.model(model))[blocks] == split
    assert swapped(trainer, model, blocks) == sum(split)
    written = setting(trainer, {"model": model, "swap_blocks": sum(split)})
    assert splits(trainer, lookup.model(model))[written] == split


@pytest.mark.parametrize(
    ("trainer", "model", "most"),
    [
        ("sd-scripts", "flux.1-dev", 35),
        ("musubi-tuner", "flux.1-kontext-dev", 34),
        ("musubi-tuner", "hunyuan-video", 38),
        ("musubi-tuner", "hunyuan-video-1.5", 51),
        ("musubi-tuner", "wan2.2-i2v-a14b", 39),
        ("musubi-tuner", "qwen-image", 59),
        ("diffusion-pipe", "hunyuan-video", 36),
        ("diffusion-pipe", "wan2.1-t2v-14b", 38),
    ],
)
def test_more_than_the_trainers_assertion_takes_is_refused(trainer: str, model: str, most: int) -> None:
    assert max(splits(trainer, lookup.model(model))) == most
    with pytest.raises(VplanError, match=f"stops at more than {most} of") as caught:
        swapped(trainer, model, most + 1)
    assert caught.value.fix == f"write blocks_to_swap {most} or less"
    with pytest.raises(InexpressibleError) as refused:
        setting(trainer, {"model": model, "swap_blocks": lookup.model(model).blocks})
    (value,) = refused.value.values
    assert value.instead == swapped(trainer, model, most)


def test_diffusion_pipe_swaps_no_blocks_of_models_without_an_offloader() -> None:
    with pytest.raises(VplanError, match="diffusion-pipe swaps no blocks of LTX"):
        swapped("diffusion-pipe", "ltx-video-2b", 4)
    with pytest.raises(InexpressibleError, match="swaps no blocks"):
        setting("diffusion-pipe", {"model": "sdxl", "swap_blocks": 2})


def test_a_number_between_two_settings_is_priced_and_offered_as_the_next_more() -> None:
    flux = lookup.model("flux.1-dev")
    assert split_of("sd-scripts", flux, 25) == (8, 18) == split_of("sd-scripts@1", flux, 26)
    assert split_of("vplan", flux, 25) is None
    with pytest.raises(InexpressibleError) as refused:
        setting("sd-scripts", {"model": "flux.1-dev", "swap_blocks": 25})
    assert refused.value.values[0].instead == 26


REHEARSED = {0: (14.61, 17.05), 16: (10.06, 11.11), 22: (8.29, 9.38), 28: (6.53, 7.55)}
"""Of sd-scripts' own FLUX code at 48d368f on a virtual GPU, LoRA of rank 16, fp8 base, 1024 px: blocks_to_swap -> GiB
allocated and reserved."""


@pytest.mark.parametrize("blocks", REHEARSED)
def test_flux_in_sd_scripts_holds_what_its_own_code_holds(blocks: int, tmp_path: Path) -> None:
    case = case_of(tmp_path, f"--blocks_to_swap {blocks}")
    peaks = Pricing(case).outcome(case).estimate.phases["train"]
    allocated, reserved = REHEARSED[blocks]
    assert peaks.allocated_bytes / GIB / allocated == pytest.approx(1, abs=0.025)
    assert peaks.reserved_bytes / GIB / reserved == pytest.approx(1, abs=0.07)


@pytest.mark.parametrize(("gpu", "blocks"), [("12GB", 16), ("10GB", 22), ("8GB", 28)])
def test_the_cards_that_its_documentation_names_are_enough(gpu: str, blocks: int, tmp_path: Path) -> None:
    """docs/flux_train_network.md, "VRAM Usage Optimization": 8-bit AdamW, and T5-XXL in fp8 under 12 GB."""
    words = f"--blocks_to_swap {blocks} --optimizer_type adamw8bit --t5xxl t5xxl_fp8_e4m3fn.safetensors"
    case = case_of(tmp_path, words, gpu)
    assert case.strategy.text_encoder_dtype == "fp8"
    assert Pricing(case).outcome(case).estimate.verdict != "no"


def test_split_mode_swaps_18_unless_a_number_is_given(tmp_path: Path) -> None:
    assert case_of(tmp_path, "--split_mode").strategy.swap_blocks == 9 + 18
    assert case_of(tmp_path, "--split_mode --blocks_to_swap 4").strategy.swap_blocks == 2 + 4
    assert case_of(tmp_path, "--split_mode --blocks_to_swap 0").strategy.swap_blocks == 0


@pytest.mark.parametrize(
    ("trainer", "model"), [("musubi-tuner", "flux.1-kontext-dev"), ("musubi-tuner", "hunyuan-video"),
                           ("diffusion-pipe", "hunyuan-video"), ("sd-scripts", "flux.1-dev")],
)  # fmt: skip
def test_no_export_writes_more_blocks_than_the_trainer_takes(trainer: str, model: str) -> None:
    profile = lookup.model(model)
    height, width = profile.shape.resolutions[0]
    frames = profile.shape.default_frames if profile.kind == "video" else 1
    job = Job(model=model, method="lora", frames=frames, height=height, width=width)
    machine = Machine(gpu="h100-80gb", host_ram=1 << 40)
    strategy = Strategy(gradient_checkpointing="full", swap_blocks=profile.blocks - 1)
    exported = export(Plan(job=job, strategy=strategy, machine=machine), trainer, take_nearest=True)
    dialect = dialects.dialect(trainer)
    fields = nearest_fields(dialect, {**exported.plan.job.__dict__, **exported.plan.strategy.__dict__,
                                      "gpus": 1, "nodes": 1, "version": ""})  # fmt: skip
    written = [value for name, value in settings_for(dialect, fields).items() if name.endswith("blocks_to_swap")]
    assert written == [max(splits(trainer, profile))]
