"""Samples of diffusers' examples: how their pipeline lies on the GPU, and at which size it is called."""

from __future__ import annotations

from typing import Any

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue

IN_TURNS = tuple(f"train_dreambooth_lora_{name}.py" for name in ("flux2", "flux2_klein", "z_image"))
"""Scripts whose ``log_validation`` calls ``enable_model_cpu_offload``; others call ``pipeline.to(device)``."""


def _mode(script: str) -> str:
    """How a script samples: its pipeline is on the GPU whole, or each of its models in turn."""
    return "offload" if script.endswith(IN_TURNS) else "on"


def _shape(model: ModelProfile) -> dict[str, Any]:
    """Of an image that a script for images makes: it passes no height and no width, so that the pipeline takes its own,
    which is the model's default whatever ``--resolution`` says (58eb52c src/diffusers/pipelines
    ``default_sample_size``; ``pipeline_args`` of examples/dreambooth, ``log_validation`` of
    examples/text_to_image). Those for CogVideoX pass ``--height`` and ``--width``."""
    height, width = model.shape.resolutions[0]
    return {"frames": model.shape.default_frames, "height": height, "width": width, "cfg": True}


def _differs(fields: Fields, shape: dict[str, Any]) -> bool:
    """Whether a sample has another shape than what is trained."""
    return any(fields[name] != shape[name] for name in ("frames", "height", "width"))


def read_samples(settings: Settings, job: Fields, video: bool) -> Fields:
    """Whether it samples, how, and at which shape if that is not the job's."""
    if not (settings.get("--validation_prompt") or settings.get("--validation_prompts")):
        return {"validation_mode": "off", "validation": None}
    shape = _shape(lookup.model(job["model"]))
    own = not video and _differs(job, shape)
    return {"validation_mode": _mode(str(settings["script"])), "validation": shape if own else None}


def write_samples(fields: Fields, script: str) -> Settings:
    """The flag of a prompt. Raises an InexpressibleError for samples of another way or shape than the script's."""
    mode, way, asked = fields["validation_mode"], _mode(script), fields.get("validation")
    if mode == "off":
        return {}
    if mode != way:
        why = "its pipeline is put on the GPU whole" if way == "on" else "its pipeline offloads each of its models"
        raise InexpressibleError(UnsupportedValue("validation_mode", mode, way, why))
    shape = _shape(lookup.model(fields["model"]))
    has = shape if "cogvideo" not in script and _differs(fields, shape) else None
    given = dict(asked) if asked is not None else None
    if given != has and (given is None or has is None or given != shape):
        why = "it samples at the pipeline's own size" if has else "it samples at the size it trains at"
        raise InexpressibleError(UnsupportedValue("validation", asked, has, why))
    flag, prompt = "--validation_prompt", "a cat walks"
    plural = script.endswith("train_text_to_image.py")
    return {"--validation_prompts": [prompt]} if plural else {flag: prompt}
