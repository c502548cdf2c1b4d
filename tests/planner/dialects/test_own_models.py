"""planner/dialects: image models that trainers build from code of their own are known by each trainer's name for them,
and the answer says that they are priced as diffusers'."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.own_models import SHORT_PROMPT
from planner.dialects.base.script import from_file
from planner.foreign.case import read_case
from planner.foreign.pricing import Pricing

SIMPLETUNER = {"data_backend_config": "d.json", "model_type": "lora", "resolution": 512, "gradient_checkpointing": True}
ONETRAINER = {"training_method": "LORA", "base_model_name": "x", "resolution": "512"}
ONETRAINER |= {f"text_encoder{number}": {"train": False} for number in ("", "_2", "_3", "_4")}


def read(folder: Path, name: str, text: str) -> tuple[str, Translation]:
    (folder / name).write_text(text)
    if name.endswith(".toml"):  # of diffusion-pipe, whose command says whose it is
        (folder / "train.sh").write_text(f"deepspeed --num_gpus=1 train.py --deepspeed --config {name}")
        name = "train.sh"
    dialect, given = dialects.read_script(from_file(folder / name))
    return dialect.name, translate(dialect, given)


def simpletuner(family: str) -> tuple[str, str]:
    return "config.json", json.dumps({**SIMPLETUNER, "model_family": family})


def onetrainer(kind: str) -> tuple[str, str]:
    return "preset.json", json.dumps({**ONETRAINER, "model_type": kind})


def ai_toolkit(arch: str) -> tuple[str, str]:
    process = {
        "type": "sd_trainer",
        "network": {"type": "lora"},
        "train": {"dtype": "bf16"},
        "model": {"arch": arch, "name_or_path": "x"},
    }
    return "train.json", json.dumps({"job": "extension", "config": {"name": "a", "process": [process]}})


def diffusion_pipe(kind: str) -> tuple[str, str]:
    tables = f'[model]\ntype = "{kind}"\ndtype = "bfloat16"\n[adapter]\ntype = "lora"\n[optimizer]\ntype = "adamw"\n'
    return "train.toml", f'dataset = "d.toml"\n{tables}'


@pytest.mark.parametrize(
    ("file", "trainer", "model", "is_own"),
    [
        (simpletuner("ernie"), "simpletuner", "ernie-image", True),
        (onetrainer("ERNIE"), "onetrainer", "ernie-image", False),
        (ai_toolkit("ernie_image"), "ai-toolkit", "ernie-image", True),
        (diffusion_pipe("ernie_image"), "diffusion-pipe", "ernie-image", True),
        (diffusion_pipe("hunyuan_image"), "diffusion-pipe", "hunyuan-image-2.1", True),
        (simpletuner("ideogram"), "simpletuner", "ideogram-4", True),
        (onetrainer("IDEOGRAM_4"), "onetrainer", "ideogram-4", False),
        (ai_toolkit("ideogram4"), "ai-toolkit", "ideogram-4", True),
        (diffusion_pipe("ideogram4"), "diffusion-pipe", "ideogram-4", True),
        (simpletuner("hidream"), "simpletuner", "hidream-i1", True),
        (onetrainer("HI_DREAM_FULL"), "onetrainer", "hidream-i1", False),
        (ai_toolkit("hidream"), "ai-toolkit", "hidream-i1", True),
        (diffusion_pipe("hidream"), "diffusion-pipe", "hidream-i1", True),
        (simpletuner("anima"), "simpletuner", "anima", True),
        (ai_toolkit("anima"), "ai-toolkit", "anima", False),
        (onetrainer("ANIMA"), "onetrainer", "anima", False),
        (ai_toolkit("krea2"), "ai-toolkit", "krea-2", True),
        (ai_toolkit("krea2:turbo"), "ai-toolkit", "krea-2", True),
        (ai_toolkit("flux2_klein_4b"), "ai-toolkit", "flux.2-klein-4b", True),
        (ai_toolkit("flux2_klein_9b"), "ai-toolkit", "flux.2-klein-9b", True),
        (simpletuner("sana"), "simpletuner", "sana1.5-4.8b", True),
        (simpletuner("sanavideo"), "simpletuner", "sana-video-2b", True),
        (simpletuner("kandinsky5-video"), "simpletuner", "kandinsky-5.0-t2v-lite", True),
        (simpletuner("krea2"), "simpletuner", "krea-2", False),
        (ai_toolkit("sd3"), "ai-toolkit", "sd3.5-large", False),
    ],
)
def test_models_by_the_names_that_trainers_have_for_them(
    file: tuple[str, str], trainer: str, model: str, is_own: bool, tmp_path: Path
) -> None:
    name, found = read(tmp_path, *file)
    assert (name, found.job["model"], found.job["method"]) == (trainer, model, "lora")
    assert any("its own code of" in note for note in found.notes) == is_own


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ({}, "fp8"),
        ({"model_flavour": "nf4"}, "nf4"),
        ({"base_model_precision": "int8-torchao"}, "int8"),
        ({"ideogram_fp8_base_upcast": True}, "bf16"),
    ],
)
def test_simpletuner_leaves_published_weights_as_they_are_stored(
    more: dict[str, Any], weights: str, tmp_path: Path
) -> None:
    _, found = read(tmp_path, "config.json", json.dumps({**SIMPLETUNER, "model_family": "ideogram", **more}))
    assert found.strategy["weights_dtype"] == weights


def test_prompts_that_are_not_filled_up_are_said_unless_their_length_is(tmp_path: Path) -> None:
    name, text = onetrainer("IDEOGRAM_4")
    parts = {"transformer": {"weight_dtype": "INT_W8A8"}, "train_dtype": "BFLOAT_16"}
    (tmp_path / name).write_text(json.dumps({**json.loads(text), **parts}))
    dialect, given = dialects.read_script(from_file(tmp_path / name))
    usual, told = (read_case(dialect, given, {"text_tokens": tokens}, {"gpu": "80GB"}) for tokens in (None, 256))
    said = "prompts are as long as the longest of a batch: priced at 2048 tokens"
    assert any(said in note for note in usual.notes) and not any(said in note for note in told.notes)
    assert (usual.job.text_tokens, told.job.text_tokens) == (None, 256)
    long, short = (Pricing(case).outcome(case).estimate.phases["train"] for case in (usual, told))
    assert short.allocated_bytes < long.allocated_bytes


def test_lora_of_every_linear_layer_is_priced_where_trainers_adapt_them(tmp_path: Path) -> None:
    files: tuple[Any, ...] = (ai_toolkit("ernie_image"), diffusion_pipe("ernie_image"))
    for file in files:
        _, found = read(tmp_path, *file)
        assert "mlp.linear_fc2" in found.job["lora_targets"]


@pytest.mark.parametrize(
    ("more", "version", "encoder"),
    [
        ("", "", "in 16 bits"),
        ("llama3_4bit = true\n", "llama-4bit", "in 4 bits"),
        ('llama3_4bit = true\ntransformer_dtype = "nf4"\n', "half-adapters-llama-4bit", "in 4 bits"),
    ],
)
def test_diffusion_pipe_keeps_llama_on_the_gpu(more: str, version: str, encoder: str, tmp_path: Path) -> None:
    name, text = diffusion_pipe("hidream")
    _, found = read(tmp_path, name, text.replace("[adapter]", f"{more}[adapter]"))
    assert found.version == version
    longer = read(tmp_path, name, text.replace("[adapter]", "max_llama3_sequence_length = 256\n[adapter]"))[1].notes
    assert any("max_llama3_sequence_length 256 is not estimated" in note for note in longer)
    assert any(f"llama-3.1-8b encodes in the loop and stays on the GPU, {encoder}" in note for note in found.notes)


@pytest.mark.parametrize(
    ("ignored", "model", "version"),
    [
        ([], {}, ""),
        (["ff_i.experts", "ff_i.gate"], {}, "without-experts"),
        (["shared_experts"], {}, ""),
        (["ff_i.experts"], {"quantize": True}, "quantised-whole-without-experts"),
        (["ff_i.experts"], {"quantize": True, "low_vram": True}, "without-experts"),
    ],
)
def test_ai_toolkit_leaves_experts_out(
    ignored: list[str], model: dict[str, bool], version: str, tmp_path: Path
) -> None:
    name, text = ai_toolkit("hidream")
    config = json.loads(text)
    process = config["config"]["process"][0]
    process["network"]["network_kwargs"] = {"ignore_if_contains": ignored}
    process["model"] |= model
    assert read(tmp_path, name, json.dumps(config))[1].version == version


def test_the_low_end_of_prompts_that_are_not_filled_up_is_that_of_a_short_one(tmp_path: Path) -> None:
    """How long prompts are stands in no command: `no` means that not even short ones leave room."""
    preset = {
        **ONETRAINER,
        "model_type": "IDEOGRAM_4",
        "train_dtype": "BFLOAT_16",
        "batch_size": 4,
        "resolution": "1024",
    }
    preset |= {"transformer": {"weight_dtype": "INT_W8A8"}}
    preset["text_encoder"] = {"train": False, "weight_dtype": "FLOAT_8"}
    (tmp_path / "preset.json").write_text(json.dumps(preset))
    dialect, given = dialects.read_script(from_file(tmp_path / "preset.json"))
    case = read_case(dialect, given, {}, {"gpu": "80GB"})
    short = replace(case, job=case.job.replace(text_tokens=SHORT_PROMPT))
    found, least = Pricing(case).outcome(case).estimate, Pricing(short).outcome(short).estimate
    assert found.low_bytes == least.low_bytes < least.peak.device_bytes < found.peak.device_bytes
    middle = (least.low_bytes + found.peak.device_bytes) // 2
    between = read_case(dialect, given, {}, {"gpu": f"{middle // 2**20}MiB"})
    assert Pricing(between).outcome(between).estimate.verdict == "tight"
