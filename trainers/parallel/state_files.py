"""The files of a training state: every rank's shares of tensors as safetensors, and what is no tensor as JSON.

The form is that of torch's distributed checkpoints in safetensors (``HuggingFaceStorageWriter``, ``save_distributed``):
a file's metadata says where in the whole tensor each of its shares begins. torch reads it, and cuts the shares anew for
any number of ranks. Its writer is not used: it puts a whole file together in RAM before it writes (filesystem.py,
``_write_files_from_queue``), and its ranks exchange their plans.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from planner.estimate.host_ram import STATE_FILE_BYTES
from trainers.step.weights import BEGINS, SHARDING_INFO

STATE, OUTLINE = "state", "outline.json"
Outline = Any
"""A nested state as JSON: its numbers, and in the place of each tensor a `Leaf`."""


class Share(NamedTuple):
    """A part of a tensor of the state. All ranks' shares of a key together are the whole."""

    key: str
    values: Tensor
    """on whatever device"""
    begin: tuple[int, ...]
    """the indices of its first element in the whole"""
    is_copy: bool = False
    """whether nothing else changes its values"""

    def copied(self) -> Share:
        """The same with values of its own in host RAM."""
        if self.is_copy:
            return self
        copy = torch.empty(self.values.shape, dtype=self.values.dtype)
        return self._replace(values=copy.copy_(self.values.detach()), is_copy=True)


class FlatRun(NamedTuple):
    """In a state: a run of a tensor's elements in their order, which is how DeepSpeed splits."""

    values: Tensor
    """(elements,)"""
    begin: int
    is_copy: bool = False


class Own(NamedTuple):
    """In a state: a tensor that means nothing to other ranks."""

    values: Tensor
    is_copy: bool = False


def taken_apart(state: Any, rank: int) -> tuple[Outline, list[Share]]:
    """The outline of a nested state and this rank's shares of its tensors. What is not split is rank 0's share.

    ``state``: dicts, lists, numbers and texts, with tensors (alike on all ranks), DTensors, `FlatRun` or `Own` in it.
    """
    shares: list[Share] = []

    def walk(value: Any, path: str) -> Outline:
        if isinstance(value, FlatRun):  # found by the engine again, which knows what it has of each
            shares.append(Share(path, value.values, (value.begin,), value.is_copy))
            return None
        if isinstance(value, Own):
            shares.append(Share(_own(path, rank), value.values, (0,) * value.values.ndim, value.is_copy))
            return _leaf(path, value.values, own=True)
        if isinstance(value, Tensor):
            shares.extend(share_of(path, value, rank))
            return _leaf(path, value, split=_is_split(value))
        if isinstance(value, Mapping):  # keys are numbers or texts, which JSON does not tell apart
            return {"dict": [[key, walk(inner, f"{path}/{key}")] for key, inner in value.items()]}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return {"list": [walk(inner, f"{path}/{number}") for number, inner in enumerate(value)]}
        assert value is None or isinstance(value, bool | int | float | str), (path, type(value))
        return value

    return walk(state, "optimizer"), shares


def share_of(key: str, value: Tensor, rank: int) -> list[Share]:
    """A rank's share of a tensor, where it has one. Whole ones are alike on all ranks and rank 0's, and so are several
    copies of what is split those of the first."""
    if not _is_split(value):
        return [Share(key, value, (0,) * value.ndim)] if rank == 0 else []
    assert isinstance(value, DTensor)
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None
    if any(at for at, place in zip(coordinate, value.placements, strict=True) if place.is_replicate()):
        return []
    (chunk,), local = value.__create_chunk_list__(), value.to_local()
    return [Share(key, local, tuple(chunk.offsets))] if local.numel() else []


def _is_split(value: Tensor) -> bool:
    return isinstance(value, DTensor) and not all(place.is_replicate() for place in value.placements)


def _own(path: str, rank: int) -> str:
    return f"rank {rank}/{path}"


def _leaf(path: str, value: Tensor, **kind: bool) -> Outline:
    dtype = str(value.dtype).removeprefix("torch.")
    return {"tensor": path, "shape": list(value.shape), "dtype": dtype, **kind}


def files_of(shares: list[Share]) -> Iterator[list[Share]]:
    """The shares, emptied from the list, file by file: each is as large as `STATE_FILE_BYTES`, or one share. So their
    copies are let go one file after another."""
    shares.reverse()
    while shares:
        file, nbytes = [shares.pop()], 0
        nbytes = file[0].values.nbytes
        while shares and nbytes + shares[-1].values.nbytes <= STATE_FILE_BYTES:
            file.append(shares.pop())
            nbytes += file[-1].values.nbytes
        yield file


def write_shares(path: Path, shares: list[Share]) -> None:
    """Writes shares, copies in host RAM, as one file."""
    begins = {share.key: {BEGINS: list(share.begin)} for share in shares}
    metadata = {SHARDING_INFO: json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({share.key: share.values for share in shares}, path, metadata=metadata)


class SplitTensor(Tensor):
    """Room for a run of the elements of a larger tensor: torch's protocol for objects that a distributed checkpoint is
    read into (torch.distributed._checkpointable)."""

    begin: int
    whole: int

    @classmethod
    def of(cls, values: Tensor, begin: int, whole: int) -> SplitTensor:
        """``values``, (elements,), which are those from ``begin`` on of ``whole`` elements."""
        part = values.as_subclass(cls)
        part.begin, part.whole = begin, whole
        return part

    def size(self) -> torch.Size:  # type: ignore[override]
        """The whole tensor's, with which the file's is compared."""
        return torch.Size([self.whole])

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=torch.Size([self.begin]), sizes=self.as_subclass(Tensor).size())]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.as_subclass(Tensor)


class SavedState:
    """The state in a checkpoint's folder. It is data alone: safetensors and JSON."""

    def __init__(self, checkpoint: Path, rank: int) -> None:
        self.folder, self.rank = checkpoint / STATE, rank
        self.outline: Outline = json.loads((self.folder / OUTLINE).read_text(encoding="utf-8"))

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Reads tensors by key, in place: whole ones, a rank's DTensors, or a `SplitTensor`."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        if not tensors:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is .*uninitialized")
            # Each rank reads for itself what it lacks.
            load(tensors, storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)

    def read(self, room: Callable[[torch.Size, torch.dtype, bool], Tensor], outline: Outline = None) -> Any:
        """The nested state. ``room`` makes a tensor for a whole shape, in host RAM; it is told which are split."""
        targets: dict[str, Tensor] = {}

        def walk(value: Outline) -> Any:
            if not isinstance(value, dict):
                return value
            if "dict" in value:
                return {key: walk(inner) for key, inner in value["dict"]}
            if "list" in value:
                return [walk(inner) for inner in value["list"]]
            dtype = getattr(torch, value["dtype"])
            assert isinstance(dtype, torch.dtype), value
            key = _own(value["tensor"], self.rank) if value.get("own") else value["tensor"]
            targets[key] = room(torch.Size(value["shape"]), dtype, bool(value.get("split")))
            return targets[key]

        state = walk(self.outline if outline is None else outline)
        self.fill(targets)
        targets.clear()  # `walk` refers to itself, and would keep them until garbage is collected
        return state
