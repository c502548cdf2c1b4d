"""planner/dialects: what is written is read back as it was, through the files that a user would start."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import job_for
from planner.dialects.base.bindings import When
from planner.dialects.base.dialect import Dialect, capabilities, nearest_fields, settings_for, translate
from planner.dialects.base.script import from_file
from planner.schema import choices
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve

OURS = (
    *("diffsynth", "diffusers", "diffusers-pipeline", "easyanimate", "latentsync", "videox-fun"),
    *("sd-scripts", "sd-scripts@unet", "sd-scripts@hunyuan-image", "sd-scripts@anima"),
)
MODELS = (
    *("wan2.1-i2v-14b-480p", "wan2.2-t2v-a14b", "flux.1-dev", "easyanimate-v5.1-7b", "latentsync-1.6-stage1"),
    *("cogvideox-5b", "sdxl", "sd1.5", "sd2.1"),
)
NUMBERS: dict[str, tuple[Any, ...]] = {
    "lora_rank": (4, 16, 128),
    "frames": (1, 17, 49),
    "height": (256, 512),
    "width": (256, 512),
    "batch_size": (1, 2, 16),
    "gradient_accumulation": (1, 4),
    "swap_blocks": (0, 17, 53),
}


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """Any job under any strategy on one or four GPUs, whether or not a trainer can say it."""
    model = lookup.model(draw(st.sampled_from(MODELS)))
    method = draw(st.sampled_from(("lora", "full", "sample")))
    drawn = {name: draw(st.sampled_from(values)) for name, values in NUMBERS.items()}
    said = {"method": method, **{name: value for name, value in drawn.items() if name in ("lora_rank", "batch_size")}}
    job = job_for(model, said)
    strategy = resolve(job, Strategy())
    for name in Strategy.model_fields:
        values: tuple[Any, ...] = choices(Strategy, name)
        if isinstance(getattr(strategy, name), bool):
            values = (False, True)
        if values and draw(st.booleans()):
            drawn[name] = draw(st.sampled_from(values))
    gpus = draw(st.sampled_from((1, 4)))
    return {**job.__dict__, **strategy.__dict__, **drawn, "gpus": gpus, "nodes": 1}


def meaningful(dialect: Dialect, found: dict[str, Any]) -> set[str]:
    """Fields whose binding holds for the others."""
    idle = {"references"} | {
        name
        for entry in dialect.table
        if isinstance(entry, When) and found[entry.field] not in entry.values
        for name in entry.binding.fields
    }
    if dialect.name == "diffusers" and found["method"] == "full":
        idle.add("lora_rank")
    if dialect.name.startswith("sd-scripts") and found["method"] == "full":
        idle.add("adapter_dtype")
    return {name for binding in dialect.bindings for name in binding.fields} - idle


@pytest.mark.parametrize("name", OURS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=fields())
def test_what_is_written_is_read_back(name: str, asked: dict[str, Any]) -> None:
    dialect = dialects.dialect(name)
    asked = nearest_fields(dialect, asked)
    said = settings_for(dialect, asked)
    assert dialect.files is not None
    plan = Plan.model_construct(
        job=Job.model_construct(**{field: asked[field] for field in Job.model_fields}),
        strategy=Strategy.model_construct(**{field: asked[field] for field in Strategy.model_fields}),
        machine=Machine(gpu="h100-80gb", gpus=asked["gpus"]),
        trainer=name,
    )
    files = dialect.files(plan, said)
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            (Path(folder) / path).write_text(text)
        again, found = dialects.read_script(from_file(Path(folder) / list(files)[-1]))
    assert again.name == name
    assert (found.unknown, found.removed) == ((), ())
    reading = translate(again, found)
    back = reading.job | reading.strategy | reading.machine
    for field in meaningful(dialect, asked):
        assert back[field] == asked[field], field


@pytest.mark.parametrize("name", (*OURS, "diffsynth@2025-03"))
def test_every_field_is_said_by_one_binding_of_a_dialect(name: str) -> None:
    dialect = dialects.dialect(name)
    bound = {field for binding in dialect.bindings for field in binding.fields}
    assert bound >= set(Strategy.model_fields) | set(Job.model_fields)
    assert set(capabilities(dialect)) == bound
    owners: dict[str, object] = {}
    for binding in dialect.bindings:
        for setting in binding.settings:
            if setting != "script":
                assert owners.setdefault(setting, binding) is binding, f"two bindings have {setting}"
