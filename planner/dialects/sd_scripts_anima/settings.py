"""sd-scripts' words for Anima, read at 48d368f: anima_train_network.py.

Its model is a code of its own (library/anima_models.py), which is priced as diffusers'. Rehearsed on a virtual
GPU of 80 GB (LoRA of rank 8, 1024x1024) it takes as much with checkpoints, and 7 % less without: its
norms keep queries and keys once, in fp32, where diffusers' keep them in 16 bits too.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.dialects.base import block_swap
from planner.dialects.base.bindings import (
    Choice,
    Fields,
    Fixed,
    FunctionPair,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
    Value,
)
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, our_defaults
from planner.dialects.base.dialect import Clash, Dialect, Invocation, Move
from planner.dialects.base.launchers import half_precision
from planner.dialects.base.script import Script
from planner.dialects.base.values import integer
from planner.dialects.sd_scripts import network_module
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
    ATTENTION_MODE,
    BUCKETS,
    COMPILE,
    OPTIMIZER,
    VALIDATION,
    cell,
    engine_pair,
    size_pair,
    swap_pair,
)
from planner.errors import VplanError

SCRIPT, FULL = "anima_train_network.py", "anima_train.py"
MODEL = "anima"
ADAPTERS = "networks.lora_anima"
FILE = "anima-preview3-base.safetensors"


def read_script(script: Script) -> Invocation | None:
    """A command of the script, or its TOML (--config_file) alone, which names Qwen3's file. Raises a VplanError for the
    script of full training."""
    if any(program.script.rpartition("/")[2] == FULL for program in script.programs):
        raise VplanError(f"{FULL} of sd-scripts is not supported (it trains the conditioner too)", f"{SCRIPT} is read")
    programs = [program for program in script.programs if program.script.rpartition("/")[2] == SCRIPT]
    if programs:
        return read_command(programs[-1], script)
    if script.config is not None and {"qwen3", "network_module"} <= names(script.config):
        return read_config(SCRIPT, script)
    return None


def _model(settings: Settings) -> Fields:
    network_module.refuse_unpriced(settings, ADAPTERS)
    refuse_images_at_once(settings)
    given = network_module.arguments(settings)
    for key in ("train_llm_adapter", "include_patterns", "exclude_patterns"):
        if key in given:
            raise VplanError(f"--network_args {key} is not priced (adapters on other layers)", f"leave {key} out")
    return {"model": lookup.model(str(settings.get("model") or MODEL)).name}


def _write_model(fields: Fields) -> Settings:
    return write_model(fields, {MODEL: FILE}, "this script trains one model")


def _targets(settings: Settings) -> Fields:
    """Every linear layer of the blocks but modulation (networks/lora_anima.py)."""
    return {"lora_targets": lookup.model(MODEL).lora.wide}


def _write_targets(fields: Fields) -> Settings:
    wide = lookup.model(MODEL).lora.wide
    if fields["lora_targets"] != wide:
        why = "its adapters are on every linear layer of the blocks but modulation"
        raise InexpressibleError(UnsupportedValue("lora_targets", fields["lora_targets"], wide, why))
    return {}


CPU_OFFLOAD, UNSLOTH = "--cpu_offload_checkpointing", "--unsloth_offload_checkpointing"


def _checkpointing(settings: Settings) -> Fields:
    """Checkpoints by themselves, or on the host. With ``--cpu_offload_checkpointing`` a block leaves its output there,
    and the next one takes the device from it (``custom_forward``): a rehearsal ended in the second block."""
    if settings.get(CPU_OFFLOAD):
        fault = f"{CPU_OFFLOAD} ends in the second block ({AT}: Expected all tensors to be on the same device)"
        raise VplanError(fault, f"use {UNSLOTH}")
    if settings.get(UNSLOTH):
        return {"gradient_checkpointing": "offload"}
    return {"gradient_checkpointing": "full" if settings.get("--gradient_checkpointing") else "none"}


def _write_checkpointing(fields: Fields) -> Settings:
    words: dict[str, Settings] = {
        "none": {},
        "full": {"--gradient_checkpointing": True},
        "offload": {"--gradient_checkpointing": True, UNSLOTH: True},
    }
    kind = fields["gradient_checkpointing"]
    if kind not in words:
        raise InexpressibleError(UnsupportedValue("gradient_checkpointing", kind, "full", f"none, full, or {UNSLOTH}"))
    return words[kind]


def _formats(settings: Settings) -> Fields:
    """The base is cast to the mixed precision's format; adapters are fp32 (train_network.py ``train``)."""
    return formats(settings, half_precision(settings))


def _write_formats(fields: Fields) -> Settings:
    return write_engine(fields, SCRIPT, _formats)


