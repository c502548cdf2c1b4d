"""Plans as other trainers' files: what is refused and offered, and accelerate's own reading of its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalog import lookup
from planner.commands import cli
from planner.dialects.accelerate import settings as accelerate
from planner.dialects.base import config_text, flags
from planner.dialects.base.dialect import nearest_fields, settings_for
from planner.errors import VplanError
from planner.foreign.export import (
    export,
    export_targets,
    fields_of,
    flags_of,
    plan_with,
    priced,
    write_files,
    writers_of,
)
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan, read_plan, write_plan
from planner.spec.rules import resolve
from tests.command_line import typed

JOB = Job(model="wan2.1-t2v-1.3b", frames=17, height=480, width=832)


def plan(gpus: int = 1, nodes: int = 1, job: Job = JOB, gpu: str = "h100-80gb", **strategy: Any) -> Plan:
    machine = Machine(gpu=gpu, gpus=gpus, nodes=nodes, host_ram=1 << 39)
    strategy = {"gradient_checkpointing": "full", **strategy}
    return Plan(job=job, strategy=resolve(job, Strategy.read(strategy), machine), machine=machine)


def launcher_plans() -> st.SearchStrategy[Plan]:
    """Plans over what a launcher decides, contradictions left out."""

    def made(gpus: int, nodes: int, fields: dict[str, Any]) -> Plan | None:
        try:
            found = plan(gpus, nodes, **fields)
            refuse_contradictions(found.configuration)
        except VplanError:
            return None
        return found

    fields = st.fixed_dictionaries(
        {
            "sharding": st.sampled_from(["none", "ddp", "zero-1", "zero-2", "zero-3", "fsdp"]),
            "compute_dtype": st.sampled_from(["bf16", "fp16"]),
            "gradient_accumulation": st.sampled_from([1, 4]),
            "compile": st.sampled_from(["none", "blocks", "full"]),
            "expandable_segments": st.booleans(),
        },
        optional={
            "autocast": st.sampled_from(["none", "bf16", "fp16"]),
            "offload_optimizer": st.sampled_from(["none", "cpu", "nvme"]),
            "offload_gradients": st.sampled_from(["none", "cpu", "nvme"]),
            "offload_params": st.sampled_from(["none", "cpu", "nvme"]),
        },
    )
    plans = st.builds(made, st.sampled_from([1, 4, 8]), st.sampled_from([1, 2]), fields)
    return plans.filter(lambda found: found is not None)  # type: ignore[return-value]


@settings(max_examples=80, deadline=None)
@given(launcher_plans())
def test_what_accelerate_is_told_is_what_it_would_read(asked: Plan) -> None:
    """The nearest that can be said is written, and read back it is the same; no field that a launcher sets is lost."""
    wanted = nearest_fields(accelerate.DIALECT, fields_of(asked))
    said = settings_for(accelerate.DIALECT, wanted)
    back = {field: value for binding in accelerate.DIALECT.bindings for field, value in binding.to_fields(said).items()}
    alone = wanted["sharding"] in ("none", "ddp")
    theirs = {"gradient_accumulation", "batch_size", "master_weights"}  # the script's, without DeepSpeed
    if alone:
        theirs |= {"offload_optimizer", "offload_gradients", "offload_params", "compute_dtype"}
    if wanted["sharding"].startswith("zero"):
        theirs = set()
        assert ("deepspeed:zero_optimization.offload_param.device" in said) <= (wanted["sharding"] == "zero-3")
    for field, value in back.items():
        if field not in theirs:
            assert value == wanted[field], field
    assert set(config_text.fields_by_setting(accelerate.DIALECT, said, accelerate.CARRIES)) == set(said)
    for name in said:  # everything written is known to the launcher itself
        if name.startswith("config:"):
            key = name.removeprefix("config:").rpartition(".")[2]
            assert key == "distributed_type" or f"--{key}" in flags.script("accelerate", "launch.py").flags, name


@pytest.mark.parametrize(
    ("gpus", "nodes", "strategy"),
    [
        (1, 1, {}),
        (4, 2, {"sharding": "ddp", "compile": "blocks"}),
        (4, 1, {"sharding": "zero-2", "offload_optimizer": "cpu", "offload_gradients": "cpu"}),
        (8, 2, {"sharding": "zero-3", "offload_params": "cpu"}),
        (4, 1, {"sharding": "fsdp", "offload_params": "cpu", "offload_optimizer": "cpu", "adapter_dtype": "fp32"}),
        (4, 2, {"sharding": "fsdp", "fsdp_replicas": 2}),
    ],
)
def test_accelerate_reads_its_own_files(gpus: int, nodes: int, strategy: dict[str, Any], tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    done = export(plan(gpus, nodes, **strategy), "accelerate")
    write_files(done, tmp_path, False)
    config = ClusterConfig.from_yaml_file(str(tmp_path / "accelerate.yaml"))
    assert config.num_processes == gpus * nodes and config.num_machines == nodes
    words = ["--config_file", str(tmp_path / "accelerate.yaml"), "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    sharding = strategy.get("sharding", "none")
    assert args.use_deepspeed == sharding.startswith("zero")
    assert args.use_fsdp == (sharding == "fsdp")
    assert args.multi_gpu == (sharding == "ddp")
    if sharding.startswith("zero"):
        read = HfDeepSpeedConfig(str(tmp_path / args.deepspeed_config_file))
        assert read.get_value("zero_optimization.stage") == int(sharding[-1])
        assert read.is_offload() == bool(strategy.get("offload_optimizer") or strategy.get("offload_params"))
        assert config.mixed_precision is None  # accelerate refuses it beside DeepSpeed's file
    if sharding == "fsdp":
        assert args.fsdp_version == 2 and config.mixed_precision == "bf16"
        assert (args.fsdp_offload_params is True) == ("offload_params" in strategy)
        copies = strategy.get("fsdp_replicas", 1)
        assert args.use_parallelism_config == (copies > 1)
        if copies > 1:
            sizes = args.parallelism_config_dp_replicate_size, args.parallelism_config_dp_shard_size
            assert sizes == (copies, gpus * nodes // copies)
    for line in (tmp_path / "accelerate.yaml").read_text().splitlines():
        if line.partition(":")[0].strip() in ("distributed_type", "num_processes", "fsdp_offload_params"):
            assert "  # " in line
    if sharding == "ddp":
        assert done.left_out["strategy.grad_buckets"] == "view"
        assert "--machine_rank" in done.files["launch.sh"]


def test_what_cannot_be_said_is_refused_with_the_nearest(tmp_path: Path) -> None:
    asked = plan(1, sharding="ddp")
    with pytest.raises(VplanError, match="sharding 'ddp'") as raised:
        export(asked, "accelerate")
    assert "--sharding none (fits" in raised.value.fix and raised.value.exit_code == 1
    done = export(asked, "accelerate", take_nearest=True)
    assert done.changed == {"sharding": "none"} and done.plan.strategy.sharding == "none"
    write_plan(asked, tmp_path / "plan.toml")
    words = ["export", str(tmp_path / "plan.toml"), "--to", "accelerate", "-o", str(tmp_path / "out"), "--json"]
    refused = CliRunner().invoke(cli, words)
    assert refused.exit_code == 1 and "sharding" in json.loads(refused.stdout)["error"]["message"]
    assert not (tmp_path / "out").exists()
    told = CliRunner().invoke(cli, [*words, "--nearest"])
    answer = json.loads(told.stdout)
    assert told.exit_code == 0 and answer["changed"] == {"sharding": "none"}
    assert [Path(path).name for path in answer["files"]] == ["accelerate.yaml", "launch.sh"]
    assert answer["start"] == "bash launch.sh" and answer["estimate"]["verdict"] == "fits"
    again = CliRunner().invoke(cli, [*words, "--nearest"])
    assert again.exit_code == 0  # the same files again
    (tmp_path / "out" / "launch.sh").write_text("mine")
    kept = CliRunner().invoke(cli, [*words, "--nearest"])
    assert kept.exit_code == 1 and (tmp_path / "out" / "launch.sh").read_text() == "mine"
    plain = CliRunner().invoke(cli, [*words[:-1], "--nearest", "--force"])
    assert plain.exit_code == 0 and "bash launch.sh" in plain.stdout


@pytest.mark.parametrize("target", ["musubi-tuner", "ai-toolkit", "diffsynth", "diffusion-pipe", "videox-fun"])
def test_where_no_part_of_the_blocks_is_checkpointed_the_nearest_plan_checkpoints_all(target: str) -> None:
    """The plan that `suggest` gives for a small model: 25 blocks say nothing beside another trainer's `full`."""
    asked = plan(gradient_checkpointing="partial", checkpointed_blocks=25)
    with pytest.raises(VplanError, match="gradient_checkpointing 'partial'") as raised:
        export(asked, target)
    assert "--gradient-checkpointing full" in raised.value.fix and "add --nearest" in raised.value.fix
    done = export(asked, target, take_nearest=True)
    strategy = done.plan.strategy
    assert (strategy.gradient_checkpointing, strategy.checkpointed_blocks) == ("full", None)
    assert done.changed["gradient_checkpointing"] == "full" and done.files


