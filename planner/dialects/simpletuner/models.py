"""Which of our models SimpleTuner's `model_family` and `model_flavour` mean, both ways, read at bc8e6ab."""

from __future__ import annotations

from typing import Any

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.common_bindings import find_model
from planner.dialects.simpletuner.defaults import DEFAULTS
from planner.errors import VplanError, quoted

CONFIG = "config:"
MODELS: dict[str, dict[str, str]] = {
    "flux": {
        **dict.fromkeys(("", "dev", "krea"), "flux.1-dev"),
        "kontext": "flux.1-kontext-dev",
        "schnell": "flux.1-schnell",
    },
    "flux2": {
        **dict.fromkeys(("", "klein-9b"), "flux.2-klein-9b"),
        "klein-4b": "flux.2-klein-4b",
        "dev": "flux.2-dev",
    },
    "sdxl": {"": "sdxl", "base-1.0": "sdxl"},
    "sd1x": dict.fromkeys(("", "1.5", "1.4", "dreamshaper"), "sd1.5"),
    "sd2x": dict.fromkeys(("", "2.1", "2.0", "pseudoflex-v2", "pseudojourney", "digitaldiffusion"), "sd2.1"),
    "sd3": {"": "sd3.5-medium", "medium": "sd3.5-medium", "large": "sd3.5-large"},
    "qwen_image": {
        "": "qwen-image",
        "v1.0": "qwen-image",
        "v2.0": "qwen-image",
        **dict.fromkeys(("edit-v1", "edit-v2"), "qwen-image-edit"),
        **dict.fromkeys(("edit-v3", "edit-v2+"), "qwen-image-edit-2511"),  # ZERO_COND_T_FLAVOURS
    },
    "z_image": {
        **dict.fromkeys(("turbo", "turbo-ostris-v1", "turbo-ostris-v2", ""), "z-image-turbo"),
        **dict.fromkeys(("base", "ostris-de-turbo"), "z-image"),
    },
    "chroma": dict.fromkeys(("", "hd", "base", "flash"), "chroma1-hd"),
    "lumina2": dict.fromkeys(("", "2.0", "neta-lumina"), "lumina-image-2.0"),
    "hidream": dict.fromkeys(("", "full", "dev", "fast"), "hidream-i1"),
    "krea2": dict.fromkeys(("", "raw", "turbo"), "krea-2"),
    "ernie": dict.fromkeys(("", "base", "turbo"), "ernie-image"),
    "anima": dict.fromkeys(("", "preview-3", "base-v1.0", "release", "preview-2", "preview"), "anima"),
    "sana": {
        **dict.fromkeys(("", "sana1.5-4.8b-1024"), "sana1.5-4.8b"),
        "sana1.5-1.6b-1024": "sana1.5-1.6b",
        "sana1.0-1.6b-1024": "sana-1.6b",
    },
    "sanavideo": dict.fromkeys(("", "2b-480p"), "sana-video-2b"),
    "kandinsky5_image": dict.fromkeys(("", "t2i-lite-sft", "t2i-lite-pretrain"), "kandinsky-5.0-t2i-lite"),
    "kandinsky5_video": {
        **dict.fromkeys(("", "t2v-lite-sft-5s", "t2v-lite-pretrain-5s"), "kandinsky-5.0-t2v-lite"),
        **dict.fromkeys(("t2v-pro-sft-5s-hd", "t2v-pro-pretrain-5s-hd"), "kandinsky-5.0-t2v-pro"),
        "i2v-lite-5s": "kandinsky-5.0-i2v-lite",
    },
    "ideogram": dict.fromkeys(("", "fp8", "nf4"), "ideogram-4"),
    "ltxvideo": {"": "ltx-video-2b", "0.9.5": "ltx-video-2b", "0.9.0": "ltx-video-2b"},
    "ltxvideo2": {
        **dict.fromkeys(("", "dev"), "ltx-2"),
        **dict.fromkeys(("2.3-dev", "2.3-distilled"), "ltx-2.3"),
        **dict.fromkeys(("2.5-dev", "2.5-distilled"), "ltx-2.5"),
    },
    "hunyuanvideo": {"": "hunyuan-video-1.5", "t2v-480p": "hunyuan-video-1.5"},
    "wan": {
        "": "wan2.1-t2v-1.3b",
        "t2v-480p-1.3b-2.1": "wan2.1-t2v-1.3b",
        "t2v-480p-14b-2.1": "wan2.1-t2v-14b",
        "i2v-14b-2.1": "wan2.1-i2v-14b-480p",
        "i2v-14b-2.1-720p": "wan2.1-i2v-14b-720p",
        "i2v-14b-2.2-high": "wan2.2-i2v-a14b",
        "i2v-14b-2.2-low": "wan2.2-i2v-a14b",
        "ti2v-5b-2.2": "wan2.2-ti2v-5b",
    },
}
"""``model_family`` -> ``model_flavour``, empty for its default -> ours (helpers/models/*/model.py HUGGINGFACE_PATHS).
What is written for one of ours is the first flavour that is named.
"""

