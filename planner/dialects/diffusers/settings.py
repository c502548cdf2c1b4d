"""diffusers' words, read at 58eb52c: the training scripts of its examples (FLUX, SD3, Qwen-Image, CogVideoX, ...)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import (
    Choice,
    Fields,
    Fixed,
    FunctionPair,
    InexpressibleError,
    Settings,
    UnsupportedValue,
    Value,
)
from planner.dialects.base.commands import command_line, command_settings, parse_program, script_head
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, one_of, our_defaults, require_model
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Move
from planner.dialects.base.engine_files.fsdp_launch import Units, fsdp_notes
from planner.dialects.base.launchers import by_fsdp, engine, half_precision, launch_settings
from planner.dialects.base.script import Script
from planner.dialects.diffusers.adapted_layers import ADAPTED, ratios
from planner.dialects.diffusers.bitsandbytes import BASE, BNB, DOUBLE, quantised_base
from planner.dialects.diffusers.deepspeed import MOVES, deepspeed, deepspeed_notes
from planner.dialects.diffusers.models import AT, DREAMBOOTH, READ_TOO, SCRIPTS
from planner.dialects.diffusers.prompt_length import PROMPT_LENGTH
from planner.dialects.diffusers.sample_shape import read_samples, write_samples
from planner.dialects.diffusers.script_checks import stops
from planner.layout.trainer_terms.diffusers import PARTS, PRIOR, REMOTE, SCALES_IN_FP32, WHOLE_TEXT_ENCODER
from planner.layout.trainer_terms.diffusers.sample_terms import IN_LOOP
from planner.spec.job import QUANTISED, SPLIT
from planner.spec.plan import Plan


def _script(fields: Fields) -> str:
    return SCRIPTS.get((fields["model"], fields["method"]), "")


def read_script(script: Script) -> Invocation | None:
    """The settings of a command of one of diffusers' training examples; None for another trainer's script."""
    names = {path.rpartition("/")[2] for path in (*SCRIPTS.values(), *READ_TOO)}
    programs = [program for program in script.programs if program.script.rpartition("/")[2] in names]
    if not programs:
        return None
    launch, notes = launch_settings(programs[-1], script, {})
    words = list(programs[-1].arguments)
    for at, word in enumerate(words):  # the scripts take its value in any case
        if word == "--optimizer" and at + 1 < len(words):
            words[at + 1] = words[at + 1].lower()
    program = replace(programs[-1], arguments=tuple(words))
    invocation = parse_program("diffusers", program, launch, [*script.notes, *notes])
    if path := invocation.settings.get(BNB):
        base = quantised_base(script.document(str(path)), str(path))
        return replace(invocation, settings={**invocation.settings, **base})
    return invocation


def _is_video(settings: Settings) -> bool:
    return "cogvideo" in str(settings["script"])


def _default(settings: Settings, flag: str) -> object:
    return flags.script("diffusers", str(settings["script"])).default(flag)


def _job(settings: Settings) -> Fields:
    """What the script trains, by its name and flags; each script has defaults of its own."""
    method = "lora" if "lora" in str(settings["script"]) else "full"
    fields: Fields = {"model": lookup.model(require_model(settings, "--pretrained_model_name_or_path")).name}
    batch = int(settings.get("--train_batch_size", _default(settings, "--train_batch_size")))
    fields |= {"method": method, "batch_size": PRIOR_SAMPLES * batch if _has_prior(settings) else batch}
    fields["lora_rank"] = int(settings.get("--rank", _default(settings, "--rank"))) if method == "lora" else 16
    if _is_video(settings):
        for field, flag in (("frames", "--max_num_frames"), ("height", "--height"), ("width", "--width")):
            fields[field] = int(settings.get(flag, _default(settings, flag)))
    elif shapes := ratios(settings):
        worst = max(shapes, key=lambda shape: shape.height * shape.width)
        fields |= {"frames": 1, "height": worst.height, "width": worst.width}
    else:
        side = int(settings.get("--resolution", _default(settings, "--resolution")))
        fields |= {"frames": 1, "height": side, "width": side}
    return fields


"""Versions of memory terms, joined by a dash: with class images beside, with the text encoder trained too."""

PRIOR_SAMPLES = 2
"""``collate_fn`` of the DreamBooth scripts joins a class image to each of the batch."""


def _has_prior(settings: Settings) -> bool:
    return bool(settings.get("--with_prior_preservation"))


def _trains_text_encoder(settings: Settings) -> bool:
    """Whether all of the text encoder is trained too; with the flag most others are refused
    (profiles/flag_effects)."""
    return bool(settings.get("--train_text_encoder")) and str(settings["script"]).endswith(DREAMBOOTH)


def _version(settings: Settings, fields: Fields) -> str:
    """Of the terms in `planner.layout.trainer_terms.diffusers`, and what a batch is written by."""
    text = WHOLE_TEXT_ENCODER if _trains_text_encoder(settings) else ""
    scales = SCALES_IN_FP32 if settings.get(BASE) and not settings.get(DOUBLE) else ""
    without_last = settings.get(SKIP) and fields["validation_mode"] != "off"
    skips = IN_LOOP if without_last else ""
    elsewhere = REMOTE if settings.get(ELSEWHERE) else ""
    return "-".join(filter(None, [text, scales, skips, elsewhere, PRIOR if _has_prior(settings) else ""]))


SKIP = "--skip_final_inference"
ELSEWHERE = "--remote_text_encoder"


def _version_with(part: str) -> Callable[[Fields], tuple[Fields, ...]]:
    """The version of some fields with one part more."""

    def changes(fields: Fields) -> tuple[Fields, ...]:
        version = str(fields.get("version") or "")
        return ({"version": "-".join(each for each in PARTS if each == part or each in version)},)

    return changes


def _may_add(flag: str, part: str, fields: Fields) -> bool:
    """Whether the script has a flag that was not given, whose part of the version is given."""
    script = _script(fields)
    return bool(script) and part not in str(fields["version"]) and flag in flags.script("diffusers", script).flags


def _takes_a_last_sample(fields: Fields) -> bool:
    """Whether it does, and has an option to leave it out."""
    return fields["validation_mode"] != "off" and _may_add(SKIP, IN_LOOP, fields)


def _write_batch(fields: Fields) -> int:
    batch = int(fields["batch_size"])
    if not str(fields.get("version") or "").endswith(PRIOR):
        return batch
    if batch % PRIOR_SAMPLES:
        why = "each picture has a class image beside it (--with_prior_preservation)"
        raise InexpressibleError(UnsupportedValue("batch_size", batch, batch + 1, why))
    return batch // PRIOR_SAMPLES


def _write_job(fields: Fields) -> Settings:
    script = SCRIPTS.get((fields["model"], fields["method"]))
    if script is None:
        models = [model for model, method in SCRIPTS if method == fields["method"]] or ["flux.1-dev"]
        instead = "lora" if fields["method"] not in ("lora", "full") else fields["method"]
        if instead != fields["method"]:
            raise InexpressibleError(UnsupportedValue("method", fields["method"], instead, "its examples train"))
        why = f"its {fields['method']} examples are for {', '.join(models)}"
        raise InexpressibleError(UnsupportedValue("model", fields["model"], models[0], why))
    name = next(alias for alias in lookup.model(fields["model"]).aliases if "/" in alias)
    settings: Settings = {"script": script, "--pretrained_model_name_or_path": name}
    settings["--train_batch_size"] = _write_batch(fields)
    if fields["method"] == "lora":
        settings["--rank"] = fields["lora_rank"]
    if _is_video(settings):
        return settings | {
            "--max_num_frames": fields["frames"],
            "--height": fields["height"],
            "--width": fields["width"],
        }
    if fields["frames"] != 1:
        raise InexpressibleError(UnsupportedValue("frames", fields["frames"], 1, "the model makes images"))
    if fields["height"] != fields["width"] and not fields["buckets"]:
        raise InexpressibleError(
            UnsupportedValue("width", fields["width"], fields["height"], "--resolution is a square's side")
        )
    return settings | {"--resolution": fields["height"]}


def _plain(settings: Settings) -> Fields:
    """A frozen base has the mixed precision's format, and so have its adapters, but fp32 ones under fp16; trained
    weights are fp32. Mixed precision is autocast (`cast_training_params`, `accelerator.prepare`)."""
    half = half_precision(settings)
    full = "lora" not in str(settings["script"])
    if base := settings.get(BASE):  # peft keeps adapters of a quantised layer in fp32
        return {"weights_dtype": base, "adapter_dtype": "fp32", "autocast": half if half != "fp32" else "none"}
    return {
        "weights_dtype": "fp32" if full else half,
        "adapter_dtype": "bf16" if half == "bf16" and not full else "fp32",
        "autocast": half if half != "fp32" else "none",
    }


FLUX_2_BLOCKS = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
BLOCKS = {
    "train_dreambooth_lora_flux2.py": FLUX_2_BLOCKS,
    "train_dreambooth_lora_flux2_klein.py": FLUX_2_BLOCKS,
    "train_dreambooth_lora_z_image.py": ("ZImageTransformerBlock",),
}
"""Scripts that have code for FSDP (``is_fsdp``) -> the classes of their model's blocks, which it names itself."""