def test_what_does_not_fit_is_exit_3() -> None:
    big = Job(model="wan2.1-t2v-14b", frames=81, height=720, width=1280, method="full")
    with pytest.raises(VplanError, match="does not fit") as raised:
        export(plan(job=big, gpu="24GB"), "accelerate")
    assert raised.value.exit_code == 3


def test_what_is_short_of_host_ram_says_so_and_names_the_trainer_s_own_search() -> None:
    """ai-toolkit has FLUX.1 and its text encoders in host RAM while it caches latents; the GPU would do."""
    machine = Machine(gpu="12GB", host_ram=20 << 30)
    strategy = Strategy.read({"gradient_checkpointing": "full", "swap_blocks": 49, "adapter_inputs": "cast"})
    job = Job(model="flux.1-dev", frames=1, height=1024, width=1024)
    asked = Plan(job=job, strategy=resolve(job, strategy, machine), machine=machine)
    with pytest.raises(
        VplanError, match=r"does not fit as ai-toolkit trains it: \d+\.\d GiB of 20\.0 GiB of host RAM"
    ) as raised:
        export(asked, "ai-toolkit", take_nearest=True)
    command = raised.value.fix.split("`")[1]
    assert command.endswith("--host-ram 20GiB --method lora --frames 1 --height 1024 --width 1024 --for ai-toolkit")
    told = CliRunner().invoke(cli, command.split()[1:])
    assert told.exit_code == 3 and "--host-ram 35GiB instead of 20GiB" in told.stdout


