"""Hollow safetensors files: read by the library, on disk a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.rehearsal.hollow.tensor_files import TensorEntry, write_safetensors, write_shards

safetensors = pytest.importorskip("safetensors")

LARGE = TensorEntry("blocks.0.weight", "bf16", (5120, 5120 * 100))
TENSORS = [LARGE, TensorEntry("scale", "fp32", ()), TensorEntry("ids", "int64", (1, 77))]


def test_the_library_reads_names_shapes_and_types(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, TENSORS)
    with safetensors.safe_open(str(path), framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        assert {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()} == {
            "blocks.0.weight": ("BF16", (5120, 512000)),
            "scale": ("F32", ()),
            "ids": ("I64", (1, 77)),
        }
        assert file.get_tensor("ids").sum() == 0
        assert "hollow" in file.metadata()["vplan"]


def test_the_weights_are_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, TENSORS)
    status = path.stat()
    assert status.st_size > LARGE.size_bytes == 5120 * 5120 * 100 * 2
    assert status.st_blocks * 512 < 64 * 1024


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    with pytest.raises(FileExistsError):
        write_safetensors(path, TENSORS)
    assert path.read_bytes() == b"weights"


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = [TensorEntry(f"layer.{number}", "fp32", (250, 1000)) for number in range(5)]
    paths = write_shards(tmp_path, "model", tensors, 2_000_000)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [path.name for path in paths] == [*names, "model.safetensors.index.json"]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"]["total_size"] == 5_000_000
    assert [index["weight_map"][f"layer.{number}"] for number in range(5)] == [names[n] for n in (0, 0, 1, 1, 2)]


def test_what_fits_into_one_file_has_no_index(tmp_path: Path) -> None:
    write_shards(tmp_path, "model", TENSORS, 10**12)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
