"""Settings of other trainers that no binding reads: each is read, said beside the answer, refused, or does nothing."""

import re
from pathlib import Path

import pytest

import planner.dialects
import profiles
from planner import dialects
from planner.dialects.base import flag_effects, flags
from planner.dialects.base.dialect import translate
from planner.dialects.base.flag_effects import FlagEffects
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import check_case

WITH_EFFECTS = sorted(path.stem for path in profiles.FLAG_EFFECTS.glob("*.toml"))
READERS = Path(planner.dialects.__file__).parent


def known_names(trainer: str) -> set[str]:
    """Every flag and key of a trainer's scripts and files, but those that are gone."""
    return {name for script in flags.scripts(trainer) for name, flag in script.flags.items() if not flag.gone}


def read_words(trainer: str) -> set[str]:
    """The words of the code that reads a trainer, without the dots and dashes between them."""
    folders = (trainer.replace("-", "_"), f"{trainer.replace('-', '_')}_", "base", "engine_files", "accelerate")
    files = [path for path in READERS.rglob("*.py") if path.parent.name.startswith(folders)]
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("trainer", WITH_EFFECTS)
def test_no_setting_passes_in_silence(trainer: str) -> None:
    known, words, said = known_names(trainer), read_words(trainer), flag_effects.effects(trainer)
    unpriced = [name for row in said.unpriced for name in row.names]
    named = [*unpriced, *said.nothing]
    assert len(set(named)) == len(named), "a setting is named twice"
    assert set(named) <= known, "a setting that the trainer does not have"
    read = {name for name in known if set(re.findall(r"\w+", name.rpartition(".")[2])) <= words}
    assert sorted(known - read - set(named)) == []


def test_a_setting_is_said_where_it_acts() -> None:
    said = FlagEffects.read(
        {
            "unpriced": [
                {"names": ["a[].b"], "why": "one more pass", "source": "x.py", "needs": "more", "off": ["usual"]},
                {"names": ["--c"], "why": "tiles", "source": "x.py", "needs": "less", "scripts": ["flux_train.py"]},
            ]
        }
    )
    given = {"config:a[3].b": True, "--c": "yes"}
    assert [name for name, _ in said.acting({**given, "script": "some/flux_train.py"})] == ["a[].b", "--c"]
    assert [name for name, _ in said.acting({**given, "script": "sdxl_train.py"})] == ["a[].b"]
    for off in (False, 0, "none", "", None, "usual"):
        assert not list(said.acting({"config:a[0].b": off}))


def test_a_setting_is_said_of_the_models_that_read_it(tmp_path: Path) -> None:
    """ai-toolkit's UI writes do_i2v whatever the model is."""
    for model, is_said in (("Lightricks/LTX-2.3", True), (FLUX, False)):
        _, notes = read_ostris(tmp_path, model, dataset="num_frames: 9, do_i2v: true, do_audio: true")
        named = [name for name in ("do_i2v", "do_audio") if any(name in note for note in notes)]
        assert named == (["do_i2v", "do_audio"] if is_said else [])


def test_what_is_refused_is_said_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "FLAG_EFFECTS", tmp_path)
    text = '[[unpriced]]\nnames = ["--two"]\nwhy = "a second model"\nsource = "x.py"\nneeds = "more"\n'
    (tmp_path / "told.toml").write_text(text)
    (tmp_path / "refused.toml").write_text(f"{text}refused = true\n")
    assert flag_effects.notes("nobody", {"--two": True}) == ()
    (note,) = flag_effects.notes("told", {"--two": True, "--other": 1})
    assert note == "--two is not estimated (a second model), and takes more than this"
    with pytest.raises(VplanError, match=r"--two is not priced \(a second model\)"):
        flag_effects.notes("refused", {"--two": True})


def test_a_key_of_a_table_is_its_table_s() -> None:
    said = FlagEffects.read(
        {"unpriced": [{"names": ["routes"], "why": "routed past", "source": "x.py", "needs": "less", "refused": True}]}
    )
    assert [name for name, _ in said.acting({"config:routes.list[0].ratio": 0.5})] == ["routes"]
    assert not list(said.acting({"config:routes.on": False, "config:other.routes": 1}))


