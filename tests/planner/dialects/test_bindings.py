"""Round trips of the trainers we speak both ways: the files written for a plan, read as a user's, are that plan."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import dialects
from planner.dialects.base.bindings import Fixed
from planner.dialects.base.dialect import capabilities, settings_for, translate
from planner.dialects.base.script import Script, from_file, from_words
from planner.errors import VplanError
from planner.foreign.export import fields_of
from planner.layout import trainer_terms
from planner.spec.job import Job, Strategy
from planner.spec.plan import Plan
from tests.planner.dialects.drawn_plans import nearest, plans

OURS = ("musubi-tuner", "diffusion-pipe", "ai-toolkit", "simpletuner")
MEANINGLESS = {
    "lora": {"trainable"},
    "full": {"lora_rank", "lora_targets", "lora_dropout", "adapter_dtype"},
}
"""Fields that say nothing with a method."""


@pytest.mark.parametrize("name", OURS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(asked=plans())
def test_files_read_back_as_the_plan(name: str, asked: Plan) -> None:
    dialect = dialects.dialect(name)
    assert dialect.files is not None
    plan = nearest(name, asked)
    if plan is None:
        return
    wanted = fields_of(plan)
    said = settings_for(dialect, wanted)
    with TemporaryDirectory() as folder:
        for path, text in dialect.files(plan, said).items():
            (Path(folder) / path).parent.mkdir(exist_ok=True)
            (Path(folder) / path).write_text(text)
        found, told = dialects.read_script(from_file(Path(folder) / path))
        assert found.name == name
        assert not told.unknown and not told.removed  # all of it is in the trainer's own list
        reading = translate(found, told)
    back = {**reading.job, **reading.strategy, **reading.machine, "version": reading.version}
    ignored = (
        {"references"} | MEANINGLESS[plan.job.method] | ({"grad_buckets"} if wanted["sharding"] != "ddp" else set())
    )
    for said_of, value in back.items():
        if said_of not in ignored:
            assert value == wanted[said_of], said_of
    assert not [note for note in reading.notes if "not here" in note]


def test_a_file_without_low_vram_is_another_version_of_the_memory_terms(tmp_path: Path) -> None:
    found = {}
    for name, text in {"": TOOLKIT, "whole": TOOLKIT.replace(", low_vram: true", "")}.items():
        (tmp_path / "config.yaml").write_text(text)
        found[name] = translate(*dialects.read_script(from_file(tmp_path / "config.yaml"))).version
    assert found == {"": "", "whole": "quantised-whole"}
    known = set(trainer_terms.versions("ai-toolkit"))
    assert {"quantised-whole", "uint3", "quantised-whole-uint3-without-experts"} <= known
    assert "uint2-uint3" not in known


@pytest.mark.parametrize("name", OURS)
def test_every_field_is_said_by_one_binding(name: str) -> None:
    bound = [field for binding in dialects.dialect(name).bindings for field in binding.fields]
    wanted = {*Job.model_fields, *Strategy.model_fields, "gpus", "nodes"}
    assert len(bound) == len(set(bound)) and set(bound) == wanted


def test_a_field_of_a_strategy_without_a_binding_stays_at_our_default() -> None:
    dialect = dialects.dialect("musubi-tuner")
    table = tuple(entry for entry in dialect.table if getattr(entry, "field", "") != "ema")
    without = dataclasses.replace(dialect, table=table)
    assert without.entries[-1] == Fixed("ema", "none")
    assert capabilities(without)["ema"] == "always none"


def test_of_a_training_loop_of_the_users_own_other_fields_are_left_alone() -> None:
    assert not {"ema", "gradient_checkpointing"} & capabilities(dialects.dialect("accelerate")).keys()


MUSUBI = """accelerate launch --num_cpu_threads_per_process 1 wan_train_network.py --task t2v-14B --sdpa --fp8_base \\
  --dit models/wan_bf16.safetensors --dataset_config data.toml --mixed_precision bf16 --optimizer_type adamw8bit \\
  --gradient_checkpointing --network_module networks.lora_wan --network_dim 32 --blocks_to_swap 20 --no_such 1
"""
MUSUBI_DATA = """
[general]
resolution = [832, 480]
[[datasets]]
target_frames = [1, 25, 81]
video_directory = "x"
"""
PIPE = """
dataset = "data.toml"
micro_batch_size_per_gpu = [[512, 2], [1024, 1]]
activation_checkpointing = "unsloth"
blocks_to_swap = 32
[model]
type = "wan"
ckpt_path = "/data/Wan2.1-T2V-14B"
dtype = "bfloat16"
transformer_dtype = "float8"
[adapter]
type = "lora"
rank = 32
dtype = "bfloat16"
[optimizer]
type = "AdamW8bitKahan"
lr = 2e-5
"""
PIPE_DATA = """
resolutions = [632]
frame_buckets = [1, 81]
[[directory]]
path = "x"
"""
TOOLKIT = """
job: extension
config:
  name: lora
  process:
    - type: sd_trainer
      network: {type: lora, linear: 32}
      datasets: [{folder_path: x, resolution: [632, 512], cache_latents_to_disk: true}]
      train: {batch_size: 1, dtype: bf16, optimizer: adamw8bit, unload_text_encoder: true}
      model: {name_or_path: "Wan-AI/Wan2.1-T2V-14B-Diffusers", arch: wan21, quantize: true, low_vram: true}
      sample: {width: 832, height: 480, num_frames: 40}
