"""ai-toolkit's words and ours, both ways, and its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from planner.catalog import lookup
from planner.dialects.ai_toolkit.config_checks import stops
from planner.dialects.ai_toolkit.lokr import lokr_note, rank_of, write_rank
from planner.dialects.ai_toolkit.models import (
    ARCHES,
    AT,
    DATA,
    MODEL,
    NETWORK,
    NOISE,
    PROCESS,
    SAMPLE,
    TEXT_TOKENS,
    TRAIN,
    datasets_of,
    makes_samples,
    model_of,
    named_layers,
    qtype_of,
    references_of,
    shape_of,
    validation_of,
    version_of,
    write_model,
    write_references,
    write_shape,
    write_validation,
)
from planner.dialects.base import config_text, flags
from planner.dialects.base.bindings import (
    ONLY_LORA,
    Binding,
    Choice,
    Fields,
    Fixed,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
    When,
    pair,
)
from planner.dialects.base.commands import refused_flags
from planner.dialects.base.common_bindings import EXPANDABLE, one_of, our_defaults, word_for
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Move
from planner.dialects.base.launchers import ALLOCATOR
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.base.padded_prompts import padded_prompts
from planner.dialects.base.script import Script
from planner.dialects.base.values import integer, number
from planner.errors import VplanError
from planner.layout.trainer_terms.ai_toolkit import GROUP_BITS, QUANTISED_WHOLE, UINTX
from planner.layout.trainer_terms.lora_layers import WITHOUT_EXPERTS, more_layers_note, on_all_linear
from planner.spec.job import QUANTISED
from planner.spec.plan import Plan
from planner.untrusted import flat

# ---- numbers, adapters, encoders

QTYPES = {
    "qfloat8": "fp8",
    "float8": "fp8",
    "qfloat8_e4m3fn": "fp8",
    "int8": "int8",
    "qint8": "int8",
    "qint4": "nf4",
    **dict.fromkeys(UINTX, "fp8"),
}
"""Those of `UINTX` are laid out as fp8, and take so many bits by a version of the memory terms."""
UNQUANTISED = "uint8"
"""The ``qtype`` that leaves every layer as it is (toolkit/util/uintx_quant.py ``can_quantize``)."""
ENCODER_QTYPES = {**QTYPES, "uint2": "nf4", "uint3": "nf4", "uint4": "nf4", UNQUANTISED: "bf16"}
"""Those of a text encoder. Memory terms tell `UINTX` apart where it takes the model's ``qtype``."""
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw8bit": "adamw-8bit",
    "adafactor": "adafactor",
    "lion": "lion",
    "prodigy": "prodigy",
}
LOW_VRAM = f"{MODEL.removeprefix('config:')}low_vram: true"
LAYERS = f"{MODEL}layer_offloading_transformer_percent"
DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32"}


def _formats_of(settings: Settings) -> Fields:
    dtype = one_of(DTYPES, "train.dtype")(settings.get(f"{TRAIN}dtype", "fp32"))
    weights, encoder, qtype = dtype, "bf16", qtype_of(settings)
    quantised = settings.get(f"{MODEL}quantize")
    if quantised:
        weights = one_of({**QTYPES, UNQUANTISED: dtype}, "model.qtype")(qtype)
    if dtype == "fp32" and (quantised or _method_of(settings)["method"] == "lora"):
        silent = "" if f"{TRAIN}dtype" in settings else ", the default where a config is silent,"
        fault = f"train.dtype fp32{silent} is not priced: it computes in fp32, over a frozen model in fp32 or quantised"
        raise VplanError(fault, "write train.dtype: bf16, as the trainer's examples do")
    if settings.get(f"{MODEL}quantize_te", quantised):
        by_qtype = lookup.model(model_of(settings)["model"]).trained_with("ai-toolkit", "text-encoder-by-qtype")
        written = qtype if by_qtype else settings.get(f"{MODEL}qtype_te", "qfloat8")
        encoder = one_of(ENCODER_QTYPES, "model.qtype_te")(written)
    return {"weights_dtype": weights, "compute_dtype": dtype, "text_encoder_dtype": encoder}


