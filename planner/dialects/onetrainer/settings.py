"""OneTrainer's presets and configs (JSON), read at 23df3832 (modules/util/config/TrainConfig.py, training_presets)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.dialects.base import flags
from planner.dialects.base.bindings import (
    ONLY_LORA,
    Choice,
    Fields,
    FunctionPair,
    InexpressibleError,
    Settings,
    UnsupportedValue,
    Value,
    When,
)
from planner.dialects.base.block_swap import in_parts
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, find_model, one_of, our_defaults, word_for
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.layer_names import chosen_layers
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.base.script import Script
from planner.dialects.base.values import integer
from planner.dialects.onetrainer import peft_types
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.onetrainer import ENCODERS_OFFLOADED, EVERY_LAYER, LAYERS_OF_BLOCKS
from planner.spec.job import QUANTISED
from planner.untrusted import flat

CONFIG = "config:"
SIGNS = frozenset({"training_method", "model_type", "base_model_name"})
PARTS = ("transformer", "unet", "prior")
"""What its kinds of models call the part that is trained."""

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

FULL = "full"
"""The default of ``layer_filter_preset``: every layer."""

CHECKPOINTS = "gradient_checkpointing"
"""Our field, and its key of a part."""

THREADS = 2
"""The default of ``dataloader_threads``."""

LEAST_LOADED = 2
"""Layers that are on the GPU whatever is asked for (modules/util/LayerOffloadConductor.py ``__get_layers_below``)."""

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

TEXT_TOKENS = {"STABLE_DIFFUSION_3": 77 + 77, "STABLE_DIFFUSION_35": 77 + 77, "HUNYUAN_VIDEO": 77}
"""Its ModelType -> tokens of a prompt that the transformer reads, where they are not our model's usual ones: of SD 3
CLIP's and T5's, of Hunyuan Llama's behind its template (model/StableDiffusion3Model.py, model/HunyuanVideoModel.py)."""

SEQUENCE_LENGTH = {
    "FLUX_DEV_1": ("text_encoder_2_sequence_length", 77),
    "FLUX_2": ("text_encoder_sequence_length", 512),
}
"""Its ModelType -> the setting with the number of tokens, and its default (util/config/TrainConfig.py); none is as many
as the tokenizer takes."""

PARTS_SINCE = 11
"""The first ``__version`` that says per part what is checkpointed and offloaded."""
WEIGHTS_BY_PART_SINCE = 10
"""The first without a format for all parts."""
OLD_CHECKPOINTS = f"{CONFIG}gradient_checkpointing"
BLOCKS = frozenset({"transformer_block", "transformer_blocks", "layers"})
"""Its filters that take the blocks whole (``LAYER_PRESETS`` of modules/modelSetup)."""


def read_script(script: Script) -> Invocation | None:
    """A config or preset, alone or as its command names it: by keys of the first level that together only it has."""
    config = script.config
    for program in script.programs:
        if program.script.endswith("scripts/train.py") and "--config-path" in program.arguments[:-1]:
            config = _of_command(script, program.arguments)
    if config is None or not config.keys() >= SIGNS:
        return None
    parsed = flags.script("onetrainer", "config.json").parse_config(config)
    inside = flat(config, script.name)
    settings = {"script": "config.json", **{f"{CONFIG}{name}": value for name, value in inside.items()}}
    return Invocation("onetrainer", settings, parsed.unknown, notes=script.notes)