def _swap(settings: Settings) -> Fields:
    blocks = int(settings.get("--blocks_to_swap") or 0)
    if blocks and settings.get(UNSLOTH):
        raise VplanError(f"--blocks_to_swap stops beside {UNSLOTH}", "leave one of them out")
    return {"swap_blocks": block_swap.swapped("sd-scripts", MODEL, blocks, "--blocks_to_swap")}


TOKENS = "--t5_max_token_length"


def _text_tokens(settings: Settings) -> Fields:
    """What T5's tokenizer fills prompts up to, which is what the blocks read (library/strategy_anima.py)."""
    return {"text_tokens": integer(settings[TOKENS], "T5's tokens") if settings.get(TOKENS) else None}


def _write_text_tokens(fields: Fields) -> Settings:
    return {TOKENS: fields["text_tokens"]} if fields["text_tokens"] else {}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    for name in ("--fp8_base", "--fp8_base_unet"):
        if settings.get(name):
            yield Remark(name, "it is not supported for this model, and switched off")
    yield from highvram_remarks(settings)


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield from shared_notes(fields)
    if fields["gradient_checkpointing"] == "none":
        yield (
            "its own code of the model is priced as diffusers': in a rehearsal without checkpoints it took 7 % less, "
            "with them as much"
        )
    yield from resident_notes(fields, "Qwen3")
    yield from network_module.notes(settings)
    for flag in ("--vae_chunk_size", "--vae_disable_cache"):
        if settings.get(flag):
            yield f"{flag} is not priced: the VAE is priced whole"
    if not settings.get("--network_train_unet_only") and fields["text_encoder"] != "cached":
        yield "adapters on Qwen3 are not estimated: --network_train_unet_only leaves them out"


FLAGS = ModelFlags(
    "anima",
    {
        "--qwen3": "qwen_3_06b_base.safetensors",
        "--vae": "qwen_image_vae.safetensors",
        "--timestep_sampling": "sigmoid",
        "--discrete_flow_shift": "1.0",
    },
    {"--network_module": ADAPTERS, "--network_train_unet_only": True},
)
"""docs/anima_train_network.md; files as diffusers scripts/convert_anima_to_diffusers.py names them."""


DIALECT = Dialect(
    name="sd-scripts@anima",
    title="sd-scripts (Anima)",
    source="https://github.com/kohya-ss/sd-scripts at 48d368f",
    drops_inputs=False,  # networks/lora_anima.py `forward`: "normal dropout" of `lora_down`
    scripts=(SCRIPT,),
    steps=("--max_train_steps", "--max_train_epochs"),
    table=(
        FunctionPair(("model",), ("--pretrained_model_name_or_path",), _model, _write_model, {"model": "Anima"}),
        Choice("method", {"lora": {"script": SCRIPT}}, "this script trains LoRA alone"),
        Value("lora_rank", "--network_dim", 4),
        Value("lora_dropout", "--network_dropout", 0.0, float),
        FunctionPair(("lora_targets",), (), _targets, _write_targets, {"lora_targets": "every layer but modulation"}),
        size_pair(cell(MODEL)),
        FunctionPair(
            ("gradient_checkpointing",),
            ("--gradient_checkpointing", UNSLOTH),
            _checkpointing,
            _write_checkpointing,
            {"gradient_checkpointing": f"none, full, offload ({UNSLOTH})"},
        ),
        ACCUMULATION,
        OPTIMIZER,
        swap_pair(_swap),
        cached("text_encoder", "--cache_text_encoder_outputs"),
        cached("vae", "--cache_latents"),
        BUCKETS,
        engine_pair(_formats, _write_formats, "bf16, fp16"),
        VALIDATION,
        EXPANDABLE,
        GPUS,
        NODES,
        Fixed("frames", 1, "this script trains images"),
        Fixed("optimizer_step", "foreach", "the LoRA scripts have no other"),
        FunctionPair(("text_tokens",), (TOKENS,), _text_tokens, _write_text_tokens, {"text_tokens": TOKENS}),
        *our_defaults("experts", "trainable", "references", "validation", "compute_dtype"),
        *our_defaults("text_encoder_dtype", "vae_dtype", "checkpointed_blocks", "ema", "vae_tiling", "vae_slicing"),
        *our_defaults("inactive_expert", "group_offload", "group_offload_stream", "context_parallel"),
        ATTENTION_MODE,
        COMPILE,
        *our_defaults("adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
    ),
    read_script=read_script,
    clashes=(
        Clash(SWAPS_OR_OFFLOADS.when, "swap_blocks", 0, UNSLOTH, f"refused with --blocks_to_swap ({AT} {SCRIPT})"),
    ),
    stops=stops,
    remarks=_remarks,
    notes=_notes,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"text_encoder": "cached", "vae": "cached"}, "captions are no longer shuffled or dropped"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move(
            {"swap_blocks": 0},
            "blocks move for every step",
            by_fields=block_swap.steps("sd-scripts", tuple(range(4, 27, 4))),
        ),
    ),
    files=lambda plan, settings: files(plan, settings, FLAGS),
)
