"""A folder of encoded samples that survives a kill, as files are whole or absent; and remembered hashes of files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from planner.errors import VplanError, quoted
from planner.file_writing import lock_file

STALE_SECONDS = 3600.0
"""Age at which a half-written file is taken to be abandoned: writing one takes seconds."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


CHECKSUM = "crc32"
"""Entry of a file's metadata. It detects faulty disks and copies, not tampering."""


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of the names, dtypes, shapes and values of tensors on the CPU."""
    value = 0
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        value = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), value)
        values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        value = zlib.crc32(values, value)
    return f"{value:08x}"


class Store:
    """The cache of encoded samples: safetensors files by key (`ab/abcd....safetensors`). Numbered files are the outputs
    of earlier encoders' turns, for later turns to read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with as_cache_fault(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str, turn: int | None = None) -> Path:
        """The file of a sample (or of one encoder's turn over it); it need not exist."""
        return self.folder / key[:2] / (f"{key}.safetensors" if turn is None else f"{key}.{turn}.safetensors")

    def has(self, key: str, turn: int | None = None) -> bool:
        """Whether a sample is stored in full: a file that is shorter than its header says counts as absent, and is
        encoded again."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path(key, turn), framework="pt"):
                return True
        except (FileNotFoundError, SafetensorError):
            return False

    def load(self, key: str, turn: int | None = None) -> dict[str, Tensor]:
        """The tensors of a cached sample by name, on the CPU. Raises FileNotFoundError when it is not cached."""
        from safetensors.torch import load_file

        return load_file(self.path(key, turn))

    def save(self, key: str, tensors: Mapping[str, Tensor], turn: int | None = None) -> int:
        """Writes a sample aside, syncs it and renames it; returns its bytes. A failed write leaves nothing behind.

        The folder is not synced: a power cut may undo the renaming, and then the sample is encoded again.
        """
        from safetensors.torch import save

        data = save(dict(tensors), {CHECKSUM: checksum(tensors)})
        path = self.path(key, turn)
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        with as_cache_fault(self.folder):
            path.parent.mkdir(exist_ok=True)
            try:
                with aside.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                # Renamed only after the sync: a power cut must not leave incomplete content under the final name.
                os.replace(aside, path)
            except OSError:
                aside.unlink(missing_ok=True)
                raise
        return len(data)

    def drop_turns(self, key: str, turns: int) -> None:
        """Deletes the outputs of the first `turns` turns over a sample."""
        for turn in range(turns):
            self.path(key, turn).unlink(missing_ok=True)

    def fault(self, key: str) -> str | None:
        """Why a sample could not be encoded, if a run with `skip_bad` has marked it; else None."""
        with contextlib.suppress(FileNotFoundError):
            return self.path(key).with_suffix(".bad").read_text(encoding="utf-8")
        return None

    def mark(self, key: str, reason: str) -> None:
        """Remembers why a sample could not be encoded, for the other ranks and the next run."""
        with as_cache_fault(self.folder):
            self.path(key).parent.mkdir(exist_ok=True)
            self.path(key).with_suffix(".bad").write_text(reason, encoding="utf-8")

    def sweep(self) -> None:
        """Deletes half-written files of killed runs, once they are older than `STALE_SECONDS`."""
        before = time.time() - STALE_SECONDS
        for path in self.folder.glob("*/*.part"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()


class BackgroundWriter:
    """Saves samples to a store while the next ones are encoded. Leaving its context waits until all are written. An
    error is raised by a later `save`, or on leaving."""

    THREADS = 4
    """Threads that write and sync at the same time: a file system flushes for several at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(self.THREADS, "vplan-writer")
        self._pending: deque[Future[int]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._pool:
            while self._pending and kind is None:
                self._pending.popleft().result()

    def save(
        self, key: str, tensors: Mapping[str, Tensor], turn: int | None = None, drop_turns: int = 0
    ) -> Future[int]:
        """Saves a sample, or one turn's output for it, then deletes the outputs of the first ``drop_turns`` turns. The
        future gives the file's bytes when it is written."""
        while len(self._pending) > 2 * self.THREADS or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()

        def write() -> int:
            nbytes = self._store.save(key, tensors, turn)
            self._store.drop_turns(key, drop_turns)
            return nbytes

        self._pending.append(self._pool.submit(write))
        return self._pending[-1]


class Digests:
    """Hashes of files, remembered by path, size and modification time, so that large files are read once.

    Each rank appends to its own file. A line cut short by a kill is ignored.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.file = folder, folder / f"digests-{rank}.jsonl"
        self._digests: dict[tuple[str, int, int], str] = {}
        self.read()

    def read(self) -> None:
        """Reads the hashes that this rank and all others have written."""
        for file in sorted(self.folder.glob("digests-*.jsonl")):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    self._digests[row["file"], row["bytes"], row["changed_ns"]] = row["sha256"]

    def of(self, path: Path) -> str:
        """The SHA-256 of a file's content. Raises a VplanError if it cannot be read."""
        try:
            real = os.path.realpath(path, strict=True)
            status = os.stat(real)
            key = (real, status.st_size, status.st_mtime_ns)
            if key not in self._digests:
                with open(real, "rb") as file:
                    self._digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
                row = {"file": key[0], "bytes": key[1], "changed_ns": key[2], "sha256": self._digests[key]}
                with as_cache_fault(self.folder), self.file.open("a", encoding="utf-8") as memory:
                    memory.write("\n" + json.dumps(row))  # newline first, so that a line cut short spoils only itself
        except OSError as error:
            fix = "check that it exists and is readable"
            raise VplanError(f"cannot read {quoted(str(path))}: {error.strerror}", fix) from None
        return self._digests[key]


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """A context that only one of the processes that share a folder is in at a time. The lock is the kernel's (flock)
    and is released when its process ends."""
    with (folder / ".turn").open("w") as file:
        lock_file(file.fileno())  # without locks they run at once, which only takes more memory
        yield


@contextlib.contextmanager
def as_cache_fault(folder: Path) -> Iterator[None]:
    """A context that turns an OSError of the disk into a VplanError. The cache so far is kept, and the next run
    continues from it."""
    try:
        yield
    except OSError as error:
        fault = "the disk is full" if error.errno in NO_ROOM else str(error.strerror)
        fix = "free some space, or choose another folder; the cache so far is kept and reused"
        raise VplanError(f"cannot write to the cache {folder}: {fault}", fix, exit_code=4) from None
