from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import VplanError
from planner.schema import Record, choices
from planner.spec.job import Bucket, Job, Links, Machine, Strategy, ValidationShape
from planner.spec.plan import (
    Breakdown,
    Environment,
    Estimate,
    Evidence,
    HostBreakdown,
    HostPeak,
    Measured,
    Peak,
    PhasePeak,
    Plan,
    plan_from_toml,
    plan_to_toml,
    read_plan,
    write_plan,
)
from planner.units import GIB

JOB = {"model": "wan2.1-t2v-1.3b", "frames": 81, "height": 480, "width": 832}


def job(**fields: Any) -> Job:
    return Job.read({**JOB, **fields})


def estimate(**changes: Any) -> Estimate:
    peak = {"allocated_bytes": 10 * GIB, "reserved_bytes": 11 * GIB, "device_bytes": 12 * GIB}
    return Estimate.read(
        {
            "job": JOB,
            "strategy": {},
            "machine": {"gpu": "24GB"},
            "peak": {**peak, "phase": "train", "moment": "recompute of block 17"},
            "phases": {"train": peak},
            "breakdown": {"weights": 10 * GIB, "fragmentation": GIB, "context": GIB},
            "host_ram_bytes": GIB,
            "disk_bytes": 0,
            "step_seconds": 1.5,
            "flops": 10**15,
            "budget_bytes": 23 * GIB,
            "verdict": "fits",
            "low_bytes": 11 * GIB,
            "high_bytes": 13 * GIB,
            "basis": "recorded",
            "attention_kernel": "flash",
            **changes,
        }
    )


def test_the_json_of_an_estimate_is_designs_section_9() -> None:
    found = estimate().to_json()
    assert list(found) == [
        "job",
        "strategy",
        "machine",
        "peak",
        "phases",
        "breakdown",
        "host_ram_bytes",
        "disk_bytes",
        "step_seconds",
        "step_seconds_high",
        "flops",
        "budget_bytes",
        "verdict",
        "limit",
        "low_bytes",
        "high_bytes",
        "basis",
        "lossy",
        "attention_kernel",
        "assumptions",
        "host",  # ours: where host RAM peaks, and what of
    ]
    assert list(found["peak"]) == ["allocated_bytes", "reserved_bytes", "device_bytes", "phase", "moment"]
    assert list(found["phases"]["train"]) == ["allocated_bytes", "reserved_bytes", "device_bytes"]
    assert list(found["breakdown"]) == [
        "weights",
        "residents",
        "gradients",
        "optimizer",
        "ema",
        "buckets",
        "activations",
        "temporary",
        "workspace",
        "fragmentation",
        "context",
    ]
    assert found["limit"] is None
    assert Estimate.read(found) == estimate()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"breakdown": {"weights": 1}}, "not to the peak's device_bytes"),
        ({"phases": {}}, "phases lack the peak's own phase train"),
        ({"low_bytes": 14 * GIB}, "is above high_bytes"),
        ({"verdict": "perhaps"}, "verdict 'perhaps' is not known"),
        ({"step_seconds": float("inf")}, "step_seconds inf is wrong"),
    ],
)
def test_an_estimate_that_contradicts_itself_is_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(VplanError, match=fault):
        estimate(**changes)


def test_a_plan_holds_the_estimate_of_its_own_job() -> None:
    plan = Plan.of(estimate(), ladder=(estimate(strategy={"gradient_checkpointing": "full"}),))
    text = plan_to_toml(plan)
    assert text.startswith("schema = 1\n")
    assert text.count("[job]") == 1
    assert "[ladder.strategy]" in text
    assert "[estimate.strategy]" not in text
    assert plan_from_toml(text) == plan
    with pytest.raises(VplanError, match="estimate's job differs"):
        plan.replace(job=job(frames=77))


def test_a_plan_is_written_through_links_and_into_pipes_and_replaces_neither(tmp_path: Path) -> None:
    plan = Plan.of(estimate())
    target, link, pipe = tmp_path / "target.toml", tmp_path / "link.toml", tmp_path / "pipe"
    link.symlink_to(target)
    write_plan(plan, link)
    assert link.is_symlink() and read_plan(target) == plan
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_plan(plan, pipe)
    assert plan_from_toml(os.read(reader, 65536).decode()) == plan
    os.close(reader)
    assert pipe.is_fifo()


def test_writing_a_plan_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan = Plan.of(estimate())
    path.write_text("old")
    write_plan(plan, path)
    assert read_plan(path) == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.toml"]
    with pytest.raises(VplanError, match="cannot write plan"):
        write_plan(plan, tmp_path / "none" / "plan.toml")
    with pytest.raises(VplanError, match=r"cannot read plan .*No such file"):
        read_plan(tmp_path / "none.toml")


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors as files")
def test_a_pipe_may_take_a_plan() -> None:
    plan = Plan(job=Job(model="m", frames=1, height=8, width=8), strategy=Strategy(), machine=Machine(gpu="24GB"))
    reading, writing = os.pipe()
    try:
        write_plan(plan, f"/dev/fd/{writing}")
        assert plan_from_toml(os.read(reading, 1 << 16).decode()) == plan
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("schema = ", "'p.toml' is not TOML"),
        ("", "p.toml has no schema; this vplan reads schema 1"),
        ("schema = 2", "p.toml has schema 2; this vplan reads schema 1; it is from another version: update vplan"),
        (
            'schema = 1\n[machine]\ngpu = "24GB"\n[strategi]\n[job]\nmodel = "m"\nframes = 1\nheight = 8\nwidth = 8',
            "p.toml: plan has no field 'strategi'; did you mean strategy?",
        ),
        ("schema = 1", "p.toml: job is missing"),
        ("schema = 1\njob = 3", "p.toml: job 3 is wrong"),
        ("schema = 1\nladder = 3", "p.toml: job is missing"),
        ('schema = 1\n[machine]\ngpu = "24GB"\n[strategy]\nswap = 3\n[job]\nmodel = "m"', "job.frames is missing"),
        (
            'schema = 1\n[machine]\ngpu = "24GB"\n[strategy]\nswap_block = 3\n'
            '[job]\nmodel = "m"\nframes = 1\nheight = 8\nwidth = 8',
            "p.toml: strategy has no field 'swap_block'; did you mean swap_blocks?",
        ),
    ],
)
def test_a_damaged_plan_is_named_with_its_fault(text: str, line: str) -> None:
    with pytest.raises(VplanError) as caught:
        plan_from_toml(text, where="p.toml")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(VplanError, match="it is not a text file"):
        read_plan(path)


