"""DiffSynth-Studio's first Wan script (examples/wanvideo/train_wan_t2v.py, 2025-02-25 to 2025-06-13), read at a25bd74d.

It is gone, and the advice that names its flags still goes round. Two commands of one script: ``--task data_process``
encodes, ``--task train`` reads tensors of whatever shape they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.catalog import lookup
from planner.dialects.base import flags
from planner.dialects.base.bindings import (
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
from planner.dialects.base.commands import parse_program
from planner.dialects.base.common_bindings import EXPANDABLE, GPUS, NODES, our_defaults, require_model
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import launch_settings
from planner.dialects.base.script import Script
from planner.dialects.diffsynth.settings import targets, training_program, write_targets
from planner.errors import VplanError

SCRIPT = "examples/wanvideo/train_wan_t2v.py"
STAGES = {"none": "auto", "zero-1": "deepspeed_stage_1", "zero-2": "deepspeed_stage_2", "zero-3": "deepspeed_stage_3"}
LORA = frozenset({"lora"})


def read_script(script: Script) -> Invocation | None:
    """A command of the former script: the one that trains, where another caches."""
    program, notes = training_program(script, SCRIPT.rpartition("/")[2], ("--task", "--dit_path", "--dataset_path"))
    if program is None:
        return None
    launch, more_notes = launch_settings(program, script, {})
    invocation = parse_program("diffsynth", program, launch, [*notes, *more_notes])
    today = flags.script("diffsynth", "examples/wanvideo/model_training/train.py")
    since = [Remark(name, why) for name in invocation.settings if (why := _removed_since(today, name))]
    return replace(invocation, removed=(*invocation.removed, *since))


def _removed_since(today: flags.EntryPoint, name: str) -> str:
    flag = today.flags.get(name)
    return (flag.gone or "") if flag else ""


def _frames(settings: Settings) -> Fields:
    if "frames" not in settings:
        fault = "how many frames is not in the command: --task train reads tensors that were cached before"
        raise VplanError(fault, "add --frames 81, or what the cached clips have")
    return {name: settings.get(name) for name in ("frames", "height", "width")}


def _write_frames(fields: Fields) -> Settings:
    return {name: fields[name] for name in ("frames", "height", "width")}


def _sharding(settings: Settings) -> Fields:
    """Lightning's strategies: DDP by itself on several GPUs. Stages split nothing on one."""
    strategy = str(settings.get("--training_strategy", "auto"))
    sharding_named = {word: sharding for sharding, word in STAGES.items()}.get(strategy)
    if sharding_named is None:
        raise VplanError(f"--training_strategy {strategy} is not known", "write one of " + ", ".join(STAGES.values()))
    several = int(settings.get("gpus", 1)) * int(settings.get("nodes", 1)) > 1
    if not several:
        sharding_named = "none"
    split = sharding_named != "none"
    return {
        "sharding": sharding_named if split else "ddp" if several else "none",
        "weights_dtype": "bf16",
        "adapter_dtype": "bf16" if split else "fp32",
        "autocast": "none" if split else "bf16",
        "master_weights": "fp32" if split else "none",
    }


def _write_sharding(fields: Fields) -> Settings:
    sharding = fields["sharding"]
    settings: Settings = {}
    if sharding in STAGES and sharding != "none":
        settings = {"--training_strategy": STAGES[sharding]}
    result = _sharding(settings | {name: fields[name] for name in ("gpus", "nodes") if name in fields})
    wrong = [name for name in result if result[name] != fields[name]]
    if wrong:
        raise InexpressibleError(
            *(UnsupportedValue(name, fields[name], result[name], "Lightning does it so") for name in wrong)
        )
    return settings


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    strategy = str(settings.get("--training_strategy", ""))
    if strategy.startswith("deepspeed") and fields["sharding"] in ("none", "ddp"):
        yield Remark("--training_strategy", f"{strategy} on one GPU shards nothing")
    if "--num_frames" in settings:
        yield Remark("--num_frames", "--task train reads cached tensors, of the frames they were cached with")


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    yield "LoRA adapters in fp32 under Lightning's bf16 autocast, as that script made them"
    yield "text encoder, CLIP and VAE run in --task data_process and are not there in --task train"
    if not settings.get("--use_gradient_checkpointing"):
        yield "checkpointing is off: that script has it only with --use_gradient_checkpointing"


DIALECT = Dialect(
    name="diffsynth@2025-03",
    title="DiffSynth-Studio (its script of early 2025)",
    source="https://github.com/modelscope/DiffSynth-Studio at a25bd74d",
    scripts=(SCRIPT,),
    table=(
        FunctionPair(
            ("model",),
            ("--dit_path",),
            lambda settings: {"model": lookup.model(require_model(settings, "--dit_path")).name},
            lambda fields: {"--dit_path": f"models/{fields['model']}/diffusion_pytorch_model.safetensors"},
            {"model": "--dit_path"},
        ),
        Choice("method", {"lora": {}, "full": {"--train_architecture": "full"}}, "this script trains"),
        When("method", LORA, Value("lora_rank", "--lora_rank", 4)),
        When(
            "method",
            LORA,
            FunctionPair(
                ("lora_targets",), ("--lora_target_modules",), targets, write_targets, {"lora_targets": "by name"}
            ),
        ),
        FunctionPair(
            ("frames", "height", "width"),
            ("frames", "height", "width"),
            _frames,
            _write_frames,
            dict.fromkeys(("frames", "height", "width"), "as cached"),
        ),
        Choice(
            "gradient_checkpointing",
            {
                "none": {},
                "full": {"--use_gradient_checkpointing": True},
                "offload": {"--use_gradient_checkpointing": True, "--use_gradient_checkpointing_offload": True},
            },
        ),
        Value("gradient_accumulation", "--accumulate_grad_batches", 1),
        FunctionPair(
            ("sharding", "weights_dtype", "adapter_dtype", "autocast", "master_weights"),
            ("--training_strategy",),
            _sharding,
            _write_sharding,
            {
                "sharding": "none, ddp, zero-1, zero-2, zero-3",
                "weights_dtype": "bf16",
                "adapter_dtype": "fp32",
                "autocast": "bf16",
                "master_weights": "with zero",
            },
        ),
        Fixed("batch_size", 1, "its dataloader has batch_size=1"),
        Fixed("optimizer", "adamw", "torch.optim.AdamW is written into the script"),
        Fixed("optimizer_step", "foreach", "default torch.optim.AdamW"),
        Fixed("grad_buckets", "copy", "default torch DDP"),
        EXPANDABLE,
        GPUS,
        NODES,
        *our_defaults("experts", "trainable", "lora_dropout", "buckets", "text_tokens", "references", "validation"),
        *our_defaults(
            "compute_dtype", "checkpointed_blocks", "ema", "swap_blocks", "offload_optimizer", "text_encoder", "vae"
        ),
        *our_defaults(
            "offload_gradients", "offload_params", "text_encoder_dtype", "vae_dtype", "vae_tiling", "vae_slicing"
        ),
        *our_defaults(
            "inactive_expert", "validation_mode", "group_offload", "group_offload_stream", "attention", "compile"
        ),
        *our_defaults("context_parallel", "adapter_inputs", "nested_checkpointing", "fsdp_replicas"),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    moves=(
        Move({"expandable_segments": True}, "free"),
        Move({"gradient_checkpointing": "full"}, "one more forward pass"),
        Move({"gradient_checkpointing": "offload"}, "slower: the copies are pageable and synchronous"),
    ),
    successor="diffsynth",
)
