"""musubi-tuner (kohya-ss), read at 30c658c.

Latents and prompts are cached by scripts of their own, one encoder at a time, as ours does.
"""

from __future__ import annotations

from planner.layout.encoders_vae.component_pass import BYTES_PER_PARAMETER
from planner.layout.run import Run, Transform
from planner.layout.trainer_terms.kohya_lora import inputs_as_they_are
from planner.layout.trainer_terms.lora_layers import adapters_on_modulation, wider_adapters
from planner.layout.trainer_terms.lycoris.whole_changes import HADAMARD, KRONECKER, whole_changes
from planner.layout.trainer_terms.shared import (
    HeldTensor,
    cache_kept_while_sampling,
    hold,
    largest_encoder_quantised,
    modulation_in_8_bits,
    outputs_sent_to_cpu,
    passing,
    positions_in_fp64,
    prompts_cached_apart,
    stretches_of_blocks,
    swap_in_place,
)
from planner.tape.program import Stage


def time_embedding_per_token(run: Run) -> None:
    """Wan 2.2's time embedding is made for each token, in fp32: six vectors of the model's width, an argument of every
    block's checkpoint, and one for the head. A block adds its own modulation, which is another six, and keeps two more,
    1 + scale of each ``addcmul`` (wan/modules/model.py:858 ``e``, ``e0``; :434 ``WanAttentionBlock._forward``).
    ``--force_v2_1_time_embedding`` makes one for all tokens (:850)."""
    trainer, _, version = run.trainer.partition("@")
    if run.samples_only or version == ONE_TIME or not run.facts.model.trained_with(trainer, "time-per-token"):
        return
    if run.in_own_code:
        return  # its own code makes it in the recording itself
    config, grid = run.facts.model.config, run.grid
    width = config["num_attention_heads"] * config["attention_head_dim"]
    token = FP32 * width * grid["B"] * grid["F"] * grid["H"] * grid["W"]
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        _per_token(run, stage, token)


def _per_token(run: Run, stage: Stage, token: int) -> None:
    forward, backward = stretches_of_blocks(stage)
    start, turn = min(at[0] for at in forward.values()), min(at[0] for at in backward.values())
    spans = [
        HeldTensor(6 * token, "time embedding of each token", start, max(at[-1] for at in backward.values())),
        HeldTensor(token, "time embedding of each token, for the head", start, turn - 1),
    ]
    for block, again in backward.items():
        own = "modulation of each token"
        if run.strategy.gradient_checkpointing == "none":
            spans.append(HeldTensor(8 * token, own, forward[block][0], again[-1]))
            continue
        runs = max(forward[block], key=lambda at: len(stage.stretches[at][1]))  # others are its output's last use
        spans += [HeldTensor(8 * token, own, runs, runs), HeldTensor(8 * token, own, again[0], again[-1])]
    hold(run, stage, spans)


FP32 = 4
ONE_TIME = "2.1-time-embedding"
"""The version of memory terms with --force_v2_1_time_embedding."""


def modulation_in_16_bits(run: Run) -> None:
    """``--fp8_scaled`` left Qwen-Image's modulation layers, a third of each block, in 16 bits until 2025-09-18
    (qwen_image/qwen_image_model.py FP8_OPTIMIZATION_EXCLUDE_KEYS, changed in 0df4bee)."""
    if run.strategy.weights_dtype == "fp8" and run.facts.model.trained_with("musubi-tuner", "modulation-in-16-bits"):
        for name, buffer in run.named("weight").items():
            if "_mod." in name:
                run.resize(buffer, 2 * run.sizes[buffer])


TILE_SIZE = 128
TILE_256 = "vae-tile-256"
"""The version of memory terms with ``--vae_sample_size 256``."""


def vae_tiles(run: Run) -> None:
    """Tiles of HunyuanVideo 1.5's VAE have 128 pixels a side and overlap by a quarter, or those of
    ``--vae_sample_size`` (hv_1_5_cache_latents.py:151, hv_1_5_train_network.py:481;
    hunyuan_video_1_5/hunyuan_video_1_5_vae.py ``spatial_tiled_encode``), where diffusers' have 256."""
    if run.facts.model.trained_with("musubi-tuner", "vae-tiles-of-128"):
        side = 256 if run.trainer.partition("@")[2] == TILE_256 else TILE_SIZE
        run.device.vae_tile = (side, side, side * 3 // 4, side * 3 // 4)


def read_for_swapped_blocks(run: Run) -> None:
    """With ``--blocks_to_swap`` these models are read into host RAM whole, not mapped, before the blocks that stay go
    to the GPU (utils/safetensors_utils.py ``MemoryEfficientSafeOpen``: ``np.fromfile`` for the CPU; ``loading_device``
    of wan_train_network.py and hv_train_network.py). Seen in rehearsals of Wan 1.3B: 2.5 GiB, with 5 blocks swapped and
    with 25."""
    if run.facts.model.trained_with("musubi-tuner", "read-for-swapped-blocks"):
        run.host.loaded_bytes = BYTES_PER_PARAMETER[run.strategy.weights(run.job.method)]
        run.host.loaded_for_swapping, run.host.maps_files = True, False


def cast_whole(run: Run) -> None:
    """``--fp8_base`` without ``--fp8_scaled``: Wan's file in 16 bits lies on the GPU whole until all of it is cast
    (wan/modules/model.py:1072 ``model.to(dit_weight_dtype)``, while ``sd`` holds what was read). Seen in a rehearsal
    of 1.3B: 4.02 GiB, of which 2.64 are the file and 1.32 the cast."""
    run.host.loaded_bytes = HALF + FP8
    if run.strategy.swap_blocks:  # on the CPU
        return
    passing(run, (HALF + FP8) * run.facts.model.parameters, "file in 16 bits and its cast")
    run.empty_cache.after = (*run.empty_cache.after, run.phases.before_load[-1])  # what stays has segments of its own


HALF, FP8 = 2, 1

FIRST: tuple[Transform, ...] = (vae_tiles, largest_encoder_quantised)
TERMS: tuple[Transform, ...] = (
    *(
        prompts_cached_apart,
        modulation_in_8_bits("musubi-tuner"),
        wider_adapters,
        swap_in_place,
        read_for_swapped_blocks,
        outputs_sent_to_cpu,
    ),
    *(
        positions_in_fp64("musubi-tuner"),
        inputs_as_they_are,
        adapters_on_modulation("musubi-tuner"),
        time_embedding_per_token,
        cache_kept_while_sampling,
    ),
)
"""``swap_in_place``: without ``--block_swap_h2d_only``, which streams through a ring like ours. Checkpoints:
utils/model_utils.py ``to_cpu``."""

CAST = "cast-whole"
"""The version in which a file in 16 bits is cast whole on the GPU."""

LOKR, LOHA = "lokr", "loha"
"""The versions with ``--network_module networks.lokr`` and ``networks.loha``."""

BY_VERSION: dict[str, tuple[Transform, ...]] = {
    "36f3a98": (modulation_in_16_bits,),
    ONE_TIME: (),
    TILE_256: (),
    CAST: (cast_whole,),
    LOKR: (whole_changes(KRONECKER, lets_go=True),),
    LOHA: (whole_changes(HADAMARD, lets_go=True),),
}
"""36f3a98: 2025-08-10, of the table of VRAM in docs/qwen_image.md; and what no field of a plan says: two flags, the
format of a file, and two kinds of adapters (networks/lokr.py and loha.py ``get_diff_weight``)."""
