"""``--network_module lycoris.kohya`` of sd-scripts' scripts for U-Nets: LyCORIS' adapters by ``--network_args``, read
in lycoris-lora 3.4.0 (lycoris/kohya.py ``create_network``, ``LycorisNetworkKohya``; lycoris/config.py ``PRESET``).

Each makes the change of its layer's weight whole (lycoris/modules/*.py ``forward``). A preset names classes of
sd-scripts' own U-Nets (library/sdxl_original_unet.py, library/original_unet.py at 48d368f): its layers are diffusers'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from planner.catalog.profiles import ModelProfile
from planner.dialects.base import lycoris
from planner.dialects.base.bindings import Settings
from planner.dialects.base.values import integer
from planner.dialects.sd_scripts.network_module import arguments, refuse_unknown_rank
from planner.errors import VplanError, quoted
from planner.layout.adapters import LinearLayer, layers_of
from planner.layout.trainer_terms.lycoris.whole_changes import LENGTHS, LOCON, LOHA, LOKR
from planner.layout.trainer_terms.trained_text_encoders import encoder_layers

MODULE = "lycoris.kohya"
SOURCE = "lycoris-lora 3.4.0; 4.x, whose kernels are fused, was not run"
KINDS = {"lokr": LOKR, "loha": LOHA, "lora": LOCON, "locon": LOCON}
"""``algo`` -> the version of memory terms."""

ATTENTION = ("attn1", "attn2")
TRANSFORMERS = ("attentions",)
RESNETS = ("resnets",)
SAMPLERS = ("downsamplers", "upsamplers")
"""Names in layers' names, by class: ``CrossAttention``, ``Transformer2DModel``, ``ResnetBlock2D``, ``Downsample2D`` and
``Upsample2D``."""

TIMES = ("time_embedding.linear_1", "time_embedding.linear_2")
ENDS = ("conv_in", "conv_out")
"""Layers that presets name themselves: SDXL's own U-Net calls them otherwise."""


class Preset(NamedTuple):
    """The layers of a preset."""

    parts: tuple[str, ...]
    named: tuple[str, ...] = ()
    convolutions: bool = True
    """with windows of more than one position (``enable_conv``)"""


EVERY = Preset((*TRANSFORMERS, *RESNETS, *SAMPLERS), (*ENDS, *TIMES))
PRESETS: Mapping[str, Preset] = {
    "full": EVERY,
    "unet-only": EVERY,
    "full-lin": Preset((*TRANSFORMERS, *RESNETS), TIMES, convolutions=False),
    "attn-mlp": Preset(TRANSFORMERS),
    "unet-transformer-only": Preset(TRANSFORMERS),
    "attn-only": Preset(ATTENTION),
    "unet-convblock-only": Preset((*RESNETS, *SAMPLERS), ENDS),
}

ON_ENCODERS = ("full", "full-lin", "attn-mlp")
"""Presets with text encoders' attention and MLPs (``CLIPAttention``, ``CLIPMLP``)."""

WINDOW = 9
"""Positions that a filter of 3x3 reads."""

POINTS = ("conv_shortcut", "proj_in", "proj_out")
"""Convolutions of one position."""

READ = ("algo", "preset", "factor", "conv_dim", "full_matrix", "dora_wd")
NO_MATTER = (
    *("conv_alpha", "alpha", "dropout", "module_dropout", "rank_dropout_scale", "rs_lora", "warn_on_unmatched"),
    *("block_size", "constraint", "rescaled", "train_t5xxl", "train_llm_adapter", "neuron_dropout"),
    *("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio", "wd_on_output"),
)
"""Keys that change no number and no tensor of these adapters, whose own dropout drops nothing (loha.py, lokr.py).
``rank_dropout`` changes none either, but of LoKr, which multiplies by a mask on the CPU and stops (lokr.py
``get_weight``)."""

NONE = ("0", "0.0", "")
"""Values that switch a rate off."""


class Network(NamedTuple):
    """What the arguments put on a U-Net."""

    algo: str
    rank: int
    """of the LoRA on the same layers that has as many numbers"""
    factor: int
    targets: tuple[str, ...]
    version: str


