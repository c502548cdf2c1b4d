"""SimpleTuner's config.json, read at bc8e6ab: simpletuner/examples, field_registry/sections and helpers/models.

Its memory terms are in `planner.layout.trainer_terms.simpletuner`, which its own published runs are priced by.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import ONLY_LORA, Fields, FunctionPair, Remark, Settings, Value, When
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Move
from planner.dialects.base.launchers import EXPANDABLE, GPUS, NODES, find_model, our_defaults
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.base.script import Script
from planner.dialects.base.values import as_list, integer, number
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.attention_masks import unpriced_masks_note
from planner.layout.trainer_terms.simpletuner import (
    QUANTISED_WHOLE,
    QUANTO,
    QUANTO_WHOLE,
    RAMTORCH,
    TORCHAO_WHOLE,
)
from planner.spec.job import QUANTISED
from planner.untrusted import flat, parse, read_text

CONFIG = "config:"
MODELS: dict[str, dict[str, str]] = {
    "flux": {"": "flux.1-dev", "dev": "flux.1-dev", "krea": "flux.1-dev", "kontext": "flux.1-kontext-dev"},
    "flux2": {
        "": "flux.2-dev",
        "dev": "flux.2-dev",
        "klein-9b": "flux.2-klein-9b",
        "klein-4b": "flux.2-klein-4b",
    },
    "sdxl": {"": "sdxl"},
    "sd1x": {"": "sd1.5"},
    "sd3": {"": "sd3.5-medium", "medium": "sd3.5-medium", "large": "sd3.5-large"},
    "qwen_image": {
        "": "qwen-image",
        "v1.0": "qwen-image",
        "v2.0": "qwen-image",
        **dict.fromkeys(("edit-v1", "edit-v2"), "qwen-image-edit"),
        **dict.fromkeys(("edit-v2+", "edit-v3"), "qwen-image-edit-2511"),  # ZERO_COND_T_FLAVOURS
    },
    "z_image": dict.fromkeys(("", "base", "turbo", "turbo-ostris-v1", "turbo-ostris-v2"), "z-image"),
    "chroma": dict.fromkeys(("", "base", "hd", "flash"), "chroma1-hd"),
    "lumina2": dict.fromkeys(("", "2.0", "neta-lumina"), "lumina-image-2.0"),
    "hidream": dict.fromkeys(("", "full", "dev", "fast"), "hidream-i1"),
    "krea2": dict.fromkeys(("", "raw", "turbo"), "krea-2"),
    "ernie": dict.fromkeys(("", "base", "turbo"), "ernie-image"),
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
"""

OPTIMIZERS = {
    "adamw_bf16": "adamw",
    "torch-adamw": "adamw",
    "optimi-adamw": "adamw",
    "bnb-adamw8bit": "adamw-8bit",
    "bnb-adamw8bit-paged": "adamw-8bit-paged",
    "bnb-lion8bit-paged": "adamw-8bit-paged",
    "optimi-lion": "lion",
    "prodigy": "prodigy",
}
BASES = {
    "no_change": "",
    "int8-quanto": "int8",
    "int8-torchao": "int8",
    "fp8-quanto": "fp8",
    "fp8-torchao": "fp8",
    "nf4-bnb": "nf4",
}
"""``base_model_precision`` -> how the frozen base is stored; empty: as the mixed precision is."""

LEAVES_LAYERS = ("sd3", "ltxvideo", "wan")
"""Families that share one list of layers that Quanto leaves in 16 bits; of LTX-Video these are small
(helpers/training/quantisation/__init__.py ``_quanto_model``)."""

STORED = {("ideogram", ""): "fp8", ("ideogram", "fp8"): "fp8", ("ideogram", "nf4"): "nf4"}
"""(``model_family``, ``model_flavour``) -> how its published weights are stored, and stay unless a
``base_model_precision`` or ``ideogram_fp8_base_upcast`` asks for others (helpers/models/ideogram/model.py
``load_model``)."""


def read_script(script: Script) -> Invocation | None:
    """A config: its keys may have dashes, as on its command line."""
    config = {str(name).lstrip("-"): value for name, value in (script.config or {}).items()}
    if "data_backend_config" not in config and not {"model_family", "model_type"} <= config.keys():
        return None
    parsed = flags.script("simpletuner", "config.json").parse_config(config)
    settings = {f"{CONFIG}{name}": value for name, value in flat(config, script.name).items()}
    settings |= _samples(script, settings)
    return Invocation("simpletuner", {"script": "config.json", **settings}, parsed.unknown, notes=script.notes)


