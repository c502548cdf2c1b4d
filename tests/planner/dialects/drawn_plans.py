"""Plans drawn over models, methods, machines and the whole strategy space, and the nearest that a trainer can do."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from planner import dialects
from planner.catalog import lookup
from planner.catalog.shapes import check_job
from planner.dialects.base.bindings import InexpressibleError
from planner.dialects.base.dialect import nearest_fields, settings_for
from planner.errors import VplanError
from planner.foreign.export import fields_of, plan_with
from planner.schema import choices
from planner.spec.combinations.contradictions import refuse_contradictions
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.spec.plan import Plan
from planner.spec.rules import resolve

MODELS = (
    *("wan2.1-t2v-1.3b", "wan2.1-i2v-14b-720p", "wan2.2-t2v-a14b", "qwen-image", "flux.1-dev", "hunyuan-video"),
    *("z-image", "ltx-video-2b", "sdxl", "flux.2-dev"),
)


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
def plans(draw: st.DrawFn, models: tuple[str, ...] = MODELS) -> Plan:
    model = lookup.model(draw(st.sampled_from(models)))
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
            refuse_contradictions(Configuration.of(made, strategy, machine))
            check_job(model, made)
        except VplanError:
            continue
        return Plan(job=made, strategy=strategy, machine=machine)
    return Plan(job=made, strategy=resolve(made, Strategy(), machine), machine=machine)


def nearest(name: str, plan: Plan) -> Plan | None:
    """The plan as near as the trainer can do it; None where what it does contradicts the rest of the plan, or it does
    another job."""
    try:
        settings_for(dialects.writer(name, plan.job.model), fields_of(plan))
    except InexpressibleError as error:
        if any(each.field == "model" for each in error.values):
            return None
    try:
        return plan_with(plan, nearest_fields(dialects.writer(name, plan.job.model), fields_of(plan)))
    except VplanError:
        return None