def _of_command(script: Script, arguments: Sequence[str]) -> dict[str, Any]:
    """What ``scripts/train.py`` reads: ``--preset-path``, over it ``--config-path``, over both each ``--config-value
    KEY=VALUE`` with dots between names."""
    config: dict[str, Any] = {}
    for flag, value in itertools.pairwise(arguments):
        if flag in ("--preset-path", "--config-path"):
            document = script.document(value)
            if document is None:
                raise VplanError(script.missing(value), "run vplan where the command would run, or pass the config")
            config = _over(config, document) if flag == "--config-path" else _over(document, config)
    for flag, value in itertools.pairwise(arguments):
        if flag == "--config-value":
            name, _, text = value.partition("=")
            *parts, key = name.split(".")
            inside: dict[str, Any] = {key: {"true": True, "false": False}.get(text.lower(), text)}
            for part in reversed(parts):
                inside = {part: inside}
            config = _over(config, inside)
    return config


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One config over another, part by part."""
    both = {
        key: _over(below[key], value)
        for key, value in above.items()
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
    }
    return {**below, **above, **both}


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
    profile = lookup.model(_model(settings)["model"])
    encoders = [each for each in profile.text_encoders if each.traits.package == "transformers"]  # no connectors
    if method == "LORA":
        peft_types.refuse_unpriced_adapters(settings, profile)
    for at in _additional_embeddings(settings):
        fault = f"additional_embeddings[{at}] trains an embedding through the text encoders, which is not priced"
        raise VplanError(fault, f"set additional_embeddings[{at}].train: false")
    trained = [
        f"text_encoder{suffix}"
        for suffix, _ in zip(("", "_2", "_3", "_4"), encoders, strict=False)
        if _of(settings, f"text_encoder{suffix}.train", True)
    ]
    if trained:
        fix = ", ".join(f"{name}.train: false" for name in trained)
        raise VplanError(f"training {' and '.join(trained)} is not priced (OneTrainer's default)", f"set {fix}")
    return {"method": "lora" if method == "LORA" else "full"}


def _additional_embeddings(settings: Settings) -> Iterator[str]:
    """Places in its list of those that train, which is the default."""
    found = (re.match(r"config:additional_embeddings\[(\d+)\]\.", key) for key in settings)
    for at in dict.fromkeys(match[1] for match in found if match):
        if _of(settings, f"additional_embeddings[{at}].train", True):
            yield at


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
    part = next((part for part in PARTS if _of(settings, f"{part}.weight_dtype") is not None), PARTS[0])
    weights = _weights(settings, part, _of(settings, "weight_dtype", "FLOAT_32"))
    adapter = _format(_of(settings, "lora_weight_dtype", "FLOAT_32"), "lora_weight_dtype")
    return {
        "weights_dtype": weights,
        "adapter_dtype": adapter,
        "autocast": train if train in ("bf16", "fp16") else "none",
    }


def _weights(settings: Settings, part: str, default: str = "FLOAT_32") -> str:
    """The format of a part; that of the whole config where it says NONE, before version 10
    (``TrainConfig.__migration_9``)."""
    value = _of(settings, f"{part}.weight_dtype", default)
    if value == "NONE" and int(_of(settings, "__version", 0)) < WEIGHTS_BY_PART_SINCE:
        value = _of(settings, "weight_dtype", value)
    return _format(value, f"{part}.weight_dtype")


def _is_old(settings: Settings) -> bool:
    """Whether checkpoints and offloading are said for all parts, as before version 11: what parts say of them is
    overwritten then (``TrainConfig.__migration_10``)."""
    return int(_of(settings, "__version", 0)) < PARTS_SINCE and OLD_CHECKPOINTS in settings


def _checkpointing(settings: Settings) -> Fields:
    """Of the part; older configs say ON, OFF or CPU_OFFLOADED, or true and false."""
    if _is_old(settings):
        older = str(settings[OLD_CHECKPOINTS])
        on = older not in ("OFF", "False")
        away = older == "CPU_OFFLOADED" and _of(settings, "enable_activation_offloading", True)
    else:
        on, away = _part(settings, "gradient_checkpointing", True), _part(settings, "activation_offloading", False)
    away = away and _offloads(_model(settings)["model"])
    return {CHECKPOINTS: "none" if not on else "offload" if away else "full"}


def _offloads(model: str) -> bool:
    """Whether its layers and checkpoints may wait in host RAM: not those of a U-Net
    (modules/modelSetup/BaseStableDiffusionXLSetup.py ``supports_offloading``)."""
    return not lookup.model(model).traits.stages


def _swap(settings: Settings) -> Fields:
    """``offload_fraction`` of the layers wait in host RAM (modules/util/LayerOffloadConductor.py)."""
    model = _model(settings)["model"]
    blocks = lookup.model(model).blocks
    if not _offloads(model):
        return {"swap_blocks": 0}
    return {"swap_blocks": min(blocks - 1, round(_fraction(settings) * blocks))}


def _fraction(settings: Settings) -> float:
    """Of the layers of the part that is trained, how much waits in host RAM."""
    if not _is_old(settings):
        return float(_part(settings, "offload_fraction", 0.0) or 0.0)
    offloads = settings[OLD_CHECKPOINTS] == "CPU_OFFLOADED"
    return float(_of(settings, "layer_offload_fraction", 0.0) or 0.0) if offloads else 0.0


def _trained_part(settings: Settings) -> str:
    return next((part for part in PARTS if any(key.startswith(f"{CONFIG}{part}.") for key in settings)), PARTS[0])


def _in_part(key: str, value: str) -> Callable[[Settings], list[str]]:
    """The words of a setting of the part that is trained, as `Move.words_for` has them."""
    return lambda settings: [f"{_trained_part(settings)}.{key}: {value}"]


def _changed_checkpoints(settings: Settings, before: Fields, after: Fields) -> Settings:
    """The settings that say checkpoints of the part that is trained, and whether they wait in host RAM."""
    mode = after["gradient_checkpointing"]
    if _is_old(settings):
        swaps = bool(after["swap_blocks"])
        word = "OFF" if mode == "none" else "CPU_OFFLOADED" if swaps or mode == "offload" else "ON"
        away = {} if word != "CPU_OFFLOADED" else {f"{CONFIG}enable_activation_offloading": mode == "offload"}
        return {OLD_CHECKPOINTS: word, **away}
    part = f"{CONFIG}{_trained_part(settings)}"
    away = {f"{part}.activation_offloading": mode == "offload"} if "offload" in (mode, before[CHECKPOINTS]) else {}
    return {f"{part}.gradient_checkpointing": mode != "none", **away}


def _changed_swap(settings: Settings, before: Fields, after: Fields) -> Settings:
    """The settings that say how much of the layers waits in host RAM. In older configs checkpoints are offloaded by the
    same word."""
    blocks = lookup.model(after["model"]).blocks
    share = round(after["swap_blocks"] / blocks, 3)
    if not _is_old(settings):
        return {f"{CONFIG}{_trained_part(settings)}.offload_fraction": share}
    same = before[CHECKPOINTS] == after[CHECKPOINTS]
    checkpoints = _changed_checkpoints(settings, before, after) if same else {}
    return {f"{CONFIG}layer_offload_fraction": share, **checkpoints}


def _more_swapped(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """More layers in host RAM than now, at most all but two. Checkpoints are needed for it
    (modules/util/checkpointing_util.py ``enable_checkpointing``)."""
    most = lookup.model(fields["model"]).blocks - LEAST_LOADED
    checkpoints = {CHECKPOINTS: "full"} if fields[CHECKPOINTS] == "none" else {}
    return tuple({"swap_blocks": blocks, **checkpoints} for blocks in in_parts(most, fields["swap_blocks"]))


def _may_swap(fields: Fields) -> bool:
    """Full training offloads layers with an optimizer that steps in backward alone (modules/util/create.py
    ``create_optimizer``)."""
    may_leave = fields["method"] == "lora" or fields["optimizer_step"] == "backward"
    return bool(may_leave and _offloads(fields["model"]))


def _with_encoders_offloaded(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """The version with the text encoders' layers in host RAM, unless it is this one."""
    parts = [part for part in (fields["version"], ENCODERS_OFFLOADED) if part]
    return () if str(fields["version"]).endswith(ENCODERS_OFFLOADED) else ({"version": "-".join(parts)},)


