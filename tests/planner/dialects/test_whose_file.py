"""Whose config file it is: by keys that only its trainer has, and refused by name where that trainer is not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects import other_scripts
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import PythonCommand, Script, from_file
from planner.errors import VplanError
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, plan_to_toml

FLYMYAI = """pretrained_model_name_or_path: Qwen/Qwen-Image
data_config: {train_batch_size: 1, img_size: 1024, img_dir: ./set}
train_batch_size: 1
learning_rate: 1e-4
rank: 16
"""
SAT = """args: {checkpoint_activations: True, train_iters: 1000}
model: {type: x}
data: {target: data_video.SFTDataset}
optimizer: {type: sat.ops.FusedEmaAdam}
deepspeed: {zero_optimization: {stage: 2}}
"""
MUSUBI = 'dit = "x.safetensors"\nnetwork_module = "networks.lora_wan"\nnetwork_dim = 32\n'


@pytest.mark.parametrize(
    ("name", "text", "whose"),
    [
        ("train.yaml", FLYMYAI, "FlyMyAI"),
        ("sft.yaml", SAT, "CogVideo's SAT"),
        ("wan.toml", MUSUBI, "musubi-tuner"),
    ],
)
def test_a_config_of_a_trainer_that_is_not_read_is_refused_by_its_name(
    name: str, text: str, whose: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(VplanError, match=f"{name} belongs to {whose}"):
        dialects.read_script(from_file(tmp_path / name))


LTX = "model: {training_mode: lora}\nlora: {rank: 16}\n"


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        (LTX + "conditioning: {mode: none}\nflow_matching: {}\nacceleration: {}\n", "LTX-Video-Trainer"),
    ],
)
def test_a_command_is_that_of_the_config_it_names(text: str, whose: str, tmp_path: Path) -> None:
    """`scripts/train.py` is EasyAnimate's as well."""
    (tmp_path / "low_vram.yaml").write_text(text)
    (tmp_path / "train.sh").write_text("uv run python scripts/train.py low_vram.yaml\n")
    with pytest.raises(VplanError, match=f"'low_vram.yaml' belongs to {whose}, which is not supported"):
        dialects.read_script(from_file(tmp_path / "train.sh"))


FLUX2 = """dataset = 'data.toml'
micro_batch_size_per_gpu = 1
activation_checkpointing = true
[model]
type = '{kind}'
diffusion_model = '{file}'
vae = 'vae.safetensors'
text_encoders = [{{path = 'te.safetensors', type = '{kind}'}}]
dtype = 'bfloat16'
diffusion_model_dtype = 'float8'
[adapter]
type = 'lora'
rank = 32
dtype = 'bfloat16'
[optimizer]
type = 'adamw_optimi'
"""


@pytest.mark.parametrize(
    ("kind", "file", "model"),
    [
        ("flux2", "flux2-dev.safetensors", "flux.2-dev"),
        ("krea2", "krea2_raw.safetensors", "krea-2"),
        ("z_image", "z_image_bf16.safetensors", "z-image"),
        ("hunyuan_video_15", "hunyuanvideo1.5_480p_t2v_fp16.safetensors", "hunyuan-video-1.5"),
    ],
)
def test_models_of_diffusion_pipe_whose_files_are_named_one_by_one(
    kind: str, file: str, model: str, tmp_path: Path
) -> None:
    (tmp_path / "train.toml").write_text(FLUX2.format(kind=kind, file=file))
    dialect, given = dialects.read_script(from_file(tmp_path / "train.toml"))
    said = translate(dialect, given)
    assert (said.job["model"], said.strategy["weights_dtype"], given.unknown) == (model, "fp8", ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('clip_l = "a"\nt5xxl = "c"\n', "has options of sd-scripts and does not say of which script"),
        ('optimizer = {type = "adamw"}\nmodel = {type = "flux"}\n', "does not belong to a supported trainer"),
    ],
)
def test_a_config_without_its_signs_is_nobodys(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(VplanError, match=fault):
        dialects.read_script(from_file(tmp_path / "a.toml"))


def test_a_config_of_flux_scripts_is_read(tmp_path: Path) -> None:
    text = 'pretrained_model_name_or_path = "flux1-dev.safetensors"\nae = "ae.safetensors"\nt5xxl = "t"\n'
    (tmp_path / "a.toml").write_text(f'{text}network_module = "networks.lora_flux"\n')
    dialect, given = dialects.read_script(from_file(tmp_path / "a.toml"))
    assert (dialect.name, given.settings["script"]) == ("sd-scripts", "flux_train_network.py")


@pytest.mark.parametrize(
    ("path", "whose"),
    [
        ("train_db.py", "sd-scripts"),
        ("/opt/sd-scripts/train_db.py", "sd-scripts"),
        ("scripts\\z_image_fun\\train_control.py", "VideoX-Fun"),
        ("train_control.py", "VideoX-Fun or EasyAnimate"),
        ("train_controlnet.py", "sd-scripts or diffusers' examples"),
        ("examples/controlnet/train_controlnet.py", "diffusers' examples"),
        ("scripts/mova/train.py", "VideoX-Fun"),
    ],
)
def test_a_script_that_is_not_read_is_refused_by_its_trainers_name(path: str, whose: str) -> None:
    script = Script("the command", (PythonCommand("python", {}, path, ()),))
    with pytest.raises(VplanError) as caught:
        dialects.read_script(script)
    assert f"of {whose} is not supported" in caught.value.message
    assert "vplan rehearse" in caught.value.fix


def test_a_name_of_many_is_nobodys() -> None:
    assert other_scripts.whose("train.py") == []
    assert other_scripts.whose("my_loop.py") == []


def test_no_script_that_is_read_is_listed_as_another() -> None:
    readers = [reader for reader in dialects.all_dialects().values() if reader.read_script is not None]
    for entry in other_scripts.scripts():
        for path in entry.scripts:
            script = Script("the command", (PythonCommand("python", {}, path, ()),))
            assert not any(reader.read_script(script) for reader in readers), path


def test_a_plan_of_ours_is_sent_to_the_verbs_that_take_it(tmp_path: Path) -> None:
    plan = Plan(
        job=Job(model="flux.1-dev", method="lora", frames=1, height=512, width=512),
        strategy=Strategy(),
        machine=Machine(gpu="rtx4090"),
    )
    (tmp_path / "p.toml").write_text(plan_to_toml(plan))
    with pytest.raises(VplanError, match=r"p\.toml is a plan of vplan's own") as refused:
        dialects.read_script(from_file(tmp_path / "p.toml"))
    assert "`vplan estimate p.toml`" in refused.value.fix and "`vplan train p.toml`" in refused.value.fix
