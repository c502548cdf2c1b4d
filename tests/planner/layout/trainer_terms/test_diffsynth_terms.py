"""planner/layout/trainer_terms/diffsynth.py: what FLUX.1's VAE and the files of weights take, counted by hand."""

from __future__ import annotations

from pathlib import Path

from planner import dialects
from planner.catalog.shapes import grid
from planner.dialects.base.script import from_file
from planner.foreign.case import read_case
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run

MIB = 2**20
FILES = {
    "flux": "black-forest-labs/FLUX.1-dev:flux1-dev.safetensors,"
    "black-forest-labs/FLUX.1-dev:text_encoder/model.safetensors,"
    "black-forest-labs/FLUX.1-dev:text_encoder_2/*.safetensors,black-forest-labs/FLUX.1-dev:ae.safetensors",
    "wanvideo": "Wan-AI/Wan2.1-T2V-1.3B:diffusion_pytorch_model*.safetensors,"
    "Wan-AI/Wan2.1-T2V-1.3B:models_t5_umt5-xxl-enc-bf16.pth,Wan-AI/Wan2.1-T2V-1.3B:Wan2.1_VAE.pth",
}


def run_of(folder: Path, example: str, more: str = "") -> Run:
    command = f"accelerate launch examples/{example}/model_training/train.py --dataset_base_path data --height 512"
    command += f" --width 512 --lora_base_model dit --use_gradient_checkpointing {more}"
    (folder / "train.sh").write_text(f'{command} --model_id_with_origin_paths "{FILES[example]}"')
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    case = read_case(dialect, given, {}, {"gpu": "80GB"})
    facts = load_facts(case.configuration, case.model, case.gpu)
    return lay_out(case.configuration, facts, grid(case.model, case.job), case.trainer)


def test_flux_s_vae_makes_the_scores_of_all_pairs(tmp_path: Path) -> None:
    """64x64 latents: scores and softmax of 4096 by 4096 in fp32, its copy in 16 bits, and a mask of one byte each."""
    run = run_of(tmp_path, "flux")
    stage = run.phases.encode
    assert stage is not None
    made = [run.sizes[event] for event in stage.ops if event >= 0 and run.program.op[event] == "scores of all pairs"]
    assert sorted(made) == [4096**2, 2 * 4096**2, 4 * 4096**2, 4 * 4096**2]


def test_t5_s_table_of_words_is_there_twice(tmp_path: Path) -> None:
    run = run_of(tmp_path, "flux")
    tables = [run.sizes[event] for event in run.load.ops if event >= 0 and run.program.op[event] == "table of words"]
    assert tables == [2 * 32128 * 4096]


def test_files_pass_through_pinned_memory_of_each_power_of_two(tmp_path: Path) -> None:
    """UMT5's table has 256384 by 4096 numbers, 1.96 GiB in bf16, its widest layers 80 MiB; Wan's file in fp32 has 52.5:
    pinned are 2 GiB, 128 and 64 MiB, and less of smaller ones than 64. A rehearsal of the script pinned 2.25 GiB."""
    run = run_of(tmp_path, "wanvideo")
    assert (2048 + 128 + 64) * MIB < run.host.pinned_bytes < (2048 + 128 + 128) * MIB


def test_models_that_are_loaded_on_the_cpu_do_not(tmp_path: Path) -> None:
    """With --enable_model_cpu_offload what is frozen has a pinned copy, and nothing else is pinned."""
    run = run_of(tmp_path, "wanvideo", "--enable_model_cpu_offload")
    assert run.host.pinned_bytes == run.host.extra_bytes
    frozen = run.facts.model.parameters + sum(encoder.parameters for encoder in run.facts.model.text_encoders)
    assert 2 * frozen < run.host.pinned_bytes < 2.1 * frozen
