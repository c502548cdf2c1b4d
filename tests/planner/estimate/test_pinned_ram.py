"""Pinned host RAM as a budget of its own, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.commands import cli
from planner.units import GIB

SWAPPED = "wan2.1-t2v-1.3b --gpu 24GB --frames 9 --gradient-checkpointing full --swap-blocks 20"


def answer(line: str, code: int = 0) -> dict[str, Any]:
    verb, *words = line.split()
    done = CliRunner().invoke(cli, [verb, "--json", *words])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_windows_needs_twice_what_is_pinned_and_linux_does_not() -> None:
    linux = answer(f"estimate {SWAPPED} --host-ram 64 --reserve 1")
    windows = answer(f"estimate {SWAPPED} --host-ram 64 --os windows")
    pinned = linux["host"]["pinned_bytes"]
    assert pinned == windows["host"]["pinned_bytes"] == linux["host"]["breakdown"]["weights"]
    assert linux["host"]["breakdown"]["pinning"] == 0
    assert windows["host_ram_bytes"] == max(2 * pinned, linux["host_ram_bytes"])
    assert sum(windows["host"]["breakdown"].values()) == windows["host_ram_bytes"]


def test_a_plan_that_pins_more_than_half_of_the_ram_is_refused_on_windows_alone() -> None:
    question = (
        "estimate wan2.1-t2v-14b --gpu 24GB --frames 9 --gradient-checkpointing full --swap-blocks 30 --host-ram 32"
    )
    assert answer(question)["verdict"] == "fits"
    for system in ("windows", "wsl"):
        refused = answer(f"{question} --os {system}", 3)
        assert (refused["verdict"], refused["limit"]) == ("no", "host")
        assert 2 * refused["host"]["pinned_bytes"] > 32 * GIB


def test_windows_promises_memory_for_mapped_weight_files_too() -> None:
    """FLUX.1 over fp8 by sd-scripts ran out of 31.9 GiB of host RAM on Windows (cocktailpeanut/fluxgym#417)."""
    line = "check --gpu rtx3090 --no-fixes --os {} -- accelerate launch flux_train_network.py --fp8_base --sdpa"
    line += " --pretrained_model_name_or_path flux1-dev.safetensors --t5xxl t5.safetensors --gradient_checkpointing"
    line += " --network_module networks.lora_flux --cache_text_encoder_outputs --cache_latents --mixed_precision bf16"
    linux, windows = (answer(line.format(system))["estimate"] for system in ("linux", "windows"))
    assert (linux["host"]["mapped_bytes"], windows["host"]["mapped_bytes"]) == (0, 2 * 11_901_408_320)
    assert windows["host_ram_bytes"] < 31 * GIB < windows["host_ram_bytes"] + windows["host"]["mapped_bytes"]
    told = CliRunner().invoke(cli, line.format("windows").split()).output
    assert "Windows counts 22.2 GiB of mapped weight files too" in " ".join(told.split())


def test_a_search_for_windows_pins_no_more_than_half() -> None:
    found = answer("suggest krea-2 --gpu 5080 --host-ram 32 --os windows")["plan"]
    assert found["verdict"] == "fits" and 2 * found["host"]["pinned_bytes"] <= 32 * GIB


@pytest.mark.parametrize(
    ("trainer", "low", "high"),
    [
        ("diffusion-pipe", 1.4, 1.6),  # 52 MB to 67, 142 to 268: 1.53 times
        ("musubi-tuner", 0.05, 0.3),  # two blocks' staging buffers alone
    ],
)
def test_trainers_pin_what_their_block_swap_does(trainer: str, low: float, high: float) -> None:
    question = "suggest wan2.1-t2v-14b --gpu 24GB --frames 9 --host-ram 128 --swap-blocks 20 --for"
    found = answer(f"{question} {trainer}")["plan"]
    swapped = 20 * 2 * 5120 * (8 * 5120 + 2 * 13824)  # bytes of 20 blocks' linear weights in bf16
    assert low * swapped < found["host"]["pinned_bytes"] < high * swapped


SPLIT = "estimate sd1.5 --gpu 2x24GB --host-ram 200GiB --gradient-checkpointing full --lora-rank 128"

REHEARSED = {
    "--sharding zero-2 --offload-optimizer cpu --gradient-accumulation 2": 417_095_680,
    "--sharding zero-3 --offload-optimizer cpu": 201_342_976,
    "--sharding zero-3 --offload-optimizer cpu --offload-params cpu": 2_424_479_744,
    "--sharding fsdp --offload-optimizer cpu --offload-params cpu": 2_396_127_232,
}
"""What two ranks of `vplan probe --steps 2` pinned on a virtual GPU (deepspeed 0.19.8, torch 2.13), a batch on its way
included."""


@pytest.mark.parametrize("words", REHEARSED)
def test_engines_pin_in_powers_of_two_and_leave_adams_states_pageable(words: str) -> None:
    host = answer(f"{SPLIT} {words}")["host"]
    assert host["pinned_bytes"] == pytest.approx(REHEARSED[words], rel=0.002)
    held = host["breakdown"]["weights"] + host["breakdown"]["optimizer"]
    trained = 25_509_888  # LoRA of rank 128, over both ranks
    pageable = 8 + 4 * ("zero-3" in words)  # two states, and stage 3's master
    assert held - host["pinned_bytes"] == pytest.approx(pageable * trained, rel=0.01)


@pytest.mark.parametrize(("blocks", "verdict"), [(6, "fits"), (8, "tight")])
def test_what_wsl_may_refuse_to_pin_is_tight_in_a_check(tmp_path: Path, blocks: int, verdict: str) -> None:
    """The two runs of diffusion-pipe#306, of which the second ended with 60 GB of RAM: on Linux both fit."""
    (tmp_path / "data.toml").write_text("resolutions = [1024]\nframe_buckets = [1]\n[[directory]]\npath = 'data'\n")
    (tmp_path / "job.toml").write_text(
        f"output_dir = 'out'\ndataset = '{tmp_path / 'data.toml'}'\nmicro_batch_size_per_gpu = 1\n"
        f"activation_checkpointing = true\nblocks_to_swap = {blocks}\n[model]\ntype = 'wan'\ndtype = 'bfloat16'\n"
        "ckpt_path = 'Wan2.1-T2V-1.3B'\n[adapter]\ntype = 'lora'\nrank = 32\ndtype = 'bfloat16'\n"
        "[optimizer]\ntype = 'adamw_optimi'\nlr = 2e-5\n"
    )
    line = f"check {tmp_path / 'job.toml'} --gpu 4080 --host-ram 60GiB --os"
    assert answer(f"{line} linux")["verdict"] == "fits"
    found = answer(f"{line} wsl")
    assert found["verdict"] == verdict and found["limit"] is None
    refuses = [note for note in found["estimate"]["assumptions"] if note.startswith("WSL may refuse to pin")]
    assert len(refuses) == (verdict == "tight")


@pytest.mark.parametrize(
    ("ram", "verdict"), [("", "fits"), ("--host-ram 64GiB", "fits"), ("--host-ram 32GiB", "tight")]
)
def test_what_a_page_file_must_stand_behind_is_tight_in_a_check(ram: str, verdict: str) -> None:
    """fluxgym's script, which ended with 32 GB of RAM on Windows (cocktailpeanut/fluxgym#40, #417) and ran with 64."""
    command = (
        "accelerate launch --mixed_precision bf16 flux_train_network.py --pretrained_model_name_or_path flux1-dev.sft "
        "--clip_l clip_l.safetensors --t5xxl t5xxl_fp16.safetensors --ae ae.sft --cache_latents_to_disk --sdpa "
        "--gradient_checkpointing --network_module networks.lora_flux --network_dim 4 --optimizer_type adamw8bit "
        "--cache_text_encoder_outputs --fp8_base --network_train_unet_only --resolution 512,512"
    )
    found = answer(f"check --gpu rtx4060ti-16gb --os windows {ram} -- {command}")
    assert found["verdict"] == verdict
    told = [note for note in found["estimate"]["assumptions"] if note.startswith("RAM and page file must be")]
    assert len(told) == (verdict == "tight")
    assert answer(f"check --gpu rtx4060ti-16gb --os linux {ram} -- {command}")["verdict"] == "fits"
