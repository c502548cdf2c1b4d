"""What must never be written for a trainer: flags that are gone, that do nothing, or that its code refuses together."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import dialects
from planner.dialects.base import config_text, flags
from planner.dialects.base.dialect import settings_for
from planner.dialects.base.script import from_file
from planner.foreign.export import Exported, export_targets, fields_of, write_files
from planner.spec.plan import Plan
from tests.planner.dialects.drawn_plans import nearest, plans

MODELS = {
    "accelerate": ("wan2.1-t2v-1.3b",),
    "ai-toolkit": ("wan2.1-t2v-14b", "qwen-image"),
    "diffsynth": ("wan2.1-i2v-14b-480p", "wan2.2-t2v-a14b"),
    "diffusers": ("flux.1-dev", "cogvideox-5b", "sdxl"),
    "diffusers-pipeline": ("wan2.1-i2v-14b-480p",),
    "diffusion-pipe": ("wan2.1-t2v-14b", "hunyuan-video", "flux.1-dev"),
    "easyanimate": ("easyanimate-v5.1-7b",),
    "latentsync": ("latentsync-1.6-stage1",),
    "musubi-tuner": ("wan2.1-t2v-14b", "wan2.2-t2v-a14b", "qwen-image"),
    "sd-scripts": ("flux.1-dev", "sdxl", "sd1.5", "sd2.1", "hunyuan-image-2.1", "sd3.5-medium"),
    "simpletuner": ("flux.1-dev", "wan2.1-t2v-1.3b", "qwen-image", "sdxl"),
    "videox-fun": ("wan2.1-t2v-14b",),
}
NO_ZERO = ("ai-toolkit", "diffusion-pipe", "latentsync", "musubi-tuner", "diffusers-pipeline")
NEVER = {
    "diffsynth": ("--training_strategy", "--train_batch_size", "--batch_size", "--cpu_offload ", "--optimize_on_cpu"),
    "sd-scripts": ("--xformers", "--highvram"),
    "easyanimate": ("--vae_mini_batch",),
    "latentsync": ("accumulation",),
}
"""Trainer -> what no file of it holds: gone, without effect there, or never there."""


def test_every_target_is_looked_at() -> None:
    assert {*MODELS, "slurm"} == set(export_targets())


def together(text: str, *words: str) -> bool:
    return all(re.search(rf"(^|[\\s\"']){re.escape(word)}\\b", text, re.MULTILINE) for word in words)


@pytest.mark.parametrize("name", sorted(MODELS))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_never(name: str, data: st.DataObject) -> None:
    plan = nearest(name, data.draw(plans(models=MODELS[name])))
    if plan is None:
        return
    dialect = dialects.writer(name, plan.job.model)
    assert dialect.files is not None
    said = settings_for(dialect, fields_of(plan))
    files = dialect.files(plan, said)
    carried = config_text.fields_by_setting(
        dialect, said, getattr(dialects.module(name), "CARRIES", None), fields_of(plan)
    )
    assert set(carried) == set(said) and all(carried.values())  # each is said to carry something of the plan
    whole = "\n".join(line for text in files.values() for line in text.splitlines() if not line.startswith("#"))
    for word in NEVER.get(name, ()):
        assert word not in whole
    if name in NO_ZERO:
        assert not re.search("zero[_-]?(stage|opt|[123])", whole.lower()) and plan.strategy.sharding in ("none", "ddp")
    _offload_param_only_in_stage_3(plan, files, whole)
    if name == "sd-scripts":
        assert not together(whole, "--blocks_to_swap", "--cpu_offload_checkpointing")
        steps = re.search(r"--gradient_accumulation_steps[ =](\d+)", whole)
        assert not (steps and int(steps[1]) > 1 and together(whole, "--fused_backward_pass"))
        assert not together(whole, "--fused_backward_pass") or "dafactor" in whole
    if name == "diffusion-pipe" and "blocks_to_swap" in whole:
        assert "[adapter]" in whole and "pipeline_stages = 1" in whole
    if name == "musubi-tuner":
        assert not together(whole, "--block_swap_h2d_only") and "deepspeed" not in whole
        assert not together(whole, "--offload_inactive_dit", "--blocks_to_swap")
    if name == "diffsynth":
        assert "--enable_model_cpu_offload" not in whole or plan.machine.world == 1


def _offload_param_only_in_stage_3(plan: Plan, files: dict[str, str], whole: str) -> None:
    if plan.strategy.sharding != "zero-3":
        assert "offload_param_device" not in whole or re.search(r"offload_param_device[: =\"]+none", whole)
        for path, text in files.items():
            if path.endswith("deepspeed.json"):
                assert "offload_param" not in json.dumps(json.loads(text).get("zero_optimization", {}))


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"accelerate"}))
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_flag_is_gone_or_unknown(name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every file, read as a user's, holds nothing that the trainer's own list of flags has not."""
    plan = nearest(name, data.draw(plans(models=MODELS[name])))
    if plan is None:
        return
    dialect = dialects.writer(name, plan.job.model)
    assert dialect.files is not None
    files = dialect.files(plan, settings_for(dialect, fields_of(plan)))
    folder = tmp_path_factory.mktemp("files")
    paths = write_files(Exported(name, plan, files, {}), folder, False)
    found, told = dialects.read_script(from_file(paths[-1]))
    assert found.name == dialect.name and not told.removed and not told.unknown


def test_gone_flags_are_in_the_lists() -> None:
    """What older advice says is known as gone, so that it is told and never written."""
    assert flags.script("diffsynth", "examples/wanvideo/model_training/train.py").flags["--training_strategy"].gone


@pytest.mark.parametrize("name", ["accelerate", "ai-toolkit", "diffusion-pipe", "musubi-tuner", "simpletuner"])
def test_what_carries_what_is_said_of_bindings_with_several_fields(name: str) -> None:
    """Each line's comment names the one or two fields that it carries, not all of its binding."""
    dialect, carries = dialects.dialect(name), dialects.module(name).CARRIES
    settings_of = {binding.fields: set(binding.settings) for binding in dialect.bindings}
    for setting, fields in carries.items():
        owners = [own for own, settings in settings_of.items() if setting in settings]
        assert owners and set(fields) <= set(owners[0]), setting