def _encoder_words(settings: Settings) -> list[str]:
    """The setting by which the largest text encoder's layers wait in host RAM, with which one thread alone may cache
    (modules/util/create.py ``create_data_loader``). Raises an InexpressibleError for older configs, which say one
    fraction for all parts."""
    if _is_old(settings):
        raise InexpressibleError(
            UnsupportedValue("version", ENCODERS_OFFLOADED, "", "one fraction is that of all parts")
        )
    threads = ["dataloader_threads: 1"] if int(_of(settings, "dataloader_threads", THREADS)) > 1 else []
    return [f"{_largest_encoder(settings)}.offload_fraction: 1.0", *threads]


def _may_step_in_backward(fields: Fields) -> bool:
    return (fields["method"], fields["gradient_accumulation"]) == ("full", 1)


def _quantised(dtype: str, word: str, what: str) -> Move:
    """Quantising the base of an adapter. ``dtype``: ours; ``word``: its name of it; ``what``: in words."""
    return Move(
        {"weights_dtype": dtype},
        what,
        words_for=_in_part("weight_dtype", word),
        when=lambda fields: fields["method"] == "lora" and fields["weights_dtype"] not in QUANTISED,
    )


def _layers(settings: Settings) -> Fields:
    """Adapters are on the layers whose names contain one of the words of ``layer_filter``, or are found by one as a
    regular expression with ``layer_filter_regex`` (util/ModuleFilter.py)."""
    if settings[f"{CONFIG}training_method"] != "LORA":
        return {"lora_targets": None}
    if _version_of_layers(settings):
        return {"lora_targets": _nearest_recording(lookup.model(_model(settings)["model"]))}
    words = [word.strip() for word in str(_of(settings, "layer_filter", "")).split(",")]
    try:
        found = [re.compile(word if _of(settings, "layer_filter_regex") else re.escape(word)).search for word in words]
    except re.error as error:
        raise VplanError(f"layer_filter: {error}", "OneTrainer stops at it too; mend the expression") from None
    profile = lookup.model(_model(settings)["model"])
    return {"lora_targets": chosen_layers(profile, lambda layer: any(search(layer) for search in found))}