def _write_formats(fields: Fields) -> Settings:
    compute, weights, encoder = fields["compute_dtype"], fields["weights_dtype"], fields["text_encoder_dtype"]
    refused = []
    if compute == "fp32":
        refused.append(UnsupportedValue("compute_dtype", compute, "bf16", "train.dtype fp32 is read, and not written"))
    if weights not in (compute, "fp8"):
        refused.append(UnsupportedValue("weights_dtype", weights, compute, "weights are train.dtype, or qtype's"))
    if encoder not in ("bf16", "fp8"):
        refused.append(UnsupportedValue("text_encoder_dtype", encoder, "bf16", "bf16, or qtype_te's"))
    if refused:
        raise InexpressibleError(*refused)
    settings: Settings = {f"{TRAIN}dtype": word_for(DTYPES, "compute_dtype", "bf16")(compute)}
    settings |= {f"{MODEL}quantize": True, f"{MODEL}qtype": "qfloat8"} if weights == "fp8" else {}
    if weights == "fp8" and lookup.model(fields["model"]).experts == 1:
        settings[f"{MODEL}low_vram"] = True  # else the model lies on the GPU whole in 16 bits before it is quantised
    if encoder == "fp8":
        return settings | {f"{MODEL}quantize_te": True, f"{MODEL}qtype_te": "qfloat8"}
    return settings | ({f"{MODEL}quantize_te": False} if weights == "fp8" else {})  # it follows `quantize` otherwise


def _encoders_of(settings: Settings) -> Fields:
    """Latents are cached where they are of every dataset, and of none that is augmented (``DatasetConfig``)."""
    away = settings.get(f"{TRAIN}cache_text_embeddings") or settings.get(f"{TRAIN}unload_text_encoder")
    sets = datasets_of(settings)
    away = away or any(settings.get(f"{data}cache_text_embeddings") for data in sets)
    cached = all(
        (settings.get(f"{data}cache_latents_to_disk") or settings.get(f"{data}cache_latents"))
        and not any(
            name.startswith((f"{data}augments", f"{data}augmentations")) and settings[name] for name in settings
        )
        for data in sets
    )
    return {"text_encoder": "cached" if away else "resident", "vae": "cached" if cached else "resident"}


def _write_encoders(fields: Fields) -> Settings:
    wrong = [name for name in ("text_encoder", "vae") if fields[name] == "swapped"]
    if wrong:
        why = "it is cached, or stays on the GPU"
        raise InexpressibleError(*(UnsupportedValue(name, "swapped", "cached", why) for name in wrong))
    settings: Settings = {f"{TRAIN}cache_text_embeddings": True} if fields["text_encoder"] == "cached" else {}
    return settings | ({f"{DATA}cache_latents_to_disk": True} if fields["vae"] == "cached" else {})


def _targets_of(settings: Settings) -> Fields:
    profile = lookup.model(model_of(settings)["model"])
    return {"lora_targets": named_layers(settings) or on_all_linear(profile, _formats_of(settings)["weights_dtype"])}


def _write_targets(fields: Fields) -> Settings:
    targets = on_all_linear(lookup.model(fields["model"]), fields["weights_dtype"])
    if fields["lora_targets"] != targets:
        why = f"adapters are on every linear layer of the transformer's blocks ({AT} toolkit/lora_special.py)"
        raise InexpressibleError(UnsupportedValue("lora_targets", fields["lora_targets"], targets, why))
    return {}


def _method_of(settings: Settings) -> Fields:
    """Full fine-tuning is what a file without a network asks for (BaseSDTrainProcess.py ``is_fine_tuning``)."""
    given = [name.removeprefix(PROCESS) for name, value in settings.items() if value is not None]
    tables = {name.partition(".")[0] for name in given}
    for table in ("adapter", "embedding", "decorator"):
        if table in tables:
            raise VplanError(
                f"{table} is not supported here", "supported: network.type lora or lokr, or full fine-tuning"
            )
    if settings.get(f"{TRAIN}train_unet") is False:
        raise VplanError("train.train_unet false is not priced (the model is not trained)", "leave train_unet out")
    return {"method": "lora" if "network" in tables else "full"}


