"""FSDP by accelerate's launch: what is read of it, what is refused, and what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dialects.accelerate import settings as accelerate
from planner.dialects.base.bindings import Fields, InexpressibleError
from planner.dialects.base.dialect import Translation, settings_for, translate
from planner.dialects.base.script import from_file
from planner.dialects.videox_fun.settings import BLOCKS
from planner.errors import VplanError
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve

Z_IMAGE = "train_dreambooth_lora_z_image.py --pretrained_model_name_or_path Tongyi-MAI/Z-Image --train_batch_size 1"
WAN = (
    "scripts/wan2.1/train.py --pretrained_model_name_or_path Wan2.1-T2V-1.3B --video_sample_n_frames 81 "
    "--train_mode normal --trainable_modules ."
)
WAN_LORA = WAN.replace("train.py", "train_lora.py")
EASY = "scripts/train.py --pretrained_model_name_or_path EasyAnimateV5.1-7b-zh-InP --video_sample_n_frames 49"
QWEN = (
    "examples/qwen_image/model_training/train.py --dataset_base_path d --height 512 --width 512 --lora_base_model dit "
    "--model_id_with_origin_paths Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors"
)
SD_SCRIPTS = "flux_train_network.py --pretrained_model_name_or_path flux1-dev.safetensors --mixed_precision bf16"
FLUX = "train_dreambooth_lora_flux.py --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev"
FSDP = "--num_processes 2 --mixed_precision bf16 --use_fsdp"
BY_CLASS = "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
WAN_CLASS = f"{BY_CLASS} --fsdp_transformer_layer_cls_to_wrap WanAttentionBlock"
CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_activation_checkpointing: false
  %s
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
"""
"""As `accelerate config` writes it."""


def read(folder: Path, words: str) -> Translation:
    (folder / "train.sh").write_text(f"accelerate launch {words}\n", encoding="utf-8")
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    return translate(dialect, given)


@pytest.mark.parametrize(
    ("words", "fault", "fix"),
    [
        (f"{FSDP} --fsdp_version 2 {Z_IMAGE}", "wraps nothing: the whole model is gathered at once", BY_CLASS),
        (f"{FSDP} --fsdp_auto_wrap_policy NO_WRAP {WAN}", "wraps nothing", WAN_CLASS),
        (f"{FSDP} {BY_CLASS} {WAN}", "without classes wraps nothing", "WanAttentionBlock"),
        (f"{FSDP} --fsdp_version 2 {WAN_CLASS} {WAN}", "--fsdp_version 1 alone", "leave --use_fsdp out"),
        (f"{FSDP} --fsdp_offload_params true {WAN_CLASS} {WAN}", "no --fsdp_offload_params", "leave --use_fsdp out"),
        (f"{FSDP} {WAN_CLASS} {WAN_LORA}", "FSDP 1 keeps the frozen weights", "--fsdp_version 2"),
        (f"--num_processes 2 --use_fsdp {WAN_CLASS} {WAN}", "without mixed precision", "--mixed_precision bf16"),
        (f"{FSDP} {WAN_CLASS} {WAN} --use_ema", "its scripts keep no average", "leave --use_fsdp out"),
        (f"{FSDP} --fsdp_auto_wrap_policy TRANSFOMER_BASED_WRAP {WAN}", "is none of accelerate's", BY_CLASS[-22:]),
        (f"{FSDP} --fsdp_version 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP {Z_IMAGE}", "lists of blocks", BY_CLASS),
        (f"{FSDP} {BY_CLASS} {EASY}", "its scripts know DeepSpeed alone", "leave --use_fsdp out"),
        (f"{FSDP} --fsdp_version 2 {BY_CLASS} {QWEN}", "model are one module", "leave --use_fsdp out"),
        (f"{FSDP} --fsdp_version 2 {BY_CLASS} {SD_SCRIPTS}", "is not priced with sd-scripts", "leave --use_fsdp out"),
        (f"{FSDP} --fsdp_version 2 {BY_CLASS} {FLUX}", "flux.py has no code for it", "leave --use_fsdp out"),
    ],
)
def test_what_is_not_gathered_block_by_block_is_refused(words: str, fault: str, fix: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError) as raised:
        read(tmp_path, words)
    assert fault in raised.value.message and fix in raised.value.fix


def test_classes_are_read_as_accelerate_reads_them(tmp_path: Path) -> None:
    flux = "scripts/flux/train.py --pretrained_model_name_or_path FLUX.1-dev"
    with pytest.raises(VplanError, match="leaves FluxSingleTransformerBlock out"):
        read(tmp_path, f"{FSDP} {BY_CLASS} --fsdp_transformer_layer_cls_to_wrap FluxTransformerBlock {flux}")
    both = "'FluxTransformerBlock, FluxSingleTransformerBlock'"
    with pytest.raises(VplanError, match="finds no class ' FluxSingleTransformerBlock'"):
        read(tmp_path, f"{FSDP} {BY_CLASS} --fsdp_transformer_layer_cls_to_wrap {both} {flux}")
    found = read(
        tmp_path, f"{FSDP} {BY_CLASS} --fsdp_transformer_layer_cls_to_wrap {both.replace(' ', '')} {flux}"
    ).strategy
    assert (found["sharding"], found["weights_dtype"], found["autocast"]) == ("fsdp", "fp32", "none")