COUNTS = st.integers(1, 10_000)
SIZES = st.integers(0, 2**50)
NAMES = st.text(min_size=1, max_size=12)


def optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def closed(record: type[Record]) -> dict[str, st.SearchStrategy[Any]]:
    """A hypothesis strategy for every field with a closed list."""
    fields = {}
    for name, field in record.model_fields.items():
        if known := choices(record, name):
            values: st.SearchStrategy[Any] = st.sampled_from(known)
            fields[name] = values if field.is_required() or field.default is not None else optional(values)
        elif isinstance(field.default, bool):
            fields[name] = st.booleans()
    return fields


SHAPE = {"frames": COUNTS, "height": COUNTS, "width": COUNTS}
JOBS = st.builds(
    Job,
    **closed(Job),
    **SHAPE,
    model=NAMES,
    batch_size=st.integers(1, 8),
    trainable=st.lists(NAMES, max_size=2).map(tuple),
    lora_targets=optional(st.lists(NAMES, max_size=2).map(tuple)),
    lora_dropout=st.floats(0, 0.99),
    buckets=st.lists(st.builds(Bucket, **SHAPE, batch_size=optional(st.integers(1, 8))), max_size=2).map(tuple),
    text_tokens=optional(COUNTS),
    validation=optional(st.builds(ValidationShape, **SHAPE, cfg=st.booleans())),
)
STRATEGIES = st.builds(
    Strategy, **closed(Strategy), swap_blocks=st.integers(0, 60), checkpointed_blocks=optional(COUNTS)
)
MACHINES = st.builds(
    Machine,
    **closed(Machine),
    gpu=NAMES,
    gpus=st.integers(1, 8),
    host_ram=optional(SIZES.filter(bool)),
    reserve=SIZES,
    links=optional(st.builds(Links, host_gbs=optional(st.floats(0.1, 1e3)))),
)


ENVIRONMENTS = st.builds(Environment, **dict.fromkeys(Environment.model_fields, NAMES))


@st.composite
def estimates(draw: st.DrawFn, job: Job, machine: Machine, strategy: Strategy) -> Estimate:
    breakdown = Breakdown(**{name: draw(SIZES) for name in Breakdown.model_fields})
    phases = {name: PhasePeak(allocated_bytes=1, reserved_bytes=2, device_bytes=3) for name in ("train", "save")}
    peak = Peak(allocated_bytes=1, reserved_bytes=2, device_bytes=breakdown.total, phase="train", moment=draw(NAMES))
    low = draw(SIZES)
    ram = HostBreakdown(**{name: draw(SIZES) for name in HostBreakdown.model_fields})
    return Estimate(
        job=job,
        strategy=strategy,
        machine=machine,
        peak=peak,
        phases=phases,
        breakdown=breakdown,
        host_ram_bytes=ram.total,
        host=draw(optional(st.just(HostPeak(phase="save", phases={"save": ram.total}, breakdown=ram)))),
        disk_bytes=draw(SIZES),
        step_seconds=draw(st.floats(0, 1e6)),
        flops=draw(st.integers(0, 2**62)),
        budget_bytes=draw(SIZES),
        verdict=draw(st.sampled_from(["fits", "tight", "no"])),
        limit=draw(optional(st.sampled_from(["gpu", "host", "disk"]))),
        low_bytes=low,
        high_bytes=low + draw(SIZES),
        basis=draw(st.sampled_from(["recorded", "nearby", "measured"])),
        lossy=draw(st.lists(NAMES, max_size=2).map(tuple)),
        attention_kernel=draw(NAMES),
        assumptions=draw(st.lists(NAMES, max_size=2).map(tuple)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    job, machine, strategy = draw(JOBS), draw(MACHINES), draw(STRATEGIES)
    measured = st.builds(
        Measured,
        outcome=st.sampled_from(["ok", "oom"]),
        phase=optional(st.sampled_from(["train", "load"])),
        device_bytes=optional(SIZES),
    )
    return Plan(
        job=job,
        strategy=strategy,
        machine=machine,
        estimate=draw(optional(estimates(job, machine, strategy))),
        evidence=draw(
            st.lists(
                st.builds(Evidence, id=NAMES, measured=measured, env=ENVIRONMENTS),
                max_size=2,
            ).map(tuple)
        ),
        ladder=tuple(
            draw(estimates(draw(st.just(job) | JOBS), machine, draw(STRATEGIES)))
            for _ in range(draw(st.integers(0, 2)))
        ),
        trainer=draw(NAMES),
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_any_plan_comes_back_from_its_file(plan: Plan) -> None:
    assert plan_from_toml(plan_to_toml(plan)) == plan
