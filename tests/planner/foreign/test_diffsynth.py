"""DiffSynth-Studio's commands: which part of a pipeline trains, whose weights they are, what an export must say."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import check_case
from planner.foreign.export import export
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan

WAN = "Wan-AI/Wan2.1-T2V-14B"
COMMAND = """accelerate launch examples/wanvideo/model_training/train.py --num_frames 17 --height 480 --width 832 \\
  --model_id_with_origin_paths "{}" --dataset_base_path d {}
"""
REST = "{0}:models_t5_umt5-xxl-enc-bf16.pth,{0}:Wan2.1_VAE.pth"


def read(folder: Path, repository: str, words: str, encoders: str = "") -> dict[str, object]:
    files = f"{repository}:diffusion_pytorch_model*.safetensors,{REST.format(encoders or repository)}"
    (folder / "a.sh").write_text(COMMAND.format(files, words))
    reading = translate(*dialects.read_script(from_file(folder / "a.sh")))
    return {**reading.job, **reading.strategy}


VACE = ("vace_blocks", "vace_patch_embedding")


@pytest.mark.parametrize(
    ("repository", "words", "method", "trainable"),
    [
        (WAN, "--trainable_models dit", "full", ()),
        (WAN, "--lora_base_model dit --lora_rank 8", "lora", ()),
        ("Wan-AI/Wan2.1-VACE-14B", "--trainable_models vace", "full", VACE),
        ("Wan-AI/Wan2.2-Animate-14B", "--trainable_models animate_adapter", "full",
         ("pose_patch_embedding", "motion_encoder", "face_encoder", "face_adapter")),
    ],
)  # fmt: skip
def test_only_the_named_part_trains(
    repository: str, words: str, method: str, trainable: tuple[str, ...], tmp_path: Path
) -> None:
    found = read(tmp_path, repository, words)
    assert (found["method"], found["trainable"]) == (method, trainable)


@pytest.mark.parametrize("part", ["controlnet", "motion_controller", "dit.blocks.0.self_attn.q", "vace"])
def test_a_part_beside_the_model_is_refused_by_name(part: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=f"--trainable_models {part}: parts beside"):
        read(tmp_path, WAN, f"--trainable_models {part}")


def test_the_encoders_of_another_model_do_not_name_the_model(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=r"cannot tell the model from .*LongCat"):
        read(tmp_path, "meituan-longcat/LongCat-Video", "--trainable_models dit", encoders=WAN)


@pytest.mark.parametrize(
    ("model", "experts", "wanted"),
    [
        ("wan2.2-i2v-a14b", "high", ("--extra_inputs input_image", "--max_timestep_boundary 0.358",
                                     "--min_timestep_boundary 0\n")),
        ("wan2.2-t2v-a14b", "low", ("--max_timestep_boundary 1 ", "--min_timestep_boundary 0.417")),
        ("wan2.1-i2v-14b-480p", None, ("--extra_inputs input_image",)),
        ("wan2.1-vace-14b", None, ("--extra_inputs vace_video,vace_reference_image", "--data_file_keys video,vace_")),
    ],
)  # fmt: skip
def test_an_export_says_what_its_pipeline_needs(model: str, experts: str | None, wanted: tuple[str, ...]) -> None:
    profile = lookup.model(model)
    height, width = profile.shape.resolutions[0]
    job = Job.read({"model": model, "method": "lora", "frames": 17, "height": height, "width": width,
                    **({"experts": experts} if experts else {})})  # fmt: skip
    plan = Plan(
        job=job, strategy=Strategy(gradient_checkpointing="full"), machine=Machine(gpu="h200", host_ram=1 << 40)
    )
    (text,) = export(plan, "diffsynth", take_nearest=True).files.values()
    for words in wanted:
        assert words in text.replace("\\\n", "\n").replace(" \n", "\n") or words in text


IMAGES = """accelerate launch examples/{}/model_training/train.py --max_pixels 1048576 --use_gradient_checkpointing \\
  --model_id_with_origin_paths "{}" {}
