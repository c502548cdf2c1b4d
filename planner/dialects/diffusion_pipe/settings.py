"""diffusion-pipe's words and ours, both ways, and its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from planner.catalog import lookup
from planner.dialects.base import block_swap, config_text, flags
from planner.dialects.base.bindings import (
    Binding,
    Choice,
    Fields,
    Fixed,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
    Value,
    When,
    pair,
)
from planner.dialects.base.commands import refused_flags
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, one_of, our_defaults, word_for
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import launch_settings
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.base.padded_prompts import padded_prompts
from planner.dialects.base.script import PythonCommand, Script
from planner.dialects.base.values import integer, number
from planner.dialects.diffusion_pipe import evaluation, kronecker_adapter
from planner.dialects.diffusion_pipe.models import (
    AT,
    BATCH,
    BUCKETS,
    IMAGE_BATCH,
    PAIRED,
    TEXT_TOKENS,
    TYPES,
    WHICH,
    edits,
    model_of,
    named_model,
    references_of,
    rows_of,
    shape_of,
    write_model,
    write_references,
    write_shape,
)
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.diffusion_pipe import LLAMA_IN_4_BITS
from planner.layout.trainer_terms.lora_layers import HALF_ADAPTERS, more_layers_note, on_all_linear
from planner.spec.job import QUANTISED
from planner.spec.plan import Plan
from planner.untrusted import flat

# ---- numbers, adapters, steps

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
TEXT_ENCODERS = "model.text_encoders["
"""A list of tables, each with the ``path`` and ``type`` of one (docs/supported_models.md, Flux2)."""

OPTIMIZERS = {
    "adamw_optimi": "adamw",
    "adamw": "adamw",
    "AdamW8bitKahan": "adamw-8bit",
    "adamw8bit": "adamw-8bit",
    "automagic": "adamw-8bit",
    "Prodigy": "prodigy",
    "Lion": "lion",
    "CAME": "came",
    "Muon": "muon",
    "offload": "adamw",
}
"""Behind the named ones any class of pytorch_optimizer (train.py). automagic keeps a rate in 8 bits and a sign
in a byte of each number, and a Kahan sum of what is bf16 (optimizers/automagic.py), as much as AdamW8bitKahan."""


def _formats_of(settings: Settings) -> Fields:
    dtype = one_of(DTYPES, "model.dtype")(settings.get("config:model.dtype", "bfloat16"))
    storage = str(
        settings.get("config:model.transformer_dtype") or settings.get("config:model.diffusion_model_dtype") or ""
    )
    weights = "fp8" if storage.startswith("float8") else storage if storage == "nf4" else dtype
    adapter = DTYPES.get(str(settings.get("config:adapter.dtype")), dtype)
    lora = "config:adapter.type" in settings
    return {
        "weights_dtype": weights if lora else dtype,
        "compute_dtype": dtype,
        "autocast": dtype if dtype != "fp32" else "none",
        "adapter_dtype": "fp32" if lora and weights in QUANTISED else adapter,  # recorded so, see planner.tape.variants
    }


def _write_formats(fields: Fields) -> Settings:
    compute, weights = fields["compute_dtype"], fields["weights_dtype"]
    refused = []
    if fields["autocast"] != (compute if compute != "fp32" else "none"):
        instead = compute if compute != "fp32" else "none"
        refused.append(
            UnsupportedValue("autocast", fields["autocast"], instead, "layers run under autocast to model.dtype")
        )
    quantised = weights == "fp8" and fields["method"] == "lora"
    if weights != compute and not quantised:
        refused.append(
            UnsupportedValue("weights_dtype", weights, compute, "weights are model.dtype, or float8 under LoRA")
        )
    if fields["method"] == "full" and fields["adapter_dtype"] != compute:  # there are none
        refused.append(
            UnsupportedValue("adapter_dtype", fields["adapter_dtype"], compute, "full training has no adapters")
        )
    if quantised and fields["adapter_dtype"] != "fp32":
        why = "adapters over a quantised base are counted in fp32"
        refused.append(UnsupportedValue("adapter_dtype", fields["adapter_dtype"], "fp32", why))
    if refused:
        raise InexpressibleError(*refused)
    word = word_for(DTYPES, "compute_dtype", "bf16")
    settings: Settings = {"config:model.dtype": word(compute)}
    if quantised:
        settings["config:model.transformer_dtype"] = "float8"
    if fields["method"] == "lora":
        settings["config:adapter.dtype"] = word(fields["adapter_dtype"])
    return settings


def _method_of(settings: Settings) -> Fields:
    kind = settings.get("config:adapter.type")
    if kind not in (None, "lora", "lokr"):
        fault = f"adapter.type {quoted(kind)} is not supported here"
        raise VplanError(fault, "supported: lora, lokr read only, and no adapter at all")
    if kind == "lokr":
        rank = kronecker_adapter.rank_of(settings, _targets_of(settings))
        return {"method": "lora", "lora_rank": rank, "lora_dropout": 0.0}
    return {
        "method": "lora" if kind else "full",
        "lora_rank": integer(settings.get("config:adapter.rank", 16), "adapter.rank"),
        "lora_dropout": number(settings.get("config:adapter.dropout", 0.0), "adapter.dropout"),
    }


def _write_method(fields: Fields) -> Settings:
    if fields["method"] == "sample":
        raise InexpressibleError(UnsupportedValue("method", "sample", "lora", "it trains"))
    if fields["method"] == "full":
        return {}
    settings: Settings = {"config:adapter.type": "lora", "config:adapter.rank": fields["lora_rank"]}
    return settings | ({"config:adapter.dropout": fields["lora_dropout"]} if fields["lora_dropout"] else {})


def _targets_of(settings: Settings) -> Fields:
    if "config:adapter.type" not in settings:
        return {"lora_targets": None}
    profile = lookup.model(model_of(settings)["model"])
    return {"lora_targets": on_all_linear(profile, _formats_of(settings)["weights_dtype"])}


def _write_targets(fields: Fields) -> Settings:
    profile = lookup.model(fields["model"])
    targets = on_all_linear(profile, fields["weights_dtype"]) if fields["method"] == "lora" else None
    if fields["lora_targets"] != targets:
        why = f"adapters are on every linear layer of the blocks ({AT} models/base.py get_target_modules)"
        raise InexpressibleError(UnsupportedValue("lora_targets", fields["lora_targets"], targets, why))
    return {}


def _steps_of(settings: Settings) -> Fields:
    name = settings.get("config:optimizer.type", "adamw_optimi")
    release = settings.get("config:optimizer.gradient_release")
    return {
        "optimizer": one_of(OPTIMIZERS, "optimizer.type")(name),
        "optimizer_step": "backward" if release else "foreach",
        "offload_optimizer": "cpu" if str(name).lower() == "offload" else "none",
    }


def _write_steps(fields: Fields) -> Settings:
    optimizer, step, where = fields["optimizer"], fields["optimizer_step"], fields["offload_optimizer"]
    refused = []
    if step not in ("foreach", "backward"):
        refused.append(
            UnsupportedValue("optimizer_step", step, "foreach", "it has gradient_release, or steps after backward")
        )
    elif step == "backward" and (fields["gpus"] * fields["nodes"] > 1 or where != "none"):
        why = f"gradient_release needs one GPU per stage ({AT} train.py)"
        refused.append(UnsupportedValue("optimizer_step", step, "foreach", why))
    if where == "nvme" or (where == "cpu" and optimizer != "adamw"):
        refused.append(
            UnsupportedValue("offload_optimizer", where, "none", "type = 'offload' keeps AdamW's states in host RAM")
        )
    if refused:
        raise InexpressibleError(*refused)
    word = "offload" if where == "cpu" else word_for(OPTIMIZERS, "optimizer", "adamw")(optimizer)
    settings: Settings = {"config:optimizer.type": word}
    return settings | ({"config:optimizer.gradient_release": True} if step == "backward" else {})


def _spread_of(settings: Settings) -> Fields:
    stages = integer(settings.get("config:pipeline_stages", 1), "pipeline_stages")
    if stages > 1:
        fault = f"pipeline_stages {stages}: a model cut over GPUs layer by layer is not priced"
        raise VplanError(fault, "it may well train so; priced is pipeline_stages = 1, the whole model on each GPU")
    world = settings.get("gpus", 1) * settings.get("nodes", 1)
    with_all_blocks = settings.get("config:disable_block_swap_for_eval") and evaluation.is_given(settings)
    if settings.get("config:blocks_to_swap") and with_all_blocks:
        fault = "disable_block_swap_for_eval has all blocks on the GPU while it evaluates, which is not priced"
        raise VplanError(fault, "leave it out, or eval_datasets")
    blocks = integer(settings.get("config:blocks_to_swap", 0), "blocks_to_swap")
    if blocks and _method_of(settings)["method"] != "lora":
        raise VplanError(f"diffusion-pipe refuses blocks_to_swap without an adapter ({AT} train.py)", "leave it out")
    return {
        "sharding": "ddp" if world > 1 else "none",
        "swap_blocks": block_swap.swapped("diffusion-pipe", model_of(settings)["model"], blocks),
    }


def _write_spread(fields: Fields) -> Settings:
    expected = "ddp" if fields["gpus"] * fields["nodes"] > 1 else "none"
    refused = []
    if fields["sharding"] != expected:
        why = f"it splits models by pipeline stages, not by ZeRO or FSDP ({AT} train.py)"
        refused.append(UnsupportedValue("sharding", fields["sharding"], expected, why))
    if fields["swap_blocks"] and fields["method"] != "lora":
        refused.append(
            UnsupportedValue("swap_blocks", fields["swap_blocks"], 0, f"only LoRA swaps blocks ({AT} train.py)")
        )
    if refused:
        raise InexpressibleError(*refused)
    settings: Settings = {"config:pipeline_stages": 1}
    blocks = block_swap.setting("diffusion-pipe", fields)
    return settings | ({"config:blocks_to_swap": blocks} if blocks else {})


CONDITIONER_RATE = "config:model.llm_adapter_lr"
IN_THE_LOOP = "config:model.cache_text_embeddings"
WITH_ENCODER = frozenset({"wan", "anima"})
"""``[model] type`` of those that encode in the loop where they are told to; others have no code for it
(models/wan/wan.py and cosmos_predict2.py ``InitialLayer``)."""


ALWAYS_WITH_ENCODER = frozenset({"sdxl"})
"""Those whose text encoders are trained (models/sdxl.py ``get_text_encoders``)."""


def _text_encoder_of(settings: Settings) -> Fields:
    kind = settings.get("config:model.type")
    in_the_loop = kind in ALWAYS_WITH_ENCODER or (settings.get(IN_THE_LOOP) is False and kind in WITH_ENCODER)
    return {"text_encoder": "resident" if in_the_loop else "cached"}


def _write_text_encoder(fields: Fields) -> Settings:
    where, kind = fields["text_encoder"], write_model(fields)["config:model.type"]
    if kind in ALWAYS_WITH_ENCODER:
        if where != "resident":
            why = "its text encoders are trained too"
            raise InexpressibleError(UnsupportedValue("text_encoder", where, "resident", why))
        return {}
    if where == "cached":
        return {}
    if where == "swapped" or kind not in WITH_ENCODER:
        why = "prompts are cached on disk before training"
        raise InexpressibleError(UnsupportedValue("text_encoder", where, "cached", why))
    return {IN_THE_LOOP: False}


CARRIES: config_text.FieldsBySetting = {
    BUCKETS: ("frames", "height", "width", "buckets"),
    BATCH: ("batch_size",),
    IMAGE_BATCH: ("buckets",),
    "config:model.type": ("model",),
    "config:model.dtype": ("compute_dtype", "autocast", "weights_dtype"),
    "config:model.transformer_dtype": ("weights_dtype",),
    "config:adapter.dtype": ("adapter_dtype",),
    "config:adapter.type": ("method",),
    "config:adapter.rank": ("lora_rank",),
    "config:adapter.dropout": ("lora_dropout",),
    "config:optimizer.type": ("optimizer", "offload_optimizer"),
    "config:optimizer.gradient_release": ("optimizer_step",),
    "config:pipeline_stages": ("sharding",),
    "config:blocks_to_swap": ("swap_blocks",),
}
TABLE: tuple[Binding | When, ...] = (
    *(GPUS, NODES, EXPANDABLE),
    pair(_method_of, _write_method, ("config:adapter.type", "config:adapter.rank", "config:adapter.dropout"),
             method="lora, full", lora_rank="adapter.rank", lora_dropout="adapter.dropout"),
    pair(model_of, write_model, WHICH, model=", ".join(TYPES), experts="one of two"),
    pair(shape_of, write_shape, (BUCKETS, BATCH, IMAGE_BATCH), frames="size_buckets", height="size_buckets",
             width="size_buckets", batch_size="micro_batch_size_per_gpu", buckets="size_buckets"),
    pair(_formats_of, _write_formats,
             ("config:model.dtype", "config:model.transformer_dtype", "config:adapter.dtype"),
             weights_dtype="model.dtype, float8 under LoRA", compute_dtype="model.dtype", autocast="model.dtype",
             adapter_dtype="adapter.dtype"),
    pair(_targets_of, _write_targets, (), lora_targets="all linear layers"),
    Choice("gradient_checkpointing", {
        "none": {"config:activation_checkpointing": False},
        "full": {"config:activation_checkpointing": True},
        "offload": {"config:activation_checkpointing": "unsloth"},
    }, "every layer is checkpointed, or none"),
    Fixed("checkpointed_blocks", None),
    pair(_steps_of, _write_steps, ("config:optimizer.type", "config:optimizer.gradient_release"),
             optimizer="optimizer.type", optimizer_step="foreach; backward by gradient_release on one GPU",
             offload_optimizer="none, cpu with adamw"),
    Value("gradient_accumulation", "config:gradient_accumulation_steps", 1,
          lambda value: integer(value, "gradient_accumulation_steps")),
    pair(_spread_of, _write_spread, ("config:pipeline_stages", "config:blocks_to_swap"),
             sharding="none on one GPU, ddp on several", swap_blocks="blocks_to_swap, with LoRA"),
    When("sharding", frozenset({"ddp"}), Fixed("grad_buckets", "copy", "DeepSpeed averages gradients in buckets")),
    pair(_text_encoder_of, _write_text_encoder, (IN_THE_LOOP,), text_encoder="cached; resident (Wan, Anima, SDXL)"),
    Fixed("vae", "cached", "latents are cached on disk before training"),
    Fixed("validation_mode", "off", "its evaluation is a loss: it samples nothing"),
    Choice("compile", {"none": {}, "full": {"config:compile": True}}, "compile = true is the whole model"),
    Fixed("attention", "sdpa"),
    padded_prompts(model_of, TEXT_TOKENS, f"its prompts are filled up to 512 tokens ({AT} models/flux.py)"),
    pair(references_of, write_references, (), references="a model's own; one by control_path"),
    *our_defaults("trainable", "validation", "master_weights", "ema", "offload_gradients",
           "offload_params", "text_encoder_dtype", "vae_dtype", "vae_tiling", "vae_slicing", "inactive_expert",
           "group_offload", "group_offload_stream", "context_parallel", "adapter_inputs", "nested_checkpointing",
           "fsdp_replicas"),
)  # fmt: skip


def read_script(script: Script) -> Invocation | None:
    """`deepspeed train.py --deepspeed --config FILE`, or that config itself; the dataset's file is read too."""
    launch: Settings = {}
    notes = list(script.notes)
    refused: tuple[Remark, ...] = ()
    loose: tuple[str, ...] = ()
    config = script.config
    if config is None:
        programs = [
            program
            for program in script.programs
            if PurePosixPath(program.script).name == "train.py" and _is_own(program)
        ]
        if not programs:
            return None
        launch, more = launch_settings(programs[-1], script, {})
        parsed = flags.script("diffusion-pipe", "train.py").parse(_without_deepspeed(programs[-1].arguments))
        notes += more
        refused, loose = refused_flags(parsed), parsed.unknown
        path = str(parsed.values["--config"])
        config = script.document(path)
        if config is None:
            raise VplanError(f"the config {script.missing(path)}", "run vplan check where the file is, or supply it")
    keys = flat(config, script.name)
    if not {"model.type", "optimizer.type"} <= keys.keys() or not OWN & keys.keys():
        return None
    read = flags.script("diffusion-pipe", "config.toml").parse_config(config)
    settings: Settings = {"script": "train.py", **launch}
    settings |= {f"config:{key}": value for key, value in keys.items()}
    settings.setdefault("config:activation_checkpointing", False)
    path = str(config.get("dataset", ""))
    data = script.document(path) if path else None
    if data is None:
        notes.append(f"the dataset {script.missing(path)}: estimated at the model's default shape")
    else:
        settings["dataset"] = True
        settings |= {f"dataset:{key}": value for key, value in flat(data, path).items()}
    settings |= evaluation.sets_of(config, script)
    removed = tuple(Remark(name, why) for name, why in read.removed.items())
    unknown = (*loose, *(key for key in read.unknown if not key.startswith(TEXT_ENCODERS)))
    return Invocation("diffusion-pipe", settings, unknown, removed, tuple(notes), refused)


