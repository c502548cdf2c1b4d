"""OneTrainer's kinds of models, and what they are to us (modules/util/enum/ModelType.py at 23df3832)."""

from __future__ import annotations

import re

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.dialects.base.bindings import Fields, Settings
from planner.dialects.base.common_bindings import find_model
from planner.dialects.base.values import integer
from planner.dialects.onetrainer.train_config import value_of
from planner.errors import VplanError, quoted

MODELS = {
    "STABLE_DIFFUSION_15": "sd1.5",
    "STABLE_DIFFUSION_20": "sd2.1",
    "STABLE_DIFFUSION_20_BASE": "sd2.1",
    "STABLE_DIFFUSION_21": "sd2.1",
    "STABLE_DIFFUSION_21_BASE": "sd2.1",
    "STABLE_DIFFUSION_3": "sd3-medium",
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "FLUX_DEV_1": "flux.1-dev",
    "HUNYUAN_VIDEO": "hunyuan-video",
    "QWEN": "qwen-image",
    "Z_IMAGE": "z-image",
    "KREA_2": "krea-2",
    "ANIMA": "anima",
    "ERNIE": "ernie-image",
    "IDEOGRAM_4": "ideogram-4",
    "CHROMA_1": "chroma1-hd",
    "HI_DREAM_FULL": "hidream-i1",
}
"""Its ModelType -> ours; those of `BY_NAME` have several, told by their names."""

BY_NAME = ("STABLE_DIFFUSION_35", "FLUX_2", "SANA")

TEXT_TOKENS = {"STABLE_DIFFUSION_3": 77 + 77, "STABLE_DIFFUSION_35": 77 + 77, "HUNYUAN_VIDEO": 77}
"""Its ModelType -> tokens of a prompt that the transformer reads, where they are not our model's usual ones: of SD 3
CLIP's and T5's, of Hunyuan Llama's behind its template (model/StableDiffusion3Model.py, model/HunyuanVideoModel.py)."""

SEQUENCE_LENGTH = {
    "FLUX_DEV_1": ("text_encoder_2_sequence_length", 77),
    "FLUX_2": ("text_encoder_sequence_length", 512),
}
"""Its ModelType -> the setting with the number of tokens, and its default (util/config/TrainConfig.py); none is as many
as the tokenizer takes."""


def profile_of(settings: Settings) -> ModelProfile:
    """Our model of a config's kind. Raises a VplanError for a kind, or a name of it, that is not known."""
    kind = str(value_of(settings, "model_type"))
    name = settings.get("model") or MODELS.get(kind)
    if name is None and kind in BY_NAME:
        base = re.sub("-base(?=-)", "", str(value_of(settings, "base_model_name")), flags=re.IGNORECASE)
        name = find_model(value_of(settings, "base_model_name"), base)
    if name is None:
        fix = f"known of its kinds: {', '.join((*MODELS, *BY_NAME))}"
        raise VplanError(
            f"OneTrainer's model {quoted(kind)} ({quoted(value_of(settings, 'base_model_name'))}) is not known", fix
        )
    return lookup.model(str(name))


def offloads(model: str) -> bool:
    """Whether its layers and checkpoints may wait in host RAM: not those of a U-Net
    (modules/modelSetup/BaseStableDiffusionXLSetup.py ``supports_offloading``)."""
    return not lookup.model(model).traits.stages


def prompt_length(settings: Settings) -> Fields:
    """Tokens of a prompt; None where they are our model's usual ones."""
    kind = str(value_of(settings, "model_type"))
    if kind not in SEQUENCE_LENGTH:
        return {"text_tokens": TEXT_TOKENS.get(kind)}
    name, default = SEQUENCE_LENGTH[kind]
    length = value_of(settings, name, default)
    return {"text_tokens": None if length is None else integer(length, name)}


def largest_encoder(settings: Settings) -> str:
    """Its name for the text encoder with most parameters: they come to the GPU one at a time."""
    encoders = profile_of(settings).text_encoders
    largest = max(range(len(encoders)), key=lambda at: encoders[at].parameters)
    return "text_encoder" if largest == 0 else f"text_encoder_{largest + 1}"
