"""The virtual GPU's libraries, compiled into a folder of the test's own."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("elftools")

from planner.errors import VplanError
from planner.rehearsal import cards
from planner.rehearsal.compiler import DRIVER, MONITOR, SOURCES, libraries_for, preload, stub_source, version_script
from planner.rehearsal.interpreter import Interpreter

BARE = Interpreter("python", {}, ())
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")


def with_torch(folder: Path, cuda: str) -> Interpreter:
    (folder / "version.py").write_text(
        f"__version__ = '2.13.0'\nfrom typing import Optional\ncuda: Optional[str] = {cuda}\n"
    )
    return Interpreter("python", {"torch": (folder,)}, ("nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux'",))


@needs_compiler
def test_two_builds_at_once_end_in_one_folder(tmp_path: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: libraries_for(BARE, tmp_path, said.append), range(2)))
    assert folders[0] == folders[1]
    assert [path.name for path in tmp_path.iterdir()] == [folders[0].name]
    assert preload(folders[0])[0].name == DRIVER
    assert {path.name for path in preload(folders[0])} == {DRIVER, MONITOR, "libcudart.so.13", "libnvrtc.so.13"}
    count = len(said)
    assert libraries_for(BARE, tmp_path, said.append) == folders[0]
    assert len(said) == count  # nothing was compiled


@needs_compiler
def test_versions_are_those_that_torch_requires(tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    runtime = ctypes.CDLL(str(libraries_for(with_torch(folder, "'12.4'"), tmp_path / "cache") / "libcudart.so.12"))
    version = ctypes.c_int()
    assert runtime.cudaRuntimeGetVersion(ctypes.byref(version)) == 0
    assert version.value == 12040
    assert with_torch(folder, "'12.4'").required_release("nvidia-cudnn") == (9, 20, 0, 48)


@needs_compiler
def test_the_table_is_as_the_c_code_has_it(tmp_path: Path) -> None:
    source, program = tmp_path / "size.c", tmp_path / "size"
    source.write_text(
        '#include "virtual_gpu.h"\n#include <stdio.h>\nint main(void) { printf("%zu", sizeof(struct table)); }'
    )
    subprocess.run(["cc", "-I", str(SOURCES), "-o", str(program), str(source)], check=True)
    size = int(subprocess.run([str(program)], capture_output=True, check=True).stdout)
    assert size == ctypes.sizeof(cards._Table)


@pytest.mark.parametrize(("cuda", "message"), [("None", "built without CUDA"), ("'11.8'", "CUDA 11.8")])
def test_a_torch_that_cannot_be_rehearsed(tmp_path: Path, cuda: str, message: str) -> None:
    with pytest.raises(VplanError, match=message):
        libraries_for(with_torch(tmp_path, cuda), tmp_path)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(VplanError, match="no C compiler") as error:
        libraries_for(BARE, tmp_path)
    assert "install" in error.value.fix


@needs_compiler
def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc --no-such-option")
    with pytest.raises(VplanError, match="failed") as error:
        libraries_for(BARE, tmp_path)
    assert error.value.exit_code == 4
    assert list(tmp_path.iterdir()) == []


def test_stubs_and_versions() -> None:
    assert "STUB(cudaOne)" in stub_source(["cudaOne"])
    assert version_script({"a": "", "b": ""}) == ""
    assert version_script({"a": "V1", "b": ""}) == "V1 { global: *; };\n"
    assert version_script({"a": "V1", "b": "V2"}) == "V1 { global: *; };\nV2 { global: b; };\n"