OWN = frozenset({"dataset", "micro_batch_size_per_gpu", "pipeline_stages", "adapter.type", "blocks_to_swap"})
"""Keys of which its configs have at least one, and other trainers' with a model's and an optimizer's type have none."""


def _is_own(program: PythonCommand) -> bool:
    words = {word.partition("=")[0] for word in program.arguments}
    return "--config" in words and (program.launcher == "deepspeed" or "--deepspeed" in words)


def _without_deepspeed(words: Sequence[str]) -> list[str]:
    return [word for word in words if word != "--deepspeed"]  # deepspeed.add_config_arguments


def notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What the trainer does that the settings do not say, in words, with the source."""
    what = "latents and prompts are" if fields["text_encoder"] == "cached" else "latents are"
    yield f"{what} cached on disk before training, and it samples nothing ({AT})"
    if settings.get("config:model.type") in ALWAYS_WITH_ENCODER:
        yield f"its text encoders are trained too, whatever their learning rates ({AT} models/sdxl.py)"
    yield from own_model_notes("diffusion-pipe", fields)
    model = lookup.model(fields["model"])
    if model.trained_with("diffusion-pipe", "last-encoder-stays"):
        how = "in 4 bits" if settings.get("config:model.llama3_4bit") else "in 16 bits, or 4 by llama3_4bit"
        yield f"{model.text_encoders[-1].name} encodes in the loop and stays on the GPU, {how} ({AT} models/hidream.py)"
        if (length := settings.get("config:model.max_llama3_sequence_length")) not in (None, model.shape.text_tokens):
            yield f"max_llama3_sequence_length {length} is not estimated: as {model.shape.text_tokens}"
    if model.trained_with("diffusion-pipe", "last-encoder-in-model") and settings.get(CONDITIONER_RATE) != 0:
        what = "trained" if fields["method"] == "full" else "adapted"
        yield f"{model.text_encoders[-1].name} is {what} too, which is not estimated: llm_adapter_lr = 0 leaves it"
    yield from _edit_notes(settings, fields)
    if fields["method"] == "lora" and (note := more_layers_note(lookup.model(fields["model"]), fields["lora_targets"])):
        yield note
    if str(settings.get("config:optimizer.type", "")).lower() in ("adamw", "adamw8bit"):
        yield "estimated with the Kahan buffer of adamw_optimi and AdamW8bitKahan, which this optimizer has not"
    if str(settings.get("config:optimizer.type", "")).lower() == "automagic":
        yield "automagic is priced as AdamW8bitKahan, whose states take as much but for sums over rows and columns"
    if rows_of(settings, "dataset:resolutions") and not rows_of(settings, BUCKETS):
        yield "resolutions are areas: estimated as squares, and buckets of other sides have as many pixels"
    yield from evaluation.notes(settings, fields)
    if kronecker_adapter.is_lokr(settings):
        yield kronecker_adapter.note(settings, fields)


def _edit_notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What the dataset's images to edit, or their absence, make of the model."""
    model = lookup.model(fields["model"])
    if edits(settings) and (model.shape.references or fields["references"]):
        yield f"control_path: each image has one to edit beside it, of the sample's size ({AT} utils/dataset.py)"
    elif edits(settings):
        yield f"control_path is not estimated with {model.title}: this is the estimate without images to edit"
    elif PAIRED.get(fields["model"]) == named_model(settings):
        yield f"no directory has a control_path: trained without images to edit, as {model.title}"


