"""DiffSynth-Studio's Wan: its model, and its loss as called by `examples/wanvideo/model_training/train.py`."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from planner.catalog.profiles import ModelProfile
from planner.spec.job import Job, Strategy
from trainers.families import family
from trainers.families.common.base import Grid
from trainers.recording.trainer_code import named
from trainers.recording.trainer_code.wan_names import published_name as published_name
from trainers.step import step

REPOSITORY = "modelscope/DiffSynth-Studio"
COMMIT = "fed7b18f"
PACKAGES = ""

LAYERS = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
"""Diffusers' names of adapted layers -> DiffSynth's."""

STEPS = 1000
"""Timesteps of training (diffsynth/diffusion/training_module.py ``set_timesteps(1000, training=True)``)."""


def import_packages() -> None:
    """Imports the trainer's packages. Raises an ImportError if one of them, or of their dependencies, is missing."""
    importlib.import_module("diffsynth.pipelines.wan_video")


def build_model(
    profile: ModelProfile, job: Job, strategy: Strategy, config: dict[str, Any] | None = None, version: str = ""
) -> nn.Module:
    """Its WanModel, with one dtype for all weights and peft's adapters (``add_lora_to_model``), on ``meta``."""
    published = config or profile.config
    first_frame, image = bool(profile.inputs.get("first_frame_given")), bool(published.get("image_dim"))
    with init_empty_weights():
        model: nn.Module = named("diffsynth.models.wan_video_dit", "WanModel")(
            dim=published["num_attention_heads"] * published["attention_head_dim"],
            in_dim=published["in_channels"],
            ffn_dim=published["ffn_dim"],
            out_dim=published["out_channels"],
            text_dim=published["text_dim"],
            freq_dim=published["freq_dim"],
            eps=published["eps"],
            patch_size=published["patch_size"],
            num_heads=published["num_attention_heads"],
            num_layers=published["num_layers"],
            has_image_input=image,
            # As in diffsynth/configs/model_configs.py for Wan 2.2, which takes no CLIP features.
            seperated_timestep=first_frame,
            require_vae_embedding=not first_frame,
            require_clip_embedding=image,
            fuse_vae_embedding_in_latents=first_frame,
        )
    model.to(step.DTYPES[strategy.weights(job.method)]).requires_grad_(job.method == "full")
    if job.method == "lora":
        assert job.lora_targets, "targets are resolved before a model is built"
        step.add_adapter(model, job.replace(lora_targets=tuple(LAYERS[layer] for layer in job.lora_targets)), strategy)
    return model.train()


def batch(profile: ModelProfile, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    """Latents, prompt and image tensors, and the noise that the pipeline makes before encoding. It is kept to the end
    of the step (``WanVideoUnit_NoiseInitializer``) although the loss draws its own."""
    tensors = family(profile).batch(grid, "cpu", dtype)
    return {**tensors, "noise": torch.randn_like(tensors["latents"])}


def loss(model: nn.Module, batch: dict[str, Tensor], strategy: Strategy) -> Tensor:
    """``FlowMatchSFTLoss`` over ``model_fn_wan_video``, all of it under accelerate's autocast."""
    with _disable_current_modes():  # its schedule is in host memory
        pipeline = named("diffsynth.pipelines.wan_video", "WanVideoPipeline")
        pipe = pipeline(device="cpu", torch_dtype=batch["latents"].dtype)
        pipe.scheduler.set_timesteps(STEPS, training=True)
    pipe.dit = model
    inputs: dict[str, Any] = {"input_latents": batch["latents"], "context": batch["prompt"]}
    names = {"condition": "y", "image": "clip_feature", "first_frame": "first_frame_latents"}
    inputs |= {names[name]: tensor for name, tensor in batch.items() if name in names}
    checkpointed = strategy.gradient_checkpointing == "full"
    with step.autocast(strategy, torch.device("cpu")):
        result: Tensor = named("diffsynth.diffusion.loss", "FlowMatchSFTLoss")(
            pipe,
            **inputs,
            fuse_vae_embedding_in_latents="first_frame" in batch,
            use_gradient_checkpointing=checkpointed,
        )
    return result
