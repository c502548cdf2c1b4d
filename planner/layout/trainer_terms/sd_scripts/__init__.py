"""sd-scripts (kohya-ss), read at 48d368f: FLUX and its siblings.

What its scripts cache is what ours caches, one encoder after the other; where they do not, encoders and VAE stay on the
GPU (``resident``). ``--fused_backward_pass`` is ``optimizer_step`` ``backward``.
"""

from __future__ import annotations

from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.attention_masks import masks_of_numbers_by_head
from planner.layout.trainer_terms.kohya_lora import inputs_as_they_are
from planner.layout.trainer_terms.lora_layers import adapters_on_modulation
from planner.layout.trainer_terms.sd_scripts.sd3 import MMDIT
from planner.layout.trainer_terms.sd_scripts.unet import VERSIONS
from planner.layout.trainer_terms.shared import (
    cache_emptied,
    cache_kept_while_sampling,
    largest_encoder_quantised,
    last_encoder_in_model,
    modulation_in_8_bits,
    outputs_sent_to_cpu,
    swap_in_place,
    swapped_to_pinned_memory,
)
from planner.layout.trainer_terms.trained_text_encoders import keep_of_conditioner


def text_encoders_together(run: Run) -> None:
    """All text encoders are moved to the GPU before prompts are encoded, while the VAE and the model wait on the CPU
    (``cache_text_encoder_outputs_if_needed`` of flux_train_network.py, sd3_train_network.py, sdxl_train_network.py and
    hunyuan_image_train_network.py; flux_train.py, sd3_train.py and sdxl_train.py do the same)."""
    run.device.text_encoders_together = True


def t5_cast(run: Run) -> None:
    """With ``--fp8_base`` T5-XXL is loaded in the format of its file, which is fp16, and cast to bf16 on the GPU
    (``load_target_model`` and ``cache_text_encoder_outputs_if_needed`` of flux_train_network.py and
    sd3_train_network.py). With ``--fp8_base_unet`` it is cast before, which is not told apart here."""
    model, strategy = run.facts.model, run.strategy
    in_the_files_format = strategy.weights_dtype == "fp8" and strategy.text_encoder_dtype == strategy.autocast == "bf16"
    if in_the_files_format and model.trained_with("sd-scripts", "last-encoder-cast"):
        run.device.encoder_cast = model.text_encoders[-1].name


def encoders_cast_on_the_cpu(run: Run) -> None:
    """Without ``--fp8_base`` T5-XXL and CLIP, in fp16 in their files, are cast to bf16 on the CPU, which takes RAM; a
    mapped file takes none (library/safetensors_utils.py ``load_safetensors``). Cached ones wait there anyway."""
    model, strategy = run.facts.model, run.strategy
    cast = strategy.weights_dtype != "fp8" and strategy.text_encoder_dtype == strategy.autocast == "bf16"
    if cast and strategy.text_encoder == "resident" and model.trained_with("sd-scripts", "last-encoder-cast"):
        run.host.encoders_loaded = "read"


def cast_on_the_cpu(run: Run) -> None:
    """A model's file is mapped on the CPU; ``--fp8_base`` casts all of it there (``load_target_model`` of
    flux_train_network.py and sd3_train_network.py)."""
    if run.strategy.weights_dtype == "fp8":
        run.host.loaded_bytes = 1


def encoders_wait(run: Run) -> None:
    """Text encoders come back to the CPU once their outputs are cached, and are deleted when training begins
    (``cache_text_encoder_outputs_if_needed``; train_network.py ``is_text_encoder_not_needed_for_training``). SDXL's and
    HunyuanImage's do not, and full training deletes them before it loads the model (flux_train.py:267,
    sd3_train.py:315)."""
    beside_adapters = run.job.method == "lora"
    run.host.encoders_wait = beside_adapters and run.facts.model.trained_with("sd-scripts", "encoders-wait")


def conditioner_kept(run: Run) -> None:
    """With ``--gradient_checkpointing`` a prompt's states are made to require gradients, which pass through the
    conditioner then, though nothing of it is trained, and it checkpoints nothing (anima_train_network.py
    ``get_noise_pred_and_target``)."""
    if run.strategy.gradient_checkpointing != "none":
        keep_of_conditioner("sd-scripts", run)


CHANGES_SAMPLES = True  # `whole_scores` of a U-Net
FIRST: tuple[Transform, ...] = (largest_encoder_quantised,)
TERMS: tuple[Transform, ...] = (
    *(modulation_in_8_bits("sd-scripts"), swap_in_place, outputs_sent_to_cpu, cache_emptied),
    *(inputs_as_they_are, adapters_on_modulation("sd-scripts"), cache_kept_while_sampling, swapped_to_pinned_memory),
    text_encoders_together,
    t5_cast,
    encoders_cast_on_the_cpu,
    cast_on_the_cpu,
    encoders_wait,
    last_encoder_in_model("sd-scripts"),
    conditioner_kept,
)
"""``cache_emptied``: flux_train.py calls ``clean_memory_on_device`` before it prepares the model. Checkpoints:
library/custom_offloading_utils.py ``to_cpu``."""

ENCODERS_ON_CPU = "text-encoder-cpu"
"""The version of memory terms with ``--text_encoder_cpu``."""


def encoders_on_cpu(run: Run) -> None:
    """Text encoders stay on the CPU while their outputs are cached (hunyuan_image_train_network.py ``vlm_device``)."""
    run.device.encoders_on_cpu = True


MASKED = "t5-mask"
"""The version of memory terms with FLUX.1's ``--apply_t5_attn_mask``."""

BY_VERSION = {
    **VERSIONS,
    "mmdit": MMDIT,
    f"hunyuan-image@{ENCODERS_ON_CPU}": (encoders_on_cpu,),
    MASKED: (masks_of_numbers_by_head,),
}
"""Its scripts for SDXL and SD 1.5 and for Stable Diffusion 3, whose models are its own code (``unet`` in `unet`,
``mmdit`` in `sd3`), and flags that no field of a plan says."""
