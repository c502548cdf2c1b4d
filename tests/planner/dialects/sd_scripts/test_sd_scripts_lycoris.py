"""sd-scripts' LyCORIS adapters: which layers of a U-Net, how many numbers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.pricing import Pricing
from planner.layout.adapters import is_named, layers_of
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.units import GIB

SDXL = (
    "accelerate launch sdxl_train_network.py --pretrained_model_name_or_path a.safetensors --resolution 1024,1024 "
    "--mixed_precision bf16 --sdpa --cache_latents --cache_text_encoder_outputs --network_train_unet_only "
    "--network_module lycoris.kohya "
)
SD = SDXL.replace("sdxl_train_network.py", "train_network.py").replace("--cache_text_encoder_outputs ", "")
LOKR = "--network_dim 10000 --network_args algo=lokr factor=8 "


def translated(words: str, folder: Path, command: str = SDXL) -> Translation:
    (folder / "train.sh").write_text(command + words)
    return translate(*dialects.read_script(from_file(folder / "train.sh")))


def allocated(words: str, folder: Path) -> int:
    (folder / "train.sh").write_text(SDXL + words)
    case = read_case(*dialects.read_script(from_file(folder / "train.sh")), {}, {"gpu": "h200", "host_ram": 64 * GIB})
    return Pricing(case).outcome(case).estimate.phases["train"].allocated_bytes


def adapted(told: Translation) -> set[str]:
    layers = layers_of(lookup.model(told.job["model"]))
    return {name for name in layers if is_named(name, told.job["lora_targets"])}


@pytest.mark.parametrize(
    ("preset", "command", "layers"),
    [
        # SDXL: 70 transformer blocks of ten layers in 11 transformers of two projections; 17 ResNets, three of which
        # have no shortcut, with two convolutions and a layer of the time; two samplers each way.
        ("attn-mlp", SDXL, 70 * 10 + 11 * 2),
        ("attn-only", SDXL, 70 * 8),
        ("full-lin", SDXL, 722 + 17 + 11),
        ("full", SDXL, 722 + 17 * 3 + 11 + 4),
        ("unet-convblock-only", SDXL, 17 * 3 + 11 + 4),
        # SD 1.5: 16 transformers of one block, 22 ResNets, 14 shortcuts, three samplers each way; and the ends, and
        # both layers of the time.
        ("full", SD, 16 * 12 + 22 * 3 + 14 + 6 + 4),
        ("attn-mlp", SD, 16 * 12),
    ],
)
def test_a_preset_names_layers(preset: str, command: str, layers: int, tmp_path: Path) -> None:
    assert len(adapted(translated(f"{LOKR} preset={preset}", tmp_path, command))) == layers


def test_a_convolution_has_its_window_in_the_second_matrix(tmp_path: Path) -> None:
    told = translated(f"{LOKR} preset=unet-convblock-only", tmp_path)
    numbers = elements = 0
    for name, layer in layers_of(lookup.model("sdxl")).items():
        if name in adapted(told):
            window = 9 if name.rpartition(".")[2] in ("conv", "conv1", "conv2") else 1
            numbers += 8 * 8 + window * (layer.rows // 8) * (layer.columns // window // 8)
            elements += layer.rows + layer.columns
    assert told.job["lora_rank"] == round(numbers / elements)


@pytest.mark.parametrize(
    ("words", "rank", "version"),
    [
        ("--network_dim 8 --network_args algo=loha preset=attn-mlp", 16, "loha"),
        ("--network_dim 8 --network_args preset=attn-mlp", 8, "locon"),
        ("--network_dim 8 --network_args algo=loha preset=attn-mlp dora_wd=True", 17, "loha-dora"),
        ("--network_dim 16 --network_args algo=lokr full_matrix=True factor=16 preset=attn-mlp", 3, "lokr"),
        ("--network_dim 8 --network_args conv_dim=8 dropout=0.1 rank_dropout=0.1", 8, "locon"),
    ],
)
def test_adapters_are_priced_as_the_lora_with_as_many_numbers(
    words: str, rank: int, version: str, tmp_path: Path
) -> None:
    told = translated(words, tmp_path)
    assert (told.job["lora_rank"], told.job["lora_dropout"], told.version) == (rank, 0.0, version)
    assert any(f"priced as a LoRA of rank {rank}," in note for note in told.notes)


def test_text_encoders_have_adapters_too_unless_told_otherwise(tmp_path: Path) -> None:
    both = SDXL.replace("--network_train_unet_only ", "").replace("--cache_text_encoder_outputs ", "")
    told = translated(f"{LOKR} preset=attn-mlp", tmp_path, both)
    numbers = elements = 0
    for name, layer in layers_of(lookup.model("sdxl")).items():
        if name in adapted(told):
            numbers, elements = numbers + 64 + layer.rows * layer.columns // 64, elements + layer.rows + layer.columns
    for width, inner, depth in ((768, 3072, 12), (1280, 5120, 32)):
        numbers += depth * (6 * 64 + (4 * width * width + 2 * width * inner) // 64)
        elements += depth * (4 * 2 * width + 2 * (width + inner))
    assert (told.version, told.job["lora_rank"]) == ("te-lokr", round(numbers / elements))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (LOKR + "preset=own.toml", r"preset 'own\.toml' is not priced"),
        (LOKR + "decompose_both=True", "decompose_both of LyCORIS is not priced"),
        (LOKR + "bypass_mode=True", "bypass_mode of LyCORIS is not priced"),
        (LOKR + "rank_dropout=0.1", "rank_dropout of LyCORIS is not priced"),
        ("--network_args algo=full", "algo 'full' is not priced"),
        (LOKR + "--fp8_base", "LyCORIS over --fp8_base is not priced"),
    ],
)
def test_what_is_not_priced_is_refused(words: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=why):
        translated(words, tmp_path)


def test_a_setting_of_kohya_ss_is_such_a_command(tmp_path: Path) -> None:
    gui = {"LoRA_type": "LyCORIS/LoKr", "sdxl": True, "LyCORIS_preset": "attn-mlp", "factor": 8, "network_dim": 10000}
    more = {"mixed_precision": "bf16", "text_encoder_lr": 0, "unet_lr": 1e-4, "conv_dim": 1, "dora_wd": False}
    (tmp_path / "gui.json").write_text(json.dumps(gui | more | {"max_resolution": "1024,1024"}))
    told = translate(*dialects.read_script(from_file(tmp_path / "gui.json")))
    assert (told.version, told.job["lora_rank"]) == (
        "lokr",
        translated(f"{LOKR} preset=attn-mlp", tmp_path).job["lora_rank"],
    )


def test_a_block_alone_keeps_its_changes_with_checkpoints(tmp_path: Path) -> None:
    """Without them those of all layers whose input has a gradient, which a prompt's has not."""
    words = f"{LOKR} preset=attn-mlp"
    layers = layers_of(lookup.model("sdxl"))
    names = [name for name in adapted(translated(words, tmp_path)) if not name.endswith(("attn2.to_k", "attn2.to_v"))]
    whole = 2 * sum(layers[name].rows * layers[name].columns for name in names)
    plain = allocated(words, tmp_path) - allocated(f"{words} --gradient_checkpointing", tmp_path)
    assert plain > whole


@pytest.mark.parametrize(("words", "each"), [("", 3 * 4 - 2), ("--full_bf16", 3 * 2 - 2)])
def test_gradients_of_a_change_are_in_the_adapters_format(words: str, each: int, tmp_path: Path) -> None:
    """Three of the largest convolution's, beside what it kept."""
    (tmp_path / "train.sh").write_text(f"{SDXL}{LOKR} preset=unet-convblock-only {words}")
    case = read_case(*dialects.read_script(from_file(tmp_path / "train.sh")), {}, {"gpu": "h200", "host_ram": 64 * GIB})
    facts = load_facts(case.configuration, case.model, case.gpu)
    run = lay_out(case.configuration, facts, grid(case.model, case.job), case.trainer)
    passing = [size for size, op in zip(run.sizes, run.program.op, strict=True) if op == "gradients of a change"]
    assert max(passing) == each * 1280 * 9 * 2560
