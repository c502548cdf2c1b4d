"""SimpleTuner's words and ours, both ways, and its config.json, read at bc8e6ab: simpletuner/examples,
field_registry/sections and helpers/models.

Its memory terms are in `planner.layout.trainer_terms.simpletuner`, which its own published runs are priced by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from planner.catalog import lookup
from planner.catalog.profiles import LoraDefaults, ModelProfile
from planner.catalog.traits import TrainerTrait
from planner.dialects.base import config_text, flags
from planner.dialects.base.bindings import (
    ONLY_LORA,
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
from planner.dialects.base.block_swap import in_parts
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, our_defaults
from planner.dialects.base.dialect import MAY_NEED_LESS, Dialect, Invocation, Move
from planner.dialects.base.launchers import launch_settings
from planner.dialects.base.own_models import own_model_notes
from planner.dialects.base.script import PythonCommand, Script
from planner.dialects.base.values import integer, number
from planner.dialects.simpletuner import deepspeed_config, defaults, engines, lycoris_config
from planner.dialects.simpletuner.aspect_buckets import (
    ALIGNMENT,
    BUCKETS,
    DATASET,
    size_notes,
    size_of,
    write_size,
)
from planner.dialects.simpletuner.block_checkpoints import (
    INTERVAL,
    STRIDE,
    interval_of,
    write_checkpointing,
)
from planner.dialects.simpletuner.data_file import (
    BATCH,
    ENCODES,
    REFERENCE_SETS,
    batch_of,
    encoders_of,
    references_of,
    samples,
    write_encoders,
    write_references,
)
from planner.dialects.simpletuner.defaults import is_true
from planner.dialects.simpletuner.files import files
from planner.dialects.simpletuner.models import (
    ASSISTED,
    CONFIG,
    FAST_SCHEDULE,
    MODELS,
    family_of,
    is_on,
    model_of,
    of,
    write_model,
)
from planner.dialects.simpletuner.number_formats import (
    OPTIMIZERS,
    WRITTEN,
    formats_of,
)
from planner.dialects.simpletuner.own_checks import TEXT_ENCODERS, said_beside, stops
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.attention_masks import unpriced_masks_note
from planner.layout.trainer_terms.simpletuner import (
    BYPASSED,
    FUSED,
    QUANTISED_WHOLE,
    QUANTO,
    QUANTO_WHOLE,
    RAMTORCH,
    RAMTORCH_ENCODERS,
    TORCHAO_WHOLE,
    WHOLE,
    with_base,
)
from planner.spec.job import QUANTISED
from planner.spec.plan import Plan
from planner.untrusted import flat

LEAVES_LAYERS = ("sd3", "ltxvideo", "wan")
"""Families that share one list of layers that Quanto leaves in 16 bits; of LTX-Video these are small
(helpers/training/quantisation/__init__.py ``_quanto_model``)."""


SCRIPT = PurePosixPath("simpletuner/train.py")
"""What ``simpletuner train`` and its own train.sh start."""


def read_script(script: Script) -> Invocation | None:
    """A config, or what starts one: its keys may have dashes, as on the command line."""
    launch: Settings = {}
    notes = list(script.notes)
    document = script.config
    if document is None:
        programs = [each for each in script.programs if PurePosixPath(each.script).parts[-2:] == SCRIPT.parts]
        if not programs:
            return None
        launch, more = launch_settings(programs[-1], script, {})
        launch |= _world(*(programs[-1].environment.get(f"TRAINING_NUM_{name.upper()}") for name in WORLD))
        notes += more
        document = _config(programs[-1], script)
    config = {str(name).lstrip("-"): value for name, value in document.items()}
    engine, more = deepspeed_config.engine_settings(script, config.get(deepspeed_config.KEY))
    notes += more
    config = {name: _whole(value) for name, value in config.items()}
    if "data_backend_config" not in config and not {"model_family", "model_type"} <= config.keys():
        return None
    parsed = flags.script("simpletuner", "config.json").parse_config(config)
    given = {name: value for name, value in flat(config, script.name).items() if not defaults.is_left_out(name, value)}
    settings = {f"{CONFIG}{name}": value for name, value in given.items()}
    settings |= samples(script, settings) | lycoris_config.read_file(script, settings)
    world = _world(*(of(settings, f"num_{name}") for name in WORLD)) | launch
    if steps := engine.get(deepspeed_config.ACCUMULATION):  # DeepSpeed's wins
        settings[f"{CONFIG}gradient_accumulation_steps"] = steps
    own = {"script": "config.json", **world, **settings, **engine}
    return Invocation("simpletuner", own, parsed.unknown, notes=tuple(notes))


def _whole(value: Any) -> Any:
    """A value of the config: one that is a table or a list is one value all the same
    (helpers/configuration/cli_utils.py ``mapping_to_cli_args``)."""
    return str(value) if isinstance(value, dict | list) and value else value


WORLD = ("processes", "machines")
"""``num_*`` in a config, ``TRAINING_NUM_*`` in the environment of ``simpletuner train`` (simpletuner/cli/train.py)."""


def _world(processes: object, machines: object) -> Settings:
    """GPUs of a node, and nodes, as far as they are given."""
    nodes = max(1, integer(machines or 1, "num_machines"))
    given: Settings = {"gpus": max(1, integer(processes, "num_processes") // nodes)} if processes else {}
    return given | ({"nodes": nodes} if nodes > 1 else {})


def _config(program: PythonCommand, script: Script) -> Settings:
    """The config that a command starts with, under what is typed behind it (simpletuner/cli/common.py
    ``find_config_file``). Raises a VplanError where it is not here."""
    words = [word.removeprefix("--").partition("=") for word in program.arguments]
    typed: Settings = {name: defaults.typed(value) for name, _, value in words if value}
    environment = str(typed.pop("env", "") or program.environment.get("ENV", ""))
    folders = [f"config/{environment}/"] if environment else ["", "config/"]
    for folder in folders:
        if (document := script.document(f"{folder}config.json")) is not None:
            return document | typed
    fault = f"SimpleTuner's config {quoted(folders[-1] + 'config.json')} is not here"
    raise VplanError(fault, "pass its config.json, alone or behind the command's file, or run vplan check where it is")


def _method(settings: Settings) -> Fields:
    kind = str(of(settings, "model_type"))
    if kind not in ("lora", "full"):
        raise VplanError(f"SimpleTuner's model_type {quoted(kind)} is not priced", "lora and full are")
    adapter = str(of(settings, "lora_type")).lower()
    if kind == "lora" and adapter not in ("standard", "lycoris"):
        raise VplanError(f"SimpleTuner's lora_type {quoted(adapter)} is not priced", "standard and lycoris are")
    model = lookup.model(model_of(settings)["model"])
    if kind == "full" and model.trained_with("simpletuner", "nothing-in-fp32"):
        fault = f"SimpleTuner trains {model.title} whole in 16 bits, its modulation too, which is not priced"
        raise VplanError(fault, "use model_type lora")
    if kind == "full" and of(settings, "gradient_precision") == "fp32":
        raise VplanError("gradient_precision fp32 is not priced of full fine-tuning", "leave gradient_precision out")
    return {"method": kind}


def _write_method(fields: Fields) -> Settings:
    if fields["method"] not in ("lora", "full"):
        raise InexpressibleError(UnsupportedValue("method", fields["method"], "lora", "it trains"))
    if fields["method"] == "full" and lookup.model(fields["model"]).trained_with("simpletuner", "nothing-in-fp32"):
        why = "it trains this model's modulation in 16 bits, where ours is in fp32"
        raise InexpressibleError(UnsupportedValue("method", "full", "lora", why))
    return {f"{CONFIG}model_type": fields["method"]}


OTHER_LAYERS: tuple[TrainerTrait, ...] = ("feed-forward-not-adapted", "attention-output-not-adapted")
"""Of models whose recorded adapters `planner.layout.trainer_terms.simpletuner` takes off some layers again."""


def _adapter(settings: Settings) -> Fields:
    """peft's own DoRA (helpers/models/common.py:1102). It is turned off over Quanto's layers
    (helpers/configuration/cmd_args.py:1196), and RamTorch's have a kind of adapter of their own."""
    if not is_true(of(settings, "use_dora")) or lycoris_config.is_lycoris(settings):
        return {"adapter": "lora"}
    if _ramtorch(settings):
        raise VplanError("use_dora with RamTorch is not priced: its layers take adapters of its own", "leave one out")
    if str(of(settings, "base_model_precision") or "").endswith("-quanto"):
        raise VplanError("SimpleTuner turns use_dora off over a base in Quanto's formats", "leave out use_dora")
    model = lookup.model(model_of(settings)["model"])
    if any(model.trained_with("simpletuner", trait) for trait in OTHER_LAYERS):
        fault = f"use_dora of {model.name} is not priced: it is recorded on more layers than SimpleTuner adapts"
        raise VplanError(fault, "leave out use_dora")
    return {"adapter": "dora"}


