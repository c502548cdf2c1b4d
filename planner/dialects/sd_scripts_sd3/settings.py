"""sd-scripts' words for Stable Diffusion 3 and 3.5, read at 48d368f: sd3_train_network.py and sd3_train.py."""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.dialects.base import block_swap
from planner.dialects.base.bindings import (
    ONLY_LORA,
    Choice,
    Fields,
    Fixed,
    FunctionPair,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
    Value,
    When,
)
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, find_checkpoint, our_defaults, require_model
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import half_precision
from planner.dialects.base.script import Script
from planner.dialects.base.values import integer
from planner.dialects.sd_scripts import kohya_ss, network_module
from planner.dialects.sd_scripts.common import (
    cached,
    highvram_remarks,
    names,
    read_command,
    read_config,
    refuse_images_at_once,
    resident_notes,
    shared_notes,
    write_model,
)
from planner.dialects.sd_scripts.engine import AT, formats, write_engine
from planner.dialects.sd_scripts.files import ModelFlags, files
from planner.dialects.sd_scripts.refusals import SWAPS_OR_OFFLOADS, stops
from planner.dialects.sd_scripts.shared_bindings import (
    ACCUMULATION,
    BUCKETS,
    CHECKPOINTING,
    COMPILE,
    OPTIMIZER,
    SHARDED,
    VALIDATION,
    engine_pair,
    size_pair,
    step_pair,
    swap_pair,
)
from planner.errors import VplanError
from planner.spec.job import SPLIT

LORA, FULL = "sd3_train_network.py", "sd3_train.py"
SCRIPTS = (LORA, FULL)
ADAPTERS = "networks.lora_sd3"
MODELS = {
    "sd3.5-medium": "sd3.5_medium.safetensors",
    "sd3.5-large": "sd3.5_large.safetensors",
    "sd3-medium": "sd3_medium.safetensors",
}
"""Ours -> the file of its weights on the Hub."""

LAYERS = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("net.0.proj", "net.2", "norm1.linear", "norm1_context.linear"),
)
"""Every linear layer of a block, by diffusers' names (networks/lora_sd3.py ``SD3_TARGET_REPLACE_MODULE``)."""

UNPRICED = ("--train_text_encoder", "--train_t5xxl", "--use_t5xxl_cache_only", "--fused_optimizer_groups")
"""Flags of sd3_train.py that change what is on the GPU and are not priced."""

TEXT_TOKENS = (77, 256)
"""Of CLIP, and of T5-XXL unless ``--t5xxl_max_token_length`` says otherwise; they follow one another
(library/strategy_sd3.py ``concat_encodings``)."""


def read_script(script: Script) -> Invocation | None:
    """A command of one of the scripts, or its TOML (--config_file) alone, which names CLIP-G's file."""
    programs = [program for program in script.programs if program.script.rpartition("/")[2] in SCRIPTS]
    if programs:
        return read_command(programs[-1], script)
    config = script.config
    if config is not None and kohya_ss.is_own(config):
        return kohya_ss.read(script) if kohya_ss.script_of(config) in SCRIPTS else None
    if config is not None and {"clip_g", "pretrained_model_name_or_path"} <= names(config):
        return read_config(LORA if "network_module" in names(config) else FULL, script)
    return None


def _is_full(settings: Settings) -> bool:
    return str(settings.get("script")).endswith(FULL)


def _model(settings: Settings) -> Fields:
    """Both scripts tell the models apart by their weights, so the file's name must say which it is."""
    refuse_images_at_once(settings)
    if not _is_full(settings):
        network_module.refuse_unpriced(settings, ADAPTERS)
    for name in UNPRICED:
        if _is_full(settings) and settings.get(name):
            raise VplanError(f"{name} is not priced", "leave it out")
    found = find_checkpoint(settings.get("--pretrained_model_name_or_path"))
    if "model" in settings or not found:
        found = lookup.model(require_model(settings, "--pretrained_model_name_or_path")).name
    if found not in MODELS:
        raise VplanError(f"{found} is no Stable Diffusion 3, which these scripts train", "add --model sd3.5-large")
    return {"model": found}


def _write_model(fields: Fields) -> Settings:
    return write_model(fields, MODELS, "these scripts train Stable Diffusion 3 and 3.5")


STEP = 32
"""Pixels that images are cut to whole steps of (``verify_bucket_reso_steps(32)``)."""


def _formats(settings: Settings) -> Fields:
    """The base is cast to the mixed precision's format unless it is fp8, and adapters are fp32. Full training keeps the
    file's format, which is of 16 bits for all three (``match_mixed_precision``)."""
    half = half_precision(settings)
    if _is_full(settings):
        return formats(settings, half if half != "fp32" else "bf16")
    return formats(settings, "fp8" if settings.get("--fp8_base") or settings.get("--fp8_base_unet") else half)


def _write_formats(fields: Fields) -> Settings:
    return write_engine(fields, FULL if fields["method"] == "full" else LORA, _formats, "--fp8_base")


def _write_targets(fields: Fields) -> Settings:
    if fields["lora_targets"] != LAYERS:
        why = f"adapters are on every linear layer of a block ({AT} networks/lora_sd3.py)"
        raise InexpressibleError(UnsupportedValue("lora_targets", fields["lora_targets"], LAYERS, why))
    return {}


def _swap(settings: Settings) -> Fields:
    blocks = int(settings.get("--blocks_to_swap") or 0)
    return {"swap_blocks": block_swap.swapped("sd-scripts", _model(settings)["model"], blocks, "--blocks_to_swap")}


def _text_tokens(settings: Settings) -> Fields:
    clip, usual = TEXT_TOKENS
    t5 = integer(settings.get("--t5xxl_max_token_length") or usual, "--t5xxl_max_token_length")
    return {"text_tokens": clip + t5}


