"""ltx-trainer's YAML configs (packages/ltx-trainer of Lightricks/LTX-2), read at 400fd31; read and not written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import Fields, Fixed, FunctionPair, Remark, Settings, Value
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, one_of, our_defaults, require_model
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Move
from planner.dialects.base.launchers import engine, launch_settings
from planner.dialects.base.script import Script
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.ltx_trainer import VIDEO_ALONE
from planner.untrusted import flat

AT = "ltx-trainer 400fd31 src/ltx_trainer"
CONFIG = "config:"
SIGNS = frozenset({"training_strategy", "model", "optimization"})
OPTIMIZERS = {"adamw": "adamw", "adamw8bit": "adamw-8bit"}
USUAL = frozenset({"to_q", "to_k", "to_v", "to_out.0"})
RECORDED = ("ltx-2.3", "ltx-2.5")
"""What is recorded of its own model (`planner.layout.trainer_terms.ltx_trainer`)."""
BASES = {"int8-quanto": "int8", "fp8-quanto": "int8", "fp8uz-quanto": "int8"}
"""Its quantised bases -> ours: float8 has the bytes of 8-bit integers, and its scales (optimum-quanto 0.2.7)."""


def read_script(script: Script) -> Invocation | None:
    """A config, alone or as a command of ``scripts/train.py`` names it: by keys that together only it has."""
    if script.config is not None:
        return _invocation(script.config, {}, script.name, script.notes) if script.config.keys() >= SIGNS else None
    for program in reversed(script.programs):
        if program.script.rpartition("/")[2] != "train.py":
            continue
        path = next((word for word in program.arguments if word.endswith((".yaml", ".yml"))), "")
        document = script.document(path) if path else None
        if document is not None and document.keys() >= SIGNS:
            launch, notes = launch_settings(program, script, {})
            return _invocation(document, launch, path, (*script.notes, *notes))
    return None


def _invocation(document: dict[str, Any], launch: Settings, name: str, notes: tuple[str, ...]) -> Invocation:
    parsed = flags.script("ltx-trainer", "config.yaml").parse_config(document)
    keys = {f"{CONFIG}{key}": value for key, value in flat(document, name).items()}
    return Invocation("ltx-trainer", {"script": "config.yaml", **launch, **keys}, parsed.unknown, notes=notes)


def _of(settings: Settings, name: str) -> Any:
    """A key's value, or its default."""
    value = settings.get(CONFIG + name)
    return flags.script("ltx-trainer", "config.yaml").default(name) if value is None else value


def _job(settings: Settings) -> Fields:
    """Only what is recorded of its own model is priced: diffusers' has one time step a clip, and takes less."""
    method = str(_of(settings, "model.training_mode"))
    if method != "lora":
        raise VplanError("full training in ltx-trainer is not recorded", "LoRA of LTX-2.3 and LTX-2.5 is")
    model = lookup.model(require_model(settings, f"{CONFIG}model.model_path", known=RECORDED))
    if not model.trained_with("ltx-trainer", "own-code"):
        fix = f"priced with this trainer: --model {', --model '.join(RECORDED)}"
        raise VplanError(f"{model.title} in ltx-trainer is not recorded", fix)
    return {"model": model.name, "method": method}


def _streams(settings: Settings) -> tuple[bool, bool]:
    """Whether video and sound take part in a step. A VplanError for what is not priced: sound alone, and clips that are
    concatenated as references."""
    if _of(settings, "training_strategy.name") == "video_to_video":
        fault = "training_strategy video_to_video puts reference clips before a clip, which is not priced"
        raise VplanError(fault, "text_to_video and flexible without reference conditions are")
    if _of(settings, "training_strategy.name") != "flexible":
        return True, bool(_of(settings, "training_strategy.with_audio"))
    video, audio = (
        any(key.startswith(f"{CONFIG}training_strategy.{name}.") for key in settings) for name in ("video", "audio")
    )
    for key, value in settings.items():
        if key.startswith(f"{CONFIG}training_strategy.") and key.endswith(".type") and value == "reference":
            fault = "a reference condition puts its tokens before a clip's, which is not priced"
            raise VplanError(fault, f"leave {key.removeprefix(CONFIG).rpartition('.')[0]} out")
    if not video:
        raise VplanError("training_strategy.audio alone, without video, is not priced", "add training_strategy.video")
    return video, audio


def _version(settings: Settings, fields: Fields) -> str:
    return "" if _streams(settings)[1] else VIDEO_ALONE


def _size(settings: Settings) -> Fields:
    """The clips are encoded beforehand, in the sizes that they got there: those of validation, unless they are told."""
    told = settings.get(f"{CONFIG}validation.video_dims") or [960, 544, 97]
    if not (isinstance(told, list) and len(told) == 3 and all(type(size) is int for size in told)):
        raise VplanError(f"validation.video_dims {quoted(told)} is no size", "it is [width, height, frames]")
    width, height, frames = told
    return {"frames": frames, "height": height, "width": width}


def _formats(settings: Settings) -> Fields:
    """Adapters are fp32 over a base in bf16 or rounded by Quanto."""
    half = str(_of(settings, "acceleration.mixed_precision_mode"))
    base, rounded = "bf16", settings.get(f"{CONFIG}acceleration.quantization")
    if rounded is not None:
        if rounded not in BASES:
            raise VplanError(f"acceleration.quantization {quoted(rounded)} is not priced", f"{', '.join(BASES)} are")
        base = BASES[rounded]
    return {"weights_dtype": base, "adapter_dtype": "fp32", "autocast": half if half in ("bf16", "fp16") else "none"}


