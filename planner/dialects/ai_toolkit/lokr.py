"""ai-toolkit's kinds of adapters: LoRA, and LoKr as a LoRA with as many numbers.

A LoKr is the Kronecker product of two matrices, of which ai-toolkit never makes the whole: the layer's input goes
through the one, then through the other (toolkit/models/lokr.py ``_call_forward_fast_linear``). So a step keeps for a
layer what came in, which layers share, and what is in between, in 16 bits; of a LoRA it keeps what came in, in fp32.
FLUX.1 at 512 pixels, rehearsed in its own code: 7.5 GiB over all blocks, where as a LoRA it is told 9.0. With
checkpoints that is one block's, and 0.5 % of the peak.
"""

from __future__ import annotations

from planner.catalog import lookup
from planner.dialects.ai_toolkit.models import AT, NETWORK, model_of, named_layers
from planner.dialects.base import lycoris
from planner.dialects.base.bindings import Fields, Settings
from planner.dialects.base.values import integer, number
from planner.errors import VplanError, quoted

FACTOR = f"{NETWORK}lokr_factor"
WHOLE = f"{NETWORK}lokr_full_rank"


def rank_of(settings: Settings) -> Fields:
    """The fields `lora_rank` and `lora_dropout` that the settings mean. Raises a VplanError for a network that is
    neither LoRA nor LoKr, and for a LoKr of a U-Net, whose convolutions have adapters too."""
    kind = str(settings.get(f"{NETWORK}type", "lora"))
    rank = integer(settings.get(f"{NETWORK}rank") or settings.get(f"{NETWORK}linear") or 4, "linear")
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
    less = "; without gradient_checkpointing it needs a little less" * (fields["gradient_checkpointing"] == "none")
    source = f"{AT} toolkit/models/lokr.py"
    return f"{lycoris.priced_as(lycoris.lokr_of(_factor_of(settings)), fields['lora_rank'], source, False)}{less}"


def _rank_of_lokr(settings: Settings, rank: int) -> int:
    """The rank of the LoRA on the same layers that has as many numbers as the LoKr. ``rank``: above which a second
    matrix is whole, unless all are."""
    profile = lookup.model(model_of(settings)["model"])
    if profile.traits.stages:
        fault = f"network.type lokr of {profile.title} gives convolutions adapters too, which are not priced"
        raise VplanError(fault, "check it with network.type lora")
    least = 0 if settings.get(WHOLE, True) else rank
    layers = lycoris.layers_named(profile, named_layers(settings))
    return lycoris.rank_of_lokr(layers, _factor_of(settings), least)


def _factor_of(settings: Settings) -> int:
    return lycoris.factor_of(settings.get(FACTOR), "lokr_factor")