def _fsdp(settings: Settings) -> Units | str:
    name = str(settings["script"]).rpartition("/")[2]
    if name not in BLOCKS:
        return f"{name or 'its example'} has no code for it: one GPU alone writes what it trained ({AT})"
    return Units(BLOCKS[name], named=True, adapters=True)


def _write_plain(fields: Fields) -> Settings:
    if fields["weights_dtype"] in QUANTISED:
        why = "its examples quantise a base by a file that is not written here"
        raise InexpressibleError(UnsupportedValue("weights_dtype", fields["weights_dtype"], "bf16", why))
    return {"--mixed_precision": fields["autocast"]} if fields["autocast"] != "none" else {}


OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "prodigy": "prodigy"}


def _optimizer(settings: Settings) -> Fields:
    name = one_of(OPTIMIZERS, "--optimizer")(settings.get("--optimizer", "adamw"))
    return {"optimizer": "adamw-8bit" if settings.get("--use_8bit_adam") and name == "adamw" else name}


def _write_optimizer(fields: Fields) -> Settings:
    rows: dict[str, Settings] = {"adamw": {}, "adamw-8bit": {"--use_8bit_adam": True}}
    script = _script(fields)
    if not script or "--optimizer" in flags.script("diffusers", script).flags:
        rows["prodigy"] = {"--optimizer": "prodigy"}
    if fields["optimizer"] not in rows:
        why = f"this example has {' and '.join(rows)} alone"
        raise InexpressibleError(UnsupportedValue("optimizer", fields["optimizer"], "adamw", why))
    return rows[fields["optimizer"]]


