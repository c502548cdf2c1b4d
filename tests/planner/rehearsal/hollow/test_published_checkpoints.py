"""Names and shapes of published checkpoints are those of the real files."""

from __future__ import annotations

import hashlib

import pytest

from planner.catalog import lookup
from planner.rehearsal.hollow.published_checkpoints import PublishedCheckpoint, published_checkpoints
from planner.rehearsal.hollow.repositories import models_of, repositories

CHECKPOINTS = published_checkpoints()

PARAMETERS = {"flux1-dev": 11_901_408_320, "wan2.1-t2v-1.3b": 1_418_996_800, "wan2.1-i2v-14b": 16_394_878_784}
"""As counted on the meta device from the classes of diffusers, which name them otherwise."""


def digest(checkpoint: PublishedCheckpoint) -> str:
    """As DiffSynth-Studio computes it to recognise a file (diffsynth/core/loader/file.py, hash_model_file)."""
    entries = checkpoint.tensors()
    keys = [f"{entry.name}:{'_'.join(map(str, entry.shape))}" for entry in entries] + [entry.name for entry in entries]
    return hashlib.md5(",".join(sorted(keys)).encode()).hexdigest()


@pytest.mark.parametrize("name", [name for name, checkpoint in CHECKPOINTS.items() if checkpoint.variant.md5])
def test_names_and_shapes_are_those_of_the_published_file(name: str) -> None:
    assert digest(CHECKPOINTS[name]) == CHECKPOINTS[name].variant.md5


def test_most_checkpoints_have_been_compared_with_their_file() -> None:
    assert sorted(name for name, checkpoint in CHECKPOINTS.items() if not checkpoint.variant.md5) == [
        "flux1-schnell",
        "wan2.2-t2v-a14b",
    ]


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_they_have_as_many_parameters_as_the_model(name: str) -> None:
    tensors = CHECKPOINTS[name].tensors("fp8")
    assert sum(tensor.size_bytes for tensor in tensors) == PARAMETERS[name]


def test_every_repository_can_be_made() -> None:
    for name, repository in repositories().items():
        assert set(repository.files.values()) <= set(CHECKPOINTS), name
        is_part = "." in repository.models  # a VAE's own repository is not the model
        assert repository.profile is None or is_part or name in lookup.model(repository.profile).aliases
        assert set(models_of(repository)) == set(repository.models)
        assert bool(repository.pipeline) == bool(repository.scheduler)
