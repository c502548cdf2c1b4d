"""musubi-tuner's words and ours, both ways."""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalog import lookup
from planner.dialects.base import block_swap, flags
from planner.dialects.base.bindings import (
    ONLY_LORA,
    Binding,
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
    pair,
)
from planner.dialects.base.commands import parse_program
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, one_of, our_defaults, word_for
from planner.dialects.base.dialect import Clash, Dialect, Invocation, Move
from planner.dialects.base.launchers import launch_settings, several_gpus
from planner.dialects.base.script import PythonCommand, Script
from planner.dialects.base.values import integer
from planner.dialects.musubi_tuner import datasets, unpriced_settings
from planner.dialects.musubi_tuner.datasets import BATCH, EXTRACTION, FRAMES, SHAPE, SIZE, dataset_key
from planner.dialects.musubi_tuner.files import files
from planner.dialects.musubi_tuner.models import (
    AT,
    ENCODER_FP8,
    FAMILIES,
    FULL,
    NETWORKS,
    SCALED,
    SCRIPT,
    UNUSABLE_FP8,
    WHICH,
    family_of,
    is_full,
    is_script_of,
    model_of,
    write_model,
)
from planner.dialects.musubi_tuner.network_modules import adapter_note, kind_of, rank_of, targets_of, write_rank
from planner.errors import VplanError
from planner.layout.trainer_terms.lora_layers import on_all_linear, unpriced_layers_note
from planner.layout.trainer_terms.musubi_tuner import CAST, ONE_TIME, TILE_256, TILE_SIZE
from planner.spec.plan import Plan
from planner.untrusted import flat

# ---- numbers, adapters, steps

OPTIMIZERS = {
    "AdamW": "adamw",
    "AdamW8bit": "adamw-8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw-8bit-paged",
    "Adafactor": "adafactor",
    "lion_pytorch.Lion": "lion",
    "prodigyopt.Prodigy": "prodigy",
    "came_pytorch.CAME": "came",
    "Muon": "muon",
}
"""Behind the first four any class with its module's path, and of torch.optim without it (`get_optimizer`)."""


def _optimizer_of(settings: Settings) -> Fields:
    return {"optimizer": one_of(OPTIMIZERS, "--optimizer_type")(settings.get("--optimizer_type", "AdamW"))}


def _write_optimizer(fields: Fields) -> Settings:
    return {"--optimizer_type": word_for(OPTIMIZERS, "optimizer", "adamw")(fields["optimizer"])}


def _method_of(settings: Settings) -> Fields:
    unpriced_settings.refuse_unpriced(settings)
    return {"method": "full" if is_full(settings) else "lora"}


def _write_method(fields: Fields) -> Settings:
    if fields["method"] != "lora":
        why = "its network scripts train LoRA; of the others `vplan check` reads commands"
        raise InexpressibleError(UnsupportedValue("method", fields["method"], "lora", why))
    return {}


STEPS = Choice(
    "optimizer_step",
    {
        "foreach": {},
        "fused": {"--optimizer_args": ["fused=True"]},
        "loop": {"--optimizer_args": ["foreach=False"]},
    },
    "LoRA steps after backward",
)


def _step_of(settings: Settings) -> Fields:
    """``--fused_backward_pass`` is of full training alone."""
    return {"optimizer_step": "backward"} if settings.get("--fused_backward_pass") else STEPS.to_fields(settings)


def _write_step(fields: Fields) -> Settings:
    """``--fused_backward_pass`` patches Adafactor alone (qwen_image_train.py:363, modules/adafactor_fused.py)."""
    if fields["optimizer_step"] == "backward" and fields["method"] == "full" and fields["optimizer"] == "adafactor":
        return {"--fused_backward_pass": True}
    return STEPS.to_settings(fields)


