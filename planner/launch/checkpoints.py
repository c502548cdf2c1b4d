"""Checkpoint files: validating them, finding the newest, pruning old ones. Nothing here reads a tensor.

A checkpoint is written under another name, synced, and renamed once its manifest is in it, so a folder `step-N` was
complete at some time. The manifest has the SHA-256 of every file: a checkpoint with a changed file is refused, and the
file named. It also names the run that wrote it, and a run resumes only from its own checkpoints.

Older checkpoints lose their training state but keep their LoRA files, as it only turns out later which one is best.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import VplanError, quoted
from planner.untrusted import read_bytes
from planner.worker_process import write_json

FORMAT, READABLE = 2, (1, 2)
"""The format written, and those that can be resumed from (format 1: only states that are not sharded)."""
MANIFEST = "manifest.json"
FOLDER = "checkpoints"
ASIDE = "checkpoints.before"
RUN = "run.json"
DIFFUSERS_LORA = "pytorch_lora_weights.safetensors"
"""The name that pipelines look for (diffusers loaders.lora_base)."""
COMFYUI_LORA = "comfyui_lora.safetensors"
LORA_FILES = (DIFFUSERS_LORA, COMFYUI_LORA)
"""The files that stay when a checkpoint's training state is pruned."""
PRUNED = "pruned"
"""Manifest entry of a checkpoint whose training state was pruned."""
HAS: dict[str, type] = {"format": int, "step": int, "position": dict, "layout": dict}
"""Manifest entries that resuming needs, besides the hashes and the run id, and their types."""
MAX_MANIFEST_BYTES = 64 << 20
_NAME = re.compile(r"step-(\d{8})")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint."""
    content: dict[str, Any] = json.loads(read_bytes(checkpoint / MANIFEST, MAX_MANIFEST_BYTES))
    return content


def folder_name(step: int) -> str:
    """The name of the folder of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The number of steps in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step-"))


def run_id(output: Path) -> str:
    """The id of the run in an output folder. If its file is missing or damaged, it is rewritten with the id in the
    folder's checkpoints, or with a new id if there are none. Raises a VplanError if they have several ids."""
    path = output / RUN
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        found = json.loads(read_bytes(path, MAX_MANIFEST_BYTES))["id"]
        if isinstance(found, str) and found:
            return found
    manifests = filter(None, map(_manifest, _all(output / FOLDER)))
    named = {name for manifest in manifests if isinstance(name := manifest.get("run"), str)}
    if len(named) > 1:
        fault = f"{path} is damaged, and the checkpoints beside it are of several runs"
        raise VplanError(fault, f"move those of other runs out of {output / FOLDER}, or choose another --output")
    made = named.pop() if named else secrets.token_hex(16)
    try:
        write_json(path, {"id": made})
    except OSError as error:
        raise VplanError(f"cannot write {path}: {error.strerror}", "choose another --output") from None
    return made


