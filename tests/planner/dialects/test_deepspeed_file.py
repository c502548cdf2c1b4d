"""DeepSpeed's JSON that a launch names: what is translated, said and refused of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.engine_files.deepspeed_file import zero_settings
from planner.dialects.base.launchers import ALLOCATOR as EXPANDABLE
from planner.dialects.base.script import from_file
from planner.dialects.easyanimate.zero_launch import ZERO_2, launched_by_deepspeed
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import Checked, check_case
from planner.layout.run_records import ZeroSettings
from planner.units import GIB

EASY = "scripts/train.py --pretrained_model_name_or_path EasyAnimateV5.1-7b-zh-InP --video_sample_n_frames 49"
BF16 = {"bf16": {"enabled": True}}


def read(folder: Path, zero: dict[str, Any], **top: Any) -> Translation:
    (folder / "ds.json").write_text(json.dumps({**BF16, "zero_optimization": zero, **top}), encoding="utf-8")
    return command(folder)


def command(folder: Path) -> Translation:
    launch = "accelerate launch --num_processes 4 --use_deepspeed --deepspeed_config_file ds.json"
    (folder / "train.sh").write_text(f"{launch} {EASY} --use_deepspeed\n", encoding="utf-8")
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    return translate(dialect, given)


def said(found: Translation) -> list[str]:
    return [note.partition(" is not estimated")[0] for note in found.notes if " is not estimated (" in note]


USUAL: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "none"},
}


def test_what_is_as_priced_is_passed_over(tmp_path: Path) -> None:
    found = read(tmp_path, USUAL, train_batch_size="auto", gradient_clipping="auto", wall_clock_breakdown=False)
    assert said(found) == [] and not any("is no key" in note for note in found.notes)
    assert (found.strategy["sharding"], found.strategy["offload_optimizer"]) == ("zero-3", "cpu")
    assert found.strategy["offload_params"] == "none"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("contiguous_gradients", False),
        ("reduce_scatter", False),
    ],
)
def test_what_stages_1_and_2_do_otherwise_is_said(key: str, value: object, tmp_path: Path) -> None:
    assert said(read(tmp_path, {"stage": 2, key: value})) == [f"zero_optimization.{key}"]


def test_keys_of_stage_3_do_nothing_before_it(tmp_path: Path) -> None:
    assert said(read(tmp_path, {**USUAL, "stage": 2, "overlap_comm": False, "stage3_prefetch_bucket_size": 5e9})) == []


@pytest.mark.parametrize(
    ("zero", "top", "fault"),
    [
        ({"stage": 3, "zero_hpz_partition_size": 4}, {}, "zero_hpz_partition_size is not priced"),
        ({"stage": 2}, {"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype is not priced"),
        ({"stage": 2}, {"communication_data_type": "fp32"}, "communication_data_type is not priced"),
        ({"stage": 2}, {"bf16": {"enabled": False}}, "it trains in fp32"),
        ({"stage": 2}, {"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is not priced"),
    ],
)
def test_what_takes_more_is_refused(zero: dict[str, Any], top: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=fault):
        read(tmp_path, zero, **top)


def test_sizes_are_taken_as_they_are() -> None:
    prefix = "deepspeed:zero_optimization."
    sizes = {f"{prefix}stage3_prefetch_bucket_size": 5e8, f"{prefix}overlap_comm": True}
    assert zero_settings(sizes) == ZeroSettings(prefetch=500_000_000, overlap=True)
    assert zero_settings({"launch:--zero_stage": 2}) is None
    with pytest.raises(VplanError, match="no number of elements"):
        zero_settings({f"{prefix}sub_group_size": "large"})


def priced(folder: Path, zero: dict[str, Any]) -> Checked:
    read(folder, zero)
    dialect, given = dialects.read_script(from_file(folder / "train.sh"))
    return check_case(read_case(dialect, given, {}, {"gpu": "a100-80gb"}), search=False)


def test_a_second_bucket_is_there_in_backward_and_a_smaller_one_takes_less(tmp_path: Path) -> None:
    usual, double, small = (
        priced(tmp_path, {"stage": 2, **more}).outcome.estimate.phases["train"].allocated_bytes
        for more in ({}, {"overlap_comm": True}, {"reduce_bucket_size": 1e8})
    )
    assert double - usual == 2 * 500_000_000
    assert usual - small == 2 * 400_000_000


def test_more_fetched_ahead_takes_more(tmp_path: Path) -> None:
    usual, more = (
        priced(tmp_path, {"stage": 3, "stage3_prefetch_bucket_size": size})
        .outcome.estimate.phases["train"]
        .allocated_bytes
        for size in (5e7, 5e8)
    )
    assert more - usual == pytest.approx(2 * 450_000_000, rel=0.01)  # the peak may be at another moment


def test_what_is_not_pinned_takes_its_own_size(tmp_path: Path) -> None:
    """torch pins in powers of two; what the trained weights' shares move to is pinned all the same."""
    on_cpu = {"device": "cpu", "pin_memory": False}
    prefix = "deepspeed:zero_optimization."
    assert zero_settings({f"{prefix}offload_param.pin_memory": False}) == ZeroSettings(pin_params=False)
    for stage, names in ((2, ["offload_optimizer"]), (3, ["offload_optimizer", "offload_param"])):
        free, pinned = (
            priced(tmp_path, {"stage": stage, **dict.fromkeys(names, on_cpu | more)}).outcome.estimate
            for more in ({}, {"pin_memory": True})
        )
        assert free.host is not None and pinned.host is not None
        assert free.host_ram_bytes < pinned.host_ram_bytes
        assert free.host.pinned_bytes < pinned.host.pinned_bytes and (stage == 3) == (free.host.pinned_bytes > 0)


