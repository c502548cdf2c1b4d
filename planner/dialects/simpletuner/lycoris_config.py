"""SimpleTuner's ``lora_type`` lycoris: the file that ``lycoris_config`` names, read at bc8e6ab with lycoris-lora 3.4.0
(setup.py), which makes the adapters (lycoris/wrapper.py ``create_lycoris``, ``LycorisNetwork``).

The preset's classes choose the layers; `module_classes` says which are in them. Without bypass_mode an adapter makes
the change of its layer's weight whole (lycoris/modules/*.py ``forward``); bnb's and Quanto's layers are bypassed in any
case (lycoris/modules/base.py). Adapters are in the mixed precision's format (helpers/training/trainer.py
``move_models``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from planner.catalog import lookup
from planner.dialects.base import lycoris
from planner.dialects.base.bindings import Settings
from planner.dialects.base.script import Script
from planner.dialects.base.values import as_list, integer
from planner.dialects.simpletuner import example_paths
from planner.dialects.simpletuner.defaults import is_true
from planner.dialects.simpletuner.models import family_of, is_on, model_of, of
from planner.dialects.simpletuner.module_classes import ALL, EVERY_CLASS, MODULE_CLASSES, Parts, lies_in
from planner.errors import VplanError, quoted
from planner.layout.adapters import LinearLayer, layers_of
from planner.layout.trainer_terms.lycoris.whole_changes import LENGTHS, LOCON, LOHA, LOKR
from planner.layout.trainer_terms.simpletuner import BYPASSED, LOKR_BYPASSED, LYCORIS_LORA
from planner.untrusted import read_document

FILE = "lycoris:config"
"""What the file says."""

SOURCE = "lycoris-lora 3.4.0; 4.x, whose kernels are fused, was not run"
KINDS = {"lokr": LOKR, "loha": LOHA, "lora": LOCON, "locon": LOCON}
"""``algo`` -> the memory terms of adapters that make changes whole."""

UNPRICED = ("use_scalar", "train_norm", "decompose_both", "unbalanced_factorization", "dropout", "rank_dropout")
"""Keys that are not priced, unless they are off."""

EVERYTHING = ("Linear", "Conv1d", "Conv2d", "Conv3d")
"""Classes that are adapted where the preset names none (``TARGET_REPLACE_MODULE``)."""

PRESET = {"target_module", "module_algo_map", "enable_conv", "lora_prefix", "use_fnmatch"}
"""Keys of ``apply_preset`` that are read, or say nothing without names."""

OF_CLASS = {"algo", "factor", "dim", "alpha", "full_matrix", "linear_dim", "linear_alpha"}
"""Keys of a class in ``module_algo_map``; the last two are not looked at there."""


class Adapters(NamedTuple):
    """What a LyCORIS config puts on a model."""

    algo: str
    layers: Mapping[str, LinearLayer]
    rank: int
    """of the LoRA on the same layers that has as many numbers"""
    factors: tuple[int, ...]
    """of LoKr, one for each choice of layers"""
    bypassed: bool
    lengths: bool
    """whether they train the lengths of a weight's rows too"""


def is_lycoris(settings: Settings) -> bool:
    """Whether the adapters are LyCORIS'."""
    kind = str(of(settings, "model_type")), str(of(settings, "lora_type")).lower()
    return kind == ("lora", "lycoris")


def read_file(script: Script, settings: Settings) -> Settings:
    """What the file says that a config names, or why it is not known."""
    if not is_lycoris(settings):
        return {}
    path = str(of(settings, "lycoris_config"))
    file = example_paths.find(script, path)
    return {FILE: script.missing(path) if file is None else read_document(file)}


