"""Host RAM that all ranks of a computer hold together: an anonymous file in RAM that each of them maps and pins.

Weights that are never trained are the same in every rank, so one copy is enough (vLLM holds its offloaded cache in the
same way: every worker registers one shared mapping with CUDA, vllm-project/vllm#50094). A file of `memfd_create` has no
name and no size limit, while containers have 64 MB of ``/dev/shm``, and the kernel frees it with the last process that
maps it, however that ends. The other ranks open it under ``/proc`` of the first one.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import VplanError
from planner.units import format_gib
from trainers.memory.pinned import pin

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

TOKEN_BYTES = 16
"""Random bytes that the file begins with: under ``/proc`` of another computer or container the same process id may have
another file."""

_numbers = itertools.count()
"""every rank makes its n-th file together with the others"""

_elsewhere = 0
"""see `counted_elsewhere`"""


def counted_elsewhere() -> int:
    """Bytes of this process's resident memory that count for the other ranks of its computer: all of them map the same
    bytes, and each is to count its part."""
    return _elsewhere


class SharedRam:
    """One file in RAM, from which the ranks of a computer take the same bytes in the same order."""

    def __init__(self, file: int, rank: int, ranks: int, store: Store, pinned: bool) -> None:
        self._file = file
        self._rank, self._ranks = rank, ranks
        self._store = store
        self._pinned = pinned
        self._end = mmap.ALLOCATIONGRANULARITY
        self._taken = 0
        """how often bytes were taken"""

    def take(self, nbytes: int) -> tuple[Tensor, bool]:
        """The next bytes of the file, and whether it is this rank that fills them: the ranks take turns. Raises a
        MemoryError if host RAM is too small."""
        global _elsewhere
        turn, self._taken = self._taken, self._taken + 1
        length = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        buffer = _mapped(self._file, self._end, length, self._pinned)[:nbytes]
        self._end += length
        _elsewhere += length - length // self._ranks
        return buffer, turn % self._ranks == self._rank

    def complete(self) -> None:
        """Waits until all ranks have filled their bytes. Nothing can be taken afterwards."""
        self._store.set(f"filled/{self._rank}", "")
        self._store.wait([f"filled/{rank}" for rank in range(self._ranks)])
        os.close(self._file)


def share_ram(device: torch.device) -> SharedRam | None:
    """A new file in RAM for the ranks of this computer; pinned if ``device`` is a GPU. All ranks call it together.

    None if a rank is alone there, or if one of them cannot map or pin the file (not on Linux; another user; another
    container): then each has to keep its own copy, which is said once.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks == 1 or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # some builds of torch lack it

    rank, pinned = int(os.environ["LOCAL_RANK"]), device.type == "cuda"
    first = dist.get_rank() - rank
    store = PrefixStore(f"vplan/host-ram/{first}/{next(_numbers)}", _get_default_store())
    file, fault = _opened(rank, store, pinned)
    store.set(f"fault/{rank}", fault)
    faults = [store.get(f"fault/{each}").decode() for each in range(ranks)]
    if not any(faults):
        assert file is not None
        return SharedRam(file, rank, ranks, store, pinned)
    if file is not None:
        os.close(file)
    if rank == 0:
        why = next(filter(None, faults))
        warnings.warn(f"the ranks cannot share host RAM, so each keeps its own swapped blocks: {why}", stacklevel=1)
    return None


def _opened(rank: int, store: Store, pinned: bool) -> tuple[int | None, str]:
    """The file that the first rank makes, open in this one, and mapped and pinned once for trial; or None and why
    not."""
    file = None
    try:
        if rank == 0:
            told = ""
            try:
                file = os.memfd_create("vplan-swapped-blocks")
                token = os.urandom(TOKEN_BYTES)
                os.pwrite(file, token, 0)
                told = f"/proc/{os.getpid()}/fd/{file} {token.hex()}"
            finally:
                store.set("file", told)
        elif told := store.get("file").decode():
            path, word = told.split()
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if os.pread(file, TOKEN_BYTES, 0).hex() != word:
                raise OSError(errno.ESTALE, "processes of this computer do not see each other")
        else:
            return None, "it has no file to map"
        _mapped(file, 0, mmap.ALLOCATIONGRANULARITY, pinned)
    except (AttributeError, OSError, MemoryError, VplanError) as error:
        if isinstance(error, MemoryError | VplanError):
            _forget_error_of_cuda()
        if file is not None:
            os.close(file)
        return None, str(error) or type(error).__name__
    return file, ""


def _mapped(file: int, start: int, length: int, pinned: bool) -> Tensor:
    """Bytes of the file as a tensor. The file grows if it ends before; that never cuts off what another rank added.

    All pages are mapped at once, as pinning does it. So they are resident in every rank from the start, also without a
    GPU (`counted_elsewhere`).
    """
    try:
        os.posix_fallocate(file, start, length)
        mapped = mmap.mmap(file, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=start)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.ENOSPC):
            raise
        raise MemoryError(f"there is no room for {format_gib(length)} of host RAM: {error.strerror}") from None
    if pinned:
        pin(buffer)
    return buffer


def _forget_error_of_cuda() -> None:
    """CUDA keeps an error of a registration until somebody asks, and torch would report it at its next kernel
    (vllm-project/vllm#51080)."""
    with contextlib.suppress(RuntimeError, AssertionError):  # the latter of a torch without CUDA
        torch.zeros(1, device="cuda")