def test_units_by_size_are_said(tmp_path: Path) -> None:
    notes = read(tmp_path, f"{FSDP} --fsdp_auto_wrap_policy SIZE_BASED_WRAP {WAN}").notes
    assert any(note.startswith("--fsdp_auto_wrap_policy is not estimated (units by size") for note in notes)


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", ""),
        ("fsdp_auto_wrap_policy: NO_WRAP", "wraps nothing"),
        ("fsdp_use_orig_params: true", "wraps nothing"),
    ],
)
def test_the_policy_of_a_config_counts(policy: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(CONFIG % policy, encoding="utf-8")
    words = f"--config_file fsdp.yaml {Z_IMAGE}"
    if fault:
        with pytest.raises(VplanError, match=fault):
            read(tmp_path, words)
    else:
        found = read(tmp_path, words)
        assert (found.strategy["sharding"], found.machine["gpus"]) == ("fsdp", 2)
        assert found.strategy["adapter_dtype"] == "fp32"  # which the script would keep in bf16


def test_what_trains_has_the_format_that_the_script_leaves(tmp_path: Path) -> None:
    command = f"{FSDP} {WAN_CLASS}"
    lora = read(tmp_path, f"{command} --fsdp_version 2 {WAN_LORA}")
    assert (lora.strategy["weights_dtype"], lora.strategy["adapter_dtype"]) == ("bf16", "bf16")
    assert read(tmp_path, f"{command} {WAN}").strategy["weights_dtype"] == "fp32"
    whole = "keeps them whole and in fp32 on every GPU"
    assert not any(whole in note for note in lora.notes)
    loaded = f"{command} --fsdp_version 2 --fsdp_cpu_ram_efficient_loading False {WAN_LORA}"
    assert any(whole in note for note in read(tmp_path, loaded).notes)


def fields(model: str, method: str, **said: Any) -> Fields:
    """A job of a model under FSDP on two GPUs, as the scripts that know it train it."""
    job = job_for(lookup.model(model), {"method": method})
    strategy = resolve(job, Strategy(sharding="fsdp", grad_buckets="copy", optimizer_step="foreach", **said))
    return {**job.__dict__, **strategy.__dict__, "gpus": 2, "nodes": 1, "width": job.height}


@pytest.mark.parametrize(
    ("trainer", "asked", "classes"),
    [
        ("diffusers", fields("z-image", "lora", adapter_dtype="fp32", text_encoder="cached", vae="resident"), None),
        ("videox-fun", fields("wan2.1-t2v-1.3b", "full"), "WanAttentionBlock"),
        ("videox-fun", fields("flux.1-dev", "lora", adapter_dtype="bf16"), ",".join(BLOCKS["flux"])),
        ("videox-fun", fields("hunyuan-video", "full"), None),
    ],
)
def test_what_is_written_wraps_blocks(trainer: str, asked: Fields, classes: str | None, tmp_path: Path) -> None:
    dialect = dialects.dialect(trainer)
    asked = asked | {"text_encoder": "resident", "vae": "resident"} if trainer == "videox-fun" else asked
    said = settings_for(dialect, asked)
    assert said["launch:--fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert said.get("launch:--fsdp_transformer_layer_cls_to_wrap") == classes
    assert said["--mixed_precision"] == "bf16"
    plan = Plan.model_construct(
        job=Job.model_construct(**{field: asked[field] for field in Job.model_fields}),
        strategy=Strategy.model_construct(**{field: asked[field] for field in Strategy.model_fields}),
        machine=Machine(gpu="h100-80gb", gpus=2),
        trainer=trainer,
    )
    assert dialect.files is not None
    (text,) = dialect.files(plan, said).values()
    (tmp_path / "train.sh").write_text(text, encoding="utf-8")
    again, found = dialects.read_script(from_file(tmp_path / "train.sh"))
    back = translate(again, found)
    assert back.strategy["sharding"] == "fsdp"
    trained = "adapter_dtype" if asked["method"] == "lora" else "weights_dtype"
    assert back.strategy[trained] == asked[trained]


@pytest.mark.parametrize(("trainer", "model"), [("easyanimate", "easyanimate-v5.1-7b"), ("diffsynth", "qwen-image")])
def test_fsdp_is_not_written_for_scripts_without_it(trainer: str, model: str) -> None:
    with pytest.raises(InexpressibleError) as raised:
        settings_for(dialects.dialect(trainer), fields(model, "full"))
    assert ("sharding", "fsdp") in [(value.field, value.value) for value in raised.value.values]


@pytest.mark.parametrize("model", ["ltx-video-2b", "hunyuan-video", "sdxl", "wan2.1-t2v-1.3b", "ernie-image"])
def test_every_block_of_diffusers_class_is_a_unit_of_accelerate_s_config(model: str) -> None:
    """By accelerate's own look-up of the classes, in the class as diffusers builds it."""
    pytest.importorskip("diffusers")
    import diffusers
    import torch
    import yaml
    from accelerate.utils.dataclasses import get_module_class_from_name

    profile = lookup.model(model)
    job = job_for(profile, {"method": "full"})
    machine = Machine(gpu="b200", gpus=8)
    plan = Plan(job=job, strategy=resolve(job, Strategy(sharding="fsdp"), machine), machine=machine)
    said = settings_for(accelerate.DIALECT, {**job.__dict__, **plan.strategy.__dict__, "gpus": 8, "nodes": 1})
    config = yaml.safe_load(accelerate.files(plan, said)["accelerate.yaml"])["fsdp_config"]
    kind = getattr(diffusers, profile.diffusers_class)
    names = config.get("fsdp_transformer_layer_cls_to_wrap", "").split(",")
    assert (names != [""]) == (profile.diffusers_class in accelerate.UNNAMED_BLOCKS)
    wanted = names if names != [""] else kind._no_split_modules
    with torch.device("meta"):
        built = kind.from_config(dict(profile.config))
    units = tuple(get_module_class_from_name(built, name) for name in wanted)
    assert None not in units
    assert all(isinstance(block, units) for stack in profile.stacks for block in built.get_submodule(stack.list))