def _text_encoder(script: str, captions: bool = False, offload: bool = False) -> str:
    """Where a script has its text encoders; ``offload``: with --offload, which those of `PIPELINE` obey too. Prompts
    are encoded once where they are all alike, and SDXL in full computes every embedding before; then their encoders are
    gone, but for those that `HELD` holds on to. CogVideoX's stay, and those of texts to images and of ``captions``,
    which a `PER_CAPTION` script encodes in the loop."""
    in_the_loop = "cogvideo" in script or "text_to_image" in script or (captions and script.endswith(PER_CAPTION))
    held = script.endswith(HELD) and not (offload and script.endswith(PIPELINE))
    return "resident" if (in_the_loop or held) and not script.endswith(BEFORE) else "cached"


BEFORE = "train_text_to_image_sdxl.py"
"""Computes embeddings and latents before training."""

PIPELINE = ("train_dreambooth_lora_lumina2.py", "train_dreambooth_lora_sana.py")
"""Scripts whose ``text_encoding_pipeline`` has the text encoder."""

SDXL_SCRIPTS = ("train_dreambooth_lora_sdxl.py", "train_text_to_image_sdxl.py")
VAE_IN_FP32 = (*SDXL_SCRIPTS, *PIPELINE, "train_dreambooth_lora_sd3.py", "train_dreambooth_sd3.py")
OTHER_VAE = "train_text_to_image_lora_sdxl.py"
HELD = ("train_dreambooth_lora_flux.py", "train_dreambooth_lora_sdxl.py", *PIPELINE)
"""``main`` deletes some of its names for the encoders: FLUX.1's list ``text_encoders`` still has both, and SDXL's
``text_encoder_one`` and ``_two`` are left; so is `PIPELINE`. FLUX.1 at 512 pixels rehearses
at 41.75 GiB, of which they are 9.1."""

PER_CAPTION = ("train_dreambooth_flux.py", "train_dreambooth_lora_sd3.py", "train_dreambooth_sd3.py")
"""Encode the captions of a data set (``custom_instance_prompts``) batch by batch."""


def _residence(settings: Settings) -> Fields:
    """Latents are cached by --cache_latents; --offload takes the VAE off the GPU between its turns."""
    script, captions = str(settings["script"]), bool(settings.get("--caption_column"))
    if script.endswith(DREAMBOOTH):
        return {"text_encoder": "cached" if settings.get("--pre_compute_text_embeddings") else "resident",
                "vae": "resident"}  # fmt: skip
    vae = "cached" if settings.get("--cache_latents") else "swapped" if settings.get("--offload") else "resident"
    text = _text_encoder(script, captions, bool(settings.get("--offload")))
    return {"text_encoder": text, "vae": "cached" if script.endswith(BEFORE) else vae}


