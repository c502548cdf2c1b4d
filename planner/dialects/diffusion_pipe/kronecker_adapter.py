"""diffusion-pipe's ``adapter.type`` lokr: peft's LoKr, read at 8f83dbf (models/base.py ``configure_adapter``) and in
peft 0.21.2, whose forward makes the change of a weight whole (tuners/lokr/layer.py ``get_delta_weight``)."""

from __future__ import annotations

from planner.catalog import lookup
from planner.dialects.base import lycoris
from planner.dialects.base.bindings import Fields, Settings
from planner.dialects.base.values import integer, number
from planner.dialects.diffusion_pipe.models import model_of
from planner.errors import VplanError
from planner.layout.trainer_terms.diffusion_pipe import LOKR_IN_FP32
from planner.layout.trainer_terms.lycoris.whole_changes import LOKR

ADAPTER = "config:adapter."
FACTOR = f"{ADAPTER}decompose_factor"


def is_lokr(settings: Settings) -> bool:
    """Whether the adapters are LoKr."""
    return settings.get(f"{ADAPTER}type") == "lokr"


def rank_of(settings: Settings, targets: Fields) -> int:
    """The rank of the LoRA on the same layers that has as many numbers. Raises a VplanError for a LoKr that is not
    priced."""
    profile = lookup.model(model_of(settings)["model"])
    if number(settings.get(f"{ADAPTER}rank_dropout") or 0.0, "adapter.rank_dropout"):
        raise VplanError("adapter.rank_dropout is not priced", "leave rank_dropout out")
    if "nf4" in (str(settings.get(f"config:model.{name}")) for name in ("transformer_dtype", "diffusion_model_dtype")):
        fault = "a LoKr over nf4 is not priced: peft reads the shape of a weight, which is packed"
        raise VplanError(fault, "use adapter.type lora")
    if profile.trained_with("diffusion-pipe", "text-encoders-trained"):
        fault = f"a LoKr of {profile.title} is on its text encoders too, which is not priced"
        raise VplanError(fault, "check it with adapter.type lora")
    if profile.trained_with("diffusion-pipe", "last-encoder-stays"):
        raise VplanError(f"a LoKr of {profile.title} is not priced", "check it with adapter.type lora")
    rank = integer(settings.get(f"{ADAPTER}rank", 16), "adapter.rank")
    layers = lycoris.layers_named(profile, targets["lora_targets"] or profile.lora.targets)
    return lycoris.rank_of_lokr(layers, _factor_of(settings), rank)


def version_of(settings: Settings, dtype: str | None) -> str:
    """The version of memory terms: ``dtype`` is the adapters'."""
    if not is_lokr(settings):
        return ""
    return LOKR_IN_FP32 if dtype == "fp32" else LOKR


def note(settings: Settings, fields: Fields) -> str:
    """How it is priced, in words."""
    source = "diffusion-pipe 8f83dbf, peft 0.21.2; not rehearsed"
    return lycoris.priced_as(lycoris.lokr_of(_factor_of(settings)), fields["lora_rank"], source, True)


def _factor_of(settings: Settings) -> int:
    return lycoris.factor_of(settings.get(FACTOR), "adapter.decompose_factor")