"""
QWEN = "Qwen/Qwen-Image:text_encoder/model*.safetensors,Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"
EDIT = f"FireRedTeam/FireRed-Image-Edit-1.1:transformer/diffusion_pytorch_model*.safetensors,{QWEN}"
DISTILLED = f"DiffSynth-Studio/Qwen-Image-Distill-Full:diffusion_pytorch_model*.safetensors,{QWEN}"
SD = "AI-ModelScope/stable-diffusion-v1-5:unet/diffusion_pytorch_model.safetensors"
ANIMA = (
    "circlestone-labs/Anima:split_files/diffusion_models/anima-preview.safetensors,"
    "circlestone-labs/Anima:split_files/text_encoders/qwen_3_06b_base.safetensors"
)
LTX = "DiffSynth-Studio/LTX-2.3-Repackage:transformer.safetensors"
IDEOGRAM = "{0}:transformer/diffusion_pytorch_model.safetensors,{0}:text_encoder/model.safetensors"
ERNIE = "PaddlePaddle/ERNIE-Image:transformer/diffusion_pytorch_model*.safetensors"


@pytest.mark.parametrize(
    ("folder", "files", "words", "read_as"),
    [
        ("qwen_image", EDIT, "--lora_base_model dit --extra_inputs edit_image", ("qwen-image-edit", "lora")),
        ("qwen_image", DISTILLED, "--trainable_models dit", ("qwen-image", "full")),
        ("stable_diffusion", SD, "--trainable_models unet", ("sd1.5", "full")),
        ("ernie_image", ERNIE, "--lora_base_model dit --lora_rank 32", ("ernie-image", "lora")),
        ("anima", ANIMA, "--lora_base_model dit --lora_rank 32", ("anima", "lora")),
        ("ltx2", LTX, "--lora_base_model dit --task sft:train", ("ltx-2.3", "lora")),
    ],
)
def test_its_examples_of_image_models_are_read(
    folder: str, files: str, words: str, read_as: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "train.sh").write_text(IMAGES.format(folder, files, words))
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    job = translate(dialect, given).job
    assert (dialect.name, given.unknown, job["model"], job["method"]) == ("diffsynth", (), *read_as)


def test_unet_is_a_part_beside_the_models_that_have_a_dit(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(IMAGES.format("ernie_image", ERNIE, "--trainable_models unet"))
    with pytest.raises(VplanError, match="--trainable_models unet: parts beside"):
        translate(*dialects.read_script(from_file(tmp_path / "train.sh")))


def test_deepspeed_from_host_ram_is_tried_on_one_gpu_too(tmp_path: Path) -> None:
    files = f"{WAN}:diffusion_pytorch_model*.safetensors,{REST.format(WAN)}"
    (tmp_path / "a.sh").write_text(COMMAND.format(files, "--trainable_models dit"))
    case = read_case(*dialects.read_script(from_file(tmp_path / "a.sh")), {}, {"gpu": "h100-80gb"})
    fixes = check_case(case).fixes
    changes = [words for fix in fixes for words in fix.change if "--zero_stage 3" in words]
    assert changes and all("--offload_optimizer_device cpu --offload_param_device cpu" in words for words in changes)
    assert any(not fix.lossy for fix in fixes)
    short = read_case(
        *dialects.read_script(from_file(tmp_path / "a.sh")), {}, {"gpu": "h100-80gb", "host_ram": 128 << 30}
    )
    assert not check_case(short).fixes, "it takes 350 GiB of host RAM"


@pytest.mark.parametrize(
    ("repository", "dtype"),
    [
        ("DiffSynth-Studio/ideogram-4-bf16-repackage", "bf16"),
        ("ideogram-ai/ideogram-4-fp8", "fp8"),
        ("ideogram-ai/ideogram-4-nf4", "nf4"),
    ],
)
def test_quantised_files_stay_as_they_come(repository: str, dtype: str, tmp_path: Path) -> None:
    words = IMAGES.format("ideogram4", IDEOGRAM.format(repository), "--lora_base_model dit --lora_rank 32")
    (tmp_path / "train.sh").write_text(words)
    found = translate(*dialects.read_script(from_file(tmp_path / "train.sh")))
    assert found.job["model"] == "ideogram-4"
    assert found.strategy["weights_dtype"] == found.strategy["text_encoder_dtype"] == dtype


def test_a_conditioner_in_the_model_is_there_without_its_encoders(tmp_path: Path) -> None:
    """Anima's: with the encoders on the GPU it is one of them."""

    def loaded(words: str) -> int:
        (tmp_path / "train.sh").write_text(IMAGES.format("anima", ANIMA, f"--lora_base_model dit {words}"))
        case = read_case(*dialects.read_script(from_file(tmp_path / "train.sh")), {}, {"gpu": "rtx4090"})
        return check_case(case).outcome.estimate.phases["load"].allocated_bytes

    model = lookup.model("anima")
    away = "--task sft:train --offload_models " + ANIMA.partition(",")[2]
    encoders = 2 * (model.text_encoders[0].parameters + model.vae.parameters)
    assert loaded("") - loaded(away) == pytest.approx(encoders, rel=0.02)


