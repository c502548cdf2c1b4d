"""OneTrainer's presets and configs (JSON), read at 23df3832 (modules/util/config/TrainConfig.py, training_presets)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from planner.catalog.profiles import ModelProfile
from planner.dialects.base.bindings import (
    ONLY_LORA,
    Choice,
    Fields,
    FunctionPair,
    Settings,
    Value,
    When,
)
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, one_of, our_defaults, word_for
from planner.dialects.base.dialect import Dialect
from planner.dialects.base.layer_names import chosen_layers
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.onetrainer import peft_types
from planner.dialects.onetrainer.memory_moves import MOVES, changed_checkpoints, changed_swap
from planner.dialects.onetrainer.models import MODELS, largest_encoder, offloads, profile_of, prompt_length
from planner.dialects.onetrainer.train_config import (
    CHECKPOINTS,
    CONFIG,
    EXCLUSIVE,
    OLD_CHECKPOINTS,
    PARTS,
    is_old,
    optimizer_switch,
    part_value,
    read_script,
    swapped_share,
    value_of,
)
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.onetrainer import ENCODERS_OFFLOADED, EVERY_LAYER, LAYERS_OF_BLOCKS
from planner.spec.job import QUANTISED

FULL = "full"
"""The default of ``layer_filter_preset``: every layer."""

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

ATTENTION = {"SDP": "sdpa", "FLASH": "flash", "CUDNN": "cudnn"}
"""Its AttentionMechanism -> ours (modelSetup/BaseModelSetup.py ``_set_attention_backend``)."""

WEIGHTS_BY_PART_SINCE = 10
"""The first without a format for all parts."""

BLOCKS = frozenset({"transformer_block", "transformer_blocks", "layers"})
"""Its filters that take the blocks whole (``LAYER_PRESETS`` of modules/modelSetup)."""


def _model(settings: Settings) -> Fields:
    return {"model": profile_of(settings).name}


def _method(settings: Settings) -> Fields:
    method = str(value_of(settings, "training_method"))
    if method not in ("LORA", "FINE_TUNE"):
        raise VplanError(f"OneTrainer's training method {quoted(method)} is not priced", "LORA and FINE_TUNE are")
    profile = profile_of(settings)
    encoders = [each for each in profile.text_encoders if each.traits.package == "transformers"]  # no connectors
    if method == "LORA":
        peft_types.refuse_unpriced_adapters(settings, profile)
    for at in _additional_embeddings(settings):
        fault = f"additional_embeddings[{at}] trains an embedding through the text encoders, which is not priced"
        raise VplanError(fault, f"set additional_embeddings[{at}].train: false")
    trained = [
        f"text_encoder{suffix}"
        for suffix, _ in zip(("", "_2", "_3", "_4"), encoders, strict=False)
        if value_of(settings, f"text_encoder{suffix}.train", True)
    ]
    if trained:
        fix = ", ".join(f"{name}.train: false" for name in trained)
        raise VplanError(f"training {' and '.join(trained)} is not priced (OneTrainer's default)", f"set {fix}")
    return {"method": "lora" if method == "LORA" else "full"}


def _additional_embeddings(settings: Settings) -> Iterator[str]:
    """Places in its list of those that train, which is the default."""
    found = (re.match(r"config:additional_embeddings\[(\d+)\]\.", key) for key in settings)
    for at in dict.fromkeys(match[1] for match in found if match):
        if value_of(settings, f"additional_embeddings[{at}].train", True):
            yield at


def _size(settings: Settings) -> Fields:
    """The largest of its resolutions: "512", "512,768" or "1024x768" (width and height)."""
    model = profile_of(settings)
    text = str(value_of(settings, "resolution", "512"))
    try:
        sizes = [[int(side) for side in each.strip().split("x")] for each in text.split(",")]
    except ValueError:
        raise VplanError(f"resolution {quoted(text)} is not a size", 'write "1024", or "1024x768"') from None
    width, *rest = max(sizes, key=lambda sides: sides[0] * sides[-1])
    step = model.shape.size_multiple
    height, width = ((rest or [width])[0] // step * step, width // step * step)
    frames = int(str(value_of(settings, "frames", "25")).split(",")[0]) if model.kind == "video" else 1
    return {"height": height, "width": width, "frames": frames}


def _format(value: Any, name: str) -> str:
    if str(value) not in FORMATS:
        raise VplanError(f"{name} {quoted(value)} is not priced", f"priced: {', '.join(FORMATS)}")
    return FORMATS[str(value)]


def _formats(settings: Settings) -> Fields:
    """Computed under autocast in ``train_dtype`` (modules/util/dtype_util.py ``create_autocast_context``)."""
    train = _format(value_of(settings, "train_dtype", "FLOAT_16"), "train_dtype")
    part = next((part for part in PARTS if value_of(settings, f"{part}.weight_dtype") is not None), PARTS[0])
    weights = _weights(settings, part, value_of(settings, "weight_dtype", "FLOAT_32"))
    adapter = _format(value_of(settings, "lora_weight_dtype", "FLOAT_32"), "lora_weight_dtype")
    return {
        "weights_dtype": weights,
        "adapter_dtype": adapter,
        "autocast": train if train in ("bf16", "fp16") else "none",
    }


def _weights(settings: Settings, part: str, default: str = "FLOAT_32") -> str:
    """The format of a part; that of the whole config where it says NONE, before version 10
    (``TrainConfig.__migration_9``)."""
    value = value_of(settings, f"{part}.weight_dtype", default)
    if value == "NONE" and int(value_of(settings, "__version", 0)) < WEIGHTS_BY_PART_SINCE:
        value = value_of(settings, "weight_dtype", value)
    return _format(value, f"{part}.weight_dtype")


def _checkpointing(settings: Settings) -> Fields:
    """Of the part; older configs say ON, OFF or CPU_OFFLOADED, or true and false."""
    if is_old(settings):
        older = str(settings[OLD_CHECKPOINTS])
        on = older not in ("OFF", "False")
        away = older == "CPU_OFFLOADED" and value_of(settings, "enable_activation_offloading", True)
    else:
        on = part_value(settings, "gradient_checkpointing", True)
        away = part_value(settings, "activation_offloading", False)
    away = away and offloads(profile_of(settings).name)
    return {CHECKPOINTS: "none" if not on else "offload" if away else "full"}


def _swap(settings: Settings) -> Fields:
    """``offload_fraction`` of the layers wait in host RAM (modules/util/LayerOffloadConductor.py)."""
    profile = profile_of(settings)
    if not offloads(profile.name):
        return {"swap_blocks": 0}
    return {"swap_blocks": min(profile.blocks - 1, round(swapped_share(settings) * profile.blocks))}


def _layers(settings: Settings) -> Fields:
    """Adapters are on the layers whose names contain one of the words of ``layer_filter``, or are found by one as a
    regular expression with ``layer_filter_regex`` (util/ModuleFilter.py)."""
    if settings[f"{CONFIG}training_method"] != "LORA":
        return {"lora_targets": None}
    if _version_of_layers(settings):
        return {"lora_targets": _nearest_recording(profile_of(settings))}
    words = [word.strip() for word in str(value_of(settings, "layer_filter", "")).split(",")]
    try:
        patterns = [word if value_of(settings, "layer_filter_regex") else re.escape(word) for word in words]
        searches = [re.compile(pattern).search for pattern in patterns]
    except re.error as error:
        raise VplanError(f"layer_filter: {error}", "OneTrainer stops at it too; mend the expression") from None
    profile = profile_of(settings)
    return {"lora_targets": chosen_layers(profile, lambda layer: any(search(layer) for search in searches))}


def _nearest_recording(model: ModelProfile) -> tuple[str, ...] | None:
    """The layers recorded with adapters to which those on every layer are added. A U-Net's projections around its
    transformers are not checkpointed, and what they keep is recorded where they are linear; convolutions have a term of
    their own."""
    return model.lora.wide if model.traits.stages and model.config.get("use_linear_projection") else None


def _rank(settings: Settings) -> Fields:
    profile, version = profile_of(settings), _version_of_layers(settings)
    targets = None if version else _layers(settings)["lora_targets"] or profile.lora.targets
    return {"lora_rank": peft_types.rank_of(settings, profile, targets, of_blocks=version == LAYERS_OF_BLOCKS)}


def _version_of_layers(settings: Settings) -> str:
    """The version of memory terms with adapters on every layer, or every one of the blocks; empty for a choice."""
    words = str(value_of(settings, "layer_filter", "")).strip()
    return EVERY_LAYER if not words else LAYERS_OF_BLOCKS if words in BLOCKS else ""


def _version(settings: Settings, fields: Fields) -> str:
    lora = fields["method"] == "lora"
    adapters = (_version_of_layers(settings), peft_types.version_of(settings)) if lora else ()
    return "-".join(filter(None, (*adapters, ENCODERS_OFFLOADED if _encoder_offloads(settings) else "")))


def _encoder_offloads(settings: Settings) -> bool:
    """Whether layers of the largest text encoder wait in host RAM."""
    if is_old(settings):
        return swapped_share(settings) > 0
    return float(value_of(settings, f"{largest_encoder(settings)}.offload_fraction", 0.0) or 0.0) > 0


def _steps(settings: Settings) -> Fields:
    """How it steps. torch's AdamW takes what the config says, one parameter after the other by default
    (modules/util/create.py ``create_optimizer``, TrainOptimizerConfig)."""
    name = str(value_of(settings, "optimizer.optimizer", "ADAMW"))
    fused = optimizer_switch(settings, "fused_back_pass")
    full = str(value_of(settings, "training_method")) == "FINE_TUNE"
    if fused and full:
        return {"optimizer_step": "backward"}
    wider = not full and _version_of_layers(settings) and _nearest_recording(profile_of(settings))
    if OPTIMIZERS.get(name) != "adamw" or wider:  # of that choice of layers no other step is recorded
        return {"optimizer_step": "foreach"}
    ways = (way for way in EXCLUSIVE if optimizer_switch(settings, way))
    return {"optimizer_step": next(ways, "loop")}


def _caches(settings: Settings) -> Fields:
    """What is not trained is cached with the latents, unless ``latent_caching`` is off."""
    where = "cached" if value_of(settings, "latent_caching", True) else "resident"
    vae = _weights(settings, "vae")
    encoder = _weights(settings, largest_encoder(settings))
    known = ("fp32", "bf16", "fp16")
    return {
        "text_encoder": where,
        "vae": where,
        "vae_dtype": vae if vae in known else "bf16",
        "text_encoder_dtype": encoder,
    }


def _compiled(value: Any) -> str:
    """Each checkpointed layer is compiled by itself (modules/util/checkpointing_util.py ``layer.compile``)."""
    return "blocks" if value is True else "none"


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield "priced on diffusers' model; compared with runs of OneTrainer's own code for FLUX.1, SD 3.5, SDXL and SD 1.5"
    preset = value_of(settings, "layer_filter_preset", FULL)
    if preset != FULL and not value_of(settings, "layer_filter"):
        yield (
            f"layer_filter_preset: {preset} is what its window fills layer_filter from; scripts/train.py reads "
            "layer_filter alone, and puts adapters on every layer"
        )
    yield from own_model_notes("onetrainer", fields)
    if note := peft_types.note(settings, fields):
        yield note
    if re.fullmatch(r"STABLE_DIFFUSION_2\d_BASE", str(value_of(settings, "model_type"))):
        yield "the bases of SD 2 predict the noise, at 512 pixels: memory is SD 2.1's"
    if str(value_of(settings, "quantization.svd_dtype", "NONE")) != "NONE" and fields["weights_dtype"] in QUANTISED:
        rank, dtype = value_of(settings, "quantization.svd_rank", 16), value_of(settings, "quantization.svd_dtype")
        yield (
            f"quantization.svd_dtype is not estimated: every quantised layer has two more matrices of rank {rank} "
            f"in {dtype}, and takes more than this"
        )
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
        FunctionPair(
            ("model",), (f"{CONFIG}model_type",), _model, _nothing, {"model": ", ".join(dict.fromkeys(MODELS.values()))}
        ),
        FunctionPair(("method",), (f"{CONFIG}training_method",), _method, _nothing, {"method": "lora, full"}),
        When(
            "method",
            ONLY_LORA,
            FunctionPair(
                ("lora_rank",),
                (f"{CONFIG}lora_rank", f"{CONFIG}peft_type"),
                _rank,
                _nothing,
                {"lora_rank": "lora_rank; LOKR, LOHA by their numbers"},
            ),
        ),
        FunctionPair(
            ("height", "width", "frames"),
            (f"{CONFIG}resolution", f"{CONFIG}frames"),
            _size,
            _nothing,
            {"height": "resolution", "width": "resolution", "frames": "frames"},
        ),
        FunctionPair(
            ("lora_targets",), (f"{CONFIG}layer_filter",), _layers, _nothing, {"lora_targets": "by their names"}
        ),
        Value("batch_size", f"{CONFIG}batch_size", 1, int),
        FunctionPair(
            ("text_tokens",),
            (f"{CONFIG}text_encoder_sequence_length", f"{CONFIG}text_encoder_2_sequence_length"),
            prompt_length,
            _nothing,
            {"text_tokens": "text_encoder_2_sequence_length (FLUX.1), text_encoder_sequence_length (FLUX.2)"},
        ),
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
            {"optimizer_step": "loop, foreach, fused (adamw), backward (full training)"},
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
            changed_checkpoints,
        ),
        FunctionPair(
            ("swap_blocks",),
            (f"{CONFIG}layer_offload_fraction",),
            _swap,
            _nothing,
            {"swap_blocks": "offload_fraction"},
            changed_swap,
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
        Value("compile", f"{CONFIG}compile", "none", _compiled),
        Value(
            "attention",
            f"{CONFIG}attention_mechanism",
            "sdpa",
            one_of(ATTENTION, "attention_mechanism"),
            word_for(ATTENTION, "attention", "sdpa"),
        ),
        Choice("ema", {"none": {}, "gpu": {f"{CONFIG}ema": "GPU"}, "cpu": {f"{CONFIG}ema": "CPU"}}),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("experts", "trainable", "lora_dropout", "buckets", "references"),
        *our_defaults("validation"),
    ),
    read_script=read_script,
    notes=_notes,
    version=_version,
    moves=MOVES,
    assigns=": ",
)