def seal(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Turns a folder of written files into a checkpoint: adds hashes and manifest, syncs, and renames it to `final`."""
    hashes = {name: sha256(path) for name, path in _files(partial).items()}
    write_json(partial / MANIFEST, {"format": FORMAT, **manifest, "sha256": hashes})
    for path in partial.rglob("*"):
        sync(path)
    sync(partial)
    if final.exists():  # the run was resumed from an earlier step
        remove(final)
    partial.rename(final)
    sync(final.parent)


def _files(checkpoint: Path) -> dict[str, Path]:
    """A checkpoint's files by relative path with forward slashes, without the manifest."""
    paths = sorted(path for path in checkpoint.rglob("*") if not path.is_dir())
    names = {path.relative_to(checkpoint).as_posix(): path for path in paths}
    return {name: path for name, path in names.items() if name != MANIFEST}


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk (fsync). Does nothing for folders on Windows."""
    if path.is_dir() and os.name == "nt":  # where folders cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(checkpoint: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a half-removed one never has a checkpoint's name."""
    gone = checkpoint.with_name(f".removed-{checkpoint.name}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def prune(checkpoint: Path) -> None:
    """Removes a checkpoint's training state; the whole checkpoint if it has no LoRA files, as in full training. The
    manifest is marked first, so that after a kill nothing resumes from what is left."""
    files = _files(checkpoint)
    lora = {name: path for name, path in files.items() if path.name in LORA_FILES}
    if not lora:
        remove(checkpoint)
        return
    manifest = _manifest(checkpoint)
    if manifest is None or not manifest.get(PRUNED):
        hashes = {name: sha256(path) for name, path in lora.items()}
        write_json(checkpoint / MANIFEST, {**(manifest or {}), PRUNED: True, "sha256": hashes})
        sync(checkpoint)
    for name in files.keys() - lora.keys():
        files[name].unlink()
    for folder in {files[name].parent for name in files.keys() - lora.keys()} - {checkpoint}:
        if not any(folder.iterdir()):
            folder.rmdir()


def keep_newest(folder: Path, count: int) -> None:
    """Prunes all but the ``count`` newest checkpoints, and deletes half-written and half-removed leftovers."""
    pruned = [checkpoint for checkpoint in _all(folder) if _is_pruned(checkpoint)]
    for checkpoint in [*pruned, *list(_resumable(folder))[count:]]:
        prune(checkpoint)
    for rest in folder.glob(".*-step-*"):
        shutil.rmtree(rest, ignore_errors=True)


def branch_off(output: Path, checkpoint: Path) -> tuple[Path, Path | None]:
    """Makes a checkpoint of this run its newest, so that resuming from the newest resumes from it. Checkpoints of later
    steps belong to another branch and are moved aside. A checkpoint in another folder (one that was moved aside) is
    copied here, and all that are here are moved aside.

    Returns the checkpoint's folder in this run, and the folder of those moved aside; None if there are none.
    """
    folder = output / FOLDER
    is_here = checkpoint.resolve().parent == folder.resolve()
    others = [other for other in _all(folder) if not is_here or step_of(other) > step_of(checkpoint)]
    place = aside(output) if others else None
    if place:
        place.mkdir()
        for other in others:
            other.rename(place / other.name)
        sync(place)
    if is_here:
        return folder / checkpoint.name, place
    partial = folder / f".partial-{checkpoint.name}"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(checkpoint, partial)
    for path in (*partial.rglob("*"), partial):
        sync(path)
    partial.rename(folder / checkpoint.name)
    sync(folder)
    return folder / checkpoint.name, place


def aside(output: Path) -> Path:
    """A path, not in use yet, for a folder of checkpoints that are moved aside."""
    return next(path for n in range(10**6) if not (path := output / f"{ASIDE}-{n}").exists())


def _all(folder: Path) -> Iterator[Path]:
    """The checkpoints in a folder, newest first."""
    if folder.is_dir():
        yield from sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def _manifest(checkpoint: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest; None if it is missing or unreadable."""
    try:
        read = json.loads(read_bytes(checkpoint / MANIFEST, MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def _is_pruned(checkpoint: Path) -> bool:
    return bool((_manifest(checkpoint) or {}).get(PRUNED))


def _resumable(folder: Path) -> Iterator[Path]:
    """The checkpoints in a folder that are not marked as pruned, newest first; they may be damaged."""
    yield from (checkpoint for checkpoint in _all(folder) if not _is_pruned(checkpoint))


def check(checkpoint: Path, run: str) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises a VplanError if it is incomplete, changed, pruned or of another run."""
    name = f"checkpoint {quoted(checkpoint.name)}"
    fix = "choose another, or --resume auto for the newest complete one"
    try:
        manifest = read_manifest(checkpoint)
        hashes = {str(file): str(digest) for file, digest in manifest["sha256"].items()}
        written_by = manifest["run"]
        whole = manifest.get(PRUNED) or (
            all(isinstance(manifest[key], kind) for key, kind in HAS.items()) and "steps" in manifest["position"]
        )
    except FileNotFoundError:
        raise VplanError(f"{name} is not a checkpoint: it has no {MANIFEST}", fix) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise VplanError(f"{name} has a damaged {MANIFEST}", fix)
    if manifest.get("format") not in READABLE:
        raise VplanError(f"{name} has format {quoted(manifest.get('format'))}; this vplan reads {FORMAT}", fix)
    if written_by != run:
        fault = f"{name} is from another run: optimizer states are never loaded from foreign files"
        raise VplanError(fault, "pass that run's own --output, or start over with --resume no")
    if manifest.get(PRUNED):
        fault = f"{name} has its LoRA files alone: its training state is pruned"
        raise VplanError(fault, "resume from a newer one; --keep-checkpoints N keeps the states of the last N")
    there = _files(checkpoint).keys()
    if missing := hashes.keys() - there:
        raise VplanError(f"{name} lacks {sorted(missing)[0]}", fix)
    if strange := there - hashes.keys():
        raise VplanError(f"{name} has {sorted(strange)[0]}, which does not belong to it", fix)
    for file, digest in hashes.items():
        if sha256(checkpoint / file) != digest:
            raise VplanError(f"{name}: {file} differs from what was written", fix)
    return dict(manifest)


def manifest_of(output: Path, checkpoint: Path | None) -> dict[str, Any] | None:
    """The manifest of a checkpoint, else of the newest readable one of a run; None if there is none. Not validated."""
    if checkpoint is not None:
        return _manifest(checkpoint)
    return next(filter(None, map(_manifest, _resumable(output / FOLDER))), None)


def newest(output: Path, run: str) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint of a run (None: there is none), and what is wrong with each newer one."""
    faults: list[str] = []
    for checkpoint in _resumable(output / FOLDER):
        try:
            check(checkpoint, run)
        except VplanError as error:
            faults.append(error.message)
        else:
            return checkpoint, faults
    return None, faults