def _write_adapter(fields: Fields) -> Settings:
    if fields["adapter"] not in ("lora", "dora"):
        raise InexpressibleError(UnsupportedValue("adapter", fields["adapter"], "lora", "its others are its own code"))
    return {f"{CONFIG}use_dora": True} if fields["adapter"] == "dora" else {}


def _rank(settings: Settings) -> Fields:
    """Of LyCORIS' adapters that of the LoRA with as many numbers."""
    if lycoris_config.is_lycoris(settings):
        return {"lora_rank": lycoris_config.adapters_of(settings).rank, "lora_dropout": 0.0}
    return {
        "lora_rank": integer(of(settings, "lora_rank"), "lora_rank"),
        "lora_dropout": number(of(settings, "lora_dropout"), "lora_dropout"),
    }


def _write_rank(fields: Fields) -> Settings:
    return {f"{CONFIG}{name}": fields[name] for name in ("lora_rank", "lora_dropout")}


def _version(settings: Settings, fields: Fields) -> str:
    """`QUANTISED_WHOLE` when Quanto or torchao quantise the base on the GPU: bitsandbytes does so block by block as it
    loads. `TORCHAO_WHOLE` when torchao does so to 8-bit integers. `QUANTO` where Quanto leaves layers of the family in
    16 bits."""
    base = str(of(settings, "base_model_precision"))
    adapters = lycoris_config.version_of(settings) if lycoris_config.is_lycoris(settings) else ""
    if _ramtorch(settings):
        return RAMTORCH_ENCODERS if _encoders_wait(settings) else RAMTORCH
    version = with_base(_version_of_base(settings, base), adapters) or engines.version_of(settings)
    return version or (FUSED if _fuses(settings) else "")


