"""Round trips of the trainers we speak both ways: the files written for a plan, read as a user's, are that plan."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings

from planner import dialects
from planner.dialects import interface
from planner.export import fields_of
from planner.job import Job, Strategy
from planner.plan import Plan
from planner.script import of_file
from tests.unit.drawn_plans import nearest, plans

OURS = ("musubi-tuner", "diffusion-pipe", "ai-toolkit")
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
