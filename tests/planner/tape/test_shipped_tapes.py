"""Shipped tapes: what a step leaves is what the optimizer's step takes, and they were held to direct recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.allocator.caching import BLOCK_ROUND_BYTES
from planner.catalog import lookup
from planner.catalog.shapes import grid, job_for
from planner.evidence.jsonl import rows_by_id
from planner.layout.pipeline import lay_out
from planner.layout.recordings import load_facts, tape
from planner.spec.configuration import Configuration
from planner.spec.job import Machine, Strategy
from planner.tape.packs import digest, is_stored
from planner.tape.program import Program
from planner.tape.variants.inventory import optimizer_variants, sample_variants, step_variants
from planner.tape.variants.precision import PRECISIONS
from planner.tape.variants.recorded_methods import methods
from planner.tape.variants.variant import OPTIMIZERS, OptimizerVariant, StepVariant
from profiles import TAPES
from tests.shipped_tapes import shipped_tapes

LEDGER = Path(__file__).parents[2] / "benchmarks" / "held_out.jsonl"
ALLOWED = 0.001


def test_what_was_held_out_is_true_of_the_tapes_that_are_shipped() -> None:
    """Recorded directly at another shape by `tests.benchmarks.held_out_all`; a tape recorded anew is due again."""
    shipped = {f"{path.parent.name}/{path.name.removesuffix('.json.gz')}": path for path in shipped_tapes()}
    spoken_of = 0
    for name, row in rows_by_id(LEDGER).items():
        path = shipped.get("/".join(name.split("/")[:2]))
        if path is not None and digest(path).startswith(row["digest"]):
            spoken_of += 1
            assert "fault" not in row, f"{name}: {row['fault']}"
            assert row["tape"] == pytest.approx(row["recorded"], rel=ALLOWED), name
    assert spoken_of > 200


@pytest.mark.parametrize("name", lookup.model_names())
def test_every_gradient_of_a_step_is_freed_by_the_optimizer(name: str) -> None:
    """An optimizer skips parameters that no gradient reaches, and a tape of it must skip the same."""
    for method in methods(lookup.model(name)):
        precision = PRECISIONS[method.removesuffix("-wide")][0]
        optimizer = OptimizerVariant(method, precision.trained, *OPTIMIZERS[0])
        program = Program()
        step = tape(name, StepVariant(method, precision, "full", one_sample=True).name)
        program.unfold(step, "load")
        program.unfold(step, "step")
        made = set(program.named["gradient"].values())
        assert made
        freed = {~event for event in program.unfold(tape(name, optimizer.name), "optimizer").ops if event < 0}
        assert made <= freed, f"{method}: {len(made - freed)} gradients stay"


@pytest.mark.parametrize("name", lookup.model_names())
def test_scales_of_8_bit_states_are_those_of_the_rank(name: str) -> None:
    """One fp32 for every 256 numbers of a state (bitsandbytes functional.py), at a rank no tape was recorded at."""
    model = lookup.model(name)
    machine = Machine(gpu="h200-141gb", host_ram=2**40)
    job = job_for(model, {"model": name, "method": "lora", "lora_rank": 20})
    configuration = Configuration.of(job, Strategy(optimizer="adamw-8bit", gradient_checkpointing="full"), machine)
    known = load_facts(configuration)
    run = lay_out(configuration, known, grid(model, job))
    states = {name: run.sizes[buffer] for name, buffer in run.named("optimizer").items()}
    scales = {name: nbytes for name, nbytes in states.items() if name.endswith(":absmax1") and "lora_" in name}
    assert scales
    for scale, nbytes in scales.items():
        numbers = states[scale.replace("absmax1", "state1")]
        assert nbytes == 4 * -(-numbers // 256) or max(nbytes, numbers) <= BLOCK_ROUND_BYTES, scale


FILES_PER_MODEL, MOST_BYTES = 1.5, 6_000_000
"""Models of one architecture share a pack, and few bring more than one VAE or text encoder that no other has."""


def test_recordings_are_shipped_as_packs_that_travel_light() -> None:
    files = [path for path in TAPES.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".zip"}
    assert len(files) <= FILES_PER_MODEL * len(lookup.model_names())
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


@pytest.mark.parametrize("name", lookup.model_names())
def test_every_optimizer_is_recorded_of_every_model(name: str) -> None:
    profile = lookup.model(name)
    for variant in optimizer_variants(profile):
        # No two blocks of a UNet are alike, so what steps parameter by parameter makes a long tape of it.
        if profile.family == "unet" and variant.optimizer not in ("adamw", "adamw-8bit", "lion"):
            continue
        if profile.family == "unet" and variant.name.startswith("optimizer-lora-wide"):
            continue
        assert is_stored(TAPES / name / f"{variant.name}.json.gz"), variant.name


@pytest.mark.parametrize("name", lookup.model_names())
def test_every_step_and_sample_is_recorded_of_every_model(name: str) -> None:
    profile = lookup.model(name)
    for variant in (*step_variants(profile), *sample_variants(profile)):
        # No two of its blocks are alike, and each layer makes a copy of its own: over 100 kB a tape.
        if name == "sdxl" and variant.precision.weights in ("int8", "nf4"):
            continue
        if profile.family == "unet" and variant.method == "lora-wide":
            continue
        assert is_stored(TAPES / name / f"{variant.name}.json.gz"), variant.name


@pytest.mark.parametrize("name", [name for name in lookup.model_names() if lookup.model(name).family != "unet"])
@pytest.mark.parametrize("optimizer", ["adafactor", "prodigy"])
def test_a_step_parameter_by_parameter_is_laid_out_at_full_depth(name: str, optimizer: str) -> None:
    profile = lookup.model(name)
    machine, job = Machine(gpu="h200"), job_for(profile, {"method": "lora"})
    configuration = Configuration.of(job, Strategy(gradient_checkpointing="full", optimizer=optimizer), machine)
    run = lay_out(configuration, load_facts(configuration), grid(profile, job))
    states = run.total_bytes(run.named("optimizer").values())
    gradients = run.total_bytes(run.named("gradient").values())
    assert states < 0.5 * gradients if optimizer == "adafactor" else states >= 2 * gradients
