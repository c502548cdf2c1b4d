"""sd-scripts' SD 1.5 and 2.1: its U-Net (library/original_unet.py), its adapters, and its ``train_network.py`` step."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from planner.catalog.profiles import ModelProfile
from planner.spec.job import Job, Strategy
from trainers.families import family
from trainers.families.common.base import Grid
from trainers.recording.trainer_code import kohya_lora, named
from trainers.step import step

REPOSITORY = "kohya-ss/sd-scripts"
COMMIT = "48d368fa"
PACKAGES = ""

ADAPTED = re.compile(r"\.attentions\.\d+\..*(to_[qkv]|to_out\.0|ff\.net\.(0\.proj|2)|proj_in|proj_out)\.(weight|bias)$")
"""The layers that have adapters: all linear layers and 1x1 convolutions of a Transformer2DModel (networks/lora.py
``UNET_TARGET_REPLACE_MODULE``)."""


def import_packages() -> None:
    """Imports the trainer's packages. Raises an ImportError if one of them, or of their dependencies, is missing."""
    importlib.import_module("library.original_unet")
    importlib.import_module("networks.lora")


def published_name(name: str) -> str:
    """The name of a weight in diffusers and peft. The model's own names are diffusers' already."""
    return kohya_lora.published_name(name, ADAPTED.search(name) is not None)


def build_model(
    profile: ModelProfile, job: Job, strategy: Strategy, config: dict[str, Any] | None = None, version: str = ""
) -> nn.Module:
    """Its U-Net in the dtype of the weights, with ``--sdpa`` attention and a ``LoRAModule`` on every layer of the
    transformers; parameters on ``meta``."""
    published = config or profile.config
    with init_empty_weights():
        model: nn.Module = named("library.original_unet", profile.diffusers_class)(
            sample_size=published["sample_size"],
            attention_head_dim=published["attention_head_dim"],
            cross_attention_dim=published["cross_attention_dim"],
        )
        network = named("networks.lora", "create_network")(1.0, job.lora_rank, job.lora_rank, None, [], model)
    model.to(step.DTYPES[strategy.weights(job.method)]).requires_grad_(False)
    model.set_use_sdpa(True)  # type: ignore[operator]  # its own method
    kohya_lora.apply_beside(network.unet_loras, step.DTYPES[strategy.adapter_dtype])
    if strategy.gradient_checkpointing == "full":
        model.enable_gradient_checkpointing()  # type: ignore[operator]  # its own method
        return model.train()
    return model.eval()  # as train_network.py leaves it without checkpointing


def batch(profile: ModelProfile, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    """Cached latents, and the prompt as its text encoder returns it under autocast: both in fp32."""
    return family(profile).batch(grid, "cpu", torch.float32)


def loss(model: nn.Module, batch: dict[str, Tensor], strategy: Strategy) -> Tensor:
    """The loss as computed by ``process_batch``, ``get_noise_pred_and_target`` and ``call_unet`` of
    ``train_network.py``, and by ``add_noise`` of diffusers' DDPMScheduler. It is written out here because that file
    imports what current transformers no longer has. SD 2.1's velocity target, one more tensor as small as the latents,
    is left out."""
    latents = batch["latents"] * SCALE
    noise = torch.randn_like(latents)
    share = torch.rand(len(latents), 1, 1, 1)
    noisy = share**0.5 * latents + (1 - share) ** 0.5 * noise
    prompt = batch["prompt"]
    noisy.requires_grad_(True)
    if strategy.gradient_checkpointing == "full":
        prompt.requires_grad_(True)
    timesteps = torch.randint(0, 1000, (len(latents),))
    with step.autocast(strategy, torch.device("cpu")):
        predicted = model(noisy, timesteps, prompt).sample
    each = nn.functional.mse_loss(predicted.float(), noise.float(), reduction="none").mean([1, 2, 3])
    return (each * torch.ones(len(latents))).mean()


SCALE = 0.18215
"""NetworkTrainer.vae_scale_factor."""