OSTRIS = """job: extension
config:
  name: lora
  process:
    - type: sd_trainer
      network: {type: lora, linear: 16%s}
      datasets:
        - {folder_path: a, resolution: 512, cache_latents_to_disk: true}
        - {folder_path: b, resolution: [768], cache_latents_to_disk: true%s}
      train: {batch_size: 2, dtype: bf16, optimizer: adamw8bit%s}
      sample: {width: 512, height: 512, guidance_scale: 1, samples: [{prompt: x}%s]}
      model: {name_or_path: %s, quantize: true}
"""
FLUX, WAN = "black-forest-labs/FLUX.1-dev", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"


def read_ostris(folder: Path, model: str = FLUX, **added: str) -> tuple[dict[str, object], tuple[str, ...]]:
    words = [f", {added[name]}" if name in added else "" for name in ("network", "dataset", "train", "sample")]
    (folder / "a.yaml").write_text(OSTRIS % (*words, model), encoding="utf-8")
    dialect, given = dialects.read_script(from_file(folder / "a.yaml"))
    found = translate(dialect, given)
    return {**found.job, **found.strategy}, found.notes


def test_ai_toolkit_trains_every_dataset(tmp_path: Path) -> None:
    found, _ = read_ostris(tmp_path, dataset="batch_size: 4")
    assert [found[name] for name in ("height", "batch_size", "vae", "text_encoder")] == [768, 4, "cached", "resident"]
    found, _ = read_ostris(tmp_path, dataset="augments: [a], cache_text_embeddings: true")
    assert [found[name] for name in ("vae", "text_encoder")] == ["resident", "cached"]


def test_the_largest_sample_of_ai_toolkit_counts(tmp_path: Path) -> None:
    (small, _), (large, _) = read_ostris(tmp_path), read_ostris(tmp_path, sample="{width: 1024, height: 1536}")
    assert getattr(small["validation"], "height", None) == 512
    assert getattr(large["validation"], "height", None) == 1536


def test_clips_of_their_own_length_are_no_still_images(tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="auto_frame_count trains each clip at its own length"):
        read_ostris(tmp_path, WAN, dataset="auto_frame_count: true")
    found, notes = read_ostris(tmp_path, WAN, dataset="auto_frame_count: true, num_frames: 81")
    assert found["frames"] == 81 and any("auto_frame_count is not estimated" in note for note in notes)


@pytest.mark.parametrize(
    "train", ["do_cfg: true", "diff_output_preservation: true", "loss_type: mean_flow", "train_unet: false"]
)
def test_another_step_of_ai_toolkit_is_refused(train: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="is not priced"):
        read_ostris(tmp_path, train=train)


def test_what_changes_little_in_ai_toolkit_is_said(tmp_path: Path) -> None:
    _, notes = read_ostris(tmp_path, train="do_guidance_loss: true, loss_type: mse, train_text_encoder: false")
    assert [note for note in notes if "is not estimated" in note] == [
        "config.process[].train.do_guidance_loss is not estimated (one more forward without gradients in each step: "
        "seconds above all), and takes more or less than this"
    ]
    _, notes = read_ostris(tmp_path, network="transformer_only: false")
    assert any("network.transformer_only false" in note for note in notes)


def read_command(folder: Path, words: str) -> tuple[dict[str, object], tuple[str, ...]]:
    (folder / "a.sh").write_text(f"accelerate launch {words}\n", encoding="utf-8")
    dialect, given = dialects.read_script(from_file(folder / "a.sh"))
    found = translate(dialect, given)
    return {**found.job, **found.strategy}, found.notes


QWEN = (
    "examples/qwen_image/model_training/train.py --dataset_base_path d --height 512 --width 512 --lora_base_model dit "
    "--model_id_with_origin_paths Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors"
)


