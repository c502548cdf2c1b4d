"""EasyAnimate's words, read at c2a70d1, and what its successor VideoX-Fun has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from planner.catalog import lookup
from planner.dialects.base.bindings import (
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
)
from planner.dialects.base.commands import (
    command_line,
    command_settings,
    parse_program,
    script_head,
    token_beside_wandb,
)
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, our_defaults, require_model
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import ON_HOST, engine, launch_settings, several_gpus
from planner.dialects.base.script import Script
from planner.dialects.easyanimate.zero_launch import (
    ADAPTERS_ALONE,
    ENGINE_FILE,
    ZERO_2,
    engine_file,
    launched_by_deepspeed,
    offloaded_by_deepspeed,
    own_deepspeed,
)
from planner.errors import VplanError
from planner.spec.plan import Plan
from planner.spec.rules import DEEPSPEED

AT = "EasyAnimate c2a70d1 scripts/train.py"
NO_FSDP = (
    "its scripts know DeepSpeed alone: checkpoints are written by one GPU, and of a LoRA only the adapters are "
    "prepared (EasyAnimate c2a70d1 scripts/train.py:2153, train_lora.py:1464)"
)
LORA, FULL = "scripts/train_lora.py", "scripts/train.py"
TELLING = {"--video_sample_n_frames", "--video_sample_size", "--train_mode", "--token_sample_size", "--config_path"}
"""Flags that no other trainer's ``scripts/train.py`` has."""

SHIPPED: dict[str, Settings] = {
    "config/zero_stage2_config.json": {
        "launch:--zero_stage": 2,
        "deepspeed:zero_optimization.overlap_comm": True,
    },
    "config/zero_stage3_config.json": {"launch:--zero_stage": 3},
    "config/zero_stage3_config_cpu_offload.json": {
        "launch:--zero_stage": 3,
        "launch:--offload_optimizer_device": "cpu",
        "launch:--offload_param_device": "cpu",
    },
}
"""What the configs that come with both say (config/*.json)."""


def read_script(script: Script) -> Invocation | None:
    """The settings of a command of EasyAnimate's scripts; None for another trainer's script."""
    programs = [
        program
        for program in script.programs
        if program.script.rpartition("scripts/")[2] in ("train.py", "train_lora.py")
        and TELLING & {word.partition("=")[0] for word in program.arguments}
    ]
    if not programs:
        return None
    launch, notes = launch_settings(programs[-1], script, SHIPPED)
    return parse_program("easyanimate", programs[-1], launch, [*script.notes, *notes])


def model_of(settings: Settings) -> Fields:
    """The model of a command, which its folder or its config names."""
    name = require_model(settings, "--pretrained_model_name_or_path", "--config_path")
    return {"model": lookup.model(name).name}


def write_model(fields: Fields) -> Settings:
    """The setting with a model's repository in its own format."""
    profile = lookup.model(fields["model"])
    repositories = [name for name in profile.aliases if "/" in name and not name.lower().endswith("-diffusers")]
    return {"--pretrained_model_name_or_path": repositories[0] if repositories else profile.name}


def _write_own_model(fields: Fields) -> Settings:
    if not lookup.model(fields["model"]).trained_with("easyanimate", "own-model"):
        why = "its scripts build EasyAnimate's own transformer"
        raise InexpressibleError(UnsupportedValue("model", fields["model"], "easyanimate-v5.1-7b", why))
    return write_model(fields)


def _is_image(model: object) -> bool:
    return lookup.model(str(model)).kind == "image"


