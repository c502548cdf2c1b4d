"""Dropout in front of adapters: recorded when asked for, with what CUDA's fused kernel keeps."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.errors import NotRecordedError
from planner.layout.recordings import load_facts
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.tape.format import CATEGORIES
from planner.tape.program import Program
from planner.tape.variants.inventory import step_variants, step_variants_on_request
from planner.tape.variants.variant import StepVariant
from trainers.recording import tapes

PROFILE = lookup.model("wan2.1-t2v-1.3b")
NAME = "step-lora-dropout-half-half-none-one"


def test_each_adapter_keeps_what_dropout_gave_and_a_byte_per_number_of_it() -> None:
    variant = next(known for known in step_variants_on_request(PROFILE) if known.name == NAME)
    found, plain = (tapes.step_tape(PROFILE, known) for known in (variant, _plain(variant)))
    shape = grid(PROFILE, job_for(PROFILE, {"frames": 17}))
    sizes = {}
    for recorded in (found, plain):
        program = Program()
        program.unfold(recorded, "load")
        step = program.unfold(recorded, "step")
        at = program.bytes_of(shape)
        forward = [event for moment, events in step.stretches if moment.passes == "forward" for event in events]
        freed = {~event for event in forward if event < 0}
        kept = [event for event in forward if event >= 0 and event not in freed]
        assert all(program.category[event] in CATEGORIES for event in kept)
        sizes[recorded.variant] = sum(at[event] for event in kept)
    tokens, text, width = shape["F"] * shape["H"] * shape["W"], shape["T"], 1536
    # Per block eight adapters: six read the clip's tokens, two (key and value of the cross attention) the text's. Each
    # keeps its dropped input in bf16 and a mask; what they read without dropout is kept by the frozen layer only if it
    # needs it, and nobody's input is kept twice.
    grown = sizes[found.variant] - sizes[plain.variant]
    most = 30 * 3 * width * (6 * tokens + 2 * text)
    assert 0.5 * most < grown <= most


def _plain(variant: StepVariant) -> StepVariant:
    return next(known for known in step_variants(PROFILE) if known.name == variant.name.replace("dropout-", ""))


def test_without_a_recording_the_refusal_says_how_to_make_one() -> None:
    job = job_for(PROFILE, {"lora_dropout": 0.1})
    with pytest.raises(NotRecordedError, match="no tape step-lora-dropout-half-fp32-autocast-none-one") as caught:
        load_facts(Configuration.of(job, Strategy(), Machine(gpu="rtx4090")))
    assert caught.value.fix.endswith("--variant step-lora-dropout-half-fp32-autocast-none-one")