@pytest.mark.parametrize(
    "words",
    [
        "--task direct_distill",
        "--cpu_offload_split_threshold 2000 --enable_model_cpu_offload",
        "--extra_inputs context_image",
        "--extra_inputs blockwise_controlnet_image",
        "--extra_inputs edit_image",
        "--extra_inputs flux_redux_image",
    ],
)
def test_another_step_of_diffsynth_is_refused(words: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="is not priced"):
        read_command(tmp_path, f"{QWEN} {words}")


def test_a_template_model_counts_where_the_script_reads_it(tmp_path: Path) -> None:
    template = "--template_model_id_or_path x --task sft:train --preset_lora_path a.safetensors --enable_csv_log"
    read_command(tmp_path, f"{QWEN} {template}")
    z_image = QWEN.replace("qwen_image", "z_image").replace("Qwen/Qwen-Image:", "Tongyi-MAI/Z-Image-Turbo:")
    with pytest.raises(VplanError, match="a template model"):
        read_command(tmp_path, f"{z_image} {template}")


def test_what_a_model_of_diffsynth_takes_is_read(tmp_path: Path) -> None:
    edit = QWEN.replace("Qwen-Image:", "Qwen-Image-Edit:")
    found, _ = read_command(tmp_path, f"{edit} --extra_inputs edit_image --task sft")
    assert (found["model"], found["references"]) == ("qwen-image-edit", None)
    flux = QWEN.replace("qwen_image/", "flux2/").replace("Qwen/Qwen-Image", "black-forest-labs/FLUX.2-dev")
    assert read_command(tmp_path, flux)[0]["references"] is None
    assert read_command(tmp_path, f"{flux} --extra_inputs edit_image")[0]["references"] == 1


TOKENS = "--random_hw_adapt --training_with_video_token_length --enable_bucket --train_batch_size 1"
EASY = (
    "scripts/train_lora.py --pretrained_model_name_or_path EasyAnimateV5.1-7b-zh-InP --video_sample_n_frames 49 "
    "--train_mode inpaint --token_sample_size 512"
)
FUN = (
    "scripts/wan2.1/train_lora.py --pretrained_model_name_or_path Wan2.1-T2V-1.3B --video_sample_n_frames 81 "
    "--train_mode normal"
)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (f"{EASY} --image_sample_size 1024 --video_sample_size 256 {TOKENS}", (1024, 13, 1)),
        (f"{EASY} --image_sample_size 512 --video_sample_size 512 {TOKENS}", (512, 49, 1)),
        (f"{EASY} --image_sample_size 256 --video_sample_size 256 {TOKENS}", (256, 49, 2)),
        (f"{EASY} --image_sample_size 1024 --video_sample_size 256 --train_batch_size 1", (256, 49, 1)),
        (f"{FUN} --image_sample_size 640 --video_sample_size 640 --token_sample_size 640 {TOKENS}", (640, 81, 1)),
        (f"{FUN} --image_sample_size 256 --video_sample_size 256 --token_sample_size 512 {TOKENS}", (256, 81, 1)),
        (f"{FUN} --image_sample_size 256 --video_sample_size 256 {TOKENS} --auto_tile_batch_size", (256, 81, 2)),
        (f"{FUN} --fix_sample_size 480 832 --enable_bucket --train_batch_size 2", (480, 81, 2)),
    ],
)
def test_clips_of_several_sizes_are_read_as_the_largest(
    words: str, wanted: tuple[int, int, int], tmp_path: Path
) -> None:
    found, notes = read_command(tmp_path, words)
    assert (found["height"], found["frames"], found["batch_size"]) == wanted
    several = any("clips train at several sizes" in note for note in notes)
    assert several is (wanted in ((1024, 13, 1), (256, 49, 2), (256, 81, 2)))


def test_validation_of_two_experts_is_said(tmp_path: Path) -> None:
    two = FUN.replace("wan2.1/", "wan2.2/").replace("Wan2.1-T2V-1.3B", "Wan2.2-T2V-A14B")
    for words, said in (
        (f"{two} --validation_prompts a", True),
        (two, False),
        (f"{FUN} --validation_prompts a", False),
    ):
        assert any("other expert" in note for note in read_command(tmp_path, words)[1]) is said