def test_older_words_and_mixed_precision_in_fp16(tmp_path: Path) -> None:
    both = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 0}}
    found = read(tmp_path, {"stage": 2, "cpu_offload": True}, **both)
    assert (found.strategy["sharding"], found.strategy["offload_optimizer"]) == ("zero-2", "cpu")


def test_numbers_of_yaml_and_unknown_keys(tmp_path: Path) -> None:
    text = "bf16: {enabled: true}\nzero_optimization: {stage: 2, reduce_bucket_size: 9e8, overlap_com: true}\n"
    (tmp_path / "ds.json").write_text(json.dumps({**BF16, "zero_optimization": {"stage": 2, "overlap_com": True}}))
    assert any("overlap_com is no key that DeepSpeed is known to have" in note for note in command(tmp_path).notes)
    (tmp_path / "ds.yaml").write_text(text, encoding="utf-8")
    launch = "accelerate launch --num_processes 4 --use_deepspeed --deepspeed_config_file ds.yaml"
    (tmp_path / "train.sh").write_text(f"{launch} {EASY} --use_deepspeed\n", encoding="utf-8")
    _, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    assert zero_settings(given.settings) == ZeroSettings(reduce_bucket=900_000_000)


def test_a_shipped_config_says_the_same_as_the_file(tmp_path: Path) -> None:
    launch = "accelerate launch --use_deepspeed --deepspeed_config_file config/zero_stage2_config.json"
    (tmp_path / "train.sh").write_text(f"{launch} --num_processes 4 {EASY} --use_deepspeed\n", encoding="utf-8")
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    assert said(translate(dialect, given)) == []
    assert zero_settings(given.settings) == ZeroSettings(overlap=True)


@pytest.mark.parametrize("script", ["scripts/train.py", "scripts/train_lora.py"])
def test_a_change_to_deepspeed_names_the_script_that_was_given(script: str) -> None:
    (zero_2,) = launched_by_deepspeed(ZERO_2, {"script": script})
    assert f"standard {script} ... --use_deepspeed" in zero_2


def test_every_key_of_zero_is_known() -> None:
    """By DeepSpeed's own record, of the version that is here."""
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    from planner.dialects.base import flags

    known = flags.script("deepspeed", "config.json").flags
    fields = config.DeepSpeedZeroConfig.model_fields
    names = [f"zero_optimization.{field.alias or name}" for name, field in fields.items()]
    assert [name for name in names if name not in known and f"{name}.device" not in known] == []


def test_without_mixed_precision_it_trains_in_fp32_and_is_refused(tmp_path: Path) -> None:
    flux = "train_dreambooth_flux.py --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev --resolution 512"
    for precision in ("", "--mixed_precision bf16 "):
        (tmp_path / "train.sh").write_text(f"accelerate launch --use_deepspeed --num_processes 4 {precision}{flux}\n")
        dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
        if precision:
            assert translate(dialect, given).strategy["sharding"] == "zero-2"
        else:
            with pytest.raises(VplanError, match="trains in fp32"):
                translate(dialect, given)


FLUX = "scripts/flux/train_lora.py --pretrained_model_name_or_path black-forest-labs/FLUX.1-dev --use_peft_lora"
Z_IMAGE = "scripts/z_image/train.py --pretrained_model_name_or_path Tongyi-MAI/Z-Image --trainable_modules ."
PIXELS = "--image_sample_size 1024 --train_batch_size 1 --mixed_precision bf16"
DIFFUSERS = "--resolution 1024 --train_batch_size 1 --mixed_precision bf16 --max_train_steps 1000"
STABLE = "--pretrained_model_name_or_path stabilityai/stable-diffusion"
SDXL = f"train_text_to_image_sdxl.py {STABLE}-xl-base-1.0 {DIFFUSERS}"
SD3 = f"train_dreambooth_sd3.py {STABLE}-3.5-medium {DIFFUSERS}"
KOHYA = "sdxl_train.py --pretrained_model_name_or_path sd_xl_base_1.0.safetensors --resolution 1024,1024 --sdpa"
OFTEN = "--train_batch_size 1 --mixed_precision bf16 --cache_latents --cache_text_encoder_outputs"
SHIPPED_2: dict[str, Any] = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "sub_group_size": 1e9}
SHIPPED_3: dict[str, Any] = {"stage": 3, "reduce_bucket_size": 5e8, "sub_group_size": 1e9}
"""config/zero_stage2_config.json and zero_stage3_config.json of EasyAnimate and VideoX-Fun, what is sized in them."""


