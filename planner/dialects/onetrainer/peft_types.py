"""OneTrainer's kinds of adapters (`peft_type`): LoRA; LoKr and LoHa by their numbers."""

from __future__ import annotations

from planner.catalog.profiles import ModelProfile
from planner.dialects.base import lycoris
from planner.dialects.base.bindings import Fields, Settings
from planner.dialects.base.values import integer
from planner.dialects.onetrainer.train_config import CONFIG
from planner.errors import VplanError, quoted
from planner.layout.adapters import LinearLayer, layers_of
from planner.layout.trainer_terms.onetrainer import LOHA, LOKR


def refuse_unpriced_adapters(settings: Settings, profile: ModelProfile) -> None:
    """Raises a VplanError for adapters that are not priced: OFT, those that also train a weight's lengths, and LoKr and
    LoHa of a U-Net, whose convolutions have them too."""
    kind = kind_of(settings)
    if kind not in ("LORA", "LOKR", "LOHA"):
        raise VplanError(f"OneTrainer's adapters {quoted(kind)} are not priced", "LORA, LOKR and LOHA are")
    decompose = "lora_decompose" if kind == "LORA" else "lokr_weight_decompose"
    if settings.get(f"{CONFIG}{decompose}") and kind != "LOHA":
        fault = f"{decompose} is not priced: the product of an adapter is made whole (DoRA)"
        raise VplanError(fault, f"leave {decompose} out")
    if kind != "LORA" and profile.traits.stages:
        fault = f"OneTrainer's {kind} of {profile.title} gives convolutions adapters too, which are not priced"
        raise VplanError(fault, "check it with peft_type LORA")


def kind_of(settings: Settings) -> str:
    """`peft_type`."""
    return str(settings.get(f"{CONFIG}peft_type") or "LORA")


def rank_of(settings: Settings, profile: ModelProfile, targets: tuple[str, ...] | None, of_blocks: bool) -> int:
    """The rank of the LoRA that has as many numbers. ``targets``: the layers, None for all, or ``of_blocks``."""
    kind = kind_of(settings)
    if kind != "LOKR":
        rank = integer(_of(settings, "lora_rank", 16), "lora_rank")
        return 2 * rank if kind == "LOHA" else rank
    rank = 0 if _of(settings, "lokr_full_matrix", False) else integer(_of(settings, "lokr_dim", 16), "lokr_dim")
    return lycoris.rank_of_lokr(_layers(profile, targets, of_blocks), _factor_of(settings), rank)


def version_of(settings: Settings) -> str:
    """The version of memory terms of adapters that make changes of weights whole."""
    kind = kind_of(settings)
    if kind == "LOHA":
        return LOHA
    return LOKR if kind == "LOKR" and not _of(settings, "lokr_vec_trick", True) else ""


def note(settings: Settings, fields: Fields) -> str | None:
    """How adapters that are no LoRA are priced, in words."""
    kind = kind_of(settings)
    if kind == "LORA" or fields["method"] != "lora":
        return None
    adapter = "LoHa" if kind == "LOHA" else lycoris.lokr_of(_factor_of(settings))
    source = "OneTrainer 23df3832 modules/module/LoRAModule.py; not rehearsed"
    return lycoris.priced_as(adapter, fields["lora_rank"], source, bool(version_of(settings)))


def _layers(profile: ModelProfile, targets: tuple[str, ...] | None, of_blocks: bool) -> list[LinearLayer]:
    if targets is None and not of_blocks:
        return list(layers_of(profile).values())
    return lycoris.layers_named(profile, targets)


def _factor_of(settings: Settings) -> int:
    return lycoris.factor_of(settings.get(f"{CONFIG}lokr_decompose_factor"), "lokr_decompose_factor")


def _of(settings: Settings, name: str, default: object) -> object:
    value = settings.get(f"{CONFIG}{name}")
    return default if value is None else value
