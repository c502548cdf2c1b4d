"""Commands and files as the trainers' own pages have them, read: flags of every spelling, launchers, versions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import vplan
from planner import dialects
from planner.commands import cli
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.dialects.base.shell import join_continued_lines
from planner.errors import NotRecordedError, VplanError
from planner.estimate.estimate import assess
from planner.foreign.case import read_case
from planner.foreign.change_words import changed_words
from planner.foreign.check import check_case
from planner.foreign.other_ways import with_other_ways
from planner.foreign.pricing import Pricing
from planner.foreign.smallest_change import moves_of, smaller_batches
from planner.spec.plan import Plan, plan_from_toml, plan_to_toml


def read(folder: Path, name: str, text: str) -> tuple[str, Translation, tuple[str, ...]]:
    """Whose file it is, what it means, and what of it is unknown."""
    (folder / name).write_text(text)
    dialect, given = dialects.read_script(from_file(folder / name))
    return dialect.name, translate(dialect, given), given.unknown


WRAPPED = """accelerate launch --mixed_precision bf16 --num_cpu_threads_per_process 1 flux_train_network.py
--pretrained_model_name_or_path flux1-dev.safetensors --clip_l clip_l.safetensors --t5xxl t5xxl_fp16.safetensors
  --ae ae.safetensors --cache_latents_to_disk --cache_latents --sdpa --gradient_checkpointing
--network_module networks.lora_flux --network_dim 4 --optimizer_type adamw8bit --fp8_base --cache_text_encoder_outputs
--blocks_to_swap 8
"""
FULL_SWAP = """accelerate launch --mixed_precision bf16 flux_train.py --gradient_checkpointing \\
  --pretrained_model_name_or_path FLUX.1-dev.safetensors --double_blocks_to_swap 4 --single_blocks_to_swap 8
"""
SDXL = """export MODEL_NAME="stabilityai/stable-diffusion-xl-base-1.0"
accelerate launch train_text_to_image_lora_sdxl.py --pretrained_model_name_or_path=$MODEL_NAME \\
  --pretrained_vae_model_name_or_path="madebyollin/sdxl-vae-fp16-fix" --resolution=1024 --train_batch_size=1 \\
  --mixed_precision="fp16" --validation_prompt="cute dragon creature"
"""
SD = """accelerate launch --mixed_precision="fp16" train_text_to_image.py --use_ema --resolution=512 \\
  --pretrained_model_name_or_path=CompVis/stable-diffusion-v1-4 --gradient_accumulation_steps=4 --train_batch_size=1
"""
FUN = """accelerate launch --mixed_precision="bf16" scripts/z_image/train_lora.py --image_sample_size=1328 \\
  --pretrained_model_name_or_path=models/Diffusion_Transformer/Z-Image --train_batch_size=1 --rank=64 \\
  --gradient_checkpointing --target_name="to_q,to_k,to_v" --use_peft_lora
"""
FUN_INP = """accelerate launch --mixed_precision="bf16" scripts/wan2.1_fun/train_lora.py --video_sample_n_frames=81 \\
  --pretrained_model_name_or_path=models/Diffusion_Transformer/Wan2.1-Fun-V1.1-14B-InP --train_batch_size=1
"""
DIFFSYNTH = """accelerate launch --config_file examples/flux/model_training/full/accelerate_config.yaml \\
  examples/flux/model_training/train.py --trainable_models dit --use_gradient_checkpointing \\
  --model_id_with_origin_paths "black-forest-labs/FLUX.1-dev:flux1-dev.safetensors,\\
