"""sd-scripts' words for FLUX, read at 48d368f: flux_train.py and flux_train_network.py, their configs and datasets.

Chroma is a `--model_type` of the second. lumina_train_network.py is read by the same table: what of FLUX's flags it has
means the same there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, find_model, our_defaults
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import several_gpus
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
from planner.dialects.sd_scripts.engine import AT, FULL, LORA, blocks_to_swap, engine, write_engine
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
from planner.layout.trainer_terms.sd_scripts import MASKED

MODELS = {"flux.1-dev": "flux1-dev.safetensors", "flux.1-schnell": "flux1-schnell.safetensors"}
"""Ours -> the file that its documentation names (docs/flux_train_network.md), or its repository has."""

LUMINA = "lumina_train_network.py"
BY_TYPE = {"flux": "flux.1-dev", "chroma": "chroma1-hd", LUMINA: "lumina-image-2.0"}
"""``--model_type`` of flux_train_network.py, or the other script -> ours, whatever the file is called."""


ADAPTERS = {
    "flux.1-dev": "networks.lora_flux",
    "chroma1-hd": "networks.lora_flux",
    "lumina-image-2.0": "networks.lora_lumina",
}
"""Model -> the module whose adapters are priced."""


def read_script(script: Script) -> Invocation | None:
    """A command of FLUX's scripts or Lumina 2's, or the TOML of one (--config_file) alone."""
    known = (FULL, LORA, LUMINA)
    programs = [program for program in script.programs if program.script.rpartition("/")[2] in known]
    if programs:
        invocation = read_command(programs[-1], script)
        return _as_lora(invocation) if programs[-1].script.endswith(LUMINA) else invocation
    config = script.config
    if config is not None and kohya_ss.is_own(config):
        return kohya_ss.read(script) if kohya_ss.script_of(config) in (FULL, LORA) else None
    if script.config is not None and {"gemma2", "ae", "network_module"} <= names(script.config):
        return _as_lora(read_config(LUMINA, script))
    if script.config is not None and _is_own(names(script.config)):
        return read_config(LORA if "network_module" in names(script.config) else FULL, script)
    return None


def _as_lora(invocation: Invocation) -> Invocation:
    """Settings of Lumina 2's script as those of FLUX's for LoRA, with the type of model that it has not."""
    return replace(invocation, settings={**invocation.settings, "script": LORA, "--model_type": LUMINA})


def _is_own(names: set[str]) -> bool:
    """Whether a config's keys are those of FLUX's scripts: its autoencoder's and text encoders' files, which other
    scripts and trainers do not name so (SD3's has clip_g, and no ae)."""
    return "pretrained_model_name_or_path" in names and ("ae" in names or ("t5xxl" in names and "clip_g" not in names))


def _model(settings: Settings) -> Fields:
    refuse_images_at_once(settings)
    kind = BY_TYPE[str(settings.get("--model_type", "flux"))]
    if str(settings.get("script")).endswith(LORA):
        network_module.refuse_unpriced(settings, ADAPTERS[kind])
    file = settings.get("--pretrained_model_name_or_path")
    name = settings.get("model") or (find_model(file) if kind in MODELS else None) or kind
    return {"model": lookup.model(str(name)).name}


def _write_model(fields: Fields) -> Settings:
    why = "its scripts are written for FLUX.1, HunyuanImage 2.1, SDXL, SD 1.5, SD 3 and 3.5"
    return write_model(fields, MODELS, why)


def _is_full(settings: Settings) -> bool:
    return str(settings.get("script")).endswith(FULL)


def _swap(settings: Settings) -> Fields:
    model = _model(settings)["model"]
    return {"swap_blocks": block_swap.swapped("sd-scripts", model, blocks_to_swap(settings), "--blocks_to_swap")}


T5, T5_FP8 = "t5xxl_fp16.safetensors", "t5xxl_fp8_e4m3fn.safetensors"
"""The files of T5-XXL that its documentation names (docs/flux_train_network.md)."""


def _encoder(settings: Settings) -> Fields:
    """T5-XXL stays in fp8 where its file is and the base's flag asks for it (flux_train_network.py:141); else it is
    loaded in the mixed precision's format."""
    as_it_is = settings.get("--fp8_base") and not settings.get("--fp8_base_unet")
    fp8 = as_it_is and str(settings.get("script")).endswith(LORA) and "fp8" in str(settings.get("--t5xxl")).lower()
    return {"text_encoder_dtype": "fp8" if fp8 else "bf16"}


def _write_encoder(fields: Fields) -> Settings:
    dtype = fields["text_encoder_dtype"]
    if dtype == "fp8" and fields["method"] == "lora" and fields["weights_dtype"] == "fp8":
        return {"--t5xxl": T5_FP8}
    if dtype != "bf16":
        why = "T5-XXL is bf16, or fp8 beside a base in fp8"
        raise InexpressibleError(UnsupportedValue("text_encoder_dtype", dtype, "bf16", why))
    return {}


PROMPT = ("--t5xxl_max_token_length", "--gemma2_max_token_length")
"""Tokens that a prompt is filled up to (library/strategy_flux.py, strategy_lumina.py); the second is Lumina's."""


def _text_tokens(settings: Settings) -> Fields:
    """As many as the model's own script has, where no flag says it."""
    given = next((settings[name] for name in PROMPT if settings.get(name)), None)
    return {"text_tokens": integer(given, "the prompt's tokens") if given else None}


def _write_text_tokens(fields: Fields) -> Settings:
    return {PROMPT[0]: fields["text_tokens"]} if fields["text_tokens"] else {}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    yield from highvram_remarks(settings, ", as with --xformers")
    if settings.get("--xformers"):
        yield Remark("--xformers", "FLUX has no xformers path here: its attention is torch's sdpa either way")
    if settings.get("--vae_batch_size") and not settings.get("--cache_latents"):
        yield Remark("--vae_batch_size", "it is for caching latents, and --cache_latents is not given")


def _refuses_swap(fields: Fields) -> bool:
    """Lumina's script has no such assertion."""
    return fields["model"] != BY_TYPE[LUMINA] and SWAPS_OR_OFFLOADS.when(fields)


TRAINED_TOO = {"flux.1-dev": "CLIP-L, which stays on the GPU for them,", "lumina-image-2.0": "Gemma 2"}
"""Model -> what its LoRA script trains beside it (flux_train_network.py ``train_clip_l``)."""


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    encoders = "T5-XXL and CLIP-L" if "--model_type" not in settings else "the text encoder"
    yield from resident_notes(fields, encoders)
    if fields["method"] == "full" and fields["weights_dtype"] in ("bf16", "fp16"):
        parts = f"weights, gradients and {fields['optimizer']} states"
        yield f"{parts} are in the mixed precision's format, {fields['weights_dtype']} ({AT} flux_train.py)"
    yield from shared_notes(fields)
    if fields["method"] == "lora":
        yield "LoRA estimated on the model's usual layers"
    if fields["model"] not in MODELS:
        yield f"its own code of {lookup.model(fields['model']).title} was not compared: priced as diffusers' model"
    yield from network_module.notes(settings)
    kind = BY_TYPE[str(settings.get("--model_type", "flux"))]
    encoder = TRAINED_TOO.get(kind)
    if encoder and fields["method"] == "lora" and not settings.get("--network_train_unet_only"):
        yield f"adapters on {encoder} are not estimated: --network_train_unet_only leaves them out"
    if _version(settings, fields):
        what = "each block makes a mask over all pairs of tokens for every head, and attention is never flash"
        yield f"{MASK}: {what} ({AT} library/flux_models.py)"
    elif settings.get(MASK):
        what = "no mask is made: each sample attends to its prompt's own tokens alone"
        yield f"{MASK}: {what} ({AT} library/chroma_models.py)"


MASK = "--apply_t5_attn_mask"


def _version(settings: Settings, fields: Fields) -> str:
    """`MASKED` where FLUX.1's blocks are given a mask."""
    masked = settings.get(MASK) and BY_TYPE[str(settings.get("--model_type", "flux"))] in MODELS
    return MASKED if masked else ""


FILES = ModelFlags(
    "flux",
    {
        "--clip_l": "clip_l.safetensors",
        "--t5xxl": T5,
        "--ae": "ae.safetensors",
        "--timestep_sampling": "shift",
        "--discrete_flow_shift": "3.1582",
        "--model_prediction_type": "raw",
        "--guidance_scale": "1.0",
        "--sdpa": True,
    },
    {"--network_module": "networks.lora_flux", "--network_train_unet_only": True},
)
"""docs/flux_train_network.md."""


def _write_engine(fields: Fields) -> Settings:
    return write_engine(fields, FULL if fields["method"] == "full" else LORA, engine, "--fp8_base")


def _rate(settings: Settings) -> list[str]:
    """8-bit AdamW, with a learning rate of its own where the optimizer found one by itself."""
    by_itself = str(settings.get("--optimizer_type", "")).lower() in ("prodigy", "adafactor")
    return ["--optimizer_type adamw8bit", *(["--learning_rate 1e-5"] if by_itself else [])]


FACTORED = ("--optimizer_type Adafactor", "--fused_backward_pass", "--max_grad_norm 0")
ADAFACTOR_ARGS = '--optimizer_args "relative_step=False" "scale_parameter=False" "warmup_init=False"'


def _full(fields: Fields) -> bool:
    return bool(fields["method"] == "full")


DIALECT = Dialect(
    name="sd-scripts",
    title="sd-scripts",
    source="https://github.com/kohya-ss/sd-scripts at 48d368f",
    drops_inputs=False,  # networks/lora.py `forward`: "normal dropout" of `lora_down`
    scripts=(FULL, LORA),
    steps=("--max_train_steps", "--max_train_epochs"),
    table=(
        FunctionPair(
            ("model",), ("--pretrained_model_name_or_path",), _model, _write_model, {"model": "FLUX.1, by its file"}
        ),
        Choice("method", {"full": {"script": FULL}, "lora": {"script": LORA}}, "these scripts train"),
        When("method", ONLY_LORA, Value("lora_rank", "--network_dim", 4)),
        When("method", ONLY_LORA, Value("lora_dropout", "--network_dropout", 0.0, float)),
        size_pair(),
        CHECKPOINTING,
        ACCUMULATION,
        OPTIMIZER,
        step_pair(_is_full),
        swap_pair(_swap),
        cached("text_encoder", "--cache_text_encoder_outputs"),
        cached("vae", "--cache_latents"),
        BUCKETS,
        engine_pair(engine, _write_engine, "bf16, fp16, fp32; fp8 for a frozen base", "--fp8_base"),
        VALIDATION,
        EXPANDABLE,
        GPUS,
        NODES,
        Fixed("frames", 1, "these scripts train images"),
        *our_defaults("experts", "trainable", "lora_targets", "references"),
        FunctionPair(
            ("text_tokens",), PROMPT, _text_tokens, _write_text_tokens, {"text_tokens": "--t5xxl_max_token_length"}
        ),
        FunctionPair(
            ("text_encoder_dtype",),
            ("--t5xxl",),
            _encoder,
            _write_encoder,
            {"text_encoder_dtype": "bf16; fp8 by T5's file"},
        ),
        *our_defaults("validation", "compute_dtype", "checkpointed_blocks", "ema", "vae_dtype"),
        *our_defaults(
            "vae_tiling", "vae_slicing", "inactive_expert", "group_offload", "group_offload_stream", "attention"
        ),
        COMPILE,
        *our_defaults("context_parallel", "adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    version=_version,
    clashes=(replace(SWAPS_OR_OFFLOADS, when=_refuses_swap),),
    stops=stops,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"text_encoder": "cached", "vae": "cached"}, "captions are no longer shuffled or dropped"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states", words_for=_rate),
        Move({"grad_buckets": "view"}, "free", when=several_gpus),
        Move(
            {"optimizer": "adafactor", "optimizer_step": "backward"},
            "second moments are row and column sums; the step runs inside backward, so nothing accumulates",
            words_for=lambda settings: [*FACTORED, ADAFACTOR_ARGS, "--learning_rate 1e-5"],
            when=lambda fields: fields["method"] == "full" and fields["gradient_accumulation"] == 1,
        ),
        Move(
            {"swap_blocks": 0},
            "blocks move for every step",
            by_fields=block_swap.steps("sd-scripts", tuple(range(4, 35, 4))),
        ),
        *SHARDED,
        Move(
            {"version": ""},
            "attention to a prompt's padding too",
            words_for=lambda settings: [f"without {MASK}"],
            when=lambda fields: fields["version"] == MASKED,
        ),
        Move({"weights_dtype": "fp8"}, "the frozen base is rounded to 8 bits", when=lambda fields: not _full(fields)),
        Move(
            {"text_encoder_dtype": "fp8"},
            "T5-XXL's file in fp8",
            when=lambda fields: not _full(fields) and fields["weights_dtype"] == "fp8",
        ),
    ),
    files=lambda plan, settings: files(plan, settings, FILES),
)