def _samples(settings: Settings) -> bool:
    """Whether it makes samples: prompts are there, and an interval, which is 100 where it is not said."""
    named = any(
        key.startswith((f"{CONFIG}validation.samples[", f"{CONFIG}validation.prompts[")) for key in settings
    ) or any(settings.get(f"{CONFIG}validation.{name}") for name in ("samples", "prompts"))
    interval = f"{CONFIG}validation.interval"
    return named and not (interval in settings and settings[interval] is None)


def _validation(settings: Settings) -> Fields:
    """Guidance runs one sample after another, so that a batch is one (``validation_runner.py``)."""
    if not _samples(settings):
        return {"validation_mode": "off", "validation": None}
    return {"validation_mode": "on", "validation": {**_size(settings), "cfg": False}}


def _layers(settings: Settings) -> Fields:
    """The usual layers, of both streams and between them."""
    listed = settings.get(f"{CONFIG}lora.target_modules")
    if isinstance(listed, list) and frozenset(map(str, listed)) != USUAL:
        named = ", ".join(quoted(name) for name in listed[:4])
        fault = f"lora.target_modules {named} in ltx-trainer are not recorded"
        raise VplanError(fault, f"{', '.join(sorted(USUAL))} are")
    return {"lora_targets": None}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if _of(settings, "acceleration.load_text_encoder_in_8bit") and fields["validation_mode"] == "off":
        yield Remark("acceleration.load_text_encoder_in_8bit", "no prompts are encoded in this run")


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    size = "{frames} frames of {width}x{height}".format(**fields)
    yield f"clips are encoded beforehand (process_dataset.py): priced at {size}; --frames, --height, --width say else"
    yield (
        f"the text connectors are not frozen ({AT}/trainer.py _load_models): their gradients, as large as they are, "
        "stay on the GPU from the first step on, and nothing reads them"
    )
    if _of(settings, "acceleration.load_text_encoder_in_8bit") and fields["validation_mode"] != "off":
        yield f"acceleration.load_text_encoder_in_8bit{MAY_NEED_LESS}"


DIALECT = Dialect(
    name="ltx-trainer",
    title="ltx-trainer",
    source="https://github.com/Lightricks/LTX-2 at 400fd31",
    scripts=("config.yaml",),
    assigns=": ",
    steps=(f"{CONFIG}optimization.steps",),
    table=(
        FunctionPair(
            ("model", "method"),
            (f"{CONFIG}model.model_path", f"{CONFIG}model.training_mode"),
            _job,
            lambda fields: {},
            {"model": "ltx-2.3, ltx-2.5", "method": "lora"},
        ),
        Value("lora_rank", f"{CONFIG}lora.rank", 64, int),
        Value("lora_dropout", f"{CONFIG}lora.dropout", 0.0, float),
        FunctionPair(
            ("lora_targets",),
            (f"{CONFIG}lora.target_modules",),
            _layers,
            lambda fields: {},
            {"lora_targets": "the model's usual layers"},
        ),
        FunctionPair(
            ("frames", "height", "width"),
            (f"{CONFIG}validation.video_dims",),
            _size,
            lambda fields: {},
            dict.fromkeys(("frames", "height", "width"), "the sizes that clips were encoded in"),
        ),
        Value("batch_size", f"{CONFIG}optimization.batch_size", 2, int),
        Value("gradient_accumulation", f"{CONFIG}optimization.gradient_accumulation_steps", 1, int),
        Value(
            "optimizer",
            f"{CONFIG}optimization.optimizer_type",
            "adamw",
            one_of(OPTIMIZERS, "optimization.optimizer_type"),
        ),
        Value(
            "gradient_checkpointing",
            f"{CONFIG}optimization.enable_gradient_checkpointing",
            "none",
            lambda value: "full" if value else "none",
            lambda value: value == "full",
        ),
        engine(
            _formats,
            lambda fields: {},
            {"weights_dtype": "acceleration.quantization", "adapter_dtype": "fp32"},
            f"it casts the whole model to fp32 under a LoRA ({AT}/trainer.py _prepare_models_for_training)",
        ),
        FunctionPair(
            ("validation_mode", "validation"),
            (f"{CONFIG}validation.interval",),
            _validation,
            lambda fields: {f"{CONFIG}validation.interval": None if fields["validation_mode"] == "off" else 100},
            {"validation_mode": "off, on", "validation": "validation.video_dims"},
        ),
        Fixed("text_encoder", "cached", f"prompts are computed before training ({AT}/datasets.py)"),
        Fixed("vae", "cached", f"clips are encoded before training ({AT}/datasets.py)"),
        Fixed("vae_tiling", True, f"samples are decoded in tiles ({AT}/validation_runner.py)"),
        Fixed("optimizer_step", "foreach", "torch.optim.AdamW's own choice"),
        Fixed("grad_buckets", "copy", "accelerate's DDP without gradient_as_bucket_view"),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("experts", "trainable", "buckets", "text_tokens", "references"),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    version=_version,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move(
            {"weights_dtype": "int8"},
            "the frozen base is rounded to 8 bits",
            words_for=lambda settings: ["acceleration.quantization: int8-quanto"],
        ),
        Move({"validation_mode": "off"}, "no samples while it trains"),
    ),
)