def test_stage_3_gathers_what_is_saved_and_caching_has_no_engine(tmp_path: Path) -> None:
    """accelerate 1.15 raises a ValueError at the first save without the flag; deepspeed 0.19.8 an AssertionError where
    stage 2 is given no optimizer."""
    strategy = Strategy.read({"sharding": "zero-3", "text_encoder": "cached", "vae": "cached"})
    plan = Plan(job=job_for(lookup.model("wan2.1-t2v-14b"), {}), strategy=strategy, machine=Machine(gpu="80GB", gpus=4))
    caching, training = export(plan, "diffsynth", take_nearest=True).files["train.sh"].split("accelerate launch ")[1:]
    assert "--zero3_save_16bit_model true" in training and "--task sft:train" in training
    assert "--use_deepspeed" not in caching and "--task sft:data_process" in caching


def test_under_zero_init_no_weight_is_whole_on_the_gpu(tmp_path: Path) -> None:
    """Without --initialize_model_on_cpu the files are read on the GPU."""

    def loaded(flags: str, words: str) -> int:
        launcher = f"accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device cpu {flags}"
        files = f"{WAN}:diffusion_pytorch_model*.safetensors"
        command = COMMAND.format(files, f"--lora_base_model dit --task sft:train {words}")
        (tmp_path / "a.sh").write_text(command.replace("accelerate launch", launcher))
        case = read_case(*dialects.read_script(from_file(tmp_path / "a.sh")), {}, {"gpu": "24GB"})
        return check_case(case, search=False).outcome.estimate.phases["load"].allocated_bytes

    whole = 2 * lookup.model("wan2.1-t2v-14b").parameters
    assert loaded("--zero3_init_flag true", "--initialize_model_on_cpu") < whole / 10
    for flags, words in (("", "--initialize_model_on_cpu"), ("--zero3_init_flag true", "")):
        assert loaded(flags, words) > whole


def test_a_command_that_only_encodes_is_not_priced(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="encodes the data and trains nothing"):
        read(tmp_path, WAN, "--task sft:data_process")


@pytest.mark.parametrize(("weights", "flag"), [("nf4", "--quant_options"), ("fp8", "--fp8_models")])
def test_the_model_is_not_quantised_while_a_cache_is_made(weights: str, flag: str) -> None:
    """On disk and with a method it ends in a ValueError (diffsynth/core/loader/model.py:36 at fed7b18); in fp8 it is
    loaded, whatever --offload_models says."""
    strategy = Strategy.read({"text_encoder": "cached", "vae": "cached", "weights_dtype": weights})
    plan = Plan(job=job_for(lookup.model("wan2.1-t2v-14b"), {}), strategy=strategy, machine=Machine(gpu="24GB"))
    caching, training = export(plan, "diffsynth", take_nearest=True).files["train.sh"].split("accelerate launch ")[1:]
    assert "--offload_models" in caching and flag not in caching
    assert flag in training


def test_adafactor_of_transformers_is_refused(tmp_path: Path) -> None:
    """Its ``relative_step=True`` takes no lr, which runner.py gives to every optimizer (transformers 5)."""
    files = f"{WAN}:diffusion_pytorch_model*.safetensors,{REST.format(WAN)}"
    words = "--trainable_models dit --customized_optimizer transformers.Adafactor"
    (tmp_path / "a.sh").write_text(COMMAND.format(files, words))
    with pytest.raises(VplanError, match="ends at once"):
        translate(*dialects.read_script(from_file(tmp_path / "a.sh")))