def test_what_is_only_tight_is_not_said_to_fit() -> None:
    job = Job(model="wan2.1-t2v-14b", frames=81, height=480, width=832)
    asked = plan(job=job, gpu="rtx4090", gradient_checkpointing="offload", weights_dtype="fp8", swap_blocks=24)
    with pytest.raises(VplanError, match="does not fit") as raised:
        export(asked, "diffusion-pipe")
    flags = re.search(r"it is tight with (--swap-blocks \d+): `vplan estimate PLAN.toml \1 -o", raised.value.fix)
    assert flags
    better = asked.replace(strategy=asked.strategy.replace(swap_blocks=int(flags[1].split()[1])))
    found = priced(better, "diffusion-pipe")
    assert found is not None and found.verdict == "tight"


@pytest.mark.parametrize("name", ["acelerate", "nobody"])
def test_a_target_nobody_knows(name: str, tmp_path: Path) -> None:
    write_plan(plan(), tmp_path / "plan.toml")
    told = CliRunner().invoke(cli, ["export", str(tmp_path / "plan.toml"), "--to", name, "-o", str(tmp_path)])
    assert told.exit_code == 1 and "accelerate" in told.stderr and "accelerate" in export_targets()


def test_our_own_flags_for_changed_fields() -> None:
    changed = {"expandable_segments": False, "swap_blocks": 3, "lora_targets": ("a", "b"), "text_tokens": None}
    assert flags_of(changed) == "--no-expandable-segments --swap-blocks 3 --lora-targets a,b"


