"""musubi-tuner's Wan: its model, its adapters, and its step as `src/musubi_tuner/wan_train_network.py` runs it."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from planner.catalog.profiles import ModelProfile
from planner.spec.job import Job, Strategy
from trainers.families import family
from trainers.families.common.base import Grid
from trainers.recording.trainer_code import kohya_lora, named, wan_names
from trainers.step import step

REPOSITORY = "kohya-ss/musubi-tuner"
COMMIT = "30c658c4"
PACKAGES = "src"

ARGUMENTS = {
    "timestep_sampling": "shift",
    "discrete_flow_shift": 3.0,
    "sigmoid_scale": 1.0,
    "min_timestep": None,
    "max_timestep": None,
    "preserve_distribution_shape": False,
    "weighting_scheme": "none",
}
"""As docs/wan.md trains. Other ways to draw noise levels make other numbers, a few for each sample."""

FORMATS = {**step.DTYPES, "fp8": torch.float8_e4m3fn}
"""Of all weights: ``--fp8_base`` casts the whole model, norms and embeddings too (training/trainer_base.py)."""

ADAPTED = re.compile(r"\.(attn[12]\.(to_[qkv]|to_out\.0|add_[kv]_proj)|ffn\.net\.(0\.proj|2))\.(weight|bias)$")
"""The layers that its adapters are on: all of a block (networks/lora_wan.py), by diffusers' names."""


def import_packages() -> None:
    """Imports the trainer's packages; an ImportError where one, or one that it needs, is missing."""
    with patch.object(torch.cuda, "current_device", lambda: 0):  # T5EncoderModel's default for an argument
        importlib.import_module("musubi_tuner.wan_train_network")


def published_name(name: str) -> str:
    """The name that diffusers and peft give to a weight."""
    name = wan_names.published_name(name)
    return kohya_lora.published_name(name, ADAPTED.search(name) is not None)


def build_model(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    config: dict[str, Any] | None = None,
    version: str = "",
) -> nn.Module:
    """Its WanModel in the format of the weights, with a ``LoRAModule`` on every linear layer of the blocks; parameters
    on ``meta``. ``version``: with ``--force_v2_1_time_embedding``."""
    published = config or profile.config
    settings = _settings(profile)
    with init_empty_weights():
        model: nn.Module = named("musubi_tuner.wan.modules.model", "WanModel")(
            model_type="i2v" if settings.i2v else "t2v",
            model_version="2.2" if settings.v2_2 else "2.1",
            dim=settings.dim,
            eps=settings.eps,
            ffn_dim=settings.ffn_dim,
            freq_dim=settings.freq_dim,
            in_dim=settings.in_dim,
            num_heads=settings.num_heads,
            num_layers=published["num_layers"],
            out_dim=settings.out_dim,
            text_len=settings.text_len,
            attn_mode="torch",  # what --sdpa asks for
        )
        model.to(FORMATS[strategy.weights(job.method)]).requires_grad_(False)
        network = named("musubi_tuner.networks.lora_wan", "create_arch_network")(
            1.0, job.lora_rank, job.lora_rank, None, [], model
        )
    model.settings = settings
    model.set_time_embedding_v2_1(bool(version))  # type: ignore[operator]  # its own method
    kohya_lora.apply_beside(network.unet_loras, step.DTYPES[strategy.adapter_dtype])
    if strategy.gradient_checkpointing == "full":
        model.enable_gradient_checkpointing()  # type: ignore[operator]  # its own method
        return model.train()
    return model.eval()  # as its trainer has it then


def _settings(profile: ModelProfile) -> Any:
    """Its configuration of the task that trains a model: the first of its version, width and channels."""
    per_token = profile.trained_with("musubi-tuner", "time-per-token")
    shape = profile.config["num_attention_heads"], profile.config["in_channels"], per_token
    tasks = named("musubi_tuner.wan.configs", "WAN_CONFIGS").values()
    return next(task for task in tasks if (task.num_heads, task.in_dim, task.v2_2) == shape)


class _SizesOnHost:
    """``torch`` as the model's file sees it while it is recorded: lengths and sizes, which it keeps in tensors in host
    memory and reads, are arrays here, as no tensor of a recording has values."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, values: Any, dtype: torch.dtype) -> Any:
        return np.array(values)

    def stack(self, rows: Sequence[Any], dim: int = 0) -> Any:
        return np.stack(rows) if isinstance(rows[0], np.ndarray) else torch.stack(list(rows), dim)


def batch(profile: ModelProfile, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    """What its caches hold of a clip, in bf16 (wan_cache_latents.py), and the table of positions, which the model makes
    for a shape in its first step and keeps (``freqs_fhw``)."""
    tensors = family(profile).batch(grid, "cpu", torch.bfloat16)
    tokens, half_head = grid["F"] * grid["H"] * grid["W"], profile.config["attention_head_dim"] // 2
    return {**tensors, "positions": torch.empty(tokens, 1, half_head, dtype=torch.complex128)}


def loss(model: nn.Module, batch: dict[str, Tensor], strategy: Strategy) -> Tensor:
    """The loss of ``NetworkTrainer.process_batch``, over noise that the loop draws before it."""
    with _disable_current_modes():  # what it sets up lies in host memory
        trainer = named("musubi_tuner.wan_train_network", "WanNetworkTrainer")()
    own: Any = model  # its own class, with its trainer's settings
    trainer.config, trainer._i2v_training, trainer._control_training = own.settings, own.settings.i2v, False
    trainer.high_low_training = False
    frames, height, width = batch["latents"].shape[2:]
    own.freqs_fhw = {(frames, height // 2, width // 2): batch["positions"]}
    clip = {"latents": batch["latents"], "t5": list(batch["prompt"]), "timesteps": None}
    names = {"condition": "latents_image", "image": "clip"}
    clip |= {names[name]: tensor for name, tensor in batch.items() if name in names}
    arguments = SimpleNamespace(**ARGUMENTS, gradient_checkpointing=strategy.gradient_checkpointing == "full")
    here = SimpleNamespace(
        device=torch.device("cpu"), autocast=functools.partial(step.autocast, strategy, torch.device("cpu"))
    )
    noise = torch.randn_like(batch["latents"])
    dtype, adapter = step.DTYPES[strategy.compute_dtype], step.DTYPES[strategy.adapter_dtype]
    models, pieces = (model, None), (batch["latents"], noise, None)
    with patch(f"{type(model).__module__}.torch", _SizesOnHost()):
        result: Tensor
        result, _ = trainer.process_batch(arguments, here, *models, clip, *pieces, dtype, adapter, None, 0)
    return result