def _size(settings: Settings) -> Fields:
    """The largest samples, and how many are in a step. Buckets of many shapes hold as many pixels as a square of
    --video_sample_size, or of an image model's --image_sample_size; --fix_sample_size is one shape for all."""
    batch, model = int(settings.get("--train_batch_size", 16)), lookup.model(model_of(settings)["model"])
    image = model.kind == "image"
    flag = "--image_sample_size" if image else "--video_sample_size"
    frames = 1 if image else int(settings.get("--video_sample_n_frames", 17))
    if settings.get("--fix_sample_size") and settings.get("--enable_bucket"):
        height, width = (int(side) // 16 * 16 for side in settings["--fix_sample_size"])
        return {"height": height, "width": width, "frames": frames, "batch_size": batch}
    side, step = int(settings.get(flag, 512)), model.shape.frame_step
    samples = [(side, frames)]
    if not image and settings.get("--enable_bucket") and all(settings.get(name) for name in BY_TOKENS):
        samples = _by_tokens(settings, side, frames, step)
    copies = [1 if image else _copies(settings, frames, sample) for sample in samples]

    def tokens(row: tuple[tuple[int, int], int]) -> int:
        (each, length), times = row
        return each**2 * ((length - 1) // step + 1) * times

    (side, frames), times = max(zip(samples, copies, strict=True), key=tokens)
    return {"height": side, "width": side, "frames": frames, "batch_size": batch * times}


BY_TOKENS = ("--random_hw_adapt", "--training_with_video_token_length")
"""Flags that, together, train clips of many sizes with so many frames as --token_sample_size leaves."""


GIVEN = {"--video_sample_size": 512, "--video_sample_n_frames": 17, "--train_batch_size": 16}
"""Flags of a clip's size and a batch's, and their defaults."""


def _by_tokens(settings: Settings, side: int, frames: int, step: int) -> list[tuple[int, int]]:
    """(side, frames) of the clips that are trained in turn: of every size between those of videos and images, with at
    most the pixels of all frames at --token_sample_size (`get_length_to_frame_num`)."""
    largest, pixels = int(settings.get("--image_sample_size", 512)), _token_pixels(settings, frames)
    sides = [*range(side, largest, 128), largest]
    return [(each, min(frames, int(min(pixels / each**2, frames) // step * step + 1))) for each in sides]


def _token_pixels(settings: Settings, frames: int) -> int:
    return frames * int(settings.get("--token_sample_size", 512)) ** 2


def _copies(settings: Settings, frames: int, sample: tuple[int, int]) -> int:
    """How many times a batch of small samples is repeated: EasyAnimate's always is where tokens are counted, that of
    VideoX-Fun with --auto_tile_batch_size and without ZeRO-3 (`torch.tile` in the loop)."""
    own = settings.get("script") in (FULL, LORA)
    sharded = bool(settings.get("launch:--use_deepspeed")) and int(settings.get("launch:--zero_stage", 2)) == 3
    tiled = own or (settings.get("--auto_tile_batch_size") and not sharded)
    if not tiled or not settings.get("--training_with_video_token_length"):
        return 1
    most, pixels = _token_pixels(settings, frames), sample[0] ** 2 * sample[1]
    return 4 if most // 16 >= pixels else 2 if most // 4 >= pixels else 1


def _write_size(fields: Fields) -> Settings:
    image = _is_image(fields["model"])
    flag = "--image_sample_size" if image else "--video_sample_size"
    refused = []
    if fields["height"] != fields["width"]:
        why = f"{flag} is one number: samples of all shapes have about as many pixels as that square"
        refused.append(UnsupportedValue("width", fields["width"], fields["height"], why))
    if image and fields["frames"] != 1:
        refused.append(UnsupportedValue("frames", fields["frames"], 1, "the model makes images"))
    if refused:
        raise InexpressibleError(*refused)
    settings: Settings = {flag: fields["height"]} if fields["height"] != 512 else {}
    settings |= {"--video_sample_n_frames": fields["frames"]} if not image and fields["frames"] != 17 else {}
    return settings | ({"--train_batch_size": fields["batch_size"]} if fields["batch_size"] != 16 else {})


def _own_plain(settings: Settings) -> Fields:
    """Raises a VplanError for a LoRA under stage 3, whose base stays whole on every GPU."""
    stage = int(settings.get("launch:--zero_stage", 2)) if settings.get("launch:--use_deepspeed") else 0
    if settings.get("script") == LORA and stage == 3:
        raise VplanError(f"ZeRO-3 does not split the model here: {ADAPTERS_ALONE}", "use --zero_stage 2")
    return plain(settings)


def plain(settings: Settings) -> Fields:
    """The transformer is loaded in bf16 and stays so, in full training too; adapters are made in fp32; accelerate's
    mixed precision adds autocast (`from_pretrained_2d`, `create_network`, `accelerator.prepare`)."""
    precision = str(settings.get("--mixed_precision", settings.get("launch:--mixed_precision", "no")))
    autocast = precision if precision in ("bf16", "fp16") else "none"
    return {"weights_dtype": "bf16", "adapter_dtype": "fp32", "autocast": autocast}


def write_plain(fields: Fields) -> Settings:
    """The setting that adds autocast."""
    return {"--mixed_precision": fields["autocast"]} if fields["autocast"] != "none" else {}


def _validation(settings: Settings) -> Fields:
    return {"validation_mode": "on" if settings.get("--validation_prompts") else "off"}


def _write_validation(fields: Fields) -> Settings:
    if fields["validation_mode"] == "offload":
        why = "it moves the whole pipeline to the GPU (log_validation)"
        raise InexpressibleError(UnsupportedValue("validation_mode", "offload", "on", why))
    return {"--validation_prompts": ["a cat walks"]} if fields["validation_mode"] == "on" else {}


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    own_model = lookup.model(fields["model"]).trained_with("easyanimate", "own-model")
    if "--vae_mini_batch" in settings and (fields["batch_size"] == 1 or own_model):
        alone = "with batch 1 there is nothing to split"
        many = "the VAE itself takes 4 frames at a time, whatever it says"
        why = f"it splits over the batch, not over frames: {alone if fields['batch_size'] == 1 else many}"
        yield Remark("--vae_mini_batch", why)
    if settings.get("--use_deepspeed") and not settings.get("launch:--use_deepspeed"):
        yield Remark(
            "--use_deepspeed", "the script's flag alone starts no engine: accelerate launch --use_deepspeed does"
        )
    on_gpu = {fields["offload_optimizer"], fields["offload_params"]} == {"none"}
    if fields["sharding"].startswith("zero") and on_gpu and not several_gpus(fields):
        yield Remark("--use_deepspeed", "on one GPU it shards nothing, and keeps fp32 masters beside")


def _own_notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield from notes(settings, fields)
    if fields["method"] == "lora":
        yield "adapters are estimated on the model's usual layers, which its script picks by class"


def notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What the scripts of both do without being asked."""
    if settings.get("--low_vram"):
        yield "--low_vram moves VAE and text encoder only; the transformer and the optimizer never move"
    if settings.get("--low_vram") and settings["script"] in (FULL, LORA):
        yield f"{AT}: everything is put on the GPU together at the start, before --low_vram moves anything"
    given = [int(settings.get(name, usual)) for name, usual in GIVEN.items()]
    largest = [fields[name] for name in ("height", "frames", "batch_size")]
    fixed = settings.get("--fix_sample_size") and settings.get("--enable_bucket")
    if largest != given and not fixed and not _is_image(fields["model"]):
        of = f"{fields['height']} px and {fields['frames']} frames in batches of {fields['batch_size']}"
        yield f"clips train at several sizes, up to their own: this is of the largest, {of} (--token_sample_size)"
    if "--video_sample_n_frames" not in settings and not _is_image(fields["model"]):
        yield "17 frames, the default of --video_sample_n_frames"
    if "--train_batch_size" not in settings:
        yield "16 samples per step and GPU, the default of --train_batch_size"
    if fields["validation_mode"] == "on":
        yield "an error in validation is printed and ignored: running out of memory there is silent"
    else:
        yield "no validation: --validation_prompts is not given"
    modules = settings.get("--trainable_modules")
    if fields["method"] == "full" and modules not in (None, ["."], "."):
        yield "--trainable_modules is estimated as training everything: it needs at most this"
    if fields["sharding"].startswith("zero") and not settings.get("launch:--deepspeed_config_file"):
        what = "accelerate refuses its data loader under DeepSpeed, unless DeepSpeed's file says"
        yield f"{what} train_micro_batch_size_per_gpu: --deepspeed_config_file config/zero_stage2_config.json"
    if settings.get("--enable_text_encoder_in_dataloader"):
        yield "--enable_text_encoder_in_dataloader is not estimated: the text encoder counts as on the GPU"


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """name -> text of one shell script with the training command."""
    extra: dict[str, object] = {"--train_mode": "inpaint"}
    if lookup.model(plan.job.model).trained_with("easyanimate", "own-model"):
        extra["--config_path"] = "config/easyanimate_video_v5.1_magvit_qwen.yaml"
    return shell_script(plan, settings, extra)


def shell_script(plan: Plan, settings: Settings, extra: Mapping[str, object]) -> dict[str, str]:
    """name -> text of one shell script. ``extra``: flags that a script needs to run, beside those that both need."""
    launcher = ["accelerate", "launch", f"--num_processes {plan.machine.world}"]
    if plan.machine.nodes > 1:
        launcher.append(f"--num_machines {plan.machine.nodes}")
    own = {
        "--train_data_dir": "data/my_set",
        "--train_data_meta": "data/my_set/metadata.json",
        "--output_dir": "output",
        "--learning_rate": "2e-05",
        **extra,
    }
    if plan.job.method == "full":
        own["--trainable_modules"] = "."
    start = {"train.sh": script_head(plan) + command_line(command_settings(settings), own, launcher)}
    return {**({ENGINE_FILE: engine_file(plan)} if plan.strategy.sharding.startswith("zero") else {}), **start}


def table(written: Callable[[Fields], Settings], *bindings: Binding | When) -> tuple[Binding | When, ...]:
    """The bindings that EasyAnimate and VideoX-Fun share, with those of the method, the layers and the formats, which
    are their own. ``written``: how a model is."""
    return (
        FunctionPair(
            ("model",),
            ("--pretrained_model_name_or_path",),
            model_of,
            written,
            {"model": "--pretrained_model_name_or_path"},
        ),
        *bindings,
        When("method", frozenset({"lora"}), Value("lora_rank", "--rank", 128)),
        FunctionPair(
            ("height", "width", "frames", "batch_size"),
            ("--video_sample_size", "--image_sample_size", "--video_sample_n_frames", "--train_batch_size"),
            _size,
            _write_size,
            {
                "height": "square",
                "width": "square",
                "frames": "--video_sample_n_frames",
                "batch_size": "--train_batch_size",
            },
        ),
        Choice("gradient_checkpointing", {"none": {}, "full": {"--gradient_checkpointing": True}}),
        Value("gradient_accumulation", "--gradient_accumulation_steps", 1),
        Choice("ema", {"none": {}, "gpu": {"--use_ema": True}}, "its copy is on the GPU"),
        Choice(
            ("text_encoder", "vae"),
            {("resident", "resident"): {}, ("swapped", "swapped"): {"--low_vram": True}},
            "text encoder and VAE stay on the GPU, or are swapped together by --low_vram; nothing is cached",
        ),
        FunctionPair(
            ("validation_mode",),
            ("--validation_prompts",),
            _validation,
            _write_validation,
            {"validation_mode": "off, on"},
        ),
        Fixed("optimizer_step", "foreach", "default torch.optim.AdamW"),
        Fixed("grad_buckets", "copy", "accelerate's DDP without gradient_as_bucket_view"),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("experts", "trainable", "lora_dropout", "buckets", "text_tokens", "references", "validation"),
        *our_defaults(
            "compute_dtype", "checkpointed_blocks", "swap_blocks", "text_encoder_dtype", "vae_dtype", "vae_tiling"
        ),
        *our_defaults(
            "vae_slicing", "inactive_expert", "group_offload", "group_offload_stream", "attention", "compile"
        ),
        *our_defaults("context_parallel", "adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
    )


MOVES = (
    Move({"expandable_segments": True}, "free"),
    Move({"gradient_checkpointing": "full"}, "one more forward pass"),
    Move({"text_encoder": "swapped", "vae": "swapped"}, "encoders move for every step"),
    Move({"optimizer": "adamw-8bit"}, "8-bit optimizer states"),
    Move(
        {"sharding": "zero-2", **DEEPSPEED},
        "gradients and states are sharded across the GPUs, with an fp32 master",
        words_for=partial(launched_by_deepspeed, ZERO_2),
        when=several_gpus,
    ),
    Move(
        {"sharding": "zero-2", **ON_HOST, **DEEPSPEED},
        "the optimizer steps in host RAM",
        words_for=partial(offloaded_by_deepspeed, ZERO_2, 2),
        when=lambda fields: fields["method"] == "full",
    ),
)

DIALECT = Dialect(
    name="easyanimate",
    title="EasyAnimate",
    source="https://github.com/aigc-apps/EasyAnimate at c2a70d1",
    scripts=(FULL, LORA),
    steps=("--max_train_steps",),
    table=table(
        _write_own_model,
        engine(
            _own_plain,
            write_plain,
            {"weights_dtype": "bf16", "adapter_dtype": "fp32 (bf16 with an engine)"},
            NO_FSDP,
            with_deepspeed=own_deepspeed,
            context=lambda fields: {"script": LORA if fields["method"] == "lora" else FULL},
        ),
        Choice("method", {"full": {"script": FULL}, "lora": {"script": LORA}}, "these scripts train"),
        *our_defaults("lora_targets"),
        Choice("optimizer", {"adamw": {}, "adamw-8bit": {"--use_8bit_adam": True}, "came": {"--use_came": True}}),
    ),
    read_script=read_script,
    stops=lambda settings: token_beside_wandb(settings, f"{AT}:861"),
    remarks=_remarks,
    notes=_own_notes,
    moves=MOVES,
    files=files,
)
