"""sd-scripts' words for SDXL, SD 1.5 and SD 2.1, read at 48d368f: sdxl_train_network.py, train_network.py and
sdxl_train.py.

Their U-Net is kohya's own code, and its LoRA trains the text encoders too unless that is switched off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
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
    When,
)
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, our_defaults
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import half_precision
from planner.dialects.base.script import Script
from planner.dialects.base.values import integer, number
from planner.dialects.sd_scripts import kohya_ss, lycoris_network, network_module
from planner.dialects.sd_scripts.common import (
    cached,
    highvram_remarks,
    inside,
    names,
    read_command,
    read_config,
    refuse_images_at_once,
    shared_notes,
    size,
    write_model,
)
from planner.dialects.sd_scripts.engine import AT, formats, is_16_bits, write_engine
from planner.dialects.sd_scripts.files import ModelFlags, files
from planner.dialects.sd_scripts.refusals import stops
from planner.dialects.sd_scripts.shared_bindings import (
    ACCUMULATION,
    BUCKETS,
    COMPILE,
    OPTIMIZER,
    SHARDED,
    VALIDATION,
    engine_pair,
    size_pair,
)
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.sd_scripts.unet import LOW_RAM
from planner.spec.job import SPLIT
from planner.spec.plan import Plan

SDXL_LORA, SD_LORA, SDXL_FULL = "sdxl_train_network.py", "train_network.py", "sdxl_train.py"
SCRIPTS = (SDXL_LORA, SD_LORA, SDXL_FULL)
OTHERS = ("flux_train.py", "flux_train_network.py", "sd3_train.py", "sd3_train_network.py")
"""Scripts of kohya_ss that are read elsewhere."""
FIX = f"supported scripts: {', '.join((*SCRIPTS, *OTHERS))}"
SDXL_NAMES = re.compile(r"xl|pony|illustrious|noob|animagine", re.IGNORECASE)
"""What the file names of checkpoints in SDXL's shape have in them."""


def read_script(script: Script) -> Invocation | None:
    """A command of one of the scripts, or the TOML of one (--config_file) alone."""
    programs = [program for program in script.programs if program.script.rpartition("/")[2] in SCRIPTS]
    if programs:
        return read_command(programs[-1], script)
    config = script.config
    if config is not None and kohya_ss.is_own(config):
        if (name := kohya_ss.script_of(config)) in SCRIPTS:
            return kohya_ss.read(script)
        if name not in OTHERS:
            raise VplanError(
                f"{script.name} is kohya_ss's, for {name} of sd-scripts, whose settings are not read from there", FIX
            )
        return None
    own = {"pretrained_model_name_or_path", "network_module"}
    if config is None or not own <= names(config) or names(config) & {"ae", "t5xxl", "clip_g", "qwen3", "dit"}:
        return None
    return read_config(_script_of(config), script)


def _script_of(config: dict[str, Any]) -> str:
    """Which of the two LoRA scripts a config alone is for: by its model, and by what only SDXL's has."""
    path = next((str(value) for name, value in _leaves(config) if name == "pretrained_model_name_or_path"), "")
    sdxl = SDXL_NAMES.search(path) or {"cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"} & names(
        config
    )
    return SDXL_LORA if sdxl else SD_LORA


