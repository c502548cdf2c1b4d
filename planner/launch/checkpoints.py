"""Checkpoints as files: what makes one whole, which is the newest, and which are let go. Nothing here reads a tensor.

A checkpoint is written aside, synced, and renamed when its manifest is in it, so a folder that is called `step-N` was
whole once. The manifest has the SHA-256 of every file: one that changed since is named and never loaded. It also names
the run that wrote it. A run takes up its own checkpoints only.
"""

from __future__ import annotations

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
from planner.worker_process import write_json

FORMAT = 1
MANIFEST = "manifest.json"
FOLDER = "checkpoints"
RUN = "run.json"
_NAME = re.compile(r"step-(\d{8})")


def folder_name(step: int) -> str:
    """The name of the folder of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def run_id(output: Path) -> str:
    """The id of the run in an output folder; a new one is made and written when there is none yet."""
    path = output / RUN
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        made = secrets.token_hex(16)
        write_json(path, {"id": made})
        return made
    except (OSError, ValueError, KeyError, TypeError):
        raise VplanError(f"{path} is damaged", "choose another --output") from None


def seal(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Makes a folder of written files a checkpoint: hashes, manifest, sync, and the rename that makes it count."""
    hashes = {path.name: sha256(path) for path in sorted(partial.iterdir())}
    write_json(partial / MANIFEST, {"format": FORMAT, **manifest, "sha256": hashes})
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    if final.exists():  # of a run that was taken up from before it
        remove(final)
    partial.rename(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk (fsync). Does nothing for folders on Windows."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
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
    """Removes a checkpoint; it is renamed first, so that half of one is never seen under its name."""
    gone = checkpoint.with_name(f".removed-{checkpoint.name}")
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def keep_newest(folder: Path, count: int) -> None:
    """Removes all but the last checkpoints, and what a killed run left half written or half removed."""
    for checkpoint in list(_all(folder))[count:]:
        remove(checkpoint)
    for rest in folder.glob(".*-step-*"):
        shutil.rmtree(rest, ignore_errors=True)


def _all(folder: Path) -> Iterator[Path]:
    """The checkpoints in a folder, newest first."""
    if folder.is_dir():
        yield from sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), reverse=True)


def check(checkpoint: Path, run: str) -> dict[str, Any]:
    """The manifest of a whole, unchanged checkpoint of this run; a VplanError says what is wrong with it."""
    name = f"checkpoint {quoted(checkpoint.name)}"
    fix = "choose another, or --resume auto for the newest complete one"
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        hashes = dict(manifest["sha256"])
        written_by = manifest["run"]
    except FileNotFoundError:
        raise VplanError(f"{name} is not a checkpoint: it has no {MANIFEST}", fix) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise VplanError(f"{name} has a damaged {MANIFEST}", fix) from None
    if manifest.get("format") != FORMAT:
        raise VplanError(f"{name} has format {quoted(manifest.get('format'))}; this vplan reads {FORMAT}", fix)
    if written_by != run:
        fault = f"{name} is from another run: optimizer states are never loaded from foreign files"
        raise VplanError(fault, "pass that run's own --output, or start over with --resume no")
    there = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    if missing := hashes.keys() - there:
        raise VplanError(f"{name} lacks {sorted(missing)[0]}", fix)
    if strange := there - hashes.keys():
        raise VplanError(f"{name} has {sorted(strange)[0]}, which does not belong to it", fix)
    for file, digest in hashes.items():
        if sha256(checkpoint / file) != digest:
            raise VplanError(f"{name}: {file} differs from what was written", fix)
    return dict(manifest)


def newest(output: Path, run: str) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and what is wrong with each newer one."""
    faults: list[str] = []
    for checkpoint in _all(output / FOLDER):
        try:
            check(checkpoint, run)
        except VplanError as error:
            faults.append(error.message)
        else:
            return checkpoint, faults
    return None, faults