FUSING = ("chroma", "flux", "flux2", "krea2", "lumina2", "sd3")
"""Families whose model in helpers/models/ fuses projections where it is asked to; in others that is a warning
(helpers/models/common.py ``fuse_qkv_projections``), and of LTX-2 it is not priced."""


def _fuses(settings: Settings) -> bool:
    asked = any(is_true(of(settings, name)) for name in ("fuse_qkv_projections", "fused_qkv_projections"))
    return asked and family_of(settings) in FUSING


def _version_of_base(settings: Settings, base: str) -> str:
    on_gpu = str(of(settings, "quantize_via")) == "accelerator"
    if base.endswith("-quanto") and of(settings, "model_family") in LEAVES_LAYERS:
        return QUANTO_WHOLE if on_gpu else QUANTO
    if on_gpu and base == "int8-torchao":
        return TORCHAO_WHOLE
    return QUANTISED_WHOLE if on_gpu and base.endswith(("-quanto", "-torchao")) else ""


NO_SWAP = ("sdxl", "sd1x", "sd2x", "ideogram", "kandinsky5_image")
"""Families without block swap: none of their files in helpers/models/ has it, or none gives it the number
(``apply_musubi_pretrained_defaults``)."""

ALL_STACKS = ("flux", "flux2", "chroma", "hidream")
"""Families that swap blocks of all kinds; others those of the longest stack alone (``MusubiBlockSwapManager.build`` in
helpers/models/*/transformer.py)."""


def _most_swapped(model: ModelProfile, family: str) -> int:
    """All of those blocks but one. Of Kandinsky 5.0, which counts all blocks, all that come behind the prompt's: these
    run before swapped ones come back (helpers/models/kandinsky5_video/transformer_kandinsky5.py ``forward``)."""
    depths = [model.depth(stack) for stack in model.stacks]
    if family == "kandinsky5_video":
        return depths[-1]
    return 0 if family in NO_SWAP else (sum(depths) if family in ALL_STACKS else max(depths)) - 1


def _swap(settings: Settings) -> Fields:
    """Blocks wait in host RAM as in musubi-tuner (helpers/musubi_block_swap.py), at most all but one; with RamTorch the
    linear layers of that share of the blocks do."""
    model = lookup.model(model_of(settings)["model"])
    if _ramtorch(settings):
        percent = number(of(settings, "ramtorch_transformer_percent"), "ramtorch_transformer_percent")
        return {"swap_blocks": max(0, min(round(min(percent, 100) / 100 * model.blocks), model.blocks - 1))}
    blocks = integer(of(settings, "musubi_blocks_to_swap") or 0, "musubi_blocks_to_swap")
    return {"swap_blocks": max(0, min(blocks, _most_swapped(model, family_of(settings))))}


