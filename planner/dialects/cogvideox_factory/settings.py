"""cogvideox-factory's words, read at 223add1: its four scripts for CogVideoX, which are read and not written.

finetrainers, as the repository is called now, keeps them in ``examples/_legacy/training/cogvideox``.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import Choice, Fields, Fixed, FunctionPair, Settings, Value
from planner.dialects.base.commands import refused_flags
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, one_of, our_defaults, require_model
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Move
from planner.dialects.base.launchers import engine, half_precision, launch_settings
from planner.dialects.base.script import Script
from planner.errors import VplanError
from planner.layout.trainer_terms.diffusers.sample_terms import FACTORY
from planner.spec.rules import DEEPSPEED

AT = "cogvideox-factory 223add1 training/cogvideox"
ARGUMENTS = "training/cogvideox/args.py"
SCRIPTS = tuple(
    f"training/cogvideox/cogvideox_{what}_to_video_{method}.py"
    for what in ("text", "image")
    for method in ("lora", "sft")
)
SHIPPED: dict[str, Settings] = {
    "accelerate_configs/deepspeed.yaml": {
        "launch:--use_deepspeed": True,
        "launch:--zero_stage": 2,
        "launch:--offload_optimizer_device": "cpu",
        "launch:--offload_param_device": "cpu",
        "launch:--mixed_precision": "bf16",
        "launch:--num_processes": 2,
    },
    **{
        f"accelerate_configs/{kind}_{gpus}.yaml": {
            "launch:--num_processes": gpus,
            "launch:--mixed_precision": "bf16",
            "launch:--dynamo_backend": "INDUCTOR" if kind == "compiled" else "NO",
        }
        for kind, gpus in (("uncompiled", 1), ("uncompiled", 2), ("uncompiled", 8), ("compiled", 1))
    },
}
"""The repository's own configs of accelerate, for a command without them beside it."""


def read_script(script: Script) -> Invocation | None:
    """A command of one of the four scripts, wherever they lie; None for another trainer's."""
    names = {path.rpartition("/")[2] for path in SCRIPTS}
    for program in reversed(script.programs):
        name = program.script.rpartition("/")[2]
        if name in names:
            launch, notes = launch_settings(program, script, SHIPPED)
            words = [word.lower() if at and program.arguments[at - 1] == "--optimizer" else word
                     for at, word in enumerate(program.arguments)]  # fmt: skip
            parsed = flags.script("cogvideox-factory", ARGUMENTS).parse(words)
            settings = {"script": name, **launch, **parsed.values}
            notes = [*script.notes, *notes]
            return Invocation(DIALECT.name, settings, parsed.unknown, notes=tuple(notes), refused=refused_flags(parsed))
    return None


def _of(settings: Settings, flag: str) -> object:
    """A flag's value, or its default."""
    value = settings.get(flag)
    return flags.script("cogvideox-factory", ARGUMENTS).default(flag) if value is None else value


def _number(settings: Settings, flag: str) -> int:
    return int(str(_of(settings, flag)))


def _is_lora(settings: Settings) -> bool:
    return str(settings["script"]).endswith("_lora.py")


def _job(settings: Settings) -> Fields:
    model = lookup.model(require_model(settings, "--pretrained_model_name_or_path")).name
    method = "lora" if _is_lora(settings) else "full"
    return {"model": model, "method": method, "lora_rank": _number(settings, "--rank") if method == "lora" else 16}


SIZES = {"height": "--height_buckets", "width": "--width_buckets"}


def _frames(settings: Settings) -> int:
    """Clips as long as --max_num_frames, or longer, are cut to the nearest bucket of that (dataset.py
    ``VideoDatasetWithResizing._preprocess_video``)."""
    buckets, most = _listed(settings, "--frame_buckets"), _number(settings, "--max_num_frames")
    return min(buckets, key=lambda frames: abs(frames - most))


def _listed(settings: Settings, flag: str) -> list[int]:
    value = _of(settings, flag)
    return [int(str(each)) for each in (value if isinstance(value, list | tuple) else [value])]


def _size(settings: Settings) -> Fields:
    """Heights and widths are chosen apart, each nearest to a clip's (``_find_nearest_resolution``), so that the largest
    of both may meet. Where none is named, sizes are the data's, and the model's own is taken."""
    sizes = {name: max(_listed(settings, flag)) if flag in settings else None for name, flag in SIZES.items()}
    return {"frames": _frames(settings), **sizes}


