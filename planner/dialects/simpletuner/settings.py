"""SimpleTuner's config.json, read at bc8e6ab: simpletuner/examples, field_registry/sections and helpers/models.

Its memory terms are in `planner.layout.trainer_terms.simpletuner`, which its own published runs are priced by.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import ONLY_LORA, Fields, FunctionPair, Remark, Settings, Value, When
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Move
from planner.dialects.base.launchers import EXPANDABLE, GPUS, NODES, our_defaults
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.base.script import Script
from planner.dialects.base.values import integer, number
from planner.dialects.simpletuner.block_checkpoints import (
    INTERVAL,
    STRIDE,
    checkpointing_of,
    interval_of,
    write_checkpointing,
)
from planner.dialects.simpletuner.data_file import (
    SAMPLES,
    batch_of,
    encoders_of,
    references_of,
    samples,
    size_of,
)
from planner.dialects.simpletuner.models import CONFIG, MODELS, is_on, model_of, of
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
from planner.untrusted import flat

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
    settings |= samples(script, settings)
    return Invocation("simpletuner", {"script": "config.json", **settings}, parsed.unknown, notes=script.notes)


def _method(settings: Settings) -> Fields:
    kind = str(of(settings, "model_type", "full"))  # the default of field_registry/sections/model.py
    if kind not in ("lora", "full"):
        raise VplanError(f"SimpleTuner's model_type {quoted(kind)} is not priced", "lora and full are")
    if kind == "lora" and (adapter := str(of(settings, "lora_type") or "standard").lower()) != "standard":
        raise VplanError(f"SimpleTuner's lora_type {quoted(adapter)} is not priced", "lora_type standard is")
    if kind == "full" and of(settings, "gradient_precision") == "fp32":
        raise VplanError("gradient_precision fp32 is not priced of full fine-tuning", "leave gradient_precision out")
    return {"method": kind}


def _formats(settings: Settings) -> Fields:
    """Adapters are in the mixed precision's format, and their AdamW is made for it (helpers/training/trainer.py)."""
    precision = str(of(settings, "mixed_precision") or "bf16")
    half = precision if precision in ("bf16", "fp16") else "fp32"
    base = str(of(settings, "base_model_precision") or "no_change")
    if base not in BASES:
        raise VplanError(f"base_model_precision {quoted(base)} is not priced", f"priced: {', '.join(BASES)}")
    which = str(of(settings, "model_family")).replace("-", "_"), str(of(settings, "model_flavour") or "")
    stored = "" if BASES[base] or is_on(of(settings, "ideogram_fp8_base_upcast", False)) else STORED.get(which, "")
    sixteen = "fp32" if str(of(settings, "optimizer")).startswith(("optimi-", "torch-")) and BASES[base] else half
    return {
        "weights_dtype": BASES[base] or stored or half,
        "adapter_dtype": sixteen,
        "autocast": half if half != "fp32" else "none",
    }


def _version(settings: Settings, fields: Fields) -> str:
    """`QUANTISED_WHOLE` when Quanto or torchao quantise the base on the GPU: bitsandbytes does so block by block as it
    loads. `TORCHAO_WHOLE` when torchao does so to 8-bit integers. `QUANTO` where Quanto leaves layers of the family in
    16 bits."""
    base = str(of(settings, "base_model_precision") or "no_change")
    on_gpu = str(of(settings, "quantize_via") or "accelerator") == "accelerator"
    if _ramtorch(settings):
        return RAMTORCH
    if base.endswith("-quanto") and of(settings, "model_family") in LEAVES_LAYERS:
        return QUANTO_WHOLE if on_gpu else QUANTO
    if on_gpu and base == "int8-torchao":
        return TORCHAO_WHOLE
    return QUANTISED_WHOLE if on_gpu and base.endswith(("-quanto", "-torchao")) else ""


def _optimizer(settings: Settings) -> Fields:
    name = str(of(settings, "optimizer") or "adamw_bf16")
    if name not in OPTIMIZERS:
        raise VplanError(f"SimpleTuner's optimizer {quoted(name)} is not priced", f"priced: {', '.join(OPTIMIZERS)}")
    # helpers/training/optimizers/adamw_bfloat16 steps one parameter after another
    return {"optimizer": OPTIMIZERS[name], "optimizer_step": "loop" if name == "adamw_bf16" else "foreach"}


def _write_optimizer(fields: Fields) -> Settings:
    words = {ours: theirs for theirs, ours in reversed(OPTIMIZERS.items())}
    return {f"{CONFIG}optimizer": words.get(fields["optimizer"], "adamw_bf16")}


def _swap(settings: Settings) -> Fields:
    """Blocks wait in host RAM as in musubi-tuner (helpers/musubi_block_swap.py), at most all but one; with RamTorch the
    linear layers of that share of the blocks do."""
    model = lookup.model(model_of(settings)["model"])
    blocks = integer(of(settings, "musubi_blocks_to_swap") or 0, "musubi_blocks_to_swap")
    if _ramtorch(settings):
        percent = number(of(settings, "ramtorch_transformer_percent", 100), "ramtorch_transformer_percent")
        blocks = round(min(percent, 100) / 100 * model.blocks)
    return {"swap_blocks": max(0, min(blocks, model.blocks - 1))}


def _ramtorch(settings: Settings) -> bool:
    return of(settings, "ramtorch") in (True, "true")