def _write_text_tokens(fields: Fields) -> Settings:
    clip, usual = TEXT_TOKENS
    t5 = (fields["text_tokens"] or lookup.model(fields["model"]).shape.text_tokens) - clip
    if fields["text_tokens"] is None or t5 < 1:
        why = "CLIP's tokens and T5's follow one another"
        raise InexpressibleError(UnsupportedValue("text_tokens", fields["text_tokens"], clip + max(t5, 1), why))
    return {"--t5xxl_max_token_length": t5} if t5 != usual else {}


def _vae_dtype(settings: Settings) -> Fields:
    return {"vae_dtype": half_precision(settings)}


def _write_vae_dtype(fields: Fields) -> Settings:
    half = "bf16" if fields["sharding"] in SPLIT else fields["autocast"] if fields["autocast"] != "none" else "fp32"
    if fields["vae_dtype"] != half:
        why = "it is loaded in --mixed_precision's format"
        raise InexpressibleError(UnsupportedValue("vae_dtype", fields["vae_dtype"], half, why))
    return {}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    for name in ("--apply_t5_attn_mask", "--apply_lg_attn_mask"):
        if settings.get(name):
            yield Remark(name, "the model is given no mask (TODO in sd3_train_network.py)")
    if settings.get("--max_token_length"):
        yield Remark("--max_token_length", "it is not used by these scripts")
    yield from highvram_remarks(settings)


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield from shared_notes(fields)
    yield from resident_notes(fields, "CLIP-L, CLIP-G and T5-XXL")
    if fields["method"] == "full":
        yield f"weights, gradients and {fields['optimizer']} states are in the format of the file, 16 bits ({AT})"
    elif not settings.get("--network_train_unet_only"):
        yield "adapters on CLIP-L and CLIP-G are not estimated: --network_train_unet_only leaves them out"
    yield from network_module.notes(settings)


FLAGS = ModelFlags(
    "sd3",
    {
        "--clip_l": "clip_l.safetensors",
        "--clip_g": "clip_g.safetensors",
        "--t5xxl": "t5xxl_fp16.safetensors",
        "--training_shift": "3.0",
        "--weighting_scheme": "uniform",
        "--sdpa": True,
    },
    {"--network_module": ADAPTERS, "--network_train_unet_only": True},
)
"""docs/sd3_train_network.md."""

DIALECT = Dialect(
    name="sd-scripts@mmdit",
    title="sd-scripts (Stable Diffusion 3)",
    source="https://github.com/kohya-ss/sd-scripts at 48d368f",
    drops_inputs=False,  # networks/lora_sd3.py takes LoRAModule of lora_flux.py: dropout of `lora_down`
    scripts=SCRIPTS,
    steps=("--max_train_steps", "--max_train_epochs"),
    table=(
        FunctionPair(
            ("model",), ("--pretrained_model_name_or_path",), _model, _write_model, {"model": ", ".join(MODELS)}
        ),
        Choice("method", {"full": {"script": FULL}, "lora": {"script": LORA}}, "these scripts train"),
        When("method", ONLY_LORA, Value("lora_rank", "--network_dim", 4)),
        When("method", ONLY_LORA, Value("lora_dropout", "--network_dropout", 0.0, float)),
        When(
            "method",
            ONLY_LORA,
            FunctionPair(
                ("lora_targets",),
                (),
                lambda settings: {"lora_targets": LAYERS},
                _write_targets,
                {"lora_targets": "every linear layer of a block"},
            ),
        ),
        size_pair(lambda settings: STEP),
        CHECKPOINTING,
        ACCUMULATION,
        OPTIMIZER,
        step_pair(_is_full),
        swap_pair(_swap),
        cached("text_encoder", "--cache_text_encoder_outputs"),
        cached("vae", "--cache_latents"),
        BUCKETS,
        engine_pair(_formats, _write_formats, "bf16, fp16, fp32; fp8 for a frozen base", "--fp8_base"),
        VALIDATION,
        EXPANDABLE,
        GPUS,
        NODES,
        Fixed("frames", 1, "these scripts train images"),
        FunctionPair(
            ("text_tokens",),
            ("--t5xxl_max_token_length",),
            _text_tokens,
            _write_text_tokens,
            {"text_tokens": "77 and --t5xxl_max_token_length"},
        ),
        FunctionPair(("vae_dtype",), (), _vae_dtype, _write_vae_dtype, {"vae_dtype": "--mixed_precision"}),
        *our_defaults("experts", "trainable", "references", "validation", "compute_dtype"),
        *our_defaults("checkpointed_blocks", "ema", "vae_tiling", "vae_slicing", "inactive_expert", "group_offload"),
        *our_defaults("text_encoder_dtype", "group_offload_stream", "attention", "context_parallel", "adapter_inputs"),
        COMPILE,
        *our_defaults("nested_checkpointing", "fsdp_replicas"),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    clashes=(SWAPS_OR_OFFLOADS,),
    stops=stops,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"text_encoder": "cached", "vae": "cached"}, "captions are no longer shuffled or dropped"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move(
            {"optimizer": "adafactor", "optimizer_step": "backward"},
            "second moments are row and column sums; the step runs inside backward, so nothing accumulates",
            when=lambda fields: fields["method"] == "full" and fields["gradient_accumulation"] == 1,
        ),
        Move(
            {"swap_blocks": 0},
            "blocks move for every step",
            by_fields=block_swap.steps("sd-scripts", tuple(range(4, 37, 4))),
        ),
        *SHARDED,
        Move(
            {"weights_dtype": "fp8"},
            "the frozen base is rounded to 8 bits",
            when=lambda fields: fields["method"] == "lora",
        ),
    ),
    files=lambda plan, settings: files(plan, settings, FLAGS),
)