def _write_method(fields: Fields) -> Settings:
    if fields["method"] != "lora":
        why = "full fine-tuning with it is read, not written"
        raise InexpressibleError(UnsupportedValue("method", fields["method"], "lora", why))
    return {}


def _accumulation_of(settings: Settings) -> Fields:
    """Of two settings one alone may be above 1 (``TrainConfig``)."""
    names = ("gradient_accumulation", "gradient_accumulation_steps")
    return {"gradient_accumulation": max(integer(settings.get(f"{TRAIN}{name}") or 1, name) for name in names)}


def _write_accumulation(fields: Fields) -> Settings:
    return {f"{TRAIN}gradient_accumulation": fields["gradient_accumulation"]}


def _optimizer_of(settings: Settings) -> Fields:
    return {"optimizer": one_of(OPTIMIZERS, "train.optimizer")(settings.get(f"{TRAIN}optimizer", "adamw"))}


def _write_optimizer(fields: Fields) -> Settings:
    return {f"{TRAIN}optimizer": word_for(OPTIMIZERS, "optimizer", "adamw")(fields["optimizer"])}


def _layers_of(settings: Settings) -> Fields:
    """Its share of all linear layers, as so many blocks."""
    offloads = settings.get(f"{MODEL}layer_offloading", settings.get(f"{MODEL}auto_memory"))
    if not offloads or not settings.get(f"{TRAIN}gradient_checkpointing", True):
        return {"swap_blocks": 0}
    share = number(settings.get(LAYERS, 1.0), "layer_offloading_transformer_percent")
    blocks = lookup.model(model_of(settings)["model"]).blocks
    return {"swap_blocks": min(blocks - 1, round(min(max(share, 0.0), 1.0) * blocks))}


def _write_layers(fields: Fields) -> Settings:
    blocks, swapped = lookup.model(fields["model"]).blocks, int(fields["swap_blocks"])
    if not swapped:
        return {}
    if swapped >= blocks:
        raise InexpressibleError(UnsupportedValue("swap_blocks", swapped, blocks - 1, f"the model has {blocks} blocks"))
    return {f"{MODEL}layer_offloading": True, LAYERS: round(swapped / blocks, 3)}