def is_lycoris(settings: Settings) -> bool:
    """Whether the adapters are LyCORIS'."""
    return str(settings.get("--network_module")) == MODULE


def network_of(settings: Settings, profile: ModelProfile) -> Network:
    """The adapters of a command. Raises a VplanError for those that are not priced."""
    given = arguments(settings)
    _refuse_unpriced(settings, given)
    algo, name = given.get("algo", "lora").lower(), given.get("preset", "full")
    if algo not in KINDS:
        raise VplanError(f"LyCORIS' algo {quoted(algo)} is not priced", f"{', '.join(KINDS)} are")
    if name not in PRESETS:
        raise VplanError(f"LyCORIS' preset {quoted(name)} is not priced", f"{', '.join(PRESETS)} are")
    encoders = not settings.get("--network_train_unet_only")
    if encoders and name not in ON_ENCODERS:
        fault = f"LyCORIS' preset {name} is not priced where text encoders are trained"
        raise VplanError(fault, "add --network_train_unet_only")
    layers = _layers(profile, PRESETS[name])
    lengths = lycoris.is_true(given.get("dora_wd"))
    every = [(layer, _window(each)) for each, layer in layers.items()]
    every += [(layer, 1) for one in profile.text_encoders for layer in encoder_layers(one)] if encoders else []
    numbers = sum(_numbers(settings, given, layer, window) for layer, window in every)
    numbers += sum(layer.rows for layer, _ in every) if lengths else 0
    rank = max(1, round(numbers / sum(layer.numbers for layer, _ in every)))
    factor = lycoris.factor_of(given.get("factor"), "--network_args factor")
    version = ("te-" if encoders else "") + KINDS[algo] + (LENGTHS if lengths else "")
    return Network(algo, rank, factor, lycoris.ends_of(profile, layers.keys()), version)


def notes(settings: Settings, profile: ModelProfile) -> Iterator[str]:
    """How the adapters are priced, in words."""
    network = network_of(settings, profile)
    yield lycoris.priced_as(lycoris.adapter_in_words(network.algo, [network.factor]), network.rank, SOURCE, True)


def _refuse_unpriced(settings: Settings, given: Mapping[str, str]) -> None:
    refuse_unknown_rank(settings)
    if settings.get("--fp8_base") or settings.get("--fp8_base_unet"):
        raise VplanError("LyCORIS over --fp8_base is not priced", "leave --fp8_base out")
    if str(settings.get("--mixed_precision") or "no") == "no":
        raise VplanError("LyCORIS without --mixed_precision is not priced", "add --mixed_precision bf16")
    of_lokr = given.get("algo", "").lower() == "lokr"
    for key, value in given.items():
        known = key in (*READ, *NO_MATTER) or (key == "rank_dropout" and not of_lokr)
        if not known and value not in NONE:
            raise VplanError(f"--network_args {key} of LyCORIS is not priced", f"leave {key} out")


def _layers(profile: ModelProfile, preset: Preset) -> dict[str, LinearLayer]:
    """By diffusers' names. SDXL's own U-Net has no layers that a preset names itself."""
    named = () if profile.trained_with("sd-scripts", "reentrant-checkpoints") else preset.named
    return {
        name: layer
        for name, layer in layers_of(profile).items()
        if (not set(preset.parts).isdisjoint(name.split(".")) or name in named)
        and (preset.convolutions or _window(name) == 1)
    }


def _window(layer: str) -> int:
    last = layer.rpartition(".")[2]
    return WINDOW if last.startswith("conv") and last not in POINTS else 1


def _numbers(settings: Settings, given: Mapping[str, str], layer: LinearLayer, window: int) -> int:
    dim = integer(settings.get("--network_dim") or 4, "--network_dim")
    if window > 1:
        dim = integer(given.get("conv_dim") or dim, "--network_args conv_dim") or dim
    factor = lycoris.factor_of(given.get("factor"), "--network_args factor")
    algo = given.get("algo", "lora").lower()
    return lycoris.numbers_by(algo, layer, dim, factor, lycoris.is_true(given.get("full_matrix")), window)