def _version(settings: Settings, fields: Fields) -> str:
    """`HALF_ADAPTERS` where ``adapter.dtype`` is one of 16 bits over a quantised base, and `LLAMA_IN_4_BITS` where the
    encoder that stays is so."""
    dtype = DTYPES.get(str(settings.get("config:adapter.dtype")), fields["compute_dtype"])
    over = fields["method"] == "lora" and fields["weights_dtype"] in QUANTISED
    stays = lookup.model(fields["model"]).trained_with("diffusion-pipe", "last-encoder-stays")
    llama = LLAMA_IN_4_BITS if stays and settings.get("config:model.llama3_4bit") else ""
    half = HALF_ADAPTERS if over and dtype != "fp32" else ""
    return "-".join(filter(None, [half, llama, kronecker_adapter.version_of(settings, dtype)]))


def remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    """The given settings that have no effect, each with the reason."""
    if settings.get("config:reentrant_activation_checkpointing") and not settings.get(
        "config:activation_checkpointing"
    ):
        yield Remark("reentrant_activation_checkpointing", "it acts with activation_checkpointing only")
    if settings.get("config:disable_block_swap_for_eval") and not fields["swap_blocks"]:
        yield Remark("disable_block_swap_for_eval", "no blocks are swapped")


MOVES = (
    Move({"expandable_segments": True}, "free"),
    Move({"gradient_checkpointing": "full"}, "one more forward pass"),
    Move({"gradient_checkpointing": "offload"}, "slower, and host RAM for the checkpoints"),
    Move(
        {"swap_blocks": 8},
        "slower, and host RAM for the blocks",
        by_fields=block_swap.steps("diffusion-pipe", (8, 16, 20, 26, 32, 38)),
    ),
    Move({"optimizer_step": "backward"}, "no gradient accumulation"),
    Move({"optimizer": "adamw-8bit"}),
    Move({"weights_dtype": "fp8"}),
    Move({"offload_optimizer": "cpu"}, "slower, and host RAM for the states"),
)


