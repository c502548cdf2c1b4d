"""What an export must say so that the trainer's own script runs: configs, training modes, experts, noise levels."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.errors import VplanError
from planner.foreign.export import export
from planner.spec.job import Machine, Strategy
from planner.spec.plan import Plan


def exported_files(model: str, trainer: str, **job: object) -> dict[str, str]:
    profile = lookup.model(model)
    height, width = profile.shape.resolutions[0]
    frames = 17 if profile.kind == "video" else 1
    told = {"model": model, "method": "lora", "frames": frames, "height": height, "width": width, **job}
    strategy = Strategy(gradient_checkpointing="full", autocast="bf16", adapter_dtype="fp32")
    machine = Machine(gpu="h200", host_ram=1 << 40)
    return export(
        Plan(job=job_for(profile, told), strategy=strategy, machine=machine), trainer, take_nearest=True
    ).files


def exported(model: str, trainer: str, **job: object) -> str:
    return exported_files(model, trainer, **job)["train.sh"]


def commands_of(text: str) -> dict[str, str]:
    """The end of each script's name -> its command, on one line."""
    lines = text.replace("\\\n", " ").splitlines()
    return {line.partition(".py")[0].rpartition("/")[2]: line for line in lines if ".py" in line}


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


@pytest.mark.parametrize(
    ("model", "version"),
    [("qwen-image-edit", "edit"), ("flux.2-klein-4b", "klein-base-4b"), ("flux.2-dev", "dev")],
)
def test_musubi_tuner_caches_for_the_version_that_it_trains(model: str, version: str) -> None:
    """What is cached is named after the version, and training looks for its own: it found nothing and ended."""
    commands = commands_of(exported(model, "musubi-tuner"))
    assert len(commands) == 3
    assert all(f"--model_version {version} " in f"{command} " for command in commands.values()), commands


@pytest.mark.parametrize("model", ["flux.1-kontext-dev", "krea-2", "qwen-image"])
def test_musubi_tuner_caches_latents_without_the_dtype_that_ends_it(model: str) -> None:
    """`ValueError: VAE dtype is not supported` (flux_kontext_cache_latents.py:100 and the others)."""
    commands = commands_of(exported(model, "musubi-tuner"))
    caching = next(command for name, command in commands.items() if name.endswith("cache_latents"))
    assert "--vae_dtype" not in caching


def test_musubi_tuner_is_given_the_image_encoder_of_wan_2_1_alone() -> None:
    first = commands_of(exported("wan2.1-i2v-14b-480p", "musubi-tuner"))["wan_cache_latents"]
    second = commands_of(exported("wan2.2-i2v-a14b", "musubi-tuner", experts="low"))["wan_cache_latents"]
    assert "--i2v" in first and "--clip models/clip.pth" in first
    assert "--i2v" in second and "--clip" not in second


@pytest.mark.parametrize(
    ("model", "trainer", "file", "words"),
    [
        ("flux.1-kontext-dev", "musubi-tuner", "dataset.toml", "control_directory"),
        ("qwen-image-edit", "musubi-tuner", "dataset.toml", "control_directory"),
        ("flux.1-kontext-dev", "ai-toolkit", "config.yaml", "control_path"),
        ("qwen-image-edit", "ai-toolkit", "config.yaml", "control_path"),
        ("flux.1-kontext-dev", "diffusion-pipe", "dataset.toml", "control_path"),
        ("flux.1-kontext-dev", "diffusers", "train.sh", "--cond_image_column"),
    ],
)
def test_an_editing_model_is_given_its_conditioning_images(model: str, trainer: str, file: str, words: str) -> None:
    assert words in exported_files(model, trainer)[file]
    assert words not in exported_files("flux.1-dev" if trainer != "musubi-tuner" else "z-image", trainer)[file]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("flux.2-klein-4b", "load Mistral 3"),
        ("hunyuan-video-1.5", "HunyuanVideo 1.0's transformer"),
        ("qwen-image-edit", "train_edit_lora.py"),
        ("wan2.1-vace-1.3b", "wan2.1_vace"),
        ("wan2.2-animate-14b", "train_animate"),
    ],
)
def test_videox_fun_refuses_models_that_other_scripts_of_it_train(model: str, why: str) -> None:
    with pytest.raises(VplanError, match=why):
        exported(model, "videox-fun")
