"""musubi-tuner's words and ours, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import (
    Binding,
    Choice,
    Dialect,
    Fields,
    Fixed,
    Given,
    Inexpressible,
    Move,
    NotSaidError,
    Remark,
    Settings,
    Several,
    Value,
    When,
)
from planner.dialects.base.launchers import EXPANDABLE, GPUS, NODES, given_flags, launched, one_of, usual, word_for
from planner.dialects.base.script import PythonCommand, Script
from planner.dialects.musubi_tuner.files import files
from planner.dialects.musubi_tuner.models import (
    AT,
    BATCH,
    ENCODER_FP8,
    EXTRACTION,
    FAMILIES,
    FRAMES,
    NETWORKS,
    SCALED,
    SCRIPT,
    SIZE,
    WHICH,
    dataset_key,
    family_of,
    model_of,
    say_model,
    say_shape,
    shape_of,
)
from planner.layout.trainer_terms.lora_layers import on_all_linear, unpriced_layers_note
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


def _optimizer_of(given: Settings) -> Fields:
    return {"optimizer": one_of(OPTIMIZERS, "--optimizer_type")(given.get("--optimizer_type", "AdamW"))}


def _say_optimizer(fields: Fields) -> Settings:
    return {"--optimizer_type": word_for(OPTIMIZERS, "optimizer", "adamw")(fields["optimizer"])}


def _formats_of(given: Settings) -> Fields:
    mixed = given.get("--mixed_precision", given.get("launch:--mixed_precision", "no"))
    return {
        "weights_dtype": "fp8" if given.get("--fp8_base") else "bf16",
        "autocast": mixed if mixed in ("bf16", "fp16") else "none",
    }


def _say_formats(fields: Fields) -> Settings:
    weights = fields["weights_dtype"]
    if weights not in ("bf16", "fp8"):
        raise NotSaidError(Inexpressible("weights_dtype", weights, "bf16", "weights are bf16 or --fp8_base"))
    said: Settings = {"--mixed_precision": "no" if fields["autocast"] == "none" else fields["autocast"]}
    if weights == "fp8":
        said["--fp8_base"] = True
        said |= {"--fp8_scaled": True} if family_of(fields["model"]) in SCALED else {}
    return said


def _targets_of(given: Settings) -> Fields:
    """Adapters on every linear layer of the blocks but modulation (networks/lora_*.py), without Wan's feed-forward
    where a pattern leaves it out."""
    profile = lookup.model(model_of(given)["model"])
    narrow = any("exclude_patterns" in str(each) and "ffn" in str(each) for each in given.get("--network_args") or ())
    wide = on_all_linear(profile, _formats_of(given)["weights_dtype"])
    return {"lora_targets": None if narrow else wide}


def _say_targets(fields: Fields) -> Settings:
    profile = lookup.model(fields["model"])
    asked = frozenset(fields["lora_targets"] or profile.lora.targets)
    all_of_them = on_all_linear(profile, fields["weights_dtype"])
    said: Settings = {"--network_module": f"networks.{_network(profile.name)}"}
    if all_of_them and asked == frozenset(all_of_them):
        return said
    wan = family_of(profile.name) == "wan"
    if asked == frozenset(profile.lora.targets) and (wan or not all_of_them):
        return said | ({"--network_args": ["exclude_patterns=[r'.*ffn.*']"]} if wan else {})
    why = f"adapters are on every linear layer of the blocks ({AT} networks/{_network(profile.name)}.py)"
    raise NotSaidError(Inexpressible("lora_targets", fields["lora_targets"], all_of_them, why))


def _network(model: str) -> str:
    return NETWORKS.get(family_of(model), f"lora_{family_of(model)}")


def _encoder_of(given: Settings) -> Fields:
    flag = ENCODER_FP8.get(family_of(model_of(given)["model"]), "")
    return {"text_encoder_dtype": "fp8" if given.get(flag) else "bf16"}


def _say_encoder(fields: Fields) -> Settings:
    wanted, flag = fields["text_encoder_dtype"], ENCODER_FP8.get(family_of(fields["model"]))
    if wanted == "fp8" and flag:
        return {flag: True}
    if wanted != "bf16":
        raise NotSaidError(Inexpressible("text_encoder_dtype", wanted, "bf16", "bf16, or fp8 by a flag"))
    return {}


def _sharding_of(given: Settings) -> Fields:
    several = given.get("gpus", 1) * given.get("nodes", 1) > 1
    return {"sharding": "ddp" if several else "none"}


def _say_sharding(fields: Fields) -> Settings:
    expected = "ddp" if fields["gpus"] * fields["nodes"] > 1 else "none"
    if fields["sharding"] != expected:
        why = f"it has DDP only: DeepSpeed is not supported ({AT} training/accelerator_setup.py), nor FSDP"
        raise NotSaidError(Inexpressible("sharding", fields["sharding"], expected, why))
    return {}


VAE_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}


def _vae_of(given: Settings) -> Fields:
    usual = "bfloat16" if str(given.get("script", "")).endswith(SCRIPT.format("wan")) else "float16"
    return {"vae_dtype": one_of(VAE_DTYPES, "--vae_dtype")(given.get("--vae_dtype", usual))}


def _say_vae(fields: Fields) -> Settings:
    word = word_for(VAE_DTYPES, "vae_dtype", "bf16")(fields["vae_dtype"])
    usual = "bfloat16" if family_of(fields["model"]) == "wan" else "float16"
    return {} if word == usual else {"--vae_dtype": word}


def _samples_of(given: Settings) -> Fields:
    return {"validation_mode": "on" if given.get("--sample_prompts") else "off"}


def _say_samples(fields: Fields) -> Settings:
    mode = fields["validation_mode"]
    if mode == "off":
        return {}
    if mode == "offload":
        raise NotSaidError(Inexpressible("validation_mode", mode, "on", "it samples with the model where it is"))
    return {"--sample_prompts": "prompts.txt", "--sample_every_n_epochs": 1}


ATTENTION = ("--sdpa", "--flash_attn", "--xformers", "--flash3")


def _attention_of(given: Settings) -> Fields:
    """The first of its words counts (training/trainer_base.py); flash 3 saves what flash 2 does."""
    words = {"--sdpa": "sdpa", "--flash_attn": "flash", "--xformers": "efficient", "--flash3": "flash"}
    found = next((kernel for word, kernel in words.items() if given.get(word)), None)
    return {"attention": found or "sdpa"}


def _say_attention(fields: Fields) -> Settings:
    said = {"sdpa": "--sdpa", "flash": "--flash_attn", "efficient": "--xformers"}
    if fields["attention"] not in said:
        why = "--sdpa, --flash_attn or --xformers"
        raise NotSaidError(Inexpressible("attention", fields["attention"], "sdpa", why))
    return {said[fields["attention"]]: True}


def _several(of: Any, say: Any, settings: tuple[str, ...], **words: str) -> Several:
    return Several(tuple(words), settings, of, say, words)


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
    _several(model_of, say_model, WHICH, model=", ".join(FAMILIES), experts="--dit, --dit_high_noise",
             inactive_expert="absent; with both experts gpu, or cpu by --offload_inactive_dit"),
    Fixed("method", "lora", "its network scripts train LoRA"),
    _several(shape_of, say_shape, (SIZE, BATCH, FRAMES, EXTRACTION), frames="target_frames", height="resolution",
             width="resolution", batch_size="batch_size", buckets="several target_frames of one size"),
    Value("lora_rank", "--network_dim", 4, int, source="networks/lora.py"),
    Value("lora_dropout", "--network_dropout", 0.0, float),
    _several(_targets_of, _say_targets, ("--network_module", "--network_args"), lora_targets="all linear layers"),
    _several(_formats_of, _say_formats, ("--fp8_base", "--fp8_scaled", "--mixed_precision"),
             weights_dtype="bf16, fp8 by --fp8_base", autocast="--mixed_precision"),
    Fixed("compute_dtype", "bf16", "the transformer computes in bf16"),
    Fixed("adapter_dtype", "fp32", "adapters are fp32 (musubi-tuner #715)"),
    Choice("gradient_checkpointing", {
        "none": {},
        "full": {"--gradient_checkpointing": True},
        "offload": {"--gradient_checkpointing": True, "--gradient_checkpointing_cpu_offload": True},
    }, "every block is checkpointed, or none"),
    Fixed("checkpointed_blocks", None),
    _several(_optimizer_of, _say_optimizer, ("--optimizer_type",), optimizer="--optimizer_type"),
    Choice("optimizer_step", {
        "foreach": {},
        "fused": {"--optimizer_args": ["fused=True"]},
        "loop": {"--optimizer_args": ["foreach=False"]},
    }, "LoRA steps after backward"),
    Value("gradient_accumulation", "--gradient_accumulation_steps", 1, int),
    _several(_sharding_of, _say_sharding, (), sharding="none on one GPU, ddp on several"),
    When("sharding", frozenset({"ddp"}), Choice("grad_buckets", {
        "copy": {}, "view": {"--ddp_gradient_as_bucket_view": True}})),
    Value("swap_blocks", "--blocks_to_swap", 0, int),
    Fixed("text_encoder", "cached", "prompts are cached by a script of their own before"),
    Fixed("vae", "cached", "latents are cached by a script of their own before"),
    _several(_encoder_of, _say_encoder, _ENCODER_FLAGS, text_encoder_dtype="bf16, or fp8 by a flag"),
    _several(_vae_of, _say_vae, ("--vae_dtype",), vae_dtype="--vae_dtype"),
    _several(_samples_of, _say_samples, ("--sample_prompts", "--sample_every_n_epochs"),
             validation_mode="off, on by --sample_prompts"),
    _several(_attention_of, _say_attention, ATTENTION, attention="--sdpa, --flash_attn; --xformers read as efficient"),
    Choice("compile", {"none": {}, "blocks": {"--compile": True}}, "--compile compiles each block"),
    *usual("trainable", "text_tokens", "references", "validation", "master_weights", "ema", "offload_optimizer",
           "offload_gradients", "offload_params", "vae_tiling", "vae_slicing", "group_offload", "group_offload_stream",
           "context_parallel"),
)  # fmt: skip


def gather(script: Script) -> Given | None:
    """A command of one of its network scripts; a dataset's and a config file that it names are read too."""
    found = [one for one in script.programs if _is_own(one)]
    if not found:
        return None
    told, notes = launched(found[-1], script, {})
    given = given_flags("musubi-tuner", found[-1], told, [*script.notes, *notes])
    settings, notes = dict(given.settings), list(given.notes)
    unknown, gone = list(given.unknown), list(given.gone)
    if path := settings.get("--config_file"):
        inside = script.document(str(path))
        if inside is None:
            notes.append(f"{path} is not here: read without it")
        else:
            parsed = flags.script("musubi-tuner", str(settings["script"])).parse_config(inside)
            settings = parsed.given | settings
            unknown += parsed.unknown
            gone += [Remark(name, why) for name, why in parsed.gone.items()]
    if path := settings.get("--dataset_config"):
        inside = script.document(str(path))
        if inside is None:
            notes.append(f"{path} is not here: estimated at the model's default shape, one sample at a time")
        else:
            settings |= {f"dataset:{key}": value for key, value in flat(inside, str(path)).items()}
    for name in ("--sample_prompts", "--sample_every_n_epochs"):
        if name in settings and settings.get("--sample_prompts"):  # any file, however often, is the same to us
            settings |= {"--sample_prompts": "prompts.txt", "--sample_every_n_epochs": 1}
    return Given("musubi-tuner", settings, tuple(unknown), tuple(gone), tuple(notes))