def _formats_of(settings: Settings) -> Fields:
    """Full training keeps fp32 weights unless ``--full_bf16`` or ``--full_fp16`` says otherwise (hv_train.py:871,
    qwen_image_train.py:171)."""
    mixed = settings.get("--mixed_precision", settings.get("launch:--mixed_precision", "no"))
    half = mixed if mixed in ("bf16", "fp16") else "none"
    sixteen = settings.get("--full_bf16") or settings.get("--full_fp16")
    trained = half if sixteen and half != "none" else "fp32"
    frozen = "fp8" if settings.get("--fp8_base") else "bf16"
    return {"weights_dtype": trained if is_full(settings) else frozen, "autocast": half}


def _write_formats(fields: Fields) -> Settings:
    weights = fields["weights_dtype"]
    if weights not in ("bf16", "fp8"):
        raise InexpressibleError(UnsupportedValue("weights_dtype", weights, "bf16", "weights are bf16 or --fp8_base"))
    settings: Settings = {"--mixed_precision": "no" if fields["autocast"] == "none" else fields["autocast"]}
    if weights == "fp8":
        settings["--fp8_base"] = True
        settings |= {"--fp8_scaled": True} if family_of(fields["model"]) in SCALED else {}
    return settings


def _targets_of(settings: Settings) -> Fields:
    return targets_of(settings, _formats_of(settings)["weights_dtype"])


def _write_targets(fields: Fields) -> Settings:
    profile = lookup.model(fields["model"])
    targets = frozenset(fields["lora_targets"] or profile.lora.targets)
    all_of_them = on_all_linear(profile, fields["weights_dtype"])
    settings: Settings = {"--network_module": f"networks.{_network(profile.name)}"}
    if all_of_them and targets == frozenset(all_of_them):
        return settings
    wan = family_of(profile.name) == "wan"
    if targets == frozenset(profile.lora.targets) and (wan or not all_of_them):
        return settings | ({"--network_args": ["exclude_patterns=[r'.*ffn.*']"]} if wan else {})
    why = f"adapters are on every linear layer of the blocks ({AT} networks/{_network(profile.name)}.py)"
    raise InexpressibleError(UnsupportedValue("lora_targets", fields["lora_targets"], all_of_them, why))


def _network(model: str) -> str:
    return NETWORKS.get(family_of(model), f"lora_{family_of(model)}")


def _encoder_of(settings: Settings) -> Fields:
    flag = ENCODER_FP8.get(family_of(model_of(settings)["model"]), "")
    return {"text_encoder_dtype": "fp8" if settings.get(flag) else "bf16"}


def _write_encoder(fields: Fields) -> Settings:
    dtype, family = fields["text_encoder_dtype"], family_of(fields["model"])
    flag = ENCODER_FP8.get(family)
    if dtype == "fp8" and flag and family != UNUSABLE_FP8:
        return {flag: True}
    if dtype != "bf16":
        raise InexpressibleError(UnsupportedValue("text_encoder_dtype", dtype, "bf16", "bf16, or fp8 by a flag"))
    return {}


def _sharding_of(settings: Settings) -> Fields:
    return {"sharding": "ddp" if several_gpus(settings) else "none"}


def _write_sharding(fields: Fields) -> Settings:
    expected = "ddp" if fields["gpus"] * fields["nodes"] > 1 else "none"
    if fields["sharding"] != expected:
        why = f"it has DDP only: DeepSpeed is not supported ({AT} training/accelerator_setup.py), nor FSDP"
        raise InexpressibleError(UnsupportedValue("sharding", fields["sharding"], expected, why))
    return {}


VAE_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}


def _vae_of(settings: Settings) -> Fields:
    if is_script_of("zimage", settings):  # always fp32, whatever the flag says (zimage_train_network.py:357)
        return {"vae_dtype": "fp32"}
    usual = "bfloat16" if is_script_of("wan", settings) else "float16"
    return {"vae_dtype": one_of(VAE_DTYPES, "--vae_dtype")(settings.get("--vae_dtype", usual))}


def _write_vae(fields: Fields) -> Settings:
    if family_of(fields["model"]) == "zimage":
        if fields["vae_dtype"] != "fp32":
            why = f"Z-Image's VAE is always fp32 ({AT} zimage_train_network.py:357)"
            raise InexpressibleError(UnsupportedValue("vae_dtype", fields["vae_dtype"], "fp32", why))
        return {}
    word = word_for(VAE_DTYPES, "vae_dtype", "bf16")(fields["vae_dtype"])
    usual = "bfloat16" if family_of(fields["model"]) == "wan" else "float16"
    return {} if word == usual else {"--vae_dtype": word}


