"""The table of combinations: its rows can say what they say, and each kind answers what asks for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import ContradictionError
from planner.schema import choices, refused_values
from planner.spec.combinations.combination import Combination, ModelSummary, first_refusal, refusals
from planner.spec.combinations.contradictions import CONTRADICTIONS, refuse_contradictions
from planner.spec.combinations.estimate_gaps import ESTIMATE_GAPS
from planner.spec.combinations.model_limits import BLOCK_LIMITS, JOB_LIMITS, BlockCounts, ModelJob
from planner.spec.combinations.table import TABLE
from planner.spec.combinations.trainer_gaps import TRAINER_GAPS, TrainerConfiguration
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

COUNTS = {
    "checkpointed_blocks": (1, 5, 60),
    "gradient_accumulation": (1, 2),
    "swap_blocks": (0, 3, 60),
    "context_parallel": (1, 2, 3),
    "fsdp_replicas": (1, 2, 3),
}


def values(field: str) -> tuple[object, ...]:
    """What a field may say, values that are always refused among it."""
    listed = (*choices(Strategy, field), *sorted(refused_values(Strategy, field)))
    return COUNTS.get(field) or listed or (False, True)


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    method = draw(st.sampled_from(("lora", "full", "sample")))
    trainable = ("attn1",) if draw(st.integers(0, 5)) == 0 else ()
    shape = {"frames": 5, "height": 480, "width": 832}
    optional = {"experts": draw(st.sampled_from((None, "high", "both"))), "references": draw(st.integers(0, 2))}
    job = Job.read({"model": "some-model", "method": method, "trainable": trainable, **shape, **optional})
    fields = draw(st.lists(st.sampled_from(tuple(Strategy.model_fields)), max_size=6, unique=True))
    strategy = Strategy.read({field: draw(st.sampled_from(values(field))) for field in fields})
    machine = Machine(gpu="24GB", gpus=draw(st.sampled_from((1, 2, 4))), os=draw(st.sampled_from(("linux", "windows"))))
    return Configuration.of(job, strategy, machine)


SUMMARIES = st.builds(
    ModelSummary,
    title=st.just("A model"),
    blocks=st.sampled_from((4, 30)),
    experts=st.sampled_from((1, 2)),
    references=st.sampled_from((0, 1)),
    takes_references=st.booleans(),
    expert_boundary=st.booleans(),
    has_sound=st.booleans(),
    splits_tokens=st.booleans(),
)


def said(rows: tuple[Combination[Any], ...], subject: object) -> list[tuple[str, str]]:
    found = list(refusals(rows, subject))
    assert first_refusal(rows, subject) == (found[0] if found else None)
    for reason, fix in found:
        assert reason and fix and not {"{", "}"} & set(reason + fix)
    return [tuple(refusal) for refusal in found]


@given(configurations(), SUMMARIES, st.booleans())
@settings(max_examples=300, deadline=None)
def test_what_applies_can_be_said(configuration: Configuration, model: ModelSummary, is_probe: bool) -> None:
    job, strategy, machine = configuration.job, configuration.strategy, configuration.machine
    said(ESTIMATE_GAPS, configuration)
    said(TRAINER_GAPS, TrainerConfiguration(job, strategy, machine, model, is_probe))
    said(JOB_LIMITS, ModelJob(model, job))
    said(BLOCK_LIMITS, BlockCounts(model, strategy))
    against = said(CONTRADICTIONS, configuration)
    if not against:
        refuse_contradictions(configuration)
        return
    with pytest.raises(ContradictionError) as caught:
        refuse_contradictions(configuration)
    assert (caught.value.message, caught.value.fix) == against[0]


@pytest.mark.parametrize(
    ("job", "strategy", "reason"),
    [
        ({"adapter": "loha"}, {}, "what its layers allocate has not been recorded"),
        ({"adapter": "dora", "method": "full"}, {}, "adapter dora has no effect with method full"),
        ({"adapter": "dora"}, {"adapter_inputs": "shared"}, "gives dora other numbers"),
        ({"adapter": "dora"}, {"weights_dtype": "fp8"}, "torch adds no numbers in fp8"),
        ({"adapter": "dora"}, {"sharding": "zero-3"}, "dora reads a weight after its layer has run"),
        ({"adapter": "lokr"}, {"sharding": "zero-3"}, "lokr reads a weight after its layer has run"),
        ({"adapter": "lokr"}, {"weights_dtype": "nf4"}, "nf4 is packed"),
        ({"adapter": "lokr"}, {"adapter_inputs": "shared"}, "of lokr is not recorded"),
        ({"adapter": "lokr", "lora_rank": 8}, {}, "lora_rank has no effect"),
        ({"adapter": "lokr", "lora_dropout": 0.1}, {}, "lora_dropout has no effect"),
        ({"lokr_factor": 4}, {}, "lokr_factor has no effect without adapter lokr"),
    ],
)
def test_what_adapters_cannot_go_with(job: dict[str, Any], strategy: dict[str, Any], reason: str) -> None:
    wanted = Job.read({"model": "sdxl", "frames": 1, "height": 512, "width": 512, **job})
    machine = Machine(gpu="24GB", gpus=2)
    with pytest.raises(ContradictionError, match=reason):
        refuse_contradictions(Configuration.of(wanted, Strategy.read({"sharding": "ddp", **strategy}), machine))
    plain = wanted.replace(adapter="lora", method="lora", lokr_factor=16)
    refuse_contradictions(Configuration.of(plain, Strategy.read({"sharding": "ddp"}), machine))


@given(configurations(), SUMMARIES)
@settings(max_examples=100, deadline=None)
def test_a_training_is_refused_for_all_that_a_probe_is(configuration: Configuration, model: ModelSummary) -> None:
    probed, trained = (
        said(
            TRAINER_GAPS,
            TrainerConfiguration(configuration.job, configuration.strategy, configuration.machine, model, is_probe),
        )
        for is_probe in (True, False)
    )
    assert trained[: len(probed)] == probed


def test_every_row_has_a_reason_and_all_that_a_user_meets_a_fix() -> None:
    assert len(TABLE) == len(set(TABLE))
    for row in TABLE:
        assert row.reason and bool(row.fix) == (row.kind != "not worth searching"), row
        assert bool(row.fields) == (row.kind == "not worth searching"), row
