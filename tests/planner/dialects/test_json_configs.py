"""planner/dialects/onetrainer and simpletuner: configs in JSON, read or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog.shapes import grid
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.dialects.onetrainer.settings import DIALECT as ONETRAINERS
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.change_words import move_words
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts

ONETRAINER: dict[str, Any] = {
    "training_method": "LORA",
    "model_type": "QWEN",
    "base_model_name": "Qwen/Qwen-Image",
    "batch_size": 2,
    "resolution": "512,768",
    "train_dtype": "BFLOAT_16",
    "transformer": {"train": True, "weight_dtype": "FLOAT_8", "offload_fraction": 0.5},
    "text_encoder": {"train": False, "weight_dtype": "FLOAT_8"},
    "vae": {"weight_dtype": "FLOAT_32"},
}
SIMPLETUNER: dict[str, Any] = {
    "--model_family": "flux",
    "--model_type": "lora",
    "--lora_type": "standard",
    "--model_flavour": "kontext",
    "--lora_rank": 32,
    "--resolution": 1.0,
    "--resolution_type": "area",
    "--base_model_precision": "int8-quanto",
    "--optimizer": "adamw_bf16",
    "--mixed_precision": "bf16",
    "--gradient_checkpointing": True,
    "--data_backend_config": "config/backend.json",
}


def read(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    dialect, given = dialects.read_script(from_file(folder / "config.json"))
    found = translate(dialect, given)
    return {"trainer": dialect.name, "unknown": given.unknown, **found.job, **found.strategy}


def test_a_config_of_onetrainer(tmp_path: Path) -> None:
    found = read(tmp_path, ONETRAINER)
    expected = {
        "trainer": "onetrainer",
        "unknown": (),
        "model": "qwen-image",
        "method": "lora",
        "lora_rank": 16,
        "height": 768,
        "width": 768,
        "batch_size": 2,
        "weights_dtype": "fp8",
        "adapter_dtype": "fp32",
        "autocast": "bf16",
        "gradient_checkpointing": "full",
        "swap_blocks": 30,
        "text_encoder": "cached",
        "text_encoder_dtype": "fp8",
        "vae_dtype": "fp32",
        "optimizer": "adamw",
    }
    assert {name: found[name] for name in expected} == expected


def test_stable_diffusion_3_of_onetrainer(tmp_path: Path) -> None:
    """Its preset "#sd 3 LoRA" (training_presets/SD3, at 23df3832)."""
    frozen = {"train": False, "weight_dtype": "FLOAT_16"}
    preset = {
        "base_model_name": "stabilityai/stable-diffusion-3-medium-diffusers",
        "batch_size": 4,
        "model_type": "STABLE_DIFFUSION_3",
        "resolution": "1024",
        "transformer": {"train": True, "weight_dtype": "FLOAT_16"},
        **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3"), frozen),
        "training_method": "LORA",
        "vae": {"weight_dtype": "FLOAT_32"},
    }
    found = read(tmp_path, preset)
    assert (found["model"], found["batch_size"], found["height"]) == ("sd3-medium", 4, 1024)


@pytest.mark.parametrize(
    "start", ["python scripts/train.py", "./run-cmd.sh train", "/root/OneTrainer/run-cmd.sh train"]
)
def test_a_command_of_onetrainer_names_its_config(tmp_path: Path, start: str) -> None:
    """By Python, or by the script that its README names for all tasks."""
    (tmp_path / "train.sh").write_text(f"HF_HOME=/root/hf_cache {start} --config-path config.json\n")
    with pytest.raises(VplanError, match="is not here"):
        dialects.read_script(from_file(tmp_path / "train.sh"))
    (tmp_path / "config.json").write_text(json.dumps(ONETRAINER))
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    assert (dialect.name, translate(dialect, given).job["model"]) == ("onetrainer", "qwen-image")


def test_a_command_of_onetrainer_puts_its_config_over_a_preset(tmp_path: Path) -> None:
    """scripts/train.py: the preset, over it the config, over both single values."""
    (tmp_path / "preset.json").write_text(json.dumps(ONETRAINER))
    (tmp_path / "mine.json").write_text(json.dumps({"batch_size": 3, "transformer": {"weight_dtype": "BFLOAT_16"}}))
    words = "--config-path mine.json --preset-path preset.json --config-value transformer.offload_fraction=0.25"
    (tmp_path / "train.sh").write_text(f"python scripts/train.py {words} --config-value batch_size=5\n")
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    found = translate(dialect, given)
    assert (found.job["model"], found.job["batch_size"], found.strategy["weights_dtype"]) == ("qwen-image", 5, "bf16")
    assert found.strategy["swap_blocks"] == 15


@pytest.mark.parametrize(
    ("changes", "checkpoints", "swapped"),
    [
        ({"gradient_checkpointing": "OFF"}, "none", 0),
        ({"gradient_checkpointing": "CPU_OFFLOADED", "layer_offload_fraction": 0.7}, "offload", 42),
        ({"gradient_checkpointing": "CPU_OFFLOADED", "enable_activation_offloading": False}, "full", 0),
        ({"gradient_checkpointing": "ON", "layer_offload_fraction": 0.7}, "full", 0),
        ({"gradient_checkpointing": "OFF", "__version": 11}, "full", 0),
        ({"transformer": {"offload_fraction": 0.5, "activation_offloading": True}}, "offload", 30),
    ],
)
def test_onetrainer_says_for_all_parts_or_for_each_what_is_offloaded(
    tmp_path: Path, changes: dict[str, Any], checkpoints: str, swapped: int
) -> None:
    """Before version 11 one setting for all parts, which goes over what a part says (TrainConfig.__migration_10)."""
    found = read(tmp_path, ONETRAINER | {"transformer": {"weight_dtype": "BFLOAT_16"}} | changes)
    assert (found["gradient_checkpointing"], found["swap_blocks"]) == (checkpoints, swapped)
    assert found["unknown"] == ()


def test_a_fix_for_onetrainer_names_the_part_and_the_setting_that_its_config_has(tmp_path: Path) -> None:
    """Following it is read as it was meant."""
    unet = {
        "model_type": "STABLE_DIFFUSION_XL_10_BASE",
        "base_model_name": "stabilityai/sdxl",
        "training_method": "LORA",
    }
    encoders = {name: {"train": False, "weight_dtype": "FLOAT_16"} for name in ("text_encoder", "text_encoder_2")}
    part = {"unet": {"weight_dtype": "BFLOAT_16", "gradient_checkpointing": False}}
    for config, expected in (
        (unet | encoders | part, "unet.gradient_checkpointing: true"),
        (ONETRAINER | {"gradient_checkpointing": "OFF"}, 'gradient_checkpointing: "ON"'),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        case = read_case(*dialects.read_script(from_file(tmp_path / "config.json")), {}, {"gpu": "80GB"})
        (move,) = (move for move in ONETRAINERS.moves if move.changes == {"gradient_checkpointing": "full"})
        assert list(move_words(case, case.changed(move.changes), move)) == [expected]


def test_onetrainers_format_of_encoders_is_that_of_the_largest(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"text_encoder": {"train": False, "weight_dtype": "BFLOAT_16"}}
    parts |= {
        "text_encoder_2": {"train": False, "weight_dtype": "NFLOAT_4"},
        "transformer": {"weight_dtype": "NFLOAT_4"},
    }
    found = read(tmp_path, ONETRAINER | parts | {"model_type": "FLUX_DEV_1", "base_model_name": "FLUX.1-dev"})
    assert (found["model"], found["text_encoder_dtype"]) == ("flux.1-dev", "nf4")


def test_full_training_of_onetrainer_steps_inside_backward_where_its_optimizer_says_so(tmp_path: Path) -> None:
    fused = {"optimizer": {"optimizer": "ADAFACTOR"}, "optimizer_defaults": {"ADAFACTOR": {"fused_back_pass": True}}}
    found = read(tmp_path, ONETRAINER | fused | {"training_method": "FINE_TUNE", "gradient_checkpointing": "OFF"})
    assert (found["method"], found["optimizer"], found["optimizer_step"]) == ("full", "adafactor", "backward")
    assert found["gradient_checkpointing"] == "none"


def test_a_config_of_simpletuner(tmp_path: Path) -> None:
    found = read(tmp_path, SIMPLETUNER)
    expected = {
        "trainer": "simpletuner",
        "unknown": (),
        "model": "flux.1-kontext-dev",
        "lora_rank": 32,
        "height": 1024,
        "weights_dtype": "int8",
        "adapter_dtype": "bf16",
        "optimizer": "adamw",
        "gradient_checkpointing": "full",
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("sd3", {"interval": 1}, ("full", None)),
        ("sd3", {"interval": 2}, ("partial", 23)),  # one block more is there while its segment is recomputed
        ("sd3", {"interval": 2, "segment_stride": 4}, ("partial", 11)),
        ("chroma", {"interval": 2}, ("partial", 10 + 19)),  # its 19 double and 38 single blocks are counted apart
        ("chroma", {"interval": 2, "segment_stride": 4}, ("partial", 10 + 20)),
        ("sdxl", {"interval": 2}, ("full", None)),
        ("sd3", {"interval": 30}, ("none", None)),
        ("sd3", {"backend": "unsloth"}, ("offload", None)),
    ],
)
def test_simpletuner_checkpoints_blocks_at_an_interval(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: tuple[str, int | None]
) -> None:
    settings = {f"--gradient_checkpointing_{name}": value for name, value in changes.items()}
    found = read(tmp_path, {**SIMPLETUNER, "--model_family": family, "--model_flavour": "", **settings})
    assert (found["gradient_checkpointing"], found["checkpointed_blocks"]) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "torch-ffn"},
        {"backend": "unsloth", "interval": 2},
        {"interval": 4, "segment_stride": 2},
    ],
)
def test_checkpoints_of_simpletuner_that_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = {f"--gradient_checkpointing_{name}": value for name, value in changes.items()}
    with pytest.raises(VplanError, match="gradient_checkpointing"):
        read(tmp_path, {**SIMPLETUNER, **settings})


def test_the_precision_of_simpletuners_text_encoders_is_read_and_not_priced(tmp_path: Path) -> None:
    """As its quickstarts have it: T5 quantised, CLIP left alone."""
    precisions = {"--text_encoder_1_precision": "no_change", "--text_encoder_2_precision": "int8-quanto"}
    (tmp_path / "config.json").write_text(json.dumps(SIMPLETUNER | precisions))
    dialect, given = dialects.read_script(from_file(tmp_path / "config.json"))
    case = read_case(dialect, given, {}, {"gpu": "24GB"})
    assert not given.unknown and case.unpriced == ("text_encoder_2_precision",)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 77 + 154),
        ({"--tokenizer_max_length": 100}, 77 + 100),
        ({"--tokenizer_max_length": 256}, 77 + 154),
        ({"--tokenizer_max_length": 256, "--i_know_what_i_am_doing": True}, 77 + 256),
        ({"--model_family": "flux", "--model_flavour": "dev", "--tokenizer_max_length": 256}, None),
    ],
)
def test_simpletuner_pads_sd3_s_prompts_to_231_tokens_at_most(
    changes: dict[str, Any], tokens: int | None, tmp_path: Path
) -> None:
    sd3 = SIMPLETUNER | {"--model_family": "sd3", "--model_flavour": "medium"}
    assert read(tmp_path, sd3 | changes)["text_tokens"] == tokens


WAN = SIMPLETUNER | {"--model_family": "wan", "--model_flavour": "t2v-480p-14b-2.1", "--resolution": 480}


def test_simpletuner_trains_the_largest_set_of_its_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips are cut to 8n + 1 frames; a cache of texts has no size, and a set that is off none that counts."""
    monkeypatch.chdir(tmp_path)
    sets = [
        {"id": "texts", "dataset_type": "text_embeds"},
        {"id": "off", "dataset_type": "video", "resolution": 1024, "disabled": True, "video": {"num_frames": 121}},
        {"id": "stills", "dataset_type": "image", "resolution": 0.5, "resolution_type": "area"},
        {"dataset_type": "video", "resolution": 480, "resolution_type": "pixel", "video": {"num_frames": 75}},
    ]
    (tmp_path / "config").mkdir()
    (tmp_path / "config/backend.json").write_text(json.dumps(sets), encoding="utf-8")
    found = read(tmp_path, WAN)
    assert [found[name] for name in ("frames", "height", "width")] == [73, 480, 480]


