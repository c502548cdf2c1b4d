from __future__ import annotations

from typing import Any

import pytest

from planner.errors import VplanError
from planner.schema import Record, choices, field_docs, refused_values
from planner.spec.job import NOTES, Bucket, Job, Machine, Strategy, ValidationShape
from planner.spec.rules import resolve
from planner.units import GIB

JOB = {"model": "wan2.1-t2v-1.3b", "frames": 81, "height": 480, "width": 832}
ONE = Machine(gpu="rtx4090")
FOUR = Machine(gpu="h100-80gb", gpus=4)


def job(**fields: Any) -> Job:
    return Job.read({**JOB, **fields})


# ---- the records


def test_the_defaults_are_our_trainers() -> None:
    lora, full = job(), job(method="full")
    assert (lora.method, lora.lora_rank, lora.batch_size) == ("lora", 16, 1)
    strategy = Strategy()
    assert resolve(lora, strategy).weights_dtype == "bf16"
    assert resolve(full, strategy).weights_dtype == "fp32"
    assert resolve(full, Strategy(weights_dtype="bf16")).weights_dtype == "bf16"
    assert strategy.to_json() == {
        "weights_dtype": None,
        "compute_dtype": "bf16",
        "master_weights": "none",
        "adapter_dtype": "fp32",
        "adapter_inputs": "cast",
        "autocast": "bf16",
        "gradient_checkpointing": "none",
        "checkpointed_blocks": None,
        "nested_checkpointing": False,
        "optimizer": "adamw",
        "optimizer_step": "foreach",
        "gradient_accumulation": 1,
        "ema": "none",
        "sharding": "none",
        "fsdp_replicas": 1,
        "grad_buckets": "view",
        "offload_optimizer": "none",
        "offload_gradients": "none",
        "offload_params": "none",
        "swap_blocks": 0,
        "text_encoder": "cached",
        "vae": "cached",
        "text_encoder_dtype": "bf16",
        "vae_dtype": "bf16",
        "vae_tiling": False,
        "vae_slicing": False,
        "inactive_expert": "absent",
        "validation_mode": "off",
        "group_offload": "none",
        "group_offload_stream": False,
        "attention": "sdpa",
        "expandable_segments": True,
        "compile": "none",
        "context_parallel": 1,
    }


def test_what_depends_on_the_machine_is_filled_in_unless_it_was_said() -> None:
    assert resolve(job(), Strategy(), ONE).sharding == "none"
    assert resolve(job(), Strategy(), FOUR).sharding == "ddp"
    assert resolve(job(), Strategy(sharding="zero-2"), FOUR).sharding == "zero-2"
    assert resolve(job(), Strategy(context_parallel=4), FOUR).sharding == "none"
    windows = Machine(gpu="rtx4090", os="windows")
    assert not resolve(job(), Strategy(), windows).expandable_segments
    assert resolve(job(), Strategy(), ONE).expandable_segments


