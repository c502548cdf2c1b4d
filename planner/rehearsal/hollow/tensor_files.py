"""Checkpoint files without data: a true header, then a hole as large as the weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "fp8": "F8_E4M3", "int64": "I64", "bool": "BOOL"}
"""Our names to those of the safetensors format."""
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "bool": 1}
"""Bytes of one element."""
MARK = {"format": "pt", "vplan": "hollow: names and shapes without weights"}
"""In the header: what a file says that outlived its rehearsal."""


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    """a key of DTYPES"""
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """What it takes in a file."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


def write_safetensors(path: Path, tensors: Iterable[TensorEntry]) -> None:
    """A sparse safetensors file: 8 bytes of length, the header as JSON, a hole. Raises FileExistsError over a file.

    Format: huggingface/safetensors README, "Format".
    """
    header: dict[str, Any] = {"__metadata__": MARK}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        header[tensor.name] = entry
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def write_shards(folder: Path, stem: str, tensors: Sequence[TensorEntry], most_bytes: int) -> list[Path]:
    """One safetensors file `STEM.safetensors`, or shards of at most `most_bytes` and their index, as Hugging Face's
    `save_pretrained` cuts them."""
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.size_bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size_bytes
    if len(shards) == 1:
        path = folder / f"{stem}.safetensors"
        write_safetensors(path, tensors)
        return [path]
    files = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    weight_map = {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
    return write_indexed(folder, stem, tensors, weight_map)


def write_indexed(folder: Path, stem: str, tensors: Sequence[TensorEntry], weight_map: dict[str, str]) -> list[Path]:
    """The shards that an index names, and the index if it is not there."""
    files = dict.fromkeys(weight_map.values())
    for file in files:
        write_safetensors(folder / file, [tensor for tensor in tensors if weight_map[tensor.name] == file])
    paths = [folder / file for file in files]
    index = folder / f"{stem}.safetensors.index.json"
    if not os.path.lexists(index):
        total = sum(tensor.size_bytes for tensor in tensors)
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}), encoding="utf-8")
        paths.append(index)
    return paths