"""


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (
            {"data.toml": MUSUBI_DATA, "train.sh": MUSUBI},
            {"model": "wan2.1-t2v-14b", "frames": 81, "width": 832, "lora_rank": 32, "weights_dtype": "fp8",
             "optimizer": "adamw-8bit", "swap_blocks": 20, "gradient_checkpointing": "full", "adapter_dtype": "fp32"},
        ),
        (
            {"data.toml": PIPE_DATA, "config.toml": PIPE},
            {"model": "wan2.1-t2v-14b", "frames": 81, "height": 624, "batch_size": 2, "swap_blocks": 32,
             "gradient_checkpointing": "offload", "weights_dtype": "fp8", "optimizer": "adamw-8bit"},
        ),
        (
            {"config.yaml": TOOLKIT},
            {"model": "wan2.1-t2v-14b", "frames": 1, "height": 624, "text_encoder": "cached", "vae": "cached",
             "weights_dtype": "fp8", "text_encoder_dtype": "fp8", "gradient_checkpointing": "full"},
        ),
    ],
)  # fmt: skip
def test_what_people_have(files: dict[str, str], wanted: dict[str, object], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found, told = dialects.read_script(from_file(tmp_path / list(files)[-1]))
    reading = translate(found, told)
    read = {**reading.job, **reading.strategy}
    assert {name: read[name] for name in wanted} == wanted
    assert told.unknown == (("--no_such",) if found.name == "musubi-tuner" else ())
    assert len(read["buckets"]) == {"musubi-tuner": 3, "diffusion-pipe": 2, "ai-toolkit": 2}[found.name]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.toml", PIPE.replace("blocks_to_swap = 32", "pipeline_stages = 2"), "pipeline_stages 2"),
        ("config.toml", PIPE.replace('type = "wan"', 'type = "cosmos"'), "not supported here"),
        ("config.toml", PIPE.replace('"lora"', '"loha"'), "adapter.type"),
        ("config.yaml", TOOLKIT.replace("adamw8bit", "automagic"), "train.optimizer"),
        ("config.yaml", TOOLKIT.replace("type: lora", "type: locon"), "network.type"),
        ("train.sh", MUSUBI.replace("t2v-14B", "t2v-14B-FC"), "t2v-14B-FC"),
        ("train.sh", "deepspeed train.py --deepspeed --config nowhere.toml", "nowhere.toml"),
    ],
)
def test_what_is_not_priced_is_one_clear_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(VplanError, match=says):
        translate(*dialects.read_script(from_file(tmp_path / name)))


def test_a_config_without_a_network_trains_everything(tmp_path: Path) -> None:
    network = "      network: {type: lora, linear: 32}\n"
    whole = TOOLKIT.replace(network, "").replace("quantize: true, low_vram: true", "only_if_contains: [blocks]")
    (tmp_path / "config.yaml").write_text(whole)
    reading = translate(*dialects.read_script(from_file(tmp_path / "config.yaml")))
    assert (reading.job["method"], reading.strategy["weights_dtype"]) == ("full", "bf16")
    assert any("only_if_contains" in note for note in reading.notes)
    (tmp_path / "config.yaml").write_text(
        whole.replace("      datasets", "      embedding: {tokens: 8}\n      datasets")
    )
    with pytest.raises(VplanError, match="embedding is not supported"):
        translate(*dialects.read_script(from_file(tmp_path / "config.yaml")))


_ANY = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**12), st.floats(), st.text(max_size=8), st.just([]), st.just({}),
    st.lists(st.one_of(st.integers(-2, 2000), st.text(max_size=3)), max_size=4),
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_whatever_a_config_holds_ends_in_an_answer_or_one_clear_line(data: st.DataObject) -> None:
    """Any key of a real config with any value in its place is read, or refused by a VplanError."""
    name, texts = data.draw(
        st.sampled_from(
            [("musubi-tuner", MUSUBI_DATA), ("diffusion-pipe", PIPE), ("pipe data", PIPE_DATA), ("ai", TOOLKIT)]
        )
    )
    tree = yaml.safe_load(texts) if name == "ai" else tomllib.loads(texts)
    tables = [table for table in _tables(tree) if table]
    table = data.draw(st.sampled_from(tables))
    table[data.draw(st.sampled_from(sorted(table)))] = data.draw(_ANY)
    given_config = {"musubi-tuner": {}, "diffusion-pipe": tree, "pipe data": tomllib.loads(PIPE), "ai": tree}[name]
    dataset = tree if "data" in name or name == "musubi-tuner" else tomllib.loads(PIPE_DATA)
    try:
        if name == "musubi-tuner":
            words = from_words(MUSUBI.replace("\\\n", " ").split())
            script = _Held(words.name, words.programs, documents={"data.toml": dataset})
        else:
            script = _Held("config.toml", config=given_config, documents={"data.toml": dataset})
        translate(*dialects.read_script(script))
    except VplanError as error:
        assert "\n" not in error.message


def _tables(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(table for inner in value.values() for table in _tables(inner))]
    return [table for inner in value for table in _tables(inner)] if isinstance(value, list) else []


@dataclass(frozen=True)
class _Held(Script):
    """A script whose files are in memory."""

    documents: dict[str, Any] = field(default_factory=dict)

    def document(self, path: str) -> dict[str, Any] | None:
        return self.documents.get(path)


def test_automagic_takes_as_much_as_an_8_bit_adam_with_a_kahan_sum(tmp_path: Path) -> None:
    """diffusion-pipe's optimizers/automagic.py ``initialize_state``: one byte, one of a sign, and two in bf16."""
    found = []
    for optimizer in ("automagic", "AdamW8bitKahan"):
        (tmp_path / "data.toml").write_text(PIPE_DATA)
        (tmp_path / "config.toml").write_text(PIPE.replace("AdamW8bitKahan", optimizer))
        found.append(translate(*dialects.read_script(from_file(tmp_path / "config.toml"))))
    assert found[0].strategy == found[1].strategy
    assert any("automagic is priced as AdamW8bitKahan" in note for note in found[0].notes)
