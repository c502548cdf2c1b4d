"""Encoding as a phase of a probe: runs one sample through each text encoder and the VAE, one at a time, as caching
does.

Weights and samples are random, because the memory and time of encoding depend on neither. Text encoders are called as
in recordings (`trainers.recording.encoders`), the VAE as the model's family caches a clip, at the job's largest shape.
"""

from __future__ import annotations

import gc

import torch
from torch import nn

from planner.catalog.profiles import ModelProfile, TextEncoder
from planner.spec.job import QUANTISED, Job, Strategy
from trainers.data import layer_offload
from trainers.data.packed_encoders import shrink
from trainers.families import family
from trainers.families.common.encoding import Encoder
from trainers.measuring.counters import Meter
from trainers.recording import encoders
from trainers.sampling import validate
from trainers.step import placement, step
from trainers.step.random_weights import randomise

SEED = 0
COLOURS = 256


def encode(profile: ModelProfile, job: Job, strategy: Strategy, meter: Meter) -> None:
    """Runs one sample through all encoders whose outputs are cached, as the phase `encode`. If the family cannot encode
    clips, that is reported as ``missing``."""
    with meter.phase("encode"):
        for encoder in profile.text_encoders:
            _read(encoder, strategy.text_encoder_dtype, meter.device)
            _empty(meter.device)
        if not _see(profile, job, strategy, meter.device):
            meter.report.facts["missing"].append(f"encode: clips of {profile.title} cannot be encoded yet")
        _empty(meter.device)


def _read(encoder: TextEncoder, dtype: str, device: torch.device) -> None:
    """Runs a prompt of full length through a text encoder."""
    half = step.DTYPES.get(dtype, torch.bfloat16)
    model = encoders.text_encoder(encoder)
    if half is torch.float16:  # for fp16, transformers keeps some matrices of its class in fp32
        model._keep_in_fp32_modules = type(model)._keep_in_fp32_modules  # type: ignore[attr-defined]  # transformers'
    step.cast_weights(model, half)
    by_layers = layer_offload.is_too_large(model, layer_offload.room_bytes(device))
    placement.materialise(model, "cpu" if dtype in QUANTISED or by_layers else device, randomise)
    if dtype in QUANTISED:
        model = shrink(model, dtype, device)
    elif by_layers:
        model = layer_offload.bring_layers(model, device)
    run = encoders.forward(encoder, _frozen(model), (1, encoder.max_tokens), half, device)
    with torch.inference_mode():
        run()


def _see(profile: ModelProfile, job: Job, strategy: Strategy, device: torch.device) -> bool:
    """Runs a clip of the largest shape through the VAE; returns whether the family can encode clips."""
    turns = family(profile).clip_turns()
    if not turns:
        return False
    shape = max(job.shapes, key=lambda shape: shape.pixels)
    size = (shape.height, shape.width)
    draw = torch.Generator().manual_seed(SEED)
    clip = torch.randint(COLOURS, (shape.frames, *size, 3), dtype=torch.uint8, generator=draw)
    vae = validate.with_settings(validate.random_vae(profile, strategy), strategy).to(device)
    encoder = Encoder(_frozen(vae), size=size, reference=clip[:1], control=clip, generator=draw)
    with torch.inference_mode():
        turns[-1].encode(encoder, clip)
    return True


def _frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def _empty(device: torch.device) -> None:
    """Frees an encoder's memory before the next one is loaded, including what reference cycles hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