def _tiling_of(settings: Settings) -> Fields:
    """HunyuanVideo 1.5's VAE works in tiles unless ``--vae_sample_size`` is 0 (hv_1_5_cache_latents.py:151); the flag
    of training, which is that of its samples, is taken for the same of the script that caches."""
    tiles = is_script_of("hv_1_5", settings) and integer(settings.get(TILES, TILE_SIZE), TILES) != 0
    return {"vae_tiling": tiles}


def _write_tiling(fields: Fields) -> Settings:
    if family_of(fields["model"]) == "hv_1_5":
        return {} if fields["vae_tiling"] else {TILES: 0}
    if fields["vae_tiling"]:
        why = f"latents are cached whole ({AT}); of HunyuanVideo 1.5 alone in tiles"
        raise InexpressibleError(UnsupportedValue("vae_tiling", True, False, why))
    return {}


def _version(settings: Settings, fields: Fields) -> str:
    tiles = fields["vae_tiling"] and settings.get(TILES) == 256
    version = ONE_TIME if settings.get("--force_v2_1_time_embedding") else TILE_256 if tiles else ""
    kind = kind_of(settings)
    if kind and version:
        flag = "--force_v2_1_time_embedding" if version == ONE_TIME else f"{TILES} 256"
        raise VplanError(f"--network_module networks.{kind} with {flag} is not priced", f"leave {flag} out")
    return kind or version or (CAST if _is_cast_whole(settings, fields) else "")


def _is_cast_whole(settings: Settings, fields: Fields) -> bool:
    """Whether Wan's file lies in 16 bits, on the GPU or with swapped blocks in host RAM, until all of it is cast to 8:
    not where it has 8 bits itself, as far as its name says."""
    plain = settings.get("--fp8_base") and not settings.get("--fp8_scaled")
    return bool(plain) and family_of(fields["model"]) == "wan" and "fp8" not in str(settings.get("--dit")).lower()


TILES = "--vae_sample_size"


def _samples_of(settings: Settings) -> Fields:
    return {"validation_mode": "on" if settings.get("--sample_prompts") else "off"}


def _write_samples(fields: Fields) -> Settings:
    mode = fields["validation_mode"]
    if mode == "off":
        return {}
    if mode == "offload":
        raise InexpressibleError(
            UnsupportedValue("validation_mode", mode, "on", "it samples with the model where it is")
        )
    return {"--sample_prompts": "prompts.txt", "--sample_every_n_epochs": 1}


ATTENTION = ("--sdpa", "--flash_attn", "--xformers", "--flash3")


def _attention_of(settings: Settings) -> Fields:
    """The first of its words counts (training/trainer_base.py); flash 3 saves what flash 2 does."""
    words = {"--sdpa": "sdpa", "--flash_attn": "flash", "--xformers": "efficient", "--flash3": "flash"}
    named_kernel = next((kernel for word, kernel in words.items() if settings.get(word)), None)
    return {"attention": named_kernel or "sdpa"}


def _write_attention(fields: Fields) -> Settings:
    words = {"sdpa": "--sdpa", "flash": "--flash_attn", "efficient": "--xformers"}
    if fields["attention"] not in words:
        why = "--sdpa, --flash_attn or --xformers"
        raise InexpressibleError(UnsupportedValue("attention", fields["attention"], "sdpa", why))
    return {words[fields["attention"]]: True}


def _swap_of(settings: Settings) -> Fields:
    blocks = integer(settings.get("--blocks_to_swap") or 0, "--blocks_to_swap")
    model = model_of(settings)["model"]
    return {"swap_blocks": block_swap.swapped("musubi-tuner", model, blocks, "--blocks_to_swap")}


def _write_swap(fields: Fields) -> Settings:
    blocks = block_swap.setting("musubi-tuner", fields)
    return {"--blocks_to_swap": blocks} if blocks else {}


