"""What musubi-tuner's commands and datasets ask for beside what is priced, read at 30c658c."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, Settings
from planner.dialects.base.values import as_list, integer
from planner.dialects.musubi_tuner.datasets import dataset_key
from planner.dialects.musubi_tuner.models import model_of
from planner.dialects.musubi_tuner.network_modules import kind_of
from planner.errors import VplanError


def refuse_unpriced(settings: Settings) -> None:
    """Raises a VplanError for adapters that are not priced (LyCORIS' own), for a rank that is in a file alone, and for
    control images of another size than the samples' (dataset/image_video_dataset.py ``control_resolution``)."""
    kind_of(settings)
    if settings.get("--dim_from_weights") and not settings.get("--network_dim"):
        fault = "--dim_from_weights is not priced without --network_dim (the rank is that of a file)"
        raise VplanError(fault, "add --network_dim with the file's rank")
    given = dataset_key(settings, "control_resolution")
    own = dataset_key(settings, "resolution")
    if given and own and _pixels(given) != _pixels(own):
        fault = "control_resolution is not priced (control images of another size than the samples')"
        raise VplanError(fault, f"check it with control_resolution = {own}")


def _pixels(size: Any) -> int:
    sides = as_list(size)
    return integer(sides[0], "resolution") * integer(sides[-1], "resolution")


def references_of(settings: Settings) -> Fields:
    """One image beside each of a dataset with control images, for a model that may take some (FLUX.2,
    flux_2_train_network.py ``latents_control_0``); as many as a model always takes, of the others."""
    takes_some = lookup.model(model_of(settings)["model"]).shape.takes_references
    has_some = any(name.startswith("dataset:") and name.endswith(".control_directory") for name in settings)
    return {"references": 1 if takes_some and has_some else None}


def notes(settings: Settings, fields: Fields) -> Iterator[str]:
    """What of the commands is not estimated, in words."""
    given = [str(word) for word in as_list(settings.get("--network_args") or [])]
    for key, what in (("exclude_patterns", "fewer"), ("include_patterns", "more")):
        if any(word.startswith(key) and "ffn" not in word for word in given):
            yield f"{key} gives {what} layers an adapter than are estimated"
    if any(word.startswith("conv_dim") for word in given):
        yield "conv_dim: adapters on 3x3 convolutions are not estimated"
    if settings.get("--block_swap_h2d_only"):
        ring = integer(settings.get("--block_swap_ring_size", 2), "--block_swap_ring_size")
        yield f"--block_swap_h2d_only holds a ring of {ring} blocks more than is counted"
    if fields["references"]:
        yield "control_directory: one control image for each sample, of its size, is estimated"
