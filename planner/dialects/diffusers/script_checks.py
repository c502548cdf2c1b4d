"""What the scripts of diffusers' examples end a run for before the first step, read at 58eb52c."""

from __future__ import annotations

from collections.abc import Iterator

from planner.dialects.base.bindings import Remark, Settings
from planner.dialects.base.commands import token_beside_wandb
from planner.dialects.diffusers.bitsandbytes import BNB
from planner.dialects.diffusers.models import AT

DREAMBOOTH_AT = f"{AT} train_dreambooth.py"


def stops(settings: Settings) -> Iterator[Remark]:
    """The settings that a script refuses, each with the reason."""
    yield from token_beside_wandb(settings, f"{AT} train_dreambooth_lora_flux.py:1072")
    yield from _data(settings)
    if settings.get("--do_fp8_training") and settings.get(BNB):
        yield Remark("--do_fp8_training", f"refused with {BNB} ({AT} train_dreambooth_lora_flux2.py:756)")
    if settings.get("--enable_npu_flash_attention"):
        at = f"{AT} train_dreambooth_lora_flux.py:1228"
        yield Remark("--enable_npu_flash_attention", f"refused without an Ascend NPU: leave it out ({at})")
    if settings.get("--do_edm_style_training") and settings.get("--snr_gamma") is not None:
        yield Remark("--snr_gamma", f"refused with --do_edm_style_training ({AT} train_dreambooth_lora_sdxl.py:991)")
    yield from _trained_text_encoder(settings)


def _data(settings: Settings) -> Iterator[Remark]:
    """Two places of images, of which one is taken; class images that are not said to be anywhere, or of what."""
    if settings.get("--dataset_name") is not None and settings.get("--instance_data_dir") is not None:
        at = f"{AT} train_dreambooth_lora_flux.py:705"
        yield Remark("--instance_data_dir", f"refused with --dataset_name: one of them is enough ({at})")
    if not settings.get("--with_prior_preservation"):
        return
    missing = [flag for flag in ("--class_data_dir", "--class_prompt") if settings.get(flag) is None]
    if missing:
        why = f"refused without {' and '.join(missing)} ({AT} train_dreambooth_lora_flux.py:713)"
        yield Remark("--with_prior_preservation", why)


def _trained_text_encoder(settings: Settings) -> Iterator[Remark]:
    """What goes with a text encoder that is trained whole; the two flags and the count are asked of that script."""
    if not settings.get("--train_text_encoder"):
        return
    if settings.get("--pre_compute_text_embeddings"):
        yield Remark("--pre_compute_text_embeddings", f"refused with --train_text_encoder ({DREAMBOOTH_AT}:606)")
    world = int(settings.get("gpus") or 1) * int(settings.get("nodes") or 1)
    accumulates = int(settings.get("--gradient_accumulation_steps") or 1) > 1
    if accumulates and world > 1 and str(settings["script"]).endswith(WHOLE):
        why = f"refused above 1 with --train_text_encoder on several GPUs ({DREAMBOOTH_AT}:837)"
        yield Remark("--gradient_accumulation_steps", why)


WHOLE = "train_dreambooth.py"
"""The script that says so; those of adapters on a text encoder do not ask how many GPUs there are."""