def adapters_of(settings: Settings) -> Adapters:
    """The adapters of a config. Raises a VplanError for those that are not priced."""
    config = settings.get(FILE)
    if not isinstance(config, dict):
        fault = f"SimpleTuner's lycoris_config {config or 'is not here'}"
        raise VplanError(fault, "its adapters are in that file alone; lora_type standard needs none")
    _refuse_unpriced(settings, config)
    preset = config.get("apply_preset") or {}
    if not isinstance(preset, dict) or (unknown := sorted(map(str, preset.keys() - PRESET))):
        which = f" {quoted(unknown[0])}" if isinstance(preset, dict) else ""
        raise VplanError(f"lycoris_config's apply_preset{which} is not priced", "target_module and module_algo_map are")
    chosen = _layers(settings, preset)
    choices = {name: _choice(config, preset, name) for name in chosen}
    algos = {str(choice["algo"]).lower() for choice in choices.values()}
    if len(algos) != 1 or not algos <= KINDS.keys():
        fault = f"lycoris_config's algo {quoted(', '.join(sorted(algos)))} is not priced"
        raise VplanError(fault, f"one of {', '.join(KINDS)} for all layers is")
    algo = algos.pop()
    layers = {name: layer for each in chosen.values() for name, layer in each.items()}
    numbers = sum(_numbers(algo, layer, choices[name]) for name, each in chosen.items() for layer in each.values())
    lengths = lycoris.is_true(config.get("dora_wd"))
    numbers += sum(layer.rows for layer in layers.values()) if lengths else 0
    rank = max(1, round(numbers / sum(layer.numbers for layer in layers.values())))
    factors = tuple(dict.fromkeys(_factor(choice) for choice in choices.values()))
    return Adapters(algo, layers, rank, factors, _is_bypassed(settings, config), lengths)


def version_of(settings: Settings) -> str:
    """The version of memory terms of the adapters."""
    adapters = adapters_of(settings)
    if not adapters.bypassed or KINDS[adapters.algo] == LOHA:
        return KINDS[adapters.algo] + (LENGTHS if adapters.lengths else "")
    return LOKR_BYPASSED if KINDS[adapters.algo] == LOKR else LYCORIS_LORA


def targets_of(settings: Settings) -> tuple[str, ...]:
    """`lora_targets` of the layers."""
    return lycoris.ends_of(lookup.model(model_of(settings)["model"]), adapters_of(settings).layers.keys())


def note(settings: Settings) -> str:
    """How the adapters are priced, in words."""
    adapters = adapters_of(settings)
    adapter = lycoris.adapter_in_words(adapters.algo, adapters.factors)
    whole = version_of(settings) not in BYPASSED
    return lycoris.priced_as(adapter, adapters.rank, SOURCE, whole)


def _refuse_unpriced(settings: Settings, config: Mapping[str, Any]) -> None:
    for key in UNPRICED:
        if config.get(key) not in (None, False, 0, 0.0, "false", "False"):
            raise VplanError(f"lycoris_config's {key} is not priced", f"leave {key} out")
    if config.get("preset") not in (None, "full"):
        raise VplanError("lycoris_config's preset is not priced", "apply_preset is")
    if str(of(settings, "mixed_precision") or "bf16") not in ("bf16", "fp16"):
        raise VplanError("lora_type lycoris without mixed_precision is not priced", "use mixed_precision bf16")
    if is_true(of(settings, "ramtorch")):
        raise VplanError("lora_type lycoris with RamTorch is not priced", "leave one of both out")
    if is_on(of(settings, "init_lora")):
        raise VplanError("lora_type lycoris with init_lora is not priced: the file says its layers", "leave it out")
    if lycoris.is_true(config.get("dora_wd")) and _is_bypassed(settings, config):
        raise VplanError("dora_wd trains nothing with LyCORIS' bypass_mode, and is not priced", "leave one of both out")
    base = str(of(settings, "base_model_precision"))
    if base == "no_change":
        return
    if not _is_bypassed(settings, config):
        fault = f"LyCORIS without bypass_mode over base_model_precision {quoted(base)} is not priced"
        raise VplanError(fault, "set bypass_mode in the file of lycoris_config")
    if str(config.get("algo")).lower() == "loha":
        raise VplanError("LyCORIS' LoHa over a quantised base is not priced", "use base_model_precision no_change")


