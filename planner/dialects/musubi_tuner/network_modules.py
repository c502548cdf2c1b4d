"""musubi-tuner's kinds of adapters: LoRA; LoKr and LoHa, which make the change of a weight whole, by its numbers."""

from __future__ import annotations

from planner.catalog import lookup
from planner.dialects.base import lycoris
from planner.dialects.base.bindings import Fields, Settings
from planner.dialects.base.values import as_list, integer
from planner.dialects.musubi_tuner.models import AT, is_full, model_of
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.lora_layers import on_all_linear
from planner.layout.trainer_terms.musubi_tuner import LOHA, LOKR

WHOLE = {"networks.lokr": LOKR, "networks.loha": LOHA}
"""``--network_module`` -> the version of memory terms."""


def kind_of(settings: Settings) -> str | None:
    """The version of memory terms of adapters that are no LoRA; None for LoRA, and where nothing has adapters. Raises a
    VplanError for a module that is not priced."""
    module = str(settings.get("--network_module") or "networks.lora")
    if is_full(settings) or module.rpartition(".")[2].startswith("lora"):
        return None
    if module not in WHOLE:
        raise VplanError(f"--network_module {quoted(module)} is not priced", "check it with LoRA's module")
    return WHOLE[module]


def rank_of(settings: Settings) -> Fields:
    """The field `lora_rank`: of LoKr and LoHa that of the LoRA on the same layers that has as many numbers."""
    rank = integer(settings.get("--network_dim") or 4, "--network_dim")
    kind = kind_of(settings)
    if kind == LOHA:
        rank *= 2  # two products of two matrices each
    elif kind == LOKR:
        profile = lookup.model(model_of(settings)["model"])
        targets = targets_of(settings, "bf16")["lora_targets"] or profile.lora.targets
        rank = lycoris.rank_of_lokr(lycoris.layers_named(profile, targets), _factor_of(settings), rank)
    return {"lora_rank": rank}


def write_rank(fields: Fields) -> Settings:
    """Of a LoRA."""
    return {"--network_dim": fields["lora_rank"]}


def targets_of(settings: Settings, weights_dtype: object) -> Fields:
    """Adapters on every linear layer of the blocks but modulation (networks/lora_*.py), without Wan's feed-forward
    where a pattern leaves it out."""
    if is_full(settings):
        return {"lora_targets": None}
    narrow = any("exclude_patterns" in word and "ffn" in word for word in _network_args(settings))
    profile = lookup.model(model_of(settings)["model"])
    return {"lora_targets": None if narrow else on_all_linear(profile, weights_dtype)}


def adapter_note(settings: Settings, fields: Fields) -> str | None:
    """How adapters that are no LoRA are priced, in words."""
    kind = kind_of(settings)
    if kind is None:
        return None
    adapter = "LoHa" if kind == LOHA else lycoris.lokr_of(_factor_of(settings))
    return lycoris.priced_as(adapter, fields["lora_rank"], f"{AT} networks/{kind}.py", True)


def _factor_of(settings: Settings) -> int:
    said = (word.partition("=")[2] for word in _network_args(settings) if word.partition("=")[0] == "factor")
    return lycoris.factor_of(next(said, None), "--network_args factor")


def _network_args(settings: Settings) -> list[str]:
    return [str(word) for word in as_list(settings.get("--network_args") or [])]