CARRIES: config_text.FieldsBySetting = {
    f"{MODEL}arch": ("model",),
    f"{DATA}resolution": ("height", "width"),
    f"{DATA}num_frames": ("frames",),
    f"{TRAIN}batch_size": ("batch_size",),
    f"{TRAIN}dtype": ("compute_dtype",),
    f"{MODEL}quantize": ("weights_dtype",),
    f"{MODEL}qtype": ("weights_dtype",),
    f"{MODEL}quantize_te": ("text_encoder_dtype",),
    f"{MODEL}qtype_te": ("text_encoder_dtype",),
    f"{MODEL}low_vram": ("weights_dtype",),
    f"{MODEL}layer_offloading": ("swap_blocks",),
    LAYERS: ("swap_blocks",),
    f"{NETWORK}type": ("lora_rank",),
    f"{TRAIN}cache_text_embeddings": ("text_encoder",),
    f"{DATA}cache_latents_to_disk": ("vae",),
    **{f"{SAMPLE}{name}": ("validation",) for name in ("width", "height", "num_frames", "guidance_scale")},
}
TABLE: tuple[Binding | When, ...] = (
    EXPANDABLE,
    Fixed("gpus", 1, f"one run, one GPU ({AT} run.py)"),
    Fixed("nodes", 1, f"one run, one GPU ({AT} run.py)"),
    pair(model_of, write_model, (f"{MODEL}arch", f"{MODEL}name_or_path", *NOISE.values()), model=", ".join(ARCHES),
             experts="model_kwargs.train_high_noise, train_low_noise", inactive_expert="gpu, cpu by low_vram"),
    pair(_method_of, _write_method, (), method="lora; full without a network, read only"),
    When("method", ONLY_LORA, pair(rank_of, write_rank, tuple(f"{NETWORK}{name}" for name in (
        "type", "linear", "dropout")), lora_rank="network.linear; lokr, read only, as its numbers",
        lora_dropout="network.dropout")),
    pair(shape_of, write_shape, (f"{DATA}resolution", f"{DATA}num_frames", f"{TRAIN}batch_size"),
             frames="num_frames", height="resolution (squares)", width="resolution (squares)",
             batch_size="train.batch_size", buckets="read only"),
    pair(_formats_of, _write_formats, (
        *(f"{MODEL}{name}" for name in ("quantize", "qtype", "quantize_te", "qtype_te", "low_vram")),
        f"{TRAIN}dtype"),
        weights_dtype="train.dtype, fp8 by quantize", compute_dtype="train.dtype",
        text_encoder_dtype="bf16, fp8 by quantize_te"),
    Fixed("autocast", "none", f"its steps compute in train.dtype, without autocast ({AT} toolkit/accelerator.py)"),
    When("method", ONLY_LORA, pair(_targets_of, _write_targets, (), lora_targets="all linear layers")),
    When("method", ONLY_LORA, Fixed("adapter_dtype", "fp32",
             f"adapters are fp32 ({AT} jobs/process/BaseSDTrainProcess.py)")),
    Choice("gradient_checkpointing", {
        "full": {f"{TRAIN}gradient_checkpointing": True},
        "none": {f"{TRAIN}gradient_checkpointing": False},
    }, "every block is checkpointed, or none"),
    Fixed("checkpointed_blocks", None),
    pair(_optimizer_of, _write_optimizer, (f"{TRAIN}optimizer",), optimizer="train.optimizer"),
    Fixed("optimizer_step", "foreach", "it steps after backward"),
    pair(_accumulation_of, _write_accumulation, (f"{TRAIN}gradient_accumulation",),
             gradient_accumulation="train.gradient_accumulation"),
    Choice("ema", {"none": {}, "gpu": {f"{TRAIN}ema_config.use_ema": True}}, "its average is on the GPU"),
    pair(_encoders_of, _write_encoders, (f"{TRAIN}cache_text_embeddings", f"{DATA}cache_latents_to_disk"),
             text_encoder="resident, cached", vae="resident, cached"),
    pair(validation_of, write_validation, (
        f"{TRAIN}disable_sampling", *(f"{SAMPLE}{name}" for name in (
            "width", "height", "num_frames", "guidance_scale"))),
        validation_mode="off, on", validation="sample.width, height, num_frames, guidance_scale"),
    Fixed("sharding", "none", "one run, one GPU"),
    pair(_layers_of, _write_layers, (f"{MODEL}layer_offloading", LAYERS),
             swap_blocks="layer_offloading_transformer_percent, as blocks"),
    Choice("compile", {"none": {}, "full": {f"{MODEL}compile": True}, "blocks": {
        f"{MODEL}compile": True, f"{MODEL}block_compile": True}}),
    Fixed("attention", "sdpa"),
    pair(references_of, write_references, (), references="a model's own; as many as control_path has folders"),
    padded_prompts(model_of, TEXT_TOKENS, f"its prompts are filled up to 512 tokens ({AT} toolkit/train_tools.py)"),
    *our_defaults("trainable", "master_weights", "grad_buckets", "offload_optimizer",
           "offload_gradients", "offload_params", "vae_dtype", "vae_tiling", "vae_slicing", "group_offload",
           "group_offload_stream", "context_parallel", "adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
)  # fmt: skip
_DEFAULTS: Settings = {f"{TRAIN}gradient_checkpointing": True}
"""What is on where the file is silent, of settings a choice looks at (toolkit/config_modules.py)."""


def read_script(script: Script) -> Invocation | None:
    """The settings of `python run.py FILE`, or of such a config file itself; None for another trainer's script."""
    config, notes = script.config, list(script.notes)
    allocator: Settings = {}
    refused: tuple[Remark, ...] = ()
    if config is None:
        programs = [program for program in script.programs if PurePosixPath(program.script).name == "run.py"]
        files = [
            word for program in programs for word in program.arguments if word.endswith((".yaml", ".yml", ".json"))
        ]
        if not files:
            return None
        config = script.document(files[0])
        if config is None:
            raise VplanError(
                f"the config {script.missing(files[0])}", "run vplan check where the file is, or supply it"
            )
        conf = " ".join(value for name, value in programs[-1].environment.items() if name.endswith("ALLOC_CONF"))
        refused = refused_flags(flags.script("ai-toolkit", "run.py").parse(programs[-1].arguments))
        allocator = {"env:expandable_segments": True} if "expandable_segments:true" in conf.lower() else {}
    keys = flat(config, script.name)
    if "config.process[0].model.name_or_path" not in keys:
        return None
    read = flags.script("ai-toolkit", "config.yaml").parse_config(config)
    unknown = [each.flag for each in refused]
    unknown += [key for key in read.unknown if not key.startswith(("job", "meta.", "config.name")) and _is_read(key)]
    settings = {"script": "run.py", **_DEFAULTS, **allocator, **{f"config:{key}": value for key, value in keys.items()}}
    return Invocation("ai-toolkit", settings, tuple(unknown), (), tuple(notes), refused)


MISPLACED = ("only_if_contains", "ignore_if_contains")
"""Keys of ``network.network_kwargs`` (toolkit/config_modules.py ``NetworkConfig``) that people write one level up."""


def _is_read(key: str) -> bool:
    """Whether a key stands in one of the tables whose keys we know, and no remark says more of it."""
    if key.startswith(tuple(f"{NETWORK.partition(':')[2]}{name}" for name in MISPLACED)):
        return False
    return any(f"].{table}" in key for table in ("model.", "train.", "network.", "datasets[", "sample.", "save."))


def remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    """The given settings that have no effect, or no longer have one, each with the reason."""
    for name in MISPLACED:
        if any(key.startswith(f"{NETWORK}{name}") for key in settings):
            yield Remark(f"network.{name}", f"it is read as network.network_kwargs.{name} alone")
    if f"{MODEL}auto_memory" in settings:
        yield Remark("model.auto_memory", f"it is layer_offloading now ({AT} toolkit/config_modules.py)")
    single = lookup.model(fields["model"]).experts == 1  # of two it moves the one that does not run
    if settings.get(f"{MODEL}low_vram") and not settings.get(f"{MODEL}quantize") and single:
        yield Remark("model.low_vram", "it says where weights are quantised and loaded, and nothing is quantised")


def notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What the trainer does that the settings do not say, in words, with the source."""
    yield "resolutions are areas: priced as squares"
    if references := fields["references"]:
        yield f"control images are priced as {references} of the sample's size"
    yield from own_model_notes("ai-toolkit", fields)
    profile = lookup.model(fields["model"])
    if note := lokr_note(settings, fields):
        yield note
    if fields["method"] == "full":
        if any(name.startswith(f"{MODEL}only_if_contains") for name in settings):
            yield "model.only_if_contains is estimated as training everything: it needs at most this"
    elif note := more_layers_note(profile, fields["lora_targets"]):
        yield note
    if fields["method"] == "lora" and profile.traits.stages and settings.get(f"{NETWORK}conv"):
        yield "network.conv gives convolutions adapters too: not estimated, takes more"
    if fields["method"] == "lora" and settings.get(f"{NETWORK}transformer_only") is False:
        yield "network.transformer_only false gives layers outside the blocks adapters too: not estimated, takes more"
    if settings.get(f"{MODEL}low_vram") and fields["validation_mode"] == "on":
        yield "low_vram tiles the VAE and moves parts away while sampling; not estimated, needs less there"
    if QUANTISED_WHOLE in version_of(settings, fields):
        yield "without model.low_vram the model lies on the GPU whole in 16 bits before it is quantised"
    if fields["swap_blocks"]:
        yield "layer_offloading is estimated as that share of the blocks; below 1.0 it draws the layers by chance"
    elif settings.get(f"{MODEL}layer_offloading") and fields["gradient_checkpointing"] == "none":
        yield f"layer_offloading without gradient_checkpointing{MAY_NEED_LESS}"
    if settings.get(f"{MODEL}layer_offloading") and fields["text_encoder"] == "resident":
        yield f"layer_offloading of the text encoder{MAY_NEED_LESS}"
    yield from _notes_on_formats(settings, fields)
    if fields["text_encoder"] == "resident":
        yield "the text encoder stays on the GPU: neither cache_text_embeddings nor unload_text_encoder is set"
    if not settings.get(f"{TRAIN}disable_sampling") and not makes_samples(settings):
        yield "no sample is made: the config has no prompt for one"
    if settings.get(f"{MODEL}model_kwargs.edit") and not fields["references"]:
        yield "model_kwargs.edit adds control images to the sequence: not estimated, takes more"
    if f"{DATA}resolution" not in settings:
        yield "resolution 512, the default of a dataset"


def _notes_on_formats(settings: Settings, fields: Fields) -> Iterator[str]:
    """What becomes of the model's weights and the text encoder's."""
    qtype = qtype_of(settings)
    if settings.get(f"{MODEL}quantize") and qtype == UNQUANTISED:
        yield f"qtype {UNQUANTISED} quantises nothing ({AT} toolkit/util/uintx_quant.py): weights stay as they are"
    if fields["weights_dtype"] == "nf4":
        yield f"{qtype} is estimated as nf4"
    if qtype in UINTX and fields["weights_dtype"] == "fp8":
        bits = UINTX[qtype] + GROUP_BITS
        yield f"{qtype} is laid out as fp8, at {bits} bits a number ({AT} toolkit/util/uintx_quant.py)"
    if "|" in str(settings.get(f"{MODEL}qtype")):
        yield "the accuracy recovery adapter is not estimated, takes more: its rank stands in its file"
    by_qtype = lookup.model(fields["model"]).trained_with("ai-toolkit", "text-encoder-by-qtype")
    if fields["text_encoder_dtype"] == "nf4" and not (by_qtype and qtype in UINTX):
        yield "the text encoder's 4 bits or fewer are estimated as nf4"
    if fields["weights_dtype"] in QUANTISED and settings.get(f"{MODEL}quantize_te") is None:
        yield "quantize_te follows quantize: the text encoder is quantised too"
    if by_qtype and f"{MODEL}qtype_te" in settings:
        yield f"qtype_te is not read for this model: its text encoder is quantised to qtype ({AT})"


def _two_on_gpu(fields: Fields) -> bool:
    return bool(fields["inactive_expert"] == "gpu")


SWAPPED = (8, 16, 20, 26, 29, 32, 39, 56)
"""Blocks in host RAM that a fix tries, and all but one."""


def _swapped(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    most = lookup.model(fields["model"]).blocks - 1
    return tuple({"swap_blocks": blocks} for blocks in (*(each for each in SWAPPED if each < most), most))


FEWER_BITS = {f"uint{bits}": f"model.qtype: uint{bits}" for bits in (7, 6, 5, 4, 3)}
"""Of `UINTX` those that accuracy recovery adapters are published for, and what is between them and 8 bits."""
MOVES = (
    Move({"expandable_segments": True}, "free"),
    Move({"gradient_checkpointing": "full"}, "one more forward pass"),
    Move({"vae": "cached"}, "disk for the latents"),
    Move({"text_encoder": "cached"}, "disk for the embeddings, and no caption dropout"),
    Move({"validation_mode": "off"}, "no samples while it trains"),
    Move({"version": ""}, "quantised a block at a time", words_for=lambda settings: [LOW_VRAM],
         when=lambda fields: fields["version"] == QUANTISED_WHOLE and not _two_on_gpu(fields)),
    Move({"version": WITHOUT_EXPERTS}, "quantised a block at a time", words_for=lambda settings: [LOW_VRAM],
         when=lambda fields: fields["version"] == f"{QUANTISED_WHOLE}-{WITHOUT_EXPERTS}"),
    Move({"inactive_expert": "cpu", "version": ""}, "slower where the noise level changes sides",
         words_for=lambda settings: [LOW_VRAM], when=_two_on_gpu),
    Move({"swap_blocks": 8}, "slower, and host RAM for the layers", by_fields=_swapped),
    Move({"optimizer": "adamw-8bit"}),
    Move({"weights_dtype": "fp8"}, when=lambda fields: fields["weights_dtype"] not in QUANTISED),
    Move({"version": "uint6"}, "weights in fewer bits", values=tuple(FEWER_BITS), lossy=True,
         words_after=lambda fields: [PROCESS.removeprefix("config:") + FEWER_BITS[fields["version"]]],
         when=lambda fields: fields["weights_dtype"] == "fp8" and not fields["version"]),
)  # fmt: skip


def _files(plan: Plan, settings: Settings) -> dict[str, str]:
    """config.yaml, and train.sh, which starts it."""
    carries = CARRIES
    if lookup.model(plan.job.model).experts > 1:
        carries = {**CARRIES, f"{MODEL}low_vram": ("inactive_expert",)}
    comments = config_text.comments(config_text.fields_by_setting(DIALECT, settings, carries), "config:")
    tree = config_text.tree(settings, "config:")["config"]["process"][0]
    dataset = {"folder_path": "data/my_set", "caption_ext": "txt", **tree["datasets"][0]}
    if plan.job.references:  # config/examples/train_lora_flux_kontext_24gb.yaml
        controls = dataset.pop("control_path", "data/my_references")
        dataset = {"folder_path": dataset.pop("folder_path"), "control_path": controls, **dataset}
    train = {"steps": 2000, "lr": 1e-4, "noise_scheduler": "flowmatch", **tree["train"]}
    process: Settings = {
        "type": "sd_trainer", "training_folder": "output", "device": "cuda:0",
        "network": {**tree["network"], "linear_alpha": plan.job.lora_rank},
        "save": {"dtype": "float16", "save_every": 250, "max_step_saves_to_keep": 4},
        "datasets": [dataset], "train": train, "model": tree["model"],
    }  # fmt: skip
    if "sample" in tree:
        process["sample"] = {"sample_every": 250, "sample_steps": 20} | tree["sample"]
    config = {"job": "extension", "config": {"name": "lora", "process": [process]}}
    head = "The comment after each line names its plan field. Fill in the folders and prompts."
    if (model := lookup.model(plan.job.model)).traits.few_steps:
        head += f"\n{model.title} was distilled to few steps, which training undoes unless model.assistant_lora_path"
        head += "\nnames a training adapter; that takes more than the plan says."
    lines = ["#!/bin/bash", "set -e"]
    if plan.strategy.expandable_segments:
        lines += [f"export {ALLOCATOR}"]
        # run.py loads the .env of its folder before it imports torch; no key of a config sets a variable.
        head += f"\nThe plan counts on {ALLOCATOR}, which train.sh sets. Started otherwise, as from"
        head += "\nthe UI, that line belongs into ai-toolkit's .env."
    script = "\n".join([*lines, "python run.py config.yaml", ""])
    return {"config.yaml": config_text.yaml(config, comments, head), "train.sh": script}


DIALECT: Dialect = Dialect(
    name="ai-toolkit",
    title="ai-toolkit",
    source="https://github.com/ostris/ai-toolkit at 27a03a9",
    scripts=("run.py",),
    steps=(f"{TRAIN}steps", f"{TRAIN}gradient_accumulation_steps"),
    table=TABLE,
    read_script=read_script,
    stops=stops,
    remarks=remarks,
    notes=notes,
    moves=MOVES,
    files=_files,
    version=version_of,
    assigns=": ",
    fewer_bits=FEWER_BITS,
)
