"""EasyAnimate, read at c2a70d1 (scripts/train.py). ``--low_vram`` is ``text_encoder`` and ``vae`` ``swapped``."""

from __future__ import annotations

from planner.layout.encoders_vae.component_pass import component_bytes
from planner.layout.phases import RGB
from planner.layout.run import Run, Transform
from planner.layout.run_records import ZeroSettings
from planner.layout.sharding.zero import bucket_as_backward_begins, share_comes_back_in_fp32
from planner.layout.trainer_terms.shared import (
    cache_kept_while_sampling,
    clip_pixels,
    filled_in_fp32,
    steps_by_itself,
)


def all_at_start(run: Run) -> None:
    """Whatever is swapped later stands on the GPU when training starts, beside the model and DDP's buckets
    (``vae.to(accelerator.device)``, ``text_encoder.to(accelerator.device)``)."""
    nbytes = component_bytes(run, "swapped")
    if nbytes:
        run.free(run.load, [run.add(run.load, nbytes, "residents", "encoders at the start")])


def loaded_in_fp32(run: Run) -> None:
    """The scripts call ``from_pretrained_2d`` without ``low_cpu_mem_usage`` (easyanimate/models/transformer3d.py). The
    encoders were loaded before, and are mapped files until they go to the GPU."""
    filled_in_fp32(run)
    run.host.encoders_loaded = "mapped"


def cache_emptied_between_swaps(run: Run) -> None:
    """``--low_vram`` empties the allocator's cache before and behind each encoder's turn."""
    run.empty_cache.around_encode = "swapped" in (run.strategy.text_encoder, run.strategy.vae)


def clips_kept(run: Run) -> None:
    """Clips lie on the GPU as they were loaded, in fp32, and in 16 bits, which the VAE encodes: both are variables of
    the loop that stay until it takes the next batch (``batch["pixel_values"].to(weight_dtype)``). A model that sees
    its first image is given the masked clip and the mask as well (``mask_pixel_values``, ``mask``)."""
    if run.phases.encode is None or run.strategy.vae == "cached":
        return
    model = run.facts.model
    shown = RGB + (RGB + 1 if model.config["in_channels"] > model.vae.latent_channels else 0)
    values = shown * clip_pixels(run)
    clips = [
        run.add(run.phases.encode, nbytes * values, "batch", name, at=at)
        for at, (nbytes, name) in enumerate(((4, "clips as loaded"), (2, "clips in 16 bits")))
    ]
    run.leftovers = [*run.leftovers, *clips]  # not in place: a search's runs share the list
    for stage in (run.optimizer_first, run.optimizer):
        run.free(stage, clips)


def gradients_in_a_list(run: Run) -> None:
    """Gradients are listed before they are clipped, and the list is a variable of the loop: ``zero_grad`` frees none,
    and each lives until the next backward pass has made its own beside it (``trainable_params_grads``; not with
    DeepSpeed or FSDP)."""
    if not steps_by_itself(run):
        return
    listed = {
        buffer: run.new(run.sizes[buffer], "gradient", f"listed {name}")
        for name, buffer in run.named("gradient").items()
    }
    for stage in (run.optimizer_first, run.optimizer):
        # Its number is that of the next step's gradient, so it goes on under another, in the same place.
        stage.stretches = [
            (moment, [each for event in events for each in ((event, listed[~event]) if ~event in listed else (event,))])
            for moment, events in stage.stretches
        ]
    run.free(run.optimizer, listed.values(), at=0)


def second_transformer(run: Run) -> None:
    """Validation loads the transformer from disk again, copies what was trained into it and puts it on the GPU with
    every encoder that is not there (``log_validation``: ``from_pretrained_2d``, ``load_state_dict``,
    ``pipeline.to(weight_dtype, accelerator.device)``)."""
    if not run.phases.validation:
        return
    weights = run.total_bytes(run.named("weight").values())
    second = run.new(weights, "weight", "second transformer")
    away = run.new(component_bytes(run, "swapped") + component_bytes(run, "cached"), "residents", "encoders brought")
    run.place(run.phases.validation[0][1], [second, away], "second transformer", at=0)
    run.free(run.phases.validation[-1][1], [second, away])


def as_its_own_file(run: Run) -> None:
    """config/zero_stage2_config.json has ``overlap_comm``; where a launch names another file, that says it."""
    if run.facts.zero is None and run.strategy.sharding in ("zero-1", "zero-2"):
        run.facts = run.facts._replace(zero=ZeroSettings(overlap=True))


FIRST: tuple[Transform, ...] = (as_its_own_file,)
TERMS: tuple[Transform, ...] = (
    loaded_in_fp32,
    all_at_start,
    clips_kept,
    gradients_in_a_list,
    cache_emptied_between_swaps,
    second_transformer,
    cache_kept_while_sampling,
    bucket_as_backward_begins,  # c2a70d1 is of March 2025, when DeepSpeed was at 0.16
    share_comes_back_in_fp32,
)
