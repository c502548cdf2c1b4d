"""Hugging Face repositories that can be stood in for: which files they have, from `profiles/checkpoints`."""

# No `from __future__ import annotations` here: pydantic would compile every field's annotation again at each start.
import functools
import json
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from planner.catalog import lookup
from planner.catalog.profiles import ModelProfile
from planner.rehearsal.hollow.published_checkpoints import (
    FOLDER,
    REPOSITORIES,
    PublishedCheckpoint,
    published_checkpoints,
)
from planner.rehearsal.hollow.tokenizer_files import TokenizerKind
from planner.schema import Record
from planner.spec.job import FloatDtype

REVISION = "0" * 40
"""The commit under which a hollow repository lies in a cache."""


class HollowRepository(Record):
    """What a repository holds. Keys are paths in it."""

    source: str
    profile: str | None = None
    pipeline: str | None = None
    dtype: FloatDtype = "fp32"
    """of its models"""
    files: dict[str, str] = {}
    """file to a published checkpoint"""
    models: dict[str, str] = {}
    """folder to `denoiser`, `vae`, or the name of an encoder"""
    configs: dict[str, dict[str, Any]] = {}
    """JSON file to what it says"""
    tokenizers: dict[str, TokenizerKind] = {}
    absent: tuple[str, ...] = ()
    """parts that the pipeline's class asks for, and that are left out"""
    image_processor: str | None = None
    """folder of CLIP's"""
    scheduler: dict[str, Any] = {}


class _RepositoryFile(Record):
    repositories: dict[str, HollowRepository]


class ModelClass(NamedTuple):
    """A model as its library builds it."""

    library: str
    """diffusers or transformers"""
    class_name: str
    config: dict[str, Any]

    @property
    def stem(self) -> str:
        """How its weights' files are called."""
        return "model" if self.library == "transformers" else "diffusion_pytorch_model"

    @property
    def most_shard_bytes(self) -> int:
        """The size at which `save_pretrained` cuts (MAX_SHARD_SIZE of diffusers, max_shard_size of transformers 4)."""
        return 5 * 10**9 if self.library == "transformers" else 10**10


@functools.cache
def repositories() -> dict[str, HollowRepository]:
    """All that we know, by their ids on the hub."""
    data = tomllib.loads((FOLDER / REPOSITORIES).read_text(encoding="utf-8"))
    return _RepositoryFile.read(data, where=f"profile {REPOSITORIES} is damaged").repositories


def models_of(repository: HollowRepository) -> dict[str, ModelClass]:
    """The models of a pipeline, by folder."""
    if repository.profile is None:
        return {}
    profile = lookup.model(repository.profile)
    return {folder: _model(profile, part) for folder, part in repository.models.items()}


def _model(profile: ModelProfile, part: str) -> ModelClass:
    if part == "denoiser":
        return ModelClass("diffusers", profile.diffusers_class, profile.config)
    if part == "vae":
        return ModelClass("diffusers", profile.vae.class_name, profile.vae.config)
    (encoder,) = (encoder for encoder in profile.text_encoders if encoder.name == part)
    return ModelClass("transformers", encoder.class_name, encoder.config)


def published_encoder(part: str, model: ModelClass) -> PublishedCheckpoint | None:
    """An encoder whose tensors are listed in `profiles/checkpoints`: transformers has renamed some since, and reads
    the published names in all versions. The files listed have no projection behind the encoder."""
    checkpoint = published_checkpoints().get(part)
    if checkpoint is None or not checkpoint.layout.is_transformers or model.class_name.endswith("WithProjection"):
        return None
    return checkpoint


def write_pipeline_files(root: Path, repository: HollowRepository) -> None:
    """The small files of a pipeline: what it is made of, its scheduler, its image processor."""
    index: dict[str, Any] = {"_class_name": repository.pipeline, "_diffusers_version": "0.35.0"}
    index |= {folder: [model.library, model.class_name] for folder, model in models_of(repository).items()}
    classes = {"clip": "CLIPTokenizer", "t5": "T5TokenizerFast", "umt5": "T5TokenizerFast"}
    index |= {folder: ["transformers", classes[kind]] for folder, kind in repository.tokenizers.items()}
    index |= {part: [None, None] for part in repository.absent}
    index["scheduler"] = ["diffusers", repository.scheduler["_class_name"]]
    write_json(root / "scheduler" / "scheduler_config.json", repository.scheduler)
    if repository.image_processor:
        index[repository.image_processor] = ["transformers", "CLIPImageProcessor"]
        processor = {"image_processor_type": "CLIPImageProcessor"}  # and its defaults, which are CLIP's
        write_json(root / repository.image_processor / "preprocessor_config.json", processor)
    write_json(root / "model_index.json", index)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A small file of a repository; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
