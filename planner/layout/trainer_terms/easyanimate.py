"""EasyAnimate, read at c2a70d1 (scripts/train.py). ``--low_vram`` is ``text_encoder`` and ``vae`` ``swapped``."""

from __future__ import annotations

from planner.layout.encoders_vae import component_bytes
from planner.layout.run import Run, Transform
from planner.layout.sharding.zero import bucket_as_backward_begins, share_comes_back_in_fp32
from planner.layout.trainer_terms.shared import cache_kept_while_sampling


def all_at_start(run: Run) -> None:
    """Whatever is swapped later stands on the GPU when training starts, beside the model and DDP's buckets
    (``vae.to(accelerator.device)``, ``text_encoder.to(accelerator.device)``)."""
    nbytes = component_bytes(run, "swapped")
    if nbytes:
        run.free(run.load, [run.add(run.load, nbytes, "residents", "encoders at the start")])


def cache_emptied_between_swaps(run: Run) -> None:
    """``--low_vram`` empties the allocator's cache before and behind each encoder's turn."""
    run.empty_cache.around_encode = "swapped" in (run.strategy.text_encoder, run.strategy.vae)


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


TERMS: tuple[Transform, ...] = (
    all_at_start,
    cache_emptied_between_swaps,
    second_transformer,
    cache_kept_while_sampling,
    bucket_as_backward_begins,  # c2a70d1 is of March 2025, when DeepSpeed was at 0.16
    share_comes_back_in_fp32,
)
