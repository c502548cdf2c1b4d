"""SimpleTuner's LyCORIS adapters: which layers, how many numbers, what a step keeps for them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.dialects.simpletuner.models import MODELS
from planner.dialects.simpletuner.module_classes import MODULE_CLASSES, lies_in
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.pricing import Pricing
from planner.layout.adapters import is_named, layers_of
from planner.units import GIB

CONFIG: dict[str, Any] = {
    "model_type": "lora",
    "lora_type": "lycoris",
    "lycoris_config": "config/lycoris_config.json",
    "model_family": "flux",
    "mixed_precision": "bf16",
    "optimizer": "adamw_bf16",
    "gradient_checkpointing": True,
    "data_backend_config": "multidatabackend.json",
    "resolution": 512,
    "resolution_type": "pixel",
    "train_batch_size": 1,
}
SIDE, INNER, DOUBLE, SINGLE = 3072, 12288, 19, 38  # of FLUX.1


def adapters(factor: int = 4, classes: tuple[str, ...] = ("Attention",), **keys: Any) -> dict[str, Any]:
    preset = {"target_module": list(classes), "module_algo_map": {name: {"factor": factor} for name in classes}}
    base = {"algo": "lokr", "multiplier": 1.0, "linear_dim": 10000, "linear_alpha": 1, "bypass_mode": True}
    return {**base, "full_matrix": True, "apply_preset": preset, **keys}


def written(folder: Path, file: dict[str, Any] | None, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if file is not None:
        (folder / "config").mkdir(exist_ok=True)
        (folder / "config" / "lycoris_config.json").write_text(json.dumps(file))
    return folder / "config.json"


def translated(folder: Path, file: dict[str, Any] | None, **changes: Any) -> Translation:
    return translate(*dialects.read_script(from_file(written(folder, file, **changes))))


def allocated(folder: Path, file: dict[str, Any] | None, **changes: Any) -> int:
    script = from_file(written(folder, file, **changes))
    case = read_case(*dialects.read_script(script), {}, {"gpu": "h200", "host_ram": 64 * GIB})
    return Pricing(case).outcome(case).estimate.phases["train"].allocated_bytes


def test_every_class_has_layers_in_every_model_of_its_family() -> None:
    for family, classes in MODULE_CLASSES.items():
        for model in set(MODELS[family].values()):
            layers = layers_of(lookup.model(model))
            for name, parts in classes.items():
                assert parts is None or any(lies_in(layer, part) for layer in layers for part in parts), (model, name)


def test_a_lokr_on_attention_is_the_lora_with_as_many_numbers(tmp_path: Path) -> None:
    told = translated(tmp_path, adapters(4))
    assert told.job["lora_rank"] == round((4**2 + (SIDE // 4) ** 2) / (2 * SIDE))
    layers = layers_of(lookup.model("flux.1-dev"))
    named = [name for name in layers if is_named(name, told.job["lora_targets"])]
    assert len(named) == 8 * DOUBLE + 3 * SINGLE
    assert all(".attn." in name for name in named)
    assert (told.job["lora_dropout"], told.strategy["adapter_dtype"], told.version) == (0.0, "bf16", "lokr-bypassed")
    assert any("LoKr of factor 4 is priced as a LoRA of rank 96" in note for note in told.notes)


def test_each_class_of_the_map_has_a_factor_of_its_own(tmp_path: Path) -> None:
    preset = {
        "target_module": ["Attention", "FeedForward"],
        "module_algo_map": {"Attention": {"factor": 16}, "FeedForward": {"factor": 8}},
    }
    told = translated(tmp_path, adapters(apply_preset=preset, bypass_mode=False))
    attention, wide = 16**2 + (SIDE // 16) ** 2, 8**2 + (SIDE // 8) * (INNER // 8)
    count, more = 8 * DOUBLE + 3 * SINGLE, 4 * DOUBLE
    assert told.job["lora_rank"] == round(
        (count * attention + more * wide) / (count * 2 * SIDE + more * (SIDE + INNER))
    )
    assert told.version == "lokr"


@pytest.mark.parametrize(
    ("classes", "keys", "named"),
    [
        (["FluxTransformer2DModel"], {}, 504),
        (["FluxSingleTransformerBlock"], {}, 6 * SINGLE),
        (["Attention", "GLUMBConv"], {}, 8 * DOUBLE + 3 * SINGLE),  # of another family
        (None, {}, 504),
    ],
)
def test_the_preset_chooses_layers(classes: list[str] | None, keys: dict[str, Any], named: int, tmp_path: Path) -> None:
    preset = {"target_module": classes} if classes else {}
    told = translated(tmp_path, adapters(apply_preset=preset, **keys))
    layers = layers_of(lookup.model("flux.1-dev"))
    assert sum(is_named(name, told.job["lora_targets"]) for name in layers) == named


@pytest.mark.parametrize(
    ("keys", "rank", "version"),
    [
        ({"algo": "loha", "linear_dim": 8, "bypass_mode": False}, 16, "loha"),
        ({"algo": "locon", "linear_dim": 8, "bypass_mode": False}, 8, "locon"),
        ({"algo": "lora", "linear_dim": 8}, 8, "lycoris-lora"),
        ({"bypass_mode": False, "dora_wd": True}, 97, "lokr-dora"),
        ({"full_matrix": False, "linear_dim": 8}, 2, "lokr-bypassed"),
    ],
)
def test_other_algorithms_have_their_own_numbers(keys: dict[str, Any], rank: int, version: str, tmp_path: Path) -> None:
    told = translated(tmp_path, adapters(**keys))
    assert (told.job["lora_rank"], told.version) == (rank, version)


def test_quanto_bypasses_and_is_quantised_on_the_gpu(tmp_path: Path) -> None:
    told = translated(tmp_path, adapters(bypass_mode=False), base_model_precision="int8-quanto")
    assert told.version == "quantised-whole-lokr-bypassed"
    assert any("without quantize_via cpu" in note for note in told.notes)


@pytest.mark.parametrize(
    ("keys", "changes", "why"),
    [
        ({"dora_wd": True}, {}, "dora_wd trains nothing with LyCORIS' bypass_mode"),
        ({"train_norm": True}, {}, "train_norm is not priced"),
        ({"decompose_both": True}, {}, "decompose_both is not priced"),
        ({"algo": "full"}, {}, "algo 'full' is not priced"),
        ({"preset": "attn-mlp"}, {}, "preset is not priced"),
        ({"apply_preset": {"target_name": [".*"]}}, {}, "apply_preset 'target_name' is not priced"),
        ({"apply_preset": {"target_module": ["Snake"]}}, {}, "target_module 'Snake' is not priced"),
        ({"apply_preset": {"target_module": ["LTXAttention"]}}, {}, "adapts no layer of flux"),
        ({"apply_preset": {"module_algo_map": {"Attention": {"block_size": 2}}}}, {}, "module_algo_map of Attention"),
        ({"apply_preset": {}}, {"model_family": "sana"}, "on every layer of sana, convolutions too"),
        (
            {"apply_preset": {"target_module": ["FeedForward"]}},
            {"model_family": "hidream"},
            "on FeedForward of hidream",
        ),
        ({"bypass_mode": False}, {"base_model_precision": "int8-torchao"}, "without bypass_mode over"),
        ({"algo": "loha"}, {"base_model_precision": "int8-quanto"}, "LoHa over a quantised base"),
        ({}, {"mixed_precision": "no"}, "lycoris without mixed_precision is not priced"),
        ({}, {"ramtorch": True}, "lycoris with RamTorch is not priced"),
        ({}, {"init_lora": "a.safetensors"}, "with init_lora is not priced"),
    ],
)
def test_what_is_not_priced_is_refused(keys: dict[str, Any], changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=why):
        translated(tmp_path, adapters(**keys), **changes)


def test_without_its_file_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VplanError, match=r"lycoris_config 'config/lycoris_config.json' is not here \(pass it too"):
        translated(tmp_path, None)


def test_a_lokr_that_is_bypassed_keeps_what_is_between_its_factors(tmp_path: Path) -> None:
    """In 16 bits, as large as a layer's output: eight layers of a double block, three of a single one."""
    clip, text = (512 // 16) ** 2, 512
    lora = adapters(algo="lora", linear_dim=96)
    more = allocated(tmp_path, adapters(4), gradient_checkpointing=False) - allocated(
        tmp_path, lora, gradient_checkpointing=False
    )
    outputs = DOUBLE * 4 * (clip + text) + SINGLE * 3 * (clip + text)
    assert more == pytest.approx(2 * outputs * (SIDE - 96), rel=0.03)


def test_one_that_is_not_keeps_the_changes_of_weights(tmp_path: Path) -> None:
    lora = adapters(algo="lora", linear_dim=24)
    whole = adapters(8, bypass_mode=False)
    more = allocated(tmp_path, whole, gradient_checkpointing=False) - allocated(
        tmp_path, lora, gradient_checkpointing=False
    )
    kept = (8 * DOUBLE + 3 * SINGLE) * SIDE * SIDE
    assert more == pytest.approx(2 * kept, rel=0.06)
