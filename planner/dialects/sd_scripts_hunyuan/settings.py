"""sd-scripts' words for HunyuanImage 2.1, read at 48d368f: hunyuan_image_train_network.py.

Its model is a code of its own (library/hunyuan_image_models.py), which is priced as diffusers', and says so.
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
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import half_precision
from planner.dialects.base.script import Script
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
from planner.dialects.sd_scripts.refusals import stops
from planner.dialects.sd_scripts.shared_bindings import (
    ACCUMULATION,
    ATTENTION_MODE,
    BUCKETS,
    CHECKPOINTING,
    COMPILE,
    OPTIMIZER,
    VALIDATION,
    cell,
    engine_pair,
    size_pair,
    swap_pair,
)
from planner.layout.trainer_terms.sd_scripts import ENCODERS_ON_CPU

SCRIPT = "hunyuan_image_train_network.py"
MODEL = "hunyuan-image-2.1"
ADAPTERS = "networks.lora_hunyuan_image"
FILE = "hunyuanimage2.1.safetensors"
"""What its documentation calls the model's file (docs/hunyuan_image_train_network.md)."""


def read_script(script: Script) -> Invocation | None:
    """A command of the script, or its TOML (--config_file) alone, which names the glyphs' encoder."""
    programs = [program for program in script.programs if program.script.rpartition("/")[2] == SCRIPT]
    if programs:
        return read_command(programs[-1], script)
    if script.config is not None and {"byt5", "network_module"} <= names(script.config):
        return read_config(SCRIPT, script)
    return None


def _model(settings: Settings) -> Fields:
    """The script trains one model; its distilled sibling has a guidance embedding, which it does not load."""
    network_module.refuse_unpriced(settings, ADAPTERS)
    refuse_images_at_once(settings)
    return {"model": lookup.model(str(settings.get("model") or MODEL)).name}


def _write_model(fields: Fields) -> Settings:
    return write_model(fields, {MODEL: FILE}, "this script trains one model")


def _formats(settings: Settings) -> Fields:
    """The base is cast to the mixed precision's format unless it is scaled to fp8; adapters are fp32
    (``load_unet_lazily``, train_network.py ``train``)."""
    return formats(settings, "fp8" if settings.get("--fp8_scaled") else half_precision(settings))


def _write_formats(fields: Fields) -> Settings:
    return write_engine(fields, SCRIPT, _formats, "--fp8_scaled")


def _swap(settings: Settings) -> Fields:
    blocks = int(settings.get("--blocks_to_swap") or 0)
    return {"swap_blocks": block_swap.swapped("sd-scripts", MODEL, blocks, "--blocks_to_swap")}


def _encoder(settings: Settings) -> Fields:
    """Qwen2.5-VL stays in bf16, or in fp8 (``load_target_model``)."""
    return {"text_encoder_dtype": "fp8" if settings.get("--fp8_vl") else "bf16"}


def _write_encoder(fields: Fields) -> Settings:
    dtype = fields["text_encoder_dtype"]
    if dtype not in ("bf16", "fp8"):
        raise InexpressibleError(UnsupportedValue("text_encoder_dtype", dtype, "bf16", "bf16, or fp8 by --fp8_vl"))
    return {"--fp8_vl": True} if dtype == "fp8" else {}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    for name in ("--fp8_base", "--fp8_base_unet"):
        if settings.get(name):
            yield Remark(name, "it is not supported for this model: --fp8_scaled is")
    yield from highvram_remarks(settings)


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield from shared_notes(fields)
    yield f"its own code of the model is priced as diffusers' ({AT} library/hunyuan_image_models.py)"
    yield from resident_notes(fields, "Qwen2.5-VL and ByT5")
    yield from network_module.notes(settings)
    if settings.get("--vae_chunk_size"):
        yield "--vae_chunk_size is not priced: the VAE is priced whole"
    if settings.get("--text_encoder_cpu"):
        priced = "may take minutes each" if fields["text_encoder"] == "cached" else "are priced on the GPU all the same"
        yield f"--text_encoder_cpu: captions are encoded on the CPU and {priced}"