def test_contradicting_fields_make_no_plan() -> None:
    with pytest.raises(VplanError):
        plan_with(plan(), fields_of(plan()) | {"swap_blocks": 5, "gradient_checkpointing": "none"})


_KEYS = st.text("abcdefgh_", min_size=1, max_size=6)
_LEAVES = st.one_of(
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.lists(st.integers(0, 9), max_size=3),
)
_TREES = st.recursive(
    st.dictionaries(_KEYS, _LEAVES, min_size=1, max_size=3),
    lambda inner: st.dictionaries(
        _KEYS, st.one_of(_LEAVES, inner, st.lists(inner, min_size=1, max_size=2)), min_size=1
    ),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(_TREES)
def test_config_text_reads_back_as_it_was(tree: dict[str, Any]) -> None:
    import tomllib

    comments = dict.fromkeys(tree, "job.frames")
    assert yaml.safe_load(config_text.yaml(tree, comments, "head\nof two lines")) == tree
    assert tomllib.loads(config_text.toml(tree, comments, "head")) == tree


def test_what_says_nothing_here_is_no_reason_to_refuse() -> None:
    """One GPU has no buckets, so it is all the same that DiffSynth's would be copies."""
    asked = plan(1, adapter_dtype="bf16", grad_buckets="view")
    done = export(asked, "diffsynth")
    assert not done.changed and "accelerate launch" in list(done.files.values())[-1]
    several = plan(4, adapter_dtype="bf16", grad_buckets="view")
    with pytest.raises(VplanError, match="grad_buckets"):
        export(several, "diffsynth")


def test_a_batch_script_runs_the_plan_itself(tmp_path: Path) -> None:
    done = export(plan(4, 2, sharding="zero-2"), "slurm")
    write_files(done, tmp_path, False)
    assert done.start == "sbatch job.sh" and "--gpus-per-node=4" in done.files["job.sh"]
    assert read_plan(tmp_path / "plan.toml").strategy.sharding == "zero-2"


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("diffusers", "sdxl"),
        ("diffusers", "cogvideox-5b-i2v"),
        ("musubi-tuner", "wan2.1-t2v-1.3b"),
        ("videox-fun", "z-image"),
        ("easyanimate", "easyanimate-v5.1-7b"),
        ("sd-scripts", "flux.1-dev"),
    ],
)
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_plan_in_16_bits_throughout_goes_to_mixed_precision_where_adapters_are_fp32(
    target: str, model: str, gpus: int
) -> None:
    # Without it nothing brings fp32 adapters and a bf16 base together, and nobody could say what such a run needs.
    half = {"adapter_dtype": "bf16", "autocast": "none"}
    found = export(plan(gpus, job=lookup.job_for(lookup.model(model), {}), gpu="h200", **half), target, True)
    assert found.plan.strategy.autocast == "bf16" and found.plan.estimate is not None
    assert any("mixed_precision" in text for text in found.files.values())


def test_a_plan_that_no_mixed_precision_helps_is_exported_as_it_was() -> None:
    fields = {"adapter_dtype": "bf16", "autocast": "none", "compute_dtype": "fp32"}
    found = export(plan(**fields), "musubi-tuner", True)
    assert found.plan.strategy.compute_dtype == "bf16" and found.plan.estimate is not None


def test_a_trainer_of_one_family_refuses_the_others() -> None:
    with pytest.raises(VplanError, match="its scripts build EasyAnimate's own transformer"):
        export(plan(), "easyanimate", True)