def _write_residence(fields: Fields) -> Settings:
    script = _script(fields)
    flag_names = flags.script("diffusers", script).flags if script else {}
    offload = fields["vae"] == "swapped" or fields["text_encoder"] != _text_encoder(script)
    text = _text_encoder(script, offload=offload)
    if fields["text_encoder"] != text:
        why = "its example encodes prompts once" if text == "cached" else "its example keeps the text encoder"
        raise InexpressibleError(UnsupportedValue("text_encoder", fields["text_encoder"], text, why))
    usual = "cached" if script.endswith(BEFORE) else "resident"
    flag = {"cached": "--cache_latents", "swapped": "--offload"}.get(fields["vae"], "")
    if fields["vae"] != usual and flag not in flag_names:
        why = f"that example has no {flag}" if flag else "that example caches latents"
        raise InexpressibleError(UnsupportedValue("vae", fields["vae"], usual, why))
    settings: Settings = {flag: True} if fields["vae"] != usual else {}
    return settings | ({"--offload": True} if offload else {})


def _holds_a_pipeline(fields: Fields) -> bool:
    return fields["text_encoder"] == "resident" and _script(fields).endswith(PIPELINE)


def _switch(field: str, flag: str) -> FunctionPair:
    """A switch that only some examples have."""

    def to_settings(fields: Fields) -> Settings:
        script = _script(fields)
        if fields[field] and (not script or flag not in flags.script("diffusers", script).flags):
            raise InexpressibleError(UnsupportedValue(field, True, False, f"that example has no {flag}"))
        return {flag: True} if fields[field] else {}

    return FunctionPair(
        (field,),
        (flag,),
        lambda settings: {field: bool(settings.get(flag))},
        to_settings,
        {field: f"{flag} (CogVideoX)"},
    )


def _ema(settings: Settings) -> Fields:
    where = "cpu" if settings.get("--offload_ema") else "gpu"
    return {"ema": where if settings.get("--use_ema") else "none"}


def _write_ema(fields: Fields) -> Settings:
    script, where = _script(fields), fields["ema"]
    rows: dict[str, Settings] = {"none": {}, "gpu": {"--use_ema": True}}
    rows["cpu"] = {"--use_ema": True, "--offload_ema": True}
    if not script or not rows[where].keys() <= flags.script("diffusers", script).flags.keys():
        raise InexpressibleError(UnsupportedValue("ema", where, "none", "that example keeps no average there"))
    return rows[where]


def _validation(settings: Settings) -> Fields:
    return read_samples(settings, _job(settings), _is_video(settings))


def _write_validation(fields: Fields) -> Settings:
    return write_samples(fields, _script(fields))


def _text_encoder_dtype(settings: Settings) -> Fields:
    """It has the mixed precision's format, which is fp32 without one; one that is trained stays in fp32
    (``text_encoder.to(accelerator.device, dtype=weight_dtype)``)."""
    in_fp32 = _trains_text_encoder(settings) or half_precision(settings) == "fp32"
    return {"text_encoder_dtype": "fp32" if in_fp32 else "bf16"}


def _write_text_encoder_dtype(fields: Fields) -> Settings:
    plain = fields["autocast"] == "none" and fields["sharding"] not in SPLIT  # which train in bf16
    in_fp32 = plain or WHOLE_TEXT_ENCODER in str(fields.get("version") or "")
    if fields["text_encoder_dtype"] != (has := "fp32" if in_fp32 else "bf16"):
        why = "text encoders have --mixed_precision, and fp32 without one"
        raise InexpressibleError(UnsupportedValue("text_encoder_dtype", fields["text_encoder_dtype"], has, why))
    return {}


def _vae_dtype(settings: Settings) -> Fields:
    """What most scripts make of it is the mixed precision's format. The VAEs of SDXL, SD 3, Lumina 2 and SANA are fp32
    (`vae.to(accelerator.device, dtype=torch.float32)`), but for one that is named to the LoRA script of SDXL."""
    script = str(settings["script"])
    named = settings.get("--pretrained_vae_model_name_or_path") is not None
    in_fp32 = script.endswith(VAE_IN_FP32) or (script.endswith(OTHER_VAE) and not named)
    plain = script.endswith(DREAMBOOTH) and half_precision(settings) == "fp32"
    return {"vae_dtype": "fp32" if in_fp32 or plain else "bf16"}