def _of(settings: Settings, name: str, default: Any = None) -> Any:
    return settings.get(CONFIG + name, default)


def _on(value: Any) -> bool:
    """Whether a setting is used; degrees of parallelism are from 2."""
    return value is True or str(value).lower() not in ("none", "false", "", "0", "1")


def _model(settings: Settings) -> Fields:
    family = str(_of(settings, "model_family")).replace("-", "_")
    flavour = str(_of(settings, "model_flavour") or "")
    name = settings.get("model") or MODELS.get(family, {}).get(flavour)
    if name is None and family in MODELS:
        name = find_model(_of(settings, "pretrained_model_name_or_path"))
    if name is None:
        what = f"model_family {family}" + (f" {flavour}" if flavour else "")
        raise VplanError(f"SimpleTuner's {quoted(what)} is not known", f"known families: {', '.join(MODELS)}")
    return {"model": lookup.model(str(name)).name}


def _method(settings: Settings) -> Fields:
    kind = str(_of(settings, "model_type", "full"))  # the default of field_registry/sections/model.py
    if kind not in ("lora", "full"):
        raise VplanError(f"SimpleTuner's model_type {quoted(kind)} is not priced", "lora and full are")
    if kind == "lora" and (adapter := str(_of(settings, "lora_type") or "standard").lower()) != "standard":
        raise VplanError(f"SimpleTuner's lora_type {quoted(adapter)} is not priced", "lora_type standard is")
    if kind == "full" and _of(settings, "gradient_precision") == "fp32":
        raise VplanError("gradient_precision fp32 is not priced of full fine-tuning", "leave gradient_precision out")
    return {"method": kind}


def _formats(settings: Settings) -> Fields:
    """Adapters are in the mixed precision's format, and their AdamW is made for it (helpers/training/trainer.py)."""
    precision = str(_of(settings, "mixed_precision") or "bf16")
    half = precision if precision in ("bf16", "fp16") else "fp32"
    base = str(_of(settings, "base_model_precision") or "no_change")
    if base not in BASES:
        raise VplanError(f"base_model_precision {quoted(base)} is not priced", f"priced: {', '.join(BASES)}")
    which = str(_of(settings, "model_family")).replace("-", "_"), str(_of(settings, "model_flavour") or "")
    stored = "" if BASES[base] or _on(_of(settings, "ideogram_fp8_base_upcast", False)) else STORED.get(which, "")
    sixteen = "fp32" if str(_of(settings, "optimizer")).startswith(("optimi-", "torch-")) and BASES[base] else half
    return {
        "weights_dtype": BASES[base] or stored or half,
        "adapter_dtype": sixteen,
        "autocast": half if half != "fp32" else "none",
    }


def _version(settings: Settings, fields: Fields) -> str:
    """`QUANTISED_WHOLE` when Quanto or torchao quantise the base on the GPU: bitsandbytes does so block by block as it
    loads. `TORCHAO_WHOLE` when torchao does so to 8-bit integers. `QUANTO` where Quanto leaves layers of the family in
    16 bits."""
    base = str(_of(settings, "base_model_precision") or "no_change")
    on_gpu = str(_of(settings, "quantize_via") or "accelerator") == "accelerator"
    if _ramtorch(settings):
        return RAMTORCH
    if base.endswith("-quanto") and _of(settings, "model_family") in LEAVES_LAYERS:
        return QUANTO_WHOLE if on_gpu else QUANTO
    if on_gpu and base == "int8-torchao":
        return TORCHAO_WHOLE
    return QUANTISED_WHOLE if on_gpu and base.endswith(("-quanto", "-torchao")) else ""


def _optimizer(settings: Settings) -> Fields:
    name = str(_of(settings, "optimizer") or "adamw_bf16")
    if name not in OPTIMIZERS:
        raise VplanError(f"SimpleTuner's optimizer {quoted(name)} is not priced", f"priced: {', '.join(OPTIMIZERS)}")
    # helpers/training/optimizers/adamw_bfloat16 steps one parameter after another
    return {"optimizer": OPTIMIZERS[name], "optimizer_step": "loop" if name == "adamw_bf16" else "foreach"}