def test_sets_of_simpletuner_have_batches_caches_and_references_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    plain = {"id": "a", "resolution": 512, "resolution_type": "pixel"}
    named = plain | {"train_batch_size": 3, "vae_cache_disable": True, "conditioning_data": ["b", "c"]}
    others = [{"id": name, "dataset_type": "conditioning", "conditioning_type": "reference_loose"} for name in "bc"]
    texts = {"id": "t", "dataset_type": "text_embeds", "text_cache_ondemand": True}

    def fields(config: dict[str, Any], *sets: dict[str, Any]) -> list[Any]:
        (tmp_path / "config/backend.json").write_text(json.dumps(sets), encoding="utf-8")
        found = read(tmp_path, config)
        return [found[name] for name in ("batch_size", "vae", "text_encoder", "references")]

    assert fields(SIMPLETUNER, plain) == [4, "cached", "cached", None]
    assert fields(SIMPLETUNER, named, *others) == [3, "resident", "cached", 1]
    combined = SIMPLETUNER | {"--conditioning_multidataset_sampling": "combined", "--train_batch_size": 6}
    assert fields(combined, plain, named, *others, texts) == [6, "resident", "resident", 2]
    assert fields(SIMPLETUNER | {"--keep_vae_loaded": True}, plain) == [4, "resident", "cached", None]
    masks = {"id": "b", "dataset_type": "conditioning", "conditioning_type": "mask"}
    assert fields(SIMPLETUNER, named | {"conditioning_data": "b"}, masks)[3] is None
    with pytest.raises(VplanError, match="conditioning sets of this model_family are not priced"):
        fields(WAN, named, *others)