def _write_vae_dtype(fields: Fields) -> Settings:
    usual = "fp32" if lookup.model(fields["model"]).trained_with("diffusers", "vae-in-fp32") else "bf16"
    if fields["vae_dtype"] != usual:
        why = "its example keeps the VAE in fp32" if usual == "fp32" else "the VAE has --mixed_precision"
        raise InexpressibleError(UnsupportedValue("vae_dtype", fields["vae_dtype"], usual, why))
    return {}


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    if "--train_batch_size" not in settings:
        yield f"{fields['batch_size']} samples per step and GPU, the default of --train_batch_size"
    if shape := fields.get("validation"):
        size = f"{shape['width']}x{shape['height']}"
        yield f"samples are {size}, the pipeline's own size, whatever --resolution says ({AT})"
    if settings.get(ELSEWHERE):
        yield f"prompts are encoded on another machine, and no text encoder is loaded here ({AT})"
    elif fields["text_encoder"] == "cached" and "text_to_image" in str(settings["script"]):
        yield f"prompts and latents are computed before training ({AT})"
    elif fields["text_encoder"] == "cached":
        yield f"prompts are encoded once and their encoders deleted, as with one instance prompt ({AT})"
    elif str(settings["script"]).endswith(HELD):
        yield f"the script holds on to its text encoders after it has used them ({AT})"
    if _has_prior(settings):
        yield f"{fields['batch_size']} samples: each picture of the batch has a class image beside it ({AT})"
    if _trains_text_encoder(settings):
        yield f"the text encoder is trained whole ({AT} train_dreambooth.py)"
    elif settings.get("--train_text_encoder"):  # with FLUX.1's LoRA script, which keeps its encoders anyway
        yield "--train_text_encoder is not estimated (adapters on CLIP's encoder), and takes more than this"
    if str(settings["script"]).endswith(DREAMBOOTH) and not settings.get("--set_grads_to_none"):
        stay = (
            "gradients are filled with zeros between steps and stay, which is not estimated, and takes more than this"
        )
        yield f"{stay}: --set_grads_to_none frees them ({AT} train_dreambooth.py:1344)"
    if settings.get(BASE):
        yield f"the base is NF4, by {settings[BNB]} ({AT})"
    yield from fsdp_notes(settings, fields)
    yield from deepspeed_notes(settings, fields)
    for flag in ("--do_fp8_training", "--fsdp_text_encoder"):
        if settings.get(flag):
            yield f"{flag}{MAY_NEED_LESS}"


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """name -> text of one shell script with the training command."""
    launcher = ["accelerate", "launch", f"--num_processes {plan.machine.world}"]
    if plan.machine.nodes > 1:
        launcher.append(f"--num_machines {plan.machine.nodes}")
    extra: dict[str, object] = {"--output_dir": "out", "--learning_rate": "1e-4", "--max_train_steps": 1000}
    if _is_video(settings):
        extra |= {
            "--instance_data_root": "data/my_set",
            "--caption_column": "prompt.txt",
            "--video_column": "videos.txt",
        }
    elif "text_to_image" in str(settings["script"]):
        extra["--train_data_dir"] = "data/my_set"
    elif plan.job.references:  # conditioning images are read from a data set's column only (README_flux.md)
        extra |= {
            "--dataset_name": "data/my_set",
            "--image_column": "image",
            "--cond_image_column": "reference",
            "--caption_column": "text",
            "--instance_prompt": "a photo of sks dog",
        }
    else:
        extra |= {"--instance_data_dir": "data/my_set", "--instance_prompt": "a photo of sks dog"}
    return {"train.sh": script_head(plan) + command_line(command_settings(settings), extra, launcher)}


JOB = ("model", "method", "lora_rank", "batch_size", "frames", "height", "width")

