"""DiffSynth-Studio's words, read at fed7b18: the training scripts of its examples."""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.dialects.base.bindings import (
    Binding,
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
from planner.dialects.base.commands import command_line, command_settings, parse_program, script_head
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, one_of, our_defaults, require_model, word_for
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Move
from planner.dialects.base.launchers import ON_HOST, SAVED_WHOLE, engine, launch_settings, several_gpus, stage_3_notes
from planner.dialects.base.layer_names import WAN_LAYERS
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.base.script import PythonCommand, Script
from planner.dialects.diffsynth.file_checks import FP8, OFFLOADED, QUANT, stops
from planner.dialects.diffsynth.names import (
    AT,
    BASE,
    BESIDE,
    BOUNDARIES,
    ENCODERS,
    EXPERTS,
    FOLDERS,
    INPUTS,
    OFFLOAD_COST,
    OFFLOAD_NOTE,
    PATHS,
    PREQUANTISED,
    REFERENCES,
    SHIPPED,
    SPLIT_COST,
    TRAINABLE,
    UNETS,
    files_of,
    folder_of,
)
from planner.errors import VplanError
from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER
from planner.layout.trainer_terms.diffsynth import MODEL_OFFLOAD, ZERO_INIT
from planner.spec.plan import Plan
from planner.spec.rules import DEEPSPEED
from planner.units import format_gib

NO_FSDP = (
    "its encoders, VAE and model are one module, which goes to every GPU whole, and its encoders would be gathered "
    f"with all that is no block ({AT} diffsynth/diffusion/runner.py:74)"
)


def read_script(script: Script) -> Invocation | None:
    """The settings of a command of its training scripts; None for another trainer's script."""
    program, notes = training_program(script, "model_training/train.py", PATHS)
    if program is None:
        return None
    launch, more_notes = launch_settings(program, script, SHIPPED)
    return parse_program("diffsynth", program, launch, [*notes, *more_notes])


def training_program(script: Script, tail: str, flag_names: tuple[str, ...]) -> tuple[PythonCommand | None, list[str]]:
    """The program that trains, where another one caches for it: of this script, with one of these flags. Raises a
    VplanError where there is only the one that caches: it trains nothing."""
    candidates = [program for program in script.programs if program.script.endswith(tail)]
    candidates = [
        program for program in candidates if set(flag_names) & {word.partition("=")[0] for word in program.arguments}
    ]
    training = [program for program in candidates if not any("data_process" in word for word in program.arguments)]
    if candidates and not training:
        fault = "this command encodes the data and trains nothing: --task data_process"
        raise VplanError(fault, "give the command that trains, alone or behind it; what encodes is not priced")
    notes = list(script.notes)
    if len(training) > 1:
        notes.append(f"{len(training)} commands train, one after the other: this is of the last")
    return (training[-1] if training else None), notes


def _profile(settings: Settings) -> ModelProfile:
    """The model, by the files of its weights where some are named: encoders and VAE of another model, as LongCat's are
    Wan's, say nothing about it."""
    weights = [path for path in _listed(settings) if _kind(path) == "weights"]
    if "model" not in settings and weights:
        return lookup.model(require_model({"the model's files": ",".join(weights)}, "the model's files"))
    return lookup.model(require_model(settings, *PATHS, "--dit_path"))


def _is_wan(model: str) -> bool:
    return folder_of(model) == FOLDERS["wan"]


def _listed(settings: Settings) -> list[str]:
    """The files of models that a command names."""
    return [part.strip(' []"') for name in PATHS for part in str(settings.get(name) or "").split(",") if part.strip()]


def _kind(path: str) -> str:
    low = path.lower()
    if any(name in low for name in ENCODERS):
        return "text_encoder"
    return "vae" if "vae" in low or low.endswith("ae.safetensors") else "weights"


def _models(settings: Settings) -> Fields:
    """The model, its expert, and where its encoders are: on the GPU, unless another command cached what they make."""
    profile = _profile(settings)
    _check_inputs(settings, profile)
    listed, away = _listed(settings), set(str(settings.get("--offload_models") or "").split(","))
    split = str(settings.get("--task", "sft")).endswith(":train")
    fields: Fields = {"model": profile.name, "experts": None}
    if profile.experts > 1:
        inside = [name for name, folder in EXPERTS.items() if any(folder in path for path in listed)]
        fields["experts"] = inside[0] if len(inside) == 1 else "both"
    for kind in ("text_encoder", "vae"):
        of_kind = [path for path in listed if _kind(path) == kind]
        away_from_gpu = "cached" if split else "swapped"
        fields[kind] = away_from_gpu if all(path in away for path in of_kind) and (of_kind or split) else "resident"
    return fields


def _check_inputs(settings: Settings, profile: ModelProfile) -> None:
    """Raises a VplanError for --extra_inputs that a sample of this model does not have in an estimate."""
    for name in _extra_inputs(settings):
        why = next((why for start, why in BESIDE.items() if name.startswith(start)), None)
        if name in REFERENCES and not (profile.shape.references or profile.shape.takes_references):
            why = f"its tokens stand beside the image's, and {profile.title} takes none"
        if why is not None:
            raise VplanError(f"--extra_inputs {name} is not priced ({why})", f"leave {name} out")


def _extra_inputs(settings: Settings) -> list[str]:
    return [name.strip() for name in str(settings.get("--extra_inputs") or "").split(",")]


def _references(settings: Settings) -> Fields:
    """One reference image a sample for a model that takes some when they are asked for; else as many as is usual."""
    asked = set(REFERENCES) & set(_extra_inputs(settings)) and _profile(settings).shape.takes_references
    return {"references": 1 if asked else None}


def _write_references(fields: Fields) -> Settings:
    asked = fields["references"] and lookup.model(fields["model"]).shape.takes_references
    return {"--extra_inputs": REFERENCES[0]} if asked else {}


def _write_models(fields: Fields) -> Settings:
    files = files_of(fields)
    where = (fields["text_encoder"], fields["vae"])
    settings: Settings = {PATHS[0]: ",".join(files)}
    if where == ("cached", "cached"):
        settings |= {"--task": "sft:train", "--offload_models": ",".join(files[1:])}
    elif where != ("resident", "resident"):
        why = "text encoders and VAE are cached together by --task sft:data_process, or stay on the GPU together"
        shared = "resident" if "resident" in where else "cached"
        names = ("text_encoder", "vae")
        raise InexpressibleError(
            *(UnsupportedValue(name, fields[name], shared, why) for name in names if fields[name] != shared)
        )
    return settings


def _frames(settings: Settings) -> Fields:
    return {"frames": int(settings.get("--num_frames", 81)) if _profile(settings).kind == "video" else 1}


def _write_frames(fields: Fields) -> Settings:
    frames = fields["frames"]
    if lookup.model(fields["model"]).kind == "image":
        if frames != 1:
            raise InexpressibleError(UnsupportedValue("frames", frames, 1, "the model makes images"))
        return {}
    return {"--num_frames": frames} if frames != 81 else {}


def _checkpointing(settings: Settings) -> Fields:
    """Wan's is always on, with a warning; other families' obey the flags."""
    if settings.get("--use_gradient_checkpointing_offload"):
        return {"gradient_checkpointing": "offload"}
    on = settings.get("--use_gradient_checkpointing") or _is_wan(_profile(settings).name)
    return {"gradient_checkpointing": "full" if on else "none"}


def _write_checkpointing(fields: Fields) -> Settings:
    mode, wan = fields["gradient_checkpointing"], _is_wan(fields["model"])
    if mode == "offload":
        return {"--use_gradient_checkpointing_offload": True}
    if mode in ("partial", "fp8") or (mode == "none" and wan):
        why = f"every block is checkpointed, Wan's always ({AT} examples/wanvideo/model_training/train.py)"
        raise InexpressibleError(UnsupportedValue("gradient_checkpointing", mode, "full", why))
    return {"--use_gradient_checkpointing": True} if mode == "full" and not wan else {}


def targets(settings: Settings) -> Fields:
    """Wan's layers by name; of other models those of their example scripts, which are the model's usual ones here."""
    profile = _profile(settings)
    if not _is_wan(profile.name):
        return {"lora_targets": None}
    names = str(settings.get("--lora_target_modules", ",".join(WAN_LAYERS))).split(",")
    unknown = [name for name in names if name.strip() not in WAN_LAYERS]
    if unknown:
        fix = f"supported: adapters on {','.join(WAN_LAYERS)}"
        raise VplanError(f"--lora_target_modules: {', '.join(unknown)} of Wan is not known here", fix)
    ours = {WAN_LAYERS[name.strip()] for name in names}
    if ours == set(profile.lora.targets):
        return {"lora_targets": None}
    return {"lora_targets": tuple(layer for layer in WAN_LAYERS.values() if layer in ours)}


def write_targets(fields: Fields) -> Settings:
    """The setting with the names that DiffSynth gives to the adapted layers of Wan. Raises an InexpressibleError for
    other layers."""
    profile = lookup.model(fields["model"])
    targets = fields["lora_targets"] or profile.lora.targets
    names = [name for name, layer in WAN_LAYERS.items() if layer in targets]
    if len(names) != len(targets):
        why = f"it names layers its own way, and these we know: {', '.join(WAN_LAYERS.values())}"
        raise InexpressibleError(UnsupportedValue("lora_targets", fields["lora_targets"], None, why))
    return {"--lora_target_modules": ",".join(names)} if names != list(WAN_LAYERS) else {}


OPTIMIZERS = {
    "torch.optim.AdamW": "adamw",
    "bitsandbytes.optim.AdamW8bit": "adamw-8bit",
    "bitsandbytes.optim.Adam8bit": "adamw-8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw-8bit-paged",
    "prodigyopt.Prodigy": "prodigy",
}
ADAFACTOR = "transformers.Adafactor"


def _optimizer(value: object) -> object:
    if value == ADAFACTOR:  # runner.py gives every optimizer lr and weight_decay, and nothing else
        fault = f"--customized_optimizer {ADAFACTOR} ends at once: it takes no lr beside its relative_step=True"
        raise VplanError(fault, "use bitsandbytes.optim.AdamW8bit")
    return one_of(OPTIMIZERS, "--customized_optimizer")(value)


QUANTISED = {"bitsandbytes_nf4": "nf4", "torchao_int8_w8a16": "int8"}


def _format_of_files(settings: Settings, kind: str) -> str:
    """The format in which files of a kind come and stay: bf16, but for the repositories of quantised ones."""
    repositories = [path.partition(":")[0].rpartition("/")[2] for path in _listed(settings) if _kind(path) == kind]
    return next((PREQUANTISED[name] for name in repositories if name in PREQUANTISED), "bf16")


def _text_encoder_dtype(settings: Settings) -> Fields:
    return {"text_encoder_dtype": _format_of_files(settings, "text_encoder")}


def _write_text_encoder_dtype(fields: Fields) -> Settings:
    if fields["text_encoder_dtype"] != "bf16":
        why = "everything is loaded in bf16"
        raise InexpressibleError(UnsupportedValue("text_encoder_dtype", fields["text_encoder_dtype"], "bf16", why))
    return {}


def _plain(settings: Settings) -> Fields:
    """Everything is loaded in bf16, adapters too; accelerate's mixed precision adds autocast. fp8 and 4 bits are for
    frozen weights, by the name of their file."""
    weights = _format_of_files(settings, "weights")
    base = [path for path in _listed(settings) if _kind(path) == "weights"]
    if set(base) & set(str(settings.get("--fp8_models") or "").split(",")):
        weights = "fp8"
    for entry in str(settings.get("--quant_options") or "").split(";"):
        path, _, method = entry.rpartition(":")
        if path in base:
            weights = one_of(QUANTISED, "--quant_options")(method.partition("/")[0])
    precision = str(settings.get("launch:--mixed_precision", "no"))
    return {
        "weights_dtype": weights,
        "adapter_dtype": "bf16",
        "autocast": precision if precision in ("bf16", "fp16") else "none",
    }


def _write_plain(fields: Fields) -> Settings:
    settings: Settings = {}
    if fields["autocast"] != "none":
        settings["launch:--mixed_precision"] = fields["autocast"]
    weights, base = fields["weights_dtype"], files_of(fields)[0]
    if weights == "fp8":
        settings["--fp8_models"] = base
    elif weights != "bf16":
        why = "models are loaded in bf16, or quantised"
        method = word_for(QUANTISED, "weights_dtype", "bf16", why)(weights)
        settings["--quant_options"] = f"{base}:{method}"
    return settings


def _method(settings: Settings) -> Fields:
    """What trains: everything is frozen but the parts named (diffsynth/diffusion/training_module.py:302). Parts that
    stand beside the model, as a ControlNet does, are not estimated."""
    parts = [part.strip() for part in str(settings.get("--trainable_models") or "").split(",") if part.strip()]
    if settings.get("--lora_base_model") or not parts:
        return {"method": "lora", "trainable": ()}
    folder = str(settings.get("script", "")).rpartition("/model_training/")[0].rpartition("/")[2]
    if ("unet" if folder in UNETS else BASE) in parts:
        return {"method": "full", "trainable": ()}
    model = _profile(settings).name
    unknown = [part for part in parts if model not in TRAINABLE.get(part, {})]
    if unknown:
        fault = f"--trainable_models {', '.join(unknown)[:80]}: parts beside the base model are not estimated"
        raise VplanError(fault, "supported: dit, vace of VACE, animate_adapter of Animate")
    return {"method": "full", "trainable": tuple(name for part in parts for name in TRAINABLE[part][model])}


def _write_method(fields: Fields) -> Settings:
    if fields["method"] == "sample":
        raise InexpressibleError(UnsupportedValue("method", "sample", "lora", "these scripts train"))
    if fields["method"] == "lora":
        return {"--lora_base_model": BASE}
    wanted, model = tuple(fields["trainable"]), fields["model"]
    part = next((part for part, names in TRAINABLE.items() if names.get(model) == wanted), None)
    if wanted and part is None:
        why = "it trains whole parts: dit, vace, animate_adapter"
        raise InexpressibleError(UnsupportedValue("trainable", wanted, (), why))
    return {"--trainable_models": part or BASE}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if settings.get("--use_gradient_checkpointing") and _is_wan(fields["model"]):
        yield Remark("--use_gradient_checkpointing", f"Wan's blocks are always checkpointed, with or without it ({AT})")
    if settings.get("--max_pixels") and settings.get("--height") and settings.get("--width"):
        yield Remark("--max_pixels", "--height and --width fix the size of every clip")
    offloaded = str(settings.get("launch:--offload_param_device", "none"))
    if offloaded != "none" and fields["sharding"] in ("zero-1", "zero-2"):
        why = f"{fields['sharding']} does not split parameters, so DeepSpeed ignores it: only stage 3 does"
        yield Remark("offload_param_device", why)


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    profile = lookup.model(fields["model"])
    if profile.kind == "video" and "--num_frames" not in settings:
        yield "81 frames, the default of --num_frames"
    if not (settings.get("--height") and settings.get("--width")):
        yield "without --height and --width every clip keeps its size, up to --max_pixels"
    yield from own_model_notes("diffsynth", fields)
    if fields["method"] == "full" and profile.trained_with("diffsynth", "last-encoder-in-model"):
        yield f"{profile.text_encoders[-1].name} is trained too, which is not estimated, and takes more than this"
    if _is_wan(profile.name) and not settings.get("--use_gradient_checkpointing"):
        yield f"checkpointing is on without a flag: forced for Wan since 72af7122 (2025-12-04, {AT})"
    if settings.get("--enable_model_cpu_offload"):
        yield OFFLOAD_NOTE
    elif fields["text_encoder"] == fields["vae"] == "resident":
        width = BYTES_PER_PARAMETER[fields["text_encoder_dtype"]]
        nbytes = 2 * profile.vae.parameters + width * sum(encoder.parameters for encoder in profile.text_encoders)
        names = ", ".join(encoder.name for encoder in profile.text_encoders)
        yield f"{names} and VAE ({format_gib(int(nbytes))}) stay on the GPU beside the model in task sft"
    if settings.get("--enable_optimizer_cpu_offload"):
        yield f"--enable_optimizer_cpu_offload{MAY_NEED_LESS}"
    yield from stage_3_notes(settings, fields)
    yield "one sample per step: there is no batch-size flag"
    if not _is_wan(profile.name) and fields["method"] == "lora":
        yield "LoRA estimated on the model's usual layers"


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """name -> text of one shell script: the caching command where one is needed, then the training command."""
    model = lookup.model(plan.job.model)
    launcher = ["accelerate", "launch", f"--num_processes {plan.machine.world}"]
    if plan.machine.nodes > 1:
        launcher.append(f"--num_machines {plan.machine.nodes}")
    settings = {"script": f"examples/{folder_of(model.name)}/model_training/train.py", **settings}
    data = {"--dataset_base_path": "data/my_set", "--dataset_metadata_path": "data/my_set/metadata.csv"}
    extra: dict[str, object] = {"--learning_rate": "1e-4", "--num_epochs": 5, "--output_path": "models/train/out"}
    extra["--remove_prefix_in_ckpt"] = "pipe.dit."
    extra |= INPUTS.get(model.name, {})
    if "--extra_inputs" in settings:
        extra["--data_file_keys"] = f"image,{settings['--extra_inputs']}"
    if (model.name, plan.job.experts) in BOUNDARIES:
        most, least = BOUNDARIES[model.name, str(plan.job.experts)]
        extra |= {"--max_timestep_boundary": most, "--min_timestep_boundary": least}
    text, train = script_head(plan), command_settings(settings)
    if plan.strategy.text_encoder == "cached":
        # Caching has no optimizer, without which DeepSpeed ends: "zero stage 2 requires an optimizer" (0.19.8).
        by_engine = plan.strategy.sharding.startswith("zero")
        alone = {name: value for name, value in train.items() if not (by_engine and name.startswith("launch:"))}
        # The model waits on disk for its turn that never comes, where it can be neither quantised nor in fp8.
        alone = {name: value for name, value in alone.items() if name not in (QUANT, FP8)}
        caching = alone | {"--task": "sft:data_process", OFFLOADED: _listed(settings)[0]}
        text += command_line(caching, data | extra | {"--output_path": "models/train/cache"}, launcher)
        data = {"--dataset_base_path": "models/train/cache"}
    if plan.trainer.endswith(f"@{MODEL_OFFLOAD}"):
        extra["--enable_model_cpu_offload"] = True
    return {"train.sh": text + command_line(train, data | extra, launcher)}


def _version(settings: Settings, fields: Fields) -> str:
    """Of the terms in `planner.layout.trainer_terms.diffsynth`."""
    if settings.get("--enable_model_cpu_offload"):
        return MODEL_OFFLOAD
    told = str(settings.get("launch:--zero3_init_flag", "")).lower() == "true"
    return ZERO_INIT if told and settings.get("--initialize_model_on_cpu") and fields["sharding"] == "zero-3" else ""


def _table(*bindings: Binding | When) -> tuple[Binding | When, ...]:
    return (
        *bindings,
        Value("height", "--height", None),
        Value("width", "--width", None),
        Fixed("batch_size", 1, "its dataloader gives one sample at a time (diffsynth/diffusion/runner.py)"),
        Fixed("optimizer_step", "foreach", "default torch.optim.AdamW"),
        Fixed("grad_buckets", "copy", "accelerate's DDP without gradient_as_bucket_view"),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("lora_dropout", "buckets", "text_tokens", "validation"),
        FunctionPair(
            ("text_encoder_dtype",),
            (),
            _text_encoder_dtype,
            _write_text_encoder_dtype,
            {"text_encoder_dtype": "bf16; Ideogram 4's also as its repository has it"},
        ),
        *our_defaults("compute_dtype", "checkpointed_blocks", "ema", "swap_blocks", "vae_dtype"),
        *our_defaults("vae_tiling", "vae_slicing", "inactive_expert", "validation_mode", "group_offload"),
        *our_defaults("group_offload_stream", "attention", "compile", "context_parallel"),
        *our_defaults("adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
    )


def _is_full(fields: Fields) -> bool:
    return bool(fields["method"] == "full")


def _split_words(settings: Settings) -> list[str]:
    """The two-command split with the user's own files."""
    encoders = [path for path in _listed(settings) if _kind(path) != "weights"]
    return ["--task sft:train", f"--offload_models {','.join(encoders)}"]


DIALECT = Dialect(
    name="diffsynth",
    title="DiffSynth-Studio",
    source="https://github.com/modelscope/DiffSynth-Studio at fed7b18",
    scripts=tuple(f"examples/{folder}/model_training/train.py" for folder in FOLDERS.values()),
    table=_table(
        FunctionPair(
            ("model", "experts", "text_encoder", "vae"),
            (*PATHS, "--task", "--offload_models"),
            _models,
            _write_models,
            {
                "model": "--model_id_with_origin_paths",
                "experts": "high or low, by the file",
                "text_encoder": "resident, cached (with the VAE)",
                "vae": "resident, cached (with the text encoder)",
            },
        ),
        FunctionPair(
            ("method", "trainable"),
            ("--lora_base_model", "--trainable_models"),
            _method,
            _write_method,
            {"method": "lora, full", "trainable": "--trainable_models: dit, vace, animate_adapter"},
        ),
        When("method", frozenset({"lora"}), Value("lora_rank", "--lora_rank", 32)),
        When(
            "method",
            frozenset({"lora"}),
            FunctionPair(
                ("lora_targets",),
                ("--lora_target_modules",),
                targets,
                write_targets,
                {"lora_targets": "--lora_target_modules (names known for Wan)"},
            ),
        ),
        FunctionPair(
            ("references",),
            ("--extra_inputs",),
            _references,
            _write_references,
            {"references": "--extra_inputs edit_image"},
        ),
        FunctionPair(("frames",), ("--num_frames",), _frames, _write_frames, {"frames": "--num_frames"}),
        FunctionPair(
            ("gradient_checkpointing",),
            ("--use_gradient_checkpointing", "--use_gradient_checkpointing_offload"),
            _checkpointing,
            _write_checkpointing,
            {"gradient_checkpointing": "full, offload (none for models other than Wan)"},
        ),
        Value("gradient_accumulation", "--gradient_accumulation_steps", 1),
        Value(
            "optimizer",
            "--customized_optimizer",
            "adamw",
            _optimizer,
            word_for(OPTIMIZERS, "optimizer", "adamw"),
        ),
        engine(
            _plain,
            _write_plain,
            {"weights_dtype": "bf16; fp8, int8, nf4 for a frozen base", "adapter_dtype": "bf16"},
            NO_FSDP,
            with_deepspeed=lambda fields: SAVED_WHOLE if fields["sharding"] == "zero-3" else {},
            context=lambda fields: {PATHS[0]: ",".join(files_of(fields))},
        ),
    ),
    read_script=read_script,
    stops=stops,
    remarks=_remarks,
    notes=_notes,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"gradient_checkpointing": "offload"}, OFFLOAD_COST),
        Move({"text_encoder": "cached", "vae": "cached"}, SPLIT_COST, words_for=_split_words),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move({"sharding": "zero-2", **DEEPSPEED}, "every GPU holds a share of gradients and states", when=several_gpus),
        Move({"sharding": "zero-3", **DEEPSPEED}, "weights are gathered for every block", when=several_gpus),
        # As examples/*/model_training have them, for one GPU too: accelerate_config_zero2offload.yaml,
        # special/low_vram_training/deepspeed_zero3_cpuoffload.yaml.
        Move({"sharding": "zero-2", **ON_HOST, **DEEPSPEED}, "the optimizer steps in host RAM", when=_is_full),
        Move(
            {"sharding": "zero-3", **ON_HOST, "offload_params": "cpu", **DEEPSPEED},
            "weights come from host RAM for every block, and the optimizer steps there",
            when=_is_full,
        ),
    ),
    files=files,
    version=_version,
)