ASSISTED = {"z_image": ("", "turbo", "turbo-ostris-v2"), "flux": ("schnell",)}
"""Family -> flavours whose LoRA is trained beside a frozen one, which is loaded unasked (ASSISTANT_LORA_FLAVOURS and
DEFAULT_MODEL_FLAVOUR of helpers/models/z_image/model.py and flux/model.py at bc8e6ab7)."""

SCHEDULED, FAST_SCHEDULE = (("flux", "schnell"),), "flux_fast_schedule"
"""(Family, flavour) that does not start without that key, and the key, which chooses timesteps alone
(helpers/models/flux/model.py ``check_user_config``)."""

STAGES = ("high", "low")
"""What the flavours of a model of two experts end with: one is trained at a time (helpers/models/wan/model.py
``_wan_stage_info``)."""


def of(settings: Settings, name: str) -> Any:
    """The value of a key of the config, its default where it is left out."""
    return settings.get(CONFIG + name, DEFAULTS.get(name))


def is_on(value: Any) -> bool:
    """Whether a setting is used; degrees of parallelism are from 2."""
    return value is True or str(value).lower() not in ("none", "false", "", "0", "1")


def family_of(settings: Settings) -> str:
    """``model_family`` as the tables here have it."""
    return str(of(settings, "model_family")).replace("-", "_")


def model_of(settings: Settings) -> Fields:
    """The fields `model` and `experts` that the settings mean. Raises a VplanError for an unknown model."""
    family = family_of(settings)
    flavour = str(of(settings, "model_flavour") or "")
    path = of(settings, "pretrained_model_name_or_path")
    of_path = find_model(path) if family in MODELS else None
    of_flavour = MODELS.get(family, {}).get(flavour)
    name = settings.get("model") or (of_flavour or of_path if flavour else of_path or of_flavour)
    if name is None:
        what = f"model_family {family}" + (f" {flavour}" if flavour else "")
        raise VplanError(f"SimpleTuner's {quoted(what)} is not known", f"known families: {', '.join(MODELS)}")
    model = lookup.model(str(name))
    stage = flavour.rpartition("-")[2] if model.experts > 1 else ""
    return {"model": model.name, "experts": stage if stage in STAGES else None}


def written(model: str) -> tuple[str, str]:
    """``model_family`` and ``model_flavour`` of one of our models. Raises an InexpressibleError for one that the
    trainer does not have."""
    for family, flavours in MODELS.items():
        for flavour, ours in flavours.items():
            if flavour and ours == model:
                return family, flavour
    models = {ours: None for flavours in MODELS.values() for ours in flavours.values()}
    why = f"of the known models it trains {', '.join(models)}"
    raise InexpressibleError(UnsupportedValue("model", model, next(iter(models)), why))


def write_model(fields: Fields) -> Settings:
    """The settings that name a model and its expert. Raises an InexpressibleError for what the trainer does not
    have."""
    family, flavour = written(fields["model"])
    if lookup.model(fields["model"]).experts > 1:
        if fields["experts"] not in STAGES:
            why = "it trains one expert at a time (simpletuner/helpers/models/wan/model.py)"
            raise InexpressibleError(UnsupportedValue("experts", fields["experts"], STAGES[0], why))
        flavour = f"{flavour.rpartition('-')[0]}-{fields['experts']}"
    if (dtype := fields["weights_dtype"]) == "nf4" and dtype in MODELS[family]:
        flavour = dtype
    settings: Settings = {f"{CONFIG}model_family": family, f"{CONFIG}model_flavour": flavour}
    return settings | ({f"{CONFIG}{FAST_SCHEDULE}": True} if (family, flavour) in SCHEDULED else {})