def _write_size(fields: Fields) -> Settings:
    named = {flag: [fields[name]] for name, flag in SIZES.items() if fields[name] is not None}
    return {**named, "--frame_buckets": [fields["frames"]], "--max_num_frames": fields["frames"]}


def _formats(settings: Settings) -> Fields:
    """What is frozen is cast to the mixed precision's format, and so are adapters, which peft puts beside it, and the
    trained weights; under fp16 what is trained is fp32 (``transformer.to(device, dtype=weight_dtype)``, then
    ``cast_training_params`` if ``args.mixed_precision == "fp16"``)."""
    half = half_precision(settings)
    trained = "fp32" if half == "fp16" and settings.get("--mixed_precision") == "fp16" else half
    on_cpu = "cpu" if settings.get("--use_cpu_offload_optimizer") else "none"
    return {
        "weights_dtype": half if _is_lora(settings) else trained,
        "adapter_dtype": "bf16" if trained == "bf16" else "fp32",
        "autocast": half if half != "fp32" else "none",
        "offload_optimizer": on_cpu,
        "offload_gradients": on_cpu if settings.get("--offload_gradients") else "none",
    }


def _write_formats(fields: Fields) -> Settings:
    on_cpu = {"--use_cpu_offload_optimizer": True} if fields["offload_optimizer"] == "cpu" else {}
    on_cpu |= {"--offload_gradients": True} if fields["offload_gradients"] == "cpu" else {}
    return {**({"--mixed_precision": fields["autocast"]} if fields["autocast"] != "none" else {}), **on_cpu}


OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "prodigy": "prodigy", "came": "came"}


def _optimizer(settings: Settings) -> Fields:
    """utils.py ``get_optimizer``; its 8-bit classes are bitsandbytes', or with --use_torchao torchao's."""
    name = one_of(OPTIMIZERS, "--optimizer")(_of(settings, "--optimizer"))
    if settings.get("--use_4bit"):
        raise VplanError("--use_4bit is not priced: torchao's 4-bit states", "use --use_8bit, or leave it out")
    if settings.get("--use_8bit"):
        if settings.get("--use_torchao"):
            raise VplanError("--use_torchao with --use_8bit is not priced", "leave --use_torchao out: bitsandbytes' is")
        if name != "adamw":
            raise VplanError("--use_8bit is for --optimizer adam and adamw alone", f"{AT}/utils.py get_optimizer")
        return {"optimizer": "adamw-8bit"}
    return {"optimizer": name}


def _write_optimizer(fields: Fields) -> Settings:
    name = str(fields["optimizer"])
    return {"--optimizer": "adamw", "--use_8bit": True} if name == "adamw-8bit" else {"--optimizer": name}


def _validation(settings: Settings) -> Fields:
    """Where there are prompts: a sample of the pipeline's own length, at --height and --width."""
    if not settings.get("--validation_prompt"):
        return {"validation_mode": "off", "validation": None}
    model = lookup.model(require_model(settings, "--pretrained_model_name_or_path"))
    size = {name: _number(settings, f"--{name}") for name in SIZES}
    cfg = float(str(_of(settings, "--guidance_scale"))) > 1
    mode = "offload" if settings.get("--enable_model_cpu_offload") else "on"
    return {"validation_mode": mode, "validation": {"frames": model.shape.default_frames, **size, "cfg": cfg}}


def _write_validation(fields: Fields) -> Settings:
    if fields["validation_mode"] == "off":
        return {}
    return {"--validation_prompt": "a cat walks"} | (
        {"--enable_model_cpu_offload": True} if fields["validation_mode"] == "offload" else {}
    )


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    if fields["text_encoder"] == "cached":
        yield f"text encoder and VAE are put on the GPU, and deleted before the first step ({AT})"
    missing = [flag for flag in SIZES.values() if flag not in settings]
    if missing:
        yield f"clips go to the nearest of twelve heights and widths ({', '.join(missing)} not given)"
    elif any(len(_listed(settings, flag)) > 1 for flag in SIZES.values()):
        yield "clips go to the nearest height and width: priced at the largest of both"
    if "--train_batch_size" not in settings:
        yield f"{fields['batch_size']} samples per step and GPU, the default of --train_batch_size"
    if settings.get("--ignore_learned_positional_embeddings"):
        yield f"--ignore_learned_positional_embeddings{MAY_NEED_LESS}"
    prompts = fields["validation_mode"] != "off"
    if prompts and "_text_to_" in str(settings["script"]) and "--validation_epochs" not in settings:
        yield f"without --validation_epochs the script ends in a TypeError behind its first epoch ({AT})"
    if fields["validation_mode"] == "on":
        yield f"the last sample is a second transformer's, beside the trained one ({AT}, Final test inference)"
    elif fields["validation_mode"] == "offload":
        yield f"the pipeline is put on the GPU whole before it is offloaded ({AT} log_validation)"


