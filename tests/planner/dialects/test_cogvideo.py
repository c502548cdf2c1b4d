"""planner/dialects/cogvideo: its train.py, told from diffusion-pipe's, and what its LoRA holds."""

from pathlib import Path

import pytest

from planner import dialects
from planner.dialects.base.dialect import translate
from planner.dialects.base.script import from_file
from planner.errors import VplanError
from planner.foreign.case import read_case
from planner.foreign.check import Checked, check_case

WORDS = {
    "--model_path": "THUDM/CogVideoX-2b",
    "--model_name": "cogvideox-t2v",
    "--model_type": "t2v",
    "--training_type": "lora",
    "--train_resolution": "49x480x720",
    "--mixed_precision": "fp16",
    "--do_validation": "false",
}


def read(folder: Path, launch: str = "accelerate launch", **changes: str):
    """The command of train_ddp_t2v.sh, in arrays as it has it."""
    words = WORDS | {f"--{name}": value for name, value in changes.items()}
    arrays = "ARGS=(\n" + "".join(f'    {name} "{value}"  # as it was\n' for name, value in words.items()) + ")\n"
    path = folder / "train_ddp_t2v.sh"
    path.write_text(arrays + f'{launch} train.py \\\n    "${{ARGS[@]}}"\n', encoding="utf-8")
    dialect, given = dialects.read_script(from_file(path))
    return dialect, given, translate(dialect, given)


def test_the_job_and_its_defaults(tmp_path: Path) -> None:
    dialect, _, said = read(tmp_path)
    assert dialect.name == "cogvideo"
    assert said.job["model"] == "cogvideox-2b"
    job = ("method", "lora_rank", "frames", "height", "width")
    assert [said.job[name] for name in job] == ["lora", 128, 49, 480, 720]
    formats = ("weights_dtype", "adapter_dtype", "autocast", "gradient_checkpointing")
    assert [said.strategy[name] for name in formats] == ["fp16", "fp32", "fp16", "full"]
    assert said.strategy["validation_mode"] == "off"


def test_full_training_over_deepspeed_validates_with_all_models_there(tmp_path: Path) -> None:
    launch = "accelerate launch --use_deepspeed --zero_stage 2 --num_processes 8"
    _, _, said = read(tmp_path, launch, training_type="sft", do_validation="true")
    assert (said.job["method"], said.strategy["sharding"], said.strategy["validation_mode"]) == ("full", "zero-2", "on")
    _, _, alone = read(tmp_path, do_validation="true")
    assert alone.strategy["validation_mode"] == "offload"


def test_words_that_its_parser_takes_for_true(tmp_path: Path) -> None:
    _, _, said = read(tmp_path, gradient_checkpointing="False")
    assert said.strategy["gradient_checkpointing"] == "full"
    assert any("--gradient_checkpointing False is taken for true" in note for note in said.notes)


@pytest.mark.parametrize("size", ["480x720", "49x480", "many", "49x480x720x3"])
def test_a_size_that_is_none(tmp_path: Path, size: str) -> None:
    with pytest.raises(VplanError, match="is no size"):
        read(tmp_path, train_resolution=size)


def test_a_lora_lies_over_the_transformer_in_fp32(tmp_path: Path) -> None:
    """Its own code was rehearsed at 11.18 GiB allocated in training, the base in 16 bits at 7.79
    (docs/accuracy/published-runs.md, cvx-001)."""
    dialect, given, _ = read(tmp_path)
    checked = check_case(read_case(dialect, given, {}, {"gpu": "a100-80gb"}), search=False)
    allocated = checked.outcome.estimate.phases["train"].allocated_bytes / 2**30
    assert allocated == pytest.approx(11.18, rel=0.02)


@pytest.mark.parametrize(
    ("model", "size", "gpu", "published_gb"),
    [
        ("CogVideoX-2b", "49x480x720", "24GB", 17),
        ("CogVideoX-5b", "49x480x720", "48GB", 42),
        ("CogVideoX1.5-5b", "81x768x1360", "80GB", 56),
    ],
)
def test_a_fix_with_the_optimizer_in_host_ram_takes_what_its_readme_says(
    model: str, size: str, gpu: str, published_gb: int, tmp_path: Path
) -> None:
    """finetune/README.md at 7a1af71: "1-GPU zero-2 + opt offload". It said that no option makes it fit."""
    name = f"{model.partition('-')[0].lower()}-t2v"
    words = f"train.py --model_path THUDM/{model} --model_name {name} --model_type t2v --training_type sft"
    words = f"--num_processes 1 {words} --train_resolution {size} --mixed_precision bf16 --batch_size 1"

    def check(launch: str) -> Checked:
        (tmp_path / "train.sh").write_text(f"{launch} {words}\n")
        machine = {"gpu": gpu, "host_ram": 256 << 30}
        return check_case(read_case(*dialects.read_script(from_file(tmp_path / "train.sh")), {}, machine))

    (fix,) = check("accelerate launch").fixes
    then = check(fix.change[0]).outcome.estimate
    assert (then.verdict, then.strategy.offload_optimizer) == ("fits", "cpu")
    assert then.peak.device_bytes == pytest.approx(published_gb * 10**9, rel=0.05)