def _is_bypassed(settings: Settings, config: Mapping[str, Any]) -> bool:
    """Whether a layer's input goes through the factors, without the change of its weight."""
    given = config.get("bypass_mode")
    return lycoris.is_true(given) or str(of(settings, "base_model_precision")).endswith("-quanto")


def _layers(settings: Settings, preset: Mapping[str, Any]) -> dict[str, dict[str, LinearLayer]]:
    """Class -> the layers in it. An inner class of the map has its own; of others the outer one has them."""
    family = family_of(settings)
    classes = MODULE_CLASSES.get(family)
    if classes is None:
        raise VplanError(f"LyCORIS of model_family {family} is not priced", "use lora_type standard")
    mapped = preset.get("module_algo_map") or {}
    named = as_list(preset.get("target_module") or [*EVERYTHING])
    if not isinstance(mapped, dict) or not all(isinstance(each, str) for each in named):
        raise VplanError("lycoris_config's apply_preset is no list and map of classes", "see SimpleTuner's LYCORIS.md")
    parts = {name: _parts(family, classes, str(name)) for name in dict.fromkeys((*named, *mapped))}
    found: dict[str, dict[str, LinearLayer]] = {}
    for name, layer in layers_of(lookup.model(model_of(settings)["model"])).items():
        holders = [owner for owner, each in parts.items() if each and any(lies_in(name, part) for part in each)]
        if holders:
            inner = [owner for owner in holders if owner in mapped] or holders
            found.setdefault(_innermost(name, inner, parts), {})[name] = layer
    if not found:
        raise VplanError(f"lycoris_config adapts no layer of {family}", f"its classes: {', '.join(classes)}")
    return found


def _innermost(layer: str, owners: list[str], parts: Mapping[str, Parts]) -> str:
    """The class whose part begins furthest behind."""

    def depth(owner: str) -> int:
        return max(_begins(layer, part) for part in parts[owner] or () if lies_in(layer, part))

    return max(owners, key=depth)


def _begins(layer: str, part: str) -> int:
    return 0 if part == ALL else layer.split(".").index(part) + 1 if "." not in part else part.count(".") + 1


def _parts(family: str, classes: Mapping[str, Parts], name: str) -> Parts:
    if name in EVERYTHING:
        whole = next((parts for parts in classes.values() if parts == (ALL,)), None)
        if whole is None:
            fault = f"LyCORIS' adapters on every layer of {family}, convolutions too, are not priced"
            raise VplanError(fault, "name classes in apply_preset's target_module, as Attention")
        return whole
    if name not in classes:
        if name in EVERY_CLASS:
            return ()
        raise VplanError(f"lycoris_config's target_module {quoted(name)} is not priced", f"{', '.join(classes)} are")
    if classes[name] is None:
        raise VplanError(f"LyCORIS' adapters on {name} of {family} are not priced", "use Attention in target_module")
    return classes[name]


def _choice(config: Mapping[str, Any], preset: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What holds for the layers of a class."""
    own = (preset.get("module_algo_map") or {}).get(name) or {}
    if not isinstance(own, dict) or own.keys() - OF_CLASS:
        raise VplanError(f"lycoris_config's module_algo_map of {name} is not priced", f"{', '.join(OF_CLASS)} are")
    base = {"algo": config.get("algo") or "lora", "factor": config.get("factor"), "dim": config.get("linear_dim")}
    return {**base, "full_matrix": config.get("full_matrix"), **{key: own[key] for key in own if own[key] is not None}}


def _factor(choice: Mapping[str, Any]) -> int:
    return lycoris.factor_of(choice["factor"], "lycoris_config's factor")


def _numbers(algo: str, layer: LinearLayer, choice: Mapping[str, Any]) -> int:
    dim = integer(choice["dim"] or 4, "lycoris_config's linear_dim")
    return lycoris.numbers_by(algo, layer, dim, _factor(choice), lycoris.is_true(choice["full_matrix"]))


def unused(settings: Settings) -> Iterator[str]:
    """Keys of the config that act with standard adapters alone."""
    for name in ("lora_rank", "lora_dropout", "use_dora"):
        if of(settings, name):
            yield name