def _write_optimizer(fields: Fields) -> Settings:
    words = {ours: theirs for theirs, ours in reversed(OPTIMIZERS.items())}
    return {f"{CONFIG}optimizer": words.get(fields["optimizer"], "adamw_bf16")}


SAMPLES = "data:samples"
"""[resolution, resolution_type, frames] of each set of ``data_backend_config``, None where it does not say."""

BATCH = "data:batch"
"""The largest ``train_batch_size`` of a set of its own, where one says so."""

REFERENCES = "data:references"
"""How many sets condition a sample, of which one is taken, or all with ``conditioning_multidataset_sampling``."""

UNCACHED = {"vae": "data:vae", "text_encoder": "data:text_encoder"}
"""Whether a set encodes while it trains."""

TRAINED_KINDS = ("image", "video")
"""Values of ``dataset_type`` whose sizes are trained; others are caches and what conditions."""

MASKS = ("mask", "segmentation", "grounding")
"""Values of ``conditioning_type`` that weigh the loss, or act with a setting that is not priced."""


def _samples(script: Script, settings: Settings) -> Settings:
    """The sets of the data file that the config names, where the file is here."""
    path = _of(settings, "data_backend_config")
    file = script.find(path) if isinstance(path, str) else None
    if file is None:
        return {}
    sets = parse(read_text(file), "json", file.name)
    if not isinstance(sets, list) or not all(isinstance(entry, dict) for entry in sets):
        raise VplanError(f"{quoted(file.name)} is no list of data sets", "name SimpleTuner's multidatabackend file")
    sets = [entry for entry in sets if entry.get("disabled") is not True]
    found: Settings = {}
    for part, words in ENCODES.items():
        if any(_on(entry.get(word)) for entry in sets for word in words):
            found[UNCACHED[part]] = True
    trained = [entry for entry in sets if str(entry.get("dataset_type", "image")) in TRAINED_KINDS]
    if sizes := [entry["train_batch_size"] for entry in trained if entry.get("train_batch_size")]:
        usual = _of(settings, "train_batch_size") or 1
        sizes += [usual] if len(sizes) < len(trained) else []
        found[BATCH] = max(integer(size, "train_batch_size") for size in sizes)
    if count := _conditioning(sets, trained):
        found[REFERENCES] = count
    rows = []
    for entry in trained:
        video = entry.get("video")
        frames = video.get("num_frames") if isinstance(video, dict) else None
        rows.append([entry.get("resolution"), entry.get("resolution_type"), frames])
    return {**found, SAMPLES: rows} if rows else found


def _conditioning(sets: list[Any], trained: list[Any]) -> int:
    """How many sets condition the samples of a set, at most: named, or made of its own images."""
    kinds = {str(entry.get("id")): str(entry.get("conditioning_type", "")) for entry in sets}
    counts = [0]
    for entry in trained:
        named = [name for name in as_list(entry.get("conditioning_data") or []) if kinds.get(str(name)) not in MASKS]
        made = [each for each in as_list(entry.get("conditioning") or []) if isinstance(each, dict)]
        counts.append(len(named) + sum(str(each.get("conditioning_type", "")) not in MASKS for each in made))
    return max(counts)


ENCODES = {
    "vae": ("vae_cache_ondemand", "vae_cache_disable"),
    "text_encoder": ("text_cache_ondemand", "text_cache_disable"),
}
"""Settings of the config, and of sets, with which a part encodes while it trains, and stays on the GPU for it
(helpers/training/trainer.py ``init_unload_vae``, helpers/data_backend/factory.py)."""


def _encoders(settings: Settings) -> Fields:
    def stays(part: str, *more: str) -> bool:
        return UNCACHED[part] in settings or any(_on(_of(settings, word)) for word in (*ENCODES[part], *more))

    return {
        "text_encoder": "resident" if stays("text_encoder") else "cached",
        "vae": "resident" if stays("vae", "keep_vae_loaded") else "cached",
    }