@pytest.mark.parametrize("target", ["sd-scripts", "diffusers", "easyanimate", "latentsync"])
def test_a_trainer_of_other_models_names_those_that_can_write_the_plan(target: str) -> None:
    asked = plan(gradient_checkpointing="partial", checkpointed_blocks=25)
    with pytest.raises(VplanError, match="model 'wan") as raised:
        export(asked, target)
    exact, near = writers_of(asked)
    assert raised.value.fix == (
        "--to accelerate, slurm can write this plan; "
        "--to ai-toolkit, diffsynth, diffusion-pipe, musubi-tuner, simpletuner, videox-fun one near it (--nearest)"
    )
    assert "gradient_checkpointing" not in raised.value.message  # of another model it does not matter
    for name in (*exact, *near):
        assert export(asked, name, take_nearest=name in near).files


def test_a_trainer_of_another_method_names_the_option_to_change() -> None:
    asked = plan(job=Job(model="flux.1-dev", frames=1, height=1024, width=1024, method="full"), gpu="h200")
    with pytest.raises(VplanError, match="method 'full'") as raised:
        export(asked, "ai-toolkit")
    assert raised.value.fix.startswith("use --method lora; --to accelerate, ")
    assert "ai-toolkit" not in raised.value.fix and "diffusion-pipe" in raised.value.fix


def test_an_export_says_that_its_script_sets_the_allocator(tmp_path: Path) -> None:
    words = ["export", "sdxl", "--gpu", "12GB", "--to", "ai-toolkit", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, words)
    asked = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert done.exit_code == 0, done.output
    assert done.output.rstrip().endswith(f"bash train.sh (it sets {asked}, on which the estimate counts)")
    config = (tmp_path / "out/config.yaml").read_text()
    assert f"# The plan counts on {asked}, which train.sh sets." in config and ".env" in config
    notes = {
        name: json.loads(
            CliRunner().invoke(cli, ["check", str(tmp_path / "out" / name), "--gpu", "12GB", "--json"]).stdout
        )
        for name in ("config.yaml", "train.sh")
    }
    told = [
        any("a config alone does not say" in note for note in each["estimate"]["assumptions"])
        for each in notes.values()
    ]
    assert told == [True, False]
    assert [each["strategy"]["expandable_segments"] for each in notes.values()] == [False, True]


@pytest.mark.parametrize(("model", "method", "has_prodigy"), [("sdxl", "lora", True), ("sdxl", "full", False)])
def test_prodigy_goes_to_those_of_diffusers_examples_that_have_it(model: str, method: str, has_prodigy: bool) -> None:
    """train_text_to_image_sdxl.py has no ``--optimizer``, and argparse would end it."""
    asked = plan(job=lookup.job_for(lookup.model(model), {"method": method}), gpu="h200", optimizer="prodigy")
    found = export(asked, "diffusers", take_nearest=True)
    assert (found.plan.strategy.optimizer == "prodigy") is has_prodigy
    assert any("--optimizer" in text for text in found.files.values()) is has_prodigy


def test_a_model_that_diffusers_has_no_example_of_is_refused_by_name() -> None:
    asked = plan(optimizer="prodigy")
    with pytest.raises(VplanError, match=r"model 'wan2\.1-t2v"):
        export(asked, "diffusers")


def test_files_for_a_job_of_so_many_steps_say_how_to_train_them(tmp_path: Path) -> None:
    question = ("wan2.1-t2v-1.3b", "--gpu", "24GB", "--frames", "33", "--for", "musubi-tuner")
    said = typed("suggest", *question, "--steps", "500", "-o", str(tmp_path / "out")).stdout
    words = "for 500 steps set --max_train_steps to 500, without --max_train_epochs"
    assert words in " ".join(said.split())
    assert "--max_train_epochs 16" in (tmp_path / "out" / "train.sh").read_text()
    assert "for 500 steps" not in typed("suggest", *question, "-o", str(tmp_path / "other")).stdout
