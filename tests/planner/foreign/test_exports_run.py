"""What an export must say so that the trainer's own script runs: configs, training modes, experts, noise levels."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.foreign.export import export
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan


def exported(model: str, trainer: str, **job: object) -> str:
    profile = lookup.model(model)
    height, width = profile.shape.resolutions[0]
    frames = 17 if profile.kind == "video" else 1
    told = {"model": model, "method": "lora", "frames": frames, "height": height, "width": width, **job}
    strategy = Strategy(gradient_checkpointing="full", autocast="bf16", adapter_dtype="fp32")
    machine = Machine(gpu="h200", host_ram=1 << 40)
    return export(Plan(job=Job.read(told), strategy=strategy, machine=machine), trainer, take_nearest=True).files[
        "train.sh"
    ]


@pytest.mark.parametrize(
    ("model", "job", "wanted", "without"),
    [
        ("wan2.1-t2v-1.3b", {}, ("config/wan2.1/wan_civitai.yaml", "--train_mode normal"), "inpaint"),
        ("wan2.1-i2v-14b-480p", {}, ("config/wan2.1/wan_civitai.yaml", "--train_mode i2v"), "inpaint"),
        ("wan2.2-t2v-a14b", {"experts": "high"},
         ("config/wan2.2/wan_civitai_t2v.yaml", "--train_mode normal", "--boundary_type high"), "inpaint"),
        ("wan2.2-ti2v-5b", {},
         ("config/wan2.2/wan_civitai_5b.yaml", "--train_mode ti2v", "--boundary_type full"), "i2v.yaml"),
        ("z-image", {}, ("scripts/z_image/train_lora.py",), "--config_path"),
    ],
)  # fmt: skip
def test_videox_fun_is_told_its_config_and_mode(
    model: str, job: dict[str, object], wanted: tuple[str, ...], without: str
) -> None:
    text = exported(model, "videox-fun", **job)
    assert all(words in text for words in wanted), text
    assert without not in text


@pytest.mark.parametrize(
    ("model", "job", "shift"),
    [("wan2.1-t2v-1.3b", {}, "3.0"), ("wan2.2-t2v-a14b", {"experts": "low"}, "12.0"), ("hunyuan-video", {}, "7.0"),
     ("wan2.2-i2v-a14b", {"experts": "low"}, "5.0"), ("qwen-image", {}, "2.2"), ("z-image", {}, "2.0")],
)  # fmt: skip
def test_musubi_tuner_shifts_noise_as_its_page_for_the_model_does(
    model: str, job: dict[str, object], shift: str
) -> None:
    text = exported(model, "musubi-tuner", **job)
    assert f"--discrete_flow_shift {shift}" in text and text.count("--discrete_flow_shift") == 1
    assert "--vae_dtype" not in text or model != "z-image"