def _references(settings: Settings) -> Fields:
    """Where the data file has no conditioning set, as many as the model usually takes."""
    count = int(settings.get(REFERENCES, 0))
    if not count:
        return {"references": None}
    shape = lookup.model(_model(settings)["model"]).shape
    if not shape.references and not shape.takes_references:
        raise VplanError("conditioning sets of this model_family are not priced", "leave conditioning_data out")
    return {"references": count if _of(settings, "conditioning_multidataset_sampling") == "combined" else 1}


def _batch(settings: Settings) -> Fields:
    size = settings.get(BATCH) or _of(settings, "train_batch_size", 1)
    return {"batch_size": integer(size, "train_batch_size")}


def _size(settings: Settings) -> Fields:
    """The largest sample of the data file, as a square; what a set does not say is the config's."""
    model = lookup.model(_model(settings)["model"])
    family = str(_of(settings, "model_family")).replace("-", "_")
    usual = [_of(settings, "resolution"), _of(settings, "resolution_type")]
    sizes = []
    for resolution, kind, frames in settings.get(SAMPLES) or [[None, None, None]]:
        pixels = _side(resolution or usual[0] or 1024, kind or usual[1], model.shape.size_multiple)
        if model.kind != "video":
            sizes.append((pixels, 1))
            continue
        frames = frames or _of(settings, "validation_num_video_frames") or 0
        sizes.append((pixels, _frames(integer(frames, "num_frames"), family, model.vae.temporal)))
    pixels, frames = max(sizes, key=lambda size: (size[0] ** 2 * max(1, size[1]), size))
    return {"height": pixels, "width": pixels, "frames": frames or None}


