"""What ai-toolkit ends a run for before the first step, read at 27a03a9."""

from __future__ import annotations

from collections.abc import Iterator

from planner.dialects.ai_toolkit.models import (
    AT,
    MODEL,
    SAMPLED_FROM_AN_IMAGE,
    TRAIN,
    datasets_of,
    makes_samples,
    samples_without_image,
)
from planner.dialects.base.bindings import Remark, Settings
from planner.dialects.base.values import integer

CONFIGS = f"{AT} toolkit/config_modules.py"
KEEPS_ITS_ENCODER = ("qwen_image_edit", "boogu_image_edit")
"""Architectures whose prompts are encoded together with each sample's control images."""
FLUX = ("flux", "flex1")
WITHOUT_OTHER_LORA = ("wan21", "wan21_i2v", "wan22_14b", "wan22_14b_i2v", "wan22_5b")
"""Architectures whose loader takes no LoRA beside the one that trains (toolkit/models/wan21/wan21.py:365, :369;
wan22_14b_model.py:261, :266)."""
OTHER_LORA = ("assistant_lora_path", "inference_lora_path", "lora_path")


def stops(settings: Settings) -> Iterator[Remark]:
    """The settings that its configs refuse, each with the reason."""
    steps, many = (f"{TRAIN}{name}" for name in ("gradient_accumulation_steps", "gradient_accumulation"))
    if integer(settings.get(many) or 1, many) > 1 and integer(settings.get(steps, 1) or 0, steps) != 1:
        yield Remark("train.gradient_accumulation", f"refused with gradient_accumulation_steps ({CONFIGS}:462)")
    arch = str(settings.get(f"{MODEL}arch") or "").partition(":")[0]
    if arch in KEEPS_ITS_ENCODER and settings.get(f"{TRAIN}unload_text_encoder"):
        instead = "cache_text_embeddings is not"
        yield Remark("train.unload_text_encoder", f"refused with model.arch {arch}: {instead} ({CONFIGS}:1503)")
    if settings.get(f"{MODEL}attn_masking") and not settings.get(f"{MODEL}is_flux"):
        why = "refused without model.is_flux: true, which model.arch flux comes too late for"
        yield Remark("model.attn_masking", f"{why} ({CONFIGS}:691)")
    bypassed = settings.get(f"{TRAIN}bypass_guidance_embedding")
    if arch in FLUX or settings.get(f"{MODEL}is_flux"):
        bypassed = bypassed or settings.get(f"{MODEL}use_flux_cfg")
    if bypassed and settings.get(f"{TRAIN}do_guidance_loss"):
        yield Remark("train.do_guidance_loss", f"refused with bypass_guidance_embedding ({CONFIGS}:1485)")
    recovers = "|" in str(settings.get(f"{MODEL}qtype")) or settings.get(f"{MODEL}accuracy_recovery_adapter")
    if recovers and settings.get(f"{MODEL}assistant_lora_path") is not None:
        yield Remark("model.assistant_lora_path", f"refused with an accuracy recovery adapter ({CONFIGS}:1489)")
    for name in OTHER_LORA:
        if arch in WITHOUT_OTHER_LORA and settings.get(f"{MODEL}{name}") is not None:
            yield Remark(f"model.{name}", f"refused with model.arch {arch} ({AT} toolkit/models/wan21/wan21.py:365)")
    skips = settings.get(f"{TRAIN}skip_first_sample") or settings.get(f"{TRAIN}disable_sampling")
    if arch in SAMPLED_FROM_AN_IMAGE and not skips and makes_samples(settings) and samples_without_image(settings):
        why = f"refused without ctrl_img, which model.arch {arch} samples from before its first step"
        yield Remark("sample.prompts", f"{why} ({AT} jobs/process/BaseSDTrainProcess.py:2481)")
    yield from _of_data_sets(settings)


def _of_data_sets(settings: Settings) -> Iterator[Remark]:
    """What one data set has and another has not. Regularisation images have a loader of their own."""
    every = datasets_of(settings)
    caches = [bool(settings.get(f"{data}cache_text_embeddings")) for data in every]
    if any(caches) and not all(caches) and not settings.get(f"{TRAIN}cache_text_embeddings"):
        yield Remark("datasets[].cache_text_embeddings", f"refused unless every data set has it ({CONFIGS}:1499)")
    for regular in (False, True):
        sets = [data for data in every if bool(settings.get(f"{data}is_reg")) is regular]
        buckets = [bool(settings.get(f"{data}buckets", True)) for data in sets]
        if any(buckets) and not all(buckets):
            yield Remark(
                "datasets[].buckets", f"refused unless all have them or none ({AT} toolkit/data_loader.py:747)"
            )
        elif not any(buckets) and any(settings.get(f"{data}batch_size") is not None for data in sets):
            why = f"refused with buckets: false ({AT} toolkit/data_loader.py:761)"
            yield Remark("datasets[].batch_size", why)
