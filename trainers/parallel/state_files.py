"""The files of a training state: each rank's shares of tensors as safetensors, and everything else as JSON.

The format is torch's distributed checkpoint in safetensors (``HuggingFaceStorageWriter``, ``save_distributed``): a
file's metadata says where in the whole tensor each of its shares begins. torch reads it, and splits the tensors for any
number of ranks. Its writer is not used: it assembles a whole file in RAM before it writes (filesystem.py,
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
"""A nested state as JSON: its plain values, and in place of each tensor what `_leaf` says of it."""


class Share(NamedTuple):
    """A part of a tensor of the state. The shares of all ranks under one key make up the whole tensor."""

    key: str
    values: Tensor
    """on any device"""
    begin: tuple[int, ...]
    """the indices of its first element in the whole"""
    is_copy: bool = False
    """whether its values are its own, so that nothing else changes them"""

    def copied(self) -> Share:
        """The share with its own copy of the values in host RAM; itself if it is a copy already."""
        if self.is_copy:
            return self
        copy = torch.empty(self.values.shape, dtype=self.values.dtype)
        return self._replace(values=copy.copy_(self.values.detach()), is_copy=True)


class FlatRun(NamedTuple):
    """In a state: a run of a tensor's flattened elements, which is how DeepSpeed splits."""

    values: Tensor
    """(elements,)"""
    begin: int
    is_copy: bool = False


class Own(NamedTuple):
    """In a state: a tensor that only this rank can use."""

    values: Tensor
    is_copy: bool = False


def taken_apart(state: Any, rank: int) -> tuple[Outline, list[Share]]:
    """The outline of a nested state, and this rank's shares of its tensors. A tensor that is not split is rank 0's.

    ``state``: dicts, lists, numbers and strings, with tensors (equal on all ranks), DTensors, `FlatRun` or `Own`.
    """
    shares: list[Share] = []

    def walk(value: Any, path: str) -> Outline:
        if isinstance(value, FlatRun):  # not in the outline: the engine knows its runs
            shares.append(Share(path, value.values, (value.begin,), value.is_copy))
            return None
        if isinstance(value, Own):
            shares.append(Share(_own(path, rank), value.values, (0,) * value.values.ndim, value.is_copy))
            return _leaf(path, value.values, own=True)
        if isinstance(value, Tensor):
            shares.extend(share_of(path, value, rank))
            return _leaf(path, value, split=_is_split(value))
        if isinstance(value, Mapping):  # keys are numbers or strings; JSON has strings only
            return {"dict": [[key, walk(inner, f"{path}/{key}")] for key, inner in value.items()]}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return {"list": [walk(inner, f"{path}/{number}") for number, inner in enumerate(value)]}
        assert value is None or isinstance(value, bool | int | float | str), (path, type(value))
        return value

    return walk(state, "optimizer"), shares


def share_of(key: str, value: Tensor, rank: int) -> list[Share]:
    """A rank's share of a tensor; none if another rank writes it. A whole tensor, equal on all ranks, is rank 0's. Of a
    tensor that is split in several equal copies, only the first copy counts."""
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
    """Takes the shares off the list, file by file: up to `STATE_FILE_BYTES`, or a single share. So their copies can be
    freed one file after another."""
    shares.reverse()
    while shares:
        file, nbytes = [shares.pop()], 0
        nbytes = file[0].values.nbytes
        while shares and nbytes + shares[-1].values.nbytes <= STATE_FILE_BYTES:
            file.append(shares.pop())
            nbytes += file[-1].values.nbytes
        yield file


def write_shares(path: Path, shares: list[Share]) -> None:
    """Writes shares as one file. They must be copies in host RAM."""
    begins = {share.key: {BEGINS: list(share.begin)} for share in shares}
    metadata = {SHARDING_INFO: json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({share.key: share.values for share in shares}, path, metadata=metadata)


class SplitTensor(Tensor):
    """A buffer for a run of a larger tensor's elements. It has torch's protocol for objects that a distributed
    checkpoint is read into (torch.distributed._checkpointable)."""

    begin: int
    whole: int

    @classmethod
    def of(cls, values: Tensor, begin: int, whole: int) -> SplitTensor:
        """``values``, (elements,): the elements from ``begin`` on, of a tensor of ``whole`` elements."""
        part = values.as_subclass(cls)
        part.begin, part.whole = begin, whole
        return part

    def size(self) -> torch.Size:  # type: ignore[override]
        """The whole tensor's size, which is compared with the file's."""
        return torch.Size([self.whole])

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=torch.Size([self.begin]), sizes=self.as_subclass(Tensor).size())]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.as_subclass(Tensor)


class SavedState:
    """The state in a checkpoint's folder. It is only data: safetensors and JSON."""

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
            # Each rank reads what it needs by itself.
            load(tensors, storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)

    def read(self, room: Callable[[torch.Size, torch.dtype, bool], Tensor], outline: Outline = None) -> Any:
        """Reads the nested state, or the part with this outline. ``room`` makes a tensor in host RAM from its whole
        shape, its dtype and whether it is split."""
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
        targets.clear()  # `walk` refers to itself, and would keep them until the garbage collector runs
        return state