def _nearest_recording(model: ModelProfile) -> tuple[str, ...] | None:
    """The layers recorded with adapters to which those on every layer are added. A U-Net's projections around its
    transformers are not checkpointed, and what they keep is recorded where they are linear; convolutions have a term of
    their own."""
    return model.lora.wide if model.traits.stages and model.config.get("use_linear_projection") else None


def _rank(settings: Settings) -> Fields:
    profile, version = lookup.model(_model(settings)["model"]), _version_of_layers(settings)
    targets = None if version else _layers(settings)["lora_targets"] or profile.lora.targets
    return {"lora_rank": peft_types.rank_of(settings, profile, targets, of_blocks=version == LAYERS_OF_BLOCKS)}


def _prompt_length(settings: Settings) -> Fields:
    kind = str(_of(settings, "model_type"))
    if kind not in SEQUENCE_LENGTH:
        return {"text_tokens": TEXT_TOKENS.get(kind)}
    name, default = SEQUENCE_LENGTH[kind]
    length = _of(settings, name, default)
    return {"text_tokens": None if length is None else integer(length, name)}


def _version_of_layers(settings: Settings) -> str:
    """The version of memory terms with adapters on every layer, or every one of the blocks; empty for a choice."""
    words = str(_of(settings, "layer_filter", "")).strip()
    return EVERY_LAYER if not words else LAYERS_OF_BLOCKS if words in BLOCKS else ""


def _version(settings: Settings, fields: Fields) -> str:
    lora = fields["method"] == "lora"
    adapters = (_version_of_layers(settings), peft_types.version_of(settings)) if lora else ()
    return "-".join(filter(None, (*adapters, ENCODERS_OFFLOADED if _encoder_offloads(settings) else "")))


def _encoder_offloads(settings: Settings) -> bool:
    """Whether layers of the largest text encoder wait in host RAM."""
    if _is_old(settings):
        return _fraction(settings) > 0
    return float(_of(settings, f"{_largest_encoder(settings)}.offload_fraction", 0.0) or 0.0) > 0


def _steps(settings: Settings) -> Fields:
    """How it steps. torch's AdamW takes what the config says, one parameter after the other by default
    (modules/util/create.py ``create_optimizer``, TrainOptimizerConfig)."""
    name = str(_of(settings, "optimizer.optimizer", "ADAMW"))
    fused = _optimizer(settings, "fused_back_pass")
    full = str(_of(settings, "training_method")) == "FINE_TUNE"
    if fused and full:
        return {"optimizer_step": "backward"}
    wider = not full and _version_of_layers(settings) and _nearest_recording(lookup.model(_model(settings)["model"]))
    if OPTIMIZERS.get(name) != "adamw" or wider:  # of that choice of layers no other step is recorded
        return {"optimizer_step": "foreach"}
    ways = (way for way in EXCLUSIVE if _optimizer(settings, way))
    return {"optimizer_step": next(ways, "loop")}


EXCLUSIVE = ("fused", "foreach")
"""Settings of its optimizer that AdamW takes without ``fused_back_pass`` alone."""


