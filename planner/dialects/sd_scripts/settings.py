"""sd-scripts' words for FLUX, read at 48d368f: flux_train.py and flux_train_network.py, their configs and datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import (
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
from planner.dialects.base.launchers import (
    EXPANDABLE,
    GPUS,
    NODES,
    command_line,
    export_line,
    given_flags,
    known_model,
    launched,
    one_of,
    own_settings,
    usual,
    word_for,
)
from planner.dialects.base.script import Script
from planner.dialects.sd_scripts.engine import AT, FULL, LORA, engine, say_engine, swap_of, swapped
from planner.errors import VplanError
from planner.spec.plan import Plan
from planner.spec.rules import DEEPSPEED
from planner.untrusted import flat

ONLY_LORA = frozenset({"lora"})
DATASET = "dataset:"
MODELS = {"flux.1-dev": "flux1-dev.safetensors"}
"""Ours -> the file that its documentation names (docs/flux_train_network.md)."""


def gather(script: Script) -> Given | None:
    """A command of FLUX's scripts, or the TOML of one (--config_file) alone."""
    found = [program for program in script.programs if program.script.rpartition("/")[2] in (FULL, LORA)]
    if found:
        program = found[-1]
        told, notes = launched(program, script, {})
        given = given_flags("sd-scripts", program, told, [*script.notes, *notes])
        settings, unknown = given.settings, given.unknown
        if path := settings.get("--config_file"):
            name = path if str(path).endswith(".toml") else f"{path}.toml"
            inside = script.document(str(name))
            if inside is None:
                raise VplanError(f"{name} is not here", "run vplan where the command would run")
            parsed = flags.script("sd-scripts", program.script).parse_config(inside)
            settings, unknown = parsed.given | settings, (*unknown, *parsed.unknown)
        return _with_dataset(Given("sd-scripts", settings, unknown, given.gone, given.notes), script)
    config = script.config
    if config is not None and {"pretrained_model_name_or_path", "network_module", "t5xxl"} & _names(config):
        kind = LORA if "network_module" in _names(config) else FULL
        parsed = flags.script("sd-scripts", kind).parse_config(config)
        gone = tuple(Remark(name, why) for name, why in parsed.gone.items())
        given = Given("sd-scripts", {"script": kind, **parsed.given}, parsed.unknown, gone, script.notes)
        return _with_dataset(given, script)
    return None


def _names(config: dict[str, Any]) -> set[str]:
    return {name.rpartition(".")[2] for name in flat(config, "config")}


def _with_dataset(given: Given, script: Script) -> Given:
    """Beside them what the dataset's file says, where it is here."""
    path = given.settings.get("--dataset_config")
    if not path:
        return given
    document = script.document(str(path))
    if document is None:
        note = f"{path} is not here: estimated at the model's default size, one sample per step"
        return Given(given.trainer, given.settings, given.unknown, given.gone, (*given.notes, note))
    inside = {f"{DATASET}{name}": value for name, value in flat(document, str(path)).items()}
    return Given(given.trainer, given.settings | inside, given.unknown, given.gone, given.notes)


def _model(settings: Settings) -> Fields:
    name = settings.get("model") or known_model(settings.get("--pretrained_model_name_or_path")) or "flux.1-dev"
    return {"model": lookup.model(str(name)).name}


def _say_model(fields: Fields) -> Settings:
    if fields["model"] not in MODELS:
        raise NotSaidError(
            Inexpressible("model", fields["model"], "flux.1-dev", "its scripts are known here for FLUX.1")
        )
    return {"--pretrained_model_name_or_path": MODELS[fields["model"]]}


def _inside(settings: Settings, key: str) -> list[Any]:
    """Everything a dataset's file says of a key, in whatever table."""
    return [value for name, value in settings.items() if name.startswith(DATASET) and name.rpartition(".")[2] == key]


