"""VideoX-Fun, EasyAnimate's successor, read at 804a425 (scripts/<model>/train.py): its flags, and FSDP.

Encoders start in host RAM, and validation uses the live transformer.
"""

from __future__ import annotations

from planner.layout.run import Run, Transform
from planner.layout.sharding.zero import bucket_as_backward_begins
from planner.layout.trainer_terms.easyanimate import (
    as_its_own_file,
    cache_emptied_between_swaps,
    clips_kept,
    gradients_in_a_list,
)
from planner.layout.trainer_terms.shared import cache_kept_while_sampling, filled_in_fp32


def loaded_on_the_cpu(run: Run) -> None:
    """Most of its models have a ``from_pretrained`` of their own (videox_fun/models), which scripts call without
    ``low_cpu_mem_usage``; FLUX.1's is diffusers', and LTX-2's scripts pass that option. Wan's text encoder is a
    ``.pth`` file, read whole before (``torch.load`` without ``mmap``)."""
    model = run.facts.model
    if not model.trained_with("videox-fun", "loaded-as-trained"):
        filled_in_fp32(run)
    run.host.encoders_loaded = "read" if model.trained_with("videox-fun", "text-encoder-read") else "mapped"


def gradients_of_full_training(run: Run) -> None:
    """Its `train.py` lists gradients as EasyAnimate's does, and `train_lora.py` does not."""
    if run.job.method == "full":
        gradients_in_a_list(run)


FIRST: tuple[Transform, ...] = (as_its_own_file,)
TERMS: tuple[Transform, ...] = (
    loaded_on_the_cpu,
    cache_emptied_between_swaps,
    clips_kept,
    gradients_of_full_training,
    cache_kept_while_sampling,
    bucket_as_backward_begins,
)
"""The last: scripts/*/README_TRAIN.md install DeepSpeed 0.17.0."""