_ENCODER_FLAGS = tuple(dict.fromkeys(ENCODER_FP8.values()))
CARRIES = {
    SIZE: ("width", "height"),
    BATCH: ("batch_size",),
    FRAMES: ("frames", "buckets"),
    "--dit": ("model", "experts"),
    "--task": ("model",),
    "--fp8_base": ("weights_dtype",),
    "--fp8_scaled": ("weights_dtype",),
    "--mixed_precision": ("autocast",),
}
"""Setting -> fields, where its binding has several."""

TABLE: tuple[Binding | When, ...] = (
    *(GPUS, NODES, EXPANDABLE),
    pair(model_of, write_model, WHICH, model=", ".join(FAMILIES), experts="--dit, --dit_high_noise",
             inactive_expert="absent; with both experts gpu, or cpu by --offload_inactive_dit"),
    pair(_method_of, _write_method, (), method="lora"),
    FunctionPair(SHAPE, (SIZE, BATCH, FRAMES, EXTRACTION), datasets.shape_of, datasets.write_shape, {
        "frames": "target_frames", "height": "resolution", "width": "resolution", "batch_size": "batch_size",
        "buckets": "several target_frames of one size"}, datasets.changed_shape),
    When("method", ONLY_LORA, pair(rank_of, write_rank, ("--network_dim",),
             lora_rank="--network_dim; networks.lokr and loha, read only, by their numbers")),
    When("method", ONLY_LORA, Value("lora_dropout", "--network_dropout", 0.0, float)),
    pair(_targets_of, _write_targets, ("--network_module", "--network_args"), lora_targets="all linear layers"),
    pair(_formats_of, _write_formats, ("--fp8_base", "--fp8_scaled", "--mixed_precision"),
             weights_dtype="bf16, fp8 by --fp8_base", autocast="--mixed_precision"),
    Fixed("compute_dtype", "bf16", "the transformer computes in bf16"),
    Fixed("adapter_dtype", "fp32", "adapters are fp32 (musubi-tuner #715)"),
    Choice("gradient_checkpointing", {
        "none": {},
        "full": {"--gradient_checkpointing": True},
        "offload": {"--gradient_checkpointing": True, "--gradient_checkpointing_cpu_offload": True},
    }, "every block is checkpointed, or none"),
    Fixed("checkpointed_blocks", None),
    pair(_optimizer_of, _write_optimizer, ("--optimizer_type",), optimizer="--optimizer_type"),
    pair(_step_of, _write_step, ("--optimizer_args", "--fused_backward_pass"), optimizer_step="foreach, fused, loop"),
    Value("gradient_accumulation", "--gradient_accumulation_steps", 1, int),
    pair(_sharding_of, _write_sharding, (), sharding="none on one GPU, ddp on several"),
    When("sharding", frozenset({"ddp"}), Choice("grad_buckets", {
        "copy": {}, "view": {"--ddp_gradient_as_bucket_view": True}})),
    pair(_swap_of, _write_swap, ("--blocks_to_swap",), swap_blocks="--blocks_to_swap"),
    Fixed("text_encoder", "cached", "prompts are cached by a script of their own before"),
    Fixed("vae", "cached", "latents are cached by a script of their own before"),
    pair(_encoder_of, _write_encoder, _ENCODER_FLAGS, text_encoder_dtype="bf16, or fp8 by a flag"),
    pair(_vae_of, _write_vae, ("--vae_dtype",), vae_dtype="--vae_dtype"),
    pair(_tiling_of, _write_tiling, (TILES,), vae_tiling="of HunyuanVideo 1.5, unless --vae_sample_size is 0"),
    pair(_samples_of, _write_samples, ("--sample_prompts", "--sample_every_n_epochs"),
             validation_mode="off, on by --sample_prompts"),
    pair(_attention_of, _write_attention, ATTENTION, attention="--sdpa, --flash_attn; --xformers read as efficient"),
    Choice("compile", {"none": {}, "blocks": {"--compile": True}}, "--compile compiles each block"),
    pair(unpriced_settings.references_of, lambda fields: {}, (), references="a model's own; 1 by control_directory"),
    *our_defaults("trainable", "text_tokens", "validation", "master_weights", "ema", "offload_optimizer",
           "offload_gradients", "offload_params", "vae_slicing", "group_offload", "group_offload_stream",
           "context_parallel", "adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
)  # fmt: skip


def read_script(script: Script) -> Invocation | None:
    """A command of one of its network scripts; a dataset's and a config file that it names are read too."""
    programs = [program for program in script.programs if _is_own(program)]
    if not programs:
        return None
    launch, notes = launch_settings(programs[-1], script, {})
    invocation = parse_program("musubi-tuner", programs[-1], launch, [*script.notes, *notes])
    settings, notes = dict(invocation.settings), list(invocation.notes)
    unknown, removed = list(invocation.unknown), list(invocation.removed)
    if path := settings.get("--config_file"):
        inside = script.document(str(path))
        if inside is None:
            notes.append(f"{script.missing(str(path))}: read without it")
        else:
            parsed = flags.script("musubi-tuner", str(settings["script"])).parse_config(inside)
            settings = parsed.values | settings
            unknown += parsed.unknown
            removed += [Remark(name, why) for name, why in parsed.removed.items()]
    if path := settings.get("--dataset_config"):
        inside = script.document(str(path))
        if inside is None:
            what = "estimated at the model's default shape, one sample at a time"
            notes.append(f"{script.missing(str(path))}: {what}")
        else:
            settings |= {f"dataset:{key}": value for key, value in flat(inside, str(path)).items()}
    for name in ("--sample_prompts", "--sample_every_n_epochs"):
        if name in settings and settings.get("--sample_prompts"):  # any file, however often, is the same to us
            settings |= {"--sample_prompts": "prompts.txt", "--sample_every_n_epochs": 1}
    return Invocation(
        "musubi-tuner", settings, tuple(unknown), tuple(removed), tuple(notes), refused=invocation.refused
    )


def _is_own(program: PythonCommand) -> bool:
    entry_point = flags.find("musubi-tuner", program.script)
    if entry_point is None or entry_point.path.count("/") != 2:
        return False
    return entry_point.path.endswith("_train_network.py") or entry_point.path in FULL


def remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    """The given settings that have no effect, each with the reason."""
    if settings.get("--gradient_checkpointing_cpu_offload") and not settings.get("--gradient_checkpointing"):
        yield Remark("--gradient_checkpointing_cpu_offload", "it acts with --gradient_checkpointing only")
    if settings.get("--ddp_gradient_as_bucket_view") and fields["sharding"] != "ddp":
        yield Remark("--ddp_gradient_as_bucket_view", "one GPU has no buckets")


def stops(settings: Settings) -> Iterator[Remark]:
    """What it ends the run for before the first step (training/trainer_base.py): the flag, and why."""
    if settings.get("--fp8_scaled") and not settings.get("--fp8_base"):
        yield Remark("--fp8_scaled", f"refused without --fp8_base ({AT} training/trainer_base.py)")
    for name in ("--dit", "--dit_high_noise"):
        if str(settings.get(name, "")).lower().endswith(".gguf"):
            yield Remark(
                name, "a .gguf file, and only safetensors are read (musubi-tuner 4fcc570 utils/safetensors_utils.py)"
            )
    if not any(settings.get(word) for word in ATTENTION):
        others = f"{', '.join(ATTENTION[1:-1])} or {ATTENTION[-1]}"
        yield Remark(ATTENTION[0], f"missing, and so is {others}: estimated with it ({AT} training/trainer_base.py)")


CLASHES = (
    Clash(
        lambda fields: fields["inactive_expert"] == "cpu" and bool(fields["swap_blocks"]),
        "inactive_expert",
        "gpu",
        "--offload_inactive_dit",
        f"refused with --blocks_to_swap ({AT} wan_train_network.py)",
    ),
)


def notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What the trainer does that the settings do not say, in words, with the source."""
    lora = fields["method"] == "lora"
    narrow = "--network_args" in settings and family_of(fields["model"]) == "wan"
    if lora and not narrow and (note := unpriced_layers_note(lookup.model(fields["model"]), fields["lora_targets"])):
        yield note
    tiles = f", latents in tiles of {settings.get(TILES, TILE_SIZE)} pixels ({TILES})" if fields["vae_tiling"] else ""
    yield f"latents and prompts are cached before training ({AT}){tiles}"
    if note := adapter_note(settings, fields):
        yield note
    if _is_cast_whole(settings, fields):
        counted = "counted" if _version(settings, fields) == CAST else "not counted"
        both = "loading holds a 16-bit file and its fp8 copy at once, 3 bytes a parameter"
        yield f"--fp8_base without --fp8_scaled: {both}, which is {counted} (an fp8 file needs no copy)"
    elif lora and not settings.get("--network_dim"):
        yield "LoRA rank 4, the default of --network_dim"
    if fields["validation_mode"] == "on":
        yield "samples are estimated as large as the clips: the file of --sample_prompts may say otherwise"
    if family_of(fields["model"]) == UNUSABLE_FP8 and fields["text_encoder_dtype"] == "fp8":
        yield f"--fp8_t5 ends in an AttributeError, as there is no torch.float8e4m3fn ({AT}): leave it out"
    yield from unpriced_settings.notes(settings, fields)
    yield from datasets.notes(settings, fields)
    if dataset_key(settings, "frame_extraction") == "full":
        yield "frame_extraction full: clips as long as they are, up to max_frames, which is priced"


MOVES = (
    Move({"expandable_segments": True}, "free"),
    Move({"gradient_checkpointing": "full"}, "one more forward pass"),
    Move(
        {"version": ONE_TIME},
        "one time embedding for all tokens, as they are of one time: docs/wan.md saw no effect",
        words_for=lambda settings: ["--force_v2_1_time_embedding"],
        when=lambda fields: (
            not fields["version"] and lookup.model(fields["model"]).trained_with("musubi-tuner", "time-per-token")
        ),
    ),
    Move(
        {"version": ""},
        "a scale for each layer's weights",
        words_for=lambda settings: ["--fp8_scaled"],
        when=lambda fields: fields["version"] == CAST,
    ),
    Move({"grad_buckets": "view"}, "free"),
    Move(
        {"swap_blocks": 8},
        "slower, and host RAM for the blocks",
        by_fields=block_swap.steps("musubi-tuner", (8, 16, 20, 26, 32, 36, 39)),
    ),
    Move(
        {"inactive_expert": "gpu"},
        "swapped blocks leave the GPU in both experts",
        when=lambda fields: fields["inactive_expert"] == "cpu",
    ),
    Move({"gradient_checkpointing": "offload"}, "slower, and host RAM for the checkpoints"),
    Move(
        {"vae_tiling": True},
        "latents are cached in tiles, which are blended where they meet",
        when=lambda fields: family_of(fields["model"]) == "hv_1_5",
    ),
    Move({"optimizer": "adamw-8bit"}),
    Move(
        {"optimizer": "adafactor", "optimizer_step": "backward"},
        "second moments are row and column sums; the step runs inside backward, so nothing accumulates",
        when=lambda fields: fields["method"] == "full" and fields["gradient_accumulation"] == 1,
    ),
    Move({"weights_dtype": "fp8"}, when=lambda fields: fields["method"] == "lora"),
)


def _files(plan: Plan, settings: Settings) -> dict[str, str]:
    return files(DIALECT, plan, settings, CARRIES)


DIALECT: Dialect = Dialect(
    name="musubi-tuner",
    title="musubi-tuner",
    source="https://github.com/kohya-ss/musubi-tuner at 30c658c",
    drops_inputs=False,  # networks/lora.py `forward`: "normal dropout" of `lora_down`
    scripts=tuple(SCRIPT.format(family) for family in dict.fromkeys(family for family, _ in FAMILIES.values())),
    steps=("--max_train_steps", "--max_train_epochs"),
    table=TABLE,
    read_script=read_script,
    remarks=remarks,
    notes=notes,
    moves=MOVES,
    clashes=CLASHES,
    stops=stops,
    version=_version,
    files=_files,
)
