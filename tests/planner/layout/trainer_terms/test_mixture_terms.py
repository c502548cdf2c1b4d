"""planner/layout/trainer_terms: what trainers of HiDream hold otherwise than ours, counted by hand."""

from __future__ import annotations

import itertools
import re

import pytest

from planner.catalog.lookup import model
from planner.catalog.shapes import grid, job_for
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts
from planner.layout.run import Run
from planner.layout.trainer_terms.lora_layers import on_all_linear
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy

MODEL = model("hidream-i1")
WIDTH, INNER, BLOCKS = 2560, 6912, 48
EVERY_LAYER = on_all_linear(MODEL, "bf16")


def run_of(trainer: str, targets: tuple[str, ...] | None = None, **strategy: object) -> Run:
    shape = {"height": 512, "width": 512, "lora_rank": 32, "lora_targets": targets}
    fields = {"gradient_checkpointing": "full", "autocast": "bf16", "optimizer": "adamw", **strategy}
    configuration = Configuration.of(job_for(MODEL, shape), Strategy.read(fields), Machine.read({"gpu": "h100-80gb"}))
    return lay_out(configuration, load_facts(configuration), grid(MODEL, configuration.job), trainer)


def peak(run: Run) -> int:
    """The most of a later step, over what is loaded."""
    return max(itertools.accumulate(run.sizes[event] if event >= 0 else -run.sizes[~event] for event in run.step.ops))


def made(run: Run, category: str, pattern: str) -> int:
    return sum(run.sizes[buffer] for name, buffer in run.named(category).items() if re.search(pattern, name))


@pytest.mark.parametrize(("version", "per_parameter"), [("", 2.0), ("@llama-4bit", 0.5625)])
def test_llama_stays_in_diffusion_pipe(version: str, per_parameter: float) -> None:
    """128,256 words of 4,096 numbers in its first layer and in its last are never in 4 bits."""
    run = run_of(f"diffusion-pipe{version}")
    words = 2 * 128256 * 4096
    (llama,) = (buffer for buffer, op in enumerate(run.program.op) if op == "llama-3.1-8b")
    assert run.sizes[llama] == 2 * words + per_parameter * (8030261248 - words)
    assert llama in run.load.ops and ~llama not in run.step.ops
    assert "llama-3.1-8b" not in run_of("simpletuner").program.op


def test_simpletuner_adapts_no_layer_behind_attention() -> None:
    run = run_of("simpletuner", adapter_dtype="bf16")
    assert made(run, "weight", r"\.to_out\.lora_") == made(run, "gradient", r"\.to_out\.lora_") == 0
    assert made(run, "gradient", r"\.to_q\.lora_") == 2 * BLOCKS * 32 * 2 * WIDTH


def test_experts_that_are_left_out_have_no_adapters() -> None:
    with_experts, without = (run_of(f"ai-toolkit{version}", EVERY_LAYER) for version in ("", "@without-experts"))
    of_experts = 4 * BLOCKS * 4 * 3 * 32 * (WIDTH + INNER)
    assert made(with_experts, "gradient", r"\.experts\.") == of_experts
    assert made(without, "gradient", r"\.experts\.") == made(without, "optimizer", r"\.experts\.") == 0
    assert made(without, "gradient", "shared_experts") == made(with_experts, "gradient", "shared_experts") > 0


def test_experts_that_are_left_out_over_a_quantised_base() -> None:
    """What is added for more layers than the recorded is less by the experts' weights."""
    with_experts, without = (
        run_of(f"ai-toolkit{version}", weights_dtype="fp8", adapter_dtype="fp32")
        for version in ("", "@without-experts")
    )
    added = [
        next(run.sizes[buffer] for buffer, op in enumerate(run.program.op) if op == "adapters on more layers")
        for run in (with_experts, without)
    ]
    assert added[0] - added[1] == 4 * BLOCKS * 4 * 3 * 32 * (WIDTH + INNER)


def test_experts_without_gradients_keep_nothing_wide() -> None:
    """Without checkpoints two experts keep three tensors of their width for each token of each block."""
    ours, theirs = (run_of(trainer, gradient_checkpointing="none") for trainer in ("vplan", "diffusers"))
    image, text = 32 * 32, 3 * 128
    kept = 2 * 3 * 2 * INNER * (16 * image + 32 * (image + text))
    assert peak(ours) - peak(theirs) == pytest.approx(kept, rel=0.03)
    made_there = [event for event in theirs.step.ops if event >= 0]
    freed = [~event for event in theirs.step.ops if event < 0]
    assert len(set(freed)) == len(freed) and len(set(made_there)) == len(made_there)


def test_their_recomputed_ones_are_gone_before_backward() -> None:
    ours, theirs = (run_of(trainer) for trainer in ("vplan", "diffusers"))
    assert 0 < peak(ours) - peak(theirs) < 2 * 4 * 2 * INNER * (32 * 32 + 3 * 128)