def test_simpletuner_s_gradients_in_fp32_are_refused_of_full_fine_tuning(tmp_path: Path) -> None:
    wide = SIMPLETUNER | {"--gradient_precision": "fp32", "--base_model_precision": "no_change"}
    assert read(tmp_path, wide)["method"] == "lora"
    with pytest.raises(VplanError, match="gradient_precision fp32 is not priced"):
        read(tmp_path, wide | {"--model_type": "full"})


@pytest.mark.parametrize("text", ['{"id": "clips"}', "[1, 2]", "[", '[{"resolution": "large"}]'])
def test_a_data_file_of_simpletuner_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/backend.json").write_text(text, encoding="utf-8")
    with pytest.raises(VplanError, match=r"is no list of data sets|is not JSON|is no number"):
        read(tmp_path, SIMPLETUNER)


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({}, "quanto-quantised-whole"),
        ({"--quantize_via": "cpu"}, "quanto"),
        ({"--base_model_precision": "int8-torchao"}, "torchao-quantised-whole"),
        ({"--base_model_precision": "fp8-torchao"}, "quantised-whole"),
        ({"--base_model_precision": "int8-torchao", "--quantize_via": "cpu"}, ""),
    ],
)
def test_who_quantises_decides_which_layers_stay(changes: dict[str, Any], version: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WAN | changes), encoding="utf-8")
    dialect, given = dialects.read_script(from_file(tmp_path / "config.json"))
    assert translate(dialect, given).version == version


