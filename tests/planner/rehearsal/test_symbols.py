"""What a library wants of CUDA's, read from libraries that are compiled here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("elftools")

from planner.rehearsal.symbols import Wanted, defined_in, library_of, stem, wanted_by, wanted_by_all

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler (cc)")


def compiled(folder: Path, name: str, source: str, *options: str) -> Path:
    assert COMPILER
    text, made = folder / f"{name}.c", folder / name
    text.write_text(source)
    subprocess.run([COMPILER, "-w", "-fPIC", "-o", str(made), str(text), *options], check=True)
    return made


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A library that uses a runtime with symbol versions, as torch does."""
    script = tmp_path / "versions.map"
    script.write_text("libcudart.so.13 { global: *; };\n")
    options = ("-shared", "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}")
    runtime = compiled(tmp_path, "libcudart.so.13", "int cudaMalloc(void) { return 0; }", *options)
    source = """
        extern int cudaMalloc(void), cuMemAlloc_v2(void), cublasCreate_v2(void), custom(void);
        int ours(void) { return cudaMalloc() + cuMemAlloc_v2() + cublasCreate_v2() + custom(); }
    """
    return compiled(tmp_path, "user.so", source, "-shared", str(runtime))


@needs_compiler
def test_names_versions_and_libraries(user: Path) -> None:
    wanted = wanted_by(user)
    assert wanted.names == {"cudaMalloc": "libcudart.so.13", "cuMemAlloc_v2": "", "cublasCreate_v2": ""}
    assert wanted.libraries == {"libcudart.so.13"}
    assert wanted.cuda_major == 13


@needs_compiler
def test_a_library_for_another_cuda_is_left_out(user: Path) -> None:
    assert wanted_by_all([user], 13).names
    assert not wanted_by_all([user], 12).names
    assert wanted_by_all([user], None).names


@needs_compiler
def test_what_an_object_defines(tmp_path: Path) -> None:
    source = "extern int other(void); static int hidden; int one(void) { return other(); } int two;"
    assert defined_in(compiled(tmp_path, "made.o", source, "-c")) == {"one", "two"}


@pytest.mark.parametrize(
    "content", [b"", b"text", b"\x7fELF\x02", b"\x7fELF\x02" + bytes(200), b"\x7fELF\x01" + bytes(60)]
)
def test_a_damaged_file_wants_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.so"
    path.write_bytes(content)
    assert wanted_by(path) == Wanted()


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("cublasLtMatmul", "libcublasLt"),
        ("cublasGemmEx", "libcublas"),
        ("cusparseLtInit", "libcusparseLt"),
        ("cuMemAlloc_v2", "libcuda"),
        ("cudaMalloc", "libcudart"),
        ("__cudaRegisterFatBinary", "libcudart"),
        ("ncclAllReduce", "libnccl"),
        ("curandCreateGenerator", "libcurand"),
        ("custom", None),
        ("malloc", None),
    ],
)
def test_whose_function_it_is(name: str, library: str | None) -> None:
    assert library_of(name) == library


def test_a_copy_by_auditwheel_has_the_same_stem() -> None:
    assert stem("libcudart-9335f6a2.so.12") == stem("libcudart.so.13") == "libcudart"
    assert stem("libnvidia-ml.so.1") == "libnvidia-ml"