def _is_own(program: PythonCommand) -> bool:
    found = flags.find("musubi-tuner", program.script)
    return found is not None and found.path.endswith("_train_network.py") and found.path.count("/") == 2


def remarks(given: Settings, fields: Fields) -> Iterator[Remark]:
    """What does nothing."""
    if given.get("--gradient_checkpointing_cpu_offload") and not given.get("--gradient_checkpointing"):
        yield Remark("--gradient_checkpointing_cpu_offload", "it acts with --gradient_checkpointing only")
    if given.get("--fp8_scaled") and not given.get("--fp8_base"):
        yield Remark("--fp8_scaled", f"it needs --fp8_base, and is refused without ({AT})")
    if given.get("--ddp_gradient_as_bucket_view") and fields["sharding"] != "ddp":
        yield Remark("--ddp_gradient_as_bucket_view", "one GPU has no buckets")


def notes(given: Settings, fields: Fields) -> Iterator[str]:
    """What it does without being asked."""
    narrow = "--network_args" in given and family_of(fields["model"]) == "wan"
    if not narrow and (said := unpriced_layers_note(lookup.model(fields["model"]), fields["lora_targets"])):
        yield said
    yield f"latents and prompts are cached before training ({AT})"
    if not given.get("--network_dim"):
        yield "LoRA rank 4, the default of --network_dim"
    if fields["validation_mode"] == "on":
        yield "samples are estimated as large as the clips: the file of --sample_prompts may say otherwise"
    if not any(given.get(word) for word in ATTENTION):
        yield "no attention backend is set, without which it exits at once: estimated as with --sdpa"
    if given.get("--block_swap_h2d_only"):
        yield "--block_swap_h2d_only holds a ring of two blocks more than is counted"
    if dataset_key(given, "frame_extraction") == "full":
        yield "frame_extraction full: clips as long as they are, up to max_frames, which is priced"


MOVES = (
    Move({"expandable_segments": True}, "free"),
    Move({"gradient_checkpointing": "full"}, "one more forward pass"),
    Move({"grad_buckets": "view"}, "free"),
    Move({"swap_blocks": 8}, "slower, and host RAM for the blocks", values=(8, 16, 20, 26, 32, 36, 39)),
    Move({"gradient_checkpointing": "offload"}, "slower, and host RAM for the checkpoints"),
    Move({"optimizer": "adamw-8bit"}),
    Move({"weights_dtype": "fp8"}),
)


def _files(plan: Plan, settings: Settings) -> dict[str, str]:
    return files(DIALECT, plan, settings, CARRIES)


DIALECT: Dialect = Dialect(
    name="musubi-tuner",
    title="musubi-tuner",
    source="https://github.com/kohya-ss/musubi-tuner at 30c658c",
    scripts=tuple(SCRIPT.format(family) for family in dict.fromkeys(family for family, _ in FAMILIES.values())),
    table=TABLE,
    gather=gather,
    remarks=remarks,
    notes=notes,
    moves=MOVES,
    files=_files,
)
