"""What a text encoder in 8 and 4 bits takes: our own trainer packs its table of words, the others do not."""

from __future__ import annotations

import pytest

from planner.catalog import lookup
from planner.catalog.shapes import grid
from planner.layout import recordings
from planner.layout.encoders_vae.component_pass import component_bytes, encoders
from planner.layout.pipeline import lay_out
from planner.layout.run import Run
from planner.spec.configuration import Configuration
from planner.spec.job import Job, Machine, Strategy

ROWS, COLUMNS = 256384, 4096
"""of UMT5-XXL's table of words (google/umt5-xxl config.json)"""


def laid_out(trainer: str, dtype: str, model: str = "wan2.1-t2v-1.3b") -> Run:
    """A run with its text encoders on the GPU, and no VAE there."""
    height, width = lookup.model(model).shape.resolutions[0]
    job = Job(model=model, frames=1, height=height, width=width)
    fields = {"gradient_checkpointing": "full", "text_encoder": "resident", "text_encoder_dtype": dtype}
    configuration = Configuration.of(job, Strategy.read(fields), Machine(gpu="h100"))
    facts = recordings.load_facts(configuration)
    return lay_out(configuration, facts, grid(facts.model, job), trainer)


def encoder_bytes(run: Run) -> int:
    """What the text encoders' weights take as they are laid out."""
    names = [f"weight of {encoder.folder}" for encoder in run.facts.model.text_encoders]
    return sum(run.sizes[buffer] for name in names for buffer in run.program.named[name].values())


@pytest.mark.parametrize(("dtype", "bits"), [("fp8", 8.0), ("int8", 8.0), ("nf4", 4.5)])
@pytest.mark.parametrize("trainer", ["musubi-tuner", "simpletuner", "diffusers"])
def test_a_table_of_words_stays_in_16_bits_but_for_ours(trainer: str, dtype: str, bits: float) -> None:
    ours, theirs = (laid_out(name, dtype) for name in ("vplan", trainer))
    packed = int(ROWS * COLUMNS * bits / 8)
    assert encoder_bytes(theirs) - encoder_bytes(ours) == 2 * ROWS * COLUMNS - packed
    assert component_bytes(theirs, "resident") == pytest.approx(encoder_bytes(theirs), rel=1e-3)


def test_in_16_bits_there_is_no_difference() -> None:
    assert encoder_bytes(laid_out("musubi-tuner", "bf16")) == encoder_bytes(laid_out("vplan", "bf16"))


@pytest.mark.parametrize(("trainer", "packed"), [("sd-scripts", 1), ("musubi-tuner", 1), ("onetrainer", 2)])
def test_kohya_s_trainers_cast_the_largest_encoder_alone(trainer: str, packed: int) -> None:
    parts = encoders(laid_out(trainer, "fp8", "flux.1-dev"), "resident", 1)
    quantised = [part.name for part in parts if part.is_quantised]
    assert len(quantised) == packed and max(parts, key=lambda part: part.parameters).name in quantised


def test_ai_toolkit_quantises_no_clip_and_takes_the_model_s_qtype_for_t5() -> None:
    """T5's linear layers have 4.63 billion numbers, its table 0.13: what 672 layers of FLUX.1 and T5 took on a virtual
    GPU was 8.418 GiB in uint4, the table 0.2455 and CLIP 0.2292."""
    clip, t5 = encoders(laid_out("ai-toolkit@uint4", "nf4", "flux.1-dev"), "resident", 1)[:2]
    assert clip.dtype == "bf16" and clip.weight_bytes == pytest.approx(0.2292 * 2**30, rel=0.001)
    assert t5.bits == 4.375 and 2 * t5.table_parameters == pytest.approx(0.2455 * 2**30, rel=0.005)
    matrices = 4_762_310_656 - t5.table_parameters
    assert t5.weight_bytes == int(matrices * 4.375 / 8) + 2 * t5.table_parameters
