"""Every model that the step builds runs with the same flags of torch's libraries."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from planner.catalog import card_lookup, lookup  # noqa: E402
from planner.catalog.shapes import job_for  # noqa: E402
from planner.estimate.roofline import peak_flops  # noqa: E402
from planner.spec.job import Strategy  # noqa: E402
from trainers.step import step  # noqa: E402

BACKENDS = torch.backends


def test_a_built_model_has_set_the_flags_whatever_was_set() -> None:
    """As NVIDIA's containers set TF32 for matrices; its memory format is torch's usual one."""
    BACKENDS.cuda.matmul.allow_tf32 = BACKENDS.cudnn.benchmark = True
    BACKENDS.cudnn.allow_tf32 = False
    profile = lookup.model("sd-1.5")
    model = step.build_model(profile, job_for(profile, {"method": "full"}), Strategy(weights_dtype="fp32"))
    assert not BACKENDS.cuda.matmul.allow_tf32
    assert BACKENDS.cudnn.allow_tf32
    assert not BACKENDS.cudnn.benchmark
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_they_are_priced_as_they_are() -> None:
    """fp32 matrices at the card's fp32 rate, fp32 convolutions at TF32's: 19.5 and 156 TFLOP/s of an A100."""
    card, strategy = card_lookup.gpu("a100-80gb"), Strategy(compute_dtype="fp32", weights_dtype="fp32")
    assert peak_flops(card, strategy, "matmul", half=0) == 19.5e12
    assert peak_flops(card, strategy, "convolution", half=0) == 156e12
