"""ai-toolkit's kinds of adapters: LoRA, and LoKr as a LoRA with as many numbers.

A LoKr is the Kronecker product of two matrices, of which ai-toolkit never makes the whole: the layer's input goes
through the one, then through the other (toolkit/models/lokr.py ``_call_forward_fast_linear``). So a step keeps for a
layer what came in and what is in between, as many numbers as came in and go out, in 16 bits; of a LoRA it keeps what
came in, in fp32. Over the layers of a block the two are about the same.
"""

from __future__ import annotations

import math

from planner.catalog import lookup
from planner.dialects.ai_toolkit.models import AT, NETWORK, model_of, named_layers
from planner.dialects.base.bindings import Fields, Settings
from planner.dialects.base.values import integer, number
from planner.errors import VplanError, quoted
from planner.layout.adapters import LinearLayer, is_named, layers_of

FACTOR = f"{NETWORK}lokr_factor"
WHOLE = f"{NETWORK}lokr_full_rank"
NEAR_ROOT = -1
"""The factor that divides each side of a weight as near to its square root as can be."""


def rank_of(settings: Settings) -> Fields:
    """The fields `lora_rank` and `lora_dropout` that the settings mean. Raises a VplanError for a network that is
    neither LoRA nor LoKr, and for a LoKr of a U-Net, whose convolutions have adapters too."""
    kind = str(settings.get(f"{NETWORK}type", "lora"))
    rank = integer(settings.get(f"{NETWORK}linear", settings.get(f"{NETWORK}rank")) or 4, "linear")
    if kind == "lora":
        return {"lora_rank": rank, "lora_dropout": number(settings.get(f"{NETWORK}dropout") or 0.0, "dropout")}
    if kind.lower() != "lokr":
        raise VplanError(
            f"network.type {quoted(kind)} is not supported here", "supported: network.type lora, and lokr read only"
        )
    return {"lora_rank": _rank_of_lokr(settings, rank), "lora_dropout": 0.0}  # it has no dropout


def write_rank(fields: Fields) -> Settings:
    """Of a LoRA."""
    settings: Settings = {f"{NETWORK}type": "lora", f"{NETWORK}linear": fields["lora_rank"]}
    return settings | ({f"{NETWORK}dropout": fields["lora_dropout"]} if fields["lora_dropout"] else {})


def lokr_note(settings: Settings, fields: Fields) -> str | None:
    """How a LoKr is priced, in words; None for any other network."""
    if fields["method"] != "lora" or str(settings.get(f"{NETWORK}type")).lower() != "lokr":
        return None
    factor = _factor_of(settings)
    named = "the factor nearest to the square root" if factor == NEAR_ROOT else f"factor {factor}"
    as_many = f"a LoRA of rank {fields['lora_rank']}, which has about as many numbers"
    return f"a LoKr of {named} is priced as {as_many} ({AT} toolkit/models/lokr.py)"


def _rank_of_lokr(settings: Settings, rank: int) -> int:
    """The rank of the LoRA on the same layers that has as many numbers as the LoKr. ``rank``: above which a second
    matrix is whole, unless all are."""
    profile = lookup.model(model_of(settings)["model"])
    if profile.traits.stages:
        fault = f"network.type lokr of {profile.title} gives convolutions adapters too, which are not priced"
        raise VplanError(fault, "check it with network.type lora")
    factor = _factor_of(settings)
    least = 0 if settings.get(WHOLE, True) else rank
    targets = named_layers(settings)
    layers = [
        layer
        for name, layer in layers_of(profile).items()
        if (is_named(name, targets) if targets else layer.block is not None)
    ]
    numbers = sum(numbers_of(layer, factor, least) for layer in layers)
    return max(1, round(numbers / sum(layer.numbers for layer in layers)))


def _factor_of(settings: Settings) -> int:
    factor = settings.get(FACTOR, NEAR_ROOT)
    return NEAR_ROOT if factor in (NEAR_ROOT, str(NEAR_ROOT)) else max(1, integer(factor, "lokr_factor"))


def numbers_of(layer: LinearLayer, factor: int, rank: int) -> int:
    """Those of a layer's LoKr: the first matrix has the smaller sides and is whole; so is the second, unless a product
    of two of ``rank`` (0: never) has less than half of its longer side."""
    (rows, more_rows), (columns, more_columns) = sides(layer.rows, factor), sides(layer.columns, factor)
    if rank and rank < max(more_rows, more_columns) / 2:
        return rows * columns + rank * (more_rows + more_columns)
    return rows * columns + more_rows * more_columns


def sides(length: int, factor: int) -> tuple[int, int]:
    """The two factors of a side of a weight, the smaller first: ``factor`` itself where that divides it, else the
    largest divisor up to it and the square root (toolkit/models/lokr.py ``factorization``)."""
    if factor > 0 and length % factor == 0:
        return factor, length // factor
    most = math.isqrt(length) if factor == NEAR_ROOT else min(factor, math.isqrt(length))
    smaller = next(divisor for divisor in range(most, 0, -1) if length % divisor == 0)
    return smaller, length // smaller