ATTENTION_ALONE = ("sd3",)
"""Families whose usual adapters are on the image stream's attention alone, where our model's are on more
(``DEFAULT_LORA_TARGET`` in helpers/models/sd3/model.py)."""


def _layers(settings: Settings) -> Fields:
    """Over a quantised base the model's usual layers are taken: no others are recorded."""
    family = str(of(settings, "model_family")).replace("-", "_")
    alone = family in ATTENTION_ALONE and _method(settings)["method"] == "lora"
    if not alone or _formats(settings)["weights_dtype"] in QUANTISED:
        return {"lora_targets": None}
    return {"lora_targets": lookup.model(model_of(settings)["model"]).lora.wide or None}


T5_TOKENS = {"sd3": 154}
"""``model_family`` -> the most tokens that T5 gives, and its default, where that is not our model's usual length
(``check_user_config`` in helpers/models/sd3/model.py); prompts are padded to it."""

CLIP_TOKENS = 77


def _prompt_length(settings: Settings) -> Fields:
    """``tokenizer_max_length`` counts T5's tokens; CLIP's stand before them."""
    most = T5_TOKENS.get(str(of(settings, "model_family")).replace("-", "_"))
    if most is None:
        return {"text_tokens": None}
    length = integer(of(settings, "tokenizer_max_length") or most, "tokenizer_max_length")
    return {
        "text_tokens": CLIP_TOKENS + (length if is_on(of(settings, "i_know_what_i_am_doing")) else min(length, most))
    }


def _ema(settings: Settings) -> Fields:
    """``ema_device`` is the CPU unless it says otherwise."""
    if of(settings, "use_ema") not in (True, "true"):
        return {"ema": "none"}
    return {"ema": "gpu" if str(of(settings, "ema_device")) in ("accelerator", "cuda") else "cpu"}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if integer(of(settings, INTERVAL) or 1, INTERVAL) > 1 and fields["gradient_checkpointing"] == "full":
        yield Remark(INTERVAL, "this family has none, and checkpoints every block")
    if of(settings, "data_backend_config") and SAMPLES not in settings:
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
        together = (interval := interval_of(settings)) is not None and interval.together
        more = "; the blocks of a segment are recomputed together, which may take one more" if together else ""
        yield f"{fields['checkpointed_blocks']} checkpointed blocks are priced as the first ones; it takes others{more}"
    if of(settings, "gradient_checkpointing_offload_attention"):
        yield f"gradient_checkpointing_offload_attention{MAY_NEED_LESS}"
    if (layers := of(settings, "flux_lora_target", "all")) != "all":
        yield f"flux_lora_target {layers} is not priced: estimated as all"
    if is_on(of(settings, "dynamo_backend")) and str(of(settings, "dynamo_backend")).lower() != "no":
        yield "torch.compile (dynamo_backend) is not estimated: CUDA graphs keep memory of their own"
    if of(settings, "optimizer") == "bnb-lion8bit-paged":
        yield "bnb-lion8bit-paged is priced as 8-bit AdamW, paged too: its one state takes half of those in host RAM"
    family = str(of(settings, "model_family")).replace("-", "_")
    if family not in T5_TOKENS and of(settings, "tokenizer_max_length"):
        yield "tokenizer_max_length is not estimated: the model's usual length of prompts is"
    if fields["ema"] == "cpu" and not is_on(of(settings, "ema_cpu_only")):
        yield "without ema_cpu_only the average goes to the GPU at each update, which is not estimated"
    for precision in TEXT_ENCODERS:
        if is_on(of(settings, precision)) and of(settings, precision) != "no_change":
            yield f"{precision}{MAY_NEED_LESS}"
    if _version(settings, fields) in (QUANTISED_WHOLE, QUANTO_WHOLE, TORCHAO_WHOLE):
        yield "without quantize_via cpu the model lies on the GPU whole in 16 bits before it is quantised"


def _nothing(fields: Fields) -> Settings:
    return {}


def _by_torchao(settings: Settings) -> str:
    return str(of(settings, "base_model_precision")).replace("-quanto", "-torchao")


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
        FunctionPair(("model",), (f"{CONFIG}model_family",), model_of, _nothing, {"model": ", ".join(MODELS)}),
        FunctionPair(("method",), (f"{CONFIG}model_type",), _method, _nothing, {"method": "lora, full"}),
        When("method", ONLY_LORA, Value("lora_rank", f"{CONFIG}lora_rank", 16, int)),
        When("method", ONLY_LORA, Value("lora_dropout", f"{CONFIG}lora_dropout", 0.1, float)),
        FunctionPair(
            ("height", "width", "frames"),
            (f"{CONFIG}resolution", f"{CONFIG}resolution_type"),
            size_of,
            _nothing,
            {"height": "resolution", "width": "resolution", "frames": "validation_num_video_frames"},
        ),
        FunctionPair(
            ("batch_size",),
            (f"{CONFIG}train_batch_size",),
            batch_of,
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
            checkpointing_of,
            write_checkpointing,
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
            encoders_of,
            _nothing,
            {
                "text_encoder": "cached, resident by text_cache_ondemand",
                "vae": "cached, resident by vae_cache_ondemand",
            },
        ),
        FunctionPair(("references",), (), references_of, _nothing, {"references": "conditioning_data"}),
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
