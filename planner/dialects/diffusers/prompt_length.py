"""How many tokens of a prompt a script of diffusers' examples trains with: T5's are padded to --max_sequence_length."""

from __future__ import annotations

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import Fields, FunctionPair, Settings
from planner.dialects.base.common_bindings import require_model
from planner.dialects.diffusers.models import SCRIPTS

FLAG = "--max_sequence_length"

MASKED = ("train_dreambooth_lora_sana.py",)
"""Scripts that give the model the padding too, and a mask."""


def _others(model: str, script: str) -> int | None:
    """A model's text tokens beside those of its longest encoder, which are CLIP's; None where no prompt is padded."""
    profile = lookup.model(model)
    padded = max(encoder.max_tokens for encoder in profile.text_encoders)
    masked = profile.inputs.get("text_mask", True) and not script.endswith(MASKED)
    unpadded = masked or profile.shape.text_tokens < padded
    return None if unpadded else profile.shape.text_tokens - padded


def _default(script: str) -> int | None:
    """What a script pads to unless it is told; SD3's scripts and FLUX.1's in full 77 tokens, others 512."""
    parsed = flags.script("diffusers", script)
    length = parsed.default(FLAG) if FLAG in parsed.flags else None
    return length if isinstance(length, int) else None


def _read(settings: Settings) -> Fields:
    default = _default(str(settings["script"]))
    model = lookup.model(require_model(settings, "--pretrained_model_name_or_path"))
    others = _others(model.name, str(settings["script"]))
    if default is None or others is None:
        return {"text_tokens": None}
    tokens = others + int(settings.get(FLAG, default))
    return {"text_tokens": None if tokens == model.shape.text_tokens else tokens}


def _write(fields: Fields) -> Settings:
    script = SCRIPTS.get((fields["model"], fields["method"]))
    default, others = (_default(script), _others(fields["model"], script)) if script else (None, None)
    if default is None or others is None:
        return {}
    length = (fields["text_tokens"] or lookup.model(fields["model"]).shape.text_tokens) - others
    return {} if length == default else {FLAG: length}


PROMPT_LENGTH = FunctionPair(("text_tokens",), (FLAG,), _read, _write, {"text_tokens": FLAG})