def _sides(value: Any) -> tuple[int, int]:
    """Height and width of `1024`, `"1024,768"` or `[1024, 768]`, which are width and height."""
    parts = value if isinstance(value, list) else str(value).split(",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise VplanError(f"resolution {value!r} is not a size", "write 1024, or width,height") from None
    return numbers[-1], numbers[0]


def _size(settings: Settings) -> Fields:
    """The largest of the dataset's sizes and its largest batch, else the flags'."""
    sizes = [_sides(value) for value in _inside(settings, "resolution") or [settings.get("--resolution")] if value]
    height, width = max(sizes, key=lambda size: size[0] * size[1], default=(None, None))
    batches = [int(value) for value in _inside(settings, "batch_size")]
    batch = max(batches, default=int(settings.get("--train_batch_size", 1)))
    return {"height": height, "width": width, "batch_size": batch}


def _say_size(fields: Fields) -> Settings:
    return {
        f"{DATASET}general.resolution": [fields["width"], fields["height"]],
        f"{DATASET}datasets[0].batch_size": fields["batch_size"],
    }


OPTIMIZERS = {
    "AdamW": "adamw",
    "AdamW8bit": "adamw-8bit",
    "PagedAdamW8bit": "adamw-8bit-paged",
    "Lion": "lion",
    "Adafactor": "adafactor",
    "Prodigy": "prodigy",
}


def _optimizer(settings: Settings) -> Fields:
    if settings.get("--use_8bit_adam"):
        return {"optimizer": "adamw-8bit"}
    return {"optimizer": one_of(OPTIMIZERS, "--optimizer_type")(settings.get("--optimizer_type") or "AdamW")}


def _say_optimizer(fields: Fields) -> Settings:
    word = word_for(OPTIMIZERS, "optimizer", "adamw")(fields["optimizer"])
    return {"--optimizer_type": word} if word != "AdamW" else {}


def _say_swap(fields: Fields) -> Settings:
    wanted = int(fields["swap_blocks"])
    if not wanted:
        return {}
    found = [blocks for blocks in range(1, 36) if swapped(blocks) <= wanted] or [1]
    if swapped(found[-1]) != wanted:
        why = "--blocks_to_swap counts a double block and two single ones alike: 1 to 35"
        raise NotSaidError(Inexpressible("swap_blocks", wanted, swapped(found[-1]), why))
    return {"--blocks_to_swap": found[-1]}


def _say_step(fields: Fields) -> Settings:
    step = fields["optimizer_step"]
    if step not in ("foreach", "backward") or (step == "backward" and fields["method"] != "full"):
        why = "--fused_backward_pass (Adafactor) and --blockwise_fused_optimizers are all it has, for full training"
        raise NotSaidError(Inexpressible("optimizer_step", step, "foreach", why))
    if step == "foreach":
        return {}
    return {"--fused_backward_pass" if fields["optimizer"] == "adafactor" else "--blockwise_fused_optimizers": True}


def _cached(field: str, flag: str) -> Several:
    """Cached by a flag, in memory or on disk; else on the GPU."""

    def of(settings: Settings) -> Fields:
        on = settings.get(flag) or settings.get(f"{flag}_to_disk")
        return {field: "cached" if on else "resident"}

    def say(fields: Fields) -> Settings:
        if fields[field] == "swapped":
            raise NotSaidError(Inexpressible(field, "swapped", "cached", "it is cached, or stays on the GPU"))
        return {flag: True} if fields[field] == "cached" else {}

    return Several((field,), (flag, f"{flag}_to_disk"), of, say, {field: "resident, cached"})


SAMPLES = ("--sample_every_n_steps", "--sample_every_n_epochs", "--sample_at_first")


def _validation(settings: Settings) -> Fields:
    on = settings.get("--sample_prompts") and any(settings.get(name) for name in SAMPLES)
    return {"validation_mode": "on" if on else "off"}


def _say_validation(fields: Fields) -> Settings:
    if fields["validation_mode"] == "offload":
        raise NotSaidError(Inexpressible("validation_mode", "offload", "on", "it samples with the model where it is"))
    on = {"--sample_prompts": "prompts.txt", "--sample_every_n_steps": 500}
    return on if fields["validation_mode"] == "on" else {}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if settings.get("--highvram"):
        yield Remark(
            "--highvram",
            "it only keeps the cache while latents are cached: training needs the same, as with --xformers",
        )
    if settings.get("--xformers"):
        yield Remark("--xformers", "FLUX has no xformers path here: its attention is torch's sdpa either way")
    if fields["swap_blocks"] and fields["gradient_checkpointing"] == "offload":
        yield Remark("--cpu_offload_checkpointing", "it is refused together with --blocks_to_swap")
    if settings.get("--vae_batch_size") and not settings.get("--cache_latents"):
        yield Remark("--vae_batch_size", "it is for caching latents, and --cache_latents is not given")


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    resident = [
        name
        for name, field in (("T5-XXL and CLIP-L", "text_encoder"), ("the VAE", "vae"))
        if fields[field] == "resident"
    ]
    if resident:
        yield f"{' and '.join(resident)} stay on the GPU: not cached"
    if fields["method"] == "full" and fields["weights_dtype"] in ("bf16", "fp16"):
        what = f"weights, gradients and {fields['optimizer']} states"
        yield f"{what} are in the mixed precision's format, {fields['weights_dtype']} ({AT} flux_train.py)"
    if fields["method"] == "lora":
        yield "LoRA estimated on the model's usual layers"


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """The dataset's TOML and one shell script."""
    import tomli_w

    job = plan.job
    data = {
        "general": {"resolution": [job.width, job.height], "caption_extension": ".txt"},
        "datasets": [{"batch_size": job.batch_size, "subsets": [{"image_dir": "data/my_set", "num_repeats": 1}]}],
    }
    launcher = ["accelerate", "launch", "--num_cpu_threads_per_process 1", f"--num_processes {plan.machine.world}"]
    if plan.machine.nodes > 1:
        launcher.append(f"--num_machines {plan.machine.nodes}")
    rate = "1e-5" if job.method == "full" else "1e-4"
    extra: dict[str, object] = {
        "--dataset_config": "dataset.toml",
        "--clip_l": "clip_l.safetensors",
        "--t5xxl": "t5xxl_fp16.safetensors",
        "--ae": "ae.safetensors",
        "--output_dir": "out",
        "--output_name": "flux",
        "--save_model_as": "safetensors",
        "--learning_rate": "1.0" if plan.strategy.optimizer == "prodigy" else rate,
        "--timestep_sampling": "shift",
        "--discrete_flow_shift": "3.1582",
        "--model_prediction_type": "raw",
        "--guidance_scale": "1.0",
        "--sdpa": True,
    }
    if job.method == "lora":
        extra |= {"--network_module": "networks.lora_flux", "--network_train_unet_only": True}
    return {
        "dataset.toml": tomli_w.dumps(data),
        "train.sh": export_line(plan) + command_line(own_settings(settings), extra, launcher),
    }


def _rate(settings: Settings) -> list[str]:
    """8-bit AdamW, with a learning rate of its own where the optimizer found one by itself."""
    by_itself = str(settings.get("--optimizer_type", "")).lower() in ("prodigy", "adafactor")
    return ["--optimizer_type adamw8bit", *(["--learning_rate 1e-5"] if by_itself else [])]


FACTORED = ("--optimizer_type Adafactor", "--fused_backward_pass", "--max_grad_norm 0")
ADAFACTOR_ARGS = '--optimizer_args "relative_step=False" "scale_parameter=False" "warmup_init=False"'


def _several(fields: Fields) -> bool:
    return int(fields["gpus"]) * int(fields["nodes"]) > 1


def _full(fields: Fields) -> bool:
    return bool(fields["method"] == "full")


DIALECT = Dialect(
    name="sd-scripts",
    title="sd-scripts",
    source="https://github.com/kohya-ss/sd-scripts at 48d368f",
    scripts=(FULL, LORA),
    table=(
        Several(("model",), ("--pretrained_model_name_or_path",), _model, _say_model, {"model": "FLUX.1, by its file"}),
        Choice("method", {"full": {"script": FULL}, "lora": {"script": LORA}}, "these scripts train"),
        When("method", ONLY_LORA, Value("lora_rank", "--network_dim", 4)),
        Several(
            ("height", "width", "batch_size"),
            (f"{DATASET}general.resolution", f"{DATASET}datasets[0].batch_size", "--resolution", "--train_batch_size"),
            _size,
            _say_size,
            {"height": "resolution", "width": "resolution", "batch_size": "batch_size of the dataset's file"},
        ),
        Choice(
            "gradient_checkpointing",
            {
                "none": {},
                "full": {"--gradient_checkpointing": True},
                "offload": {"--gradient_checkpointing": True, "--cpu_offload_checkpointing": True},
            },
        ),
        Value("gradient_accumulation", "--gradient_accumulation_steps", 1),
        Several(
            ("optimizer",), ("--optimizer_type",), _optimizer, _say_optimizer, {"optimizer": ", ".join(OPTIMIZERS)}
        ),
        Several(
            ("optimizer_step",),
            ("--fused_backward_pass", "--blockwise_fused_optimizers"),
            lambda given: {
                "optimizer_step": "backward"
                if given.get("--fused_backward_pass") or given.get("--blockwise_fused_optimizers")
                else "foreach"
            },
            _say_step,
            {"optimizer_step": "foreach, backward (full training)"},
        ),
        Several(
            ("swap_blocks",),
            ("--blocks_to_swap",),
            swap_of,
            _say_swap,
            {"swap_blocks": "--blocks_to_swap"},
        ),
        _cached("text_encoder", "--cache_text_encoder_outputs"),
        _cached("vae", "--cache_latents"),
        Choice("grad_buckets", {"copy": {}, "view": {"--ddp_gradient_as_bucket_view": True}}),
        Several(
            (
                *("weights_dtype", "adapter_dtype", "autocast", "master_weights", "sharding"),
                *("offload_optimizer", "offload_gradients", "offload_params"),
            ),
            ("--mixed_precision", "--full_bf16", "--full_fp16", "--fp8_base", "--deepspeed", "--zero_stage"),
            engine,
            say_engine,
            {
                "weights_dtype": "bf16, fp16, fp32; fp8 for a frozen base",
                "adapter_dtype": "fp32, bf16 (--full_bf16)",
                "autocast": "--mixed_precision",
                "master_weights": "with zero",
                "sharding": "none, ddp, zero-1, zero-2, zero-3",
                "offload_optimizer": "with zero",
                "offload_gradients": "with the optimizer",
                "offload_params": "with zero-3",
            },
        ),
        Several(("validation_mode",), SAMPLES, _validation, _say_validation, {"validation_mode": "off, on"}),
        EXPANDABLE,
        GPUS,
        NODES,
        Fixed("frames", 1, "these scripts train images"),
        *usual("experts", "trainable", "lora_targets", "lora_dropout", "buckets", "text_tokens", "references"),
        *usual("validation", "compute_dtype", "checkpointed_blocks", "ema", "text_encoder_dtype", "vae_dtype"),
        *usual("vae_tiling", "vae_slicing", "inactive_expert", "group_offload", "group_offload_stream", "attention"),
        *usual("compile", "context_parallel"),
    ),
    gather=gather,
    remarks=_remarks,
    notes=_notes,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"text_encoder": "cached", "vae": "cached"}, "captions are no longer shuffled or dropped"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states", said=_rate),
        Move({"grad_buckets": "view"}, "free", when=_several),
        Move(
            {"optimizer": "adafactor", "optimizer_step": "backward"},
            "second moments are row and column sums; the step runs inside backward, so nothing accumulates",
            said=lambda settings: [*FACTORED, ADAFACTOR_ARGS, "--learning_rate 1e-5"],
            when=lambda fields: fields["method"] == "full" and fields["gradient_accumulation"] == 1,
        ),
        Move(
            {"swap_blocks": 0}, "blocks move for every step", values=tuple(swapped(count) for count in range(4, 36, 4))
        ),
        *(
            Move({"sharding": f"zero-{stage}", **DEEPSPEED}, f"{what} are sharded across the GPUs", when=_several)
            for stage, what in ((2, "gradients and states"), (3, "weights, gradients and states"))
        ),
        Move({"weights_dtype": "fp8"}, "the frozen base is rounded to 8 bits", when=lambda fields: not _full(fields)),
    ),
    files=files,
)
