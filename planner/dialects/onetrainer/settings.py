"""OneTrainer's presets and configs (JSON), read at 23df3832: modules/util/config/TrainConfig.py and training_presets.

Its own memory terms are not read yet: it is priced as our step trains diffusers' model, and says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import Choice, Fields, FunctionPair, Remark, Settings, Value, When
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import EXPANDABLE, GPUS, NODES, find_model, one_of, our_defaults, word_for
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.base.script import Script
from planner.errors import VplanError, quoted
from planner.untrusted import flat

CONFIG = "config:"
SIGNS = frozenset({"training_method", "model_type", "base_model_name"})
PARTS = ("transformer", "unet", "prior")
"""What its kinds of models call the part that is trained."""

MODELS = {
    "STABLE_DIFFUSION_15": "sd1.5",
    "STABLE_DIFFUSION_3": "sd3-medium",
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "FLUX_DEV_1": "flux.1-dev",
    "HUNYUAN_VIDEO": "hunyuan-video",
    "QWEN": "qwen-image",
    "Z_IMAGE": "z-image",
    "KREA_2": "krea-2",
    "ERNIE": "ernie-image",
    "IDEOGRAM_4": "ideogram-4",
    "CHROMA_1": "chroma1-hd",
}
"""Its ModelType -> ours; STABLE_DIFFUSION_35 and FLUX_2 have several, told by their names."""

BY_NAME = ("STABLE_DIFFUSION_35", "FLUX_2")

FORMATS = {
    "FLOAT_32": "fp32",
    "FLOAT_16": "fp16",
    "BFLOAT_16": "bf16",
    "FLOAT_8": "fp8",
    "FLOAT_W8A8": "fp8",
    "INT_8": "int8",
    "INT_W8A8": "int8",
    "NFLOAT_4": "nf4",
}
"""Its DataType -> ours (modules/util/enum/DataType.py)."""

OPTIMIZERS = {
    "ADAMW": "adamw",
    "ADAMW_8BIT": "adamw-8bit",
    "ADAFACTOR": "adafactor",
    "LION": "lion",
    "PRODIGY": "prodigy",
    "CAME": "came",
    "MUON": "muon",
}
ONLY_LORA = frozenset({"lora"})


def read_script(script: Script) -> Invocation | None:
    """A config or preset, alone or as its command names it (scripts/train.py --config-path): by keys of the first
    level that together only it has."""
    config = script.config
    for program in script.programs:
        if program.script.endswith("scripts/train.py") and "--config-path" in program.arguments[:-1]:
            path = program.arguments[program.arguments.index("--config-path") + 1]
            config = script.document(path)
            if config is None:
                raise VplanError(f"{path} is not here", "run vplan where the command would run, or pass the config")
    if config is None or not config.keys() >= SIGNS:
        return None
    parsed = flags.script("onetrainer", "config.json").parse_config(config)
    inside = flat(config, script.name)
    settings = {"script": "config.json", **{f"{CONFIG}{name}": value for name, value in inside.items()}}
    return Invocation("onetrainer", settings, parsed.unknown, notes=script.notes)


def _of(settings: Settings, name: str, default: Any = None) -> Any:
    return settings.get(CONFIG + name, default)


def _part(settings: Settings, key: str, default: Any = None) -> Any:
    """A key of the part that is trained."""
    return next(
        (_of(settings, f"{part}.{key}") for part in PARTS if _of(settings, f"{part}.{key}") is not None), default
    )


def _model(settings: Settings) -> Fields:
    kind = str(_of(settings, "model_type"))
    name = settings.get("model") or MODELS.get(kind)
    if name is None and kind in BY_NAME:
        base = re.sub("-base(?=-)", "", str(_of(settings, "base_model_name")), flags=re.IGNORECASE)
        name = find_model(_of(settings, "base_model_name"), base)
    if name is None:
        fix = f"known of its kinds: {', '.join((*MODELS, *BY_NAME))}"
        raise VplanError(
            f"OneTrainer's model {quoted(kind)} ({quoted(_of(settings, 'base_model_name'))}) is not known", fix
        )
    return {"model": lookup.model(str(name)).name}


def _method(settings: Settings) -> Fields:
    method = str(_of(settings, "training_method"))
    if method not in ("LORA", "FINE_TUNE"):
        raise VplanError(f"OneTrainer's training method {quoted(method)} is not priced", "LORA and FINE_TUNE are")
    if (kind := str(_of(settings, "peft_type", "LORA"))) != "LORA" and method == "LORA":
        raise VplanError(f"OneTrainer's adapters {quoted(kind)} are not priced", "LORA is")
    trained = [
        f"text_encoder{suffix}"
        for suffix, _ in zip(("", "_2", "_3"), lookup.model(_model(settings)["model"]).text_encoders, strict=False)
        if _of(settings, f"text_encoder{suffix}.train", True)
    ]
    if trained:
        fix = ", ".join(f"{name}.train: false" for name in trained)
        raise VplanError(f"training {' and '.join(trained)} is not priced (OneTrainer's default)", f"set {fix}")
    return {"method": "lora" if method == "LORA" else "full"}


def _size(settings: Settings) -> Fields:
    """The largest of its resolutions: "512", "512,768" or "1024x768" (width and height)."""
    model = lookup.model(_model(settings)["model"])
    text = str(_of(settings, "resolution", "512"))
    try:
        sizes = [[int(side) for side in each.strip().split("x")] for each in text.split(",")]
    except ValueError:
        raise VplanError(f"resolution {quoted(text)} is not a size", 'write "1024", or "1024x768"') from None
    width, *rest = max(sizes, key=lambda sides: sides[0] * sides[-1])
    step = model.shape.size_multiple
    height, width = ((rest or [width])[0] // step * step, width // step * step)
    frames = int(str(_of(settings, "frames", "25")).split(",")[0]) if model.kind == "video" else 1
    return {"height": height, "width": width, "frames": frames}


def _format(value: Any, name: str) -> str:
    if str(value) not in FORMATS:
        raise VplanError(f"{name} {quoted(value)} is not priced", f"priced: {', '.join(FORMATS)}")
    return FORMATS[str(value)]


def _formats(settings: Settings) -> Fields:
    """Computed under autocast in ``train_dtype`` (modules/util/dtype_util.py ``create_autocast_context``)."""
    train = _format(_of(settings, "train_dtype", "FLOAT_16"), "train_dtype")
    weights = _format(_part(settings, "weight_dtype", _of(settings, "weight_dtype", "FLOAT_32")), "weight_dtype")
    adapter = _format(_of(settings, "lora_weight_dtype", "FLOAT_32"), "lora_weight_dtype")
    return {
        "weights_dtype": weights,
        "adapter_dtype": adapter,
        "autocast": train if train in ("bf16", "fp16") else "none",
    }


def _checkpointing(settings: Settings) -> Fields:
    """Of the part; older configs say it for all: ON, OFF or CPU_OFFLOADED."""
    older = str(_of(settings, "gradient_checkpointing", ""))
    if older in ("OFF", "False") or _part(settings, "gradient_checkpointing", True) is False:
        return {"gradient_checkpointing": "none"}
    away = older == "CPU_OFFLOADED" or _part(settings, "activation_offloading", False)
    return {"gradient_checkpointing": "offload" if away else "full"}


def _swap(settings: Settings) -> Fields:
    """``offload_fraction`` of the layers wait in host RAM (modules/util/LayerOffloadConductor.py)."""
    fraction = float(_part(settings, "offload_fraction", _of(settings, "layer_offload_fraction", 0.0)) or 0.0)
    blocks = lookup.model(_model(settings)["model"]).blocks
    return {"swap_blocks": min(blocks - 1, math.floor(fraction * blocks))}


def _steps(settings: Settings) -> Fields:
    name = str(_of(settings, "optimizer.optimizer", "ADAMW"))
    fused = _of(settings, "optimizer.fused_back_pass")
    if fused is None:
        fused = _of(settings, f"optimizer_defaults.{name}.fused_back_pass", False)
    full = str(_of(settings, "training_method")) == "FINE_TUNE"
    return {"optimizer_step": "backward" if fused and full else "foreach"}


def _caches(settings: Settings) -> Fields:
    """What is not trained is cached with the latents, unless ``latent_caching`` is off."""
    where = "cached" if _of(settings, "latent_caching", True) else "resident"
    vae = _format(_of(settings, "vae.weight_dtype", "FLOAT_32"), "vae.weight_dtype")
    encoder = _format(_of(settings, "text_encoder.weight_dtype", "FLOAT_32"), "text_encoder.weight_dtype")
    known = ("fp32", "bf16", "fp16")
    return {
        "text_encoder": where,
        "vae": where,
        "vae_dtype": vae if vae in known else "bf16",
        "text_encoder_dtype": encoder,
    }


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if _of(settings, "compile") and fields["compile"] == "none":
        yield Remark("compile", "priced without: compiled blocks keep no more than these")


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield "priced as vplan trains diffusers' model: no run of OneTrainer was compared, its memory terms are not read"
    yield from own_model_notes("onetrainer", fields)
    if fields["method"] == "lora":
        chosen = _of(settings, "layer_filter_preset", "full")
        yield f"LoRA estimated on the model's usual layers (layer_filter_preset {chosen})"
    if fields["swap_blocks"]:
        yield f"offload_fraction: {fields['swap_blocks']} blocks wait in host RAM"


def _nothing(fields: Fields) -> Settings:
    return {}


DIALECT = Dialect(
    name="onetrainer",
    title="OneTrainer",
    source="https://github.com/Nerogar/OneTrainer at 23df3832",
    scripts=("config.json",),
    table=(
        FunctionPair(("model",), (f"{CONFIG}model_type",), _model, _nothing, {"model": ", ".join(MODELS.values())}),
        FunctionPair(("method",), (f"{CONFIG}training_method",), _method, _nothing, {"method": "lora, full"}),
        When("method", ONLY_LORA, Value("lora_rank", f"{CONFIG}lora_rank", 16, int)),
        FunctionPair(
            ("height", "width", "frames"),
            (f"{CONFIG}resolution", f"{CONFIG}frames"),
            _size,
            _nothing,
            {"height": "resolution", "width": "resolution", "frames": "frames"},
        ),
        Value("batch_size", f"{CONFIG}batch_size", 1, int),
        Value("gradient_accumulation", f"{CONFIG}gradient_accumulation_steps", 1, int),
        Value(
            "optimizer",
            f"{CONFIG}optimizer.optimizer",
            "adamw",
            one_of(OPTIMIZERS, "optimizer"),
            word_for(OPTIMIZERS, "optimizer", "adamw"),
        ),
        FunctionPair(
            ("optimizer_step",),
            (f"{CONFIG}optimizer.fused_back_pass",),
            _steps,
            _nothing,
            {"optimizer_step": "foreach, backward (full training)"},
        ),
        FunctionPair(
            ("weights_dtype", "adapter_dtype", "autocast"),
            (f"{CONFIG}train_dtype", f"{CONFIG}lora_weight_dtype", f"{CONFIG}weight_dtype"),
            _formats,
            _nothing,
            {"weights_dtype": ", ".join(FORMATS.values()), "adapter_dtype": "fp32, bf16", "autocast": "train_dtype"},
        ),
        FunctionPair(
            ("gradient_checkpointing",),
            (f"{CONFIG}gradient_checkpointing",),
            _checkpointing,
            _nothing,
            {"gradient_checkpointing": "none, full, offload"},
        ),
        FunctionPair(
            ("swap_blocks",), (f"{CONFIG}layer_offload_fraction",), _swap, _nothing, {"swap_blocks": "offload_fraction"}
        ),
        FunctionPair(
            ("text_encoder", "vae", "vae_dtype", "text_encoder_dtype"),
            (f"{CONFIG}latent_caching",),
            _caches,
            _nothing,
            {
                "text_encoder": "cached, resident",
                "vae": "cached, resident",
                "vae_dtype": "vae.weight_dtype",
                "text_encoder_dtype": "text_encoder.weight_dtype",
            },
        ),
        Choice("ema", {"none": {}, "gpu": {f"{CONFIG}ema": "GPU"}, "cpu": {f"{CONFIG}ema": "CPU"}}),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("experts", "trainable", "lora_targets", "lora_dropout", "buckets", "text_tokens", "references"),
        *our_defaults("validation"),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move(
            {"gradient_checkpointing": "full"},
            "one more forward pass",
            words_for=lambda settings: ["transformer.gradient_checkpointing: true"],
        ),
        Move(
            {"weights_dtype": "fp8"},
            "the frozen base is rounded to 8 bits",
            words_for=lambda settings: ["transformer.weight_dtype: FLOAT_8"],
            when=lambda fields: fields["method"] == "lora",
        ),
    ),
    assigns=": ",
)
