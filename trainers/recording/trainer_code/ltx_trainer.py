"""ltx-trainer (Lightricks): ltx-core's model, and the step of its flexible strategy (`packages/ltx-trainer`)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from planner.catalog.profiles import ModelProfile
from planner.layout.trainer_terms.ltx_trainer import VIDEO_ALONE
from planner.spec.job import Job, Strategy
from trainers.families import family
from trainers.families.common.base import Grid
from trainers.recording.trainer_code import named
from trainers.step import step

REPOSITORY = "Lightricks/LTX-2"
COMMIT = "400fd310"
PACKAGES = "packages/ltx-core/src"
TRAINER = "../../ltx-trainer/src"

RENAMED = (
    ("audio_patchify_proj", "audio_proj_in"),
    ("patchify_proj", "proj_in"),
    ("av_ca_video_scale_shift_adaln_single", "av_cross_attn_video_scale_shift"),
    ("av_ca_a2v_gate_adaln_single", "av_cross_attn_video_a2v_gate"),
    ("av_ca_audio_scale_shift_adaln_single", "av_cross_attn_audio_scale_shift"),
    ("av_ca_v2a_gate_adaln_single", "av_cross_attn_audio_v2a_gate"),
    ("audio_prompt_adaln_single", "audio_prompt_adaln"),
    ("prompt_adaln_single", "prompt_adaln"),
    ("audio_adaln_single", "audio_time_embed"),
    ("adaln_single", "time_embed"),
    ("scale_shift_table_a2v_ca_video", "video_a2v_cross_attn_scale_shift_table"),
    ("scale_shift_table_a2v_ca_audio", "audio_a2v_cross_attn_scale_shift_table"),
    ("q_norm", "norm_q"),
    ("k_norm", "norm_k"),
)
"""(ltx-core's name, diffusers' name) of parts of weights, as in diffusers' scripts/convert_ltx2_to_diffusers.py for 2.0
and 2.3."""

MEL_BINS = 16
"""Mel bins in each of the 8 channels of an audio latent (training_strategies/base_strategy.py)."""


def import_packages() -> None:
    """Imports the trainer's packages. Raises an ImportError if one of them, or of their dependencies, is missing."""
    importlib.import_module("ltx_core.model.transformer.model")
    # Blocks pass their tensors in an object; registering it with pytree lets the recorder find them.
    register_dataclass(named("ltx_core.model.transformer.transformer_args", "TransformerArgs"))
    _strategies()


def _strategies() -> Any:
    """ltx-trainer's module of strategies, from the package next to ltx-core's."""
    core = Path(importlib.import_module("ltx_core").__path__[0])
    packages = str((core.parent / TRAINER).resolve())
    if packages not in sys.path:
        sys.path.append(packages)
    return importlib.import_module("ltx_trainer.training_strategies.flexible")


def published_name(name: str) -> str:
    """The name of a weight in diffusers and peft."""
    for own, renamed in RENAMED:
        if own in name:
            return name.replace(own, renamed)
    return name