@pytest.mark.parametrize(
    ("record", "data", "line"),
    [
        (
            Strategy,
            {"gradient_checkpoint": "full"},
            "strategy has no field 'gradient_checkpoint'; did you mean gradient_checkpointing?",
        ),
        (Strategy, {"optimizer": "adam-8bit"}, "optimizer 'adam-8bit' is not known; did you mean adamw-8bit"),
        (Strategy, {"gradient_checkpointing": "yes"}, "is not known; write one of none, full, offload, fp8, partial"),
        (Strategy, {"weights_dtype": "fp9"}, "weights_dtype 'fp9' is not known; did you mean fp8?"),
        (Strategy, {"swap_blocks": -1}, "swap_blocks -1 is too small; write 0 at least"),
        (Strategy, {"vae_tiling": "yes"}, "vae_tiling 'yes' is wrong; should be a valid boolean"),
        (Job, {**JOB, "frames": 10**12}, "frames 1000000000000 is too large; write 10000 at most"),
        (Job, {**JOB, "frames": float("nan")}, "frames nan is wrong; should be a valid integer"),
        (Job, {**JOB, "frames": "81"}, "frames '81' is wrong; should be a valid integer"),
        (Job, {**JOB, "lora_dropout": float("nan")}, "lora_dropout nan is wrong"),
        (Job, {"model": "x", "height": 1, "width": 1}, "frames is missing; add frames"),
        (Job, {**JOB, "buckets": [{"frames": 1, "height": 8, "wide": 8}]}, "'wide'; did you mean width?"),
        (Job, {**JOB, "validation": {"frames": 1, "height": 8, "width": 8, "cgf": True}}, "did you mean cfg?"),
        (Machine, {"gpu": "4090", "host_ram": "64"}, "host_ram size '64' has no unit"),
        (Machine, {"gpu": "4090", "host_ram": 0}, "host_ram 0 is too small"),
        (Machine, {"gpu": "4090", "os": "linus"}, "os 'linus' is not known; did you mean linux?"),
        (Machine, {"gpu": "4090", "links": {"host_gbs": -1.0}}, "links.host_gbs -1.0 is wrong"),
    ],
)
def test_wrong_fields_are_refused_by_name(record: type[Record], data: dict[str, Any], line: str) -> None:
    with pytest.raises(VplanError) as caught:
        record.read(data, where="plan.toml")
    assert line in str(caught.value)
    assert str(caught.value).startswith("plan.toml: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_records_are_frozen_and_replace_validates() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Strategy().optimizer = "lion"  # type: ignore[misc]
    assert Strategy().replace(optimizer="lion").optimizer == "lion"
    with pytest.raises(VplanError, match="optimizer 'lyon' is not known"):
        Strategy().replace(optimizer="lyon")
    said = Strategy(sharding="none").replace(swap_blocks=1)
    assert said.model_fields_set == {"sharding", "swap_blocks"}


def test_sizes_of_a_machine_may_be_written_with_units() -> None:
    machine = Machine.read({"gpu": "24GB", "host_ram": "64GiB", "reserve": "0.5GiB"})
    assert (machine.host_ram, machine.reserve, machine.world) == (64 * GIB, GIB // 2, 1)
    assert FOUR.replace(nodes=2).world == 8


def test_a_job_prices_every_shape_it_may_meet() -> None:
    assert job(batch_size=2).shapes == (Bucket(frames=81, height=480, width=832, batch_size=2),)
    buckets = [
        {"frames": 1, "height": 720, "width": 1280, "batch_size": 4},
        {"frames": 81, "height": 480, "width": 832},
    ]
    assert [shape.batch_size for shape in job(buckets=buckets, batch_size=3).shapes] == [4, 3]


@pytest.mark.parametrize("record", [Job, Strategy, Machine, Bucket, ValidationShape])
def test_every_field_has_one_line_of_help(record: type[Record]) -> None:
    docs = field_docs(record)
    assert list(docs) == list(record.model_fields)
    for text in docs.values():
        assert text == text.strip()
        assert len(text) <= 180
        assert not text.endswith(".")


def test_choices_of_a_field() -> None:
    assert choices(Strategy, "gradient_checkpointing") == ("none", "full", "offload", "fp8", "partial")
    assert choices(Strategy, "weights_dtype")[0] == "fp32"
    assert choices(Job, "experts") == ("high", "low", "both")
    assert choices(Strategy, "swap_blocks") == ()


def test_what_is_always_refused_is_known_and_in_no_list() -> None:
    refused = {field: refused_values(Strategy, field) for field in Strategy.model_fields}
    assert {field: values for field, values in refused.items() if values} == {
        "weights_dtype": {"int4"},
        "attention": {"flash-3", "math", "xformers"},
        "compile": {"cudagraphs"},
    }
    for field, values in refused.items():
        assert not values & set(choices(Strategy, field))
        for value in values:
            assert getattr(Strategy.read({field: value}), field) == value
    with pytest.raises(VplanError) as refusal:
        Strategy.read({"attention": "zzzz"})
    assert "xformers" not in refusal.value.fix and "sdpa" in refusal.value.fix


# ---- lossless before lossy


@pytest.mark.parametrize(
    ("method", "fields", "lossy"),
    [
        ("lora", {}, ()),
        ("full", {}, ()),
        ("lora", {"weights_dtype": "bf16", "autocast": "bf16"}, ()),
        ("lora", {"weights_dtype": "fp8"}, ("weights_dtype",)),
        ("lora", {"weights_dtype": "nf4", "optimizer": "adamw-8bit"}, ("weights_dtype", "optimizer")),
        ("lora", {"adapter_dtype": "bf16"}, ("adapter_dtype",)),
        ("lora", {"adapter_dtype": "bf16", "master_weights": "fp32"}, ()),
        ("full", {"weights_dtype": "bf16"}, ("weights_dtype",)),
        ("full", {"weights_dtype": "bf16", "master_weights": "fp32"}, ()),
        ("full", {"adapter_dtype": "bf16"}, ()),
        ("full", {"optimizer": "adafactor"}, ("optimizer",)),
        ("full", {"optimizer": "lion"}, ()),
        ("sample", {"weights_dtype": "int8"}, ("weights_dtype",)),
        ("sample", {"weights_dtype": "bf16"}, ()),
        ("lora", {"text_encoder_dtype": "int8", "vae_tiling": True}, ("text_encoder_dtype", "vae_tiling")),
        (
            "full",
            {
                "gradient_checkpointing": "offload",
                "gradient_accumulation": 8,
                "swap_blocks": 20,
                "optimizer_step": "fused",
                "vae_slicing": True,
                "text_encoder": "swapped",
                "validation_mode": "offload",
                "compile": "blocks",
            },
            (),
        ),
        ("full", {"optimizer_step": "backward", "optimizer": "adafactor"}, ("optimizer", "optimizer_step")),
        ("full", {"sharding": "zero-3", "offload_optimizer": "cpu", "offload_params": "cpu"}, ()),
    ],
)
def test_lossy_fields(method: str, fields: dict[str, Any], lossy: tuple[str, ...]) -> None:
    assert Strategy.read(fields).lossy_fields(job(method=method)) == lossy


def test_every_note_names_values_that_exist() -> None:
    for field, note in NOTES.items():
        known = {*choices(Strategy, field), *refused_values(Strategy, field)} or {True, False}
        searched = note.searched
        tried = [*(searched.lora or ()), *(searched.full or ()), *(searched.sample or ())] if searched else []
        for value in (*(value for loss in note.losses for value in loss.values), *note.words, *tried):
            assert value in known, field
        assert all(loss.why for loss in note.losses)


def test_what_our_trainer_applies_of_each_field() -> None:
    """A new field of the record, or a new value, must say whether the step applies it."""
    assert {field: note.trained for field, note in NOTES.items() if note.trained != "all"} == {
        "weights_dtype": ("fp32", "bf16", "fp16", "fp8", "int8", "nf4"),
        "master_weights": ("none", "fp32"),
        "adapter_inputs": ("cast", "shared"),
        "optimizer": ("adamw", "adamw-8bit", "adamw-8bit-paged", "adafactor", "lion", "prodigy", "came", "muon"),
        "optimizer_step": ("foreach", "fused", "loop", "backward"),
        "ema": ("none", "gpu", "cpu"),
        "sharding": ("none", "ddp", "zero-1", "zero-2", "zero-3", "fsdp"),
        "offload_optimizer": ("none", "cpu", "nvme"),
        "offload_gradients": ("none", "cpu", "nvme"),
        "offload_params": ("none", "cpu"),
        "text_encoder": ("cached",),
        "vae": ("cached",),
        "inactive_expert": ("absent", "gpu", "cpu"),
        "validation_mode": ("off", "on", "offload"),
        "group_offload": ("none", "block", "leaf"),
        "attention": ("sdpa", "flash", "cudnn", "efficient"),
        "compile": ("none", "blocks"),
    }