def _files(plan: Plan, settings: Settings) -> dict[str, str]:
    """dataset.toml, config.toml and train.sh."""
    carries = config_text.fields_by_setting(DIALECT, settings, CARRIES)
    directory: Settings = {"path": "data/my_set", "num_repeats": 1}
    if plan.job.references:  # examples/flux_kontext_dataset.toml
        directory["control_path"] = "data/my_references"
    data = {"size_buckets": settings[BUCKETS], "directory": [directory]}
    head = "The dataset. The comment after each line names its plan field. Fill in the folder."
    dataset = config_text.toml(data, config_text.comments(carries, "dataset:"), head)
    keys = config_text.tree(settings, "config:")
    config: Settings = {"output_dir": "out", "dataset": "dataset.toml", "epochs": 100, "warmup_steps": 10}
    config |= {"gradient_clipping": 1.0, "save_every_n_epochs": 5, "checkpoint_every_n_minutes": 120, **keys}
    config["optimizer"] |= {"lr": 2e-5, "betas": [0.9, 0.99], "weight_decay": 0.01}
    head = "The comment after each line names its plan field. Fill in the paths."
    nodes = f" --num_nodes={plan.machine.nodes}" if plan.machine.nodes > 1 else ""
    lines = ["#!/bin/bash", "set -e"]
    if plan.strategy.expandable_segments:
        lines += ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    lines += [f"deepspeed --num_gpus={plan.machine.gpus}{nodes} train.py --deepspeed --config config.toml"]
    return {
        "dataset.toml": dataset,
        "config.toml": config_text.toml(config, config_text.comments(carries, "config:"), head),
        "train.sh": "\n".join(lines) + "\n",
    }


DIALECT: Dialect = Dialect(
    name="diffusion-pipe",
    title="diffusion-pipe",
    source="https://github.com/tdrussell/diffusion-pipe at 8f83dbf",
    scripts=("train.py",),
    table=TABLE,
    read_script=read_script,
    remarks=remarks,
    notes=notes,
    version=_version,
    moves=MOVES,
    files=_files,
)
