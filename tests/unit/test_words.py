"""Round trips of the trainers we speak both ways: the files written for a plan, read as a user's, are that plan."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import catalog, dialects
from planner.dialects import interface
from planner.errors import VplanError
from planner.export import fields_of, plan_with, settings_of
from planner.job import Job, Machine, Strategy
from planner.plan import Plan
from planner.record import choices
from planner.rules import check, resolve
from planner.script import of_file
from planner.shapes import check_job

OURS = ("musubi-tuner", "diffusion-pipe", "ai-toolkit")
MODELS = (
    *("wan2.1-t2v-1.3b", "wan2.1-i2v-14b-720p", "wan2.2-t2v-a14b", "qwen-image", "flux.1-dev", "hunyuan-video"),
    *("z-image", "ltx-video-2b", "sdxl", "flux.2-dev"),
)
MEANINGLESS = {
    "lora": {"trainable"},
    "full": {"lora_rank", "lora_targets", "lora_dropout", "adapter_dtype"},
}
"""Fields that say nothing with a method."""


def strategies() -> st.SearchStrategy[dict[str, Any]]:
    fields: dict[str, st.SearchStrategy[Any]] = {
        "swap_blocks": st.sampled_from([0, 0, 5]),
        "gradient_accumulation": st.sampled_from([1, 3]),
        "expandable_segments": st.booleans(),
        "vae_tiling": st.booleans(),
    }
    for name in Strategy.model_fields:
        if values := choices(Strategy, name):
            fields[name] = st.sampled_from(values)
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    model = catalog.model(draw(st.sampled_from(MODELS)))
    height, width = draw(st.sampled_from(model.shape.resolutions))
    frames = model.shape.default_frames if model.kind == "video" else 1
    job: dict[str, Any] = {"model": model.name, "frames": frames, "height": height, "width": width}
    job["method"] = draw(st.sampled_from(["lora", "full"]))
    job["batch_size"] = draw(st.sampled_from([1, 2]))
    if job["method"] == "lora":
        job["lora_rank"] = draw(st.sampled_from([4, 16, 32]))
        job["lora_targets"] = draw(st.sampled_from([None, model.lora.wide or None]))
    if model.experts > 1:
        job["experts"] = draw(st.sampled_from(["high", "low", "both"]))
    gpus, nodes = draw(st.sampled_from([(1, 1), (4, 1), (8, 2)]))
    machine = Machine(gpu="h100-80gb", gpus=gpus, nodes=nodes, host_ram=1 << 40)
    for _ in range(20):
        try:
            made, wanted = Job.read(job), Strategy.read(draw(strategies()))
            strategy = resolve(made, wanted, machine)
            check(made, strategy, machine)
            check_job(model, made)
        except VplanError:
            continue
        return Plan(job=made, strategy=strategy, machine=machine)
    return Plan(job=made, strategy=resolve(made, Strategy(), machine), machine=machine)


def nearest(name: str, plan: Plan) -> Plan | None:
    """The plan as near as the trainer can do it; None where what it does contradicts the rest of the plan, or it does
    another job."""
    try:
        settings_of(plan, name)
    except interface.NotSaidError as error:
        if any(each.field == "model" for each in error.refused):
            return None
    try:
        return plan_with(plan, interface.nearest(dialects.dialect(name), fields_of(plan)))
    except VplanError:
        return None


@pytest.mark.parametrize("name", OURS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(asked=plans())
def test_files_read_back_as_the_plan(name: str, asked: Plan) -> None:
    dialect = dialects.dialect(name)
    assert dialect.files is not None
    plan = nearest(name, asked)
    if plan is None:
        return
    wanted = fields_of(plan)
    said = interface.write(dialect, wanted)
    with TemporaryDirectory() as folder:
        for path, text in dialect.files(plan, said).items():
            (Path(folder) / path).write_text(text)
        found, told = dialects.recognise(of_file(Path(folder) / path))
        assert found.name == name
        assert not told.unknown and not told.gone  # all of it is in the trainer's own list
        reading = interface.read(found, told)
    back = {**reading.job, **reading.strategy, **reading.machine}
    ignored = MEANINGLESS[plan.job.method] | ({"grad_buckets"} if wanted["sharding"] != "ddp" else set())
    for field, value in back.items():
        if field not in ignored:
            assert value == wanted[field], field
    assert not [note for note in reading.notes if "not here" in note]


@pytest.mark.parametrize("name", OURS)
def test_every_field_is_said_by_one_binding(name: str) -> None:
    bound = [field for binding in dialects.dialect(name).bindings for field in binding.fields]
    wanted = {*Job.model_fields, *Strategy.model_fields, "gpus", "nodes"}
    assert len(bound) == len(set(bound)) and set(bound) == wanted