DIALECT = Dialect(
    name="diffusers",
    title="diffusers' examples",
    source="https://github.com/huggingface/diffusers at 58eb52c",
    scripts=(*dict.fromkeys(SCRIPTS.values()), *READ_TOO),
    steps=("--max_train_steps",),
    table=(
        FunctionPair(
            JOB,
            (
                *("script", "--pretrained_model_name_or_path", "--train_batch_size", "--rank", "--resolution"),
                *("--max_num_frames", "--height", "--width"),
            ),
            _job,
            _write_job,
            {
                "model": ", ".join(sorted({model for model, _ in SCRIPTS})),
                "method": "lora, full (FLUX.1, SD3, SDXL, SD 1.5), by the script",
                "lora_rank": "--rank",
                "batch_size": "--train_batch_size",
                "frames": "--max_num_frames",
                "height": "--resolution, --height",
                "width": "--resolution, --width",
            },
        ),
        Choice("gradient_checkpointing", {"none": {}, "full": {"--gradient_checkpointing": True}}),
        Value("gradient_accumulation", "--gradient_accumulation_steps", 1),
        FunctionPair(
            ("optimizer",),
            ("--optimizer", "--use_8bit_adam"),
            _optimizer,
            _write_optimizer,
            {"optimizer": "adamw, adamw-8bit, prodigy"},
        ),
        FunctionPair(
            ("text_encoder", "vae"),
            ("--cache_latents", "--offload"),
            _residence,
            _write_residence,
            {
                "text_encoder": "cached (CogVideoX, SD 1.5, LoRA of FLUX.1 and SDXL: resident)",
                "vae": "resident, cached, swapped",
            },
        ),
        FunctionPair(
            ("ema",), ("--use_ema", "--offload_ema"), _ema, _write_ema, {"ema": "--use_ema (SD 1.5, SDXL in full)"}
        ),
        _switch("vae_tiling", "--enable_tiling"),
        _switch("vae_slicing", "--enable_slicing"),
        FunctionPair(
            ("validation_mode", "validation"),
            ("--validation_prompt", "--validation_prompts"),
            _validation,
            _write_validation,
            {
                "validation_mode": "off, on (FLUX.2 and Z-Image: offload)",
                "validation": "an image of the model's default size (CogVideoX: as it trains)",
            },
        ),
        engine(
            _plain,
            _write_plain,
            {
                "sharding": "accelerate launch, without ZeRO-3; FSDP with FLUX.2 and Z-Image",
                "weights_dtype": "--mixed_precision",
                "adapter_dtype": "bf16; fp32 otherwise, and under FSDP",
            },
            _fsdp,
            with_deepspeed=deepspeed,
            context=lambda fields: {"script": _script(fields)},
        ),
        Fixed("optimizer_step", "foreach", "default torch.optim.AdamW"),
        Fixed("grad_buckets", "copy", "accelerate's DDP without gradient_as_bucket_view"),
        EXPANDABLE,
        GPUS,
        NODES,
        PROMPT_LENGTH,
        *ADAPTED,
        *our_defaults("experts", "trainable", "references"),
        FunctionPair(
            ("text_encoder_dtype",),
            (),
            _text_encoder_dtype,
            _write_text_encoder_dtype,
            {"text_encoder_dtype": "bf16; fp32 where it is trained, or without mixed precision"},
        ),
        *our_defaults("compute_dtype", "checkpointed_blocks", "swap_blocks"),
        FunctionPair(
            ("vae_dtype",),
            ("--pretrained_vae_model_name_or_path",),
            _vae_dtype,
            _write_vae_dtype,
            {"vae_dtype": "bf16; SDXL, SD 3, Lumina 2 and SANA: fp32"},
        ),
        *our_defaults("inactive_expert", "group_offload", "group_offload_stream", "attention", "compile"),
        *our_defaults("context_parallel", "adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
    ),
    read_script=read_script,
    stops=stops,
    notes=_notes,
    version=_version,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move(
            {"version": IN_LOOP},
            "no sample behind the last step, for which a second transformer is loaded",
            words_for=lambda settings: [SKIP],
            by_fields=_version_with(IN_LOOP),
            when=_takes_a_last_sample,
        ),
        Move(
            {"version": REMOTE},
            "prompts are sent to Hugging Face's server, which encodes them",
            words_for=lambda settings: [ELSEWHERE],
            by_fields=_version_with(REMOTE),
            when=lambda fields: _may_add(ELSEWHERE, REMOTE, fields),
        ),
        Move({"vae": "cached"}, "latents are encoded once", when=lambda fields: fields["vae"] != "cached"),
        Move({"text_encoder": "cached"}, "the text encoder leaves when prompts are encoded", when=_holds_a_pipeline),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"validation_mode": "off"}, "no samples"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move({"vae_tiling": True}, "tiles are blended where they meet"),
        Move({"vae_slicing": True}, "one sample at a time"),
        *MOVES,
        by_fsdp(lambda fields: {"weights_dtype": "bf16", "adapter_dtype": "fp32"}),
    ),
    files=files,
)