def _side(resolution: Any, kind: Any, step: int) -> int:
    """``resolution`` as the side of a square: in pixels, or megapixels where ``resolution_type`` is ``area``."""
    try:
        side = float(resolution)
    except (TypeError, ValueError):
        raise VplanError(f"resolution {quoted(resolution)} is no number", "write 1024") from None
    if str(kind) == "area" or side < 16:
        side = (side * 1024 * 1024) ** 0.5
    return max(step, int(side) // step * step)


FRAME_STEPS = {"wan": 8, "ltxvideo": 8, "ltxvideo2": 8}
"""``model_family`` -> n of the n * k + 1 frames that it cuts clips to, where it is more than its VAE joins
(``adjust_video_frames`` in helpers/models/wan/model.py, ltxvideo/model.py and ltxvideo2/model.py)."""


def _frames(frames: int, family: str, temporal: int) -> int:
    """What is trained of a clip of so many frames. ``temporal``: the frames that the VAE joins to one."""
    step = FRAME_STEPS.get(family, temporal)
    return (frames - 1) // step * step + 1 if frames > 1 else frames


SEGMENTS = ("flux", "flux2", "hunyuanvideo", "krea2", "ltxvideo", "ltxvideo2", "lumina2", "sd3", "wan", "z_image")
"""Families that checkpoint as many blocks together as the interval says (``checkpoint_sequential_state`` in
helpers/models/*/transformer.py)."""

ONE_BY_ONE = ("chroma", "ernie", "hidream", "ideogram", "qwen_image")
"""Families that checkpoint one block of as many as the interval says (``should_checkpoint_block``). All others ignore
it (helpers/training/default_settings/safety_check.py)."""

BACKENDS = {"torch": "full", "unsloth": "offload"}
"""``gradient_checkpointing_backend`` -> where a block's inputs are kept (helpers/training/
offloaded_gradient_checkpointer.py)."""


def _checkpointing(settings: Settings) -> Fields:
    """Of segments, whose blocks are recomputed together, all but one are priced as if they were not checkpointed."""
    if _of(settings, "gradient_checkpointing") not in (True, "true"):
        return {"gradient_checkpointing": "none", "checkpointed_blocks": None}
    backend = str(_of(settings, "gradient_checkpointing_backend") or "torch").lower()
    if backend not in BACKENDS:
        raise VplanError(f"gradient_checkpointing_backend {quoted(backend)} is not priced", "torch and unsloth are")
    interval = _interval(settings)
    if interval is None:
        return {"gradient_checkpointing": BACKENDS[backend], "checkpointed_blocks": None}
    if backend != "torch":
        fault = f"gradient_checkpointing_interval with gradient_checkpointing_backend {backend} is not priced"
        raise VplanError(fault, "leave one of both out")
    kept = sum(index % interval.stride < interval.width for depth in _depths(settings) for index in range(depth))
    checkpointed = kept - (interval.width - 1 if interval.together else 0)
    if checkpointed <= 0:
        return {"gradient_checkpointing": "none", "checkpointed_blocks": None}
    return {"gradient_checkpointing": "partial", "checkpointed_blocks": checkpointed}


class CheckpointInterval(NamedTuple):
    """Which blocks are checkpointed: the first ``width`` of every ``stride``."""

    width: int
    stride: int
    together: bool
    """recomputed together"""


def _interval(settings: Settings) -> CheckpointInterval | None:
    """What ``gradient_checkpointing_interval`` and ``gradient_checkpointing_segment_stride`` choose, None: all blocks,
    one by one."""
    family = str(_of(settings, "model_family")).replace("-", "_")
    number = integer(_of(settings, INTERVAL) or 1, INTERVAL)
    if number <= 1 or family not in (*SEGMENTS, *ONE_BY_ONE):
        return None
    stride = integer(_of(settings, STRIDE) or 0, STRIDE)
    if 0 < stride < number:
        raise VplanError(f"{STRIDE} {stride} is less than {INTERVAL} {number}", f"use {number} or more")
    if family in SEGMENTS:
        return CheckpointInterval(number, stride or number, True)
    return CheckpointInterval(number if stride else 1, stride or number, False)


INTERVAL, STRIDE = "gradient_checkpointing_interval", "gradient_checkpointing_segment_stride"


def _depths(settings: Settings) -> Iterator[int]:
    model = lookup.model(_model(settings)["model"])
    return (model.depth(stack) for stack in model.stacks)


def _write_checkpointing(fields: Fields) -> Settings:
    """Which blocks it checkpoints is theirs to say."""
    backend = next((word for word, ours in BACKENDS.items() if ours == fields["gradient_checkpointing"]), None)
    if fields["gradient_checkpointing"] == "none":
        return {f"{CONFIG}gradient_checkpointing": False}
    written: Settings = {f"{CONFIG}gradient_checkpointing": True}
    return written | ({f"{CONFIG}gradient_checkpointing_backend": backend} if backend == "unsloth" else {})


def _swap(settings: Settings) -> Fields:
    """Blocks wait in host RAM as in musubi-tuner (helpers/musubi_block_swap.py), at most all but one; with RamTorch the
    linear layers of that share of the blocks do."""
    model = lookup.model(_model(settings)["model"])
    blocks = integer(_of(settings, "musubi_blocks_to_swap") or 0, "musubi_blocks_to_swap")
    if _ramtorch(settings):
        percent = number(_of(settings, "ramtorch_transformer_percent", 100), "ramtorch_transformer_percent")
        blocks = round(min(percent, 100) / 100 * model.blocks)
    return {"swap_blocks": max(0, min(blocks, model.blocks - 1))}


def _ramtorch(settings: Settings) -> bool:
    return _of(settings, "ramtorch") in (True, "true")


ATTENTION_ALONE = ("sd3",)
"""Families whose usual adapters are on the image stream's attention alone, where our model's are on more
(``DEFAULT_LORA_TARGET`` in helpers/models/sd3/model.py)."""


def _layers(settings: Settings) -> Fields:
    """Over a quantised base the model's usual layers are taken: no others are recorded."""
    family = str(_of(settings, "model_family")).replace("-", "_")
    alone = family in ATTENTION_ALONE and _method(settings)["method"] == "lora"
    if not alone or _formats(settings)["weights_dtype"] in QUANTISED:
        return {"lora_targets": None}
    return {"lora_targets": lookup.model(_model(settings)["model"]).lora.wide or None}


T5_TOKENS = {"sd3": 154}
"""``model_family`` -> the most tokens that T5 gives, and its default, where that is not our model's usual length
(``check_user_config`` in helpers/models/sd3/model.py); prompts are padded to it."""

CLIP_TOKENS = 77


def _prompt_length(settings: Settings) -> Fields:
    """``tokenizer_max_length`` counts T5's tokens; CLIP's stand before them."""
    most = T5_TOKENS.get(str(_of(settings, "model_family")).replace("-", "_"))
    if most is None:
        return {"text_tokens": None}
    length = integer(_of(settings, "tokenizer_max_length") or most, "tokenizer_max_length")
    return {
        "text_tokens": CLIP_TOKENS + (length if _on(_of(settings, "i_know_what_i_am_doing")) else min(length, most))
    }


def _ema(settings: Settings) -> Fields:
    """``ema_device`` is the CPU unless it says otherwise."""
    if _of(settings, "use_ema") not in (True, "true"):
        return {"ema": "none"}
    return {"ema": "gpu" if str(_of(settings, "ema_device")) in ("accelerator", "cuda") else "cpu"}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if integer(_of(settings, INTERVAL) or 1, INTERVAL) > 1 and fields["gradient_checkpointing"] == "full":
        yield Remark(INTERVAL, "this family has none, and checkpoints every block")
    if _of(settings, "data_backend_config") and SAMPLES not in settings:
        why = "it is not here, so its sizes are not read: pass --height, --width and --frames for others"
        yield Remark("data_backend_config", why)


TEXT_ENCODERS = tuple(f"text_encoder_{number}_precision" for number in range(1, 5))
"""Quantise text encoders before they encode what is cached (helpers/training/trainer.py ``init_precision`` with
``preprocessing_models_only``); priced are encoders in 16 bits. Then they are gone, whatever it is."""


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    whose = "the largest set's" if SAMPLES in settings else "the config's"
    yield f"a square of {whose} resolution: buckets have its pixels"
    yield from own_model_notes("simpletuner", fields)
    if masks := unpriced_masks_note("simpletuner", fields):
        yield masks
    if fields["method"] == "lora" and fields["lora_targets"] is None:
        yield "LoRA estimated on the model's usual layers"
    if fields["gradient_checkpointing"] == "partial":
        together = (interval := _interval(settings)) is not None and interval.together
        more = "; the blocks of a segment are recomputed together, which may take one more" if together else ""
        yield f"{fields['checkpointed_blocks']} checkpointed blocks are priced as the first ones; it takes others{more}"
    if _of(settings, "gradient_checkpointing_offload_attention"):
        yield f"gradient_checkpointing_offload_attention{MAY_NEED_LESS}"
    if (layers := _of(settings, "flux_lora_target", "all")) != "all":
        yield f"flux_lora_target {layers} is not priced: estimated as all"
    if _on(_of(settings, "dynamo_backend")) and str(_of(settings, "dynamo_backend")).lower() != "no":
        yield "torch.compile (dynamo_backend) is not estimated: CUDA graphs keep memory of their own"
    if _of(settings, "optimizer") == "bnb-lion8bit-paged":
        yield "bnb-lion8bit-paged is priced as 8-bit AdamW, paged too: its one state takes half of those in host RAM"
    family = str(_of(settings, "model_family")).replace("-", "_")
    if family not in T5_TOKENS and _of(settings, "tokenizer_max_length"):
        yield "tokenizer_max_length is not estimated: the model's usual length of prompts is"
    if fields["ema"] == "cpu" and not _on(_of(settings, "ema_cpu_only")):
        yield "without ema_cpu_only the average goes to the GPU at each update, which is not estimated"
    for precision in TEXT_ENCODERS:
        if _on(_of(settings, precision)) and _of(settings, precision) != "no_change":
            yield f"{precision}{MAY_NEED_LESS}"
    if _version(settings, fields) in (QUANTISED_WHOLE, QUANTO_WHOLE, TORCHAO_WHOLE):
        yield "without quantize_via cpu the model lies on the GPU whole in 16 bits before it is quantised"


def _nothing(fields: Fields) -> Settings:
    return {}


def _by_torchao(settings: Settings) -> str:
    return str(_of(settings, "base_model_precision")).replace("-quanto", "-torchao")


def _in_host_ram(whole: str, then: str) -> Move:
    """Quantising in host RAM instead of on the GPU. ``whole``, ``then``: the versions of both."""
    return Move(
        {"version": then},
        "quantising in host RAM takes longer",
        words_for=lambda settings: ["quantize_via: cpu"],
        when=lambda fields: fields["version"] == whole,
    )


DIALECT = Dialect(
    name="simpletuner",
    title="SimpleTuner",
    source="https://github.com/bghira/SimpleTuner at bc8e6ab",
    scripts=("config.json",),
    table=(
        FunctionPair(("model",), (f"{CONFIG}model_family",), _model, _nothing, {"model": ", ".join(MODELS)}),
        FunctionPair(("method",), (f"{CONFIG}model_type",), _method, _nothing, {"method": "lora, full"}),
        When("method", ONLY_LORA, Value("lora_rank", f"{CONFIG}lora_rank", 16, int)),
        When("method", ONLY_LORA, Value("lora_dropout", f"{CONFIG}lora_dropout", 0.1, float)),
        FunctionPair(
            ("height", "width", "frames"),
            (f"{CONFIG}resolution", f"{CONFIG}resolution_type"),
            _size,
            _nothing,
            {"height": "resolution", "width": "resolution", "frames": "validation_num_video_frames"},
        ),
        FunctionPair(
            ("batch_size",),
            (f"{CONFIG}train_batch_size",),
            _batch,
            lambda fields: {f"{CONFIG}train_batch_size": fields["batch_size"]},
            {"batch_size": "train_batch_size"},
        ),
        Value("gradient_accumulation", f"{CONFIG}gradient_accumulation_steps", 1, int),
        FunctionPair(
            ("optimizer", "optimizer_step"),
            (f"{CONFIG}optimizer",),
            _optimizer,
            _write_optimizer,
            {"optimizer": ", ".join(OPTIMIZERS), "optimizer_step": "loop, foreach"},
        ),
        FunctionPair(
            ("weights_dtype", "adapter_dtype", "autocast"),
            (f"{CONFIG}base_model_precision", f"{CONFIG}mixed_precision"),
            _formats,
            _nothing,
            {"weights_dtype": "bf16, int8, fp8, nf4", "adapter_dtype": "bf16, fp32", "autocast": "mixed_precision"},
        ),
        FunctionPair(
            ("gradient_checkpointing", "checkpointed_blocks"),
            (f"{CONFIG}gradient_checkpointing", f"{CONFIG}{INTERVAL}", f"{CONFIG}{STRIDE}"),
            _checkpointing,
            _write_checkpointing,
            {"gradient_checkpointing": "none, full, offload", "checkpointed_blocks": INTERVAL},
        ),
        FunctionPair(
            ("lora_targets",),
            (f"{CONFIG}model_family",),
            _layers,
            _nothing,
            {"lora_targets": "those of model_family"},
        ),
        FunctionPair(
            ("text_tokens",),
            (f"{CONFIG}tokenizer_max_length",),
            _prompt_length,
            _nothing,
            {"text_tokens": "tokenizer_max_length"},
        ),
        FunctionPair(("ema",), (f"{CONFIG}use_ema",), _ema, _nothing, {"ema": "none, cpu, gpu"}),
        FunctionPair(
            ("swap_blocks",),
            (f"{CONFIG}musubi_blocks_to_swap",),
            _swap,
            lambda fields: {f"{CONFIG}musubi_blocks_to_swap": fields["swap_blocks"]} if fields["swap_blocks"] else {},
            {"swap_blocks": "musubi_blocks_to_swap"},
        ),
        FunctionPair(
            ("text_encoder", "vae"),
            (),
            _encoders,
            _nothing,
            {
                "text_encoder": "cached, resident by text_cache_ondemand",
                "vae": "cached, resident by vae_cache_ondemand",
            },
        ),
        FunctionPair(("references",), (), _references, _nothing, {"references": "conditioning_data"}),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("experts", "trainable", "buckets"),
        *our_defaults("validation"),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    version=_version,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"gradient_checkpointing": "offload"}, "checkpoints go to host RAM and come back"),
        _in_host_ram(QUANTISED_WHOLE, ""),
        _in_host_ram(TORCHAO_WHOLE, ""),
        _in_host_ram(QUANTO_WHOLE, QUANTO),
        Move(
            {"version": ""},
            "torchao rounds the layers that Quanto leaves",
            words_for=lambda settings: [f"base_model_precision: {_by_torchao(settings)}", "quantize_via: cpu"],
            when=lambda fields: fields["version"] in (QUANTO, QUANTO_WHOLE),
            lossy=True,
        ),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move(
            {"weights_dtype": "int8"},
            "the frozen base is rounded to 8 bits",
            words_for=lambda settings: ["base_model_precision: int8-torchao", "quantize_via: cpu"],
            when=lambda fields: fields["method"] == "lora",
        ),
    ),
    assigns=": ",
)