def _version(settings: Settings, fields: Fields) -> str:
    return ENCODERS_ON_CPU if settings.get("--text_encoder_cpu") and fields["text_encoder"] == "cached" else ""


FLAGS = ModelFlags(
    "hunyuan_image",
    {
        "--text_encoder": "qwen_2.5_vl_7b.safetensors",
        "--byt5": "byt5_small_glyphxl_fp16.safetensors",
        "--vae": "hunyuan_image_2.1_vae_fp16.safetensors",
        "--timestep_sampling": "shift",
        "--discrete_flow_shift": "5.0",
        "--model_prediction_type": "raw",
    },
    {"--network_module": ADAPTERS, "--network_train_unet_only": True},
)
"""docs/hunyuan_image_train_network.md."""


DIALECT = Dialect(
    name="sd-scripts@hunyuan-image",
    title="sd-scripts (HunyuanImage 2.1)",
    source="https://github.com/kohya-ss/sd-scripts at 48d368f",
    drops_inputs=False,  # networks/lora.py `forward`: "normal dropout" of `lora_down`
    scripts=(SCRIPT,),
    steps=("--max_train_steps", "--max_train_epochs"),
    table=(
        FunctionPair(
            ("model",),
            ("--pretrained_model_name_or_path",),
            _model,
            _write_model,
            {"model": "HunyuanImage 2.1"},
        ),
        Choice("method", {"lora": {"script": SCRIPT}}, "this script trains LoRA alone"),
        Value("lora_rank", "--network_dim", 4),
        Value("lora_dropout", "--network_dropout", 0.0, float),
        size_pair(cell(MODEL)),
        CHECKPOINTING,
        ACCUMULATION,
        OPTIMIZER,
        swap_pair(_swap),
        cached("text_encoder", "--cache_text_encoder_outputs"),
        cached("vae", "--cache_latents"),
        FunctionPair(
            ("text_encoder_dtype",),
            ("--fp8_vl",),
            _encoder,
            _write_encoder,
            {"text_encoder_dtype": "bf16, fp8"},
        ),
        BUCKETS,
        engine_pair(_formats, _write_formats, "bf16, fp16; fp8 (--fp8_scaled)", "--fp8_scaled"),
        VALIDATION,
        EXPANDABLE,
        GPUS,
        NODES,
        Fixed("frames", 1, "this script trains images"),
        Fixed("vae_dtype", "fp16", "the VAE is always fp16"),
        Fixed("optimizer_step", "foreach", "the LoRA scripts have no other"),
        *our_defaults("experts", "trainable", "lora_targets", "references", "validation", "compute_dtype"),
        *our_defaults("checkpointed_blocks", "ema", "vae_tiling", "vae_slicing", "inactive_expert", "group_offload"),
        ATTENTION_MODE,
        COMPILE,
        *our_defaults("group_offload_stream", "context_parallel", "adapter_inputs"),
        *our_defaults("nested_checkpointing", "fsdp_replicas", "text_tokens"),
    ),
    read_script=read_script,
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
            by_fields=block_swap.steps("sd-scripts", tuple(range(4, 37, 4))),
        ),
        Move({"weights_dtype": "fp8"}, "the frozen base is rounded to 8 bits"),
        Move(
            {"text_encoder_dtype": "fp8"},
            "Qwen2.5-VL is rounded to 8 bits",
        ),
        Move(
            {"version": ENCODERS_ON_CPU},
            "captions are encoded on the CPU, minutes each",
            words_for=lambda settings: ["--text_encoder_cpu"],
            when=lambda fields: fields["text_encoder"] == "cached" and fields["version"] == "",
        ),
    ),
    version=_version,
    files=lambda plan, settings: files(plan, settings, FLAGS),
)
