"""planner/dialects/cogvideox_factory: its four scripts, started from loops of `eval` as its own shell scripts do."""

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import Translation, translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import check_case

WORDS = (
    "--pretrained_model_name_or_path $MODEL --data_root data --height_buckets 480 --width_buckets 720 "
    "--frame_buckets 49 --train_batch_size 1 --gradient_checkpointing --optimizer $optimizer --rank 128"
)
LOOP = """
MODEL="THUDM/CogVideoX-5b"
OPTIMIZERS=("adamw" "came")
for optimizer in "${{OPTIMIZERS[@]}}"; do
    cmd="accelerate launch --config_file accelerate_configs/{config}.yaml training/cogvideox/{script} \\
        {words} --validation_prompt_separator :::"
    echo "Running command: $cmd"
    eval $cmd
done
"""


def read(folder: Path, script: str, words: str = "--mixed_precision bf16", config: str = "uncompiled_1") -> Translation:
    """A loop over its commands as its own scripts have it."""
    path = folder / "train.sh"
    path.write_text(LOOP.format(script=script, words=f"{WORDS} {words}", config=config), encoding="utf-8")
    dialect, given = dialects.read_script(from_file(path))
    assert dialect.title == "cogvideox-factory's scripts"
    return translate(dialect, given)


def test_the_job_and_the_first_of_a_loop(tmp_path: Path) -> None:
    found = read(tmp_path, "cogvideox_text_to_video_lora.py")
    job = ("model", "method", "lora_rank", "batch_size", "frames", "height", "width")
    assert [found.job[name] for name in job] == ["cogvideox-5b", "lora", 128, 1, 49, 480, 720]
    assert (found.strategy["optimizer"], found.strategy["gradient_checkpointing"]) == ("adamw", "full")
    assert (found.strategy["text_encoder"], found.strategy["vae"]) == ("resident", "resident")
    assert any("the first of 2 values of $optimizer" in note for note in found.notes)


@pytest.mark.parametrize(
    ("script", "precision", "formats"),
    [
        ("lora", "bf16", ("bf16", "bf16", "bf16")),
        ("lora", "fp16", ("fp16", "fp32", "fp16")),
        ("sft", "bf16", ("bf16", "bf16", "bf16")),
        ("sft", "fp16", ("fp32", "fp32", "fp16")),
    ],
)
def test_only_under_fp16_is_what_trains_fp32(
    script: str, precision: str, formats: tuple[str, ...], tmp_path: Path
) -> None:
    found = read(tmp_path, f"cogvideox_image_to_video_{script}.py", f"--mixed_precision {precision}")
    assert tuple(found.strategy[name] for name in ("weights_dtype", "adapter_dtype", "autocast")) == formats


def test_its_own_accelerate_configs_are_known(tmp_path: Path) -> None:
    found = read(tmp_path, "cogvideox_text_to_video_sft.py", config="deepspeed")
    assert (found.strategy["sharding"], found.strategy["offload_optimizer"], found.machine["gpus"]) == (
        *("zero-2", "cpu"),
        2,
    )
    compiled = read(tmp_path, "cogvideox_text_to_video_sft.py", config="compiled_1")
    assert any("torch.compile" in note for note in compiled.notes)


def test_sizes_that_are_the_datas(tmp_path: Path) -> None:
    several = read(tmp_path, "cogvideox_text_to_video_lora.py", "--height_buckets 480 720 --frame_buckets 17 49 81")
    assert [several.job[name] for name in ("frames", "height", "width")] == [49, 720, 720]
    assert any("priced at the largest of both" in note for note in several.notes)
    longer = read(tmp_path, "cogvideox_text_to_video_lora.py", "--frame_buckets 17 49 81 --max_num_frames 85")
    assert longer.job["frames"] == 81
    path = tmp_path / "none.sh"
    path.write_text(
        "python training/cogvideox_text_to_video_lora.py --pretrained_model_name_or_path THUDM/CogVideoX-2b"
    )
    none = translate(*dialects.read_script(from_file(path)))
    assert (none.job["height"], none.job["frames"], none.job["batch_size"]) == (None, 49, 4)
    assert any("--height_buckets, --width_buckets not given" in note for note in none.notes)


def test_a_sample_has_a_size_of_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, "cogvideox_text_to_video_lora.py", "--validation_prompt cat --height 240 --width 360")
    shape = {"frames": 49, "height": 240, "width": 360, "cfg": True}
    assert (found.strategy["validation_mode"], found.job["validation"]) == ("on", shape)
    assert any("ends in a TypeError" in note for note in found.notes)
    words = "--validation_prompt cat --enable_model_cpu_offload --validation_epochs 1"
    moved = read(tmp_path, "cogvideox_text_to_video_lora.py", words)
    assert moved.strategy["validation_mode"] == "offload"
    assert not any("TypeError" in note for note in moved.notes)
    assert read(tmp_path, "cogvideox_text_to_video_lora.py").strategy["validation_mode"] == "off"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--use_4bit --use_torchao", "--use_4bit is not priced"),
        ("--use_8bit --use_torchao", "--use_torchao with --use_8bit"),
        ("--use_8bit --optimizer came", "for --optimizer adam and adamw alone"),
        ("--optimizer lion", "--optimizer"),
    ],
)
def test_optimizers_that_are_refused(words: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(VplanError, match=fault):
        read(tmp_path, "cogvideox_text_to_video_lora.py", words)


def test_encoders_are_there_before_the_first_step(tmp_path: Path) -> None:
    """Rehearsed in its own code at 19.91 GiB allocated while loading, 18.58 in training."""
    read(tmp_path, "cogvideox_text_to_video_lora.py", "--mixed_precision bf16 --load_tensors")
    dialect, given = dialects.read_script(from_file(tmp_path / "train.sh"))
    found = check_case(read_case(dialect, given, {}, {"gpu": "80GB"}), search=False).outcome.estimate.phases
    for phase, gib in (("load", 19.91), ("train", 18.58)):
        assert found[phase].allocated_bytes / 2**30 == pytest.approx(gib, rel=0.005)
