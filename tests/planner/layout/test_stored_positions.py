"""planner/layout/stored_positions.py on the tapes of CogVideoX-2B: its table of positions is made anew at foreign
shapes only."""

from __future__ import annotations

from typing import Any

import pytest

from planner.catalog.shapes import grid
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy
from planner.tape.program import Stage

TABLE, ELEMENTS = "patch_embed.pos_embedding", 17_776 * 1_920


def laid_out(frames: int = 49, trainer: str = "vplan", **strategy: Any) -> Run:
    method = strategy.pop("method", "lora")
    asked = {"model": "cogvideox-2b", "method": method, "frames": frames, "height": 480, "width": 720}
    job, machine = Job.read(asked, "job"), Machine.read({"gpu": "a100-80gb", "host_ram": 2**37}, "machine")
    given = {"weights_dtype": "fp16", "autocast": "fp16", "compute_dtype": "fp16", "text_encoder": "cached"}
    configuration = Configuration.of(job, Strategy.read({**given, "vae": "cached", **strategy}, "strategy"), machine)
    known = load_facts(configuration)
    return lay_out(configuration, known, grid(known.model, job), trainer)


def before_the_blocks(run: Run, stage: Stage) -> list[tuple[str, int]]:
    """Operator and bytes of what a stage allocates before its first block."""
    made = []
    for moment, events in stage.stretches:
        if moment.block >= 0:
            break
        made += [(run.program.op[event], run.sizes[event]) for event in events if event >= 0]
    return made


def test_the_table_is_made_anew_at_foreign_shapes_only() -> None:
    own, foreign = (before_the_blocks(run, run.step) for run in (laid_out(49), laid_out(25)))
    assert "new_zeros" in dict(foreign) and "new_zeros" not in dict(own)
    assert max(size for op, size in foreign if op == "clone") > 0
    # What is left is the embedding: both do the same but for the 37 tensors of the making.
    left = [op for op, _ in foreign]
    start, end = left.index("arange", left.index("convolution")), left.index("new_zeros")
    assert [op for op, _ in own] == left[:start] + left[end + 1 :]


def test_validation_denoises_with_the_stored_table() -> None:
    run = laid_out(validation_mode="on")
    assert "new_zeros" not in dict(before_the_blocks(run, run.phases.validation[0][1]))


@pytest.mark.parametrize(("trainer", "numbers", "copies"), [("vplan", 4, 1), ("diffusers", 2, 0)])
def test_a_script_that_casts_the_model_casts_the_table(trainer: str, numbers: int, copies: int) -> None:
    run = laid_out(trainer=trainer, validation_mode="on")
    assert run.sizes[run.named("weight")[TABLE]] == numbers * ELEMENTS
    for stage in (run.step, run.phases.validation[0][1]):
        assert before_the_blocks(run, stage).count(("_to_copy", 2 * ELEMENTS)) == copies


def test_full_fine_tuning_casts_parameters_back_but_not_the_table() -> None:
    run = laid_out(trainer="diffusers", method="full", weights_dtype="fp32")
    table = run.named("weight")[TABLE]
    assert run.sizes[table] == 2 * ELEMENTS
    assert run.load.ops.count(table) == 1 and table in run.load.stretches[0][1]