def checked(folder: Path, launch: str, words: str, gpu: str) -> Checked:
    (folder / "train.sh").write_text(f"export {EXPANDABLE}\n{launch} {words}\n", encoding="utf-8")
    machine = {"gpu": gpu, "host_ram": 128 * GIB}
    return check_case(read_case(*dialects.read_script(from_file(folder / "train.sh")), {}, machine))


def typed(folder: Path, words: str, change: tuple[str, ...], gpus: int) -> tuple[str, str]:
    """(launcher, script and flags) of a command with a fix typed as it is said."""
    launch = f"accelerate launch --num_processes {gpus}"
    script, _, own = words.partition(" ")
    for entry in change:
        line, _, key = entry.partition("\n")
        if key:  # a line of the file that the launcher names
            stage = 3 if "stage3" in key else 2
            file = folder / f"config/zero_stage{stage}_config.json"
            file.parent.mkdir(exist_ok=True)
            offloaded = json.loads("{" + key.partition("#")[0] + "}")
            zero = {**(SHIPPED_3 if stage == 3 else SHIPPED_2), **offloaded}
            file.write_text(json.dumps({**BF16, "zero_optimization": zero}), encoding="utf-8")
        if line.startswith("accelerate launch"):
            head, _, tail = line.removeprefix("accelerate launch ").partition(" ... ")
            launch, line = f"{launch} {head.removesuffix(script)}", tail
        own = f"{own} {line}"
    return launch, f"{script} {own}"


@pytest.mark.parametrize(
    ("words", "gpu", "wanted"),
    [
        (f"{Z_IMAGE} {PIXELS}", "2x24GB", '"offload_optimizer": {"device": "cpu"}  # config/zero_stage3_config.json'),
        (f"{Z_IMAGE} {PIXELS}", "4x80GB", "--zero3_save_16bit_model true"),
        (f"{FLUX} {PIXELS}", "2x24GB", "--fsdp_transformer_layer_cls_to_wrap FluxTransformerBlock"),
        (f"{EASY} --train_batch_size 1 --mixed_precision bf16", "4x80GB", "config/zero_stage2_config.json"),
        (SDXL, "2x24GB", "--zero_stage 2 --mixed_precision bf16 --offload_optimizer_device cpu"),
        (SD3, "2x24GB", "--offload_optimizer_device cpu ... --checkpointing_steps 1000000"),
        (f"{KOHYA} {OFTEN}", "2x24GB", "--deepspeed --zero_stage 2 --offload_optimizer_device cpu"),
    ],
)
def test_a_fix_by_an_engine_does_what_is_said_of_it(words: str, gpu: str, wanted: str, tmp_path: Path) -> None:
    """These said that no option makes it fit, or named a way that ends before its first step or cannot save."""
    gpus = int(gpu[0])
    found = checked(tmp_path, f"accelerate launch --num_processes {gpus}", words, gpu)
    fix = next(fix for fix in found.fixes if wanted in "\n".join(fix.change))
    assert (found.outcome.estimate.verdict, fix.outcome.estimate.verdict) == ("no", "fits")
    then = checked(tmp_path, *typed(tmp_path, words, fix.change, gpus), gpu).outcome.estimate
    said = fix.outcome.estimate
    assert then.verdict == "fits"
    assert said.strategy.sharding == then.strategy.sharding != "ddp"
    assert then.peak.device_bytes == pytest.approx(said.peak.device_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("launch", "words", "note"),
    [
        ("--use_deepspeed --zero_stage 3", f"{Z_IMAGE} {PIXELS}", "its first save ends it under ZeRO-3"),
        ("--use_deepspeed --zero_stage 2", f"{Z_IMAGE} {PIXELS}", "accelerate refuses its data loader under DeepSpeed"),
        ("--use_deepspeed --zero_stage 2", SD3, "its first checkpoint ends it under DeepSpeed"),
        ("--use_deepspeed --zero_stage 3", SDXL, "ZeRO-3: the weights that it saves at its end are one GPU's"),
    ],
)
def test_what_ends_or_spoils_a_run_under_zero_is_said(launch: str, words: str, note: str, tmp_path: Path) -> None:
    """Rehearsed on the CPU with accelerate 1.15 and deepspeed 0.19.8."""
    (tmp_path / "train.sh").write_text(f"accelerate launch --num_processes 4 {launch} {words}\n", encoding="utf-8")
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    assert any(note in each for each in translate(dialect, given).notes)
    mended = f"{launch} --zero3_save_16bit_model true --deepspeed_config_file config/zero_stage2_config.json"
    mended = mended.replace("stage2", "stage3") if "3" in launch else mended
    words = f"{words} --checkpointing_steps 1000000"
    (tmp_path / "train.sh").write_text(f"accelerate launch --num_processes 4 {mended} {words}\n", encoding="utf-8")
    found = translate(*dialects.read_script(from_file(tmp_path / "train.sh"))).notes
    assert any(note in each for each in found) == note.startswith("ZeRO-3")
