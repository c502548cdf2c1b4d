"""musubi-tuner's Wan: its model, its adapters, and its step as run by `src/musubi_tuner/wan_train_network.py`."""

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
"""Arguments as in docs/wan.md. Other ways to draw noise levels differ by only a few numbers per sample."""

FORMATS = {**step.DTYPES, "fp8": torch.float8_e4m3fn}
"""The dtype of all weights: ``--fp8_base`` casts the whole model, including norms and embeddings
(training/trainer_base.py)."""

ADAPTED = re.compile(r"\.(attn[12]\.(to_[qkv]|to_out\.0|add_[kv]_proj)|ffn\.net\.(0\.proj|2))\.(weight|bias)$")
"""The layers that have adapters: all linear layers of a block (networks/lora_wan.py), under diffusers' names."""


def import_packages() -> None:
    """Imports the trainer's packages. Raises an ImportError if one of them, or of their dependencies, is missing."""
    with patch.object(torch.cuda, "current_device", lambda: 0):  # called for a default argument of T5EncoderModel
        importlib.import_module("musubi_tuner.wan_train_network")


def published_name(name: str) -> str:
    """The name of a weight in diffusers and peft."""
    name = wan_names.published_name(name)
    return kohya_lora.published_name(name, ADAPTED.search(name) is not None)


def build_model(
    profile: ModelProfile,
    job: Job,
    strategy: Strategy,
    config: dict[str, Any] | None = None,
    version: str = "",
) -> nn.Module:
    """Its WanModel in the dtype of the weights, with a ``LoRAModule`` on every linear layer of the blocks; parameters
    on ``meta``. ``version``: if not empty, with ``--force_v2_1_time_embedding``."""
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
    return model.eval()  # as the trainer leaves it without checkpointing


def _settings(profile: ModelProfile) -> Any:
    """Its configuration of the task for a model: the first one with the model's version, width and channels."""
    per_token = profile.trained_with("musubi-tuner", "time-per-token")
    shape = profile.config["num_attention_heads"], profile.config["in_channels"], per_token
    tasks = named("musubi_tuner.wan.configs", "WAN_CONFIGS").values()
    return next(task for task in tasks if (task.num_heads, task.in_dim, task.v2_2) == shape)


class _SizesOnHost:
    """Replaces ``torch`` in the model's module while it is recorded. The module keeps lengths and sizes in host tensors
    and reads them; they are numpy arrays here, because tensors in a recording have no values."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, values: Any, dtype: torch.dtype) -> Any:
        return np.array(values)

    def stack(self, rows: Sequence[Any], dim: int = 0) -> Any:
        return np.stack(rows) if isinstance(rows[0], np.ndarray) else torch.stack(list(rows), dim)


def batch(profile: ModelProfile, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors that its caches hold of a clip, in bf16 (wan_cache_latents.py), and the table of positions, which the
    model computes in its first step at a shape and keeps (``freqs_fhw``)."""
    tensors = family(profile).batch(grid, "cpu", torch.bfloat16)
    tokens, half_head = grid["F"] * grid["H"] * grid["W"], profile.config["attention_head_dim"] // 2
    return {**tensors, "positions": torch.empty(tokens, 1, half_head, dtype=torch.complex128)}


def loss(model: nn.Module, batch: dict[str, Tensor], strategy: Strategy) -> Tensor:
    """The loss of ``NetworkTrainer.process_batch``, with the noise that the training loop draws before."""
    with _disable_current_modes():  # what it sets up is in host memory
        trainer = named("musubi_tuner.wan_train_network", "WanNetworkTrainer")()
    own: Any = model  # typed as Any for the attributes of the trainer's class
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