@pytest.mark.parametrize(
    "launch",
    [
        "--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP",
        "--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false",
        "--mixed_precision fp8",
        "--use_parallelism_config --parallelism_config_cp_size 2",
    ],
)
def test_another_run_of_a_launcher_is_refused(launch: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match="is not priced"):
        read_command(tmp_path, f"{launch} {QWEN}")


def test_a_launcher_s_settings_are_no_trainer_s(tmp_path: Path) -> None:
    usual = "--use_fsdp --num_processes 2 --fsdp_sharding_strategy FULL_SHARD --fsdp_reshard_after_forward true"
    policy = "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --mixed_precision bf16 --parallelism_config_tp_size 1"
    z_image = "train_dreambooth_lora_z_image.py --pretrained_model_name_or_path Tongyi-MAI/Z-Image"
    command = f"{usual} --fsdp_version 2 {policy} {z_image}"
    found, notes = read_command(tmp_path, command)
    assert found["sharding"] == "fsdp" and not [note for note in notes if "is not estimated" in note]
    _, notes = read_command(tmp_path, f"--fsdp_activation_checkpointing true {command}")
    assert [note.partition(" (")[0] for note in notes if "is not estimated" in note] == [
        "--fsdp_activation_checkpointing is not estimated"
    ]


def test_syncnet_of_latentsync_is_refused(tmp_path: Path) -> None:
    text = "data: {syncnet_config_path: a.yaml, resolution: 256}\nrun: {use_syncnet: %s}\n"
    for on, wanted in (("false", None), ("true", "run.use_syncnet is not priced")):
        (tmp_path / "stage1.yaml").write_text(text % on, encoding="utf-8")
        dialect, given = dialects.read_script(from_file(tmp_path / "stage1.yaml"))
        if wanted is None:
            assert translate(dialect, given).job["height"] == 256
        else:
            with pytest.raises(VplanError, match=wanted):
                translate(dialect, given)


def test_megatron_of_an_accelerate_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "megatron.yaml").write_text("distributed_type: MEGATRON_LM\nnum_processes: 2\n", encoding="utf-8")
    with pytest.raises(VplanError, match="--use_megatron_lm is not priced"):
        read_command(tmp_path, f"--config_file megatron.yaml {QWEN}")


FULL_OF_FLUX = """
dataset = "set.toml"
micro_batch_size_per_gpu = 1
activation_checkpointing = true
[model]
type = "flux"
diffusers_path = "FLUX.1-dev"
dtype = "bfloat16"
[optimizer]
type = "adamw_optimi"
"""


@pytest.mark.parametrize(("gpus", "ways"), [(1, []), (5, ["pipeline_stages = 5"])])
def test_what_a_trainer_has_and_nothing_prices_is_named_where_no_option_is_enough(
    tmp_path: Path, gpus: int, ways: list[str]
) -> None:
    """Who trains FLUX.1 in full on five cards of 48 GB cuts the model over them; on one nothing is cut."""
    (tmp_path / "set.toml").write_text("resolutions = [512]\n[[directory]]\npath = 'images'\n")
    (tmp_path / "full.toml").write_text(FULL_OF_FLUX)
    (tmp_path / "train.sh").write_text(f"deepspeed --num_gpus={gpus} train.py --deepspeed --config full.toml\n")
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    found = check_case(read_case(dialect, given, {}, {"gpu": "48GB"}))
    assert found.outcome.estimate.verdict == "no"
    assert [way.written for way in found.not_priced] == ways
    assert [way["written"] for way in found.to_json().get("not_priced", [])] == ways


def test_a_way_that_is_in_use_is_not_named_again() -> None:
    ways = flag_effects.other_ways("simpletuner", {"config:model_family": "flux"}, "encode", 1)
    assert [way.written for way in ways] == ["offload_during_startup: true"]
    used = {"config:offload_during_startup": True}
    assert not list(flag_effects.other_ways("simpletuner", used, "encode", 1))
    assert not list(flag_effects.other_ways("simpletuner", {}, "train", 1))