def build_model(
    profile: ModelProfile, job: Job, strategy: Strategy, config: dict[str, Any] | None = None, version: str = ""
) -> nn.Module:
    """Its LTXModel in the dtype of the weights, with peft's adapters; parameters on ``meta``. ``version``:
    `VIDEO_ALONE` for a step without sound, with the same model."""
    published = config or profile.config
    with init_empty_weights():
        model: nn.Module = named("ltx_core.model.transformer.model", "LTXModel")(
            num_attention_heads=published["num_attention_heads"],
            attention_head_dim=published["attention_head_dim"],
            in_channels=published["in_channels"],
            out_channels=published["out_channels"],
            num_layers=published["num_layers"],
            cross_attention_dim=published["cross_attention_dim"],
            norm_eps=published["norm_eps"],
            timestep_scale_multiplier=published["timestep_scale_multiplier"],
            audio_num_attention_heads=published["audio_num_attention_heads"],
            audio_attention_head_dim=published["audio_attention_head_dim"],
            audio_in_channels=published["audio_in_channels"],
            audio_out_channels=published["audio_out_channels"],
            audio_cross_attention_dim=published["audio_cross_attention_dim"],
            av_ca_timestep_scale_multiplier=published["cross_attn_timestep_scale_multiplier"],
            double_precision_rope=published["rope_double_precision"],
            apply_gated_attention=published["gated_attn"],
            cross_attention_adaln=published["cross_attn_mod"],
            ff_bias=published.get("ff_bias", True),
            use_keyframes_abs_pos_embedding=published.get("use_keyframes_abs_pos_embedding", False),
        )
    model.with_sound = version != VIDEO_ALONE  # type: ignore[assignment]  # read in loss
    model.set_gradient_checkpointing(strategy.gradient_checkpointing == "full")  # type: ignore[operator]  # its own
    model.to(step.DTYPES[strategy.weights(job.method)]).requires_grad_(False)
    step.add_adapter(model, job, strategy)
    return model.train()


def batch(profile: ModelProfile, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    """The cached tensors of a clip (scripts/process_dataset.py), with the connectors' output as prompt."""
    return family(profile).batch(grid, "cpu", torch.bfloat16)


def loss(model: nn.Module, batch: dict[str, Tensor], strategy: Strategy) -> Tensor:
    """The part of ``LtxvTrainer._training_step`` after the connectors. The connectors are not frozen, so their outputs
    need gradients. Accelerate's autocast wraps only the model, whose outputs it casts to fp32."""
    flexible = _strategies()
    own: Any = model  # its own class
    streams = {"video": {"is_generated": True, "latents_dir": "latents"}}
    if own.with_sound:
        streams["audio"] = {"is_generated": True, "latents_dir": "audio_latents"}
    plan = flexible.FlexibleStrategy(flexible.FlexibleStrategyConfig(**streams))
    samples, _, frames, height, width = batch["latents"].shape
    count = batch["audio"].shape[1]
    sizes = {"num_frames": frames, "height": height, "width": width}
    clip = {
        "conditions": {
            "video_prompt_embeds": batch["prompt"].requires_grad_(),
            "audio_prompt_embeds": batch["audio_prompt"].requires_grad_(own.with_sound),
            "prompt_attention_mask": batch["prompt_mask"],
        },
        "video_latents": {"latents": batch["latents"], **{name: _Size(size) for name, size in sizes.items()}},
        "audio_latents": {"latents": batch["audio"].view(samples, count, -1, MEL_BINS).transpose(1, 2)},
    }
    sampler = named("ltx_trainer.timestep_samplers", "ShiftedLogitNormalTimestepSampler")()
    inputs = plan.prepare_training_inputs(clip, sampler)
    unperturbed = _unperturbed(own, samples, step.compute_dtype(strategy))
    with step.autocast(strategy, torch.device("cpu")):
        predictions = model(video=inputs.video, audio=inputs.audio, perturbations=unperturbed)
    predictions = [None if each is None else each.float() for each in predictions]
    result: Tensor = plan.compute_loss(*predictions, inputs).mean()
    return result


def _unperturbed(model: Any, samples: int, dtype: torch.dtype) -> Any:
    """The model's default configuration, without perturbations, in the dtype of its tokens. The copy in host memory,
    whose values it reads, is a numpy array here."""
    kinds = named("ltx_core.guidance.perturbations", "PerturbationType")
    shape = (len(kinds), model.num_blocks, samples)
    batched = named("ltx_core.guidance.perturbations", "BatchedPerturbationConfig")
    return batched.from_masks(torch.ones(shape, dtype=dtype), np.ones(shape))


class _Size:
    """Stands for a tensor with a clip's size, which the trainer reads: tensors in a recording have no values."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, sample: int) -> _Size:
        return self

    def item(self) -> int:
        """The size."""
        return self.size