def _optimizer(settings: Settings, key: str) -> bool:
    """A switch of its optimizer; where it is not said, that of the defaults which the config keeps for it."""
    name = str(_of(settings, "optimizer.optimizer", "ADAMW"))
    value = _of(settings, f"optimizer.{key}")
    return bool(_of(settings, f"optimizer_defaults.{name}.{key}", False) if value is None else value)


def _fused_backward_words(settings: Settings) -> list[str]:
    """``fused_back_pass``, and without what forbids it: its window's AdamW has ``fused`` on
    (modules/util/optimizer_util.py ``OPTIMIZER_DEFAULT_PARAMETERS``)."""
    return [
        "optimizer.fused_back_pass: true",
        *(f"optimizer.{way}: false" for way in EXCLUSIVE if _optimizer(settings, way)),
    ]


def _largest_encoder(settings: Settings) -> str:
    """Its name for the text encoder with most parameters: they come to the GPU one at a time."""
    encoders = lookup.model(_model(settings)["model"]).text_encoders
    largest = max(range(len(encoders)), key=lambda at: encoders[at].parameters)
    return "text_encoder" if largest == 0 else f"text_encoder_{largest + 1}"


def _caches(settings: Settings) -> Fields:
    """What is not trained is cached with the latents, unless ``latent_caching`` is off."""
    where = "cached" if _of(settings, "latent_caching", True) else "resident"
    vae = _weights(settings, "vae")
    encoder = _weights(settings, _largest_encoder(settings))
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
    preset = _of(settings, "layer_filter_preset", FULL)
    if preset != FULL and not _of(settings, "layer_filter"):
        yield (
            f"layer_filter_preset: {preset} is what its window fills layer_filter from; scripts/train.py reads "
            "layer_filter alone, and puts adapters on every layer"
        )
    yield from own_model_notes("onetrainer", fields)
    if note := peft_types.note(settings, fields):
        yield note
    if re.fullmatch(r"STABLE_DIFFUSION_2\d_BASE", str(_of(settings, "model_type"))):
        yield "the bases of SD 2 predict the noise, at 512 pixels: memory is SD 2.1's"
    if str(_of(settings, "quantization.svd_dtype", "NONE")) != "NONE" and fields["weights_dtype"] in QUANTISED:
        rank, dtype = _of(settings, "quantization.svd_rank", 16), _of(settings, "quantization.svd_dtype")
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
            _prompt_length,
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
            _changed_checkpoints,
        ),
        FunctionPair(
            ("swap_blocks",),
            (f"{CONFIG}layer_offload_fraction",),
            _swap,
            _nothing,
            {"swap_blocks": "offload_fraction"},
            _changed_swap,
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
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move({CHECKPOINTS: "full"}, "one more forward pass", when=lambda fields: fields[CHECKPOINTS] == "none"),
        Move(
            {CHECKPOINTS: "offload"},
            "slower, and host RAM for the checkpoints",
            when=lambda fields: _offloads(fields["model"]),
        ),
        Move(
            {"vae": "cached", "text_encoder": "cached"},
            "disk for latents and prompts, which are no longer changed at random",
            words_for=lambda settings: ["latent_caching: true"],
        ),
        Move(
            {"swap_blocks": 1, CHECKPOINTS: "full"},
            "slower, and host RAM for the layers",
            by_fields=_more_swapped,
            when=_may_swap,
        ),
        Move(
            {"version": ENCODERS_OFFLOADED},
            "the text encoder's layers come over PCIe as prompts are encoded",
            words_for=_encoder_words,
            by_fields=_with_encoders_offloaded,
        ),
        Move(
            {"optimizer_step": "backward"},
            "the step runs inside backward",
            words_for=_fused_backward_words,
            when=lambda fields: _may_step_in_backward(fields) and fields["optimizer"] in ("adamw", "adafactor", "came"),
        ),
        Move(
            {"optimizer": "adafactor", "optimizer_step": "backward"},
            "second moments are row and column sums; the step runs inside backward",
            words_for=lambda settings: ["optimizer.optimizer: ADAFACTOR", "optimizer.fused_back_pass: true"],
            when=_may_step_in_backward,
        ),
        _quantised("fp8", "FLOAT_8", "the frozen base is rounded to 8 bits"),
        _quantised("nf4", "NFLOAT_4", "the frozen base is rounded to 4 bits"),
    ),
    assigns=": ",
)