def test_ramtorch_keeps_linear_layers_in_host_ram(tmp_path: Path) -> None:
    found = read(tmp_path, WAN | {"--ramtorch": True, "--base_model_precision": "no_change"})
    half = read(tmp_path, WAN | {"--ramtorch": True, "--ramtorch_transformer_percent": 50})
    assert (found["swap_blocks"], half["swap_blocks"]) == (39, 20)


def test_ramtorch_swaps_without_checkpoints(tmp_path: Path) -> None:
    """Its layers come again for backward; musubi's block swap, of which autograd keeps each weight, is refused."""
    without = WAN | {"--gradient_checkpointing": False, "--base_model_precision": "no_change", "--train_batch_size": 1}
    shape = {"frames": 17, "height": 480, "width": 480}
    for changes in ({"--ramtorch": True}, {"--musubi_blocks_to_swap": 20}):
        (tmp_path / "config.json").write_text(json.dumps(without | changes), encoding="utf-8")
        dialect, given = dialects.read_script(from_file(tmp_path / "config.json"))
        if "--ramtorch" in changes:
            case = read_case(dialect, given, shape, {"gpu": "80GB"})
            assert (case.strategy.swap_blocks, case.strategy.gradient_checkpointing) == (39, "none")
            run = lay_out(
                case.configuration,
                load_facts(case.configuration, case.model, case.gpu),
                grid(case.model, case.job),
                case.trainer,
            )
            inputs = [
                size for size, op in zip(run.sizes, run.program.op, strict=True) if op == "inputs of frozen layers"
            ]
            # 5 latent frames of 30 x 30 tokens; 5120 and 13824 wide, in 16 bits; 39 blocks
            assert sorted(set(inputs)) == [5 * 30 * 30 * (5120 + 13824) * 2]
            assert len(inputs) % 39 == 0
        else:
            with pytest.raises(VplanError, match="frees nothing"):
                read_case(dialect, given, shape, {"gpu": "80GB"})


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        (ONETRAINER, {"model_type": "STABLE_CASCADE_1"}, "model 'STABLE_CASCADE_1'"),
        (ONETRAINER, {"training_method": "EMBEDDING"}, "training method 'EMBEDDING' is not priced"),
        (ONETRAINER, {"text_encoder": {"weight_dtype": "FLOAT_8"}}, "training text_encoder is not priced"),
        (ONETRAINER, {"peft_type": "OFT_2"}, "adapters 'OFT_2' are not priced"),
        (ONETRAINER, {"resolution": "large"}, "resolution 'large' is not a size"),
        (ONETRAINER, {"train_dtype": "GGUF"}, "train_dtype 'GGUF' is not priced"),
        (SIMPLETUNER, {"--model_family": "chroma"}, "'model_family chroma kontext' is not known"),
        (SIMPLETUNER, {"--lora_type": "lycoris"}, "'config/lycoris_config.json' is not here"),
        (SIMPLETUNER, {"--controlnet": True}, "controlnet is not priced"),
        (SIMPLETUNER, {"--tread_config": {"routes": [1]}}, "tread_config is not priced"),
        (SIMPLETUNER, {"--base_model_precision": "int8-sdnq"}, "'int8-sdnq' is not priced"),
        (SIMPLETUNER, {"--optimizer": "soap"}, "optimizer 'soap' is not priced"),
        (SIMPLETUNER, {"--resolution": "large"}, "resolution 'large' is no number"),
    ],
)
def test_what_is_not_priced_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(VplanError, match=why):
        read(tmp_path, config | changes)


def test_a_paged_lion_of_simpletuner_takes_what_a_paged_adam_does_on_the_gpu(tmp_path: Path) -> None:
    found = read(tmp_path, {**SIMPLETUNER, "--optimizer": "bnb-lion8bit-paged"})
    assert found["optimizer"] == "adamw-8bit-paged"


@pytest.mark.parametrize(("compiled", "field"), [(True, "blocks"), (False, "none")])
def test_onetrainer_compiles_each_layer_by_itself(compiled: bool, field: str, tmp_path: Path) -> None:
    assert read(tmp_path, {**ONETRAINER, "compile": compiled})["compile"] == field
