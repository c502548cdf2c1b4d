"""Checks, before anything is encoded, that the weights a run will load exist, are of the plan's model and complete.

Only the header of a safetensors file is read, which says where the last tensor ends: an incomplete download is found
in milliseconds instead of after hours of encoding.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from planner.catalog.diffusers_folder import CONFIG, ENCODERS
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError, quoted
from planner.spec.job import Job
from planner.spec.plan import Plan
from planner.untrusted import MAX_INDEX_BYTES, read_bytes

STEM = "diffusion_pytorch_model"
STEMS = (STEM, "model")
"""Base names of weight files in diffusers and in transformers."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

MAX_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library reads (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""
LENGTH_BYTES = 8
"""A file begins with the length of its header, little-endian (github.com/huggingface/safetensors, README, Format)."""
POINTER = b"version https://git-lfs"
"""First bytes of a pointer that Git LFS leaves in place of a file (git-lfs docs/spec.md, The Pointer)."""

AGAIN = "download the model again"


def check(plan: Plan, profile: ModelProfile, root: Path, *, denoiser: bool = True, encoders: bool = True) -> None:
    """Raises a VplanError for weights that a run of the plan could not load; reads no tensors. ``denoiser``,
    ``encoders``: whether the run loads the denoiser, and the text encoders and VAE, from ``root``. A hub name, which is
    not a folder, is not checked here: whatever downloads it does that."""
    if not root.is_dir():
        return
    which = ("high", "low") if plan.job.experts == "both" else (plan.job.experts,)
    for expert in which if denoiser else ():
        folder = model_folder(root, profile, plan.job.replace(experts=expert))
        check_architecture(folder, profile)
        for name in file_names(folder):
            check_file(folder / name)
    for part in ("vae", *ENCODERS) if encoders else ():
        if (root / part).is_dir():
            check_files(part_files(root, part))


def model_folder(root: Path, profile: ModelProfile, job: Job) -> Path:
    """The folder of the transformer or UNet in a pipeline's folder, or the folder itself.

    With two experts, ``transformer`` is for high noise and ``transformer_2`` for low (diffusers WanPipeline).
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise VplanError(f"there is no folder {quoted(str(root))}", "pass the model's folder: --weights FOLDER")
    part = profile.traits.part
    if profile.experts == 2 and job.experts == "low":
        part = f"{part}_2"
    for folder in (root / part, root):
        if (folder / CONFIG).is_file():
            return folder
    fault = f"{quoted(str(root))} holds neither config.json nor {part}/config.json"
    raise VplanError(fault, "pass a folder written by diffusers' save_pretrained")


def file_names(folder: Path) -> list[str]:
    """Names of a denoiser's safetensors files: the shards in its index, or its single file."""
    single, index = stored(folder, STEM, variant(folder))
    if index.is_file():
        try:
            names = sorted(set(json.loads(read_bytes(index, MAX_INDEX_BYTES))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise VplanError(f"{index} is damaged", AGAIN) from None
        if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise VplanError(f"{index} names {quoted(outside[0])}", "its shards belong beside it")
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise VplanError(f"{folder} lacks the shard {missing[0]}", AGAIN)
        return names
    if single.is_file():
        return [single.name]
    if any(path.suffix in PICKLES for path in folder.iterdir()):
        fault = f"{folder} has its weights only as pickles, which can run any code"
        raise VplanError(fault, "convert them: save_pretrained(..., safe_serialization=True)")
    raise VplanError(f"{folder} has no {single.name}", AGAIN)


def variant(folder: Path) -> str | None:
    """The variant of a part's weight files (``fp16`` for ``model.fp16.safetensors``); None if there are files with
    plain names, or not exactly one variant."""
    if any(path.is_file() for stem in STEMS for path in stored(folder, stem, None)):
        return None
    name = re.compile(rf"(?:{'|'.join(STEMS)})\.(?:(\w+)\.safetensors|safetensors\.index\.(\w+)\.json)")
    matches = [match for path in folder.iterdir() if (match := name.fullmatch(path.name))]
    found = {match[1] or match[2] for match in matches}
    return found.pop() if len(found) == 1 else None


def stored(folder: Path, stem: str, named: str | None) -> tuple[Path, Path]:
    """Paths of the single weight file and of the shard index for a variant (None: plain names)."""
    if named is None:
        return folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    return folder / f"{stem}.{named}.safetensors", folder / f"{stem}.safetensors.index.{named}.json"


def check_architecture(folder: Path, profile: ModelProfile) -> None:
    """Raises a VplanError unless the folder has the class and config that the plan was estimated for."""
    try:
        config = json.loads(read_bytes(folder / CONFIG))
        class_name = config.get("_class_name")
    except (OSError, ValueError, AttributeError):
        raise VplanError(f"{folder / CONFIG} is damaged", AGAIN) from None
    if class_name != profile.diffusers_class:
        fault = f"{folder} holds a {quoted(class_name)}, but {profile.name} is a {profile.diffusers_class}"
        fix = "pass the folder of the plan's model"
        if not any((place / "model_index.json").is_file() for place in (folder, folder.parent)):
            fix += " in diffusers format, with a model_index.json: often published under its name with -Diffusers"
        raise VplanError(fault, fix)
    for key, planned in profile.config.items():
        value = config.get(key, planned)
        if not _same(value, planned):
            fault = f"{folder} has {key} = {quoted(value)}, but {profile.name} has {quoted(planned)}"
            raise VplanError(fault, f"record it and plan for it: vplan record {quoted(str(folder))}")


def _same(one: Any, other: Any) -> bool:
    """Whether two config values are equal; floats approximately, and a list equals a tuple."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)


def part_files(root: Path, part: str) -> Iterator[Path]:
    """Weight files of an encoder or VAE in a pipeline's folder: its single file, or its index and every shard."""
    folder = root / part
    named = variant(folder)
    for stem in STEMS:
        single, index = stored(folder, stem, named)
        if single.is_file():
            yield single
            return
        if index.is_file():
            yield index
            yield from _shards(root, part, index)
            return
    if any(path.suffix in PICKLES for path in folder.iterdir()):
        fix = "convert them: load the model and save_pretrained(..., safe_serialization=True)"
        raise VplanError(f"{part}/ of {root.name} has its weights only as pickles, which are never loaded", fix)
    names = " or ".join(f"{stem}.safetensors" for stem in STEMS)
    raise VplanError(f"{part}/ of {root.name} has no weights ({names})", AGAIN)


def _shards(root: Path, part: str, index: Path) -> Iterator[Path]:
    try:
        names = sorted(set(json.loads(read_bytes(index, MAX_INDEX_BYTES))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise VplanError(f"{part}/{index.name} of {root.name} is damaged", "download the file again") from None
    for name in names:
        # The index comes from a download: a name in it must not lead out of the folder, nor to a pickle.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise VplanError(f"{part}/{index.name} of {root.name} names {quoted(name)} as a shard", "download it again")
        if not (index.parent / name).is_file():
            raise VplanError(
                f"{part}/{name} of {root.name} is missing: weights are incomplete", "download the file again"
            )
        yield index.parent / name


def check_files(files: Iterable[Path]) -> None:
    """Raises a VplanError for the first incomplete safetensors file; other files, such as an index, are skipped."""
    for path in files:
        if path.suffix == ".safetensors":
            check_file(path)


def check_file(path: Path) -> None:
    """Raises a VplanError for a safetensors file that is longer or shorter than its header says. No tensor is read."""
    try:
        size = path.stat().st_size
        expected = _expected(path, size)
    except OSError as error:
        raise VplanError(f"cannot read {path}: {error.strerror}", AGAIN) from None
    if expected is None:
        raise VplanError(f"{path} is a pointer of Git LFS, without the weights", f"git lfs pull, or {AGAIN}")
    if expected < 0:
        raise VplanError(f"{path} is damaged: its header cannot be read", AGAIN)
    if size != expected:
        raise VplanError(f"{path} is damaged: it has {size:,} bytes, not the {expected:,} of its header", AGAIN)


def _expected(path: Path, size: int) -> int | None:
    """The file size in bytes according to its header; -1 for an unreadable header, None for a Git LFS pointer."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            return None
        file.seek(0)
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        text = file.read(length) if length <= min(size, MAX_HEADER_BYTES) else b""
    try:
        ends = [tensor["data_offsets"][1] for name, tensor in json.loads(text).items() if name != "__metadata__"]
        return LENGTH_BYTES + length + max([0, *map(int, ends)])
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return -1