def _switch(field: str, flag: str) -> Choice:
    return Choice(field, {False: {}, True: {flag: True}})


DIALECT = Dialect(
    name=f"diffusers@{FACTORY}",
    title="cogvideox-factory's scripts",
    source="https://github.com/a-r-r-o-w/cogvideox-factory at 223add1",
    scripts=SCRIPTS,
    steps=("--max_train_steps",),
    table=(
        FunctionPair(
            ("model", "method", "lora_rank"),
            ("script", "--pretrained_model_name_or_path", "--rank"),
            _job,
            lambda fields: {"--rank": fields["lora_rank"]} if fields["method"] == "lora" else {},
            {"model": "--pretrained_model_name_or_path", "method": "by the script", "lora_rank": "--rank"},
        ),
        FunctionPair(
            ("frames", "height", "width"),
            (*SIZES.values(), "--frame_buckets", "--max_num_frames"),
            _size,
            _write_size,
            {"frames": "--frame_buckets", **SIZES},
        ),
        Value("batch_size", "--train_batch_size", 4, int),
        Value("gradient_accumulation", "--gradient_accumulation_steps", 1, int),
        Choice("gradient_checkpointing", {"none": {}, "full": {"--gradient_checkpointing": True}}),
        FunctionPair(
            ("optimizer",),
            ("--optimizer", "--use_8bit"),
            _optimizer,
            _write_optimizer,
            {"optimizer": "adamw, adamw-8bit, prodigy, came"},
        ),
        Choice(
            ("text_encoder", "vae"),
            {("resident", "resident"): {}, ("cached", "cached"): {"--load_tensors": True}},
        ),
        _switch("vae_tiling", "--enable_tiling"),
        _switch("vae_slicing", "--enable_slicing"),
        FunctionPair(
            ("validation_mode", "validation"),
            ("--validation_prompt", "--enable_model_cpu_offload", "--height", "--width", "--guidance_scale"),
            _validation,
            _write_validation,
            {"validation_mode": "off, on, offload", "validation": "--height, --width"},
        ),
        engine(
            _formats,
            _write_formats,
            {"weights_dtype": "--mixed_precision", "adapter_dtype": "bf16; fp32 otherwise"},
            f"the model goes to every GPU whole, and one writes its checkpoints ({AT}/cogvideox_text_to_video_lora.py)",
            context=lambda fields: {"script": SCRIPTS[0 if fields["method"] == "lora" else 1]},
        ),
        Fixed("optimizer_step", "foreach", "default torch.optim.AdamW"),
        Fixed("grad_buckets", "copy", "accelerate's DDP without gradient_as_bucket_view"),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("experts", "trainable", "lora_targets", "lora_dropout", "buckets", "text_tokens", "references"),
        *our_defaults("text_encoder_dtype", "vae_dtype"),
    ),
    read_script=read_script,
    notes=_notes,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move(
            {"text_encoder": "cached", "vae": "cached"}, "clips and prompts are encoded beforehand (prepare_dataset.py)"
        ),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move({"vae_tiling": True}, "tiles are blended where they meet"),
        Move({"vae_slicing": True}, "one sample at a time"),
        Move(
            {"sharding": "zero-2", **DEEPSPEED},
            "gradients and states are sharded across the GPUs, with an fp32 master",
            when=lambda fields: fields["gpus"] * fields["nodes"] > 1,
        ),
        Move(
            {"validation_mode": "offload"},
            "the sample is slower",
            when=lambda fields: fields["validation_mode"] == "on",
        ),
        Move({"validation_mode": "off"}, "no sample"),
    ),
)