def _leaves(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value


def _script(settings: Settings) -> str:
    return str(settings.get("script", SDXL_LORA)).rpartition("/")[2]


def _model(settings: Settings) -> Fields:
    """The script says which: every checkpoint that sdxl_train_network.py loads has SDXL's shape, and every one that
    train_network.py loads SD 1.5's, unless --v2 says SD 2's."""
    if settings.get("model"):
        return {"model": lookup.model(str(settings["model"])).name}
    if _script(settings) != SD_LORA:
        return {"model": "sdxl"}
    return {"model": "sd2.1" if settings.get("--v2") else "sd1.5"}


SD = ("sd1.5", "sd2.1")
"""Ours that train_network.py trains, with one text encoder."""

FILES = {
    "sdxl": "sd_xl_base_1.0.safetensors",
    "sd1.5": "v1-5-pruned.safetensors",
    "sd2.1": "v2-1_768-ema-pruned.safetensors",
}
"""Ours -> the file of its weights on the Hub."""


def _write_model(fields: Fields) -> Settings:
    settings = write_model(fields, FILES, "these scripts train SDXL, SD 1.5 and SD 2.1")
    velocity: Settings = {"--v2": True, "--v_parameterization": True} if fields["model"] == "sd2.1" else {}
    return settings | velocity


def _method(settings: Settings) -> Fields:
    _refuse(settings)
    return {"method": "full" if _script(settings) == SDXL_FULL else "lora"}


def _write_method(fields: Fields) -> Settings:
    scripts = {"lora": SD_LORA} if fields["model"] in SD else {"lora": SDXL_LORA, "full": SDXL_FULL}
    if fields["method"] not in scripts:
        why = "its scripts train a LoRA, and SDXL in full"
        raise InexpressibleError(UnsupportedValue("method", fields["method"], "lora", why))
    return {"script": scripts[fields["method"]]}


def _refuse(settings: Settings) -> None:
    """Raises a VplanError, in one line, for what changes memory and is not priced."""
    refuse_images_at_once(settings)
    script = _script(settings)
    if settings.get("--cpu_offload_checkpointing"):
        raise VplanError(
            f"--cpu_offload_checkpointing stops {script}: its U-Net has no such checkpointing", "leave it out"
        )
    if script == SDXL_FULL:
        rates = [settings.get(f"--learning_rate_te{number}") for number in (1, 2)]
        if settings.get("--train_text_encoder") and any(rate is not None and float(rate) == 0 for rate in rates):
            fault = "training one of SDXL's text encoders is not priced"
            raise VplanError(fault, "leave --learning_rate_te1 and --learning_rate_te2 out")
        if settings.get("--fused_optimizer_groups"):
            raise VplanError("--fused_optimizer_groups is not priced", "use --fused_backward_pass with Adafactor")
        return
    module = str(settings.get("--network_module") or "networks.lora")
    if lycoris_network.is_lycoris(settings):
        lycoris_network.network_of(settings, lookup.model(_model(settings)["model"]))
        return
    if module != "networks.lora":
        fix = "check it with --network_module networks.lora, whose adapters are on linear layers"
        raise VplanError(f"--network_module {quoted(module)} is not priced", fix)
    network_module.refuse_unknown_rank(settings)
    network_module.refuse_arguments(settings, network_module.OF_U_NETS)
    if settings.get("--network_train_text_encoder_only"):
        raise VplanError("--network_train_text_encoder_only is not priced", "leave it out")
    if settings.get("--cache_text_encoder_outputs") and trains_text_encoders(settings):
        raise VplanError(
            f"{script} refuses --cache_text_encoder_outputs while the text encoders are trained",
            "add --network_train_unet_only",
        )


def trains_text_encoders(settings: Settings) -> bool:
    """Whether adapters are put on the text encoders as well, as the LoRA scripts do unless told otherwise, or full
    training is told to take both along."""
    if _script(settings) == SDXL_FULL:
        return bool(settings.get("--train_text_encoder"))
    return not settings.get("--network_train_unet_only")


def _targets(settings: Settings) -> Fields:
    model = lookup.model(_model(settings)["model"])
    if lycoris_network.is_lycoris(settings):
        return {"lora_targets": lycoris_network.network_of(settings, model).targets}
    return {"lora_targets": model.lora.wide or None}


def _rank(settings: Settings) -> Fields:
    """Of LyCORIS' adapters that of the LoRA with as many numbers."""
    if lycoris_network.is_lycoris(settings):
        network = lycoris_network.network_of(settings, lookup.model(_model(settings)["model"]))
        return {"lora_rank": network.rank, "lora_dropout": 0.0}
    return {
        "lora_rank": integer(settings.get("--network_dim") or 4, "--network_dim"),
        "lora_dropout": number(settings.get("--network_dropout") or 0.0, "--network_dropout"),
    }


def _write_rank(fields: Fields) -> Settings:
    """Of a LoRA."""
    settings: Settings = {"--network_dim": fields["lora_rank"]}
    return settings | ({"--network_dropout": fields["lora_dropout"]} if fields["lora_dropout"] else {})


def _write_targets(fields: Fields) -> Settings:
    layers = lookup.model(fields["model"]).lora.wide or None
    if fields["lora_targets"] != layers:
        why = f"adapters are on every linear layer of a transformer, and on its projections ({AT} networks/lora.py)"
        raise InexpressibleError(UnsupportedValue("lora_targets", fields["lora_targets"], layers, why))
    return {}


def _step(settings: Settings) -> Fields:
    """The LoRA scripts take ``--fused_backward_pass`` and do not look at it (train_network.py)."""
    fused = settings.get("--fused_backward_pass") and _script(settings) == SDXL_FULL
    return {"optimizer_step": "backward" if fused else "foreach"}


def _write_step(fields: Fields) -> Settings:
    step = fields["optimizer_step"]
    if step == "foreach":
        return {}
    if step != "backward" or fields["method"] != "full":
        why = "--fused_backward_pass is all it has, for full training"
        raise InexpressibleError(UnsupportedValue("optimizer_step", step, "foreach", why))
    return {"--fused_backward_pass": True}


def _formats(settings: Settings) -> Fields:
    """LoRA's base is cast to the mixed precision's format and its adapters are fp32; full training keeps fp32 weights;
    ``--full_bf16`` and ``--full_fp16`` train in 16 bits (train_network.py ``train``, sdxl_train.py ``train``)."""
    lora = _script(settings) != SDXL_FULL
    return formats(settings, half_precision(settings) if lora or is_16_bits(settings) else "fp32")


def _write_formats(fields: Fields) -> Settings:
    script = SDXL_FULL if fields["method"] == "full" else SDXL_LORA
    return write_engine(fields, script, _formats)


def _fp8(settings: Settings) -> bool:
    return bool(_script(settings) != SDXL_FULL and (settings.get("--fp8_base") or settings.get("--fp8_base_unet")))


def _version(settings: Settings, fields: Fields) -> str:
    """Of the terms in `planner.layout.trainer_terms.sd_scripts.unet`."""
    low_ram = LOW_RAM if settings.get("--lowram") else ""
    return "-".join(filter(None, (*_trained(settings, fields), low_ram)))


def _trained(settings: Settings, fields: Fields) -> tuple[str, ...]:
    if _script(settings) == SDXL_FULL:
        return ("whole-te",) if trains_text_encoders(settings) else ()
    if lycoris_network.is_lycoris(settings):
        return (lycoris_network.network_of(settings, lookup.model(fields["model"])).version,)
    return "te" if trains_text_encoders(settings) else "", "fp8" if _fp8(settings) else ""


def _text_encoder(settings: Settings) -> Fields:
    """The script of SD 1.5 and 2.1 has no cache for it."""
    on = settings.get("--cache_text_encoder_outputs") or settings.get("--cache_text_encoder_outputs_to_disk")
    cached_outputs = on and _script(settings) != SD_LORA
    whole = _fp8(settings) and not settings.get("--fp8_base_unet") and not cached_outputs
    dtype = "fp8" if whole else half_precision(settings)
    if _script(settings) == SDXL_FULL and trains_text_encoders(settings):
        dtype = _formats(settings)["weights_dtype"]
    return {"text_encoder": "cached" if cached_outputs else "resident", "text_encoder_dtype": dtype}


def _half(fields: Fields) -> str:
    """The mixed precision that is written (`write_engine`), fp32 for none."""
    if fields["sharding"] in SPLIT:
        return "bf16"
    return str(fields["autocast"]) if fields["autocast"] != "none" else "fp32"


def _write_text_encoder(fields: Fields) -> Settings:
    """Text encoders are not trained unless the plan is of a command that does (`_version`)."""
    half = _half(fields)
    kept, dtype = fields["text_encoder"], fields["text_encoder_dtype"]
    places = ("resident",) if fields["model"] in SD else ("resident", "cached")
    wrong = []
    if kept not in places:
        why = "its text encoder stays on the GPU" if places == ("resident",) else "they are cached, or stay on the GPU"
        wrong.append(UnsupportedValue("text_encoder", kept, places[-1], why))
    if dtype != half:
        wrong.append(UnsupportedValue("text_encoder_dtype", dtype, half, "it is loaded in --mixed_precision's format"))
    if wrong:
        raise InexpressibleError(*wrong)
    settings: Settings = {"--cache_text_encoder_outputs": True} if kept == "cached" else {}
    trained = "te" in re.split("[@-]", str(fields.get("version", "")))
    if fields["method"] == "lora" and (kept == "cached" or not trained):
        settings["--network_train_unet_only"] = True
    return settings


def _low_ram(version: str) -> Move:
    return Move(
        {"version": "-".join(filter(None, (version, LOW_RAM)))},
        "models are read on the GPU, in fp32, not in RAM",
        words_for=lambda settings: ["--lowram"],
        when=lambda fields: fields["version"] == version,
    )


MARKS = 2
"""Tokens that begin and end a prompt: one pair for captions of 75, 150 or 225 (library/strategy_sdxl.py,
library/strategy_sd.py)."""
LONGER = (150, 225)


def _text_tokens(settings: Settings) -> Fields:
    length = settings.get("--max_token_length")
    return {"text_tokens": int(length) + MARKS if length else None}


def _write_text_tokens(fields: Fields) -> Settings:
    tokens = fields["text_tokens"]
    usual = lookup.model(fields["model"]).shape.text_tokens
    if tokens in (None, usual):
        return {}
    if tokens - MARKS not in LONGER:
        raise InexpressibleError(UnsupportedValue("text_tokens", tokens, None, "--max_token_length is 150 or 225"))
    return {"--max_token_length": tokens - MARKS}


def _step_of(settings: Settings) -> int:
    """Images are cut to whole steps of a bucket, within the resolution's pixels (library/train_util.py
    ``BucketManager``)."""
    return lookup.model(_model(settings)["model"]).shape.size_multiple


def _vae_dtype(settings: Settings) -> Fields:
    return {"vae_dtype": "fp32" if settings.get("--no_half_vae") else half_precision(settings)}


def _write_vae_dtype(fields: Fields) -> Settings:
    half = _half(fields)
    if fields["vae_dtype"] not in (half, "fp32"):
        why = "it is loaded in --mixed_precision's format, or in fp32 (--no_half_vae)"
        raise InexpressibleError(UnsupportedValue("vae_dtype", fields["vae_dtype"], half, why))
    return {"--no_half_vae": True} if fields["vae_dtype"] != half else {}


def _vae_slicing(settings: Settings) -> Fields:
    """A batch is encoded ``--vae_batch_size`` images at a time, one by default (train_network.py ``process_batch``)."""
    one = int(settings.get("--vae_batch_size", 1)) == 1
    return {"vae_slicing": bool(one and _script(settings) != SDXL_FULL and _has_batches(size(settings)))}


def _has_batches(fields: Fields) -> bool:
    """Whether any dataset has more than one image in a batch."""
    return any(batch > 1 for batch in (fields["batch_size"], *(each.batch_size or 1 for each in fields["buckets"])))


def _write_vae_slicing(fields: Fields) -> Settings:
    one_by_one = fields["method"] != "full" and _has_batches(fields)
    if fields["vae_slicing"] != one_by_one:
        why = "the LoRA scripts encode a batch one image after another, full training all of it at once"
        raise InexpressibleError(UnsupportedValue("vae_slicing", fields["vae_slicing"], one_by_one, why))
    return {}


ATTENTION = ("--mem_eff_attn", "--xformers", "--sdpa")


def _attention(settings: Settings) -> Fields:
    """Without any of them the scores of all heads are held whole (library/train_util.py ``replace_unet_modules``;
    library/sdxl_original_unet.py ``CrossAttention.forward``)."""
    return {"attention": "sdpa" if any(settings.get(flag) for flag in ATTENTION) else "math"}


def _write_attention(fields: Fields) -> Settings:
    if fields["attention"] not in ("sdpa", "math"):
        why = "--sdpa, or scores that are held whole"
        raise InexpressibleError(UnsupportedValue("attention", fields["attention"], "sdpa", why))
    return {"--sdpa": True} if fields["attention"] == "sdpa" else {}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    yield from highvram_remarks(settings)


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    if fields["method"] == "lora" and lycoris_network.is_lycoris(settings):
        yield from lycoris_network.notes(settings, lookup.model(fields["model"]))
    one = fields["model"] in SD
    encoders, verb, stays = ("the text encoder", "is", "stays") if one else ("both text encoders", "are", "stay")
    if trains_text_encoders(settings):
        why = "--train_text_encoder" if fields["method"] == "full" else "no --network_train_unet_only"
        script = "sdxl_train.py" if fields["method"] == "full" else "train_network.py"
        yield f"{encoders} {verb} trained too: {why} ({AT} {script})"
    elif fields["text_encoder"] == "resident":
        yield f"{encoders} {stays} on the GPU: not cached"
    if _fp8(settings):
        yield "the base is in fp8, priced from the recording in 16 bits: half of its bytes"
    if fields["model"] == "sd2.1" and not settings.get("--v_parameterization"):
        yield "without --v_parameterization it predicts the noise, as the bases at 512 pixels do: memory is SD 2.1's"
    if fields["model"] in SD and fields["gradient_checkpointing"] == "full":
        yield "its own U-Net checkpoints a whole transformer, priced with the block in it: up to 8 % too high"
    if fields["vae"] == "resident":
        yield "the VAE stays on the GPU: --cache_latents is not given"
    if fields["attention"] == "math":
        yield f"no attention is chosen: the scores of all heads are held whole ({AT}); --sdpa is faster and needs less"
    if settings.get("--lowram"):
        yield f"models are read on the GPU, in fp32, not in RAM: --lowram ({AT} library/train_util.py)"
    yield from shared_notes(fields)
    if any("enable_bucket" in name and value for name, value in settings.items()) or settings.get("--enable_bucket"):
        yield "buckets have at most the pixels of the resolution: priced at that"
    if fields["method"] == "lora" and inside(settings, "class_tokens"):
        yield "regularisation images are samples like others"


def _flags(plan: Plan) -> ModelFlags:
    """docs/sdxl_train_network.md, docs/train_network.md."""
    return ModelFlags(plan.job.model, {}, {"--network_module": "networks.lora"})


DIALECT = Dialect(
    name="sd-scripts@unet",
    title="sd-scripts (SDXL, SD 1.5, SD 2.1)",
    source="https://github.com/kohya-ss/sd-scripts at 48d368f",
    drops_inputs=False,  # networks/lora.py `forward`: "normal dropout" of `lora_down`
    scripts=SCRIPTS,
    steps=("--max_train_steps", "--max_train_epochs"),
    table=(
        FunctionPair(
            ("model",),
            ("--pretrained_model_name_or_path", "--v2", "--v_parameterization"),
            _model,
            _write_model,
            {"model": "SDXL, SD 1.5 by script; SD 2.1 by --v2"},
        ),
        FunctionPair(("method",), ("script",), _method, _write_method, {"method": "lora; full for SDXL"}),
        When(
            "method",
            ONLY_LORA,
            FunctionPair(
                ("lora_rank", "lora_dropout"),
                ("--network_dim", "--network_dropout"),
                _rank,
                _write_rank,
                {"lora_rank": "--network_dim; LyCORIS read only, by its numbers", "lora_dropout": "--network_dropout"},
            ),
        ),
        When(
            "method",
            ONLY_LORA,
            FunctionPair(("lora_targets",), (), _targets, _write_targets, {"lora_targets": "all of a transformer"}),
        ),
        size_pair(_step_of),
        Choice("gradient_checkpointing", {"none": {}, "full": {"--gradient_checkpointing": True}}),
        ACCUMULATION,
        OPTIMIZER,
        FunctionPair(
            ("optimizer_step",),
            ("--fused_backward_pass",),
            _step,
            _write_step,
            {"optimizer_step": "foreach, backward (full training)"},
        ),
        FunctionPair(
            ("text_encoder", "text_encoder_dtype"),
            ("--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk", "--network_train_unet_only"),
            _text_encoder,
            _write_text_encoder,
            {"text_encoder": "resident, cached", "text_encoder_dtype": "--mixed_precision"},
        ),
        cached("vae", "--cache_latents"),
        FunctionPair(
            ("text_tokens",),
            ("--max_token_length",),
            _text_tokens,
            _write_text_tokens,
            {"text_tokens": "77, 152, 227"},
        ),
        FunctionPair(
            ("vae_dtype",),
            ("--no_half_vae",),
            _vae_dtype,
            _write_vae_dtype,
            {"vae_dtype": "--mixed_precision, fp32"},
        ),
        FunctionPair(
            ("vae_slicing",),
            ("--vae_batch_size",),
            _vae_slicing,
            _write_vae_slicing,
            {"vae_slicing": "by default"},
        ),
        BUCKETS,
        engine_pair(_formats, _write_formats, "bf16, fp16; fp32 in full training"),
        VALIDATION,
        EXPANDABLE,
        GPUS,
        NODES,
        Fixed("frames", 1, "these scripts train images"),
        *our_defaults("experts", "trainable", "references", "validation", "compute_dtype"),
        *our_defaults("checkpointed_blocks", "ema", "swap_blocks", "vae_tiling", "inactive_expert", "group_offload"),
        COMPILE,
        FunctionPair(("attention",), ATTENTION, _attention, _write_attention, {"attention": "sdpa (--sdpa)"}),
        *our_defaults("group_offload_stream", "context_parallel", "adapter_inputs"),
        *our_defaults("nested_checkpointing", "fsdp_replicas"),
    ),
    read_script=read_script,
    stops=stops,
    remarks=_remarks,
    notes=_notes,
    version=_version,
    moves=(
        Move({"attention": "sdpa"}, "free", always=True),
        Move({"expandable_segments": True}, "free"),
        Move({"vae": "cached"}, "images are no longer changed at random"),
        Move(
            {"text_encoder": "cached"},
            "captions are no longer shuffled or dropped",
            when=lambda fields: fields["model"] == "sdxl" and "te" not in str(fields["version"]).split("-"),
        ),
        Move(
            {"text_encoder": "cached", "version": ""},
            "the text encoders are no longer trained, captions no longer shuffled or dropped",
            when=lambda fields: fields["model"] == "sdxl" and fields["version"] == "te",
        ),
        Move(
            {"version": ""},
            "the text encoder is no longer trained",
            words_for=lambda settings: ["--network_train_unet_only"],
            when=lambda fields: fields["model"] in SD and fields["version"] == "te",
        ),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move(
            {"version": "fp8"},
            "the frozen base is rounded to 8 bits",
            words_for=lambda settings: ["--fp8_base_unet"],
            when=lambda fields: fields["method"] == "lora" and fields["version"] == "",
            lossy=True,
        ),
        Move(
            {"optimizer": "adafactor", "optimizer_step": "backward"},
            "second moments are row and column sums; the step runs inside backward, so nothing accumulates",
            when=lambda fields: fields["method"] == "full" and fields["gradient_accumulation"] == 1,
        ),
        *(_low_ram(version) for version in ("", "te", "fp8", "te-fp8", "whole-te")),
        *SHARDED,
    ),
    files=lambda plan, settings: files(plan, settings, _flags(plan)),
)
