"""Weights by the headers of their files: what is not whole is refused, and no tensor is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.catalog import lookup
from planner.errors import VplanError
from planner.launch import single_file, weight_files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665a5ea\nsize 5676070424\n"


def write(path: Path, tensors: dict[str, int], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file of tensors with so many bytes each; its content."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, nbytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(end)
    path.write_bytes(content)
    return content


def refusal(path: Path) -> VplanError:
    with pytest.raises(VplanError) as raised:
        weight_files.check_file(path)
    assert str(path) in raised.value.message and "download the model again" in raised.value.fix
    return raised.value


def test_a_folder_in_a_model_s_own_format_is_told_by_that(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel"}')
    with pytest.raises(VplanError) as raised:
        weight_files.check_architecture(tmp_path, lookup.model("wan2.1-t2v-1.3b"))
    assert "holds a 'WanModel'" in raised.value.message and "diffusers format" in raised.value.fix
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(VplanError) as raised:
        weight_files.check_architecture(tmp_path, lookup.model("wan2.1-t2v-1.3b"))
    assert raised.value.fix == "pass the folder of the plan's model"


@pytest.mark.parametrize("tensors", [{}, {"a": 4}, {"b": 100, "a": 0, "c": 7}])
def test_a_whole_file_is_one_that_torch_could_load(tmp_path: Path, tensors: dict[str, int]) -> None:
    safetensors = pytest.importorskip("safetensors")
    content = write(tmp_path / "a.safetensors", tensors, {"format": "pt"})
    weight_files.check_file(tmp_path / "a.safetensors")
    assert sorted(name for name, _ in safetensors.deserialize(content)) == sorted(tensors)


def test_every_length_but_the_whole_one_is_refused_as_safetensors_refuses_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "a.safetensors"
    content = write(path, {"a": 5, "b": 3})
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert "is damaged" in refusal(path).message
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(content[:length])
    path.write_bytes(content + b"\0")
    assert f"it has {len(content) + 1:,} bytes, not the {len(content):,} of its header" in refusal(path).message


def test_a_header_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for text in (b"[]", b"7", b'{"a": {}}', b'{"a": {"data_offsets": []}}', b"{" * 100_000, b"\xff\xfe"):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        assert "its header cannot be read" in refusal(path).message
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    assert "is damaged" in refusal(path).message


def test_what_git_lfs_left_in_place_of_the_weights_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text(POINTER)
    assert "a pointer of Git LFS" in refusal(path).message and "git lfs pull" in refusal(path).fix


def test_the_one_file_of_a_transformer_is_looked_at_too(tmp_path: Path) -> None:
    path = tmp_path / "wan.safetensors"
    content = write(path, {"a": 5})
    assert single_file.check(str(path)) == path
    path.write_bytes(content[:-1])
    with pytest.raises(VplanError, match="is damaged"):
        single_file.check(str(path))