black-forest-labs/FLUX.1-dev:text_encoder/model.safetensors,black-forest-labs/FLUX.1-dev:text_encoder_2/*.safetensors,\\
black-forest-labs/FLUX.1-dev:ae.safetensors"
"""
MUSUBI = """accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 {} --gradient_checkpointing \\
  --network_module networks.lora --network_dim 32 --dit x.safetensors
"""
TOOLKIT = """
job: extension
config:
  process:
    - type: sd_trainer
      network: {type: lora, linear: 32}
      datasets: [{folder_path: x, resolution: [1024], num_frames: 1, batch_size: 4, cache_latents: true}]
      train: {dtype: bf16, optimizer: adamw8bit, cache_text_embeddings: true, gradient_accumulation: 1}
      model: {%s}
      sample: {width: 1024, height: 1024, num_frames: 1}
"""
A14B = 'name_or_path: "ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16", arch: wan22_14b, quantize: true, quantize_te: true'


@pytest.mark.parametrize(
    ("name", "text", "trainer", "wanted"),
    [
        ("a.sh", WRAPPED, "sd-scripts",
         {"lora_rank": 4, "weights_dtype": "fp8", "optimizer": "adamw-8bit", "vae": "cached", "swap_blocks": 12}),
        ("a.sh", SDXL, "diffusers",
         {"model": "sdxl", "method": "lora", "text_encoder": "resident", "vae": "resident", "vae_dtype": "bf16"}),
        ("a.sh", SDXL.replace("--pretrained_vae_model_name_or_path", "--variant"), "diffusers", {"vae_dtype": "fp32"}),
        ("a.sh", SD, "diffusers",
         {"model": "sd1.5", "method": "full", "ema": "gpu", "weights_dtype": "fp32", "gradient_accumulation": 4}),
        ("a.sh", FUN, "videox-fun",
         {"model": "z-image", "frames": 1, "height": 1328, "lora_rank": 64, "method": "lora"}),
        ("a.sh", FUN_INP, "videox-fun", {"model": "wan2.1-i2v-14b-480p", "frames": 81, "height": 512}),
        ("a.sh", DIFFSYNTH, "diffsynth", {"sharding": "zero-2", "gpus": 8, "method": "full"}),
        ("a.sh", MUSUBI.format("qwen_image_train_network.py --model_version original --xformers"), "musubi-tuner",
         {"model": "qwen-image", "attention": "efficient"}),
        ("a.sh", MUSUBI.format("qwen_image_train_network.py --model_version edit-2509 --flash3"), "musubi-tuner",
         {"model": "qwen-image-edit", "attention": "flash"}),
        ("a.sh", MUSUBI.format("qwen_image_train_network.py --edit_plus --sdpa"), "musubi-tuner",
         {"model": "qwen-image-edit", "attention": "sdpa"}),
        ("a.sh", MUSUBI.format("hv_1_5_train_network.py --task i2v"), "musubi-tuner",
         {"model": "hunyuan-video-1.5", "attention": "sdpa"}),
        ("c.yaml", TOOLKIT % f"{A14B}, low_vram: true, qtype: 'uint4|ostris/x.safetensors'", "ai-toolkit",
         {"model": "wan2.2-t2v-a14b", "experts": "both", "inactive_expert": "cpu", "weights_dtype": "fp8",
          "text_encoder_dtype": "nf4"}),
        ("c.yaml", TOOLKIT % f"{A14B}, model_kwargs: {{train_high_noise: false}}", "ai-toolkit",
         {"experts": "low", "inactive_expert": "gpu", "weights_dtype": "fp8"}),
        ("c.yaml", TOOLKIT % f"{A14B}, layer_offloading: true, layer_offloading_transformer_percent: 0.5", "ai-toolkit",
         {"swap_blocks": 20, "batch_size": 4}),
    ],
)  # fmt: skip
def test_what_the_trainers_own_pages_have(
    name: str, text: str, trainer: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    whose, reading, unknown = read(tmp_path, name, text)
    found = {**reading.job, **reading.strategy, **reading.machine}
    assert (whose, unknown) == (trainer, ())
    assert {field: found[field] for field in wanted} == wanted


def test_lines_of_flags_belong_to_the_command_above() -> None:
    text = "python a.py \\\n  --a 1\n--b 2\n# --c 3\n--d 4\n\n--e 5\npython b.py ^\n --f\n"
    found, loose = join_continued_lines(text)
    assert found == "python a.py \\\n  --a 1 \\\n--b 2\n# --c 3\n--d 4\n\n--e 5\npython b.py \\\n --f\n" and loose
    assert join_continued_lines("python a.py --a\npython b.py -- --c\n") == (
        "python a.py --a\npython b.py -- --c\n",
        False,
    )


QWEN_SWAP = (
    "accelerate launch --mixed_precision bf16 qwen_image_train.py --dit qwen.safetensors --sdpa"
    " --gradient_checkpointing --full_bf16 --blocks_to_swap 30 --optimizer_type adamw8bit\n"
)


@pytest.mark.parametrize(
    ("text", "fault", "fix"),
    [
        (SD.replace('--mixed_precision="fp16" ', "").replace("text_to_image.py", "text_to_image_lora.py"),
         "without mixed precision", "add --mixed_precision bf16"),
        (FULL_SWAP,
         "contradicts itself", "add --blockwise_fused_optimizers, or leave out --blocks_to_swap"),
        (QWEN_SWAP,
         "contradicts itself", "add --optimizer_type Adafactor --fused_backward_pass, or leave out --blocks_to_swap"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_in_the_trainers_words(text: str, fault: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(text.replace("--use_ema ", ""))
    dialect, given = dialects.read_script(from_file(tmp_path / "a.sh"))
    with pytest.raises(VplanError, match=fault) as caught:
        read_case(dialect, given, {}, {"gpu": "24GB"})
    assert fix in caught.value.fix


# ---- smaller batches


BATCH = SD.replace("train_text_to_image.py --use_ema", "train_text_to_image_lora.py").replace("size=1", "size=12")


def test_a_smaller_batch_with_as_many_samples_a_step_is_offered(tmp_path: Path) -> None:
    """The mildest that does, lossless, in the trainer's flags; applied it fits, and the plan saved says the same."""
    (tmp_path / "a.sh").write_text(BATCH)
    dialect, given = dialects.read_script(from_file(tmp_path / "a.sh"))
    case = read_case(dialect, given, {}, {"gpu": "8GB"})
    found = check_case(case)
    assert found.outcome.estimate.verdict == "no"
    fix = next(fix for fix in found.fixes if any("--train_batch_size" in part for part in fix.change))
    job, strategy = fix.case.job, fix.case.strategy
    assert job.batch_size * strategy.gradient_accumulation == 12 * 4 and job.batch_size < 12
    assert f"--train_batch_size {job.batch_size} --gradient_accumulation_steps {strategy.gradient_accumulation}" in (
        fix.change
    )
    assert not fix.lossy and fix.outcome.estimate.verdict == "fits"
    larger = case.changed({"batch_size": 12, "gradient_accumulation": 4})
    assert Pricing(case).outcome(larger).estimate.verdict == "no"
    plan = plan_from_toml(plan_to_toml(Plan.of(fix.outcome.estimate, trainer=fix.case.trainer)))
    known = Pricing(case).facts(plan.configuration)
    again = assess(plan.configuration, known, plan.trainer).estimate
    assert (again.verdict, again.peak) == (fix.outcome.estimate.verdict, fix.outcome.estimate.peak)


def test_a_change_that_rounds_the_base_is_lossy_though_no_field_of_the_strategy_says_so(tmp_path: Path) -> None:
    """sd-scripts' fp8 base is priced from the recording in 16 bits, so its weights' format stays as it is."""
    command = (
        "accelerate launch sdxl_train_network.py --pretrained_model_name_or_path=sd_xl_base_1.0.safetensors "
        "--resolution=1024,1024 --train_batch_size=1 --network_module=networks.lora --network_dim=16 --xformers "
        "--network_train_unet_only --cache_latents --cache_text_encoder_outputs --mixed_precision=bf16 "
        "--gradient_checkpointing --optimizer_type=AdamW8bit --no_half_vae"
    )
    (tmp_path / "train.sh").write_text(command)
    found = check_case(read_case(*dialects.read_script(from_file(tmp_path / "train.sh")), {}, {"gpu": "6GB"}))
    assert [(fix.change, fix.lossy) for fix in found.fixes] == [(("--fp8_base_unet",), True)]


def test_a_trainer_that_does_not_accumulate_is_offered_another_training() -> None:
    (move,) = smaller_batches(dialects.dialect("latentsync"))
    assert move.steps(
        {"batch_size": 4, "gradient_accumulation": 1, "buckets": (), "frames": 16, "height": 256, "width": 256}
    ) == ({"batch_size": 2}, {"batch_size": 1})
    assert "changes training" in move.cost
    assert smaller_batches(dialects.dialect("diffsynth")) == ()
    (usual,) = smaller_batches(dialects.dialect("diffusers"))
    assert usual.steps({"batch_size": 1, "gradient_accumulation": 8, "buckets": ()}) == ()


def test_a_batch_that_is_not_recorded_names_one_that_is(tmp_path: Path) -> None:
    general = "[general]\nresolution = [960, 544]\nbatch_size = 4\n"
    (tmp_path / "d.toml").write_text(f'{general}[[datasets]]\nvideo_directory = "a"\ntarget_frames = [25]\n')
    image = """accelerate launch train_dreambooth_lora_z_image.py --pretrained_model_name_or_path=Tongyi-MAI/Z-Image \\
      --mixed_precision="bf16" --gradient_checkpointing --cache_latents --resolution=512 --train_batch_size=16
    """
    clip = """accelerate launch src/musubi_tuner/hv_1_5_train_network.py --task t2v --dataset_config d.toml \\
      --network_module networks.lora_hv_1_5 --mixed_precision bf16 --gradient_checkpointing --sdpa --fp8_scaled
    """
    for text, fix in (
        (image, "--train_batch_size 8 --gradient_accumulation_steps 2"),
        (clip, "general.batch_size = 2 --gradient_accumulation_steps 2"),
    ):
        (tmp_path / "a.sh").write_text(text)
        case = read_case(*dialects.read_script(from_file(tmp_path / "a.sh")), {}, {"gpu": "24GB"})
        with pytest.raises(NotRecordedError, match="sample by sample") as caught:
            check_case(case, search=False)
        assert fix in caught.value.fix


def test_a_length_that_is_told_is_that_of_every_bucket(tmp_path: Path) -> None:
    lengths = "target_frames = [1, 25, 45]"
    (tmp_path / "dataset.toml").write_text(f"[general]\nresolution = [960, 544]\n[[datasets]]\n{lengths}\n")
    (tmp_path / "train.sh").write_text(
        "accelerate launch src/musubi_tuner/wan_train_network.py --task t2v-14B --dataset_config dataset.toml "
        "--mixed_precision bf16 --network_module networks.lora_wan --gradient_checkpointing --sdpa\n"
    )
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    plain = read_case(dialect, given, {}, {"gpu": "rtx4090"})
    assert {shape.frames for shape in plain.job.shapes} == {1, 25, 45}
    told = read_case(dialect, given, {"frames": 17, "height": None}, {"gpu": "rtx4090"})
    assert [(shape.frames, shape.height, shape.width) for shape in told.job.shapes] == [(17, 544, 960)]
    with pytest.raises(VplanError, match=r"^frames 18 is not 4n\+1"):
        read_case(dialect, given, {"frames": 18}, {"gpu": "rtx4090"})


REFUSED = {
    "musubi-tuner": "src/musubi_tuner/wan_train_network.py --task t2v-1.3B --network_module networks.lora_wan "
    "--blocks_to_swp 20 --gradient_checkpointing --fp8_base --sdpa --mixed_precision bf16",
    "sd-scripts": "flux_train_network.py --network_module networks.lora_flux --gradient_checkpointing "
    "--sdpaa --fp8_base --mixed_precision bf16 --cache_latents --cache_text_encoder_outputs",
    "diffusers": "examples/dreambooth/train_dreambooth_lora_sdxl.py --pretrained_model_name_or_path "
    "stabilityai/stable-diffusion-xl-base-1.0 --mixed_precision bf16 --gradient_chekpointing",
    "cogvideo": "train.py --training_type lora --train_resolution 49x480x720 --model_name cogvideox-t2v "
    "--model_path THUDM/CogVideoX-2b --model_type t2v --mixed_precision fp16 --rank 16 --bach_size 1",
}
MEANT = {
    "musubi-tuner": ("--blocks_to_swp", "--blocks_to_swap"),
    "sd-scripts": ("--sdpaa", "--sdpa"),
    "diffusers": ("--gradient_chekpointing", "--gradient_checkpointing"),
    "cogvideo": ("--bach_size", "--batch_size"),
}


@pytest.mark.parametrize("trainer", REFUSED)
def test_a_command_whose_option_its_script_refuses_does_not_start(trainer: str) -> None:
    words = ["check", "--gpu", "h200", "--", "accelerate", "launch", *REFUSED[trainer].split()]
    typed, meant = MEANT[trainer]
    told = CliRunner().invoke(cli, words)
    assert told.exit_code == 5, told.stdout + told.stderr
    first, fits, _ = " ".join(told.stdout.split()).partition(" fits: ")
    assert first.startswith(f"does not start: {typed} is not an option of ") and first.endswith(f"mean {meant}?")
    assert fits and "unknown option" not in told.stdout
    answer = CliRunner().invoke(cli, [words[0], "--json", *words[1:]])
    found = json.loads(answer.stdout)
    assert answer.exit_code == 5 and found["verdict"] == "fits" and found["unknown"] == [typed]
    assert [each["flag"] for each in found["refused"]] == [typed]
    repaired = CliRunner().invoke(cli, [meant if word == typed else word for word in words])
    assert repaired.exit_code == 0 and repaired.stdout.startswith("fits: ")


def test_what_neither_starts_nor_fits_does_not_fit() -> None:
    words = REFUSED["sd-scripts"].replace("--gradient_checkpointing", "--gradient_checkpointin --zzz").split()
    told = CliRunner().invoke(cli, ["check", "--gpu", "8GB", "--no-fixes", "--", "accelerate", "launch", *words])
    assert told.exit_code == 3 and told.stdout.startswith("does not start: --zzz ")


def test_configs_and_their_scripts_refuse_options_alike(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "config:\n  process:\n  - model:\n      name_or_path: Wan-AI/Wan2.1-T2V-1.3B-Diffusers\n      arch: wan21\n"
    )
    command = tmp_path / "run.sh"
    command.write_text("python run.py config.yaml --recovr -n mine\n")
    _, given = dialects.read_script(from_file(command))
    assert [each.flag for each in given.refused] == ["--recovr"] and given.unknown == ("--recovr",)
    assert given.refused[0].why.endswith("did you mean --recover?")


WAN_TOOLKIT = """config:
  process:
  - type: sd_trainer
    network: {type: lora, linear: 16, linear_alpha: 16}
    datasets: [{folder_path: x, resolution: [512], num_frames: 1}]
    train: {batch_size: 1, dtype: bf16, gradient_checkpointing: false, optimizer: adamw}
    model: {name_or_path: ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16, arch: wan22_14b}
"""


def test_a_change_of_a_config_has_one_key_a_line(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(WAN_TOOLKIT)
    words = ["check", "--gpu", "24GB", str(config)]
    told = CliRunner().invoke(cli, words)
    lines = told.stdout.split("smallest change:\n")[1].split("    fits")[0].splitlines()
    shown = [line for line in lines if not line.startswith(" " * 6)]  # what each costs is further in
    assert len(shown) >= 3 and all(re.fullmatch(r"  [\w.\[\]]+: \S+", line) for line in shown)
    change = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)["fixes"][0]["change"]
    assert [line for part in change for line in part.splitlines()] == [line.strip() for line in shown]
    assert any("\n" in part for part in change)  # what belongs together is one entry
    assert "lora, 512x512, on" in told.stdout  # one frame is an image


def test_flags_of_one_change_stay_on_one_line() -> None:
    command = "flux_train.py --full_bf16 --mixed_precision bf16 --cache_latents --cache_text_encoder_outputs"
    told = CliRunner().invoke(cli, ["check", "--gpu", "48GB", "--json", "--", "accelerate", "launch", *command.split()])
    parts = [part for fix in json.loads(told.stdout)["fixes"] for part in fix["change"]]
    assert any(" --" in part for part in parts) and not any("\n" in part for part in parts)


def test_an_arch_that_is_not_known_names_those_that_can_be_typed(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    named = WAN_TOOLKIT.replace("ai-toolkit/Wan2.2-T2V-A14B-Diffusers-bf16, arch: wan22_14b", "x/y, arch: omnigen2")
    config.write_text(named)
    with pytest.raises(VplanError, match=r"model\.arch 'omnigen2' is not supported") as raised:
        read(tmp_path, "train.yaml", named)
    arches = raised.value.fix.removeprefix("model.arch can be ").split(", ")
    assert {"wan21", "wan22_14b", "flux", "qwen_image"} < set(arches) and "wan2.1-t2v-1.3b" not in arches


def test_a_4_bit_base_is_not_offered_8_bits_and_what_is_set_is_not_said_again(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(TOOLKIT % f"{A14B}, low_vram: true, quantize_te: false, qtype: qint4")
    dialect, given = dialects.read_script(from_file(tmp_path / "c.yaml"))
    case = read_case(dialect, given, {}, {"gpu": "16GB"})
    assert case.strategy.weights_dtype == "nf4"
    assert not any("weights_dtype" in move.changes for move in moves_of(case))
    eight = case.changed({"weights_dtype": "fp8"})
    words = list(changed_words(case, eight.fields, frozenset({"weights_dtype"})))
    assert any("model.qtype" in word for word in words) and not any("model.quantize:" in word for word in words), words


FULL_FLUX = (
    "accelerate launch --mixed_precision bf16 train_dreambooth_flux.py --instance_data_dir data --instance_prompt sks"
    " --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev --gradient_checkpointing --use_8bit_adam\n"
)


def test_where_no_option_is_enough_the_card_that_is_stands_there(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(FULL_FLUX)
    dialect, given = dialects.read_script(from_file(tmp_path / "a.sh"))
    found = with_other_ways(check_case(read_case(dialect, given, {}, {"gpu": "24GB"})))
    assert not found.fixes and found.larger_card is not None
    there = found.larger_card.estimate
    again = check_case(read_case(dialect, given, {}, {"gpu": there.machine.gpu}), search=False)
    assert there.verdict == "fits" and again.outcome.estimate.peak == there.peak
    smaller = check_case(read_case(dialect, given, {}, {"gpu": "96GB"}), search=False)
    assert (
        found.as_lora is not None and found.as_lora[0] == "vplan suggest flux.1-dev --gpu 24GB --resolution 512x512"
    ), "its own LoRA does not fit"
    assert smaller.outcome.estimate.verdict == "no" and found.to_json()["larger_card"] == there.machine.gpu


def test_where_full_training_does_not_fit_a_lora_that_does_is_priced(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(SDXL_FULL)
    dialect, given = dialects.read_script(from_file(tmp_path / "a.sh"))
    found = with_other_ways(check_case(read_case(dialect, given, {}, {"gpu": "12GB"})))
    assert not found.fixes and found.as_lora is not None
    words, plan = found.as_lora
    assert words == "vplan suggest sdxl --gpu 12GB --resolution 1024x1024 --for diffusers"
    again = vplan.suggest("sdxl", gpu="12GB", resolution="1024x1024", trainer="diffusers").estimate
    assert plan.verdict == "fits" and again.peak == plan.peak


SDXL_FULL = (
    "accelerate launch --mixed_precision bf16 train_text_to_image_sdxl.py --train_data_dir data --train_batch_size 1"
    " --pretrained_model_name_or_path stabilityai/stable-diffusion-xl-base-1.0 --resolution 1024 --use_8bit_adam"
    " --gradient_checkpointing\n"
)


def test_a_change_back_to_the_trainers_default_is_said(tmp_path: Path) -> None:
    """A batch of one is sd-scripts' default; where four is typed, leaving it out of the change would leave four."""
    words = "sdxl_train_network.py --network_module networks.lora --mixed_precision bf16 --gradient_checkpointing"
    (tmp_path / "a.sh").write_text(
        f"{words} --resolution 1024,1024 --network_dim 64 --train_batch_size 4 --pretrained_model_name_or_path a\n"
    )
    dialect, given = dialects.read_script(from_file(tmp_path / "a.sh"))
    case = read_case(dialect, given, {}, {"gpu": "12GB"})
    other = case.changed({"batch_size": 1, "gradient_accumulation": 4})
    changed = list(changed_words(case, other.fields, frozenset({"batch_size", "gradient_accumulation"})))
    assert changed == ["--train_batch_size 1", "--gradient_accumulation_steps 4"]
