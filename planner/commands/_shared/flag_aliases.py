"""Flag names of other trainers that people type from habit, and our option for each."""

from __future__ import annotations

from collections.abc import Iterable

from planner.errors import nearest

FOREIGN = {
    "4bit": "weights-dtype nf4",
    "accumulate-grad-batches": "gradient-accumulation",
    "activation-checkpointing": "gradient-checkpointing full",
    "base-model-precision": "weights-dtype",
    "batch": "batch-size",
    "blocks-to-swap": "swap-blocks",
    "cache-latents": "vae cached",
    "cache-text-embeddings": "text-encoder cached",
    "cache-text-encoder-outputs": "text-encoder cached",
    "caption-dropout-rate": "caption-dropout",
    "card": "gpu",
    "checkpointing": "gradient-checkpointing",
    "checkpointing-steps": "checkpoint-every",
    "context-parallel-size": "context-parallel",
    "cp-degree": "context-parallel",
    "data-dir": "data",
    "dataset": "data",
    "dataset-config": "data",
    "deepspeed-stage": "zero-stage",
    "dtype": "weights-dtype",
    "duration": "frames",
    "enable-group-offload": "group-offload",
    "enable-slicing": "vae-slicing",
    "enable-tiling": "vae-tiling",
    "folder-path": "data",
    "fp8": "weights-dtype fp8",
    "fp8-base": "weights-dtype fp8",
    "fsdp-enable": "sharding fsdp",
    "full": "method full",
    "fused-backward-pass": "optimizer-step backward",
    "gpu-memory": "gpu",
    "gpu-name": "gpu",
    "gradient-accumulation-steps": "gradient-accumulation",
    "gradient-checkpointing-cpu-offload": "gradient-checkpointing offload",
    "group-offload-type": "group-offload",
    "group-offload-use-stream": "group-offload-stream",
    "image-size": "resolution",
    "instance-data-dir": "data",
    "length": "frames",
    "lora": "method lora",
    "lora-dim": "lora-rank",
    "lora-target-modules": "lora-targets",
    "lr": "learning-rate",
    "lr-warmup-steps": "warmup-steps",
    "max-train-epochs": "epochs",
    "max-train-steps": "steps",
    "memory": "gpu",
    "micro-batch-size-per-gpu": "batch-size",
    "min-snr-gamma": "snr-gamma",
    "mixed-precision": "autocast",
    "model-id": "model",
    "musubi-blocks-to-swap": "swap-blocks",
    "network-alpha": "lora-alpha",
    "network-dim": "lora-rank",
    "nf4": "weights-dtype nf4",
    "nnodes": "nodes",
    "nproc-per-node": "gpus",
    "num-epochs": "epochs",
    "num-frames": "frames",
    "num-gpus": "gpus",
    "num-machines": "nodes",
    "num-processes": "gpus",
    "num-repeats": "repeats",
    "num-train-epochs": "epochs",
    "offload-optimizer-device": "offload-optimizer",
    "offload-param-device": "offload-params",
    "optimizer-release-gradients": "optimizer-step backward",
    "optimizer-type": "optimizer",
    "output-dir": "output",
    "per-device-train-batch-size": "batch-size",
    "precision": "weights-dtype",
    "pretrained-model-name-or-path": "model",
    "prompt": "validation-prompt",
    "prompts": "validation-prompts",
    "qlora": "weights-dtype nf4",
    "ram": "host-ram",
    "rank": "lora-rank",
    "resume-from-checkpoint": "resume",
    "sample-every-n-steps": "validate-every",
    "sample-prompts": "validation-prompts",
    "save-every-n-steps": "checkpoint-every",
    "seconds": "frames",
    "size": "resolution",
    "target-frames": "frames",
    "target-modules": "lora-targets",
    "train-batch-size": "batch-size",
    "train-data-dir": "data",
    "training-strategy": "sharding",
    "trigger-word": "trigger",
    "unet-lr": "learning-rate",
    "use-8bit-adam": "optimizer adamw-8bit",
    "use-ema": "ema gpu",
    "use-fsdp": "sharding fsdp",
    "use-gradient-checkpointing": "gradient-checkpointing full",
    "use-gradient-checkpointing-offload": "gradient-checkpointing offload",
    "vae-enable-slicing": "vae-slicing",
    "vae-enable-tiling": "vae-tiling",
    "video-length": "frames",
    "video-sample-n-frames": "frames",
    "vram": "gpu",
    "zero": "zero-stage",
}
"""Flags of DiffSynth-Studio, EasyAnimate, sd-scripts, musubi-tuner, ai-toolkit, finetrainers, SimpleTuner, diffusers'
examples, diffusion-pipe, DeepSpeed, accelerate and torchrun -> our option, all without leading dashes and with `-` for
`_`."""


def likely_options(typed: str, known: Iterable[str]) -> list[str]:
    """Our options that an unknown one probably means, best first; `known` and the answer with their dashes.

    `--blocks_to_swap` is `--swap-blocks`, `--lora_rank` is `--lora-rank`, `--frame` is `--frames`.
    """
    options = {option.lstrip("-"): option for option in known if option.startswith("--")}
    name = typed.lstrip("-").partition("=")[0].replace("_", "-").lower()
    if name in options:
        return [options[name]]
    says = {foreign: ours for foreign, ours in FOREIGN.items() if ours.split()[0] in options}
    if name in says:
        return [f"--{says[name]}"]
    # A typo of another trainer's flag is still that flag.
    answers = [f"--{says.get(near, near)}" for near in nearest(name, [*options, *says])]
    return list(dict.fromkeys(answers))
