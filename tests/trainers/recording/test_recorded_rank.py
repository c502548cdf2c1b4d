"""The rank that Muon's step over adapters is recorded at, and what its tape says of other ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.catalog import lookup
from planner.tape.variants.inventory import optimizer_variants
from tests.benchmarks.held_out import Case, directly, from_tape
from trainers.recording.tapes import PRIMES, RECORDED_BLOCKS, rank_below_layers, shallow_config

USUAL = PRIMES["R"]
NORM_BYTES = 4096
"""The stack of all gradients' norms, one number per tensor, stays that of the blocks recorded."""


def adapted(*layers: int) -> nn.Module:
    """A frozen square layer of each width, and a pair of adapters' matrices on it, at the usual rank."""
    model = nn.ParameterList()
    for width in layers:
        for shape in ((width, width), (USUAL, width), (width, USUAL)):
            model.append(nn.Parameter(torch.empty(shape, device="meta"), requires_grad=USUAL in shape))
    return model


@pytest.mark.parametrize(
    ("layers", "others", "rank"),
    [
        ((5120, 13824), set(), USUAL),
        ((USUAL + 1,), set(), USUAL),
        ((USUAL,), set(), 1021),
        ((1024, 2048), {1021}, 1019),
        ((1024, 2048), {1021 * 1019}, 1013),
        ((64, 6144), set(), 61),
        ((64, 61 * 8, 59 * 40), set(), 53),
        ((1, 12, 64, 6144), set(), 61),
        ((1, 12), set(), USUAL),
        ((17, 2 * 3 * 5 * 7 * 11 * 13), set(), USUAL),
    ],
)
def test_the_rank_is_a_prime_below_the_layers_that_no_length_has(
    layers: tuple[int, ...], others: set[int], rank: int
) -> None:
    assert rank_below_layers(adapted(*layers), others) == rank


def played(rank: int) -> tuple[int, int]:
    """The allocated peak of seven of Anima's blocks by the shipped tape, and recorded directly."""
    profile = lookup.model("anima")
    (variant,) = (known for known in optimizer_variants(profile) if known.name == "optimizer-lora-half-muon-foreach")
    usual = Case.of(profile, variant)
    case = Case(profile, variant, usual.job.replace(lora_rank=rank), usual.strategy)
    theirs, blocks = directly(case, shallow_config(profile, RECORDED_BLOCKS + 1))
    return from_tape(case, blocks).peak, theirs.peak


@pytest.mark.parametrize("rank", [8, 20, 1000, 1100])
def test_muon_over_narrow_layers_takes_what_is_recorded_at_the_rank(rank: int) -> None:
    """Also above the narrowest layers, of 1024 rows or columns: the widest, of 2048, have the peak."""
    tape, recorded = played(rank)
    assert tape == pytest.approx(recorded, rel=0, abs=NORM_BYTES)


def test_a_rank_above_the_widest_layer_is_not_predicted_too_low() -> None:
    tape, recorded = played(2500)
    assert recorded < tape < 1.005 * recorded