def _write_swap(fields: Fields) -> Settings:
    blocks, model = int(fields["swap_blocks"]), lookup.model(fields["model"])
    if not blocks:
        return {}
    if (version := fields.get("version")) in BY_RAMTORCH:
        share = round(100 * blocks / model.blocks, 2)
        own: Settings = {"ramtorch": True, "ramtorch_transformer_percent": share}
        own |= {ENCODERS_WAIT: True} if version == RAMTORCH_ENCODERS else {}
        return {f"{CONFIG}{name}": value for name, value in own.items()}
    family = write_model(fields)[f"{CONFIG}model_family"]
    if blocks > (most := _most_swapped(model, family)):
        why = f"it swaps {most} blocks of {model.title} at most" if most else f"it swaps no blocks of {model.title}"
        raise InexpressibleError(UnsupportedValue("swap_blocks", blocks, most, why))
    return {f"{CONFIG}musubi_blocks_to_swap": blocks}


def _more_swapped(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """More blocks in host RAM than now, up to all that this family swaps. On several GPUs DDP's buckets are views."""
    family = write_model(fields)[f"{CONFIG}model_family"]
    most = _most_swapped(lookup.model(fields["model"]), family)
    buckets = {"grad_buckets": "view"} if fields["sharding"] == "ddp" else {}
    return tuple({"swap_blocks": blocks, **buckets} for blocks in in_parts(most, fields["swap_blocks"]))


def _ramtorch(settings: Settings) -> bool:
    return is_true(of(settings, "ramtorch"))


BY_RAMTORCH = (RAMTORCH, RAMTORCH_ENCODERS)
ENCODERS_WAIT = "ramtorch_text_encoder"
ENCODERS_STAY = ("anima", "ideogram")
"""Families whose text encoder RamTorch leaves alone (``load_text_encoder`` in helpers/models/{anima,ideogram}/
model.py)."""


def _may_wait(fields: Fields) -> bool:
    return write_model(fields)[f"{CONFIG}model_family"] not in ENCODERS_STAY


def _encoders_wait(settings: Settings) -> bool:
    """Whether all linear layers of the text encoders wait in host RAM (helpers/models/common.py
    ``_ramtorch_text_encoders_requested``)."""
    percent = number(of(settings, "ramtorch_text_encoder_percent"), "ramtorch_text_encoder_percent")
    asked = _ramtorch(settings) and is_true(of(settings, ENCODERS_WAIT)) and percent >= 100
    return asked and family_of(settings) not in ENCODERS_STAY


SECOND_CHOICE = ("sd3", "sana", "krea2")
"""Families whose usual adapters are on our model's second choice of layers: of SD 3 the image stream's attention alone,
of SANA what goes out of attention too, of Krea 2 attention alone (``DEFAULT_LORA_TARGET`` in
helpers/models/{sd3,sana,krea2}/model.py)."""


def _layers(settings: Settings) -> Fields:
    """Of a quantised base over which no others are recorded the model's usual layers. LyCORIS' file names its own."""
    if lycoris_config.is_lycoris(settings):
        return {"lora_targets": lycoris_config.targets_of(settings)}
    lora = lookup.model(model_of(settings)["model"]).lora
    usual = _usual_layers(_method(settings)["method"], family_of(settings), formats_of(settings)["weights_dtype"], lora)
    return {"lora_targets": None if usual else lora.wide or None}


def _usual_layers(method: str, family: str, weights: str, lora: LoraDefaults) -> bool:
    over = weights not in QUANTISED or weights in lora.wide_bases
    return family not in SECOND_CHOICE or method != "lora" or not over


def _write_layers(fields: Fields) -> Settings:
    model, family = lookup.model(fields["model"]), write_model(fields)[f"{CONFIG}model_family"]
    usual = _usual_layers(fields["method"], family, fields["weights_dtype"], model.lora)
    targets = None if usual else model.lora.wide or None
    if fields["lora_targets"] != targets:
        why = "adapters are on the layers that the trainer has for the family"
        raise InexpressibleError(UnsupportedValue("lora_targets", fields["lora_targets"], targets, why))
    return {}


TILING = "vae_enable_tiling"
TILED = ("hidream", "wan")
"""Families whose VAE always works in tiles (``vae_enable_tiling = True`` in helpers/models/{hidream,wan}/model.py
``check_user_config``)."""

NO_TILES = ("ideogram",)
"""Families whose VAE has no tiles (helpers/models/ideogram/model.py AUTOENCODER_CLASS)."""


def _tiling(settings: Settings) -> Fields:
    """Of what it encodes before training, and of each batch where the VAE stays (``load_vae`` in
    helpers/models/common.py and helpers/models/hunyuanvideo/model.py)."""
    family = family_of(settings)
    return {"vae_tiling": family in TILED or (family not in NO_TILES and is_true(of(settings, TILING)))}


def _write_tiling(fields: Fields) -> Settings:
    family, tiles = write_model(fields)[f"{CONFIG}model_family"], fields["vae_tiling"]
    if tiles != (family in TILED) and family in (*TILED, *NO_TILES):
        why = "its VAE has no tiles" if tiles else "its VAE always works in tiles"
        raise InexpressibleError(UnsupportedValue("vae_tiling", tiles, not tiles, why))
    return {f"{CONFIG}{TILING}": True} if tiles and family not in TILED else {}


T5_TOKENS = {"sd3": 154}
"""``model_family`` -> the most tokens that T5 gives, and its default, where that is not our model's usual length
(``check_user_config`` in helpers/models/sd3/model.py); prompts are padded to it."""

CLIP_TOKENS = 77

PADDED_TOKENS = {"qwen_image": 1024}
"""``model_family`` -> what every prompt is padded to, where our model's usual length is another
(helpers/training/diffusers_overrides.py ``_patched_qwen_prompt_embeds_from_tokenizer``)."""


def _prompt_length(settings: Settings) -> Fields:
    """``tokenizer_max_length`` counts T5's tokens; CLIP's stand before them."""
    most = T5_TOKENS.get(family_of(settings))
    if most is None:
        return {"text_tokens": None}
    length = integer(of(settings, "tokenizer_max_length") or most, "tokenizer_max_length")
    return {
        "text_tokens": CLIP_TOKENS + (length if is_true(of(settings, "i_know_what_i_am_doing")) else min(length, most))
    }


def _write_prompt_length(fields: Fields) -> Settings:
    tokens, family = fields["text_tokens"], write_model(fields)[f"{CONFIG}model_family"]
    most = T5_TOKENS.get(family)
    if most is None:
        if tokens is not None:
            why = "prompts have the model's usual length"
            raise InexpressibleError(UnsupportedValue("text_tokens", tokens, None, why))
        return {}
    if tokens is None or not CLIP_TOKENS < tokens <= CLIP_TOKENS + most:
        why = f"CLIP's {CLIP_TOKENS} tokens and {most} of T5 at most"
        raise InexpressibleError(UnsupportedValue("text_tokens", tokens, CLIP_TOKENS + most, why))
    return {f"{CONFIG}tokenizer_max_length": tokens - CLIP_TOKENS}


def _gradient_buckets(settings: Settings) -> Fields:
    """DDP's own are copies, and views where blocks are swapped (helpers/training/trainer.py
    ``gradient_as_bucket_view``)."""
    return {"grad_buckets": "view" if of(settings, "musubi_blocks_to_swap") else "copy"}


def _write_gradient_buckets(fields: Fields) -> Settings:
    expected = "view" if fields["swap_blocks"] and fields.get("version") not in BY_RAMTORCH else "copy"
    if fields["grad_buckets"] != expected:
        why = "DDP copies gradients into its buckets, unless blocks are swapped"
        raise InexpressibleError(UnsupportedValue("grad_buckets", fields["grad_buckets"], expected, why))
    return {}


def _ema(settings: Settings) -> Fields:
    """``ema_device`` is the CPU unless it says otherwise, and with ``ema_cpu_only`` whatever it says
    (helpers/configuration/cmd_args.py:1076)."""
    if not is_true(of(settings, "use_ema")):
        return {"ema": "none"}
    on_gpu = str(of(settings, "ema_device")) in ("accelerator", "cuda") and not is_true(of(settings, "ema_cpu_only"))
    return {"ema": "gpu" if on_gpu else "cpu"}


EMA = ("use_ema", "ema_device", "ema_cpu_only")


def _write_ema(fields: Fields) -> Settings:
    if fields["ema"] == "none":
        return {}
    own: Settings = {"use_ema": True, "ema_device": "accelerator" if fields["ema"] == "gpu" else "cpu"}
    own |= {"ema_cpu_only": True} if fields["ema"] == "cpu" else {}
    return {f"{CONFIG}{name}": value for name, value in own.items()}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if lycoris_config.is_lycoris(settings):
        yield from (Remark(name, "the file of lycoris_config says it") for name in lycoris_config.unused(settings))
    if integer(of(settings, INTERVAL) or 1, INTERVAL) > 1 and fields["gradient_checkpointing"] == "full":
        yield Remark(INTERVAL, "this family has none, and checkpoints every block")
    if is_true(of(settings, ENCODERS_WAIT)) and family_of(settings) in ENCODERS_STAY:
        yield Remark(ENCODERS_WAIT, "RamTorch leaves this family's text encoder alone")
    elif is_true(of(settings, ENCODERS_WAIT)) and not _ramtorch(settings):
        yield Remark(ENCODERS_WAIT, "without ramtorch it does nothing")
    if of(settings, "musubi_blocks_to_swap") and family_of(settings) in NO_SWAP:
        yield Remark("musubi_blocks_to_swap", "this family swaps no blocks")


def _names(settings: Settings) -> set[str]:
    """The keys of the config, and what the sets have of them."""
    of_sets = {"train_batch_size"} if BATCH in settings else set()
    return of_sets | {name.removeprefix(CONFIG) for name in settings if name.startswith(CONFIG)}


CAPTURED = frozenset({"cudagraphs", "max-autotune", "reduce-overhead"})
"""Modes of torch.compile that capture (torch/_inductor/__init__.py ``list_mode_options``; SimpleTuner bc8e6ab
helpers/training/dynamo.py ``_inductor_cudagraphs_enabled``)."""


def _captures(settings: Settings) -> bool:
    """Whether compiled blocks are captured as CUDA graphs."""
    backend, mode = (str(of(settings, f"dynamo_{name}")).lower().replace("_", "-") for name in ("backend", "mode"))
    return backend == "cudagraphs" or (backend == "inductor" and mode in CAPTURED)


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield from defaults.notes(_names(settings))
    if lookup.model(fields["model"]).kind == "image" and fields["vae"] == "cached":
        yield from defaults.encoding_notes(_names(settings))
    yield from size_notes(settings, fields)
    yield from own_model_notes("simpletuner", fields)
    if masks := unpriced_masks_note("simpletuner", fields):
        yield masks
    if lycoris_config.is_lycoris(settings):
        yield lycoris_config.note(settings)
    elif fields["method"] == "lora" and fields["lora_targets"] is None:
        yield "LoRA estimated on the model's usual layers"
    if _fuses(settings):
        priced = _version(settings, fields) == FUSED
        more = "; adapters are estimated on the three" if fields["method"] == "lora" else ""
        yield "fused projections: q, k and v are there twice" + (more if priced else ", which is not estimated")
    if fields["gradient_checkpointing"] == "partial":
        together = (interval := interval_of(settings)) is not None and interval.together
        more = "; the blocks of a segment are recomputed together, which may take one more" if together else ""
        yield f"{fields['checkpointed_blocks']} checkpointed blocks are priced as the first ones; it takes others{more}"
    if is_true(of(settings, "gradient_checkpointing_offload_attention")):
        yield f"gradient_checkpointing_offload_attention{MAY_NEED_LESS}"
    asked = _ramtorch(settings) and is_true(of(settings, ENCODERS_WAIT)) and family_of(settings) not in ENCODERS_STAY
    if asked and (fields["text_encoder"] == "resident" or not _encoders_wait(settings)):
        yield f"{ENCODERS_WAIT}{MAY_NEED_LESS}"
    if (layers := of(settings, "flux_lora_target")) != "all":
        yield f"flux_lora_target {layers} is not priced: estimated as all"
    if _captures(settings):
        yield "torch.compile (dynamo_mode): CUDA graphs keep up to what a step without checkpoints takes, the high end"
    elif str(of(settings, "dynamo_backend")).lower() not in ("no", "none"):
        yield "torch.compile (dynamo_backend) is not estimated"
    if of(settings, "optimizer") == "bnb-lion8bit-paged":
        yield "bnb-lion8bit-paged is priced as 8-bit AdamW, paged too: its one state takes half of those in host RAM"
    family = family_of(settings)
    assisted = str(of(settings, "model_flavour") or "") in ASSISTED.get(family, ())
    if assisted and fields["method"] == "lora" and not is_true(of(settings, "disable_assistant_lora")):
        yield "the flavour's assistant LoRA runs beside the trained one: not estimated, and takes more than this"
    if family not in T5_TOKENS and of(settings, "tokenizer_max_length"):
        yield "tokenizer_max_length is not estimated: the model's usual length of prompts is"
    if family in PADDED_TOKENS and fields["text_tokens"] is None:
        padded = PADDED_TOKENS[family]
        yield f"prompts are padded to {padded} tokens: pass --text-tokens {padded} for their memory and seconds"
    if fields["ema"] == "cpu" and not is_true(of(settings, "ema_cpu_only")):
        yield "without ema_cpu_only the average goes to the GPU at each update, which is not estimated"
    for precision in TEXT_ENCODERS:
        if is_on(of(settings, precision)) and of(settings, precision) != "no_change":
            yield f"{precision}{MAY_NEED_LESS}"
    base = str(of(settings, "base_model_precision"))
    if not _ramtorch(settings) and _version_of_base(settings, base) in (QUANTISED_WHOLE, QUANTO_WHOLE, TORCHAO_WHOLE):
        yield "without quantize_via cpu the model lies on the GPU whole in 16 bits before it is quantised"


def _by_torchao(settings: Settings) -> str:
    return str(of(settings, "base_model_precision")).replace("-quanto", "-torchao")


def _quantised_words(settings: Settings, base: str, via: str = "") -> list[str]:
    """``base``, ``via``: ``base_model_precision``, and ``quantize_via`` where it changes."""
    said = [f"base_model_precision: {base}", *([f"quantize_via: {via}"] if via else [])]
    return said + said_beside(settings, base, via or str(of(settings, "quantize_via")))


def _quantised(dtype: str, what: str, via: str = "") -> Move:
    """Quantising the base of an adapter. ``dtype``: ours; ``what``: in words; ``via``: its ``quantize_via``."""
    return Move(
        {"weights_dtype": dtype},
        what,
        words_for=lambda settings: _quantised_words(settings, WRITTEN[dtype], via),
        when=lambda fields: (
            fields["method"] == "lora"
            and fields["version"] not in (*WHOLE, *BY_RAMTORCH)
            and fields["weights_dtype"] not in QUANTISED
        ),
    )


def _in_host_ram(whole: str, then: str) -> Move:
    """Quantising in host RAM instead of on the GPU. ``whole``, ``then``: the versions of both."""
    return Move(
        {"version": then},
        "quantising in host RAM takes longer",
        words_for=lambda settings: ["quantize_via: cpu"],
        when=lambda fields: fields["version"] == whole,
    )


def _pair(
    fields: dict[str, str],
    settings: tuple[str, ...],
    read: Callable[[Settings], Fields],
    write: Callable[[Fields], Settings],
) -> FunctionPair:
    """A binding. ``fields``: with what of them can be said."""
    return FunctionPair(tuple(fields), settings, read, write, fields)


TABLE: tuple[Binding | When, ...] = (
    _pair(
        {"model": ", ".join(MODELS), "experts": "high, low"},
        tuple(f"{CONFIG}{name}" for name in ("model_family", "model_flavour", FAST_SCHEDULE)),
        model_of,
        write_model,
    ),
    _pair({"method": "lora, full"}, (f"{CONFIG}model_type",), _method, _write_method),
    When(
        "method",
        ONLY_LORA,
        _pair(
            {"lora_rank": "lora_rank", "lora_dropout": "lora_dropout"},
            (f"{CONFIG}lora_rank", f"{CONFIG}lora_dropout"),
            _rank,
            _write_rank,
        ),
    ),
    When("method", ONLY_LORA, _pair({"adapter": "use_dora"}, (f"{CONFIG}use_dora",), _adapter, _write_adapter)),
    _pair(
        {
            "height": "resolution, crop_aspect_buckets",
            "width": "resolution, crop_aspect_buckets",
            "frames": "video.num_frames",
        },
        (
            *(DATASET + name for name in ("resolution", "resolution_type", "video.num_frames")),
            BUCKETS,
            f"{CONFIG}{ALIGNMENT}",
        ),
        size_of,
        write_size,
    ),
    _pair(
        {"batch_size": "train_batch_size"},
        (f"{CONFIG}train_batch_size",),
        batch_of,
        lambda fields: {f"{CONFIG}train_batch_size": fields["batch_size"]},
    ),
    Value("gradient_accumulation", f"{CONFIG}gradient_accumulation_steps", 1, int),
    _pair(
        {
            "optimizer": ", ".join(dict.fromkeys(OPTIMIZERS.values())),
            "optimizer_step": "loop (adamw), foreach, fused (DeepSpeed's)",
        },
        (f"{CONFIG}optimizer", deepspeed_config.OWN_ADAM),
        engines.optimizer_of,
        engines.write_optimizer,
    ),
    _pair(dict(engines.WORDS), engines.SETTINGS, engines.engine_of, engines.write_engine),
    _pair(
        {"gradient_checkpointing": "none, full, offload", "checkpointed_blocks": "read only"},
        tuple(f"{CONFIG}{name}" for name in ("gradient_checkpointing", INTERVAL, STRIDE, engines.RECOMPUTED)),
        engines.checkpointing_of,
        write_checkpointing,
    ),
    _pair({"lora_targets": "those of model_family"}, (f"{CONFIG}model_family",), _layers, _write_layers),
    _pair(
        {"text_tokens": "tokenizer_max_length, of sd3"},
        (f"{CONFIG}tokenizer_max_length",),
        _prompt_length,
        _write_prompt_length,
    ),
    _pair({"ema": "none, cpu, gpu"}, tuple(f"{CONFIG}{name}" for name in EMA), _ema, _write_ema),
    _pair(
        {"swap_blocks": "musubi_blocks_to_swap"},
        tuple(f"{CONFIG}{name}" for name in ("musubi_blocks_to_swap", "ramtorch", "ramtorch_transformer_percent")),
        _swap,
        _write_swap,
    ),
    _pair(
        {part: f"cached, resident by {words[0]}" for part, words in ENCODES.items()},
        tuple(f"{CONFIG}{words[0]}" for words in ENCODES.values()),
        encoders_of,
        write_encoders,
    ),
    _pair({"vae_tiling": TILING}, (f"{CONFIG}{TILING}",), _tiling, _write_tiling),
    _pair({"references": "conditioning_data"}, (REFERENCE_SETS,), references_of, write_references),
    *(EXPANDABLE, GPUS, NODES),
    When(
        "sharding",
        frozenset({"ddp"}),
        _pair({"grad_buckets": "copy, view with swapped blocks"}, (), _gradient_buckets, _write_gradient_buckets),
    ),
    Fixed("validation_mode", "off", "its samples are not priced: validation_disable is written"),
    *our_defaults("trainable", "buckets", "validation"),
)

CARRIES: config_text.FieldsBySetting = {
    f"{CONFIG}model_family": ("model",),
    f"{CONFIG}model_flavour": ("model", "experts"),
    f"{CONFIG}lora_rank": ("lora_rank",),
    f"{CONFIG}lora_dropout": ("lora_dropout",),
    f"{CONFIG}use_dora": ("adapter",),
    f"{CONFIG}mixed_precision": ("autocast", "adapter_dtype"),
    f"{CONFIG}base_model_precision": ("weights_dtype",),
    f"{CONFIG}quantize_via": ("weights_dtype",),
    f"{CONFIG}optimizer": ("optimizer", "optimizer_step"),
    f"{CONFIG}{ALIGNMENT}": ("height", "width"),
    f"{DATASET}resolution": ("height", "width"),
    f"{DATASET}resolution_type": ("height", "width"),
    BUCKETS: ("height", "width"),
    f"{DATASET}video.num_frames": ("frames",),
    **{f"{CONFIG}{words[0]}": (part,) for part, words in ENCODES.items()},
}


def _files(plan: Plan, settings: Settings) -> dict[str, str]:
    return files(plan, settings, config_text.fields_by_setting(DIALECT, settings, CARRIES))


DIALECT: Dialect = Dialect(
    name="simpletuner",
    title="SimpleTuner",
    source="https://github.com/bghira/SimpleTuner at bc8e6ab",
    scripts=("config.json",),
    steps=(f"{CONFIG}max_train_steps", f"{CONFIG}num_train_epochs"),
    table=TABLE,
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    version=_version,
    stops=stops,
    captures=_captures,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"gradient_checkpointing": "offload"}, "checkpoints go to host RAM and come back"),
        Move({"vae_tiling": True}, "the VAE's tiles are blended where they meet"),
        *(
            _in_host_ram(with_base(whole, adapters), with_base(then, adapters))
            for adapters in ("", *BYPASSED)
            for whole, then in ((QUANTISED_WHOLE, ""), (TORCHAO_WHOLE, ""), (QUANTO_WHOLE, QUANTO))
        ),
        Move(
            {"version": ""},
            "torchao rounds the layers that Quanto leaves",
            words_for=lambda settings: _quantised_words(settings, _by_torchao(settings), "cpu"),
            when=lambda fields: fields["version"] in (QUANTO, QUANTO_WHOLE),
            lossy=True,
        ),
        Move(
            {"version": RAMTORCH_ENCODERS},
            "the text encoder's layers come over PCIe as prompts are encoded",
            words_for=lambda settings: [f"{ENCODERS_WAIT}: true"],
            when=lambda fields: fields["version"] == RAMTORCH and _may_wait(fields),
        ),
        Move({"optimizer": "adamw-8bit", "optimizer_step": "foreach"}, "8-bit optimizer states"),
        Move(
            {"swap_blocks": 1},
            "slower, and host RAM for the blocks",
            by_fields=_more_swapped,
            when=lambda fields: fields["version"] not in BY_RAMTORCH,
        ),
        *engines.MOVES,
        _quantised("int8", "the frozen base is rounded to 8 bits", "cpu"),
        _quantised("fp8", "the frozen base is rounded to 8 bits", "cpu"),
        _quantised("nf4", "the frozen base is rounded to 4 bits"),
    ),
    files=_files,
    assigns=": ",
)
